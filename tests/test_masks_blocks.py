"""`Blocks`: a few blocks of keys for each block of queries; what is hidden is not computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.attention import prepare
from regard.kernels import available
from regard.kernels.call_schema import flatten, unflatten
from regard.kernels.strips import plan_strips, sides
from regard.masks import Blocks, Causal, Grid, Hide, Keep, Padding
from regard.masks.tiles import whole

pytestmark = pytest.mark.on_device


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_loop(indices: Tensor, size: int, query_size: int, n: int, m: int) -> Tensor:
    """(B, H, N, M): query i sees key j where j's block is in the list of i's block."""
    visible = torch.zeros(*indices.shape[:2], n, m, dtype=torch.bool)
    for b, of_item in enumerate(indices.tolist()):
        for h, of_head in enumerate(of_item):
            for i in range(n):
                for j in range(m):
                    visible[b, h, i, j] = j // size in of_head[i // query_size]
    return visible


def some_indices(*shape: int, blocks: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([(5, 11), (13, 13), (11, 3), (1, 7)]),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]),
    st.integers(0, 4),
    st.integers(0, 99),
)
def test_a_query_sees_the_keys_of_the_blocks_in_its_list(
    size: int, query_size: int, lengths: tuple[int, int], axes: tuple[int, int], count: int, seed: int
) -> None:
    n, m = lengths
    indices = some_indices(*axes, -(-n // query_size), count, blocks=-(-m // size), seed=seed)
    mask = Blocks(indices, size, query_size)
    mask.check(2, 3, n, m)
    expected = by_loop(indices, size, query_size, n, m)
    assert torch.equal(mask.dense(n, m), expected)
    assert torch.equal((~mask).dense(n, m), ~expected)
    for height, width in ((1, 1), (3, 4), (16, 16), (size, query_size)):  # surveys are exact
        tile = whole(n, m)
        survey = mask.survey(Grid(n, m, height, width, tile.q_positions, tile.k_positions))
        for i, band in enumerate(expected.split(height, 2)):
            for j, part in enumerate(band.split(width, 3)):
                assert survey.some[:, i, j].tolist() == part.flatten(1).any(1).tolist()
                assert survey.every[:, i, j].tolist() == part.flatten(1).all(1).tolist()


def test_shapes_of_lists() -> None:
    indices = torch.tensor([[0, 2], [1, -1]])
    for same in (indices, indices[None], indices[None, None], indices.int()):
        assert torch.equal(Blocks(same, 3).dense(6, 9), by_loop(indices[None, None], 3, 3, 6, 9))


@pytest.mark.parametrize("kernel", available())
@pytest.mark.parametrize("per_head", [False, True])
def test_every_kernel_gives_what_the_same_tensor_gives(kernel: str, per_head: bool) -> None:
    n, m = 70, 83
    q, k, v = (normal(2, h, x, 8, seed=h + x, dtype=torch.float32) for h, x in ((4, n), (2, m), (2, m)))
    for x in (q, k, v):
        x.requires_grad_()
    mask = Causal() & Blocks(some_indices(2, 4 if per_head else 1, 5, 3, blocks=6), 16, 14)
    results = []
    for name, each in ((kernel, mask), ("reference", Keep(mask.dense(n, m)))):
        out = regard.attend(q, k, v, mask=each, kernel=name)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hidden_blocks_are_not_computed() -> None:
    """`blockwise` plans strips of one block of queries against their own blocks of keys alone: nothing is masked."""
    indices = torch.stack([torch.tensor([[0, 3], [5, -1], [7, 2], [1, 1]]), torch.tensor([[4, 6]] * 4)])[None]
    q, k = torch.randn(1, 2, 256, 4), torch.randn(1, 2, 512, 4)
    call = prepare(q, k, k, mask=Blocks(indices, 64))
    assert sides(call) == (64, 64)
    strips = plan_strips(call, *sides(call))
    for head in range(2):
        plans = strips(slice(0, 1), slice(head, head + 1))
        assert not any(plan.partly for plan in plans)
        for plan, chosen in zip(plans, indices[0, head].tolist(), strict=True):
            keys = [key // 64 for run in plan.runs for key in range(run.start, run.stop, 64)]
            assert keys == sorted(set(chosen) - {-1})
    both = strips(slice(0, 1), slice(0, 2))
    assert sum(plan.width for plan in both) == 64 * (4 + 3 + 4 + 3)


def test_small_blocks_are_planned_a_few_at_a_time() -> None:
    q = torch.randn(1, 1, 300, 4)
    assert sides(prepare(q, q, q, mask=Blocks(torch.zeros(300, 1).long(), 5, 1))) == (32, 35)
    assert sides(prepare(q, q, q, mask=Blocks(torch.zeros(1, 1).long(), 5000))) == (256, 128)
    assert sides(prepare(q, q, q, mask=Causal() & ~Blocks(torch.zeros(5, 1).long(), 64))) == (64, 64)
    assert sides(prepare(q, q, q, mask=Causal())) == (256, 128)


def test_large_planes_beside_the_reference() -> None:
    """Sizes at which `blockwise` cuts into chunks and strips, each kv head with its own."""
    n = 600
    q, k, v = (normal(2, h, n, 4, seed=h).requires_grad_() for h in (4, 2, 2))
    mask = Blocks(some_indices(1, 4, 10, 2, blocks=10), 64) & Padding(lengths=torch.tensor([600, 411]))
    results = []
    for kernel in ("blockwise", "reference"):
        out = regard.attend(q, k, v, mask=mask, kernel=kernel, softcap=3.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_auto_leaves_a_plane_that_is_mostly_hidden_to_a_kernel_that_skips() -> None:
    q = torch.randn(1, 4, 4096, 4, dtype=torch.float64)
    few = Blocks(some_indices(1, 4, 64, 2, blocks=64), 64)
    assert "fused: no, it needs the mask" in regard.explain(q, q, q, mask=few)
    assert "blockwise: chosen" in regard.explain(q, q, q, mask=few)
    shared = Blocks(some_indices(64, 2, blocks=64), 64)
    assert "fused: no, it would compute the 97% that is hidden" in regard.explain(q, q, q, mask=shared)


def test_parts_of_a_plane_at_any_corner() -> None:
    indices = some_indices(2, 3, 5, 2, blocks=6)
    mask = Blocks(indices, 3, 4) & Hide(torch.zeros(1, 3, 17, 18).bool())
    q, k = normal(2, 3, 17, 4), normal(2, 3, 18, 4)
    call = prepare(q, k, k, mask=mask)
    for rows, cols, heads in (
        (slice(3, 9), slice(5, 16), slice(1, 3)),
        (slice(0, 17), slice(17, 18), slice(0, 1)),
        (slice(8, 8), slice(2, 4), slice(0, 3)),
    ):
        of_heads = [x[:, heads] for x in (q[:, :, rows], k[:, :, cols], k[:, :, cols])]
        part = call.part(*of_heads, heads, rows, cols)
        assert part.mask is not None
        n, m = part.shape[2:]
        assert torch.equal(part.mask.block(part.whole()).expand(2, -1, n, m), mask.dense(17, 18)[:, heads, rows, cols])
        again = unflatten(flatten(part)).mask
        assert again is not None
        assert torch.equal(again.block(part.whole()), part.mask.block(part.whole()))


def test_lists_differ_along_the_axis_of_vmap() -> None:
    q = normal(3, 2, 2, 8, 4)
    indices = some_indices(3, 2, 1, 4, 2, blocks=4)

    def run(q: Tensor, indices: Tensor) -> Tensor:
        return regard.attend(q, q, q, mask=Blocks(indices, 2), softcap=2.0)

    torch.testing.assert_close(
        torch.func.vmap(run)(q, indices), torch.stack([run(*x) for x in zip(q, indices, strict=True)])
    )


def test_compiled() -> None:
    q, indices = normal(2, 2, 70, 4), some_indices(1, 2, 5, 2, blocks=5)

    def run(q: Tensor, indices: Tensor) -> Tensor:
        return regard.attend(q, q, q, mask=Blocks(indices, 16), softcap=2.0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, indices), run(q, indices))


@pytest.mark.parametrize("heads", [1, 2])
def test_watch_measures_what_is_chosen(heads: int) -> None:
    """And a token that does not see itself is no padding."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(16, num_heads=2)
    x, mask = torch.randn(2, 12, 16), Blocks(some_indices(1, heads, 4, 2, blocks=4, seed=3), 3)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        out = layer(x, mask=mask)
    torch.testing.assert_close(out, layer(x, mask=mask))
    weights = torch.stack([torch.stack([seen[0].weights(head=h, batch=b) for h in range(2)]) for b in range(2)])
    assert torch.equal(weights > 0, mask.dense(12).expand(2, 2, -1, -1))
    visible = mask.dense(12)[:, 0].sum(-1)
    expected = visible.clamp(min=1).double().log().float().expand(2, -1)[:, None]
    torch.testing.assert_close(seen[0].uniform.entropy, expected)


