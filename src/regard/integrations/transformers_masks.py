"""Masks of transformers as masks of regard.

transformers describes a mask by a function of (batch item, head, query, key), composed of few known ones: causal,
sliding window, packed texts, and so on. They are recognised by name, and each is compared with transformers' own dense
mask once before it is trusted; what is not recognised is built as transformers builds it for "sdpa", dense.

Letters: B batch, N queries, M keys.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.checks import FARTHEST
from regard.masks import Causal, Chunk, Documents, Mask, Padding, Window, conjuncts
from regard.masks.tiles import whole

__all__ = ["LazyMask", "mask"]

# (Any, so that types are checked without transformers)
masking_utils: Any = importlib.import_module("transformers.masking_utils")

MaskFunction = Callable[..., Any]


class LazyMask(Tensor):
    """A mask of regard that models of transformers may handle as if it were their own: a boolean tensor (B, 1, N, M),
    True = may attend. It has no numbers in memory until somebody asks for them (slices it, moves it, combines it):
    what comes out of any such function is a plain tensor.

    `mask` is the mask, `first` where its first query stands, if key 0 stands at 0.
    """

    mask: Mask
    first: int | Tensor

    @staticmethod
    def __new__(cls, mask: Mask, first: int | Tensor, shape: tuple[int, int, int, int], device: Any) -> LazyMask:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.mask, made.first = mask, first
        return made

    def positions(self) -> int | Tensor:
        """Where the queries stand: the first one's position, or all, (N,)."""
        if not isinstance(self.first, Tensor):
            return self.first
        return self.first + torch.arange(self.shape[2], device=self.first.device)

    def dense(self) -> Tensor:
        """The same in memory, (B, 1, N, M)."""
        _, _, n, m = self.shape
        positions = torch.arange(n, device=self.device) + self.first
        return self.mask.block(whole(n, m, positions=positions, device=self.device)).expand(self.shape).clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyMask({self.mask}, {tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT_IT:
                return func(*args, **(kwargs or {}))
            given, options = _in_memory(args, kwargs)
            return func(*given, **options)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, options = _in_memory(args, kwargs)
        return func(*given, **options)


def _in_memory(args: Any, kwargs: Any) -> Any:
    return tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))


# What can be asked of a tensor without its numbers.
_ABOUT_IT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
    *(getattr(Tensor, name) for name in ("dim", "size", "numel", "is_floating_point", "__len__", "__repr__")),
}


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """What transformers calls: which query may see which key, once for all layers of a kind.

    Args:
        batch_size, q_length, kv_length: B, N, M.
        q_offset, kv_offset: where the first query and the first key stand.
        mask_function: the rule, as transformers writes it.
        attention_mask: (B, tokens so far), True for those that are no padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for a causal mask, or for none at all.

    Returns:
        A `LazyMask` (B, 1, N, M); a dense one for a rule that is not known; None if the layers need none.
    """
    plane = _Plane(batch_size, q_length, kv_length, q_offset, kv_offset)
    if not (torch.compiler.is_compiling() or torch._C._is_tracing()):
        try:
            rule = _translated(mask_function, plane)
            return _lazy(rule, plane, attention_mask, device, allow_is_causal_skip, allow_is_bidirectional_skip)
        except _UnknownRule:
            pass
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        device=device,
        **more,
    )


def _lazy(
    rule: Mask | None,
    plane: _Plane,
    attention_mask: Tensor | None,
    device: torch.device | str,
    causal_skip: bool,
    bidirectional_skip: bool,
) -> LazyMask | None:
    """The mask of the layers: the rule, and the padding. None if a layer without a mask does the same: one that is
    causal (for several queries, from the first key on), or one that is not."""
    keep = _keep(attention_mask, plane)
    first = plane.q_offset - plane.kv_offset
    first = int(first) if isinstance(first, Tensor) and first.device.type == "cpu" else first
    hides = rule is not None and not (isinstance(first, int) and rule.sees_all(first, plane.n, plane.m))
    if keep is None and not hides and (bidirectional_skip or (causal_skip and plane.n == 1)):
        return None
    if keep is None and causal_skip and type(rule) is Causal and isinstance(first, int) and first == 0 and plane.n > 1:
        return None
    parts = [*([rule] if rule is not None and hides else []), *([] if keep is None else [Padding(keep=keep)])]
    visible = functools.reduce(Mask.__and__, parts) if parts else _EVERYTHING
    return LazyMask(visible, first, (plane.batch, 1, plane.n, plane.m), device)


_EVERYTHING = Window(before=FARTHEST, after=FARTHEST)


def _keep(attention_mask: Tensor | None, plane: _Plane) -> Tensor | None:
    """Which keys are no padding, (B, M); None if all are."""
    padded = masking_utils.prepare_padding_mask(attention_mask, plane.m, plane.kv_offset)
    if padded is None:
        return None
    keep = padded[:, plane.kv_offset : plane.kv_offset + plane.m].to(torch.bool)
    return None if bool(keep.all()) else keep


# Rules


class _UnknownRule(Exception):
    """A mask function that is not known."""


