"""The output projection of an attention: found by its name, and checked when it runs.

What each head adds to a layer's output is its slice of the projection's weight times its slice of the projection's
input. That input is the heads' outputs side by side, unless a gate or a norm is applied in between: so it is observed.

Letters: B batch, H query heads, N queries, E head width of v, W model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.heads.capture.module_stack import Frame
from regard.heads.module_names import OUTPUT_PROJECTIONS, is_conv1d
from regard.kernels.precision import fixed_precision
from regard.variants import LatentAttention

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture
    from regard.heads.capture.observed import ObservedCall

__all__ = ["Projection", "ProjectionTracker"]


@dataclass
class Projection:
    """The output projection of one attention, and what was observed when it ran.

    Its input is (B, N, H * E), one slice for each head; the slices' contributions sum to its output."""

    weight: Tensor  # (W, H * E)
    bias: Tensor | None = None  # (W,)
    unknown: str = "one that was not seen to run"  # why the contribution of each head is not known; "" if it is known
    plain: bool = False  # whether its input is the heads' outputs, unchanged
    entered: Tensor | None = None  # (B, H, N, E): its input, if that is something else and is to be kept
    heads: Tensor | None = None  # (B, H, N, E): the heads' outputs, until it has run
    module: nn.Module | None = None  # what is to run, until it is expected

    @staticmethod
    def of_heads(weight: Tensor, bias: Tensor | None) -> Projection:
        """A projection whose input is known to be the heads' outputs."""
        return Projection(weight, bias, unknown="", plain=True)

    def check(self, entered: object, result: object, *, alone: bool, keep: bool) -> None:
        """It ran with the input `entered` and gave `result`. `alone`: no heads of other attentions entered with
        these; `keep`: keep the input, if it is not the heads' outputs."""
        heads, self.heads = self.heads, None
        if not alone:
            self.unknown = "one that several attentions enter together"
            return
        if heads is None or not isinstance(entered, Tensor) or not isinstance(result, Tensor):
            return
        slices = _split_heads(entered.detach(), heads)
        if slices is None:
            self.unknown = f"one that was given {tuple(entered.shape)} after heads of {tuple(heads.shape)}"
            return
        if not _is_linear(entered.detach(), result.detach(), self.weight, self.bias):
            self.unknown = "one whose result is not its weight times what it was given"
            return
        self.unknown, self.plain = "", _equal_to_rounding(slices, heads)
        if keep and not self.plain:
            self.entered = slices.clone()


