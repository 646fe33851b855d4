"""Shared by the kernel tests: random calls of every kind, plain PyTorch beside them, and the rule between the two.

The rule (`assert_accurate`): a kernel's error against float64 is at most twice that of plain PyTorch, in the same
dtype, on the same input; or a few roundings of the terms that are summed up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.attention import prepare
from regard.kernels import Call, fused, reference
from regard.masks import Blocks, Causal, Chunk, Documents, Hide, Keep, Mask, Padding, Prefix, Tree, Window
from regard.positions import Alibi, RelativeBias


@dataclass
class Case:
    """One attention, in float64: tensors, options, and the leaves that get a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def to(self, dtype: torch.dtype, strides: str = "plain") -> Case:
        """The same in another dtype, laid out in memory in another way; fresh leaves."""

        def leaf(x: Tensor) -> Tensor:
            return _laid_out(x.detach().to(dtype), strides).requires_grad_()

        options = dict(self.options)
        if "sinks" in options:
            options["sinks"] = options["sinks"].detach().to(dtype).requires_grad_()
        if "bias" in options:
            options["bias"] = [_bias_to(b, dtype) for b in options["bias"]]
        return Case(leaf(self.q), leaf(self.k), leaf(self.v), options, self.seed)

    def leaves(self) -> list[Tensor]:
        biases = [b.weight if isinstance(b, RelativeBias) else b for b in self.options.get("bias", [])]
        sinks = [self.options["sinks"]] if "sinks" in self.options else []
        return [self.q, self.k, self.v, *sinks, *(b for b in biases if isinstance(b, Tensor))]

    def call(self) -> Call:
        options = dict(self.options)
        if options.get("dropout"):
            options["generator"] = torch.Generator().manual_seed(self.seed)
        return prepare(self.q, self.k, self.v, **options)

    def attend(self, kernel: str) -> Tensor:
        options = dict(self.options)
        if options.get("dropout"):
            options["generator"] = torch.Generator().manual_seed(self.seed)
        return regard.attend(self.q, self.k, self.v, kernel=kernel, **options)

    def with_gradients(self, out: Tensor, lse: Tensor | None = None) -> list[Tensor]:
        """The output and the gradients of a fixed function of it (and of lse, where it is given and finite)."""
        loss = (out * _direction(out)).sum()
        if lse is not None:
            loss = loss + torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).sum() * 0.5
        leaves = self.leaves()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))
        return [out.detach(), *zeros]


def _direction(out: Tensor) -> Tensor:
    """What the output is multiplied by before it is summed up to a loss."""
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)


def _laid_out(x: Tensor, strides: str) -> Tensor:
    if strides == "transposed":  # as a layer makes it: (B, N, H, D) seen as (B, H, N, D)
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "gaps":  # a slice of something wider
        return torch.cat([x, torch.full_like(x, 7.0)], dim=-1)[..., : x.shape[-1]]
    if strides == "columns":  # last stride is not 1
        return x.mT.contiguous().mT
    return x.contiguous()


def _bias_to(bias: Any, dtype: torch.dtype) -> Any:
    if isinstance(bias, Tensor):
        return bias.detach().to(dtype).requires_grad_()
    if isinstance(bias, RelativeBias):
        heads, other = bias.weight.shape[1], None
        other = RelativeBias(heads, num_buckets=bias.weight.shape[0], max_distance=bias.max_distance)
        other.weight.data = bias.weight.data.clone()
        return other.to(dtype)
    return bias


