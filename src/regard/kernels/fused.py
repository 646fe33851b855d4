"""torch's own `scaled_dot_product_attention`, wherever it really runs fused: never by its silent N x M fallback.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import tuning
from regard.kernels import blockwise
from regard.kernels.call import Call
from regard.kernels.operators import first_derivatives_only
from regard.kernels.strips import sides
from regard.masks import Causal, Keep, Mask
from regard.measures import MeasureRun
from regard.tracing import in_torch_func, traced

__all__ = ["backward", "forward", "forward_measured", "name", "output", "why_not"]

name = "fused"

GROUPS_ON_CPU = torch.__version__ >= "2.13"  # torch 2.8 is silently wrong there with fewer kv heads than query heads


def why_not(call: Call) -> str | None:
    """In words, where torch would fall back, be wrong, or waste what a mask hides."""
    batch, heads, n, m = call.shape
    if call.dropout is not None:
        return "SDPA has its own dropout RNG and runs unfused with dropout"
    if call.softcap is not None:
        return "it has no softcap"
    if call.changes_scores:
        return "it adds to scores, and cannot change them by a function (positions.ScoreMod)"
    if call.sinks is not None:
        return "it has no sinks"
    if call.q.shape[3] != call.v.shape[3]:
        return f"the head widths of q and k ({call.q.shape[3]}) and of v ({call.v.shape[3]}) differ"
    if call.scale <= 0:
        return "it multiplies the mask's -inf by the scale, which must be positive"
    if not (batch and heads and n and m and call.q.shape[3]):
        return "a size is zero"
    if call.q.is_cpu and call.k.shape[1] != heads and not GROUPS_ON_CPU:
        return f"torch {torch.__version__} wants as many kv heads as query heads on a CPU"
    if call.q.device.type == "meta":
        return "the meta device has no fused attention"
    if not torch.compiler.is_compiling() and in_torch_func():
        return "under torch.func it falls back to the N x M matrix"
    if torch.is_grad_enabled() and any(b.weight.requires_grad for b in call.biases):
        return "it gives no gradient to a bias"
    if call.needs_lse and (reason := _why_no_lse(call)) is not None:
        return reason
    causal, rest = call.derive(_split)
    if (rest or call.biases) and torch.onnx.is_in_onnx_export():
        return "in ONNX a row that may see nothing would get the mean of the values"
    if (rest or call.biases) and not torch.compiler.is_exporting():
        count = _dense_size(call, rest or (call.mask is not None and causal))
        if count > tuning.DENSE_LIMIT:
            return f"it needs the mask and bias as a dense tensor, {count * call.q.element_size() / 2**20:.0f} MB of it"
        hidden = _mostly_hidden(call)
        if hidden:
            return hidden
    if (causal or rest) and _may_leak(call):
        return "keys or values hold NaN or inf, which it would let through where they are hidden"
    if _swallows(call):
        return "queries hold NaN or inf, and it would make 0 of such a row"
    if not _runs_fused(call):
        return f"torch has no fused attention for {call.q.dtype} on {call.q.device.type} with these shapes"
    return None


def _why_no_lse(call: Call) -> str | None:
    """In words, where torch does not give the log-sum-exp."""
    if not call.q.is_cpu:
        return "torch gives the log-sum-exp on CPUs alone"
    if traced(call.q, call.k, call.v):
        return "torch does not give the log-sum-exp to compilers and torch.func"
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.learned()):
        return "it gives no gradient of the log-sum-exp"
    return None


def worth(call: Call) -> bool:
    """Wherever it can serve, but for a few queries that see everything: one token after another."""
    return not _formula_is_faster(call)


def _formula_is_faster(call: Call) -> bool:
    """torch's CPU kernel goes through the keys once per query head, and reads float16 and, for a single query, bfloat16
    number by number. Two plain products in float32 take 0.1 to 0.9 of its time, with more than rounding to spare."""
    if traced(call.q) or not call.q.is_cpu or call.mask is not None or call.biases:
        return False
    _, heads, n, m = call.shape
    groups, width = call.k.shape[1], call.k.shape[3]
    numbers = groups * m * width  # in the keys of one batch item
    if n > tuning.FORMULA_QUERIES or not 0 < numbers <= tuning.FORMULA_KEYS:
        return False
    if torch.is_grad_enabled() and call.q.requires_grad:
        return False
    if call.q.dtype is torch.float32:
        few = n <= tuning.FORMULA_QUERIES_FLOAT32
        return few and heads > groups and numbers >= tuning.FORMULA_KEYS_FLOAT32
    if call.q.dtype is torch.bfloat16:
        return n <= tuning.FORMULA_QUERIES_BFLOAT16
    return call.q.dtype is torch.float16


def output(call: Call) -> Tensor:
    """(B, H, N, E)"""
    mask, causal = call.derive(_operands)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.register_hook(_guard)
    return out


def _guard(d_inputs: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """Second derivatives shall raise in our words: torch's name an operator of its own."""
    return tuple(None if d is None else first_derivatives_only(name, [d])[0] for d in d_inputs)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. torch gives the latter on CPU alone and without a gradient, so it is detached."""
    if call.q.device.type != "cpu":
        raise NotImplementedError("fused: torch returns the log-sum-exp on CPU only; remedy: kernel='blockwise'")
    mask, causal = call.derive(_operands)
    q, k, v = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (call.q, call.k, call.v))
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=call.scale
    )
    lse = lse.to(call.dtype)
    if mask is not None:  # torch writes 0 for a row that may see nothing
        lse = lse.masked_fill(mask.isneginf().all(-1), float("-inf"))
    return (output(call) if torch.is_grad_enabled() else out), lse


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]:
    """torch's own wants the log-sum-exp of its own keys; so here it is `blockwise`'s."""
    return blockwise.backward(call, out, lse, d_out, wanted)


def forward_measured(call: Call, measuring: MeasureRun, *, output: bool = True) -> tuple[Tensor | None, Tensor]:
    """torch's output and log-sum-exp; then the weights, from the latter."""
    out, lse = forward(call)
    blockwise.replay(call, lse, measuring)
    return (out if output else None), lse


