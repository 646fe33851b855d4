"""Dropout's hash: the right rate, no pattern, and numbers that are what they say."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.dropout import Dropout, new_seed

pytestmark = pytest.mark.on_device

ALL = slice(None)


def kept(p: float, seed: int, b: int, h: int, n: int, m: int) -> torch.Tensor:
    """1 where a weight stays, 0 where it is dropped."""
    return Dropout.of(p, torch.tensor([seed]), b, h, n, m).block(ALL, ALL, ALL, slice(0, m), torch.float64)


def test_a_float_of_each_width_is_the_same() -> None:
    whole = Dropout.of(0.3, torch.tensor([3]), 2, 5, 13, 17)
    wide, narrow = (whole.block(ALL, ALL, ALL, slice(0, 17), dtype) for dtype in (torch.float64, torch.float32))
    assert torch.equal(wide.float(), narrow)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -(2**31), 123456789])
def test_the_rate_is_p(p: float, seed: int) -> None:
    x = kept(p, seed, 2, 3, 401, 409)
    count = x.numel()
    sigma = (p * (1 - p) / count) ** 0.5
    assert abs((1 - x.mean().item()) - p) < 5 * sigma


def test_rows_columns_heads_items_and_seeds_are_independent() -> None:
    x = torch.cat([kept(0.5, seed, 3, 3, 211, 223) for seed in (7, 8)])  # (6, 3, 211, 223)
    z = (x - x.mean()) / x.std()
    sigma = z[0, 0].numel() ** -0.5
    for a, b in [
        (z[0, 0], z[0, 1]),
        (z[0, 0], z[1, 0]),
        (z[0, 0], z[3, 0]),
        (z[..., 1:], z[..., :-1]),
        (z[..., 1:, :], z[..., :-1, :]),
    ]:
        assert abs((a * b).mean().item()) < 5 * sigma
    for lag in (2, 4, 8, 16, 32, 64, 128):  # powers of two are where a weak hash shows
        assert abs((z[..., lag:] * z[..., :-lag]).mean().item()) < 5 * sigma
        assert abs((z[:, :, lag:] * z[:, :, :-lag]).mean().item()) < 5 * sigma
    # no row or column stands out, and four corners of a rectangle say nothing about each other
    assert abs(x.mean(-1) - 0.5).max() < 6 * (0.25 / 223) ** 0.5
    corners = z[..., :-1, :-1] * z[..., 1:, :-1] * z[..., :-1, 1:] * z[..., 1:, 1:]
    assert abs(corners.mean().item()) < 5 * sigma


def test_a_block_is_a_slice_of_the_whole() -> None:
    whole = Dropout.of(0.3, torch.tensor([3]), 2, 5, 13, 17)
    block = whole.block(slice(1, 2), slice(2, 4), slice(3, 11), slice(5, 16), torch.float32)
    full = whole.block(ALL, ALL, ALL, slice(0, 17), torch.float32)
    assert torch.equal(block, full[1:2, 2:4, 3:11, 5:16])
    scattered = torch.tensor([2, 3, 11])
    assert torch.equal(whole.block(ALL, ALL, ALL, scattered, torch.float32), full[..., scattered])


def test_a_shard_drops_what_the_whole_drops() -> None:
    """A slice of the numbers is the dropout of that slice: heads and rows are global."""
    whole = Dropout.of(0.3, torch.tensor([3]), 2, 6, 13, 17)
    shard = Dropout(0.3, whole.rows[:, 3:, 5:], whole.cols[:, 7:])
    mine = shard.block(ALL, ALL, ALL, slice(0, 10), torch.float32)
    assert torch.equal(mine, whole.block(ALL, slice(3, 6), slice(5, 13), slice(7, 17), torch.float32))


def test_the_hash_is_what_the_formula_says() -> None:
    """In plain Python integers, so that any other language can be held against it."""

    def wrap(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    def mix(x: int) -> int:
        for multiplier in (0x297A2D39, 0x2C1B3C6D):
            x = wrap(x * multiplier)
            x ^= x >> 15
        return x

    golden, seed, p = 0x1E3779B9, 20, 0.25
    x = kept(p, seed, 2, 3, 5, 7)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                for j in range(7):
                    row = mix(wrap(mix(wrap(seed + (b * 3 + h) * golden)) + i * golden))
                    col = mix(wrap(~seed + j * golden))
                    y = wrap((row ^ col) * 0x2C1B3C6D)
                    y = wrap((y ^ (y >> 15)) * 0x297A2D39)
                    assert x[b, h, i, j] == (y >= round(p * 2**32) - 2**31)


def test_everything_dropped_is_zero_and_not_nan() -> None:
    import regard

    q = torch.randn(1, 2, 3, 4)
    for kernel in ("reference", "blockwise"):
        assert (regard.attend(q, q, q, dropout=1.0, kernel=kernel) == 0).all()


def test_the_seed_comes_from_the_generator_or_from_torch() -> None:
    one, two = (new_seed(torch.Generator().manual_seed(5), torch.device("cpu")) for _ in range(2))
    assert torch.equal(one, two)
    torch.manual_seed(5)
    first = new_seed(None, torch.device("cpu"))
    second = new_seed(None, torch.device("cpu"))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, new_seed(None, torch.device("cpu")))