@pytest.mark.of_cpu("values elsewhere are not read for a check")
def test_wrong_lists_are_refused_in_words() -> None:
    q = torch.randn(2, 3, 10, 4)
    with pytest.raises(ValueError, match="expected Q = 3 blocks of queries, for 10 of them, 4 per block"):
        regard.attend(q, q, q, mask=Blocks(torch.zeros(2, 1).long(), 4))
    with pytest.raises(ValueError, match=r"of 3 key blocks \(10 keys, 4 per block\), or -1 for none, received 3"):
        regard.attend(q, q, q, mask=Blocks(torch.full((3, 1), 3), 4))
    with pytest.raises(ValueError, match="or -1 for none, received -2"):
        regard.attend(q, q, q, mask=Blocks(torch.full((3, 1), -2), 4))
    with pytest.raises(ValueError, match=r"expected shape \(1\|B, 1\|H, 1\|Q, 1\|K\), B = 2, H = 3"):
        regard.attend(q, q, q, mask=Blocks(torch.zeros(2, 2, 3, 1).long(), 4))
    with pytest.raises(TypeError, match=r"Blocks indices: expected an integer tensor.*bool.*masks.Keep"):
        Blocks(torch.ones(3, 3).bool(), 4)
    with pytest.raises(TypeError, match=r"received dtype torch.float32; remedy: indices.long\(\)"):
        Blocks(torch.ones(3, 3), 4)
    with pytest.raises(TypeError, match="received list"):
        Blocks([[0]], 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"received shape \(3,\)"):
        Blocks(torch.zeros(3).long(), 4)
    with pytest.raises(ValueError, match="Blocks size: expected at least 1"):
        Blocks(torch.zeros(3, 1).long(), 0)
    with pytest.raises(ValueError, match="Blocks query_size: expected at least 1"):
        Blocks(torch.zeros(3, 1).long(), 4, query_size=0)
