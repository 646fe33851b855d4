"""Rotary positions of several axes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import KVCache, MultiHeadAttention, RollingCache
from regard.masks import Causal, Window
from regard.positions import LinearScaling, MultiAxisRotary, Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
ORDERS = ["contiguous", "interleaved", "grouped", "separate"]
orders = pytest.mark.parametrize("order", ORDERS)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(*shape: int, axes: int = 3) -> Tensor:
    return torch.randint(0, 97, (*shape, axes), generator=torch.Generator().manual_seed(4))


def test_angles_by_hand() -> None:
    """Base 10 ** 6 and R = 12: frequencies 10 ** 0, -1, ..., -5; positions 1 and 100."""
    wanted = {
        "contiguous": [1, 1e-1, 1e-2, 1e-1, 1e-2, 1e-3],
        "interleaved": [1, 1e1, 1e-2, 1e-1, 1e-4, 1e-3],
        "grouped": [1, 1e-2, 1e-4, 1e1, 1e-1, 1e-3],
        "separate": [1, 1e-2, 1e-4, 1e2, 1e0, 1e-2],
    }
    for order, angles in wanted.items():
        rotary = MultiAxisRotary(12, (3, 3), order=order, base=1e6)  # type: ignore[arg-type]
        found = rotary.angles(torch.tensor([[1, 100]]), dtype=torch.float64)
        torch.testing.assert_close(found[0], torch.tensor(angles, dtype=torch.float64), **TIGHT)


def test_interleaved_where_an_axis_has_fewer_pairs() -> None:
    assert MultiAxisRotary(20, (6, 3, 1), order="interleaved")._axes == (0, 1, 2, 0, 1, 0, 0, 1, 0, 0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_a_text_is_rotated_as_by_plain_rotary(order: Any, interleaved: bool) -> None:
    options: dict[str, Any] = {"width": 12, "interleaved": interleaved, "scaling": LinearScaling(3.0)}
    plain, axes = Rotary(14, **options), MultiAxisRotary(14, (3, 2, 1), order=order, **options)
    x, at = noise(2, 3, 7, 14), torch.arange(5, 12)
    for positions in (5, at, at[:, None].expand(-1, 3), at[None, :, None].expand(2, -1, 3)):
        torch.testing.assert_close(axes(x, positions), plain(x, 5), **TIGHT)


@orders
def test_scores_depend_on_the_distance_along_each_axis(order: Any) -> None:
    rotary = MultiAxisRotary(12, (2, 2, 2), order=order)
    q, k, at = noise(1, 1, 7, 12), noise(1, 1, 7, 12, seed=2), places(7)
    moved = at + torch.tensor([11, 3, 29])
    torch.testing.assert_close(
        rotary(q, moved) @ rotary(k, moved).mT, rotary(q, at) @ rotary(k, at).mT, rtol=1e-9, atol=1e-9
    )
    assert not torch.allclose(
        rotary(q, at + torch.tensor([0, 1, 0])) @ rotary(k, at).mT, rotary(q, at) @ rotary(k, at).mT
    )


def new_layer(order: Any = "contiguous") -> MultiHeadAttention:
    torch.manual_seed(3)
    rotary = MultiAxisRotary(12, (2, 2, 2), order=order)
    return MultiHeadAttention(17, 6, num_kv_heads=3, head_dim=12, position_encoding=rotary).double().eval()


@orders
@pytest.mark.parametrize("mask", [Causal(), Window(3)], ids=str)
@torch.no_grad()
def test_masks_compare_the_order_of_tokens_and_a_cache_keeps_rotated_keys(order: Any, mask: Any) -> None:
    layer, x, at, cache = new_layer(order), noise(2, 11, 17), places(2, 11), KVCache()
    out, weights = layer(x, mask=mask, positions=at, need_weights=True)
    assert torch.equal(weights > 0, mask.dense(11).expand_as(weights))
    pieces = zip(x.split([5, 1, 4, 1], 1), at.split([5, 1, 4, 1], 1), strict=True)
    parts = [layer(part, mask=mask, positions=where, cache=cache) for part, where in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), out, **TIGHT)
    rows = [layer(x[i], mask=mask, positions=at[i]) for i in range(2)]  # without a batch
    torch.testing.assert_close(torch.stack(rows), out, **TIGHT)


@torch.no_grad()
def test_a_text_needs_no_positions_but_with_a_cache() -> None:
    layer, x, cache = new_layer(), noise(2, 7, 17), KVCache()
    whole = layer(x, mask=Causal())
    torch.testing.assert_close(layer(x, mask=Causal(), positions=torch.arange(7)), whole, **TIGHT)
    first = layer(x[:, :5], mask=Causal(), cache=cache)
    with pytest.raises(
        ValueError, match=r"positions: expected \(N, A\).*only the caller knows.*remedy: torch.arange\(len"
    ):
        layer(x[:, 5:], mask=Causal(), cache=cache)
    assert len(cache) == 5
    rest = layer(x[:, 5:], mask=Causal(), cache=cache, positions=torch.arange(5, 7))
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, **TIGHT)


@pytest.mark.slow
@torch.no_grad()
def test_compiles_for_any_length() -> None:
    layer = new_layer("interleaved")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (11, 7):
        x, at = noise(2, n, 17), places(2, n)
        wanted = layer(x, mask=Causal(), positions=at)
        torch.testing.assert_close(compiled(x, mask=Causal(), positions=at), wanted, **TIGHT)


@torch.no_grad()
def test_is_copied() -> None:
    layer, x, at = new_layer("interleaved"), noise(2, 11, 17), places(2, 11)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x, positions=at), layer(x, positions=at), **TIGHT)
    wanted = "MultiAxisRotary(12, sections=(2, 2, 2), order='interleaved', base=10000)"
    assert repr(twin.position_encoding) == wanted


@pytest.mark.on_meta
def test_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sections: expected numbers with the sum 6.*received \(2, 3\), with the sum 5"
    ):
        MultiAxisRotary(12, (2, 3))
    with pytest.raises(ValueError, match=r"sections: expected a positive integer for each of two axes or more"):
        MultiAxisRotary(12, (6,))
    with pytest.raises(ValueError, match=r"sections: expected equal ones where order=\"grouped\", received \(4, 2\)"):
        MultiAxisRotary(12, (4, 2), order="grouped")
    with pytest.raises(ValueError, match=r"order: expected one of 'contiguous', .*, received 'spiral'"):
        MultiAxisRotary(12, (3, 3), order="spiral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scaling: expected None where order='separate'"):
        MultiAxisRotary(12, (3, 3), order="separate", scaling=LinearScaling(2.0))
    layer, x = new_layer(), noise(2, 7, 17)
    with pytest.raises(
        ValueError, match=r"positions: expected \(7, 3\) or \(2, 7, 3\).*remedy: positions.movedim\(0, -1\)"
    ):
        layer(x, positions=places(2, 7).movedim(-1, 0))
    with pytest.raises(ValueError, match=r"positions: expected \(7, 3\) or .* received \(2, 7\)"):
        layer(x, positions=torch.zeros(2, 7, dtype=torch.long))
    with pytest.raises(TypeError, match=r"positions: expected an integer tensor"):
        layer(x, positions=places(7).double())
    with pytest.raises(
        TypeError, match=r"cache: expected a KVCache: a RollingCache numbers its tokens anew.*MultiAxisRotary"
    ):
        layer(x, positions=places(7), cache=RollingCache(5))
