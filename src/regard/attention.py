"""Attention as functions: `attend`, `attention_weights`, `measure`, `explain`. Each checks what the caller gave
(`prepare`) and hands the `Call` to `kernels/run.py`, whose choice of a kernel never changes the answer.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard import kernels
from regard.checks import FARTHEST, check_positions
from regard.errors import bad_type, bad_value, refuse_trace, shape_of, unknown_argument
from regard.kernels import Call, plans, reference, repeated_measures
from regard.kernels.call import accumulation_dtype
from regard.kernels.dropout import Dropout, new_seed
from regard.kernels.precision import casts_to, fixed_precision
from regard.kernels.run import run, run_measured, run_with_lse, weights
from regard.masks import Mask, Padding, as_mask
from regard.measures import Measure, MeasureLike, Measurements, MeasureRun, Plane, as_measures
from regard.positions import Alibi, Bias, RelativeBias, as_biases
from regard.tracing import traced

if TYPE_CHECKING:
    from typing_extensions import Unpack  # (in `typing` from Python 3.11 on)

__all__ = [
    "BiasLike",
    "Options",
    "ScoreOptions",
    "attend",
    "attention_weights",
    "explain",
    "measure",
    "measure_call",
    "plane_of",
    "prepare",
]

BiasLike: TypeAlias = Tensor | Bias | Alibi | RelativeBias | Sequence["BiasLike"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Shape: TypeAlias = tuple[int, int, int, int]  # (B, H, N, M)

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ScoreOptions(TypedDict, total=False):
    """What decides the weights: the keyword arguments of `attention_weights` and `measure`."""

    mask: Mask | Tensor | None
    bias: BiasLike | None
    positions: Tensor | int | None
    key_positions: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class Options(ScoreOptions, total=False):
    """The keyword arguments of `attend`: all of these are optional."""

    dropout: float
    generator: torch.Generator | None


_DEFAULTS = {"dropout": 0.0}  # of the others None
_SCORE_OPTIONS, _OPTIONS = frozenset(ScoreOptions.__annotations__), frozenset(Options.__annotations__)


def _takes(options: type[Mapping[str, Any]]) -> Callable[[_Function], _Function]:
    """Let `inspect.signature` and `help` show the options one by one, in the place of `**options`."""

    def with_signature(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        first = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), len(parameters))
        parameters[first:first] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_DEFAULTS.get(name),
                annotation=getattr(hint, "__forward_arg__", hint),
            )
            for name, hint in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return with_signature


def _check_names(function: Callable[..., Any], given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise unknown_argument("function", function, {name: given[name]})


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str = "auto",
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@_takes(Options)
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", return_lse: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention of every head: softmax(q k^T * scale) v.

    Args:
        q: queries (B, H, N, D).
        k: keys (B, G, M, D); H is a multiple of G, and query head i uses kv head i // (H // G).
        v: values (B, G, M, E).
        mask: who may see whom: a `regard.masks` object, or a boolean tensor (True = may attend) of shape (N, M),
            (B, N, M) or (B, H, N, M).
        bias: added to the scores: a tensor (N, M) or (B, H, N, M), axes of 1 allowed, with gradient if it wants one; a
            bias object (`positions.Alibi`, `positions.RelativeBias`) or a function of the scores
            (`positions.ScoreMod`); or a list of them.
        positions: where the queries stand, (N,) or (B, N), or the first one's position. By default the last query
            stands at the last key.
        key_positions: where the keys stand, (M,) or (B, M); 0..M-1 by default.
        scale: D ** -0.5 by default.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (H,) logits that take part in each row's denominator and hold no value.
        dropout: probability that a weight is dropped. A function does not know about training: pass 0 in evaluation.
        generator: where dropout's seed comes from; torch's default one else.
        kernel: "auto", or one of `regard.kernels.available()`; one that cannot serve raises and says why.
        return_lse: also give the log-sum-exp of each query's scores (with its sink), before dropout. `regard.merge`
            combines attention that was computed in parts, each over other keys.

    Returns:
        (B, H, N, E). A query that may see nothing gets 0. With `return_lse` a pair: this, and the log-sum-exp
        (B, H, N) in float32, or float64 for float64; -inf for a query that may see nothing. Both have gradients.

    >>> import regard
    >>> q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
    >>> attend(q, k, v, mask=regard.masks.Causal()).shape
    torch.Size([2, 3, 5, 7])
    """
    if return_lse:
        return _attend_with_lse(q, k, v, kernel, options)
    out, key = plans.repeat(q, k, v, kernel, options)
    if out is not None:
        return out
    if has_torch_function((q, k, v)):
        return handle_torch_function(attend, (q, k, v), q, k, v, kernel=kernel, **options)
    call = prepare(q, k, v, **options)
    out = run(call, kernel)
    if key is not None:
        plans.keep(key, call, out, kernel)
    return out


