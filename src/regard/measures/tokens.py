"""Attention by what the tokens are: classes of them, and earlier copies of the same.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.measures.base import NO_TOKEN, KeyLists, Measure, Plane, Reduction, Strip, Sums

__all__ = ["Duplicate", "Induction", "Tokens", "ids_of_keys", "ids_of_queries"]


class Tokens(Measure):
    """The mass on classes of tokens: (B, H, N, K) for K classes, in the order of `kinds`; and in `tokens_first` the
    part of it that is on the text's first token, which may be looked at for being the first.

    `kinds` maps a name to token ids (a list of integers: the keys whose id is one of them), to a boolean mask of keys
    (M,) or (B, M), or to "same": the keys with the query's own token, wherever they are.

    >>> Tokens({"separator": [102], "same": "same"}).names
    ('separator', 'same')
    """

    gives = {"tokens": "query", "tokens_first": "query"}
    shareable = True

    def __init__(self, kinds: Mapping[str, Sequence[int] | Tensor | str]) -> None:
        if not isinstance(kinds, Mapping) or not kinds:
            raise bad_type(
                "Tokens kinds",
                expected="a mapping from names to token ids, masks of keys, or 'same'",
                received=repr(kinds),
            )
        self.kinds: dict[str, Tensor | None] = {}
        for name, which in kinds.items():
            if isinstance(which, str):
                if which != "same":
                    raise bad_value(
                        f"Tokens {name!r}",
                        expected="token ids, a boolean mask of keys, or 'same'",
                        received=repr(which),
                    )
                self.kinds[name] = None
                continue
            ids = torch.as_tensor(which)
            if ids.is_floating_point() or ids.dim() not in (1, 2) or (ids.dim() == 2 and ids.dtype is not torch.bool):
                raise bad_type(
                    f"Tokens {name!r}",
                    expected="token ids (K,), or a boolean mask of keys (M,) or (B, M)",
                    received=f"dtype {ids.dtype}, shape {shape_of(ids)}",
                )
            self.kinds[name] = ids

    @property
    def names(self) -> tuple[str, ...]:
        """The classes, in the order of the last axis."""
        return tuple(self.kinds)

    @property
    def needs_ids(self) -> bool:  # type: ignore[override]
        return any(which is None or which.dtype is not torch.bool for which in self.kinds.values())

    def prepare(self, plane: Plane) -> Tensor:
        """Which keys belong to which class: (1|B, K, M)."""
        rows = []
        for name, which in self.kinds.items():
            if which is None:
                row = torch.zeros(1, plane.keys, dtype=torch.bool, device=plane.k_positions.device)
            elif which.dtype is torch.bool:
                row = which.to(plane.k_positions.device).view(-1, which.shape[-1])
                if row.shape[1] != plane.keys or row.shape[0] not in (1, plane.batch):
                    raise bad_value(
                        f"Tokens {name!r}", expected=f"a mask of {plane.keys} keys", received=f"shape {shape_of(which)}"
                    )
            else:
                row = torch.isin(ids_of_keys(plane, self), which.to(plane.k_positions.device))
            rows.append(row)
        items = max(row.shape[0] for row in rows)
        return torch.stack([row.expand(items, -1) for row in rows], 1)

    def begin(self, plane: Plane) -> tuple[Tensor, Tensor]:
        return plane.new(plane.queries, len(self.kinds)), plane.new(plane.queries, len(self.kinds))

    def add(self, state: tuple[Tensor, Tensor], strip: Strip, prepared: Tensor) -> None:
        members, first = strip.of_keys(prepared), strip.is_first  # (1|c, K, m), (1|c, m)
        masses = strip.times(members.mT[:, None])  # (c, h, n, K)
        on_first = strip.times((members & first[:, None]).mT[:, None])
        for number, which in enumerate(self.kinds.values()):
            if which is None:
                ids, key_ids = (
                    strip.of_queries(ids_of_queries(strip.plane, self)),
                    strip.of_keys(ids_of_keys(strip.plane, self)),
                )
                same = ids[:, :, None] == key_ids[:, None, :]
                masses[..., number] = strip.where_true(same)
                on_first[..., number] = strip.where_true(same & first[:, None])
        state[0][strip.where], state[1][strip.where] = masses, on_first

    def reduction(self, plane: Plane, prepared: Tensor) -> Reduction:
        """Columns of the classes, then of their part on the first token; two such lists for the query's own token."""
        columns = torch.cat([prepared, prepared & plane.is_first[:, None]], 1)[:, None].to(plane.dtype)
        if all(which is not None for which in self.kinds.values()):
            return Reduction(columns=columns)
        ids, key_ids = ids_of_queries(plane, self), ids_of_keys(plane, self)
        slots = torch.arange(plane.keys, device=key_ids.device)
        first = slots[None].masked_fill(~plane.is_first, plane.keys).amin(1, keepdim=True)  # (1|B, 1)
        every = torch.full_like(first, plane.keys)
        ranges = torch.zeros_like(first), every, first, torch.minimum(first + 1, every)
        return Reduction(columns=columns, lists=_same_tokens(ids, key_ids, *ranges))

    def take(self, state: tuple[Tensor, Tensor], sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.columns is not None
        state[0].copy_(sums.columns[..., : len(self.kinds)])
        state[1].copy_(sums.columns[..., len(self.kinds) :])
        for number, which in enumerate(self.kinds.values()):
            if which is None:
                assert sums.lists is not None
                state[0][..., number], state[1][..., number] = sums.lists[..., 0], sums.lists[..., 1]

    def end(self, state: tuple[Tensor, Tensor], seen: Tensor) -> dict[str, Tensor]:
        return {"tokens": state[0], "tokens_first": state[1]}


@dataclass
class CopiesWanted:
    """What `_Copies` compares: the ids of queries (1|B, N) and keys (1|B, M)."""

    plane: Plane
    ids: Tensor
    key_ids: Tensor
    after: int

    @functools.cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """For each key the token `after` before it: its id and its position, (1|B, M) each."""
        plane, positions = self.plane, self.plane.k_positions
        if not self.after:
            return self.key_ids, positions
        if plane.text_ids is not None and plane.numbers is not None:  # some tokens are not among the keys any more
            return _token_before(plane.text_ids)[:, plane.numbers], positions - self.after
        return _token_before(self.key_ids), torch.nn.functional.pad(positions, (1, 0))[:, : plane.keys]


class _SortedIds(NamedTuple):
    """The tokens of a text (`Plane.in_order`) in the order of their ids, and of their slots among equal ids: (1|B, M)
    each. The earlier copies of a token stand from `begin` to its own `place`."""

    ids: Tensor
    slots: Tensor  # in this order
    begin: Tensor  # for each token: where the first with its id stands
    place: Tensor  # for each token: where it stands itself

    @staticmethod
    def of(ids: Tensor) -> _SortedIds:
        """Sort the ids (1|B, M) of a text."""
        by_id, slots = ids.sort(dim=1, stable=True)
        numbers = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        place = torch.empty_like(slots).scatter_(1, slots, numbers)
        return _SortedIds(ids, slots, torch.searchsorted(by_id.contiguous(), ids.contiguous()), place)

    def copies(self, after: int) -> KeyLists:
        """For each token two lists: what stands `after` tokens (0 or 1) after its earlier copies; and the same without
        the first token, the neighbours, and the token itself."""
        ids, begin, end = self.ids, self.begin, self.place
        apart = torch.zeros_like(end)
        for distance in range(1, min(2 + after, ids.shape[1])):  # copies at these distances are no part of the second
            apart[:, distance:].add_(ids[:, distance:] == ids[:, :-distance])
        apart = end - apart
        begin_apart = begin if after else begin + (ids == ids[:, :1])
        ends = torch.stack([end, torch.maximum(begin_apart, apart)], 2)
        return KeyLists((self.slots + after).to(torch.int32), torch.stack([begin, begin_apart], 2), ends)


class _Copies(Measure):
    """The mass on what stands `after` tokens (0 or 1) after the earlier copies of the query's token. Queries whose
    token has no earlier copy have 0 and do not count.

    The second result leaves out what could be looked at for another reason: the text's first token, and what stands
    right before the query, at it or right after it. Queries that have nothing else to look at do not count in it."""

    needs_ids: ClassVar[bool] = True
    shareable = True
    query_tensors = 2
    after: ClassVar[int]

    def __init__(self, ids: Tensor | None = None) -> None:
        if ids is not None and (not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() not in (1, 2)):
            raise bad_type(
                f"{type(self).__name__} ids",
                expected="integer token ids (M,) or (B, M)",
                received=f"{type(ids).__name__} {getattr(ids, 'shape', ids)}",
            )
        self.ids = ids

    def prepare(self, plane: Plane) -> CopiesWanted:
        return CopiesWanted(plane, ids_of_queries(plane, self), ids_of_keys(plane, self), self.after)

    def begin(self, plane: Plane) -> tuple[Tensor, Tensor]:
        return plane.new(plane.queries), plane.new(plane.queries)

    def add(self, state: tuple[Tensor, Tensor], strip: Strip, prepared: CopiesWanted) -> None:
        ids, (copies, positions) = prepared.ids, prepared.copies
        same = strip.of_queries(ids)[:, :, None] == strip.of_keys(copies)[:, None, :]
        pairs = same & (strip.of_keys(positions)[:, None, :] < strip.q_positions[:, :, None])
        state[0][strip.where] = strip.where_true(pairs)
        ahead = strip.k_positions[:, None, :] - strip.q_positions[:, :, None]
        state[1][strip.where] = strip.where_true(pairs & (ahead.abs() > 1) & ~strip.is_first[:, None])

    def reduction(self, plane: Plane, prepared: CopiesWanted) -> Reduction | None:
        """Two lists: the keys that count, and those of them that lie apart. Where positions rise one by one, what is
        left out of the second stands at the ends of the first."""
        return plane.once((self, "lists"), lambda: self._reduction(plane, prepared))

    def _reduction(self, plane: Plane, prepared: CopiesWanted) -> Reduction | None:
        if plane.in_order and torch.equal(prepared.ids, prepared.key_ids):
            owner = self if self.ids is not None else None
            in_order = plane.once((owner, "sorted"), lambda: _SortedIds.of(prepared.key_ids))
            return Reduction(lists=in_order.copies(self.after))
        ids, (copies, positions) = prepared.ids, prepared.copies
        keys, queries = plane.k_positions, plane.q_positions
        if not plane.steps_of_one and (self.after == 0 or plane.text_ids is None):
            return None
        earlier, far = _slots_before(positions, queries), _slots_before(keys, queries - 1)
        is_first = plane.is_first
        first = is_first.to(torch.uint8).argmax(1, keepdim=True) + is_first.any(1, keepdim=True)
        return Reduction(lists=_same_tokens(ids, copies, 0, earlier, first, torch.minimum(earlier, far)))

    def take(self, state: tuple[Tensor, Tensor], sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        state[0].copy_(sums.lists[..., 0])
        state[1].copy_(sums.lists[..., 1])

    def end(self, state: tuple[Tensor, Tensor], seen: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.gives, state, strict=True))

    def counted(self, plane: Plane, prepared: CopiesWanted) -> dict[str, Tensor]:
        """A token counts if the first of its kind stands before it: far enough, in the second result."""
        reduction = self.reduction(plane, prepared) if plane.numbers is None else None
        if reduction is not None:  # all tokens are among the keys: those count whose lists are not empty
            assert reduction.lists is not None
            full = reduction.lists.end > reduction.lists.begin
            return dict(zip(self.gives, full.unbind(-1), strict=True))
        key_ids, k_positions, number = ids_of_keys(plane, self), plane.k_positions, plane.numbers
        if plane.text_ids is not None:
            key_ids = plane.text_ids
            k_positions = number = torch.arange(key_ids.shape[1], device=key_ids.device)[None]
        apart = first = self._first_copies(plane, prepared.ids, key_ids, k_positions)
        if not self.after:  # the text's first token is a copy, but one that is looked at for another reason
            number = torch.arange(key_ids.shape[1], device=key_ids.device) if number is None else number
            start = torch.zeros(1, 1, device=key_ids.device) if plane.first is None else plane.first[:, None]
            key_ids = torch.where(number == start, NO_TOKEN, key_ids)
            apart = self._first_copies(plane, prepared.ids, key_ids, k_positions)
        first_name, second_name = self.gives
        return {first_name: first < plane.q_positions, second_name: apart < plane.q_positions - 1 - self.after}

    def _first_copies(self, plane: Plane, ids: Tensor, key_ids: Tensor, k_positions: Tensor) -> Tensor:
        """Where the first token of each query's kind stands, (1|B, N); beyond all where there is none."""
        items = max(x.shape[0] for x in (ids, key_ids, plane.q_positions, k_positions))
        ids, key_ids, k_positions = (x.expand(items, -1) for x in (ids, key_ids, k_positions))
        kinds, number = torch.unique(torch.cat([ids, key_ids], 1), return_inverse=True)
        first = k_positions.new_full((items, kinds.numel()), torch.iinfo(torch.int64).max)
        first.scatter_reduce_(1, number[:, ids.shape[1] :], k_positions, "amin")
        return first.gather(1, number[:, : ids.shape[1]])


class Induction(_Copies):
    """The mass on the token after each earlier copy of the query's token: sum of P_i,j+1 over j < i with the same token
    (prefix matching, Olsson et al. 2022)."""

    gives = {"induction": "query", "induction_apart": "query"}
    untabled = ("induction_apart",)
    after = 1


class Duplicate(_Copies):
    """The mass on earlier copies of the query's token: sum of P_ij over j < i, same token (Wang et al. 2022)."""

    gives = {"duplicate": "query", "duplicate_apart": "query"}
    untabled = ("duplicate_apart",)
    after = 0


def _same_tokens(ids: Tensor, key_ids: Tensor, *ranges: Tensor | int) -> KeyLists:
    """For each query (1|B, N) lists of the keys (1|B, M) with its id: one for each two of `ranges`, which are the first
    slot and the slot after the last, (1|B, 1|N) each. All lists are parts of one row: the keys in the order of ids."""
    items = max(x.shape[0] for x in (ids, key_ids, *ranges) if isinstance(x, Tensor))
    m, n = key_ids.shape[1], ids.shape[1]
    ids, key_ids = _small_ids(ids, key_ids, 2**62 // (m + 1))
    places = key_ids * (m + 1) + torch.arange(m, device=key_ids.device)
    places = places.sort(dim=1).values  # by id, then by slot
    wanted = [(ids * (m + 1) + slot).expand(items, n) for slot in ranges]
    found = torch.searchsorted(places.expand(items, -1).contiguous(), torch.cat(wanted, 1)).view(items, len(ranges), n)
    begin, end = found[:, 0::2].mT, found[:, 1::2].mT  # (items, N, K)
    return KeyLists(places.remainder(m + 1).to(torch.int32), begin, torch.maximum(begin, end))


def _small_ids(ids: Tensor, key_ids: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys as numbers from -1 on and below a limit, equal where they were equal."""
    ids, key_ids = (x.masked_fill(x == NO_TOKEN, -1) for x in (ids, key_ids))
    least, most = (
        (int(x) for x in torch.cat([ids.flatten(), key_ids.flatten()]).aminmax()) if key_ids.numel() else (0, 0)
    )
    if least >= -1 and most < limit:
        return ids, key_ids
    _, numbers = torch.cat([ids.flatten(), key_ids.flatten()]).unique(return_inverse=True)
    return numbers[: ids.numel()].view(ids.shape), numbers[ids.numel() :].view(key_ids.shape)


def _slots_before(positions: Tensor, wanted: Tensor) -> Tensor:
    """How many keys, whose positions (1|B, M) rise, stand before some positions (1|B, N): (1|B, N)."""
    items = max(positions.shape[0], wanted.shape[0])
    return torch.searchsorted(*(x.expand(items, -1).contiguous() for x in (positions, wanted)))


def ids_of_queries(plane: Plane, measure: Measure) -> Tensor:
    """The queries' token ids (1|B, N): the plane's, or the last N of the measure's own."""
    own = getattr(measure, "ids", None)
    if own is None and plane.ids is not None:
        return plane.ids
    keys = ids_of_keys(plane, measure)
    if plane.queries > keys.shape[1]:
        raise bad_value(
            f"{type(measure).__name__} ids",
            expected=f"those of {plane.queries} queries",
            received=f"those of {keys.shape[1]} keys",
        )
    return keys[:, keys.shape[1] - plane.queries :]


def ids_of_keys(plane: Plane, measure: Measure) -> Tensor:
    """The keys' token ids (1|B, M)."""
    own = getattr(measure, "ids", None)
    ids = plane.key_ids if own is None else own.to(plane.k_positions.device)
    name = type(measure).__name__
    if ids is None:
        raise bad_value(
            name,
            expected="token ids",
            received="none",
            remedy=f"{name}(ids), integers (M,) or (B, M)"
            if name != "Tokens"
            else "measure(..., ids=...), integers (M,) or (B, M)",
        )
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.shape[1] != plane.keys or ids.shape[0] not in (1, plane.batch):
        raise bad_value(
            f"{name} ids",
            expected=f"shape ({plane.keys},) or ({plane.batch}, {plane.keys})",
            received=f"shape {shape_of(ids)}",
        )
    return ids


def _token_before(ids: Tensor) -> Tensor:
    """Of each token the id of the one before it, padding left out; `NO_TOKEN` for the first: (1|B, L) -> (1|B, L)."""
    slots = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    last = slots.masked_fill(ids == NO_TOKEN, -1).cummax(1).values  # the last token up to here
    before = torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    return ids.gather(1, before.clamp(min=0)).masked_fill(before < 0, NO_TOKEN)