def plain(case: Case) -> Tensor:
    """Attention as people write it in plain PyTorch, in the dtype of the inputs: no care for precision."""
    call = case.call()
    q, k, v = call.q, call.k, call.v
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.mT * call.scale
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    tile = call.whole()
    for bias in case.options.get("bias", []):
        s = s + (bias if isinstance(bias, Tensor) else bias.block(tile.q_positions, tile.k_positions).to(s.dtype))
    if call.mask is not None:
        s = s.masked_fill(~call.mask.block(tile), torch.finfo(s.dtype).min)
    if call.sinks is not None:
        s = torch.cat([s, call.sinks[:, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)
    p = p[..., :-1] if call.sinks is not None else p
    if call.mask is not None:
        p = p * call.mask.block(tile)
    if call.dropout is not None:
        n, m = call.shape[2:]
        p = p * call.dropout.block(slice(None), slice(None), slice(0, n), slice(0, m), p.dtype) * call.dropout.kept
    return p @ v


def exact(case: Case) -> list[Tensor]:
    """Output and gradients of `reference` in float64, from the numbers as the case's dtype holds them."""
    precise = case.to(torch.float64)
    return precise.with_gradients(reference.output(precise.call()))


def terms(case: Case, lse: bool = False) -> list[Tensor]:
    """How large the terms are that the output and each gradient sum up, in float64: the same formulas with absolute
    values everywhere, so that nothing cancels. A sum is exact to a few roundings of this, and not of its own size: with
    one visible key the gradient of k is 0, the difference of two equal numbers.

    A weight is the exponential of a score, so it carries the roundings of its own score and of its row's log-sum-exp:
    as many as these scores' terms are large. `lse`: with the gradient of the log-sum-exp, as `with_gradients` adds it.
    """
    precise = case.to(torch.float64)
    call = precise.call()
    _, heads, n, m = call.shape
    shared = heads // call.k.shape[1]
    q, k, v = (x.detach().abs() for x in (call.q, call.k, call.v))
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    tile = call.whole()
    biases = [bias.evaluate(tile) for bias in call.biases]
    score = q @ k.mT * abs(call.scale) + sum(b.detach().abs() for b in biases)
    with torch.no_grad():
        p, log = reference.weights(call)
        sink = torch.zeros(1) if call.sinks is None else (call.sinks[:, :, None] - log).exp()
        slope = 1.0 if call.softcap is None else 1 + (reference.scores(call, "capped") / call.softcap).square()
    p_rounded = p * (1 + score + (p * score).sum(-1, keepdim=True))
    kept = 1.0
    if call.dropout is not None:
        everything = (slice(None), slice(None), slice(0, n), slice(0, m))
        kept = call.dropout.block(*everything, torch.float64) * call.dropout.kept
    g = _direction(call.q.new_empty(*call.q.shape[:3], v.shape[3])).abs()
    delta = (g * (p * kept @ v)).sum(-1, keepdim=True) + (0.5 if lse else 0.0)
    ds = p_rounded * (kept * (g @ v.mT) + delta)
    d_biases = [
        torch.autograd.grad((b.expand(ds.shape) * ds).sum(), leaf, retain_graph=True)[0]
        for b, leaf in zip(biases, (b.weight for b in call.biases), strict=True)
        if leaf.requires_grad
    ]
    d_sinks = [] if call.sinks is None else [(sink * delta[..., 0]).sum((0, 2))]
    ds = ds * slope * abs(call.scale)

    def by_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, shared)).sum(2)

    out = p_rounded * kept @ v
    leaves = [ds @ k, by_group(ds.mT @ q), by_group((p_rounded * kept).mT @ g), *d_sinks, *d_biases]
    return [out, *(x.reshape(leaf.shape) for x, leaf in zip(leaves, precise.leaves(), strict=True))]


ROUNDINGS = 8  # of the terms summed, that any order of summing may leave behind (3 are the most that were seen)


def assert_accurate(case: Case, ours: list[Tensor], what: str, lse: bool = False) -> None:
    """The rule for every number of the output and the gradients: its error is at most `ROUNDINGS` roundings of the
    terms that it sums up, or twice the largest that plain PyTorch makes."""
    precise = case.to(torch.float64)
    truth = precise.with_gradients(*reference.forward(precise.call())[: 1 + lse])
    theirs = truth if lse else case.with_gradients(plain(case))
    names = ["output", *(f"gradient {i}" for i in range(len(ours) - 1))]
    for name, mine, peer, right, size in zip(names, ours, theirs, truth, terms(case, lse), strict=True):
        assert mine.dtype == case.q.dtype or name != "output"
        limits = torch.finfo(mine.dtype)
        rounding = limits.eps * (size + limits.smallest_normal)  # below the smallest normal number steps are even
        error, theirs_worst = (mine.double() - right).abs(), _largest(peer.double() - right)
        wrong = ~(error <= (ROUNDINGS * rounding).clamp(min=2 * theirs_worst))
        assert not wrong.any(), (
            f"{what}: {name} is off by {error[wrong].max():.3g}, {(error / rounding)[wrong].max():.3g} roundings of "
            f"what it sums up; plain PyTorch by {theirs_worst:.3g}"
        )


TYPICAL = 1.0  # rounding of the terms summed, over the root of their number: errors of either sign do not add up


def assert_typically_accurate(case: Case, ours: list[Tensor], what: str) -> None:
    """The same for the root of the mean square, which does not hang on a single number: for larger cases."""
    few = min(case.q.shape[2], case.k.shape[2])  # terms, of the shortest of the sums
    every = zip(ours, case.with_gradients(plain(case)), exact(case), terms(case), strict=True)
    for i, (mine, peer, right, size) in enumerate(every):
        if right.numel() < 100:  # (the sinks: a few numbers are luck)
            continue
        error, theirs, summed = (x.square().mean().sqrt().item() for x in (mine - right, peer - right, size))
        allowed = max(2 * theirs, TYPICAL * few**-0.5 * torch.finfo(mine.dtype).eps * summed)
        assert error <= allowed, f"{what}: {i} is off by {error:.3g}, plain PyTorch by {theirs:.3g}"


