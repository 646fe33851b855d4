"""The lists of keys of `Induction` and `Duplicate`, by the native library: what `measures/tokens.py` finds in a dozen
torch operators, in one call. `native_statistics` asks for them where only the token ids of a text are new.

Letters: B batch, N tokens, K kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.kernels import native_library as library
from regard.measures import KeyLists

__all__ = ["earlier_copies"]


def earlier_copies(ids: Tensor, after: Sequence[int]) -> KeyLists:
    """For each token of a text (1|B, N), whose positions rise one by one, two lists for each of `after` (0 or 1): the
    keys so many tokens after its earlier copies; and the same without the first token, its neighbours and itself.
    Their indices are those of `reductions.flat_lists`."""
    loaded = library.load()
    assert loaded is not None
    ids = ids.contiguous()
    assert ids.dtype is torch.int64
    items, tokens = ids.shape
    keys = torch.empty(items, len(after) * tokens, dtype=torch.int32, device="cpu")
    begin, end = torch.empty(2, items, tokens, 2 * len(after), dtype=torch.int64, device="cpu")
    kinds = torch.tensor(after, dtype=torch.int32, device="cpu")
    addresses = keys.data_ptr(), begin.data_ptr(), end.data_ptr()
    sizes = items, tokens, len(after)
    loaded.copies(library.COPIES.pack(library.COPIES.size, ids.data_ptr(), kinds.data_ptr(), *sizes, *addresses))
    return KeyLists(keys, begin, end)
