"""One attention that a module computes window by window, put together again.

Image encoders of the Qwen-VL kind are told by `cu_seqlens` where windows of patches (or images of a batch) begin, and
call their attention function once for each. Their queries and keys are one sequence in which nobody sees beyond the own
window: `Documents`. So it is reported once, with that mask.

Letters: H heads, N queries, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.attention import prepare
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.observed import ObservedCall
from regard.masks import Documents

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["collect", "is_window"]


def is_window(frame: Frame, attention: ObservedCall) -> bool:
    """Whether an attention is the next window of several, by the `cu_seqlens` (windows + 1,) of its module's call."""
    begins, call = frame.kwargs.get("cu_seqlens"), attention.call
    if not isinstance(begins, Tensor) or begins.dim() != 1 or begins.numel() < 3 or call is None:
        return False
    plain = call.mask is None and not call.biases and call.sinks is None and attention.subtracted is None
    batch, _, n, m = call.shape
    bounds = begins[len(frame.windows) : len(frame.windows) + 2].tolist()
    return plain and batch == 1 and n == m and len(bounds) == 2 and bounds[1] - bounds[0] == n


def collect(capture: AttentionCapture, frame: Frame, attention: ObservedCall, output: Tensor) -> None:
    """Keep a window with its output (1, H, N, E). With the last one, report all as one attention."""
    call = attention.call
    assert call is not None
    frame.windows.append((call, output))
    if len(frame.windows) < frame.kwargs["cu_seqlens"].numel() - 1:
        return
    windows, frame.windows = frame.windows, []
    lengths = torch.tensor([part.shape[2] for part, _ in windows], device=output.device)
    which = torch.arange(len(windows), device=output.device).repeat_interleave(lengths)[None]  # (1, N)
    q, k, v = (torch.cat(parts, 2) for parts in zip(*[(part.q, part.k, part.v) for part, _ in windows], strict=True))
    with torch.no_grad():
        joined = prepare(q, k, v, scale=call.scale, softcap=call.softcap, mask=Documents(which, which))
        together = capture.describe(frame, joined.shape, call=joined)
    together.unsure = attention.unsure
    capture.report(frame, together, torch.cat([part for _, part in windows], 2))
