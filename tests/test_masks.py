"""Masks against double loops over (query, key), their algebra against boolean algebra, surveys against dense masks."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.masks import (
    And,
    Blocks,
    Causal,
    Chunk,
    Documents,
    Grid,
    Hide,
    Keep,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Survey,
    Tile,
    Tree,
    Window,
    as_mask,
    conjuncts,
)
from regard.masks.tiles import whole

pytestmark = pytest.mark.on_device

SHAPES = [(3, 7), (5, 5), (7, 3), (1, 11), (11, 1), (1, 1)]  # N < M, N == M, N > M, and the thin ones
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def by_loop(seen: Callable[[int, int], bool], q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """(1, 1, N, M) from a rule for one query position and one key position."""
    rows = [[seen(q, k) for k in k_positions.tolist()] for q in q_positions.tolist()]
    return torch.tensor(rows, dtype=torch.bool).view(1, 1, len(q_positions), len(k_positions))


RULES: dict[str, tuple[Mask, Callable[[int, int], bool]]] = {
    "causal": (Causal(), lambda q, k: k <= q),
    "window of 1": (Window(1), lambda q, k: k == q),
    "window of 3": (Window(3), lambda q, k: q - 3 < k <= q),
    "before and after": (Window(before=2, after=1), lambda q, k: q - 2 <= k <= q + 1),
    "after alone": (Window(after=2), lambda q, k: q <= k <= q + 2),
    "before alone": (Window(before=2), lambda q, k: q - 2 <= k <= q),
    "prefix of 0": (Prefix(0), lambda q, k: False),
    "prefix of 2": (Prefix(2), lambda q, k: k < 2),
    "chunks of 3": (Chunk(3), lambda q, k: q // 3 == k // 3),
    "chunks from 2": (Chunk(5, start=2), lambda q, k: (q - 2) // 5 == (k - 2) // 5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n, m", SHAPES)
def test_by_default_the_last_query_stands_at_the_last_key(rule: str, n: int, m: int) -> None:
    mask, seen = RULES[rule]
    assert torch.equal(mask.dense(n, m), by_loop(seen, torch.arange(m - n, m), torch.arange(m)))


@pytest.mark.parametrize("rule", RULES)
def test_explicit_positions_are_compared_as_they_are(rule: str) -> None:
    mask, seen = RULES[rule]
    positions, key_positions = torch.tensor([4, 0, 9]), torch.tensor([0, 1, 3, 4, 5, 8, 12])
    assert torch.equal(mask.dense(3, 7, positions=positions), by_loop(seen, positions, torch.arange(7)))
    both = mask.dense(3, 7, positions=positions, key_positions=key_positions)
    assert torch.equal(both, by_loop(seen, positions, key_positions))
    # given the keys' alone, the queries take the last N of them
    assert torch.equal(mask.dense(3, 7, key_positions=key_positions), by_loop(seen, key_positions[-3:], key_positions))


@pytest.mark.parametrize("rule", RULES)
def test_positions_per_batch_item(rule: str) -> None:
    mask, seen = RULES[rule]
    positions = torch.tensor([[4, 0, 9], [1, 2, 3]])
    key_positions = torch.tensor([[0, 1, 3, 4, 5], [7, 6, 2, 2, 0]])
    dense = mask.dense(3, 5, positions=positions, key_positions=key_positions)
    for b in range(2):
        item = dense[min(b, dense.shape[0] - 1)]
        assert torch.equal(item[None], by_loop(seen, positions[b], key_positions[b]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_integers_do_not_wrap_around(dtype: torch.dtype) -> None:
    positions = torch.arange(5)
    narrow = Window(before=1, after=1).dense(5, positions=positions.to(dtype), key_positions=positions.to(dtype))
    assert torch.equal(narrow, Window(before=1, after=1).dense(5))


@pytest.mark.parametrize("n, m", SHAPES)
def test_prefix_per_batch_item(n: int, m: int) -> None:
    lengths = torch.tensor([0, 2, 13])
    expected = torch.stack([by_loop(lambda q, k, p=p: k < p, torch.arange(n), torch.arange(m))[0] for p in (0, 2, 13)])
    dense = Prefix(lengths).dense(n, m)
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("n, m", SHAPES)
def test_padding_counts_slots_whatever_the_positions(n: int, m: int) -> None:
    lengths = torch.tensor([0, 2, m])
    expected = torch.zeros(3, 1, n, m, dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        expected[b, :, :, :length] = True
    odd = torch.arange(m).flip(0) + 100
    assert torch.equal(Padding(lengths=lengths).dense(n, m), expected)
    assert torch.equal(Padding(lengths=lengths).dense(n, m, positions=torch.arange(n), key_positions=odd), expected)
    assert torch.equal(Padding(keep=expected[:, 0, 0]).dense(n, m), expected)


def test_padding_on_the_left_is_a_keep_of_slots() -> None:
    keep = torch.tensor([[False, True, True], [True, True, True]])
    assert Padding(keep=keep).dense(2, 3)[:, 0].tolist() == [[[False, True, True]] * 2, [[True] * 3] * 2]


def test_padding_of_one_length_for_all_from_a_number() -> None:
    assert torch.equal(Padding(lengths=2).dense(3, 5), Padding(lengths=torch.tensor([2])).dense(3, 5))


def test_documents_see_their_own() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [3, 2, 2, 3, 9]])
    expected = torch.tensor([[[a == b for b in row] for a in row] for row in ids.tolist()])[:, None]
    assert torch.equal(Documents(ids).dense(5), expected)
    assert torch.equal(Documents(ids[0]).dense(5), expected[:1])


def test_documents_of_a_cache_take_the_last_queries() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2])
    assert torch.equal(Documents(ids).dense(2, 5), Documents(ids).dense(5)[:, :, -2:])
    assert Documents(ids).dense(2, 5)[0, 0].tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_documents_of_other_keys() -> None:
    mask = Documents(torch.tensor([0, 1, 7]), key_ids=torch.tensor([[1, 0], [1, 1]]))
    assert mask.dense(3, 2)[:, 0].int().tolist() == [[[0, 1], [1, 0], [0, 0]], [[0, 0], [1, 1], [0, 0]]]


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (2, 3, 5, 7), (1, 7), (5, 1), (2, 1, 7), (1, 3, 1, 1)])
def test_keep_and_hide_are_opposites(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    full = {2: tensor[None, None], 3: tensor[:, None] if tensor.dim() == 3 else tensor, 4: tensor}[tensor.dim()]
    full = full.expand(*full.shape[:2], 5, 7)
    assert torch.equal(Keep(tensor).dense(5, 7), full)
    assert torch.equal(Hide(tensor).dense(5, 7), ~full)
    assert torch.equal(as_mask(tensor).dense(5, 7), full)


# ----------------------------------------------------------------------------------------------------
# Algebra


def leaves(batch: int, heads: int, n: int, m: int) -> st.SearchStrategy[Mask]:
    def booleans(*shape: int) -> st.SearchStrategy[Tensor]:
        return st.integers(0, 2**31).map(
            lambda seed: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        )

    def integers(high: int, *shape: int) -> st.SearchStrategy[Tensor]:
        return st.integers(0, 2**31).map(
            lambda seed: torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
        )

    def drafts(size: int) -> st.SearchStrategy[Tensor]:
        return integers(97, batch, size).map(lambda t: t % torch.arange(1, size + 1) - 1)

    return st.one_of(
        st.builds(Causal),
        st.builds(Chunk, st.integers(1, m + 1), st.integers(-2, 2)),
        st.sampled_from([(1, 2), (3, 1), (2, 3)]).flatmap(
            lambda sides: integers(-(-m // sides[0]) + 1, batch, heads, -(-n // sides[1]), 2).map(
                lambda t: Blocks(t - 1, *sides)
            )
        ),
        *([] if n > m else [drafts(n).map(Tree), drafts(m).map(Tree)]),
        st.integers(1, m + 1).map(Window),
        st.builds(lambda b, a: Window(before=b, after=a), st.integers(0, m), st.integers(0, m)),
        st.integers(0, m + 1).map(Prefix),
        integers(m + 2, batch).map(Prefix),
        integers(m + 2, batch).map(Padding),
        booleans(batch, m).map(lambda keep: Padding(keep=keep)),
        st.builds(Documents, integers(3, batch, n), integers(3, batch, m)),
        st.builds(Documents, integers(3, n).map(lambda t: t.sort()[0]), integers(3, m).map(lambda t: t.sort()[0])),
        st.sampled_from([(1, 1, n, m), (batch, heads, n, m), (batch, 1, 1, m), (1, heads, n, 1)]).flatmap(
            lambda shape: st.one_of(booleans(*shape).map(Keep), booleans(*shape).map(Hide))
        ),
    )


@st.composite
def trees(draw: Any) -> tuple[Mask, Tensor, tuple[int, int, int, int]]:
    """A mask, the boolean algebra of its leaves' dense masks (B, H, N, M), and (B, H, N, M)."""
    shape = batch, heads, n, m = tuple(draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 3], *2 * [[1, 2, 5, 13]]))
    leaf = leaves(batch, heads, n, m)

    def grow(depth: int) -> tuple[Mask, Tensor]:
        kind = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
        if kind == "leaf":
            mask = draw(leaf)
            return mask, mask.dense(n, m).expand(shape)
        left, dense = grow(depth - 1)
        if kind == "not":
            return ~left, ~dense
        right, other = grow(depth - 1)
        combine = operator.and_ if kind == "and" else operator.or_
        return combine(left, right), combine(dense, other)

    return *grow(3), shape


