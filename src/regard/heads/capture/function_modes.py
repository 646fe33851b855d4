"""The torch function modes of a capture: torch hands them every function that is called in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from regard.heads.capture.handwritten import SOFTMAXES
from regard.heads.capture.torch_functions import HANDLERS

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["CaptureMode", "follow_other_thread"]


def _about_tensors() -> frozenset[Any]:
    """Functions that give no tensor, and are called very often: sizes, dtypes, kinds of tensors."""
    getters = (
        "shape dtype device ndim layout requires_grad is_cpu is_cuda is_meta is_nested is_sparse is_quantized is_leaf "
        "names grad_fn is_mkldnn is_mps is_xpu itemsize nbytes"
    )
    methods = (
        "dim ndimension size stride numel nelement element_size is_contiguous is_floating_point is_complex "
        "is_inference is_neg is_conj data_ptr storage_offset get_device"
    )
    found = [vars(torch._C.TensorBase).get(name) or getattr(Tensor, name, None) for name in getters.split()]
    of_properties = [getattr(getter, "__get__", None) for getter in found if getter is not None]
    of_methods = [getattr(Tensor, name, None) for name in methods.split()]
    functions = [torch.is_floating_point, torch.numel, torch.is_complex, torch.is_inference]
    return frozenset(x for x in (*of_properties, *of_methods, *functions) if x is not None)


_ABOUT_TENSORS = _about_tensors()


class CaptureMode(TorchFunctionMode):
    """Hands every torch function to a capture. (Torch disables a mode inside its own handler.)"""

    sees_projections = False  # `regard.projections` may fuse them: no attention is computed in them

    def __init__(self, capture: AttentionCapture) -> None:
        super().__init__()
        self.capture: AttentionCapture | None = capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.capture is None or func in _ABOUT_TENSORS:
            return func(*args, **(kwargs or {}))
        return self.capture.function(func, args, kwargs or {})

    def end(self) -> None:
        """Leave the mode, also if modes that were entered later are still active."""
        self.capture = None
        _remove(self)


class _OtherThreadMode(TorchFunctionMode):
    """In a thread that is not captured: names the modules that compute attention there as not seen."""

    def __init__(self, capture: AttentionCapture, names: list[str]) -> None:
        super().__init__()
        self.capture, self.names = capture, names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HANDLERS or (func in SOFTMAXES and args and isinstance(args[0], Tensor) and args[0].dim() > 2):
            reason = "it ran in another thread, and a watch sees the thread that began it"
            self.capture.not_seen(self.names[-1], reason)
        return func(*args, **(kwargs or {}))


def follow_other_thread(capture: AttentionCapture, names: list[str]) -> None:
    """Called in another thread that runs a part of the model, with the names of the modules in progress there: enters
    a mode with the first one, and leaves it with the last."""
    thread = capture.frames.others
    mode = getattr(thread, "mode", None)
    if names and mode is None:
        mode = thread.mode = _OtherThreadMode(capture, names)
        mode.__enter__()
    elif not names and mode is not None:
        thread.mode = None
        _remove(mode)


def _remove(mode: TorchFunctionMode) -> None:
    """Remove a mode from this thread's stack of modes, wherever it is."""
    if not any(active is mode for active in _get_current_function_mode_stack()):
        return  # it was entered in another thread, whose stack cannot be reached
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