class ProjectionTracker:
    """Finds the output projections of a capture's attentions, and checks each when it runs."""

    def __init__(self, capture: AttentionCapture) -> None:
        self.capture = capture
        # By id of the projection's module: projections to check when it runs, and the call within which it must run
        self.expected: dict[int, list[tuple[Projection, Frame]]] = {}
        # By the module that computes attention, the one that called it, and the width of all heads
        self.found: dict[tuple[nn.Module, nn.Module | None, int], nn.Module | None] = {}

    def find(self, attention: ObservedCall, frame: Frame, *, check: bool = True) -> None:
        """Set the projection of an attention, if it is of interest, and the running module, or the one that called it,
        has one by a known name. Without `check` its input is known to be the heads' outputs."""
        values = attention.output if attention.call is None else attention.call.v
        if not self.capture.needs_projection or self.capture.changes or values is None:
            return
        if isinstance(frame.module, LatentAttention) and frame.module.absorb:  # the values are latents
            weight, bias = frame.module.absorbed_out_weight().detach(), frame.module.out_proj.bias
            attention.out_weight = weight
            attention.projection = Projection.of_heads(weight, None if bias is None else bias.detach())
            return
        parent = None if frame.parent is None else frame.parent.module
        key = (frame.module, parent, attention.shape[1] * values.shape[3])
        if key not in self.found:
            self.found[key] = _find_module(frame.module, key[2], parent)
        module = self.found[key]
        if module is None:
            return
        weight = _full_parameter(module.weight)  # type: ignore[arg-type]
        weight = weight.mT if is_conv1d(module) else weight
        bias = getattr(module, "bias", None)
        bias = _full_parameter(bias) if isinstance(bias, Tensor) else None
        attention.out_weight = weight
        attention.projection = Projection(weight, bias) if check else Projection.of_heads(weight, bias)
        attention.projection.module = module if check else None

    def expect(self, attention: ObservedCall, frame: Frame) -> None:
        """Check the projection of an attention, whose output is known now, when it runs; if that is of interest."""
        projection = attention.projection
        if not self.capture.needs_projection or projection is None or projection.module is None:
            return
        if attention.output is not None:
            projection.heads = attention.output.clone()  # (a gate may be applied in place)
            self.expected.setdefault(id(projection.module), []).append((projection, frame.parent or frame))
        projection.module = None

    def module_ended(self, frame: Frame) -> None:
        """Check the projection that ended, if it is one; forget those that had to run within the call that ended."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            ended = self.expected.pop(id(frame.module), [])
            for projection, _ in ended:
                entered = next(iter((*frame.args, *frame.kwargs.values())), None)
                projection.check(entered, frame.output, alone=len(ended) == 1, keep=self.capture.needs_output)
        for module, several in list(self.expected.items()):
            if any(within is frame for _, within in several):
                del self.expected[module]


def _find_module(module: nn.Module, width: int, parent: nn.Module | None) -> nn.Module | None:
    """The output projection with H * E = `width` inputs, by its name: of the module itself, or else (BERT) of `output`
    beside it in its parent. None if there is none, or if an adapter or quantisation changes what it computes."""
    for owner in (module, getattr(parent, "output", None)):
        for name in OUTPUT_PROJECTIONS:
            projection = getattr(owner, name, None)
            weight = getattr(projection, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
                continue
            assert isinstance(projection, nn.Module)
            transposed = is_conv1d(projection)
            if not transposed and (not isinstance(projection, nn.Linear) or list(projection.children())):
                return None
            if weight.shape[0 if transposed else 1] == width:
                return projection
    return None


def _full_parameter(parameter: Tensor) -> Tensor:
    """A parameter, detached; the full tensor of a DTensor."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()  # type: ignore[operator]


def _split_heads(entered: Tensor, heads: Tensor) -> Tensor | None:
    """The input of a projection, (B, N, H * E) or flatter, as (B, H, N, E); None if its size is another."""
    batch, count, n, width = heads.shape
    if entered.shape[-1] != count * width or entered.numel() != heads.numel():
        return None
    if entered.shape[:-1] == (n, batch) and n != batch:  # sequence first
        return entered.unflatten(-1, (count, width)).permute(1, 2, 0, 3)
    return entered.reshape(batch, n, count, width).transpose(1, 2)


def _equal_to_rounding(entered: Tensor, heads: Tensor) -> bool:
    rounding = 4 * torch.finfo(entered.dtype).eps
    return torch.allclose(entered, heads.to(entered.dtype), rtol=rounding, atol=0.0, equal_nan=True)


def _is_linear(entered: Tensor, result: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a result is `weight` times the input plus `bias`, up to rounding."""
    if result.shape != (*entered.shape[:-1], weight.shape[0]) or not result.is_floating_point():
        return False
    wide = torch.promote_types(torch.promote_types(entered.dtype, weight.dtype), torch.float32)
    with fixed_precision(entered):
        x, w = entered.to(wide), weight.to(wide)
        expected = x @ w.mT
        bound = x.norm(dim=-1, keepdim=True) * w.norm(dim=1)  # no product is larger
        if bias is not None:
            expected, bound = expected + bias.to(wide), bound + bias.to(wide).abs()
        eps = max(torch.finfo(x.dtype).eps for x in (entered, result))
        differs = (result.to(wide) - expected).abs() > 32 * eps * bound
        return not bool((differs & expected.isfinite()).any())