def _attend_with_lse(q: Tensor, k: Tensor, v: Tensor, kernel: str, options: Options) -> tuple[Tensor, Tensor]:
    if has_torch_function((q, k, v)):
        return handle_torch_function(attend, (q, k, v), q, k, v, kernel=kernel, return_lse=True, **options)
    return run_with_lse(replace(prepare(q, k, v, **options), needs_lse=True), kernel)


@_takes(ScoreOptions)
def attention_weights(q: Tensor, k: Tensor, *, stage: str = "weights", **options: Unpack[ScoreOptions]) -> Tensor:
    """The weights themselves, (B, H, N, M): built in full. Before dropout; rows sum to 1 (below 1
    with sinks, 0 where a query may see nothing).

    `stage` gives an earlier step: "scaled", "capped" (after the softcap), "biased" (with bias, and -inf where masked).

    >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
    >>> attention_weights(q, k)[0, 0, 0]  # [1, e] / (1 + e)
    tensor([0.2689, 0.7311])
    """
    _check_names(attention_weights, options, _SCORE_OPTIONS)
    if stage not in reference.STAGES:
        raise bad_value("stage", expected=f"one of {reference.STAGES}", received=repr(stage))
    call = prepare(q, k, k, **options)
    return weights(call, stage).to(call.q.dtype)


@_takes(ScoreOptions)
def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    ids: Tensor | None = None,
    out_weight: Tensor | None = None,
    kernel: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Measurements:
    """What every head attends to, exactly, in O(N) memory: the N x M weights are never built.

    Args:
        q, k, v, mask, bias, positions, key_positions, scale, softcap, sinks: as for `attend`. Without v no output.
        measures: names or objects of `regard.measures`: "entropy", "peak", `measures.Heatmap(64)`, ... By default
            entropy, peak and target, distance, offset, offsets, received, on_first.
        ids: token ids of the keys, (M,) or (B, M), for measures that ask what the tokens are.
        out_weight: the output projection's weight (W, H * E), for `measures.Contribution`.
        kernel: "auto", or one of `regard.kernels.available()`; the answers are the same.

    Returns:
        Results by name, such as `.entropy` (B, H, N); `.output` (B, H, N, E), differentiable, and `.lse` (B, H, N). The
        measures themselves have no gradient, and are taken before dropout.

    >>> q, k, v = (torch.zeros(1, 2, 3, 5) for _ in range(3))  # equal scores: all weights are 1/3
    >>> found = measure(q, k, v, measures=["entropy", "received"])
    >>> found.entropy[0, 0]
    tensor([1.0986, 1.0986, 1.0986])
    >>> found.received[0, 1], found.output.shape
    (tensor([1., 1., 1.]), torch.Size([1, 2, 3, 5]))
    """
    _check_names(measure, options, _SCORE_OPTIONS)
    key = None
    if ids is None and out_weight is None:
        found, key = repeated_measures.repeat(q, k, v, measures, kernel, options)
        if found is not None:
            return found
    chosen = as_measures(measures)
    call = prepare(q, k, k if v is None else v, **options)
    if ids is not None:
        ids = _positions("ids", ids, q.shape[0], k.shape[2], q.device)
    plane = replace(plane_of(call), values=None if v is None else call.v, out_weight=out_weight, key_ids=ids)
    results = measure_call(call, chosen, plane=plane, output=v is not None, kernel=kernel)
    if key is not None:
        with torch.inference_mode(False):  # (what is kept serves calls outside of it, too)
            repeated_measures.keep(key, call, plane_of(replace(call)), chosen, v is not None)
    return results


def plane_of(call: Call) -> Plane:
    """What is measured of a call: its sizes and where its tokens stand. More that is known goes in by `replace`."""
    tile = call.whole()
    kept = [part.keep for part in call.mask_parts if isinstance(part, Padding) and part.keep is not None]
    first = functools.reduce(torch.logical_and, kept).to(torch.uint8).argmax(1) if kept else None
    first = first if first is not None and first.any() else None  # (with lengths it is 0)
    return Plane(*call.shape, tile.q_positions, tile.k_positions, call.dtype, first=first)


