"""Plans: a repeated call gives what the usual way gives, bit for bit, and is refused, observed and freed as it is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.attention import prepare
from regard.kernels import Call, native, observed_by, plans
from regard.kernels import native_library as library
from regard.kernels.run import run
from regard.masks import Causal, Documents, Hide, Keep, Padding, Prefix, Window

pytestmark = pytest.mark.skipif(library.load() is None, reason="plans are of the native kernel")


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    library.isa()  # (read at the first call; it is part of the key)
    plans.clear()
    yield
    plans.clear()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each `attend`, whether a plan gave its output."""
    answers: list[bool] = []
    repeat = plans.repeat

    def noted(*arguments: Any) -> Any:
        out, key = repeat(*arguments)
        answers.append(out is not None)
        return out, key

    monkeypatch.setattr(plans, "repeat", noted)
    return answers


def usual(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto", **options: Any) -> Tensor:
    """Without a plan."""
    return run(prepare(q, k, v, **options), kernel)


def heads(n: int = 5, m: int | None = None, *, h: int = 4, g: int = 2, d: int = 8, **more: Any) -> tuple[Tensor, ...]:
    m = n if m is None else m
    return torch.randn(2, h, n, d, **more), torch.randn(2, g, m, d, **more), torch.randn(2, g, m, d, **more)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


LENGTHS = torch.tensor([3, 5])
NAMED: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "plain": lambda n, m: {},
    "causal": lambda n, m: {"mask": Causal()},
    "window": lambda n, m: {"mask": Window(2)},
    "wider window": lambda n, m: {"mask": Window(before=3, after=1)},
    "causal and window": lambda n, m: {"mask": Causal() & Window(2)},
    "padding": lambda n, m: {"mask": Padding(lengths=LENGTHS)},
    "causal and padding": lambda n, m: {"mask": Causal() & Padding(lengths=LENGTHS)},
    "two paddings": lambda n, m: {"mask": Padding(lengths=LENGTHS) & Padding(lengths=LENGTHS.flip(0))},
    "flags": lambda n, m: {"mask": Padding(keep=torch.arange(m) % 3 < LENGTHS[:, None])},
    "tensor": lambda n, m: {"mask": torch.rand(n, m) < 0.7},
    "keep": lambda n, m: {"mask": Keep(torch.rand(2, 1, n, m) < 0.7)},
    "hide": lambda n, m: {"mask": Hide(torch.rand(n, m) < 0.3)},
    "documents": lambda n, m: {"mask": Documents(torch.arange(n) // 2, torch.arange(m) // 2)},
    "prefix": lambda n, m: {"mask": Causal() | Prefix(2)},
    "scale": lambda n, m: {"scale": 0.3},
    "whole scale": lambda n, m: {"scale": 1},
    "softcap": lambda n, m: {"softcap": 2.0},
    "sinks": lambda n, m: {"sinks": torch.randn(4)},
    "half sinks": lambda n, m: {"sinks": torch.randn(4, dtype=torch.float16)},
    "strided sinks": lambda n, m: {"sinks": torch.randn(8)[::2]},
    "positions": lambda n, m: {"positions": 1, "mask": Causal()},
    "other positions": lambda n, m: {"positions": torch.arange(n) * 2, "mask": Causal()},
    "bias": lambda n, m: {"bias": torch.randn(n, m)},
    "nothing": lambda n, m: {"mask": None, "bias": None, "dropout": 0.0},
}
HAVE_NONE = {"two paddings", "flags", "hide", "documents", "prefix", "half sinks", "other positions", "bias"}


@pytest.mark.parametrize("name", NAMED)
def test_a_repeated_call_has_a_plan_and_gives_the_same(name: str, planned: list[bool]) -> None:
    options = NAMED[name](5, 7)
    for _ in range(3):
        q, k, v = heads(5, 7)
        assert equal(regard.attend(q, k, v, **options), usual(q, k, v, **options))
    assert planned[-1] is (name not in HAVE_NONE)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "heads side by side": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "columns": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand_as(x),
    "negated": lambda x: torch._neg_view(x.neg()),
}
CALLS = st.tuples(
    st.sampled_from([(5, 5), (5, 7), (1, 7), (5, 1)]),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from(list(NAMED)),
    st.sampled_from(["plain", "no_grad", "inference", "gradient", "autocast", "one thread", "reference"]),
)


@given(st.lists(CALLS, min_size=2, max_size=8), st.integers(0, 2**31))
def test_calls_of_all_kinds_in_any_order(calls: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    plans.clear()
    threads = torch.get_num_threads()
    for (n, m), layout, dtype, name, mode in [call for call in calls for _ in range(2)]:
        q, k, v = (LAYOUTS[layout](x) for x in heads(n, m, dtype=dtype))
        options = NAMED[name](n, m)
        context: Any = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        }.get(mode, torch.enable_grad)()
        if mode == "gradient" and layout != "negated":
            q.requires_grad_(), v.requires_grad_()
        torch.set_num_threads(1 if mode == "one thread" else threads)
        try:
            with context:
                kernel = "reference" if mode == "reference" else "auto"
                out, expected = (f(q, k, v, kernel=kernel, **options) for f in (regard.attend, usual))
            assert equal(out, expected)
            assert out.requires_grad == expected.requires_grad
            if out.requires_grad:
                down = torch.randn_like(out)
                ours, theirs = (torch.autograd.grad(x, (q, v), down) for x in (out, expected))
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        finally:
            torch.set_num_threads(threads)


def test_numbers_that_change_in_place_are_seen(planned: list[bool]) -> None:
    q, k, v = heads(5)
    lengths, keep, sinks = torch.tensor([3, 5]), torch.ones(5, 5, dtype=torch.bool), torch.zeros(4)
    shared = sinks.numpy()
    cases: list[tuple[dict[str, Any], Callable[[], object]]] = [
        ({"mask": Padding(lengths=lengths)}, lambda: lengths.fill_(2)),
        ({"mask": Causal() & Padding(lengths=lengths)}, lambda: lengths.data.fill_(4)),  # torch counts no change
        ({"mask": keep}, lambda: keep[:, 0].fill_(False)),
        ({"mask": Keep(keep)}, lambda: keep.data[:, 1].fill_(False)),
        ({"sinks": sinks}, lambda: shared.fill(3.0)),
    ]
    for options, change in cases:
        before = [regard.attend(q, k, v, **options) for _ in range(3)][-1]
        change()
        after = regard.attend(q, k, v, **options)
        assert planned[-1]
        assert equal(after, usual(q, k, v, **options))
        assert not torch.equal(before, after)


def test_a_mask_that_is_given_other_numbers() -> None:
    q, k, v = heads(5)
    mask, padding = Window(2), Padding(lengths=torch.tensor([3, 5]))
    for _ in range(3):
        regard.attend(q, k, v, mask=mask), regard.attend(q, k, v, mask=padding)
    mask.before, padding.lengths = 3, torch.tensor([1, 2])
    assert equal(regard.attend(q, k, v, mask=mask), usual(q, k, v, mask=Window(4)))
    assert equal(regard.attend(q, k, v, mask=padding), usual(q, k, v, mask=Padding(lengths=torch.tensor([1, 2]))))


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a width": lambda q, k, v: regard.attend(q, k[..., :-1], v),
    "no tensor": lambda q, k, v: regard.attend(q, k, None),  # type: ignore[arg-type]
    "a dtype": lambda q, k, v: regard.attend(q, k, v.double()),
    "axes": lambda q, k, v: regard.attend(q[0], k, v),
    "a device": lambda q, k, v: regard.attend(q, k, v.to("meta")),
    "a sparse tensor": lambda q, k, v: regard.attend(q, k, v.to_sparse()),
    "a name": lambda q, k, v: regard.attend(q, k, v, masks=None),  # type: ignore[call-arg]
    "a kernel": lambda q, k, v: regard.attend(q, k, v, kernel="fast"),
    "a list of kernels": lambda q, k, v: regard.attend(q, k, v, kernel=["native"]),  # type: ignore[arg-type]
    "True for a scale": lambda q, k, v: regard.attend(q, k, v, scale=True),
    "a scale that is none": lambda q, k, v: regard.attend(q, k, v, scale=float("nan")),
    "a softcap": lambda q, k, v: regard.attend(q, k, v, softcap=-1.0),
    "1.0 for a position": lambda q, k, v: regard.attend(q, k, v, positions=1.0),  # type: ignore[arg-type]
    "a far position": lambda q, k, v: regard.attend(q, k, v, positions=2**62),
    "sinks": lambda q, k, v: regard.attend(q, k, v, sinks=torch.zeros(3)),
    "whole sinks": lambda q, k, v: regard.attend(q, k, v, sinks=torch.zeros(4, dtype=torch.int64)),
    "a mask of numbers": lambda q, k, v: regard.attend(q, k, v, mask=torch.ones(5, 5)),
    "a short mask": lambda q, k, v: regard.attend(q, k, v, mask=torch.ones(5, 4, dtype=torch.bool)),
    "lengths": lambda q, k, v: regard.attend(q, k, v, mask=Padding(lengths=torch.tensor([1, 2, 3]))),
    "dropout": lambda q, k, v: regard.attend(q, k, v, dropout=2.0),
    "a generator": lambda q, k, v: regard.attend(q, k, v, dropout=0.5, generator=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_after_right_ones_too(wrong: Callable[..., Any]) -> None:
    q, k, v = heads(5)
    with pytest.raises(Exception) as before:  # noqa: PT011 (it is compared below)
        wrong(q, k, v)
    for options in ({}, {"scale": 1}, {"scale": 1.0}, {"positions": 1}, {"sinks": torch.zeros(4)}, {"dropout": 0.0}):
        for _ in range(3):
            regard.attend(q, k, v, **options)
            regard.attend(q, k, v, mask=torch.ones(5, 5, dtype=torch.bool))
    for _ in range(2):
        with pytest.raises(before.type) as after:
            wrong(q, k, v)
        assert str(after.value) == str(before.value)


def test_no_tensor_is_kept_alive() -> None:
    q, k, v = heads(5, requires_grad=True)
    tensors = [*heads(5), torch.tensor([3, 5]), torch.zeros(4)]
    for _ in range(3):
        out = regard.attend(*tensors[:3], mask=Padding(lengths=tensors[3]), sinks=tensors[4])
        learning = regard.attend(q, k, v, mask=Causal() & Padding(lengths=tensors[3]))
    alive = [weakref.ref(x) for x in (*tensors, q, k, v, out, learning)]
    del tensors, q, k, v, out, learning
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_there_are_at_most_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST", 4)
    for n in range(1, 12):
        q, k, v = heads(n)
        for _ in range(2):
            assert equal(regard.attend(q, k, v), usual(q, k, v))
        assert len(plans._plans) <= 4


def test_threads_share_a_plan(planned: list[bool]) -> None:
    inputs = [heads(6) for _ in range(8)]
    expected = [usual(q, k, v, mask=Causal()) for q, k, v in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            if not torch.equal(regard.attend(*inputs[i], mask=Causal()), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(planned) > 1500


class Noting:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attention(self, call: Call, compute: Callable[[], Tensor], kernel: str) -> Tensor:
        self.calls.append(call)
        return compute() * 2


def test_observers_see_each_call(planned: list[bool]) -> None:
    q, k, v = heads(5)
    plain = [regard.attend(q, k, v) for _ in range(3)][-1]
    observer = Noting()
    with observed_by(observer):
        assert equal(regard.attend(q, k, v), plain * 2)
        regard.attend(q, k, v)
    assert len(observer.calls) == 2
    assert equal(regard.attend(q, k, v), plain)
    assert planned == [False, True, True, False, False, True]


def test_watch_and_ablate_see_each_call() -> None:
    layer, x = regard.MultiHeadAttention(16, 4).eval(), torch.randn(2, 5, 16)
    model = nn.Sequential(layer)
    with torch.no_grad():
        plain = [model(x) for _ in range(3)][-1]
        for _ in range(2):
            for exact in (True, False):
                with regard.watch(model, exact=exact) as seen:
                    torch.testing.assert_close(model(x), plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
                assert len(seen) == 1
            with regard.ablate(model, {"0": [1]}):
                assert not torch.allclose(model(x), plain)
            assert torch.equal(model(x), plain)


class CountFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is regard.attend
        return func(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "regard" in str(func)
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_whoever_must_see_a_call_sees_it(planned: list[bool]) -> None:
    q, k, v = heads(5)
    plain = [regard.attend(q, k, v) for _ in range(3)][-1]
    with CountFunctions() as functions:
        assert torch.equal(regard.attend(q, k, v), plain)
    with CountOperators() as operators:
        assert torch.equal(regard.attend(q, k, v), plain)
    assert functions.count == operators.count == 1
    assert isinstance(regard.attend(q.as_subclass(Subclass), k, v), Subclass)
    many = torch.func.vmap(regard.attend)(*(x[None] for x in (q, k, v)))
    torch.testing.assert_close(many[0], plain)
    for function in (torch.func.grad, torch.func.jacrev):
        gradient = function(lambda q: regard.attend(q, k, v).sum())(q)
        torch.testing.assert_close(gradient, torch.func.grad(lambda q: usual(q, k, v).sum())(q))
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attend(q, k, v).dtype is torch.bfloat16
    assert sum(planned) == 3  # two before, and one within the function mode, after it had seen the call
    assert torch.equal(regard.attend(q, k, v), plain)
    assert sum(planned) == 4


@pytest.mark.slow
def test_compiled_and_plain_calls_in_turns() -> None:
    q, k, v = heads(5)
    compiled = torch.compile(lambda q, k, v: regard.attend(q, k, v, mask=Causal()) + 1, fullgraph=True)
    for n in (5, 6, 5, 6):
        q, k, v = heads(n)
        for _ in range(2):
            torch.testing.assert_close(compiled(q, k, v), regard.attend(q, k, v, mask=Causal()) + 1)


def test_another_library_or_instruction_set(monkeypatch: pytest.MonkeyPatch, planned: list[bool]) -> None:
    q, k, v = heads(5)
    for _ in range(3):
        regard.attend(q, k, v, kernel="native")
    portable = library.INSTRUCTION_SETS.index("portable")
    monkeypatch.setattr(library, "instruction_set", 0 if library.isa() == portable else portable)
    assert equal(regard.attend(q, k, v, kernel="native"), usual(q, k, v, "native"))
    assert not planned[-1]
    monkeypatch.setattr(library, "_found", (None, "it is gone"))
    with pytest.raises(ValueError, match="it is gone"):
        regard.attend(q, k, v, kernel="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_plan(dtype: torch.dtype, planned: list[bool]) -> None:
    """First derivatives, within autocast's backward pass too; second ones are refused as always."""
    q, k, v = (x.to(dtype).requires_grad_() for x in heads(5))
    down = torch.randn(2, 4, 5, 8).to(dtype)
    expected = torch.autograd.grad(usual(q, k, v, mask=Causal()), (q, k, v), down)
    for _ in range(3):
        out = regard.attend(q, k, v, mask=Causal())
        with torch.autocast("cpu", torch.bfloat16):
            gradients = torch.autograd.grad(out, (q, k, v), down)
        assert all(equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert planned[-1]
    (gradient,) = torch.autograd.grad(regard.attend(q, k, v, mask=Causal()).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()
    frozen = regard.attend(q.detach(), k, v.detach(), mask=Causal())
    (gradient,) = torch.autograd.grad(frozen, k, down)
    assert equal(gradient, expected[1])


@pytest.mark.parametrize("masks", ["padding", "keep", "causal and padding"])
@pytest.mark.parametrize("threads_change", [False, True])
def test_the_mask_lives_until_the_backward_pass(masks: str, threads_change: bool, planned: list[bool]) -> None:
    """Its tensors are in a plan by their addresses; the graph has them."""

    def mask() -> regard.masks.Mask:
        padding = Padding(lengths=torch.tensor([67, 41]))
        keep = Keep(torch.rand(2, 1, 67, 67, generator=torch.Generator().manual_seed(0)) > 0.3)
        return {"padding": padding, "keep": keep, "causal and padding": Causal() & padding}[masks]

    q, k, v = heads(67, requires_grad=True)
    down, threads = torch.randn(2, 4, 67, 8), torch.get_num_threads()
    expected = torch.autograd.grad(usual(q, k, v, mask=mask()), (q, k, v), down)
    first = mask()
    try:
        torch.set_num_threads(threads + threads_change)
        regard.attend(q, k, v, mask=first)
        out = regard.attend(q, k, v, mask=first)
    finally:
        torch.set_num_threads(threads)
    assert planned[-1]
    del first
    gc.collect()
    others = [mask().tensors() for _ in range(8)]  # into the memory of the one that would be gone
    for tensors in others:
        for x in tensors:
            x.zero_()
    gradients = torch.autograd.grad(out, (q, k, v), down)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_sinks(frozen: bool, planned: list[bool]) -> None:
    q, k, v = heads(5, requires_grad=True)
    sinks, down = torch.randn(4, requires_grad=not frozen), torch.randn(2, 4, 5, 8)
    learned = (q, k, v) if frozen else (q, k, v, sinks)
    expected = torch.autograd.grad(usual(q, k, v, mask=Causal(), sinks=sinks), learned, down)
    for _ in range(3):
        out = regard.attend(q, k, v, mask=Causal(), sinks=sinks)
        gradients = torch.autograd.grad(out, learned, down)
        assert all(equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert planned == [False, True, True]
    (gradient,) = torch.autograd.grad(regard.attend(q, k, v, mask=Causal(), sinks=sinks), learned[-1:], down)
    assert equal(gradient, expected[-1])
    with torch.no_grad():
        sinks.add_(1)  # as an optimiser does
    assert equal(regard.attend(q, k, v, mask=Causal(), sinks=sinks), usual(q, k, v, mask=Causal(), sinks=sinks))
    with checkpoint.set_checkpoint_early_stop(False):
        out = checkpoint.checkpoint(regard.attend, q, k, v, mask=Causal(), sinks=sinks, use_reentrant=False)
    plans.clear()
    again = torch.autograd.grad(out, learned, down)
    right = torch.autograd.grad(usual(q, k, v, mask=Causal(), sinks=sinks), learned, down)
    assert all(equal(a, b) for a, b in zip(again, right, strict=True))
    (gradient,) = torch.autograd.grad(
        regard.attend(q, k, v, mask=Causal(), sinks=sinks).sum(), learned[-1:], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_sinks_that_a_checkpoint_computes_again(planned: list[bool]) -> None:
    """Those of the forward pass are gone by then, and others may be in their memory."""
    q, k, v = heads(5, requires_grad=True)
    base = torch.randn(4, requires_grad=True)

    def attend(base: Tensor) -> Tensor:
        return regard.attend(q, k, v, mask=Causal(), sinks=base * 2.0)

    expected = torch.autograd.grad(usual(q, k, v, mask=Causal(), sinks=base * 2.0).sum(), (q, k, v, base))
    for _ in range(30):
        out = checkpoint.checkpoint(attend, base, use_reentrant=False)
        others = [torch.full((4,), 7.0) for _ in range(50)]
        gradients = torch.autograd.grad(out.sum(), (q, k, v, base))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        del others
    assert any(planned)


@pytest.mark.parametrize("mask", [Causal(), Padding(lengths=torch.tensor([3, 5]))], ids=["causal", "padding"])
def test_saved_tensors_that_come_back_in_other_strides(mask: regard.masks.Mask, planned: list[bool]) -> None:
    """As copies from a file do."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in heads(5))
    expected = torch.autograd.grad(usual(q, k, v, mask=mask).sum(), (q, k, v))
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
        ):
            out = regard.attend(q, k, v, mask=mask)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert planned[-1]


def test_sinks_alone_have_gradients() -> None:
    q, k, v = heads(5)
    sinks = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(usual(q, k, v, sinks=sinks).sum(), sinks)
    for _ in range(3):
        assert all(map(equal, torch.autograd.grad(regard.attend(q, k, v, sinks=sinks).sum(), sinks), expected))


def test_a_tensor_as_mask_has_no_plan_where_gradients_are_wanted(planned: list[bool]) -> None:
    q, k, v = heads(5, requires_grad=True)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    for _ in range(2):
        out = regard.attend(q, k, v, mask=visible)
    assert planned == [False, False]
    expected = usual(q, k, v, mask=visible)
    assert all(map(equal, torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))))


def test_a_checkpoint_may_compute_again_by_a_plan(planned: list[bool]) -> None:
    q, k, v = heads(5, requires_grad=True)
    with checkpoint.set_checkpoint_early_stop(False):
        out = checkpoint.checkpoint(regard.attend, q, k, v, use_reentrant=False)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert planned == [False, True]
    assert equal(gradient, torch.autograd.grad(usual(q, k, v).sum(), q)[0])


def test_the_number_of_threads_in_the_backward_pass() -> None:
    q, k, v = heads(70, requires_grad=True)
    threads = torch.get_num_threads()
    expected = torch.autograd.grad(usual(q, k, v).sum(), (q, k, v))
    try:
        torch.set_num_threads(threads + 1)
        for _ in range(2):
            out = regard.attend(q, k, v)
    finally:
        torch.set_num_threads(threads)
    assert all(equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True))


def test_a_view_with_negated_signs() -> None:
    """Its numbers in memory are others: a mark says that they count with the other sign."""
    q, k, v = heads(5)
    sinks = torch.randn(4)
    expected = regard.attend(q, k, v, sinks=sinks)
    for _ in range(3):
        negated = [torch._neg_view(x.neg()) for x in (q, k, v, sinks)]
        assert all(x.is_neg() for x in negated)
        assert torch.equal(regard.attend(*negated[:3], sinks=negated[3], kernel=native.name), expected)