def grid_of(n: int, m: int, height: int, width: int) -> Grid:
    tile = whole(n, m)
    return Grid(n, m, height, width, tile.q_positions, tile.k_positions)


def tiled(dense: Tensor, height: int, width: int) -> list[list[Tensor]]:
    return [list(band.split(width, dim=-1)) for band in dense.split(height, dim=-2)]


@EXAMPLES
@given(trees())
def test_a_tree_of_masks_is_the_algebra_of_its_leaves(tree: tuple[Mask, Tensor, tuple[int, int, int, int]]) -> None:
    mask, dense, shape = tree
    mask.check(*shape)
    assert torch.equal(mask.dense(*shape[2:]).expand(shape), dense)


@EXAMPLES
@given(trees(), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 3, 4, 16]))
def test_a_survey_never_lies(tree: tuple[Mask, Tensor, tuple[int, int, int, int]], height: int, width: int) -> None:
    mask, dense, (batch, _, n, m) = tree
    tiles = tiled(dense, height, width)
    survey = mask.survey(grid_of(n, m, height, width))
    some, every = (x.expand(batch, len(tiles), len(tiles[0])) for x in survey)
    for b in range(batch):
        for i, band in enumerate(tiles):
            for j, tile in enumerate(band):
                if not some[b, i, j]:
                    assert not tile[b].any()
                if every[b, i, j]:
                    assert tile[b].all()


