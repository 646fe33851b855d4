"""The layer against its formula, written out in a few lines of einsum; and the block around it."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import AttentionBlock, MultiHeadAttention
from regard.masks import Causal, Padding, Window
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def formula(
    layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None
) -> Tensor:
    """Attention as in a textbook, heads expanded, weights in full: softmax(q k^T * scale) v for each head."""
    h, g, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    q, k, v = layer.q_proj(query), layer.k_proj(key), layer.v_proj(value)
    q, k, v = q.unflatten(-1, (h, d)), k.unflatten(-1, (g, d)), v.unflatten(-1, (g, -1))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    k, v = (x.repeat_interleave(h // g, dim=2) for x in (k, v))
    n, m = q.shape[1], k.shape[1]
    if isinstance(layer.position_encoding, Rotary):
        q, k = (layer.position_encoding(x.transpose(1, 2), s).transpose(1, 2) for x, s in ((q, m - n), (k, 0)))
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * (d**-0.5 if layer.scale is None else layer.scale)
    if layer.softcap is not None:
        s = layer.softcap * torch.tanh(s / layer.softcap)
    if isinstance(layer.position_encoding, Alibi | RelativeBias):
        s = s + layer.position_encoding.block(torch.arange(m - n, m)[None], torch.arange(m)[None])
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if layer.sinks is not None:  # one more key, of value zero
        s = torch.cat([s, layer.sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    return layer.out_proj(torch.einsum("bhnm,bmhe->bnhe", s.softmax(-1), v).flatten(2))


LAYERS = {
    "plain": {},
    "no bias": {"bias": False},
    "no bias in, bias out": {"bias": False, "out_bias": True},
    "bias in, none out": {"bias": True, "out_bias": False},
    "grouped": {"num_kv_heads": 3},
    "one kv head": {"num_kv_heads": 1},
    "free head width": {"head_dim": 5},
    "free value width": {"value_head_dim": 7},
    "free widths, grouped": {"head_dim": 5, "value_head_dim": 3, "num_kv_heads": 2},
    "rms norm": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": "layer", "num_kv_heads": 2},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True, "num_kv_heads": 3},
    "scale": {"scale": 1.0},
    "scale of zero": {"scale": 0.0},
    "rotary": {"position_encoding": Rotary(2)},
    "rotary, partial, interleaved": {"head_dim": 6, "position_encoding": Rotary(6, width=4, interleaved=True)},
    "alibi": {"position_encoding": Alibi(6)},
    "relative": {"position_encoding": RelativeBias(6, num_buckets=8, max_distance=16)},
    "everything": {
        "num_kv_heads": 2,
        "head_dim": 4,
        "value_head_dim": 3,
        "qk_norm": "rms",
        "softcap": 2.0,
        "sinks": True,
        "position_encoding": Rotary(4),
        "scale": 0.7,
    },
}


def new(name: str = "plain", **more: object) -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 6, **copy.deepcopy({**LAYERS[name], **more})).double()
    for p in layer.parameters():
        p.data += torch.randn_like(p) * 0.3  # so that biases, norms and sinks are not what they start as
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def memory() -> Tensor:
    return torch.randn(2, 11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
def test_self_attention_is_the_formula(name: str, kernel: str, x: Tensor) -> None:
    layer = new(name, kernel=kernel)
    torch.testing.assert_close(layer(x), formula(layer, x, x, x), **TIGHT)
    causal = torch.ones(7, 7).tril().bool()
    torch.testing.assert_close(layer(x, mask=Causal()), formula(layer, x, x, x, causal), **TIGHT)
    torch.testing.assert_close(layer(x, mask=causal), formula(layer, x, x, x, causal), **TIGHT)


@pytest.mark.parametrize("name", LAYERS)
def test_cross_attention_is_the_formula(name: str, x: Tensor, memory: Tensor) -> None:
    layer, values = new(name), memory.flip(1)
    torch.testing.assert_close(layer(x, memory), formula(layer, x, memory, memory), **TIGHT)
    torch.testing.assert_close(layer(x, memory, values), formula(layer, x, memory, values), **TIGHT)
    torch.testing.assert_close(layer(memory, x, values[:, :7]), formula(layer, memory, x, values[:, :7]), **TIGHT)


def test_inputs_of_three_widths() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, query_dim=5, key_dim=7, value_dim=11).double()
    q, k, v = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((3, 5), (13, 7), (13, 11)))
    assert layer(q, k, v).shape == (2, 3, 12)
    torch.testing.assert_close(layer(q, k, v), formula(layer, q, k, v), **TIGHT)
    both = MultiHeadAttention(12, 3, query_dim=5, key_dim=7).double()
    assert both.value_dim == 7
    torch.testing.assert_close(both(q, k), formula(both, q, k, k), **TIGHT)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_heads_are_full_heads_with_shared_weights(groups: int, x: Tensor) -> None:
    """Each kv head repeated H / G times in a row gives the same as the grouped layer."""
    grouped = new(num_kv_heads=groups)
    full = new()
    full.q_proj.load_state_dict(grouped.q_proj.state_dict())
    full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    for name in ("k_proj", "v_proj"):
        for part in ("weight", "bias"):
            heads = getattr(getattr(grouped, name), part).data.unflatten(0, (groups, 2))
            getattr(getattr(full, name), part).data = heads.repeat_interleave(6 // groups, 0).flatten(0, 1)
    torch.testing.assert_close(grouped(x, mask=Causal()), full(x, mask=Causal()), **TIGHT)


def test_two_keys_by_hand() -> None:
    """Scores 0 and 1 give the weights [1, e] / (1 + e)."""
    layer = MultiHeadAttention(1, 1, bias=False).double()
    for p in layer.parameters():
        p.data.fill_(1.0)
    out, weights = layer(
        torch.tensor([[[1.0]]]).double(),
        torch.tensor([[[0.0], [1.0]]]).double(),
        torch.tensor([[[3.0], [5.0]]]).double(),
        need_weights=True,
    )
    e = math.e
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([1, e]).double() / (1 + e), rtol=1e-7, atol=0)
    assert out.item() == pytest.approx((3 + 5 * e) / (1 + e), rel=1e-12)


def test_a_sink_takes_its_share() -> None:
    """Scores 0 and 0 and a sink of 0: a third each, and the sink holds no value."""
    layer = MultiHeadAttention(1, 1, bias=False, sinks=True).double()
    for name, p in layer.named_parameters():
        p.data.fill_(0.0 if name == "sinks" else 1.0)
    query, values = torch.zeros(1, 1, 1).double(), torch.tensor([[[3.0], [6.0]]]).double()
    out, weights = layer(query, torch.zeros(1, 2, 1).double(), values, need_weights=True)
    torch.testing.assert_close(weights[0, 0, 0], torch.full((2,), 1 / 3, dtype=torch.float64), **TIGHT)
    assert out.item() == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_asking_for_weights_does_not_change_the_output(name: str, x: Tensor, memory: Tensor) -> None:
    layer = new(name)
    mask = Window(before=3, after=5) & Padding(lengths=torch.tensor([11, 5]))
    out, weights = layer(x, memory, mask=mask, need_weights=True)
    torch.testing.assert_close(out, layer(x, memory, mask=mask), **TIGHT)
    assert weights.shape == (2, 6, 7, 11)
    assert weights.masked_select(~mask.dense(7, 11)).abs().max() == 0
    v = layer.v_proj(memory).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(6 // layer.num_kv_heads, 1)
    torch.testing.assert_close(layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), out, **TIGHT)
    total = weights.sum(-1)
    seen = mask.dense(7, 11).any(-1).expand_as(total)
    if layer.sinks is None:
        torch.testing.assert_close(total, seen.double(), **TIGHT)
    else:
        assert (total[seen] < 1).all()


def test_weights_have_a_gradient(x: Tensor) -> None:
    layer = new()
    _, weights = layer(x, need_weights=True)
    weights.square().sum().backward()
    assert layer.q_proj.weight.grad.abs().max() > 0


def test_without_a_batch(x: Tensor, memory: Tensor) -> None:
    layer = new("rotary")
    positions = torch.tensor([0, 1, 3, 4, 6, 8, 9])
    for b in range(2):
        one, other = x[b], memory[b]
        torch.testing.assert_close(layer(one, mask=Causal()), layer(x, mask=Causal())[b], **TIGHT)
        torch.testing.assert_close(layer(one, other), layer(x, memory)[b], **TIGHT)
        torch.testing.assert_close(layer(one, other, other.flip(0)), layer(x, memory, memory.flip(1))[b], **TIGHT)
        out, weights = layer(one, need_weights=True)
        assert out.shape == (7, 12)
        torch.testing.assert_close(weights, layer(x, need_weights=True)[1][b], **TIGHT)
        said = layer(x, positions=positions)[b]
        torch.testing.assert_close(layer(one, positions=positions), said, **TIGHT)
        torch.testing.assert_close(layer(one, one, one, positions=positions), said, **TIGHT)


@pytest.mark.parametrize("name", ["rotary", "alibi", "relative"])
def test_positions_say_where_queries_and_their_own_keys_stand(name: str, x: Tensor) -> None:
    """Only distances count: moved together nothing changes, moved apart something does. And tokens can be permuted."""
    layer = new(name)
    at = torch.arange(7)
    torch.testing.assert_close(layer(x, positions=at, mask=Causal()), layer(x, mask=Causal()), **TIGHT)
    torch.testing.assert_close(
        layer(x, positions=at + 13, mask=Causal()), layer(x, mask=Causal()), rtol=1e-11, atol=1e-11
    )
    assert (layer(x, positions=2 * at) - layer(x)).abs().max() > 1e-3
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    moved = layer(x[:, order], positions=order, mask=Causal())
    torch.testing.assert_close(moved, layer(x, mask=Causal())[:, order], **TIGHT)
    both = torch.stack([at, at * 2])
    torch.testing.assert_close(layer(x, positions=both)[1], layer(x, positions=at * 2)[1], **TIGHT)


def test_a_bias_is_added_to_the_scores(x: Tensor) -> None:
    layer = new("alibi")
    bias = torch.randn(2, 6, 7, 7, dtype=torch.float64)
    plain = layer(x, need_weights=True)[1].log()
    biased = layer(x, bias=bias, need_weights=True)[1]
    torch.testing.assert_close(biased, (plain + bias).softmax(-1), **TIGHT)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kernel", ["auto", "blockwise"])
def test_gradients_reach_every_parameter_and_are_those_of_the_formula(name: str, kernel: str, x: Tensor) -> None:
    layer = new(name, kernel=kernel)
    causal = torch.ones(7, 7).tril().bool()
    parameters = dict(layer.named_parameters())
    ours = torch.autograd.grad(layer(x, mask=Causal()).square().sum(), parameters.values())
    theirs = torch.autograd.grad(formula(layer, x, x, x, causal).square().sum(), parameters.values())
    for what, mine, right in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10, msg=lambda text, what=what: f"{what}: {text}")
        # What is added to all keys alike changes no weight, unless it is turned, capped or weighed against a sink.
        alike = what == "k_norm.bias" or (what == "k_proj.bias" and layer.q_norm is None)
        alike = alike and layer.softcap is None and layer.sinks is None
        if name != "scale of zero" and not (alike and not isinstance(layer.position_encoding, Rotary)):
            assert mine.abs().max() > 1e-6, what


def test_every_projection_is_a_linear_child_and_hooks_see_it(x: Tensor) -> None:
    layer, seen = new("sinks"), []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        child = getattr(layer, name)
        assert type(child) is nn.Linear
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    layer(x)
    assert seen == ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert {name for name, _ in layer.named_parameters()} == {
        "sinks",
        *(f"{p}.{part}" for p in ("q_proj", "k_proj", "v_proj", "out_proj") for part in ("weight", "bias")),
    }


# ----------------------------------------------------------------------------------------------------
# Dropout


def test_dropout_is_off_in_evaluation(x: Tensor) -> None:
    layer = new(dropout=0.5).eval()
    assert torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer(x), new()(x), **TIGHT)


def test_dropout_in_training_follows_the_seed(x: Tensor) -> None:
    layer = new(dropout=0.5).train()
    outs = []
    for seed in (3, 3, 5):
        torch.manual_seed(seed)
        outs.append(layer(x))
    assert torch.equal(outs[0], outs[1])
    assert (outs[0] - outs[2]).abs().max() > 1e-3
    assert (layer(x) - layer(x)).abs().max() > 1e-3


def test_dropout_is_unbiased(x: Tensor) -> None:
    layer = new(dropout=0.3).train()
    with torch.no_grad():
        runs = layer(x.repeat(4000, 1, 1)).view(4000, 2, 7, 12)
        expected = layer.eval()(x)
    error = (runs.mean(0) - expected) / (runs.std(0) / 4000**0.5)
    assert error.abs().max() < 4.5  # standard errors, over 168 numbers
    assert error.std() < 1.2


def test_all_can_be_dropped(x: Tensor) -> None:
    layer = new(dropout=1.0).train()
    torch.testing.assert_close(layer(x), layer.out_proj.bias.expand(2, 7, 12), **TIGHT)


def test_weights_are_those_before_dropout(x: Tensor) -> None:
    layer = new(dropout=0.9).train()
    _, weights = layer(x, need_weights=True)
    torch.testing.assert_close(weights, layer.eval()(x, need_weights=True)[1], **TIGHT)


# ----------------------------------------------------------------------------------------------------
# What it starts as


def test_xavier_is_uniform_within_its_bound() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(128, 4, num_kv_heads=2, init="xavier")
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert linear.weight.abs().max() <= bound
        assert linear.weight.abs().max() > 0.99 * bound
        assert abs(linear.weight.std().item() - bound / math.sqrt(3)) < 0.02 * bound
        assert linear.bias.abs().max() == 0


def test_normal_has_a_deviation_of_two_hundredths() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(128, 4, init="normal", sinks=True)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        assert abs(linear.weight.std().item() - 0.02) < 0.0005
        assert abs(linear.weight.mean().item()) < 0.0005
        assert linear.bias.abs().max() == 0
    assert layer.sinks.tolist() == [0.0] * 4


@pytest.mark.parametrize("init", ["xavier", "normal"])
def test_reset_parameters_is_as_new(init: str) -> None:
    """From whatever was there, such as the memory that `to_empty` leaves: all that the layer holds starts again."""
    options = {"init": init, "sinks": True, "qk_norm": "layer"}
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, 4, **options, position_encoding=RelativeBias(4))
    spread = {name: p.std().item() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.data.fill_(math.nan)
    layer.reset_parameters()
    for name, p in layer.named_parameters():
        if "bias" in name or name == "sinks":
            assert p.abs().max() == 0, name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            assert abs(p.std().item() / spread[name] - 1) < 0.5, name


def test_a_layer_built_on_meta_can_be_filled(x: Tensor) -> None:
    trained = new("everything")
    with torch.device("meta"):
        layer = MultiHeadAttention(12, 6, **copy.deepcopy(LAYERS["everything"]))
    layer = layer.double().to_empty(device=x.device)
    layer.load_state_dict(trained.state_dict())
    assert torch.equal(layer(x, mask=Causal()), trained(x, mask=Causal()))


@pytest.mark.on_meta
def test_a_call_on_meta_gives_shapes() -> None:
    layer = new("everything").to("meta")
    out, weights = layer(torch.empty(2, 7, 12, dtype=torch.float64, device="meta"), mask=Causal(), need_weights=True)
    assert out.shape == (2, 7, 12)
    assert weights.shape == (2, 6, 7, 7)


# ----------------------------------------------------------------------------------------------------
# How it describes itself


def test_extra_repr_names_what_is_not_as_usual() -> None:
    assert MultiHeadAttention(12, 3).extra_repr() == "12, num_heads=3, head_dim=4"
    layer = MultiHeadAttention(
        12, 6, num_kv_heads=2, value_head_dim=3, dropout=0.1, scale=0.5, softcap=30.0, kernel="blockwise"
    )
    assert layer.extra_repr() == (
        "12, num_heads=6, num_kv_heads=2, head_dim=2, value_head_dim=3, dropout=0.1, scale=0.5, softcap=30.0, "
        "kernel='blockwise'"
    )


def test_describe_counts() -> None:
    layer = MultiHeadAttention(
        30,
        6,
        num_kv_heads=2,
        head_dim=7,
        value_head_dim=5,
        qk_norm="rms",
        softcap=13,
        sinks=True,
        position_encoding=RelativeBias(6, num_buckets=8),
    )
    lines = layer.describe(11, batch=2).splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines[1:-1]]  # step, what, then shape and numbers where there are any
    numbers = {what: rest for _, what, *rest in rows[:-1]} | {rows[-1][0]: rows[-1][1:]}
    assert numbers["q_proj"] == ["(2, 11, 42)", f"{30 * 42 + 42:,}", f"{2 * 11 * 30 * 42:,}"]
    assert numbers["k_proj"] == ["(2, 11, 14)", f"{30 * 14 + 14:,}", f"{2 * 11 * 30 * 14:,}"]
    assert numbers["v_proj"] == ["(2, 11, 10)", f"{30 * 10 + 10:,}", f"{2 * 11 * 30 * 10:,}"]
    assert numbers["6 heads of q"] == ["(2, 6, 11, 7)"]
    assert numbers["2 heads of k"] == ["(2, 2, 11, 7)"]
    assert numbers["2 heads of v"] == ["(2, 2, 11, 5)"]
    assert numbers["RMSNorm of q and k"] == ["(2, 6, 11, 7)", "14"]
    assert numbers["RelativeBias"] == ["48"]
    assert numbers["q k^T * 0.378, capped at 13"] == ["(2, 6, 11, 11)", f"{2 * 6 * 11 * 11 * 7:,}"]
    assert numbers["softmax with sinks, times v"] == ["(2, 6, 11, 5)", "6", f"{2 * 6 * 11 * 11 * 5:,}"]
    assert numbers["out_proj"] == ["(2, 11, 30)", f"{30 * 30 + 30:,}", f"{2 * 11 * 30 * 30:,}"]
    parameters, products = numbers["total"]
    assert int(parameters.replace(",", "")) == sum(p.numel() for p in layer.parameters())
    assert int(products.replace(",", "")) == 22 * 30 * (42 + 14 + 10 + 30) + 2 * 6 * 121 * 12
    assert lines[-1] == "cache: 96 bytes per token (2 kv heads x (7 + 5) x 4 bytes)"
    assert MultiHeadAttention(12, 3).bfloat16().describe().splitlines()[-1].startswith("cache: 48 bytes per token")


def test_describe_is_a_table_for_large_models_too() -> None:
    with torch.device("meta"):
        layer = MultiHeadAttention.from_config("gpt3")
    lines = layer.describe(2048, batch=32).splitlines()[:-1]
    ends = {
        line.rindex(cell) + len(cell) for line in lines for cell in line.split()[-1:] if cell.replace(",", "").isdigit()
    }
    assert "603,979,776" in lines[-1] or "604,028,928" in lines[-1]
    assert len(ends) == 1
    assert len(lines[0]) == ends.pop()


def test_copies_are_equal_and_their_own(x: Tensor) -> None:
    layer = new("everything")
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    twin.out_proj.weight.data.zero_()
    assert not torch.equal(twin(x), layer(x))


# ----------------------------------------------------------------------------------------------------
# The block


def test_post_norm_is_its_formula(x: Tensor, memory: Tensor) -> None:
    block = AttentionBlock(new("rotary"), norm="post").double()
    nn.init.normal_(block.norm.weight)
    expected = block.norm(x + block.layer(x, mask=Causal()))
    torch.testing.assert_close(block(x, mask=Causal()), expected, **TIGHT)
    torch.testing.assert_close(block(x, memory), block.norm(x + block.layer(x, memory)), **TIGHT)


def test_pre_norm_is_its_formula(x: Tensor, memory: Tensor) -> None:
    block = AttentionBlock(new("rotary"), norm="pre").double()
    nn.init.normal_(block.norm.weight)
    expected = x + block.layer(block.norm(x), mask=Causal())
    torch.testing.assert_close(block(x, mask=Causal()), expected, **TIGHT)
    # what comes from elsewhere is not normalised
    torch.testing.assert_close(block(x, memory), x + block.layer(block.norm(x), memory), **TIGHT)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_block_gives_weights_and_takes_a_cache(norm: str, x: Tensor) -> None:
    block = AttentionBlock(new("rotary"), norm=norm).double()
    out, weights = block(x, mask=Causal(), need_weights=True)
    torch.testing.assert_close(out, block(x, mask=Causal()), **TIGHT)
    inner = block.norm(x) if norm == "pre" else x
    assert torch.equal(weights, block.layer(inner, mask=Causal(), need_weights=True)[1])
    cache = regard.KVCache()
    with torch.no_grad():
        steps = torch.cat([block(part, mask=Causal(), cache=cache) for part in x.split([3, 1, 3], 1)], 1)
    torch.testing.assert_close(steps, out, **TIGHT)
    torch.testing.assert_close(block(x[0], mask=Causal()), out[0], **TIGHT)


def test_the_dropout_of_a_block_is_on_the_branch(x: Tensor) -> None:
    block = AttentionBlock(new(), norm="pre", dropout=1.0).double()
    assert torch.equal(block.train()(x), x)
    torch.testing.assert_close(block.eval()(x), x + block.layer(block.norm(x)), **TIGHT)


def test_a_block_is_built_in_the_dtype_of_its_layer(x: Tensor) -> None:
    for norm in ("post", "pre"):
        assert AttentionBlock(new(), norm=norm)(x).dtype == torch.float64


def test_blocks_refuse() -> None:
    with pytest.raises(ValueError, match='norm: expected "post" or "pre", received \'both\''):
        AttentionBlock(new(), norm="both")
    with pytest.raises(ValueError, match=r"layer: expected queries as wide as the output.*query_dim=5, embed_dim=12"):
        AttentionBlock(MultiHeadAttention(12, 3, query_dim=5))
    assert "norm='pre'" in repr(AttentionBlock(new(), norm="pre"))


# ----------------------------------------------------------------------------------------------------
# Compiled


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "everything"])
def test_it_compiles_to_one_graph_for_any_length(name: str) -> None:
    torch._dynamo.reset()
    layer = new(name)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, tokens in ((2, 5), (3, 11)):
        x = torch.randn(batch, tokens, 12, dtype=torch.float64)
        out = compiled(x, mask=Causal())
        torch.testing.assert_close(out, layer(x, mask=Causal()), **TIGHT)
        ours = torch.autograd.grad(out.sum(), list(layer.parameters()))
        theirs = torch.autograd.grad(layer(x, mask=Causal()).sum(), list(layer.parameters()))
        for mine, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


def test_it_compiles_with_biases_masks_and_weights(x: Tensor, memory: Tensor) -> None:
    torch._dynamo.reset()
    layer = new("relative")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = Window(before=3, after=5) & Padding(lengths=torch.tensor([11, 5]))
    out, weights = compiled(x, memory, mask=mask, need_weights=True)
    expected = layer(x, memory, mask=mask, need_weights=True)
    torch.testing.assert_close((out, weights), expected, **TIGHT)


def test_the_order_of_parameters_is_kept() -> None:
    """Optimizers save their state by the order of parameters: it must not change between versions."""
    layer = MultiHeadAttention(8, 2, qk_norm="rms", sinks=True, gate=regard.layer.Gate(), v_norm="rms")
    names = [name.removesuffix(".weight") for name, _ in layer.named_parameters() if not name.endswith("bias")]
    assert names == ["sinks", "q_proj", "k_proj", "v_proj", "out_proj", "q_norm", "k_norm", "v_norm", "gate_proj"]
