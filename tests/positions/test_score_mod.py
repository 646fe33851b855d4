"""Functions of scores beside the same written out in full, in float64: values, gradients, and all that combines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import masks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard.attention import prepare
from regard.kernels import available, blockwise, reference
from regard.masks import Causal, Tile, Window
from regard.positions import Alibi, Bias, RelativeBias, ScoreMod

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-11, "atol": 1e-11}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Temperature(ScoreMod):
    """Each head has a temperature that falls with the distance: scores * (1 + weight * log(1 + distance))."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # (1, H)

    def block(self, tile: Tile, scores: Tensor) -> Tensor:
        apart = (tile.q_positions[:, None, :, None] - tile.k_positions[:, None, None, :]).abs()
        return scores * (1 + self.weight[:, :, None, None] * apart.to(scores.dtype).log1p())


class Squash(ScoreMod):
    """A bent line, steeper above 0, with a number that is not learned."""

    fields = ("weight", "reach")

    def __init__(self, weight: Tensor, reach: float) -> None:
        self.weight, self.reach = weight, reach

    def block(self, tile: Tile, scores: Tensor) -> Tensor:
        return self.reach * torch.tanh(scores / self.reach) + self.weight[:, :, None, None] * scores.square()


class LogDistance(ScoreMod):
    """NaN for keys ahead: only under a causal mask."""

    def __init__(self, heads: int) -> None:
        self.weight = torch.zeros(1, heads, dtype=torch.float64)

    def block(self, tile: Tile, scores: Tensor) -> Tensor:
        behind = tile.q_positions[:, None, :, None] - tile.k_positions[:, None, None, :] + 1
        return scores / behind.to(scores.dtype).log().sqrt()