@EXAMPLES
@given(trees(), st.sampled_from([1, 3, 16]), st.sampled_from([1, 4, 16]))
def test_a_block_is_the_slice_of_the_dense_mask(
    tree: tuple[Mask, Tensor, tuple[int, int, int, int]], height: int, width: int
) -> None:
    mask, dense, (batch, _, n, m) = tree
    plane = whole(n, m)
    for b in range(batch):
        for i in range(0, n, height):
            for j in range(0, m, width):
                items, rows, cols = slice(b, b + 1), slice(i, min(i + height, n)), slice(j, min(j + width, m))
                tile = Tile(n, items, rows, cols, plane.q_positions[:, rows], plane.k_positions[:, cols], keys=m)
                wanted = dense[items, :, rows, cols]
                assert torch.equal(mask.block(tile).expand(wanted.shape), wanted)


@EXAMPLES
@given(trees())
def test_conjuncts_all_agree_on_what_is_visible(tree: tuple[Mask, Tensor, tuple[int, int, int, int]]) -> None:
    mask, dense, shape = tree
    parts = list(conjuncts(mask))
    assert not any(type(part) is And for part in parts)
    agreed = torch.ones(shape, dtype=torch.bool)
    for part in parts:
        agreed = agreed & part.dense(*shape[2:])
    assert torch.equal(agreed, dense)


@pytest.mark.parametrize("height, width", [(1, 1), (3, 4), (4, 3), (16, 16), (1, 16)])
@pytest.mark.parametrize("n, m", [(13, 13), (5, 13), (13, 5), (1, 7)])
@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(1),
        Window(5),
        Window(before=2, after=3),
        Prefix(0),
        Prefix(4),
        Prefix(torch.tensor([3, 0])),
        Chunk(4),
        Chunk(5, start=3),
        Padding(lengths=torch.tensor([0, 4, 13])),
    ],
    ids=repr,
)
def test_surveys_of_simple_masks_are_exact(mask: Mask, n: int, m: int, height: int, width: int) -> None:
    """On contiguous positions nothing is left to chance: a tile is skipped if and only if it is hidden."""
    dense = mask.dense(n, m)
    survey = mask.survey(grid_of(n, m, height, width))
    tiles = tiled(dense[:, 0], height, width)
    some = torch.stack([torch.stack([t.flatten(1).any(1) for t in band], -1) for band in tiles], 1)
    every = torch.stack([torch.stack([t.flatten(1).all(1) for t in band], -1) for band in tiles], 1)
    assert torch.equal(survey.some.expand_as(some), some)
    assert torch.equal(survey.every.expand_as(every), every)


