"""The settled conventions, one test each, named after it. Others disagree on each of them; here there is one answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard
from regard import attend, attention_weights
from regard.kernels import available
from regard.masks import Causal, Documents, Hide, Keep, Padding, Prefix, Window
from regard.positions import Alibi, RelativeBias, Rotary

KERNELS = [name for name in available() if name != "fused"]


def normal(*shape: int, seed: int = 0, kernel: str = "") -> torch.Tensor:
    """Random numbers, float64; float32 for the kernel that has no float64."""
    dtype = torch.float32 if kernel == "native" else torch.float64
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = 1e-12 if a.dtype is torch.float64 else 3e-6
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


def seen(mask: object, n: int, m: int, **options: object) -> list[list[int]]:
    """Which keys each query gives weight to, as 0 and 1."""
    q, k = normal(1, 1, n, 3), normal(1, 1, m, 3, seed=1)
    return (attention_weights(q, k, mask=mask, **options)[0, 0] > 0).int().tolist()  # type: ignore[arg-type]


def test_layout_is_batch_first() -> None:
    layer = regard.MultiHeadAttention(6, 2).double()
    x = normal(3, 5, 6)
    for item in range(3):  # (batch, sequence, width): an item alone is the same
        close(layer(x)[item], layer(x[item : item + 1])[0])
    q, k, v = normal(2, 3, 5, 7), normal(2, 3, 11, 7), normal(2, 3, 11, 7)
    close(attend(q, k, v)[1, 2], attend(q[1:, 2:], k[1:, 2:], v[1:, 2:])[0, 0])  # (batch, heads, sequence, head width)


def test_boolean_mask_true_means_may_attend() -> None:
    t = torch.tensor([[True, False], [True, True]])
    assert seen(t, 2, 2) == [[1, 0], [1, 1]]
    assert seen(Keep(t), 2, 2) == [[1, 0], [1, 1]]
    assert seen(Hide(t), 2, 2) == [[0, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_mask_that_is_not_boolean_is_an_error_that_says_what_to_write(dtype: torch.dtype) -> None:
    q = normal(1, 1, 2, 3)
    with pytest.raises(TypeError, match=r"mask: expected a boolean.*received dtype.*Keep\(t != 0\).*Hide\(t\).*bias=t"):
        attend(q, q, q, mask=torch.ones(2, 2, dtype=dtype))


def test_mask_shapes() -> None:
    b, h, n, m = 2, 3, 5, 7
    q, k, v = normal(b, h, n, 4), normal(b, h, m, 4), normal(b, h, m, 4)
    full = torch.rand(b, h, n, m, generator=torch.Generator().manual_seed(3)) < 0.5
    for mask, as_full in [
        (full[0, 0], full[:1, :1]),
        (full[:, 0], full[:, :1]),
        (full, full),
        (full[:, :, :1], full[:, :, :1]),
        (full[..., :1], full[..., :1]),
    ]:
        close(attend(q, k, v, mask=mask), attend(q, k, v, mask=as_full.expand(b, h, n, m)))
    with pytest.raises(ValueError, match=r"expected a mask that broadcasts.*received.*Padding\(keep="):
        attend(q, k, v, mask=full[:, 0, 0])  # (B, M): never guessed


def test_bias_is_added_and_several_add_up() -> None:
    q, k, v = normal(2, 3, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4)
    a, b = normal(5, 7, seed=1), normal(2, 3, 5, 7, seed=2)
    scores = q @ k.mT / 2 + a + b
    close(attend(q, k, v, bias=[a, b]), scores.softmax(-1) @ v)
    alibi = Alibi(3).double()
    dense = alibi.block(torch.arange(2, 7)[None], torch.arange(7)[None])
    close(attend(q, k, v, bias=[alibi, a]), attend(q, k, v, bias=dense + a))


def test_the_last_query_stands_at_the_last_key() -> None:
    assert seen(Causal(), 2, 4) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(Causal(), 2, 4, positions=torch.tensor([0, 1])) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert seen(Causal(), 3, 2) == [[0, 0], [1, 0], [1, 1]]


def test_key_positions_alone_give_the_queries_the_last_of_them() -> None:
    assert seen(Causal(), 2, 3, key_positions=torch.tensor([5, 9, 7])) == [[1, 1, 1], [1, 0, 1]]


def test_causal_window_and_prefix_compare_positions() -> None:
    backwards = torch.tensor([2, 1, 0])
    options = {"positions": backwards, "key_positions": backwards}
    assert seen(Causal(), 3, 3, **options) == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert seen(Window(2), 3, 3, **options) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert seen(Prefix(1), 3, 3, **options) == [[0, 0, 1]] * 3


def test_padding_documents_keep_and_hide_index_slots() -> None:
    backwards = torch.tensor([2, 1, 0])
    options = {"positions": backwards, "key_positions": backwards}
    first = torch.tensor([[True, False, False]])
    assert seen(Padding(lengths=torch.tensor([1])), 3, 3, **options) == [[1, 0, 0]] * 3
    assert seen(Padding(keep=first), 3, 3, **options) == [[1, 0, 0]] * 3
    assert seen(Documents(torch.tensor([0, 0, 1])), 3, 3, **options) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert seen(Keep(first.expand(3, 3)), 3, 3, **options) == [[1, 0, 0]] * 3


def test_with_a_cache_slots_count_cached_and_new_keys() -> None:
    layer = regard.MultiHeadAttention(6, 2).double().eval()
    x, cache = normal(1, 5, 6), regard.KVCache()
    keep = torch.tensor([[True, False, True, True, True]])
    with torch.no_grad():
        layer(x[:, :3], mask=Causal() & Padding(keep=keep[:, :3]), cache=cache)
        late = layer(x[:, 3:], mask=Causal() & Padding(keep=keep), cache=cache)
        close(late, layer(x, mask=Causal() & Padding(keep=keep))[:, 3:])


def test_window_of_a_size_ends_at_the_query_itself() -> None:
    assert seen(Window(2), 4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(Window(before=1, after=2), 4, 4) == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("kernel", ["auto", *available()])
def test_a_row_that_may_see_nothing_is_zero_and_never_nan(kernel: str) -> None:
    q, k, v = (normal(2, 3, 5, 4, seed=i, kernel=kernel).requires_grad_() for i in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    out = attend(q, k, v, mask=mask, kernel=kernel)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, 2] == 0).all()
    others = [0, 1, 3, 4]
    close(out[:, :, others], attend(q[:, :, others], k, v))
    assert (attention_weights(q, k, mask=mask)[:, :, 2] == 0).all()


@pytest.mark.parametrize("kernel", ["auto", *available()])
def test_a_row_hidden_by_a_bias_of_minus_infinity_is_zero_and_never_nan(kernel: str) -> None:
    q, k, v = (normal(2, 3, 5, 4, seed=i, kernel=kernel).requires_grad_() for i in range(3))
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[2] = -math.inf
    out = attend(q, k, v, bias=bias, kernel=kernel)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    hidden = torch.autograd.grad(attend(q, k, v, mask=bias == 0, kernel="reference").square().sum(), (q, k, v))
    for ours, right in zip(grads, hidden, strict=True):
        close(ours, right)


@pytest.mark.parametrize("kernel", available())
def test_the_log_sum_exp_of_a_row_that_may_see_nothing_is_minus_infinity(kernel: str) -> None:
    from regard.attention import prepare
    from regard.kernels import KERNELS

    q = normal(1, 1, 3, 2, kernel=kernel)
    call = prepare(q, q, q, mask=torch.tensor([[True, False, True], [False, False, False], [True, True, True]]))
    lse = next(one for one in KERNELS if one.name == kernel).forward(call)[1][0, 0]
    assert lse[1] == -math.inf
    assert lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_order_is_scale_softcap_bias_mask_softmax(kernel: str) -> None:
    q, k, v = (normal(1, 1, 3, 2, seed=i, kernel=kernel) for i in range(3))
    bias, keep = 3 * normal(3, 3, seed=3, kernel=kernel), torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()
    s = 1.5 * torch.tanh(q @ k.mT * 2.0 / 1.5) + bias
    expected = s.masked_fill(~keep, -math.inf).softmax(-1) @ v
    close(attend(q, k, v, scale=2.0, softcap=1.5, bias=bias, mask=keep, kernel=kernel), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_take_part_in_the_denominator_alone(kernel: str) -> None:
    q = normal(1, 2, 3, 4, kernel=kernel)
    k, v = (normal(1, 2, 5, 4, seed=seed, kernel=kernel) for seed in (1, 2))
    sinks = torch.tensor([0.5, -1.0], dtype=q.dtype)
    e = (q @ k.mT / 2).exp()
    weights = e / (e.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    close(attention_weights(q, k, sinks=sinks), weights)
    assert (attention_weights(q, k, sinks=sinks).sum(-1) < 1).all()
    close(attend(q, k, v, sinks=sinks, kernel=kernel), weights @ v)


def test_dropout_is_on_weights_in_training_only() -> None:
    layer = regard.MultiHeadAttention(6, 2, dropout=0.5).double()
    x = normal(2, 11, 6)
    layer.eval()
    close(layer(x), layer(x))
    _, weights = layer(x, need_weights=True)
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    close(layer(x, need_weights=True)[1], weights)  # the weights shown are those before dropout


def test_dropout_drops_the_same_weights_in_every_kernel() -> None:
    q, k = normal(2, 3, 7, 4), normal(2, 3, 11, 4, seed=1)
    v = torch.eye(11, dtype=torch.float64).expand(2, 3, 11, 11)  # so that the output is the weights themselves

    def dropped(kernel: str, seed: int) -> torch.Tensor:
        return attend(q, k, v, dropout=0.4, generator=torch.Generator().manual_seed(seed), kernel=kernel) == 0

    first = dropped("reference", 5)
    assert torch.equal(first, dropped("blockwise", 5))
    assert not torch.equal(first, dropped("blockwise", 6))
    assert 0.2 < first.double().mean() < 0.6


def test_rotary_pairs_are_halves() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    quarter = torch.full((1, 2), math.pi / 2)
    turned = regard.positions.rotate(x, quarter.cos(), quarter.sin())
    torch.testing.assert_close(turned.flatten(), torch.tensor([-3.0, -4.0, 1.0, 2.0]))
    turned = regard.positions.rotate(x, quarter.cos(), quarter.sin(), interleaved=True)
    torch.testing.assert_close(turned.flatten(), torch.tensor([-2.0, 1.0, -4.0, 3.0]))


def test_a_cache_is_passed_in_and_updated_in_place() -> None:
    layer = regard.MultiHeadAttention(8, 2, position_encoding=Rotary(4)).double().eval()
    x, cache = normal(2, 7, 8), regard.KVCache()
    with torch.no_grad():
        parts = [layer(x[:, i : i + 1], mask=Causal(), cache=cache) for i in range(7)]
        close(torch.cat(parts, 1), layer(x, mask=Causal()))
    assert len(cache) == 7


def test_a_rolling_cache_numbers_its_slots_from_zero_and_stores_keys_before_rotary() -> None:
    rotary = Rotary(4)
    layer = regard.MultiHeadAttention(8, 2, position_encoding=rotary).double().eval()
    x, cache = normal(1, 23, 8), regard.RollingCache(5, keep_first=2)
    with torch.no_grad():
        whole = layer(x, cache=regard.RollingCache(5, keep_first=2))
        parts = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(23)], 1)
        close(parts, whole)
        # the last query sees tokens 0, 1 and the last five, numbered 0..6
        kept = x[:, [0, 1, *range(18, 23)]]
        close(parts[:, -1:], layer(kept, mask=Causal())[:, -1:])
        assert cache.keys is not None
        close(cache.keys[:, :, :2], layer.k_proj(x[:, :2]).unflatten(-1, (2, 4)).transpose(1, 2))


def test_a_kernel_that_is_named_and_cannot_serve_raises_and_says_why() -> None:
    q = normal(1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"kernel 'fused': expected a call that it can serve.*no softcap.*auto"):
        attend(q, q, q, softcap=1.0, kernel="fused")
    attend(q, q, q, softcap=1.0)  # "auto" chooses one that can


@pytest.mark.parametrize("kernel", ["auto", *available()])
def test_query_head_i_uses_kv_head_i_divided_by_the_group(kernel: str) -> None:
    q = normal(2, 6, 5, 4, kernel=kernel)
    k, v = (normal(2, 3, 7, 4, seed=seed, kernel=kernel) for seed in (1, 2))
    out = attend(q, k, v, kernel=kernel)
    for i in range(6):
        g = i // 2
        close(out[:, i], attend(q[:, i : i + 1], k[:, g : g + 1], v[:, g : g + 1], kernel="reference")[:, 0])


def test_q_and_k_are_normalised_per_head_before_rotary() -> None:
    layer = regard.MultiHeadAttention(8, 2, qk_norm="rms", position_encoding=Rotary(4)).double()
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    nn.init.normal_(layer.q_norm.weight)  # type: ignore[arg-type]
    assert layer.q_norm.weight.shape == (4,)
    x = normal(1, 5, 8)

    def heads(linear: nn.Linear, norm: nn.Module) -> torch.Tensor:
        y = linear(x).unflatten(-1, (2, 4))
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        return Rotary(4)(y.transpose(1, 2))

    v = layer.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    expected = attend(heads(layer.q_proj, layer.q_norm), heads(layer.k_proj, layer.k_norm), v)
    close(layer(x), layer.out_proj(expected.transpose(1, 2).flatten(2)))


def test_projections_are_linear_children() -> None:
    layer = regard.MultiHeadAttention(6, 2)
    names = [name for name, child in layer.named_children() if type(child) is nn.Linear]
    assert names == ["q_proj", "k_proj", "v_proj", "out_proj"]
    called = []
    for name in names:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.zeros(1, 3, 6))
    assert called == names


@pytest.mark.parametrize("kernel", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_softmax_accumulates_in_float32_or_wider(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "native" and dtype is torch.float64:
        pytest.skip("it has no float64, and says so")
    from regard.attention import prepare
    from regard.kernels import KERNELS

    m = 4099  # equal weights: a sum kept in bfloat16 would stop growing at 256
    q, k, v = (
        torch.zeros(1, 1, 1, 2, dtype=dtype),
        torch.zeros(1, 1, m, 2, dtype=dtype),
        torch.ones(1, 1, m, 2, dtype=dtype),
    )
    out, lse = next(one for one in KERNELS if one.name == kernel).forward(prepare(q, k, v))
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(lse.item(), math.log(m), rtol=1e-5, atol=0)
    torch.testing.assert_close(out.double(), torch.ones(1, 1, 1, 2).double(), rtol=1e-2, atol=0)


def test_autocast_is_as_for_sdpa() -> None:
    q = torch.randn(1, 2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, q, q).dtype == torch.bfloat16
        assert attend(q, q, q, softcap=1.0).dtype == torch.bfloat16
        assert attend(q.double(), q.double(), q.double(), softcap=1.0).dtype == torch.float64


def test_a_learned_bias_is_never_dense_and_has_a_gradient() -> None:
    relative = RelativeBias(2).double()
    q = normal(1, 2, 5, 4)
    attend(q, q, q, bias=relative).sum().backward()
    assert relative.weight.grad is not None
    assert relative.weight.grad.abs().sum() > 0