def _largest(x: Tensor) -> float:
    assert not x.isnan().any()
    return x.abs().max().item() if x.numel() else 0.0


SIZES = st.sampled_from([1, 2, 3, 5, 7, 11, 13])


@st.composite
def masks(draw: Any, batch: int, heads: int, n: int, m: int, depth: int = 2) -> Mask:
    """A mask of any kind, or a composition of some."""
    if depth and draw(st.booleans()):
        kind = draw(st.sampled_from(["and", "or", "not"]))
        left = draw(masks(batch, heads, n, m, depth - 1))
        if kind == "not":
            return ~left
        right = draw(masks(batch, heads, n, m, depth - 1))
        return left & right if kind == "and" else left | right
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=seed)

    def booleans(*shape: int) -> Tensor:
        return torch.rand(shape, generator=seed) < 0.6

    size = draw(st.integers(1, 8))
    made: dict[str, Any] = {
        "causal": lambda: Causal(),
        "window": lambda: Window(size),
        "both ways": lambda: Window(before=size - 1, after=size // 2),
        "prefix": lambda: Prefix(size),
        "prefixes": lambda: Prefix(integers(m + 1, batch)),
        "lengths": lambda: Padding(lengths=integers(m + 1, batch)),
        "keep": lambda: Padding(keep=booleans(batch, m)),
        "documents": lambda: Documents(integers(3, batch, n), integers(3, batch, m)),
        "packed": lambda: Documents(integers(3, n).sort().values, integers(3, m).sort().values),
        "dense": lambda: Keep(booleans(n, m)),
        "per item": lambda: Hide(booleans(batch, n, m)),
        "per head": lambda: Keep(booleans(1, heads, n, m)),
        "full": lambda: Keep(booleans(batch, heads, n, m)),
        "chunk": lambda: Chunk(size),
        "chunk from a start": lambda: Chunk(size, start=1),
        "blocks": lambda: Blocks(integers(-(-m // 3) + 1, batch, 1, -(-n // size), 2) - 1, 3, size),
        "blocks per head": lambda: Blocks(integers(-(-m // 2) + 1, batch, heads, n, 3) - 1, 2, 1),
    }
    if n <= m:  # queries are drafts, which are among the keys
        made["tree"] = lambda: Tree(
            integers(m, 1 if size % 2 else batch, max(n, m // 2)) % torch.arange(1, max(n, m // 2) + 1) - 1
        )
    return made[draw(st.sampled_from(sorted(made)))]()


@st.composite
def cases(draw: Any, *, simple: bool = False) -> Case:
    """A call of any kind in float64; `simple`: only what torch's own fused kernel can serve."""
    batch, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    heads = groups * (1 if simple and not fused.GROUPS_ON_CPU else draw(st.sampled_from([1, 2, 3])))
    n, m, d = draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 2, 5, 8]))
    e = d if simple else draw(st.sampled_from([1, 3, d]))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["mask"] = draw(masks(batch, heads, n, m))
    if draw(st.booleans()):
        options["positions"] = torch.randint(0, 9, draw(st.sampled_from([(n,), (batch, n)])), generator=generator)
    if draw(st.booleans()):
        options["key_positions"] = torch.randint(0, 9, draw(st.sampled_from([(m,), (batch, m)])), generator=generator)
        if n > m and "positions" not in options:
            options["positions"] = torch.arange(n)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, 1.0]))
    if not simple:
        if draw(st.booleans()):
            options["softcap"] = draw(st.sampled_from([0.7, 3.0]))
        if draw(st.booleans()):
            options["sinks"] = normal(heads)
        if draw(st.booleans()):
            options["dropout"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        if draw(st.booleans()):
            shapes = [(1, 1, n, m), (batch, heads, n, m), (1, heads, 1, m), (batch, 1, n, 1), (1, 1, 1, 1)]
            options["bias"] = [normal(*draw(st.sampled_from(shapes)))]
            if draw(st.booleans()):
                relative = RelativeBias(heads, num_buckets=8, max_distance=9)
                relative.weight.data = torch.randn(8, heads, generator=generator)
                options["bias"] += [relative.double(), Alibi(heads)]
    q, k, v = normal(batch, heads, n, d), normal(batch, groups, m, d), normal(batch, groups, m, e)
    return Case(q, k, v, options, seed)