@pytest.mark.parametrize("height, width", [(1, 1), (3, 4), (16, 16)])
def test_surveys_of_tensors_are_exact(height: int, width: int) -> None:
    tensor = torch.zeros(2, 3, 7, 11, dtype=torch.bool)
    tensor[0, 1, :4, 4:8] = True
    tensor[1, :, 3:6] = True
    for mask, dense in ((Keep(tensor), tensor), (Hide(tensor), ~tensor), (~Keep(tensor), ~tensor)):
        survey = mask.survey(grid_of(7, 11, height, width))
        for i, band in enumerate(tiled(dense, height, width)):
            for j, tile in enumerate(band):
                assert survey.some[:, i, j].tolist() == tile.flatten(1).any(1).tolist()
                assert survey.every[:, i, j].tolist() == tile.flatten(1).all(1).tolist()


def test_a_survey_of_documents_skips_the_other_documents() -> None:
    """Sorted documents that end at tile borders: exact, so a packed batch costs no more than its documents alone."""
    ids = torch.arange(4).repeat_interleave(4)
    survey = Documents(ids).survey(grid_of(16, 16, 4, 4))
    assert torch.equal(survey.some[0], torch.eye(4, dtype=torch.bool))
    assert torch.equal(survey.every[0], torch.eye(4, dtype=torch.bool))


def test_a_mask_that_knows_nothing_of_tiles_says_so() -> None:
    class Even(Mask):
        def block(self, tile: Tile) -> Tensor:
            return (tile.k_positions % 2 == 0)[:, None, None, :]

    survey = Even().survey(grid_of(5, 5, 2, 2))
    assert survey.some.all()
    assert not survey.every.any()
    q, k, v = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64).requires_grad_()
    out = regard.attend(q, k, v, mask=Even(), kernel="blockwise")
    expected = regard.attend(q, k[:, :, ::2], v[:, :, ::2], kernel="reference")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------
# How they look


@pytest.mark.of_cpu("values elsewhere are not read for a repr")
@pytest.mark.parametrize(
    "mask, text",
    [
        (Causal(), "Causal()"),
        (Window(3), "Window(3)"),
        (Window(before=2, after=0), "Window(3)"),
        (Window(before=2, after=1), "Window(before=2, after=1)"),
        (Window(after=1), "Window(before=0, after=1)"),
        (Prefix(2), "Prefix(2)"),
        (Prefix(torch.tensor([2, 3])), "Prefix([2, 3])"),
        (Padding(lengths=torch.tensor([2, 3])), "Padding([2, 3])"),
        (Padding(keep=torch.tensor([[True, False]])), "Padding(keep=[True, False])"),
        (Padding(keep=torch.ones(3, 5).bool()), "Padding(keep=(3, 5))"),
        (Documents(torch.tensor([0, 0, 1])), "Documents([0, 0, 1])"),
        (Documents(torch.tensor([0]), torch.tensor([1, 2])), "Documents([0], key_ids=[1, 2])"),
        (Documents(torch.zeros(3, 5).int()), "Documents((3, 5))"),
        (Keep(torch.ones(5, 7).bool()), "Keep((1, 1, 5, 7))"),
        (Hide(torch.ones(2, 3, 5, 7).bool()), "Hide((2, 3, 5, 7))"),
        (Chunk(3), "Chunk(3)"),
        (Chunk(3, start=1), "Chunk(3, start=1)"),
        (Blocks(torch.tensor([[0, 1], [1, -1]]), 16), "Blocks([[[0, 1], [1, -1]]], 16)"),
        (Blocks(torch.zeros(2, 3, 5, 7).int(), 16, 1), "Blocks((2, 3, 5, 7), 16, query_size=1)"),
        (Tree(torch.tensor([-1, 0, 0])), "Tree([-1, 0, 0])"),
        (Causal() & Window(2) & Prefix(1), "Causal() & Window(2) & Prefix(1)"),
        (Causal() | Prefix(2), "Causal() | Prefix(2)"),
        ((Causal() | Prefix(2)) & Window(3), "(Causal() | Prefix(2)) & Window(3)"),
        (Causal() | Prefix(2) & Window(3), "Causal() | Prefix(2) & Window(3)"),
        (~Causal(), "~Causal()"),
        (~(Causal() & Window(2)), "~(Causal() & Window(2))"),
        (~(Causal() | Window(2)), "~(Causal() | Window(2))"),
        (~~Causal(), "Causal()"),
    ],
)
def test_repr_reads_as_it_is_written(mask: Mask, text: str) -> None:
    assert repr(mask) == text


@pytest.mark.parametrize(
    "mask", [Causal() & (Window(2) | ~Prefix(1)), ~(Causal() & Window(3)), (Causal() | Prefix(2)) & ~Window(1)]
)
def test_repr_of_numbers_alone_can_be_evaluated(mask: Mask) -> None:
    again = eval(repr(mask), vars(regard.masks))
    assert repr(again) == repr(mask)
    assert torch.equal(again.dense(7), mask.dense(7))


