"""Models of diffusers on regard's kernels: the same answers as with its own backend, and the same heads.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import copy
import enum
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.integrations import diffusers_registry

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install 'regard[diffusers]'")

from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0  # noqa: E402
from integrations import diffusers_models  # noqa: E402
from integrations.diffusers_models import PROCESSORS, REGISTRY, TEXT  # noqa: E402

import regard.integrations.diffusers as integration  # noqa: E402

SOURCE = Path(__file__).parents[2] / "src"
B, H, G, N, M, D = 2, 6, 3, 5, 7, 11


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """`set_attention_backend` sets the backend of the process: each test begins with diffusers' own."""
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(diffusers.AttentionBackendName("native"))


class Spy:
    """How often `attend` was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr("regard.integrations.sdpa.attend", self.attend)

    def attend(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return regard.attend(*args, **options)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=False)[0]


# Whole models


@pytest.mark.parametrize("name", [*REGISTRY, *PROCESSORS])
def test_the_same_answers_and_gradients(name: str, spy: Spy) -> None:
    model, inputs = diffusers_models.make(name)

    def both() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        out = run(model, inputs)
        out.square().mean().backward()
        return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    right, gradients = both()
    assert spy.calls == 0
    used = integration.use(model)
    assert used == integration.use(model)  # (twice is once)
    ours, ours_gradients = both()
    assert spy.calls >= len(used) > 0
    assert (ours - right).abs().max() < 1e-5 * right.abs().max()
    assert gradients.keys() == ours_gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert (ours_gradients[parameter] - gradient).abs().max() < 1e-4 * largest, parameter
    assert integration.release(model) == used
    calls = spy.calls
    assert torch.equal(run(model, inputs), right)
    assert spy.calls == calls
    assert integration.release(model) == []


@pytest.mark.parametrize("name", REGISTRY)
def test_by_the_ways_of_diffusers(name: str, spy: Spy) -> None:
    model, inputs = diffusers_models.make(name)
    with torch.no_grad():
        right = run(model, inputs)
        with diffusers.attention_backend("regard"):
            for_a_while = run(model, inputs)
        calls = spy.calls
        assert calls > 0
        assert torch.equal(run(model, inputs), right)
        assert spy.calls == calls
        model.set_attention_backend("regard")
        set_once = run(model, inputs)
        assert spy.calls == 2 * calls
    for out in (for_a_while, set_once):
        assert (out - right).abs().max() < 1e-5 * right.abs().max()
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_by_the_environment() -> None:
    code = """if True:
        import regard.integrations.diffusers, torch
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn
        from diffusers.utils import constants
        print(_AttentionBackendRegistry.get_active_backend()[1].__module__, constants.DIFFUSERS_ATTN_BACKEND)
        x = torch.randn(2, 5, 3, 7)
        right = dispatch_attention_fn(x, x, x, backend="native")
        print(torch.allclose(dispatch_attention_fn(x, x, x), right, atol=1e-6))
        """
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "DIFFUSERS_ATTN_BACKEND": "regard"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.split() == ["regard.integrations.diffusers", "regard", "True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_compiled(name: str) -> None:
    model, inputs = diffusers_models.make(name)
    right = run(model, inputs)
    integration.use(model)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(run(compiled, inputs), right, atol=1e-5, rtol=1e-4)


# What heads see


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sd3", "pixart", "unet"])
def test_watch_shows_the_same_heads_with_either(name: str) -> None:
    model, inputs = diffusers_models.make(name)
    records = []
    for ours in (False, True):
        if ours:
            integration.use(model)
        with regard.watch(model) as seen, torch.no_grad():
            run(model, inputs)
        records.append(seen)
    theirs, ours = records
    assert ours.layers == theirs.layers
    assert set(ours.layers) == {name for name, _ in integration._layers(model)}
    assert not ours.unseen
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.entropy, other.entropy, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ours", [False, True], ids=["native", "regard"])
@pytest.mark.parametrize(
    "name, layer, image",
    [
        ("flux", "transformer_blocks.0.attn", slice(TEXT, None)),  # text first
        ("flux", "single_transformer_blocks.0.attn", slice(TEXT, None)),
        ("sd3", "transformer_blocks.1.attn", slice(0, -TEXT)),  # the image first
    ],
)
def test_text_and_image_of_joint_attention(name: str, layer: str, image: slice, ours: bool) -> None:
    model, inputs = diffusers_models.make(name)
    if ours:
        integration.use(model)
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        run(model, inputs)
    record = seen[layer]
    n = record.shape[2]
    assert n == 15 + TEXT
    is_image = torch.zeros(n, dtype=torch.bool)
    is_image[image] = True
    blocks = regard.heads.joint_blocks(record, is_image)
    weights = torch.stack([record.weights(head=h, batch=None) for h in range(3)], 1).double()  # (B, H, N, N)
    for query, rows in (("text", ~is_image), ("image", is_image)):
        for key, columns in (("text", ~is_image), ("image", is_image)):
            right = weights[:, :, rows][..., columns].sum(-1).mean(-1)
            torch.testing.assert_close(blocks.mean(query, key), right, atol=1e-5, rtol=1e-4)


# The function


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "boolean (B, M)": lambda: torch.rand(B, M) > 0.3,
    "boolean (B, 1, 1, M)": lambda: torch.rand(B, 1, 1, M) > 0.3,
    "boolean (N, M)": lambda: torch.rand(N, M) > 0.3,
    "boolean (B, H, N, M)": lambda: torch.rand(B, H, N, M) > 0.3,
    "added (B, M)": lambda: torch.randn(B, M, dtype=torch.float64),
    "-10000 (B, 1, 1, M)": lambda: -1e4 * (torch.rand(B, 1, 1, M) > 0.7).double(),
    "added (B, H, N, M)": lambda: torch.randn(B, H, N, M, dtype=torch.float64),
}


@pytest.mark.parametrize("heads", [H, G])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_as_native_has_it(mask: str, heads: int) -> None:
    q = torch.randn(B, N, H, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, M, heads, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    attn_mask = MASKS[mask]()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask[..., 0] = True
    weight = torch.randn(B, N, H, D, dtype=torch.float64)
    results = []
    for backend in ("native", "regard"):
        out = attention_dispatch.dispatch_attention_fn(
            q, k, v, attn_mask=attn_mask, scale=0.7, enable_gqa=heads != H, backend=backend
        )
        results.append((out, *torch.autograd.grad(out, (q, k, v), weight)))
    for ours, right in zip(*reversed(results), strict=True):
        assert ours.shape == right.shape
        torch.testing.assert_close(ours, right)


def test_causal_and_the_log_sum_exp() -> None:
    q, k = torch.randn(B, N, H, D), torch.randn(B, M, H, D)
    right = attention_dispatch.dispatch_attention_fn(q, k, k, is_causal=True, backend="native")
    out, lse = attention_dispatch.dispatch_attention_fn(
        q, k, k, is_causal=True, backend="regard", attention_kwargs={"return_lse": True}
    )
    torch.testing.assert_close(out, right)
    scores = torch.einsum("bnhd,bmhd->bnhm", q, k) * D**-0.5
    hidden = torch.ones(N, M).triu(1).bool()[:, None]
    torch.testing.assert_close(lse, scores.masked_fill(hidden, -float("inf")).logsumexp(-1))


def test_dropout() -> None:
    x = torch.randn(B, N, H, D)
    torch.manual_seed(3)
    ours = integration.attention(x, x, x, dropout_p=0.3)
    torch.manual_seed(3)
    heads = x.transpose(1, 2)
    assert torch.equal(ours, regard.attend(heads, heads, heads, dropout=0.3).transpose(1, 2))


def test_what_it_does_not_know_is_refused() -> None:
    x = torch.randn(B, N, H, D)

    def dispatch(**options: Any) -> Any:
        return attention_dispatch.dispatch_attention_fn(x, x, x, backend="regard", **options)

    with pytest.raises(
        ValueError, match=r'attention backend "regard": expected arguments .* received window_size=tuple'
    ):
        dispatch(attention_kwargs={"window_size": (2, 2)})
    with pytest.raises(ValueError, match=r"received sinks=Tensor; remedy: model.set_attention_backend"):
        dispatch(attention_kwargs={"sinks": torch.zeros(H)})
    assert dispatch(attention_kwargs={"window_size": None}).shape == x.shape
    context = types.SimpleNamespace(context_parallel_config=object(), tensor_parallel_config=None)
    with pytest.raises(ValueError, match=r"expected all tokens in one process, received context parallelism; remedy"):
        dispatch(parallel_config=context)
    heads_only = types.SimpleNamespace(context_parallel_config=None, tensor_parallel_config=object())
    assert dispatch(parallel_config=heads_only).shape == x.shape
    with pytest.raises(ValueError, match=r"expected attn_mask or is_causal, received both"):
        dispatch(attn_mask=torch.ones(N, N, dtype=torch.bool), is_causal=True)
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    with pytest.raises(TypeError, match=r"expected attn_mask as a tensor, received BlockMask; remedy: .*flex"):
        dispatch(attn_mask=block)


# Processors, and what is no model of diffusers


def test_a_processor_around_another() -> None:
    model, inputs = diffusers_models.make("unet")
    right = run(model, inputs)
    model.set_attn_processor(integration.Processor(AttnProcessor2_0()))
    torch.testing.assert_close(run(model, inputs), right, atol=1e-5, rtol=1e-4)
    for processor in (integration.Processor(AttnProcessor2_0()),):
        assert repr(processor).startswith("Processor(<diffusers.")
        for other in (pickle.loads(pickle.dumps(processor)), copy.deepcopy(processor)):
            assert type(other) is type(processor)
            assert isinstance(other.processor, AttnProcessor2_0)


class WithAnOption:
    def __call__(self, attn: Any, hidden_states: Tensor, *, option: float = 1.0, **others: Any) -> Tensor:
        x = hidden_states[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)[:, 0] * option


def test_a_processor_gets_its_own_arguments() -> None:
    attention = diffusers.models.attention_processor.Attention(query_dim=12, heads=3, dim_head=4)
    x = torch.randn(2, 5, 12)
    right = attention.set_processor(WithAnOption()) or attention(x, option=3.0)
    attention.set_processor(integration.Processor(WithAnOption()))
    torch.testing.assert_close(attention(x, option=3.0), right)


class WithWeights(nn.Module):
    def forward(self, attn: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_processors_that_cannot_be_served() -> None:
    with pytest.raises(TypeError, match=r"processor: expected one without weights of its own, received WithWeights"):
        integration.Processor(WithWeights())
    for wrong, name in ((AttnProcessor(), "AttnProcessor"), (AttnProcessor2_0, "AttnProcessor2_0"), (3, "int")):
        with pytest.raises(TypeError, match=rf"one that calls scaled_dot_product_attention, received {name}; remedy"):
            integration.Processor(wrong)


def test_models_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match=r"expected a model of diffusers .* received Linear with no attention process"):
        integration.use(nn.Linear(2, 3))
    model, _ = diffusers_models.make("unet")
    model.set_attn_processor(AttnProcessor())
    with pytest.raises(
        ValueError, match=r"received UNet2DConditionModel with AttnProcessor; remedy: .*AttnProcessor2_0"
    ):
        integration.use(model)
    with pytest.raises(
        TypeError, match=r"model: expected a torch.nn.Module, received str; remedy: of a pipeline, pipe"
    ):
        integration.use("flux")  # type: ignore[arg-type]


# The registry


def a_registry(**changes: Any) -> Any:
    """A module as diffusers has it, with other parts."""

    class Names(str, enum.Enum):
        NATIVE = "native"
        FLASH = "flash"

    class Registry:
        _backends: dict[Any, Any] = {}
        _constraints: dict[Any, Any] = {}
        _supported_arg_names: dict[Any, Any] = {}
        _active_backend = Names.NATIVE

        @classmethod
        def register(cls, backend: Any) -> Any:
            def add(function: Any) -> Any:
                cls._backends[backend] = function
                return function

            return add

        @classmethod
        def set_active_backend(cls, backend: Any) -> None:
            cls._active_backend = backend

    def function(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any) -> None:
        pass

    Registry._backends[Names.NATIVE] = changes.pop("function", function)
    return types.SimpleNamespace(**{"AttentionBackendName": Names, "_AttentionBackendRegistry": Registry} | changes)


def test_a_name_comes_and_goes() -> None:
    module = a_registry()
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    before = list(names), dict(names.__members__), {key for key in dir(names) if not key.startswith("__")}
    member = diffusers_registry.register(module, "regard", integration.attention)
    assert member is names("regard") is names["REGARD"] is names.REGARD
    assert member == "regard"
    assert (member.name, member.value) == ("REGARD", "regard")
    assert list(names) == [*before[0], member]
    assert "regard" in registry._backends
    assert "anything" in registry._supported_arg_names[member]
    assert copy.deepcopy(member) is member
    assert diffusers_registry.register(module, "regard", integration.attention) is member
    registry.set_active_backend(member)
    for _ in range(2):
        diffusers_registry.unregister(module, "regard")
        assert (list(names), dict(names.__members__)) == before[:2]
        assert {key for key in dir(names) if not key.startswith("__")} == before[2]
        assert registry._active_backend is names.NATIVE
        assert list(registry._backends) == [names.NATIVE]
        with pytest.raises(ValueError, match="'regard' is not a valid"):
            names("regard")


def test_the_name_in_diffusers_comes_and_goes() -> None:
    model, inputs = diffusers_models.make("flux")
    integration.unregister()
    try:
        with pytest.raises(ValueError, match="must be one of"):
            model.set_attention_backend("regard")
        with pytest.raises(ValueError, match="regard is not registered"), diffusers.attention_backend("regard"):
            pass
    finally:
        integration._MEMBER = diffusers_registry.register(attention_dispatch, "regard", integration.attention)
    model.set_attention_backend("regard")
    run(model, inputs)


def no_query(key: Any, value: Any) -> None:
    pass


class Plain:
    NATIVE = "native"


class NoTables:
    _backends = ()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"AttentionBackendName": Plain}, r"names of backends as an enumeration of strings, .* with <class .*Plain"),
        ({"AttentionBackendName": None}, r"names of backends as an enumeration of strings, .* with None"),
        ({"_AttentionBackendRegistry": NoTables}, r"a registry of functions by these names, .* with <class .*NoTables"),
        (
            {"function": no_query},
            r"functions of query, key, value, .* with one without attn_mask, dropout_p, .*, query",
        ),
    ],
    ids=["names", "no names", "registry", "functions"],
)
def test_an_unknown_layout_is_told_in_words(changes: dict[str, Any], words: str) -> None:
    module = a_registry(**changes)
    with pytest.raises(
        ImportError, match=rf"integrations.diffusers: expected a diffusers that has {words}.*; remedy: pip"
    ):
        diffusers_registry.register(module, "regard", integration.attention)


def test_a_registry_that_does_not_keep_what_it_is_given() -> None:
    module = a_registry()
    module._AttentionBackendRegistry.register = classmethod(lambda cls, backend: lambda function: function).__get__(0)
    with pytest.raises(ImportError, match="expected a diffusers that has a backend that is found by its name"):
        diffusers_registry.register(module, "regard", integration.attention)
    assert [member.value for member in module.AttentionBackendName] == ["native", "flash"]


def test_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.utils.constants", None)
    with pytest.raises(
        ImportError, match=r"expected diffusers 0.42 or newer, .*; remedy: pip install 'regard\[diffusers"
    ):
        diffusers_registry.load_registry("regard")
