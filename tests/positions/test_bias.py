"""Biases of position: closed forms, others' published numbers, a block as the slice of the whole, no dense tensor."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

import regard
from regard.masks import Causal, Padding, Tile, Window
from regard.positions import Alibi, Bias, RelativeBias, as_biases
from regard.positions.bias import Buckets, DenseBias, Saturated, add_by_bucket

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


# ----------------------------------------------------------------------------------------------------
# Alibi


def published_slopes(heads: int) -> list[float]:
    """As in the paper's code: a geometric series; else that of the power of two below and every other of the next."""

    def series(n: int) -> list[float]:
        start = 2 ** (-8 / n)
        return [start ** (i + 1) for i in range(n)]

    if heads & (heads - 1) == 0:
        return series(heads)
    below = 1 << (heads.bit_length() - 1)
    return series(below) + series(2 * below)[0::2][: heads - below]


def test_eight_heads_halve() -> None:
    assert Alibi(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 20, 25, 31, 112])
def test_slopes_are_the_published_ones(heads: int) -> None:
    expected = torch.tensor(published_slopes(heads), dtype=torch.float64)
    torch.testing.assert_close(Alibi(heads).to(expected).slopes, expected, rtol=1e-13, atol=0)


def test_under_a_causal_mask_it_is_slope_times_key_minus_query() -> None:
    heads, n = 8, 11
    q = torch.zeros(1, heads, n, 2, dtype=torch.float64)
    scores = regard.attention_weights(q, q, mask=Causal(), bias=Alibi(heads), stage="biased")
    for h in range(heads):
        for i in range(n):
            for j in range(n):
                expected = 2.0 ** -(h + 1) * (j - i) if j <= i else float("-inf")
                assert scores[0, h, i, j].item() == expected


def test_it_is_symmetric_and_falls_by_the_distance() -> None:
    block = Alibi(2).block(torch.tensor([[3]]), torch.arange(7)[None])
    assert block[0, 0, 0].tolist() == [-0.1875, -0.125, -0.0625, 0.0, -0.0625, -0.125, -0.1875]