def test_pictures() -> None:
    assert Causal().draw(3) == "█··\n██·\n███"
    assert Causal().draw(2, 5) == "████·\n█████"
    assert Causal().draw(3, 2) == "··\n█·\n██"
    assert (Causal() | Prefix(2)).draw(4) == "██··\n██··\n███·\n████"
    assert Window(2).draw(4) == "█···\n██··\n·██·\n··██"
    assert (~Window(1)).draw(3) == "·██\n█·█\n██·"
    two = Padding(lengths=torch.tensor([1, 2]))
    assert two.draw(1, 3) == "█··"
    assert two.draw(1, 3, batch=1) == "██·"
    heads = Keep(torch.tensor([[[[True, False]], [[False, True]]]]))
    assert heads.draw(1, 2, head=1) == "·█"
    assert Causal().draw() == Causal().draw(8)


def test_size_says_the_same_as_before() -> None:
    for size in (1, 2, 7):
        assert torch.equal(Window(size).dense(11), Window(before=size - 1).dense(11))
        assert torch.equal(Window(size).dense(11), (Causal() & Window(before=size - 1, after=5)).dense(11))


# ----------------------------------------------------------------------------------------------------
# Composing


@pytest.mark.of_cpu("values elsewhere are not read for a repr")
def test_conjuncts_open_and_and_not_or() -> None:
    a, b, c, d = Causal(), Window(3), Prefix(2), Padding(lengths=torch.tensor([1]))
    assert list(conjuncts(None)) == []
    assert list(conjuncts(a)) == [a]
    assert list(conjuncts(a & b & c)) == [a, b, c]
    assert list(conjuncts(a & (b & c))) == [a, b, c]
    either = b | c
    assert list(conjuncts(a & either)) == [a, either]
    assert [repr(part) for part in conjuncts(a & ~(b | ~d))] == ["Causal()", "~Window(3)", "Padding([1])"]
    nand = ~(a & b)
    assert list(conjuncts(nand)) == [nand]


def test_a_boolean_tensor_joins_from_either_side() -> None:
    tensor = torch.tensor([[True, False], [True, True]])
    for mask in (Causal() & tensor, tensor & Causal(), Causal() | tensor, tensor | Causal()):
        assert isinstance(mask, And | Or)
        assert torch.equal(mask.dense(2)[0, 0], tensor)


def test_masks_are_not_truth_values() -> None:
    with pytest.raises(TypeError, match=r"mask: expected `a & b`, `a \| b` or `~a`, received `a and b`.*`is None`"):
        Causal() and Window(2)
    with pytest.raises(TypeError, match="masks compose with &"):
        bool(~Causal())


def test_double_negation_is_nothing() -> None:
    mask = Causal() & Window(2)
    assert ~~mask is mask
    assert isinstance(~mask, Not)


def test_masks_can_be_copied_and_pickled() -> None:
    mask = Causal() & (Window(3) | ~Padding(lengths=torch.tensor([2, 5]))) & Documents(torch.tensor([0, 0, 1, 1, 1]))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(other) == repr(mask)
        assert torch.equal(other.dense(5), mask.dense(5))


