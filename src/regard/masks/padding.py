"""Masks that index slots of the key tensor: `Padding`, `Documents`."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import integer_tensor
from regard.errors import bad_type, bad_value, shape_of
from regard.masks.base import Mask, check_sizes, of_batch, short
from regard.masks.dense import boolean_tensor
from regard.masks.tiles import Grid, Survey, Tile

__all__ = ["Documents", "Padding"]


class Padding(Mask):
    """Which key slots hold real tokens. `Padding(lengths=...)`: the first `lengths[b]` of them, integers (B,).
    `Padding(keep=...)`: boolean (B, M), True where the token is real. Queries are not masked.

    >>> print(Padding(lengths=torch.tensor([2])).draw(3))
    ██·
    ██·
    ██·
    """

    fields = ("lengths", "keep")

    def __init__(self, lengths: Tensor | None = None, keep: Tensor | None = None) -> None:
        if (lengths is None) == (keep is None):
            raise bad_value(
                "Padding",
                expected="exactly one of lengths= and keep=",
                received="both" if lengths is not None else "neither",
            )
        if lengths is not None:
            boolean = isinstance(lengths, Tensor) and lengths.dtype is torch.bool
            if isinstance(lengths, Tensor) and (boolean or lengths.dim() == 2):
                raise bad_type(
                    "Padding lengths",
                    expected="an integer tensor (B,)",
                    received=f"a {'boolean ' * boolean}tensor of shape {shape_of(lengths)}",
                    remedy=f"Padding(keep={'t' if boolean else 't.bool()'}) takes the (B, M) mask of real tokens",
                )
            lengths = integer_tensor("Padding lengths", lengths, dims=1, expected="an integer tensor (B,)").to(
                torch.int64
            )
        if keep is not None:
            keep = boolean_tensor("Padding keep", keep)
            if keep.dim() != 2:
                raise bad_value(
                    "Padding keep",
                    expected="a boolean tensor (B, M)",
                    received=f"shape {shape_of(keep)}",
                    remedy="keep[None] for one text" if keep.dim() == 1 else "masks.Keep for (B, N, M) or (B, H, N, M)",
                )
        self.lengths, self.keep = lengths, keep

    def block(self, tile: Tile) -> Tensor:
        if self.keep is not None:
            return of_batch(self.keep, tile.batch)[:, None, None, tile.cols]
        assert self.lengths is not None
        slots = torch.arange(tile.cols.start, tile.cols.stop, device=self.lengths.device)
        return (slots < of_batch(self.lengths, tile.batch)[:, None])[:, None, None, :]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        if self.keep is not None:
            return Padding(keep=self.keep[:, tile.cols])
        assert self.lengths is not None
        return Padding(lengths=self.lengths.clamp(min=tile.cols.start) - tile.cols.start)

    def survey(self, grid: Grid) -> Survey:
        if self.keep is not None:
            low, high = grid.cols(self.keep.to(torch.uint8))
            return Survey(high > 0, low > 0)
        assert self.lengths is not None
        first, last = grid.cols(torch.arange(grid.keys, device=self.lengths.device)[None])
        lengths = self.lengths[:, None, None]
        return Survey(first < lengths, last < lengths)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.keep is not None:
            check_sizes("Padding keep", self.keep, ("B", batch), ("M", keys), exact=("M",))
        else:
            assert self.lengths is not None
            check_sizes("Padding lengths", self.lengths, ("B", batch))

    def __repr__(self) -> str:
        return f"Padding(keep={short(self.keep)})" if self.keep is not None else f"Padding({short(self.lengths)})"


class Documents(Mask):
    """Packed sequences: a query sees the keys of its own document. `ids` (N,) or (B, N) integers, equal within a
    document; `key_ids` (M,) or (B, M) where the keys are others. Where `ids` covers all M slots of a cache and there
    are fewer queries, the queries are the last N of them.

    >>> from regard.masks import Causal
    >>> print((Causal() & Documents(torch.tensor([0, 0, 1, 1]))).draw(4))
    █···
    ██··
    ··█·
    ··██
    """

    fields = ("ids", "key_ids")

    def __init__(self, ids: Tensor, key_ids: Tensor | None = None) -> None:
        expected = "an integer tensor (N,) or (B, N)"
        self.ids = integer_tensor("Documents ids", ids, dims=2, expected=expected)
        self.key_ids = (
            None if key_ids is None else integer_tensor("Documents key_ids", key_ids, dims=2, expected=expected)
        )

    def sides(self, queries: int) -> tuple[Tensor, Tensor]:
        """The documents of the queries, (1|B, N), and of the keys, (1|B, M)."""
        if self.key_ids is not None:
            return self.ids, self.key_ids
        return self.ids[:, max(self.ids.shape[1] - queries, 0) :], self.ids

    def block(self, tile: Tile) -> Tensor:
        q_ids, k_ids = (of_batch(ids, tile.batch) for ids in self.sides(tile.queries))
        return (q_ids[:, tile.rows, None] == k_ids[:, None, tile.cols])[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        q_ids, k_ids = self.sides(tile.queries)
        return Documents(q_ids[:, tile.rows], k_ids[:, tile.cols])

    def survey(self, grid: Grid) -> Survey:
        q_ids, k_ids = self.sides(grid.queries)
        (q_low, q_high), (k_low, k_high) = grid.rows(q_ids), grid.cols(k_ids)
        same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return Survey((q_low <= k_high) & (k_low <= q_high), same)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        q_ids, k_ids = self.sides(queries)
        check_sizes("Documents ids", q_ids, ("B", batch), ("N", queries), exact=("N",))
        check_sizes("Documents key_ids", k_ids, ("B", batch), ("M", keys), exact=("M",))

    def __repr__(self) -> str:
        keys = "" if self.key_ids is None else f", key_ids={short(self.key_ids)}"
        return f"Documents({short(self.ids)}{keys})"
