"""Masks as runs of keys, beside the pairs that they say are visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.masks import Causal, Documents, Hide, Keep, Mask, Padding, Prefix, Tile, Window, runs
from regard.masks.runs import KeySlots, key_runs
from regard.masks.tiles import whole

pytestmark = pytest.mark.on_device

B, N, M = 2, 5, 7


class Everyother(Mask):
    """A user's own mask, with gaps."""

    def block(self, tile: Tile) -> Tensor:
        return ((tile.k_positions[:, None, :] - tile.q_positions[:, :, None]) % 2 == 0)[:, None]


def check(mask: Mask | None, tile: Tile) -> bool:
    """Compare with the pairs; True if each query sees one run."""
    n, m = tile.shape
    visible = torch.ones(1, n, m, dtype=torch.bool) if mask is None else mask.block(tile)[:, 0]
    visible = visible.expand(visible.shape[0], n, m)
    slots = torch.arange(m)
    is_run = all(
        not row.any() or int(row.nonzero().max() - row.nonzero().min()) + 1 == int(row.sum())
        for item in visible
        for row in item
    )
    found = key_runs(mask, tile)
    assert (found is not None) == is_run
    if found is not None:
        low, high = found
        assert low.shape == high.shape
        assert low.shape[1] == n
        assert bool((low <= high).all())
        inside = (slots >= low[..., None]) & (slots < high[..., None])
        assert torch.equal(inside.expand(B, -1, -1), visible.expand(B, -1, -1))
    return is_run


RUNS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(3),
    "both sides": Window(before=1, after=2),
    "prefix": Prefix(3),
    "prefixes": Prefix(torch.tensor([2, 5])),
    "prefix language model": Causal() | Prefix(4),
    "lengths": Padding(lengths=torch.tensor([7, 3])),
    "nothing kept": Padding(lengths=torch.tensor([0, 9])),
    "left": Padding(keep=torch.arange(M) >= torch.tensor([[2], [0]])),
    "causal, left": Causal() & Padding(keep=torch.arange(M) >= torch.tensor([[4], [0]])),
    "documents": Documents(torch.tensor([[0, 0, 1, 1, 1, 5, 5]])),
    "causal documents": Causal() & Documents(torch.tensor([[4, 4, 4, 4, 1, 1, 1], [2, 2, 2, 2, 2, 2, 0]])),
    "other keys": Documents(torch.tensor([[3, 3, 9, 1, 1]]), torch.tensor([[1, 1, 1, 1, 3, 3, 3]])),
    "tensor": Keep(torch.ones(N, M).tril(1).bool()),
    "row": Keep((torch.arange(M) < 4)[None, None]),
    "hidden": Hide(torch.ones(B, N, M).triu(2).bool()),
    "not": ~Prefix(2),
    "gap filled": Keep(torch.tensor([[True, False, True, True, True, True, True]])) & ~Prefix(1),
}
GAPS: dict[str, Mask] = {
    "hole": Padding(keep=torch.tensor([[True, True, False, True, True, True, True]])),
    "far prefix": Window(2) | Prefix(1),
    "in pieces": Documents(torch.tensor([[0, 1, 0, 1, 1, 1, 0]])),
    "user's": Everyother(),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_query_sees_one_run(name: str) -> None:
    assert check(RUNS[name], whole(N, M))


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_no_run(name: str) -> None:
    assert not check(GAPS[name], whole(N, M))


def test_masks_are_looked_up_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PAIRS", 2 * M)
    for name in ("tensor", "row", "hidden", "not", "gap filled"):
        assert check(RUNS[name], whole(N, M))
    assert not check(GAPS["user's"], whole(N, M))


def test_keys_are_found_by_position() -> None:
    wanted = torch.tensor([[-9, 2, 3, 4, 8, 99]])
    for keys in (torch.arange(3, 9)[None], torch.tensor([[3, 3, 5, 8], [-2, 4, 4, 7]])):
        slots = KeySlots(keys)
        assert slots.rising
        assert slots.consecutive == (keys.shape[0] == 1)
        assert torch.equal(slots.before(wanted), (keys[:, None] < wanted[..., None]).sum(-1))
        assert torch.equal(slots.before(wanted[..., None].expand(-1, -1, 2))[..., 1], slots.before(wanted))
    assert not KeySlots(torch.tensor([[0, 2, 1]])).rising


@st.composite
def planes(draw: st.DrawFn) -> tuple[Mask, Tile]:
    n, m = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    def numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    kinds = [
        lambda: Causal(),
        lambda: Window(before=int(numbers(4, 1)), after=int(numbers(4, 1))),
        lambda: Prefix(numbers(m + 2, B)),
        lambda: Padding(lengths=numbers(m + 2, B)),
        lambda: Padding(keep=numbers(3, B, m) > 0),
        lambda: Documents(numbers(3, B, n).sort(1).values, numbers(3, B, m).sort(1).values),
        lambda: Keep(numbers(4, B, n, m) > 0),
        lambda: Hide(numbers(4, 1, m) > 2),
    ]
    masks = [kinds[draw(st.integers(0, len(kinds) - 1))]() for _ in range(draw(st.integers(1, 3)))]
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other if draw(st.booleans()) else mask | other
    positions = numbers(9, B, n) if draw(st.booleans()) else None
    keys = numbers(9, B, m) if positions is not None and draw(st.booleans()) else None
    if keys is not None and draw(st.booleans()):
        keys = keys.sort(1).values
    return ~mask if draw(st.integers(0, 4)) == 0 else mask, whole(n, m, positions=positions, key_positions=keys)


@given(planes())
def test_any_mask_at_any_positions(plane: tuple[Mask, Tile]) -> None:
    check(*plane)