# ----------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: Window(0), ValueError, "Window size: expected at least 1, received 0"),
        (lambda: Window(-3), ValueError, "Window size: expected at least 1, received -3"),
        (lambda: Window(2.0), TypeError, "Window size: expected an integer, received float 2.0"),
        (lambda: Window(True), TypeError, "Window size: expected an integer, received bool True"),
        (lambda: Window("3"), TypeError, "Window size: expected an integer, received str '3'"),
        (lambda: Window(), ValueError, "Window: expected either a size, or before= and after=, received size=None"),
        (lambda: Window(3, before=1), ValueError, "Window: expected either a size.*received size=3, before=1"),
        (lambda: Window(before=-1), ValueError, "Window before: expected at least 0, received -1"),
        (lambda: Window(after=-1), ValueError, "Window after: expected at least 0, received -1"),
        (lambda: Prefix(-1), ValueError, "Prefix: expected at least 0, received -1"),
        (lambda: Prefix(1.5), TypeError, "Prefix: expected an integer, received float 1.5"),
        (lambda: Prefix(torch.ones(2)), TypeError, r"Prefix: expected an integer, or .* \(B,\), received dtype"),
        (lambda: Prefix(torch.ones(2, 3).int()), ValueError, r"Prefix: expected .* received shape \(2, 3\)"),
        (lambda: Padding(), ValueError, "Padding: expected exactly one of lengths= and keep=, received neither"),
        (lambda: Padding(torch.ones(1).int(), torch.ones(1, 1).bool()), ValueError, "exactly one.*received both"),
        (lambda: Padding(torch.ones(2, 3).bool()), TypeError, r"boolean .* \(2, 3\); remedy: Padding\(keep="),
        (lambda: Padding(torch.ones(2)), TypeError, r"Padding lengths: expected an integer.*\(B,\), received dtype"),
        (lambda: Padding("ab"), TypeError, r"Padding lengths: expected an integer tensor \(B,\), received str"),
        (lambda: Padding(keep=torch.ones(2, 3)), TypeError, "Padding keep: expected a boolean tensor.*torch.float32"),
        (lambda: Padding(keep=torch.ones(3).bool()), ValueError, r"Padding keep: .*\(B, M\), received shape \(3,\)"),
        (lambda: Padding(keep=[[True]]), TypeError, "Padding keep: expected a boolean tensor, received list"),
        (lambda: Documents(torch.ones(3)), TypeError, "Documents ids: expected an integer tensor.*torch.float32"),
        (lambda: Documents(torch.ones(1, 1, 1).int()), ValueError, r"Documents ids: .* received shape \(1, 1, 1\)"),
        (lambda: Documents(torch.ones(3).int(), torch.ones(3)), TypeError, "Documents key_ids: expected an integer"),
        (lambda: Keep(torch.ones(3).bool()), ValueError, r"Keep: expected shape \(N, M\).*received shape \(3,\)"),
        (lambda: Keep([[True]]), TypeError, "Keep: expected a boolean tensor, received list"),
        (lambda: Hide(torch.ones(2, 2).int()), TypeError, r"Hide: .*\(True = may not attend\), received dtype"),
        (lambda: Causal() & None, TypeError, "mask: expected a regard.masks.Mask or a boolean.*received NoneType"),
        (lambda: Causal() | 3, TypeError, "mask: expected a regard.masks.Mask or a boolean.*received int"),
        (lambda: Causal() & torch.ones(2, 2), TypeError, "mask: expected a boolean tensor.*dtype torch.float32"),
        (lambda: as_mask(Causal), TypeError, "mask: expected a regard.masks.Mask .*received type"),
    ],
)
def test_wrong_parts_are_refused(build: Callable[[], Mask], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_number_as_a_mask_names_the_three_ways_out(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="mask: expected a boolean tensor") as caught:
        as_mask(torch.ones(3, 5, dtype=dtype))
    for way in ("masks.Keep(t != 0)", "masks.Hide(t)", "bias=t", str(dtype)):
        assert way in str(caught.value)


B, H, N, M = 2, 3, 5, 7


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "mask, words",
    [
        (Keep(torch.ones(B, M).bool()), r"received \(1, 1, 2, 7\); remedy: a \(B, M\) mask of real .* is masks.Padd"),
        (Keep(torch.ones(H, N, M).bool()), r"received \(3, 1, 5, 7\); remedy: a mask per head is \(1, H, N, M\)"),
        (Keep(torch.ones(M, N).bool()), r"broadcasts to \(B, H, N, M\) = \(2, 3, 5, 7\), received \(1, 1, 7, 5\)"),
        (Hide(torch.ones(B, H, N, 11).bool()), r"Hide: expected a mask that broadcasts .*received \(2, 3, 5, 11\)"),
        (Padding(lengths=torch.ones(3).int()), r"Padding lengths: expected \(B\) = \(2,\), received shape \(3,\)"),
        (Padding(keep=torch.ones(B, N).bool()), r"Padding keep: expected \(B, M\) = \(2, 7\), received shape \(2, 5\)"),
        (Padding(keep=torch.ones(B, 1).bool()), r"Padding keep: expected \(B, M\) = \(2, 7\), received shape \(2, 1\)"),
        (Prefix(torch.ones(3).int()), r"Prefix: expected \(B\) = \(2,\), received shape \(3,\)"),
        (Documents(torch.ones(N).int()), r"Documents key_ids: expected \(B, M\) = \(2, 7\), received shape \(1, 5\)"),
        (
            Documents(torch.ones(3).int(), torch.ones(M).int()),
            r"Documents ids: expected \(B, N\) = \(2, 5\), received shape \(1, 3\)",
        ),
    ],
    ids=lambda x: repr(x) if isinstance(x, Mask) else "",
)
@pytest.mark.parametrize("within", ["alone", "and", "or", "not"])
def test_a_mask_that_does_not_fit_is_refused_wherever_it_stands(mask: Mask, words: str, within: str) -> None:
    tree = {"alone": mask, "and": Causal() & mask, "or": mask | Causal(), "not": ~(Causal() & mask)}[within]
    q, k = torch.zeros(B, H, N, 2), torch.zeros(B, H, M, 2)
    with pytest.raises(ValueError, match=words):
        regard.attend(q, k, k, mask=tree)


