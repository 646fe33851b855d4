"""`Tree`: drafts that follow each other as a tree, beside each path on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import available
from regard.masks import Keep, Padding, Tree, Window

pytestmark = pytest.mark.on_device

PARENTS = [-1, 0, 0, 1, -1, 4, 1]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def path(parents: list[int], token: int) -> list[int]:
    """A token and its ancestors, the first one first."""
    steps = []
    while token >= 0:
        steps.append(token)
        token = parents[token]
    return steps[::-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 13), st.integers(0, 5), st.integers(0, 999))
def test_a_draft_sees_the_text_its_ancestors_and_itself(size: int, before: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.randint(0, 97, (2, size), generator=generator) % torch.arange(1, size + 1) - 1
    tree, positions = Tree(parents), Tree(parents).positions(before)
    dense = tree.dense(size, before + size)
    for b, of_item in enumerate(parents.tolist()):
        for token in range(size):
            seen = [*range(before), *(before + step for step in path(of_item, token))]
            assert dense[b, 0, token].nonzero().flatten().tolist() == seen
            assert int(positions[b, token]) == len(seen) - 1
    last = max(1, size // 2)
    assert torch.equal(tree.dense(last, before + size), dense[:, :, size - last :])


def test_positions() -> None:
    tree = Tree(torch.tensor(PARENTS))
    assert tree.positions().tolist() == [0, 1, 1, 2, 0, 1, 2]
    assert tree.positions(10).tolist() == [10, 11, 11, 12, 10, 11, 12]
    assert tree.positions(torch.tensor([3, 5])).tolist() == [[3, 4, 4, 5, 3, 4, 5], [5, 6, 6, 7, 5, 6, 7]]
    assert tree.positions(torch.tensor(3)).tolist() == [3, 4, 4, 5, 3, 4, 5]
    assert Tree(torch.tensor([[-1, 0], [-1, -1]])).positions(2).tolist() == [[2, 3], [2, 2]]


@pytest.mark.parametrize("kernel", available())
def test_every_path_is_as_if_it_had_been_decoded_alone(kernel: str) -> None:
    before, size = 5, len(PARENTS)
    q = normal(2, 4, size, 8, dtype=torch.float32).requires_grad_()
    k, v = (normal(2, 2, before + size, 8, seed=i, dtype=torch.float32).requires_grad_() for i in (1, 2))
    out = regard.attend(q, k, v, mask=Tree(torch.tensor(PARENTS)), kernel=kernel)
    alone = []
    for token in range(size):
        keys = [*range(before), *(before + step for step in path(PARENTS, token))]
        alone.append(regard.attend(q[:, :, token : token + 1], k[:, :, keys], v[:, :, keys], kernel="reference"))
    expected = torch.cat(alone, 2)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_layer_with_rotary_and_a_cache_verifies_a_tree_at_once() -> None:
    """The drafts in one call, each at its own position, are what each path gives token by token."""
    torch.manual_seed(0)
    rotary = regard.positions.Rotary(8)
    layer = regard.MultiHeadAttention(16, num_heads=2, position_encoding=rotary).double().eval()
    text, drafts, tree = normal(1, 5, 16), normal(1, len(PARENTS), 16, seed=1), Tree(torch.tensor(PARENTS))
    with torch.no_grad():
        cache = regard.KVCache()
        layer(text, mask=regard.masks.Causal(), cache=cache)
        ours = layer(drafts, mask=tree, cache=cache, positions=tree.positions(5))
        for token in range(len(PARENTS)):
            steps = torch.cat([text, drafts[:, path(PARENTS, token)]], 1)
            expected = layer(steps, mask=regard.masks.Causal())[:, -1]
            torch.testing.assert_close(ours[:, token], expected, rtol=1e-11, atol=1e-12)


def test_composed_with_other_masks() -> None:
    tree, n, m = Tree(torch.tensor(PARENTS)), len(PARENTS), 11
    padding = Padding(keep=torch.arange(m)[None] >= torch.tensor([[0], [2]]))
    assert torch.equal((tree & padding).dense(n, m), tree.dense(n, m) & padding.dense(n, m))
    assert torch.equal((~tree | Window(2)).dense(n, m), ~tree.dense(n, m) | Window(2).dense(n, m))


def test_vmap_over_trees() -> None:
    q, k = normal(3, 1, 2, 5, 4), normal(3, 1, 2, 8, 4, seed=1)
    parents = torch.tensor([[-1, 0, 1, 2, 3], [-1, -1, -1, -1, -1], [-1, 0, 0, 1, 1]])

    def run(q: Tensor, k: Tensor, parents: Tensor) -> Tensor:
        return regard.attend(q, k, k, mask=Tree(parents), softcap=2.0)

    ours = torch.func.vmap(run)(q, k, parents)
    torch.testing.assert_close(ours, torch.stack([run(*x) for x in zip(q, k, parents, strict=True)]))


def test_compiled() -> None:
    q, k = normal(1, 2, 7, 4), normal(1, 2, 70, 4, seed=1)

    def run(q: Tensor, k: Tensor, parents: Tensor) -> Tensor:
        return regard.attend(q, k, k, mask=Tree(parents), softcap=2.0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    parents = torch.tensor(PARENTS)
    torch.testing.assert_close(compiled(q, k, parents), run(q, k, parents))


def test_measures_and_their_uniform_baselines() -> None:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(16, num_heads=2)
    x, tree = torch.randn(2, len(PARENTS), 16), Tree(torch.tensor(PARENTS))
    records = []
    for mask in (tree, Keep(tree.dense(len(PARENTS)))):
        with regard.watch(layer) as seen, torch.no_grad():
            layer(x, mask=mask)
        records.append(seen[0])
    for name in ("entropy", "peak", "distance", "on_first"):
        torch.testing.assert_close(getattr(records[0].uniform, name), getattr(records[1].uniform, name))
        torch.testing.assert_close(getattr(records[0], name), getattr(records[1], name))


@pytest.mark.of_cpu("values elsewhere are not read for a check")
def test_wrong_trees_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="an earlier one, or -1 for the text before, received 1 for draft token 1"):
        Tree(torch.tensor([-1, 1]))
    with pytest.raises(ValueError, match="received -2 for draft token 0; remedy: order the drafts by depth"):
        Tree(torch.tensor([[-1, 0], [-2, 0]]))
    with pytest.raises(TypeError, match=r"Tree parents: expected an integer tensor \(T,\) or \(B, T\)"):
        Tree(torch.tensor([0.5]))
    q, k = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 7, 4)
    with pytest.raises(ValueError, match="expected T from 3 to 7: the 3 queries are drafts, which are among 7 keys"):
        regard.attend(q, k, k, mask=Tree(torch.tensor([-1, 0])))
    with pytest.raises(ValueError, match="received T = 8"):
        regard.attend(q, k, k, mask=Tree(torch.full((8,), -1)))
    with pytest.raises(ValueError, match=r"Tree parents: expected \(B, T\) = \(2, 3\)"):
        regard.attend(q, k, k, mask=Tree(torch.full((3, 3), -1)))
