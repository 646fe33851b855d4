"""`Chunk`: with caches, beside other masks, in the kernels, and under measures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import prepare
from regard.kernels import available
from regard.kernels.lowering import lower_mask, pairs_to_evaluate
from regard.masks import Causal, Chunk, Documents, Keep, Padding, Window

pytestmark = pytest.mark.on_device


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kernel", available())
def test_each_chunk_is_attention_of_its_own(kernel: str) -> None:
    q, k, v = (normal(2, h, 23, 8, seed=h, dtype=torch.float32).requires_grad_() for h in (4, 2, 2))
    out = regard.attend(q, k, v, mask=Causal() & Chunk(7), kernel=kernel)
    chunks = [[x[:, :, i : i + 7] for x in (q, k, v)] for i in range(0, 23, 7)]
    expected = torch.cat([regard.attend(*each, mask=Causal(), kernel="reference") for each in chunks], 2)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["growing", "in two pieces"])
def test_a_layer_that_decodes_with_chunks_gives_what_it_gives_at_once(cache: str) -> None:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(
        24, num_heads=3, num_kv_heads=1, position_encoding=regard.positions.Rotary(8)
    ).double()
    layer.eval()
    x, mask, kv = normal(2, 13, 24), Causal() & Chunk(5), regard.KVCache()
    pieces = [x[:, :7], *x[:, 7:].split(1 if cache == "growing" else 6, 1)]
    with torch.no_grad():
        whole = layer(x, mask=mask)
        ours = torch.cat([layer(piece, mask=mask, cache=kv) for piece in pieces], 1)
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


def test_documents_and_chunks_together_are_two_rows_of_integers() -> None:
    """Packed texts in chunks: no kernel needs a tensor of pairs, and equal numbers see equal ones."""
    q = torch.randn(2, 3, 31, 8)
    ids = torch.arange(31).div(9, rounding_mode="floor") + torch.tensor([[0], [2**40]])
    mask = Causal() & Documents(ids) & Chunk(4) & Documents(torch.arange(31) % 3)
    call = prepare(q, q, q, mask=mask)
    assert pairs_to_evaluate(call) == 0
    seen = lower_mask(call)
    assert seen.dense is None
    assert seen.documents is not None
    of_queries, of_keys = seen.documents
    same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    assert torch.equal(same & Causal().dense(31), mask.dense(31))


@pytest.mark.of_cpu("of the native kernel")
@pytest.mark.skipif("native" not in available(), reason="the native kernel was not compiled")
def test_documents_and_chunks_in_the_native_kernel() -> None:
    q, k, v = (torch.randn(2, 2, 67, 8) for _ in range(3))
    positions = torch.arange(67).expand(2, -1) + torch.tensor([[3], [50]])
    for mask in (Causal() & Chunk(16), Chunk(5) & Documents(torch.arange(67) // 13), ~Chunk(3), Chunk(7) | Window(2)):
        ours = regard.attend(q, k, v, mask=mask, positions=positions, key_positions=positions, kernel="native")
        theirs = [x.double() for x in (q, k, v)]
        exact = regard.attend(*theirs, mask=mask, positions=positions, key_positions=positions, kernel="reference")
        torch.testing.assert_close(ours, exact.float(), rtol=2e-5, atol=2e-6)


def test_a_chunk_that_holds_the_plane_is_no_mask() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 11, 4)
    assert prepare(q, k, k, mask=Chunk(11)).mask is None
    assert prepare(q, k, k, mask=Chunk(10)).mask is not None
    assert prepare(q, k, k, mask=Chunk(11), positions=9).mask is not None  # the last query stands at 11
    assert prepare(q, k, k, mask=Chunk(11, start=5)).mask is not None
    assert prepare(q, k, k, mask=Causal() & Chunk(20, start=-3)).mask is not None  # (that is Causal)


def test_the_part_of_a_plane_keeps_its_chunks() -> None:
    mask = Causal() & Chunk(5, start=1)
    q, k, v = (normal(1, 2, 17, 4, seed=i) for i in range(3))
    call = prepare(q, k, v, mask=mask)
    rows, cols = slice(6, 13), slice(3, 11)
    part = call.part(q[:, :, rows], k[:, :, cols], v[:, :, cols], slice(0, 2), rows, cols)
    assert part.mask is not None
    assert torch.equal(part.mask.block(part.whole()), mask.dense(17)[:, :, rows, cols])


@pytest.mark.parametrize("padded", [False, True])
def test_uniform_baselines_are_those_of_the_same_mask_as_a_tensor(padded: bool) -> None:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(16, num_heads=2)
    x, mask = torch.randn(2, 13, 16), Causal() & Chunk(5)
    mask = mask & Padding(lengths=torch.tensor([13, 9])) if padded else mask
    records = []
    for each in (mask, Keep(mask.dense(13))):
        with regard.watch(layer) as seen, torch.no_grad():
            layer(x, mask=each)
        records.append(seen[0])
    ours, theirs = records
    for name in ("entropy", "peak", "distance", "on_first", "received"):
        torch.testing.assert_close(getattr(ours.uniform, name), getattr(theirs.uniform, name))
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


def test_sizes_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match="Chunk size: expected at least 1, received 0"):
        Chunk(0)
    with pytest.raises(TypeError, match="Chunk size: expected an integer, received float"):
        Chunk(2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Chunk start: expected an integer, received bool True"):
        Chunk(2, start=True)