def measure_call(
    call: Call, measures: list[Measure], *, plane: Plane | None = None, output: bool = False, kernel: str = "auto"
) -> Measurements:
    """`measure` of a prepared call, with what else is known of it in `plane`."""
    wants_gradient = output and torch.is_grad_enabled() and any(x.requires_grad for x in call.learned())
    with torch.no_grad(), fixed_precision(call.q):
        measuring = MeasureRun(measures, plane_of(call) if plane is None else plane)
        out, lse = run_measured(call, measuring, output=output and not wants_gradient, kernel=kernel)
        results = measuring.result(lse)
        results.output = out
    if wants_gradient:
        results.output = run(call, kernel)
    return results


@_takes(Options)
def explain(
    q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", return_lse: bool = False, **options: Unpack[Options]
) -> str:
    """Which kernel `attend` would use for these arguments, and why not the others.

    >>> q = torch.randn(1, 2, 300, 5, dtype=torch.float64)
    >>> print(explain(q, q, q, dropout=0.1))  # doctest: +ELLIPSIS
    native: no, ...
    fused: no, SDPA has its own dropout RNG and runs unfused with dropout
    triton: no, ...
    blockwise: chosen
    reference: could serve, but blockwise is faster
    """
    return kernels.explain(kernel, replace(prepare(q, k, v, **options), needs_lse=bool(return_lse)))