class _Plane(NamedTuple):
    """The sizes of a mask, and where its first query and key stand."""

    batch: int
    n: int
    m: int
    q_offset: int | Tensor
    kv_offset: int

    def sides(self, per_token: Tensor) -> tuple[Tensor, Tensor]:
        """What is known of each token of the texts, for the queries (B, N) and for the keys (B, M)."""
        first = int(self.q_offset)
        return per_token[:, first : first + self.n], per_token[:, self.kv_offset : self.kv_offset + self.m]


def _translated(function: MaskFunction, plane: _Plane) -> Mask | None:
    """A mask function as a mask; None if it hides nothing. Raises `_UnknownRule`."""
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return None
    factory = getattr(function, "__qualname__", "").partition(".<locals>.")[0]
    reader = _READERS.get(factory)
    code = getattr(function, "__code__", None)
    own = getattr(function, "__module__", "") == masking_utils.__name__
    if reader is None or code is None or not own or (factory not in _TRUSTED and not _agrees(factory)):
        raise _UnknownRule
    cells = dict(zip(code.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()], strict=True))
    return reader(plane, **cells)


def _all(plane: _Plane, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    parts = [part for function in mask_functions if (part := _translated(function, plane)) is not None]
    if any(type(part) is Causal for part in parts):  # windows end at the query itself
        windows = [part for part in parts if isinstance(part, Window) and part.after >= FARTHEST]
        others = [part for part in parts if part not in windows and not (windows and type(part) is Causal)]
        parts = [*(Window(part.before + 1) for part in windows), *others]
    return functools.reduce(Mask.__and__, parts) if parts else None


def _any(plane: _Plane, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    parts = [_translated(function, plane) for function in mask_functions]
    return None if None in parts else functools.reduce(Mask.__or__, [part for part in parts if part is not None])


def _window(plane: _Plane, sliding_window: int) -> Mask:
    if sliding_window < 1:  # it hides everything
        raise _UnknownRule
    return Window(before=sliding_window - 1, after=FARTHEST)


def _both_ways(plane: _Plane, sliding_window: int) -> Mask:
    return Window(before=sliding_window, after=sliding_window)


def _chunks(plane: _Plane, chunk_size: int, left_padding: Tensor) -> Mask:
    if bool(left_padding.any()) or plane.kv_offset % chunk_size:  # chunks begin elsewhere in each text, or in the cache
        raise _UnknownRule
    return Chunk(chunk_size)


def _packed(plane: _Plane, packed_sequence_mask: Tensor) -> Mask:
    return Documents(*plane.sides(packed_sequence_mask))


def _remapped(plane: _Plane, mask_function: MaskFunction, position_ids: Tensor) -> Mask | None:
    """A rule that counts positions from the beginning of each packed text. transformers combines it with `_packed`:
    within one text distances are the same, and rules that compare distances need no new positions."""
    rule = _translated(mask_function, plane)
    if not all(isinstance(part, (Causal, Window)) for part in conjuncts(rule)):
        raise _UnknownRule
    return rule


def _blocks(plane: _Plane, block_sequence_ids: Tensor) -> Mask:
    queries, keys = plane.sides(block_sequence_ids)
    return Documents(queries, keys) & Padding(keep=keys >= 0)


# By the function of transformers that makes such a rule: how it is read. Parameters are the names that it closes over.
_READERS: dict[str, Callable[..., Mask | None]] = {
    "and_masks": _all,
    "or_masks": _any,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _both_ways,
    "chunked_overlay": _chunks,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
    "blockwise_overlay": _blocks,
}
_TRUSTED: set[str] = set()


def _agrees(factory: str) -> bool:
    """Whether a rule of this transformers is what we take it for: on a small text, once."""
    _TRUSTED.add(factory)  # (while it is tried)
    texts, places = (
        torch.tensor([[3, 3, 5, 5, 5, 7, 7]], device="cpu"),
        torch.tensor([[0, 1, 0, 1, 2, 0, 1]], device="cpu"),
    )
    causal = masking_utils.causal_mask_function
    samples: dict[str, tuple[Any, ...]] = {
        "and_masks": (causal, masking_utils.bidirectional_mask_function),
        "or_masks": (causal, causal),
        "sliding_window_overlay": (3,),
        "sliding_window_bidirectional_overlay": (2,),
        "chunked_overlay": (2, torch.zeros(1, dtype=torch.int64, device="cpu")),
        "packed_sequence_mask_function": (texts,),
        "remap_positions_for_packed_sequence": (causal, places),
        "blockwise_overlay": (texts - 5,),
    }
    try:
        rule = getattr(masking_utils, factory)(*samples[factory])
        if factory == "remap_positions_for_packed_sequence":
            rule = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(texts), rule)
        for plane in (_Plane(1, 7, 7, 0, 0), _Plane(1, 2, 5, 5, 2)):
            if plane.m != 7 and factory in ("packed_sequence_mask_function", "remap_positions_for_packed_sequence"):
                continue  # (transformers has no caches with packed texts)
            right = masking_utils.sdpa_mask(*plane, mask_function=rule, allow_is_causal_skip=False)
            ours = _translated(rule, plane)
            same = LazyMask(
                _EVERYTHING if ours is None else ours, plane.q_offset - plane.kv_offset, (1, 1, plane.n, plane.m), "cpu"
            ).dense()
            if right is None or not torch.equal(same, right):
                _TRUSTED.discard(factory)
                return False
    except Exception:  # another version, with other names or parameters: then its masks are built dense
        _TRUSTED.discard(factory)
        return False
    return True
