"""Equal weights in closed form, beside the same weights built in float64 and measured one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import measures
from regard.masks import Causal, Documents, Keep, Mask, Padding, Tile, Window
from regard.masks.runs import key_runs
from regard.measures import Measurements, MeasureRun, Plane, Strip, as_measures
from regard.measures.base import NO_TOKEN
from regard.measures.uniform import closed_forms, measure_uniform

pytestmark = pytest.mark.on_device

B, N, M = 2, 5, 7


def every_measure(keys: int) -> list[measures.Measure]:
    """All that have a closed form."""
    members = torch.arange(keys) % 3 == 0
    return as_measures(
        [
            *["entropy", "peak", "distance", "offset", "received", "on_first", "previous", "itself", "next"],
            *["induction", "duplicate"],
            measures.Offsets(3, 2),
            measures.Local(2),
            measures.Tokens({"some": [1, 3], "slots": members, "same": "same"}),
        ]
    )


def built(chosen: list[measures.Measure], plane: Plane, visible: Tensor) -> Measurements:
    """The same from weights (B, 1, N, M) in float64."""
    plane = replace(plane, dtype=torch.float64)
    visible = visible.expand(plane.batch, -1, -1)[:, None].to(torch.float64)
    weights = visible / visible.sum(-1, keepdim=True).clamp(min=1)
    run = MeasureRun(chosen, plane)
    everything = slice(0, plane.batch), slice(0, 1), slice(0, plane.queries), [slice(0, plane.keys)]
    run.add(Strip(plane, *everything, weights=weights, mass=weights.sum(-1)))
    return run.result()


def agree(plane: Plane, mask: Mask | None, tile: Tile) -> Measurements:
    """Every measure, by both ways, in float32 and float64."""
    visible = torch.ones(1, *tile.shape, dtype=torch.bool) if mask is None else mask.block(tile)[:, 0]
    runs = key_runs(mask, tile)
    assert runs is not None
    chosen = every_measure(plane.keys)
    assert closed_forms(chosen, plane) == chosen
    right = built(chosen, plane, visible.expand(-1, *tile.shape))
    found = measure_uniform(chosen, plane, *runs)
    for dtype in (torch.float32, torch.float64):
        found = measure_uniform(chosen, replace(plane, dtype=dtype), *runs)
        assert list(found.values) == list(right.values)
        for name, value in right.values.items():
            mine = found[name]
            assert (mine.shape, mine.dtype) == (value.shape, dtype if value.is_floating_point() else value.dtype), name
            # sums of up to N weights of at most 1; positions are below 100
            near = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                mine.to(value.dtype), value, atol=100 * near, rtol=near, msg=f"{name}: {{}}".format
            )
        assert torch.equal(found["received"] == 0, right["received"] == 0)
        assert torch.equal(found.seen, right.seen)
        assert found.counts.keys() == right.counts.keys()
        assert all(torch.equal(found.counts[name], which) for name, which in right.counts.items())
    return found


def plane_at(tile: Tile, **known: Tensor | None) -> Plane:
    n, m = tile.shape
    generator = torch.Generator().manual_seed(n * m)
    ids = torch.randint(0, 4, (B, m), generator=generator)
    if known.get("key_padding") is not None:
        ids = ids.masked_fill(known["key_padding"], NO_TOKEN)  # type: ignore[arg-type]
    queries = torch.randint(0, 4, (B, n), generator=generator) if n > m else ids[:, m - n :]
    known = {"ids": queries, "key_ids": ids} | known
    return Plane(B, 1, n, m, tile.q_positions, tile.k_positions, torch.float32, **known)  # type: ignore[arg-type]


def tile_of(n: int, m: int, positions: Tensor | None = None, keys: Tensor | None = None) -> Tile:
    keys = torch.arange(m)[None] if keys is None else keys
    positions = torch.arange(m - n, m)[None] if positions is None else positions
    return Tile.at(positions, keys)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(3),
    "both sides": Window(before=1, after=2),
    "right": Padding(lengths=torch.tensor([7, 4])),
    "left": Padding(keep=torch.arange(M) >= torch.tensor([[2], [0]])),
    "causal, left": Causal() & Padding(keep=torch.arange(M) >= torch.tensor([[0], [4]])),
    "some see nothing": Window(2) & Padding(lengths=torch.tensor([3, 0])),
    "documents": Causal() & Documents(torch.tensor([[0, 0, 1, 1, 1, 5, 5]])),
    "tensor": Keep(torch.ones(M, M).tril().bool()),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [M, N, 1])
def test_masks(name: str, n: int) -> None:
    mask = MASKS[name]
    if isinstance(mask, Keep):
        mask = Keep(mask.tensor[:, :, M - n :])
    agree(plane_at(tile_of(n, M)), mask, tile_of(n, M))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    lengths = torch.tensor([[4], [M]])
    slots = torch.arange(M)
    keep = slots < lengths if side == "right" else slots >= M - lengths
    first = keep.to(torch.uint8).argmax(1)
    plane = plane_at(tile_of(M, M), padding=~keep, key_padding=~keep, first=first if first.any() else None)
    found = agree(plane, Causal() & Padding(keep=keep), tile_of(M, M))
    assert not found["received"][0, 0][~keep[0]].any()


def test_cross_attention_with_more_queries_than_keys() -> None:
    tile = tile_of(11, 3)
    agree(plane_at(tile), None, tile)
    agree(plane_at(tile), Padding(lengths=torch.tensor([2, 3])), tile)


def test_a_chunk_whose_keys_are_some_tokens_of_a_text() -> None:
    """A cache that has dropped tokens 2 to 5 of 13: the mask is told by slots, the measures by numbers."""
    numbers = torch.tensor([0, 1, 6, 7, 8, 9, 10])
    text_ids = torch.tensor([[1, 2, 3, 1, 2, 1, 3, 1, 2, 2, 1], [3, 3, 3, 1, 1, 2, 2, 2, 3, 3, 1]])
    tile = tile_of(N, M)
    plane = replace(
        plane_at(tile, text_ids=text_ids, key_ids=text_ids[:, numbers], ids=text_ids[:, 6:], numbers=numbers),
        k_positions=numbers[None],
        q_positions=numbers[None, M - N :],
    )
    agree(plane, Causal(), tile)
    found = agree(replace(plane, first=torch.tensor([0, 3])), Causal(), tile)
    assert not found["on_first"][1].any()  # token 3 is not among the keys any more
    assert found["on_first"][0].all()


def test_the_numbers_of_a_causal_text() -> None:
    tile = tile_of(5, 5)
    runs = key_runs(Causal(), tile)
    assert runs is not None
    found = measure_uniform(as_measures(["entropy", "received", "offset", "peak"]), plane_at(tile), *runs)
    torch.testing.assert_close(found["entropy"][0, 0], torch.tensor([math.log(i) for i in range(1, 6)]))
    torch.testing.assert_close(found["received"][1, 0], torch.tensor([137 / 60, 77 / 60, 47 / 60, 27 / 60, 12 / 60]))
    assert found["offset"][0, 0].tolist() == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert found["target"].tolist() == [[[0] * 5]] * 2


def test_what_has_no_closed_form() -> None:
    class Mine(measures.Entropy):
        """A user's own, which may mean something else."""

    chosen = [*every_measure(M), Mine(), measures.Heatmap(3)]
    plane = plane_at(tile_of(N, M))
    assert closed_forms(chosen, plane) == chosen[:-2]
    without_positions = ["Entropy", "Peak", "Received", "OnFirst", "Tokens"]
    falling = replace(plane, k_positions=torch.arange(M).flip(0)[None])
    far = replace(plane, k_positions=torch.arange(M)[None] * 2**57)
    for other in (falling, far):
        assert [type(measure).__name__ for measure in closed_forms(chosen, other)] == without_positions
    negative = replace(plane, k_positions=torch.arange(-1, M - 1)[None])
    assert {type(one) for one in chosen[:-2]} - {type(one) for one in closed_forms(chosen, negative)} == {
        measures.Induction
    }
    assert closed_forms(chosen, replace(plane, queries=0)) == []