def written_out(
    q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, dense: Tensor, squash: Tensor, **o: Any
) -> Tensor:
    """temperature, then a dense bias, then squash; by hand."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    s = q @ k.mT / math.sqrt(q.shape[3])
    if "softcap" in o:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    positions, key_positions = o["positions"], o["key_positions"]
    apart = (positions[:, :, None] - key_positions[:, None, :]).abs().double()[:, None]
    s = s * (1 + temperature[:, :, None, None] * torch.log(1 + apart)) + dense
    s = 2.0 * torch.tanh(s / 2.0) + squash[:, :, None, None] * s * s
    visible = torch.ones_like(s, dtype=torch.bool) if o["visible"] is None else o["visible"].expand_as(s)
    weights = (s - s.amax().detach()).exp() * visible
    total = weights.sum(-1, keepdim=True)
    if "sinks" in o:
        total = total + (o["sinks"][:, None, None] - s.amax().detach()).exp()
    p = weights / total.masked_fill(total == 0, 1.0)
    return p @ v


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from([1, 3, 16, 64]), st.sampled_from([1, 3, 16, 64]))
def test_blockwise_and_reference_are_the_formula(data: Any, height: int, width: int) -> None:
    draw = data.draw
    batch, groups, shared = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    heads, n, m = groups * shared, draw(st.sampled_from([1, 5, 13])), draw(st.sampled_from([1, 7, 19]))
    q, k, v = normal(batch, heads, n, 3), normal(batch, groups, m, 3, seed=1), normal(batch, groups, m, 5, seed=2)
    temperature, squash = normal(1, heads, seed=3) * 0.3, normal(1, heads, seed=4) * 0.1
    dense = normal(*draw(st.sampled_from([(1, 1, n, m), (batch, heads, n, m), (1, heads, 1, m)])), seed=5)
    leaves = [q, k, v, temperature, dense, squash]
    options: dict[str, Any] = {"key_positions": torch.arange(m)[None]}
    options["positions"] = torch.arange(n).flip(0)[None] + torch.arange(batch)[:, None]
    if draw(st.booleans()):
        options["softcap"] = 1.5
    if draw(st.booleans()):
        options["sinks"] = normal(heads, seed=6)
        leaves.append(options["sinks"])
    mask = draw(masks(batch, heads, n, m)) if draw(st.booleans()) else None
    for leaf in leaves:
        leaf.requires_grad_()
    call = prepare(q, k, v, mask=mask, bias=[Temperature(temperature), dense, Squash(squash, 2.0)], **options)
    visible = None if mask is None else mask.block(call.whole())
    expected = written_out(*leaves[:6], visible=visible, **options)
    ours = [reference.forward(call), blockwise.differentiable_forward(call, height, width)]
    direction = normal(*expected.shape, seed=8)
    grads = torch.autograd.grad((expected * direction).sum(), leaves)
    for out, _ in ours:
        torch.testing.assert_close(out, expected, **TIGHT)
        for a, b in zip(torch.autograd.grad((out * direction).sum(), leaves), grads, strict=True):
            torch.testing.assert_close(a, b, **TIGHT)
    torch.testing.assert_close(ours[1][1], ours[0][1], **TIGHT)


@pytest.mark.parametrize("kernel", ["blockwise", "reference"])
def test_gradcheck(kernel: str) -> None:
    q, k, v = normal(1, 2, 3, 2), normal(1, 1, 4, 2, seed=1), normal(1, 1, 4, 3, seed=2)
    temperature, squash = normal(1, 2, seed=3), normal(1, 2, seed=4)
    for x in (leaves := (q, k, v, temperature, squash)):
        x.requires_grad_()

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        bias = [Temperature(x[3]), Squash(x[4], 2.0)]
        return regard.attend(*x[:3], bias=bias, mask=Causal(), softcap=2.0, kernel=kernel, return_lse=True)

    assert torch.autograd.gradcheck(run, leaves)


def test_the_order_of_the_list_counts() -> None:
    """A function sees what stands before it in the list, and not what stands after."""
    q, k = normal(1, 2, 3, 4), normal(1, 2, 5, 4, seed=1)
    one, bend = torch.ones(1, 1, 3, 5, dtype=torch.float64), Squash(torch.zeros(1, 2, dtype=torch.float64), 2.0)
    plain = regard.attention_weights(q, k, stage="scaled")
    before = regard.attention_weights(q, k, bias=[one, bend], stage="biased")
    torch.testing.assert_close(before, 2.0 * torch.tanh((plain + 1) / 2.0))
    after = regard.attention_weights(q, k, bias=[bend, one], stage="biased")
    torch.testing.assert_close(after, 2.0 * torch.tanh(plain / 2.0) + 1)


@pytest.mark.parametrize("kernel", ["blockwise", "reference"])
def test_what_it_gives_for_hidden_pairs_does_not_count(kernel: str) -> None:
    """NaN ahead of the query, inf at itself: neither in the output nor in a gradient."""
    leaves = [normal(2, 2, 70, 4, seed=i).requires_grad_() for i in range(3)]
    mask = Causal() & ~Window(1)
    out = regard.attend(*leaves, mask=mask, bias=LogDistance(2), kernel=kernel)
    assert out.isfinite().all()
    assert (out[:, :, 0] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
    q, k, v = leaves
    behind = torch.arange(70)[:, None] - torch.arange(70) + 1
    s = q @ k.mT / 2.0 / behind.clamp(min=2).double().log().sqrt()
    visible = mask.dense(70)
    p = s.masked_fill(~visible, -1e300).softmax(-1) * visible
    torch.testing.assert_close(out, p @ v, **TIGHT)
    for a, b in zip(grads, torch.autograd.grad((p @ v).square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def test_with_dropout_the_same_weights_are_dropped_in_both() -> None:
    leaves = [normal(2, 4, 67, 4, seed=1), normal(2, 2, 67, 4, seed=2), normal(2, 2, 67, 4, seed=3), normal(1, 4)]
    for x in leaves:
        x.requires_grad_()
    results = []
    for kernel in ("blockwise", "reference"):
        generator = torch.Generator().manual_seed(7)
        options: dict[str, Any] = {"mask": Causal(), "dropout": 0.3, "generator": generator, "kernel": kernel}
        out = regard.attend(*leaves[:3], bias=[Alibi(4), Temperature(leaves[3])], **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, **TIGHT)


@pytest.mark.of_cpu("the reasons are those of a CPU")
def test_other_kernels_say_why_not() -> None:
    q = torch.randn(1, 2, 300, 4)
    bias = Temperature(torch.zeros(1, 2))
    words = "it adds to scores, and cannot change them by a function (positions.ScoreMod)"
    said = regard.explain(q, q, q, bias=bias).splitlines()
    assert f"fused: no, {words}" in said
    assert "blockwise: chosen" in said
    if "native" in available():
        assert f"native: no, {words}" in said
        with pytest.raises(ValueError, match=r"kernel 'native': expected a call that it can serve.*cannot change them"):
            regard.attend(q, q, q, bias=bias, kernel="native")


def test_with_a_cache_in_a_layer() -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pace = nn.Parameter(normal(6) * 0.1)

        def as_bias(self) -> Bias:
            return Temperature(self.pace[None])

    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(24, num_heads=6, num_kv_heads=2).double().eval()
    x, encoding, cache = normal(2, 11, 24), Encoding(), regard.KVCache()
    whole = layer(x, mask=Causal(), bias=encoding)
    with torch.no_grad():
        pieces = [layer(part, mask=Causal(), bias=encoding, cache=cache) for part in x.split([7, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **TIGHT)
    whole.square().sum().backward()
    assert encoding.pace.grad is not None
    assert encoding.pace.grad.abs().min() > 0


def test_measures_and_watch_see_the_changed_scores() -> None:
    q, k, v = normal(1, 4, 70, 4), normal(1, 2, 70, 4, seed=1), normal(1, 2, 70, 4, seed=2)
    options: dict[str, Any] = {"mask": Causal(), "bias": Temperature(normal(1, 4, seed=3))}
    weights = regard.attention_weights(q, k, **options)
    found = regard.measure(q, k, v, measures=["entropy", "received"], **options)
    torch.testing.assert_close(found.entropy, -torch.special.xlogy(weights, weights).sum(-1), **TIGHT)
    torch.testing.assert_close(found.received, weights.sum(2), **TIGHT)
    torch.testing.assert_close(found.output, weights @ v.repeat_interleave(2, 1), **TIGHT)

    class Model(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return regard.attend(q, k, v, **options)

    model = Model()
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        out = model(q)
    torch.testing.assert_close(out, found.output, **TIGHT)
    torch.testing.assert_close(seen[0].entropy, found.entropy, **TIGHT)
    torch.testing.assert_close(seen[0].weights(head=1, rows=slice(3, 9), batch=0), weights[0, 1, 3:9], **TIGHT)


def test_merged_from_parts_of_the_keys() -> None:
    """The positions of a part are its own: key_positions says where its keys stand."""
    q, k, v = normal(1, 2, 7, 4), normal(1, 2, 13, 4, seed=1), normal(1, 2, 13, 4, seed=2)
    bias, positions = Temperature(normal(1, 2, seed=3)), torch.arange(6, 13)
    whole = regard.attend(q, k, v, bias=bias)
    parts = []
    for a, b in ((0, 4), (4, 13)):
        options = {"positions": positions, "key_positions": torch.arange(a, b)}
        parts.append(regard.attend(q, k[:, :, a:b], v[:, :, a:b], bias=bias, return_lse=True, **options))
    torch.testing.assert_close(regard.merge(*zip(*parts, strict=True))[0], whole, **TIGHT)


def test_a_part_of_a_call_keeps_where_its_tokens_stand() -> None:
    class Absolute(ScoreMod):
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def block(self, tile: Tile, scores: Tensor) -> Tensor:
            return scores * (1 + tile.k_positions[:, None, None, :].to(scores.dtype))

    q = normal(1, 2, 13, 4)
    for bias in (Absolute(torch.zeros(1, 2)), [Absolute(torch.zeros(1, 2)), RelativeBias(2).double()]):
        call = prepare(q, q, q, mask=Causal() & Window(9), bias=bias)
        rows, cols = slice(3, 11), slice(2, 9)
        part = call.part(q[:, :, rows], q[:, :, cols], q[:, :, cols], slice(0, 2), rows, cols)
        torch.testing.assert_close(reference.scores(part), reference.scores(call)[:, :, rows, cols])


def run_all(q: Tensor, k: Tensor, v: Tensor, pace: Tensor) -> Tensor:
    bias = [Temperature(pace), Squash(pace * 0.1, 2.0)]
    return regard.attend(q, k, v, mask=Causal(), bias=bias, kernel="blockwise")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    leaves = [normal(2, 4, 9, 4, seed=1), normal(2, 2, 9, 4, seed=2), normal(2, 2, 9, 4, seed=3), normal(1, 4)]
    for x in leaves:
        x.requires_grad_()
    compiled = torch.compile(run_all, fullgraph=True, backend=backend)
    results = []
    for run in (compiled, run_all):
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, **TIGHT)


def test_gradients_per_sample_under_torch_func() -> None:
    q, k, v, pace = normal(3, 2, 4, 5, 3), normal(3, 2, 2, 5, 3, seed=1), normal(3, 2, 2, 5, 3, seed=2), normal(1, 4)

    def loss(pace: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run_all(q, k, v, pace).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1))
    each = torch.func.vmap(grad, in_dims=(None, 0, 0, 0))(pace, q, k, v)
    for i in range(3):
        alone = grad(pace, q[i], k[i], v[i])
        torch.testing.assert_close(each[0][i], alone[0], **TIGHT)
        torch.testing.assert_close(each[1][i], alone[1], **TIGHT)
    leaf = pace.clone().requires_grad_()
    (eager,) = torch.autograd.grad(loss(leaf, q[0], k[0], v[0]), leaf)
    torch.testing.assert_close(each[0][0], eager, **TIGHT)


def test_in_inference_mode_and_without_gradient_of_the_weight() -> None:
    q, pace = normal(1, 4, 9, 4), normal(1, 4)
    with torch.inference_mode():
        out = run_all(q, q[:, :2], q[:, :2], pace)
    learns = q.clone().requires_grad_()
    again = run_all(learns, learns[:, :2], learns[:, :2], pace)
    torch.testing.assert_close(out, again, **TIGHT)
    (ours,) = torch.autograd.grad(again.sum(), learns)
    bias = [Temperature(pace), Squash(pace * 0.1, 2.0)]
    other = regard.attend(learns, learns[:, :2], learns[:, :2], mask=Causal(), bias=bias, kernel="reference")
    torch.testing.assert_close(ours, torch.autograd.grad(other.sum(), learns)[0], **TIGHT)


def test_bfloat16_is_changed_in_float32() -> None:
    q, pace = torch.randn(1, 2, 70, 8).bfloat16(), torch.ones(1, 2).bfloat16()
    ours = regard.attend(q, q, q, bias=Temperature(pace), kernel="blockwise")
    exact = regard.attend(q.double(), q.double(), q.double(), bias=Temperature(pace.double()), kernel="reference")
    torch.testing.assert_close(ours, exact.bfloat16(), rtol=2e-2, atol=2e-2)


def test_memory_of_the_backward_pass_is_that_of_a_strip() -> None:
    """No tensor as large as the plane of all pairs is given to a function, forward or backward."""
    largest = 0

    class Spy(Temperature):
        def block(self, tile: Tile, scores: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, scores.numel())
            return super().block(tile, scores)

    q = torch.randn(1, 2, 2048, 4, requires_grad=True)
    regard.attend(q, q, q, bias=Spy(torch.zeros(1, 2)), kernel="blockwise").sum().backward()
    assert 0 < largest <= 2048 * 2048 // 4


def test_wrong_answers_are_refused_in_words() -> None:
    class Returns(ScoreMod):
        def __init__(self, what: Any) -> None:
            self.weight, self.what = torch.zeros(1, 2), what

        def block(self, tile: Tile, scores: Tensor) -> Tensor:
            return self.what(scores)

    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"Returns.block: expected the changed scores.*received NoneType"):
        regard.attend(q, q, q, bias=Returns(lambda s: None), kernel="reference")
    with pytest.raises(TypeError, match=r"received dtype torch\.bool"):
        regard.attend(q, q, q, bias=Returns(lambda s: s > 0), kernel="blockwise")
    with pytest.raises(ValueError, match=r"the shape and device of the scores, \(1, 2, 3, 3\) on .*, received shape"):
        regard.attend(q, q, q, bias=Returns(lambda s: s[..., :1]), kernel="reference")
    with pytest.raises(ValueError, match="bias Temperature: expected 2 heads, received 3"):
        regard.attend(q, q, q, bias=Temperature(torch.zeros(1, 3)))
    with pytest.raises(TypeError, match=r"Returns.weight: expected a tensor"):
        regard.attend(q, q, q, bias=object.__new__(Returns))
    with pytest.raises(ValueError, match="bias Temperature: expected something that is added to the scores"):
        regard.positions.Saturated(Temperature(torch.zeros(1, 2)), 1, 3)