def _split(call: Call) -> tuple[bool, tuple[Mask, ...]]:
    """Whether torch's `is_causal` says a part of the mask, and the parts that are left and hide something."""
    m = call.shape[3]
    causal, rest = False, []
    for part in call.mask_parts:
        if type(part) is Causal and call.contiguous and call.q_start >= m - 1:
            continue
        if type(part) is Causal and call.contiguous and call.q_start == 0:
            causal = True  # torch aligns the first query with the first key
            continue
        rest.append(part)
    return causal, tuple(rest)


def _operands(call: Call) -> tuple[Tensor | None, bool]:
    """The dense mask, boolean or float, or None; and `is_causal`. Never both: torch's paths disagree on it."""
    causal, rest = call.derive(_split)
    if not rest and not call.biases:
        return None, causal
    tile = call.whole()
    visible = None
    for part in (*rest, *((Causal(),) if causal else ())):
        visible = part.block(tile) if visible is None else visible & part.block(tile)
    added = None
    for bias in call.biases:
        added = bias.evaluate(tile) if added is None else added + bias.evaluate(tile)
    if added is None:
        assert visible is not None
        return _full(visible, call), False
    added = added.detach().to(call.q.dtype)
    return _full(added if visible is None else added.masked_fill(~visible, float("-inf")), call), False


def _full(mask: Tensor, call: Call) -> Tensor:
    """torch wants the last two axes in full; the others may be 1."""
    return mask.expand(*mask.shape[:2], *call.shape[2:])


def _dense_size(call: Call, masked: object) -> int:
    """Elements of the dense mask that torch would be given (a tensor of the caller's own costs nothing more)."""
    batch, heads, n, m = call.shape
    per_head = any(bias.per_head for bias in call.biases)
    if masked and call.mask is not None:  # (a tensor of the caller's own is there already)
        per_head = per_head or not all(isinstance(x, Keep) or x.shared_by_heads() for x in call.mask_parts)
    per_item = any(bias.per_item for bias in call.biases)
    per_item = per_item or (call.mask is not None and bool(masked) and batch > 1)
    if len(call.biases) == 1 and call.biases[0].is_dense and not masked:
        return 0
    return (batch if per_item else 1) * (heads if per_head else 1) * n * m


def _mostly_hidden(call: Call) -> str | None:
    """In words, where a large part of a large plane is hidden: a kernel that skips it is faster."""
    _, _, n, m = call.shape
    if call.mask is None or torch.compiler.is_compiling() or n * m < tuning.SURVEY_FROM:
        return None
    visible = _visible_share(call, call.mask)
    return f"it would compute the {1 - visible:.0%} that is hidden" if visible < tuning.MOSTLY_HIDDEN else None


def _visible_share(call: Call, mask: Mask) -> float:
    """Which share of the plane's tiles has a visible pair: of all heads together, or of each where blocks of keys are
    chosen for it."""
    heads = call.shape[1]
    one_by_one = mask.grain() is not None and not mask.shared_by_heads()
    masks = [mask.of_heads(slice(head, head + 1)) for head in range(heads)] if one_by_one else [mask]
    height, width = sides(call) if mask.grain() is not None else (128, 128)
    tiles = [each.survey(call.grid(height, width)).some for each in masks]
    return sum(x.float().mean().item() if x.numel() > 1 else 1.0 for x in tiles) / len(tiles)


def _may_leak(call: Call) -> bool:
    """torch adds the mask and multiplies by weights of 0, so a hidden NaN reaches every row. Looked at on CPU only: on
    other devices the answer would have to be waited for."""
    if call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not call.keys_are_finite


def _swallows(call: Call) -> bool:
    """torch takes a row whose scores are all NaN for one that may see nothing, so a query of NaN would get 0."""
    if call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not call.queries_are_finite


def _runs_fused(call: Call) -> bool:
    """Whether torch would really choose a fused kernel; it asks itself the same question."""
    q = call.q
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) and (
            torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
        )
    if torch.compiler.is_compiling():
        return q.device.type == "cuda" and q.dtype is not torch.float64
    mask, causal = call.derive(_operands)
    k, v = call.k, call.v
    return (
        torch.ops.aten._fused_sdp_choice(
            q, k, v, mask, 0.0, causal, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        != 0
    )