def test_positions_per_batch_item() -> None:
    q_positions, k_positions = torch.tensor([[0, 5], [7, 2]]), torch.tensor([[1, 2, 3], [7, 0, 11]])
    block = Alibi(8).block(q_positions, k_positions)
    assert block.shape == (2, 8, 2, 3)
    for b in range(2):
        distance = (q_positions[b][:, None] - k_positions[b][None]).abs()
        assert torch.equal(block[b, 2], -(2.0**-3) * distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_neither_rounds_slopes_nor_distances(dtype: torch.dtype) -> None:
    """bfloat16 counts to 256 and float16 ends at 65,504; texts are longer."""
    narrow = Alibi(12).to(dtype)
    q, k = torch.tensor([[100_001]]), torch.tensor([[0, 99_744]])
    torch.testing.assert_close(narrow.block(q, k), Alibi(12).block(q, k), rtol=0, atol=0)
    given = Alibi(1, slopes=torch.tensor([0.5])).to(dtype)
    assert given.block(torch.tensor([[1001]]), torch.tensor([[0]])).item() == -500.5


def test_slopes_survive_the_meta_device() -> None:
    with torch.device("meta"):
        layer = regard.MultiHeadAttention(12, 3, position_encoding=Alibi(3))
    layer = layer.to_empty(device="cpu")
    assert torch.equal(layer.position_encoding.slopes, Alibi(3).slopes)


def test_slopes_are_in_no_state_dict_and_are_no_parameters() -> None:
    assert Alibi(5).state_dict() == {}
    assert list(Alibi(5).parameters()) == []


def test_given_slopes_can_learn() -> None:
    """The gradient of a slope is minus the sum of distances times the gradient of the scores."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 7, dtype=torch.float64)
    grads = []
    for kernel in ("blockwise", "reference"):
        slopes = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
        out = regard.attend(q, k, v, bias=Alibi(3, slopes=slopes), kernel=kernel)
        grads.append(torch.autograd.grad((out * v).sum(), slopes)[0])
    assert grads[0].abs().min() > 1e-3
    torch.testing.assert_close(*grads, **TIGHT)


def test_alibi_refuses() -> None:
    with pytest.raises(ValueError, match="Alibi num_heads: expected at least 1, received 0"):
        Alibi(0)
    with pytest.raises(ValueError, match=r"Alibi slopes: expected shape \(3,\), received \(2,\)"):
        Alibi(3, slopes=torch.ones(2))
    q = torch.zeros(1, 2, 3, 5)
    with pytest.raises(ValueError, match="bias Slopes: expected 2 heads, received 3"):
        regard.attend(q, q, q, bias=Alibi(3))


# ----------------------------------------------------------------------------------------------------
# RelativeBias


BUCKETS = [(32, 128), (32, 20), (8, 16), (64, 256), (4, 3), (16, 1000)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", BUCKETS)
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    ours = Buckets(torch.zeros(1, num_buckets, 1), bidirectional, max_distance)
    q, k = torch.arange(0, 301)[None], torch.arange(0, 613)[None]
    theirs = T5Attention._relative_position_bucket(k - q.T, bidirectional, num_buckets, max_distance)
    buckets = ours.buckets(Tile.at(q, k))
    assert torch.equal(buckets[0], theirs)
    assert buckets.max() < num_buckets


def test_near_keys_have_buckets_of_their_own_and_far_ones_share() -> None:
    bias = RelativeBias(1, num_buckets=8, max_distance=16)
    bias.weight.data = torch.arange(8.0)[:, None]
    block = bias.block(torch.tensor([[20]]), torch.tensor([[0, 3, 15, 17, 18, 19, 20, 21, 22, 23, 37, 40]]))
    assert block[0, 0, 0].tolist() == [3, 3, 2, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    causal = RelativeBias(1, num_buckets=8, max_distance=16, bidirectional=False)
    causal.weight.data = torch.arange(8.0)[:, None]
    block = causal.block(torch.tensor([[20]]), torch.tensor([[0, 5, 15, 16, 17, 19, 20, 21, 40]]))
    assert block[0, 0, 0].tolist() == [7, 7, 4, 4, 3, 1, 0, 0, 0]


@pytest.mark.parametrize("bias", [Alibi(3), RelativeBias(3), RelativeBias(3, num_buckets=8, bidirectional=False)])
def test_a_block_is_the_slice_of_the_whole(bias: nn.Module) -> None:
    q, k = torch.tensor([[3, 200, 0, 17, 40]]), torch.arange(0, 77)[None]
    full = bias.block(q, k)
    assert full.shape == (1, 3, 5, 77)
    for i in range(0, 5, 2):
        for j in range(0, 77, 13):
            assert torch.equal(bias.block(q[:, i : i + 2], k[:, j : j + 13]), full[:, :, i : i + 2, j : j + 13])


@pytest.mark.parametrize("mask", [None, Causal(), Window(3) & Padding(lengths=torch.tensor([11, 5]))])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_its_gradient_is_that_of_the_reference(mask: regard.masks.Mask | None, bidirectional: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 7, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 2, 11, 5)
    bias = RelativeBias(6, num_buckets=8, max_distance=10, bidirectional=bidirectional).double()
    grads = []
    for kernel in ("blockwise", "reference"):
        out = regard.attend(q.double(), k.double(), v.double(), mask=mask, bias=bias, kernel=kernel)
        grads.append(torch.autograd.grad(out.square().sum(), bias.weight)[0])
    assert grads[0].abs().max() > 1e-2
    torch.testing.assert_close(*grads, **TIGHT)


def test_a_bucket_that_no_pair_falls_into_gets_no_gradient() -> None:
    bias = RelativeBias(2, num_buckets=8, max_distance=16).double()
    q = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    regard.attend(q, q, q, bias=bias).square().sum().backward()
    used = bias.weight.grad.abs().sum(1) > 0
    assert used.tolist() == [True, True, True, False, False, True, True, False]  # distances -2 .. 2


def test_relative_bias_refuses() -> None:
    with pytest.raises(ValueError, match=r"RelativeBias: expected at least 4 buckets .*received num_buckets=3"):
        RelativeBias(2, num_buckets=3)
    with pytest.raises(ValueError, match="max_distance above the exact ones, received num_buckets=32, max_distance=8"):
        RelativeBias(2, max_distance=8)
    q = torch.zeros(1, 2, 3, 5)
    with pytest.raises(ValueError, match="bias Buckets: expected 2 heads, received 3"):
        regard.attend(q, q, q, bias=RelativeBias(3))


def test_reset_parameters_starts_again() -> None:
    bias = RelativeBias(12, num_buckets=512, max_distance=2048)
    bias.weight.data.fill_(7.0)
    bias.reset_parameters()
    assert abs(bias.weight.std().item() - 0.02) < 0.002


def test_reprs() -> None:
    assert repr(Alibi(12)) == "Alibi(num_heads=12)"
    assert repr(RelativeBias(3)) == "RelativeBias(num_heads=3, num_buckets=32, max_distance=128, bidirectional=True)"


@pytest.mark.parametrize("bias", [Alibi(3), RelativeBias(3)])
def test_copies_and_pickles_are_the_same(bias: nn.Module) -> None:
    q, k = torch.arange(5)[None], torch.arange(7)[None]
    for other in (copy.deepcopy(bias), pickle.loads(pickle.dumps(bias))):
        assert torch.equal(other.block(q, k), bias.block(q, k))
        assert torch.equal(other.double().block(q, k).float(), bias.block(q, k))


# ----------------------------------------------------------------------------------------------------
# Several of them, and tensors


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
def test_several_add_up(kernel: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 7, dtype=torch.float64)
    relative, alibi = RelativeBias(3).double(), Alibi(3).double()
    flat, full = torch.randn(5, 5, dtype=torch.float64), torch.randn(2, 1, 5, 1, dtype=torch.float64)
    together = regard.attend(q, k, v, bias=[relative, [flat, alibi], full], kernel=kernel)
    at = torch.arange(5)[None]
    total = relative.block(at, at) + flat + alibi.block(at, at) + full
    expected = (q @ k.mT * 7**-0.5 + total).softmax(-1) @ v
    torch.testing.assert_close(together, expected, **TIGHT)


def test_what_may_be_a_bias() -> None:
    assert as_biases(None) == ()
    assert as_biases([]) == ()
    (dense,) = as_biases(torch.zeros(5, 7))
    assert isinstance(dense, DenseBias)
    assert dense.weight.shape == (1, 1, 5, 7)
    (same,) = as_biases(dense)
    assert same is dense
    assert len(as_biases([Alibi(2), [torch.zeros(5, 7), RelativeBias(2)]])) == 3


@pytest.mark.parametrize("given", ["causal", 3, Causal(), {"a": 1}])
def test_what_may_not(given: object) -> None:
    with pytest.raises(TypeError, match=f"bias: expected a tensor, a bias object .*received {type(given).__name__}"):
        as_biases(given)


def test_saturated_counts_distances_to_the_first_keys_up_to_a_bound() -> None:
    inner = Alibi(2).as_bias()
    bias = Saturated(inner, sinks=2, last=4)
    q, k = torch.arange(8)[None], torch.arange(8)[None]
    block = bias.block(Tile.at(q, k))
    for i in range(8):
        for j in range(8):
            distance = abs(min(i, 4) - j) if j < 2 else abs(i - j)
            assert block[0, 0, i, j].item() == -distance / 16


# ----------------------------------------------------------------------------------------------------
# Never dense


LONG = """
    import torch, regard
    from regard.masks import Causal, Window
    from regard.positions import Alibi, RelativeBias

    heads, m, width = 12, 32768, 8
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, heads, m, width)
    regard.attend(k[:, :, :64], k[:, :, :64], v[:, :, :64], bias=Alibi(heads), kernel="blockwise")  # warm

    def peak():  # the most memory this process ever held, in MB; getrusage would count its parent's too
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

    before = peak()
    for bias, n in ((Alibi(heads), m), (RelativeBias(heads), m // 4)):
        with torch.no_grad():
            few = regard.attend(k[:, :, -64:], k, v, mask=Causal(), bias=bias)
            many = regard.attend(k[:, :, -n:], k, v, mask=Window(64), bias=bias)
        # the last rows against their formula, on the keys that they see
        i = torch.arange(m - 3, m)
        scores = k[:, :, -3:] @ k[:, :, -66:].mT * width**-0.5 + bias.block(i[None], torch.arange(m - 66, m)[None])
        hidden = ~Window(64).dense(3, 66)
        expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, -66:]
        torch.testing.assert_close(many[:, :, -3:], expected, rtol=1e-4, atol=1e-5)
        scores = k[:, :, -1:] @ k.mT * width**-0.5 + bias.block(i[None, -1:], torch.arange(m)[None])
        torch.testing.assert_close(few[:, :, -1:], scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)
    print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is not here")
@pytest.mark.slow
def test_twelve_heads_at_32768_tokens_fit_in_memory() -> None:
    """A dense bias would be 12 * 32768 * 32768 * 4 bytes = 51 GB, and a quarter of it for the second."""
    source = Path(regard.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LONG)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 400


def test_the_gradient_of_a_long_bias_is_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block that a kernel asks for is larger than a small part of the plane, forward or backward."""
    asked: list[int] = []
    original = Buckets.block

    def spy(self: Buckets, tile: Tile) -> Tensor:
        asked.append(math.prod(tile.shape))
        return original(self, tile)

    monkeypatch.setattr(Buckets, "block", spy)
    n = 4096
    bias = RelativeBias(2, bidirectional=False)
    q = torch.randn(1, 2, n, 3, requires_grad=True)
    out = regard.attend(q, q, q, mask=Causal() & Window(100), bias=bias)
    out.sum().backward()
    assert asked
    assert max(asked) <= n * n / 32
    assert bias.weight.grad.abs().sum() > 0


class Steps(Bias):
    """A bias of one's own: a number for each head and parity of distance, with a flaw on demand."""

    fields = ("weight", "flaw")

    def __init__(self, weight: Tensor, flaw: int = 0) -> None:
        self.weight, self.flaw = weight, flaw

    def block(self, tile: Tile) -> Tensor:
        odd = (tile.k_positions[:, None, None, :] - tile.q_positions[:, None, :, None]) % 2
        added = odd * self.weight[:, :, None, None]
        return [added, added.long(), added[0], added[:, :1].expand(-1, 7, -1, -1), added[..., :-1]][self.flaw]


@pytest.mark.parametrize("kernel", ["auto", *regard.kernels.available()])
@pytest.mark.parametrize("n", [3, 70])
def test_a_bias_of_ones_own_is_checked(kernel: str, n: int) -> None:
    q, k = torch.randn(2, 3, n, 4), torch.randn(2, 3, 71, 4)
    weight = torch.randn(1, 3)
    right = Steps(weight).block(Tile.at(torch.arange(71 - n, 71)[None], torch.arange(71)[None]))
    torch.testing.assert_close(
        regard.attend(q, k, k, bias=Steps(weight), kernel=kernel),
        regard.attend(q, k, k, bias=right, kernel="reference"),
    )
    with pytest.raises(TypeError, match=r"Steps.block: expected a floating-point tensor.*received dtype torch.int64"):
        regard.attend(q, k, k, bias=Steps(weight, 1), kernel=kernel)
    for flaw in (2, 3, 4):
        with pytest.raises(ValueError, match=r"Steps.block: expected shape \(1, 1\|H, 1\|n, 1\|m\).* received shape"):
            regard.attend(q, k, k, bias=Steps(weight, flaw), kernel=kernel)


def test_a_bias_without_a_weight_is_told_so() -> None:
    class Bare(Bias):
        def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
            return torch.zeros(1, 1, 1, 1)

    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(TypeError, match=r"Bare.weight: expected a tensor that leads with a batch.*torch.zeros\(1, H\)"):
        regard.attend(q, q, q, bias=Bare())


def test_sums_by_bucket_are_the_same_in_either_way() -> None:
    """On a GPU by a product, whose order is fixed."""
    buckets, rows = torch.arange(29) * 7 % 5, torch.randn(29, 3, dtype=torch.float64)
    added, multiplied = torch.ones(2, 6, 3, dtype=torch.float64)
    add_by_bucket(added, buckets, rows, in_order=False)
    add_by_bucket(multiplied, buckets, rows, in_order=True)
    torch.testing.assert_close(added, multiplied)
    assert (added[5] == 1).all()  # a bucket without rows