_SIMPLE = st.one_of(
    st.just(Causal()),
    st.builds(lambda b, a: Window(before=b, after=a), st.integers(0, 9), st.integers(0, 9)),
    st.builds(Prefix, st.integers(0, 9)),
)


@given(
    mask=st.recursive(
        _SIMPLE,
        lambda inner: st.one_of(
            st.builds(operator.and_, inner, inner),
            st.builds(operator.or_, inner, inner),
            st.builds(operator.inv, inner),
        ),
        max_leaves=5,
    ),
    first=st.integers(0, 11),
    queries=st.integers(1, 5),
    keys=st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_a_mask_that_is_said_to_see_all_hides_nothing(mask: Mask, first: int, queries: int, keys: int) -> None:
    if mask.sees_all(first, queries, keys):
        positions = torch.arange(first, first + queries)
        assert mask.dense(queries, keys, positions=positions).all()


@pytest.mark.parametrize("mask", [Causal(), Window(7), Causal() & Window(7), Window(2) | Causal()], ids=repr)
def test_the_last_query_sees_all(mask: Mask) -> None:
    assert mask.sees_all(6, 1, 7)
    assert not mask.sees_all(5, 2, 7)


# --- numbers beyond those that 64 bits hold ---------------------------------------------------------------------------

FAR = [2**31, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**40]


@pytest.mark.parametrize("kernel", ["auto", *regard.kernels.available()])
@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("far", FAR)
def test_a_window_may_reach_as_far_as_it_likes(far: int, n: int, kernel: str) -> None:
    q, k = torch.randn(1, 2, n, 4), torch.randn(1, 2, 97, 4)
    for positions in (None, torch.arange(97 - n, 97)):
        options: dict[str, Any] = {"kernel": kernel, "positions": positions}
        for wide, narrow in [
            (Window(before=3, after=far), Window(before=3, after=97)),
            (Window(before=far, after=1), Window(before=97, after=1)),
            (Window(far) & Causal(), Window(97) & Causal()),
            (Prefix(far) & Window(2), Window(2)),
        ]:
            assert torch.equal(
                regard.attend(q, k, k, mask=wide, **options), regard.attend(q, k, k, mask=narrow, **options)
            )


@pytest.mark.parametrize("far", FAR)
def test_surveys_and_blocks_of_far_reaching_masks(far: int) -> None:
    for mask in (Window(far), Window(before=far, after=far), Prefix(far)):
        seen = mask.dense(5, 7, positions=torch.tensor([0, 3, -(2**61), 2**61, 6]))
        right = torch.ones(5, 7, dtype=torch.bool)
        if isinstance(mask, Window) and far == 2**31:
            right[2:4] = False
        if mask.fields == ("before", "after") and not mask.after:
            right &= torch.arange(7) <= torch.tensor([0, 3, -(2**61), 2**61, 6])[:, None]
        assert torch.equal(seen[0, 0].expand(5, 7), right)


@pytest.mark.of_cpu("values elsewhere are not read for a check")
@pytest.mark.parametrize("where", [2**61 + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("what", ["positions", "key_positions"])
def test_positions_whose_sums_would_not_fit_are_refused(what: str, where: int) -> None:
    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=rf"{what}: expected numbers from -2\*\*61 to 2\*\*61, received {where}"):
        regard.attend(q, q, q, mask=Causal(), **{what: torch.tensor([0, where, 1])})  # type: ignore[arg-type]


@pytest.mark.on_meta
@pytest.mark.parametrize("first", [2**61 + 1, 10**30, -(2**63)])
def test_a_first_position_beyond_all_is_refused(first: int) -> None:
    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"positions: expected numbers from"):
        regard.attend(q, q, q, mask=Window(2), positions=first)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_parts_of_lengths_do_not_wrap_around(dtype: torch.dtype) -> None:
    tile = Tile(300, slice(None), slice(0, 2), slice(200, 203), torch.arange(2)[None], torch.arange(3)[None])
    least = torch.iinfo(dtype).min
    assert Padding(lengths=torch.tensor([5, least], dtype=dtype)).part(tile, slice(0, 1), 0).lengths.tolist() == [0, 0]
    assert Prefix(torch.tensor([5, least], dtype=dtype)).part(tile, slice(0, 1), 200).n.tolist() == [0, 0]


# --- masks of one's own -----------------------------------------------------------------------------------------------

KERNELS = ["auto", *regard.kernels.available()]


class Dilated(Mask):
    """Every `step`-th key, with a flaw on demand."""

    fields = ("step", "flaw")

    def __init__(self, step: int, flaw: int = 0) -> None:
        self.step, self.flaw = step, flaw

    def block(self, tile: Tile) -> Tensor:
        ahead = tile.k_positions[:, None, :] - tile.q_positions[:, :, None]
        visible = (ahead % self.step == 0)[:, None]
        flaws: list[Callable[[], Any]] = [
            lambda: visible,
            lambda: visible.float(),
            lambda: visible[0, 0],  # no batch and no heads
            lambda: visible[:, 0],  # no heads
            lambda: visible.expand(-1, 5, -1, -1),  # heads that are not there
            lambda: visible.expand(7, -1, -1, -1),  # batch items that are not there
            lambda: visible[..., :-1],
            lambda: visible.to("meta"),
            lambda: visible.tolist(),
        ]
        return flaws[self.flaw]()


FLAWS = [
    (1, TypeError, r"Dilated.block: expected a boolean tensor \(True = may attend\), received dtype torch.float32"),
    (2, ValueError, r"Dilated.block: expected shape \(1\|B, 1\|H, 1\|n, 1\|m\), B = 2, .*visible\[None, None\]"),
    (3, ValueError, r"Dilated.block: expected shape .* received shape \(1, "),
    (4, ValueError, r"Dilated.block: expected shape .*H = 3.* received shape \(1, 5, "),
    (5, ValueError, r"Dilated.block: expected shape .*B = 2.* received shape \(7, 1, "),
    (6, ValueError, r"Dilated.block: expected shape .*m = .* received shape"),
    (7, ValueError, r"Dilated.block: expected device \S+, as the tile's, received meta"),
    (8, TypeError, r"Dilated.block: expected a boolean tensor .*, received list"),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("flaw, error, words", FLAWS)
@pytest.mark.parametrize("n", [3, 70])
def test_a_mask_of_ones_own_with_a_flaw_is_refused(
    flaw: int, error: type[Exception], words: str, kernel: str, n: int
) -> None:
    q, k = torch.randn(2, 3, n, 4), torch.randn(2, 3, 71, 4)
    for mask in (Dilated(3, flaw), Causal() & Dilated(3, flaw), Window(5) | ~Dilated(3, flaw)):
        with pytest.raises(error, match=words):
            regard.attend(q, k, k, mask=mask, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_of_ones_own_is_the_same_in_every_kernel(kernel: str) -> None:
    q, k = torch.randn(2, 3, 70, 4), torch.randn(2, 3, 71, 4)
    mask = Causal() & Dilated(3)
    dense = Keep(mask.dense(70, 71))
    torch.testing.assert_close(
        regard.attend(q, k, k, mask=mask, kernel=kernel), regard.attend(q, k, k, mask=dense, kernel="reference")
    )
    assert repr(mask) == "Causal() & Dilated(step=3, flaw=0)"


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (
            lambda yes: (yes, yes),
            TypeError,
            r"Half.survey: expected a masks.Survey of two boolean tensors, received tup",
        ),
        (lambda yes: Survey(yes, yes.int()), TypeError, r"Half.survey: expected a masks.Survey of two boolean"),
        (lambda yes: Survey(yes[0], yes), ValueError, r"Half.survey, some: expected shape \(1\|B, 1, 1\|C\)"),
        (lambda yes: Survey(yes, yes.expand(1, 99, 1)), ValueError, r"every: expected .* received shape \(1, 99, 1\)"),
        (lambda yes: Survey(~yes, yes), ValueError, "Half.survey: .* a tile that is wholly visible and hidden"),
    ],
)
def test_a_survey_of_ones_own_with_a_flaw_is_refused(
    answer: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    class Half(Mask):
        def block(self, tile: Tile) -> Tensor:
            return (tile.k_positions % 2 == 0)[:, None, None, :]

        def survey(self, grid: Grid) -> Survey:
            return answer(torch.ones(1, 1, 1, dtype=torch.bool))

    q = torch.randn(1, 1, 300, 4)
    with pytest.raises(error, match=words):
        regard.attend(q, q, q, mask=Half(), kernel="blockwise")


def test_a_field_that_is_not_named_is_missed_where_masks_are_taken_apart() -> None:
    class Nameless(Mask):
        def __init__(self, step: int) -> None:
            self.step = step

        def block(self, tile: Tile) -> Tensor:
            return (tile.k_positions % self.step == 0)[:, None, None, :]

    q = torch.randn(2, 1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"Nameless: expected every attribute .* received others: step; .*\('step',\)"):
        torch.func.vmap(lambda x: regard.attend(x, x, x, mask=Nameless(2)))(q)


def test_the_worked_example_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("### To add a mask")[1].split("### ")[0]
    program, printed = (section.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    exec(compile(program, "docs/architecture.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == printed