@_takes(Options)
def prepare(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Call:
    """Check what the caller gave and lower it to a `Call`. Autocast has its say here, on q, k and v."""
    _check_names(attend, options, _OPTIONS)
    refuse_trace("attention")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise bad_type(name, expected="a tensor", received=type(x).__name__, remedy="torch.as_tensor(...)")
    device = q.device
    dtype = casts_to(device, q.dtype)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_tensors(q, k, v)
    batch, heads, n, _ = q.shape
    shape, given = (batch, heads, n, k.shape[2]), options.get
    mask = _mask(given("mask"), shape, device)
    biases = _biases(given("bias"), shape, device)
    q_start, positions, key_positions = _places(given("positions"), given("key_positions"), shape, device)
    scale, softcap = _scale_and_softcap(given("scale"), given("softcap"), q)
    sinks = _sinks(given("sinks"), shape, device)
    dropout = _dropout(given("dropout"), given("generator"), shape, device)
    call = Call(q, k, v, scale, q_start, softcap, mask, biases, positions, key_positions, sinks, dropout)
    return call if mask is None or torch.compiler.is_compiling() else call.simplified()


def _mask(mask: Mask | Tensor | None, shape: _Shape, device: torch.device) -> Mask | None:
    if mask is None:
        return None
    batch, _, n, m = shape
    mask = as_mask(mask, (batch, n, m))
    mask.check(*shape)
    for tensor in mask.tensors():
        _check_device("mask", tensor, device)
    return mask


def _biases(bias: BiasLike | None, shape: _Shape, device: torch.device) -> tuple[Bias, ...]:
    if bias is None:
        return ()
    biases = as_biases(bias)
    for added in biases:
        added.check(*shape)
        if added.on_device:
            _check_device("bias", added.weight, device)
    return biases


def _places(
    positions: Tensor | int | None, key_positions: Tensor | None, shape: _Shape, device: torch.device
) -> tuple[int, Tensor | None, Tensor | None]:
    """The first query's position, and the positions of queries and keys: None where they are contiguous."""
    batch, _, n, m = shape
    if key_positions is not None:
        key_positions = _positions("key_positions", key_positions, batch, m, device)
        _check_reach("key_positions", key_positions)
        if positions is None:
            if n > m:
                raise bad_value(
                    "positions",
                    expected="the queries' own, for there are more of them than keys",
                    received=f"key_positions alone, with {n} queries and {m} keys",
                )
            positions = key_positions[:, m - n :]
    if positions is None:
        return m - n, None, key_positions
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        _check_reach("positions", positions)
        return positions, None, key_positions
    positions = _positions("positions", positions, batch, n, device)
    _check_reach("positions", positions)
    return m - n, positions, key_positions


def _scale_and_softcap(scale: float | None, softcap: float | None, q: Tensor) -> tuple[float, float | None]:
    if scale is not None or softcap is not None:
        _check_number("scale", scale)
        _check_number("softcap", softcap)
    factor = (q.shape[3] ** -0.5 if q.shape[3] else 1.0) if scale is None else float(scale)
    limits = torch.finfo(accumulation_dtype(q.dtype))
    if not abs(factor) <= limits.max / 2:
        raise bad_value("scale", expected=f"a number of at most {limits.max / 2:.3g}", received=scale)
    if softcap is None:
        return factor, None
    if not 0 < softcap < math.inf:
        raise bad_value("softcap", expected="a positive number, or None for no cap", received=softcap)
    # Beyond these scores / softcap would be subnormal, or overflow. A larger cap leaves scores as they are, a
    # smaller one makes all of them equal, as this one does.
    reach = 2.0**100 if limits.bits == 32 else 2.0**900
    return factor, None if softcap > reach else max(float(softcap), 1 / reach)


def _sinks(sinks: Tensor | None, shape: _Shape, device: torch.device) -> Tensor | None:
    """(1, H)"""
    if sinks is None:
        return None
    heads = shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        received = f"dtype {sinks.dtype}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise bad_type("sinks", expected="a floating-point tensor (H,)", received=received)
    _check_device("sinks", sinks, device)
    if sinks.shape != (heads,):
        raise bad_value("sinks", expected=f"shape (H,) = ({heads},)", received=f"shape {shape_of(sinks)}")
    return sinks[None]


def _dropout(
    probability: float | None, generator: torch.Generator | None, shape: _Shape, device: torch.device
) -> Dropout | None:
    if probability is None:
        return None
    _check_number("dropout", probability)
    if not probability:
        return None
    if generator is not None and not isinstance(generator, torch.Generator):
        raise bad_type("generator", expected="a torch.Generator", received=type(generator).__name__)
    if not 0.0 <= probability <= 1.0:
        raise bad_value("dropout", expected="a probability from 0 to 1", received=probability)
    return Dropout.of(float(probability), new_seed(generator, device), *shape)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise bad_value(
            "q, k, v",
            expected="q (B, H, N, D), k (B, G, M, D), v (B, G, M, E)",
            received=f"{shape_of(q)}, {shape_of(k)}, {shape_of(v)}",
            remedy="heads have an axis of their own: x.unflatten(-1, (heads, -1)).transpose(1, 2)",
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _FLOATS):
        raise bad_type(
            "q, k, v",
            expected="one dtype of float32, bfloat16, float16, float64",
            received=f"{q.dtype}, {k.dtype}, {v.dtype}",
            remedy="convert them with .to(q.dtype)",
        )
    if not (q.device == k.device == v.device):
        raise bad_value(
            "q, k, v",
            expected="one device",
            received=f"{q.device}, {k.device}, {v.device}",
            remedy="move them with .to(q.device)",
        )
    batch, heads, _, width = q.shape
    groups = k.shape[1]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise bad_value(
            "q, k, v",
            expected="one batch size",
            received=f"{shape_of(q)}, {shape_of(k)}, {shape_of(v)}",
            remedy="share keys over a batch by k.expand(B, -1, -1, -1), which copies nothing",
        )
    if k.shape[3] != width:
        raise bad_value("q, k", expected="the same head width D", received=f"{width} and {k.shape[3]}")
    if k.shape[1:3] != v.shape[1:3]:
        raise bad_value(
            "k, v", expected="the same heads and length (B, G, M)", received=f"{shape_of(k)}, {shape_of(v)}"
        )
    if groups == 0 or heads % groups:
        raise bad_value("kv heads", expected=f"a divisor of the {heads} query heads", received=groups)


def _check_device(what: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise bad_value(
            what, expected=f"device {device}, as q's", received=tensor.device, remedy="move it with .to(q.device)"
        )


def _check_number(what: str, value: object) -> None:
    if value is None or type(value) is float:
        return
    known = (int, float, torch.SymInt, torch.SymFloat, Tensor)
    if isinstance(value, bool) or not isinstance(value, known):
        raise bad_type(what, expected="a number", received=f"{type(value).__name__} {value!r}")


def _positions(what: str, positions: object, batch: int, length: int, device: torch.device) -> Tensor:
    """(1|B, length) integers, int64: differences of narrow or unsigned ones would wrap around."""
    positions = check_positions(what, positions, batch, length)
    _check_device(what, positions, device)
    positions = positions.to(torch.int64)
    return positions[None] if positions.dim() == 1 else positions


def _check_reach(what: str, positions: Tensor | int) -> None:
    """Sums and differences of positions and windows must fit int64."""
    if isinstance(positions, Tensor):
        if positions.device.type != "cpu" or traced(positions) or not positions.numel():
            return  # (on other devices the answer would have to be waited for)
        least, most = (int(x) for x in positions.aminmax())
    else:
        least = most = positions
    if least < -FARTHEST or most > FARTHEST:
        raise bad_value(what, expected="numbers from -2**61 to 2**61", received=least if least < -FARTHEST else most)
