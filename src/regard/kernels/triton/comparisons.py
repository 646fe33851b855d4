"""The comparisons of the self-check: small calls of every feature, by these kernels and by `reference` in float64, on
the same device. What is allowed is what rounding in the call's own dtype explains; a wrong mask or a forgotten product
is far beyond.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.kernels import reference
from regard.kernels.call import Call
from regard.kernels.dropout import Dropout
from regard.masks import And, Causal, Documents, Keep, Mask, Padding, Window
from regard.measures import Crop, Heatmap, Links, Measure, MeasureRun, Offsets, Pairs, Plane, as_measures
from regard.positions import Alibi, DenseBias, RelativeBias

__all__ = ["Comparison", "every"]

# Of the largest number of a result. (tf32 in the place of float32 is off by 1e-3.)
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
MEASURES = ("entropy", "peak", "distance", "offset", "received", "on_first", Offsets(2, 1), Heatmap(3, 5), Links(3))


@dataclass
class Comparison:
    """One call, and what is compared: "gradients" (with output and log-sum-exp) or "statistics"."""

    name: str
    call: Call
    what: str

    def wrong(self) -> str | None:
        """What is wrong, in words; None where nothing is. A kernel that does not compile or run is wrong, too."""
        try:
            compare = _gradients if self.what == "gradients" else _statistics
            return compare(self.call, ALLOWED[self.call.q.dtype])
        except Exception as error:  # (whatever a compiler or a driver raises)
            return (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            )


def every(device: torch.device) -> Iterator[Comparison]:
    """All comparisons on a device. In the interpreter sizes are smaller, and widths and dtypes fewer."""
    quick = device.type == "cpu"
    n, m = (19, 37) if quick else (197, 331)
    for name, options in _features(n, m, device).items():
        for what in ("gradients", "statistics"):
            yield Comparison(f"{name}, {what}", _call(device, torch.float32, n, m, 24, 40, options), what)
    dtypes = [torch.bfloat16] if quick else [torch.float32, torch.bfloat16, torch.float16]
    for dtype in dtypes:
        for width in (16,) if quick else (16, 64, 80, 128, 192, 256):
            for name in ("plain", "causal", "everything"):
                options = _features(n, m, device)[name]
                call = _call(device, dtype, n, m, width, width, options)
                yield Comparison(f"{name}, {dtype}, width {width}", call, "gradients")
                yield Comparison(f"{name}, {dtype}, width {width}, statistics", call, "statistics")
    for queries in (1, 3):
        for name in ("causal", "everything"):
            keys = 150 if quick else 2111
            options = _features(queries, keys, device)[name]
            call = _call(device, torch.float32, queries, keys, 32, 32, options)
            yield Comparison(f"{name}, {queries} queries", call, "gradients")
            yield Comparison(f"{name}, {queries} queries, statistics", call, "statistics")


def _features(n: int, m: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Options of calls, by name. Masks are functions of sizes alone, so that every run compares the same."""
    i, j = torch.arange(n, device=device), torch.arange(m, device=device)
    pairs = (i[:, None] * 7 + j * 3) % 5 > 0
    dense = torch.sin(i[:, None] * 0.7 + j * 1.3)[None, None]
    relative = RelativeBias(4, num_buckets=8, max_distance=40).to(device)
    with torch.no_grad():
        relative.weight.copy_(torch.cos(torch.arange(32, device=device)).view(8, 4))
    documents = Documents((i + m - n) // 29, j // 29)
    return {
        "plain": {},
        "causal": {"mask": Causal()},
        "window": {"mask": And(Causal(), Window(13))},
        "both ways": {"mask": Window(before=9, after=11)},
        "lengths": {"mask": Padding(lengths=torch.tensor([m, m // 3], device=device))},
        "holes": {"mask": Padding(keep=((j % 7 > 1)[None] & (torch.arange(2, device=device)[:, None] < 2)))},
        "documents": {"mask": And(Causal(), documents)},
        "dense": {"mask": Keep(pairs)},
        "bias": {"biases": (DenseBias(dense.requires_grad_()),)},
        "distances": {"mask": Causal(), "biases": (relative.as_bias(), Alibi(4).to(device).as_bias())},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.linspace(-1, 2, 4, device=device)[None].requires_grad_()},
        "dropout": {"dropout": 0.3},
        "everything": {
            "mask": And(And(Causal(), documents), Keep(pairs)),
            "biases": (DenseBias(dense.detach().clone().requires_grad_()),),
            "softcap": 3.0,
            "sinks": torch.linspace(-1, 2, 4, device=device)[None].requires_grad_(),
            "dropout": 0.3,
        },
    }


def _call(device: torch.device, dtype: torch.dtype, n: int, m: int, d: int, e: int, options: dict[str, Any]) -> Call:
    """A call of two items, four query heads and two kv heads."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(heads: int, rows: int, width: int) -> Tensor:
        x = torch.randn(2, rows, heads, width, generator=generator, device="cpu").to(device, dtype)
        return x.transpose(1, 2).requires_grad_()

    options = dict(options)
    mask: Mask | None = options.get("mask")
    if mask is not None:
        mask.check(2, 4, n, m)
    if "dropout" in options:
        options["dropout"] = Dropout.of(options["dropout"], torch.tensor([5], device=device), 2, 4, n, m)
    return Call(normal(4, n, d), normal(2, m, d), normal(2, m, e), d**-0.5, m - n, **options)


def _in_float64(call: Call) -> Call:
    """The same call, with leaves of its own."""

    def precise(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_(x.requires_grad)

    return call.with_learned([precise(x) for x in call.learned()])


def _gradients(call: Call, allowed: float) -> str | None:
    """Output, log-sum-exp and the gradients of a function of both; twice, for the bits must be the same."""
    from regard.kernels import triton

    ours, again = (_results(triton.forward, call) for _ in range(2))
    right = _results(reference.forward, _in_float64(call))
    for name in right:
        wrong = _difference(ours[name], right[name], allowed)
        if wrong is not None:
            return f"{name} {wrong}"
        if not torch.equal(ours[name], again[name]):
            return f"{name} differs from run to run"
    return None


def _results(forward: Callable[[Call], tuple[Tensor, Tensor]], call: Call) -> dict[str, Tensor]:
    out, lse = forward(call)
    direction = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
    loss = (out * direction).sum() + 0.5 * lse[lse.isfinite()].sum().to(out.dtype)
    leaves = [x for x in call.learned() if x.requires_grad]
    grads = torch.autograd.grad(loss, leaves)
    names = [
        "q",
        "k",
        "v",
        *(["sinks"] if call.sinks is not None else []),
        *(f"bias {i}" for i in range(len(call.biases))),
    ]
    learned = [name for name, x in zip(names, call.learned(), strict=True) if x.requires_grad]
    named = {f"gradient of {name}": grad for name, grad in zip(learned, grads, strict=True)}
    return {"output": out.detach(), "log-sum-exp": lse.detach(), **named}


def _difference(ours: Tensor, right: Tensor, allowed: float) -> str | None:
    """In words, where two tensors differ by more than is allowed of the largest number."""
    finite = right.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(ours[~finite].double(), right[~finite].double()):
        return "is not finite where it should be, or finite where it should not"
    if not finite.any():
        return None
    off = (ours[finite].double() - right[finite]).abs().max().item()
    limit = allowed * max(right[finite].abs().max().item(), 1e-2)
    return None if off <= limit else f"is off by {off:.2g} (allowed: {limit:.2g})"


def _statistics(call: Call, allowed: float) -> str | None:
    """Every statistic, of the same numbers in float64."""
    from regard.kernels import triton

    with torch.no_grad():
        plain = replace(call, dropout=None).detached()
        n, m = call.shape[2:]
        pairs = Pairs((torch.arange(n, device=call.q.device) * 5 % m)[:, None])
        measures: list[Measure] = [*as_measures(MEASURES), Crop(0, n, 1, m), pairs]
        ours, right = MeasureRun(measures, _plane(plain)), MeasureRun(measures, _plane(_in_float64(plain)))
        lse = triton.forward_measured(plain, ours)[1]
        right_lse = reference.forward_measured(_in_float64(plain), right)[1]
        found, truth = ours.result(lse), right.result(right_lse)
    for name, value in truth.values.items():
        mine = found[name]
        if name == "links":
            value, mine = value.weights, mine.weights
        if name == "target":  # by the weight that it has: the nearest two may be equal but for rounding
            value, mine = truth["peak"], _weights_at(truth["crop"], mine, truth["peak"])
        wrong = _difference(mine, value, max(allowed * (10 if name in ("distance", "offset") else 1), 1e-3))
        if wrong is not None:
            return f"{name} {wrong}"
    return None if torch.equal(found.seen, truth.seen) else "which queries see a key is wrong"


def _weights_at(crop: Tensor, target: Tensor, otherwise: Tensor) -> Tensor:
    """The weights of keys that were named, from a map without the first key."""
    known = (target > 0) & (target <= crop.shape[-1])
    weights = crop.gather(-1, (target - 1).clamp(0, crop.shape[-1] - 1)[..., None])[..., 0]
    return torch.where(known, weights, otherwise)


def _plane(call: Call) -> Plane:
    batch, heads, n, m = call.shape
    tile = call.whole()
    return Plane(batch, heads, n, m, tile.q_positions, tile.k_positions, call.dtype, values=call.v)