@st.composite
def planes(draw: st.DrawFn) -> tuple[Plane, Mask | None, Tile]:
    n, m = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    lengths = numbers(m, B) + 1
    keep = torch.arange(m) >= m - lengths[:, None]
    masks: list[Mask | None] = [
        None,
        Causal(),
        Window(before=int(numbers(5, 1)), after=int(numbers(5, 1))),
        Padding(lengths=lengths),
        Padding(keep=keep),
        Documents(numbers(4, B, n).sort(1).values, numbers(4, B, m).sort(1).values),
    ]
    mask = draw(st.sampled_from(masks))
    other = draw(st.sampled_from(masks))
    mask = other if mask is None else mask if other is None else mask & other
    keys, queries = numbers(3, draw(st.sampled_from([1, B])), m).cumsum(1), numbers(2 * m, B, n)
    tile = tile_of(n, m, *((queries, keys) if draw(st.booleans()) else ()))
    known: dict[str, Tensor | None] = {}
    if draw(st.booleans()):
        known["key_padding"], known["first"] = ~keep, m - lengths
    if draw(st.booleans()):
        known["padding"] = numbers(3, B, n) == 0
    return plane_at(tile, **known), mask, tile


@given(planes())
def test_any_runs_at_any_positions(example: tuple[Plane, Mask | None, Tile]) -> None:
    agree(*example)
