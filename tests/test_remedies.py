"""What an error tells the caller to write instead is written, and works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import MultiHeadAttention, attend, layouts, masks
from regard.errors import INSTEAD

B, H, N, M, D = 2, 3, 5, 7, 4
W = H * D
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
NEVER = float("-inf")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


Q, K, V = numbers(B, H, N, D), numbers(B, H, M, D), numbers(B, H, M, D + 1)
REAL = torch.tensor([[True] * 4 + [False] * 3, [False] * 2 + [True] * 5])  # (B, M)
SEEN = numbers(N, M) > 0
SEEN[:, 0] = True
OF_HEADS = numbers(H, N, M) > 0


def added(seen: Tensor, little: float = NEVER) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, little)


def wanted(seen: Tensor) -> Tensor:
    """By torch: seen broadcasts to (B, H, N, M)."""
    return F.scaled_dot_product_attention(Q, K, V, attn_mask=seen).nan_to_num(0.0)


# What was given, what every remedy may be pasted from its error, and what is meant by it.
PADDED = wanted(REAL[:, None, None])
MASKS: dict[str, tuple[Any, str, Tensor]] = {
    "integers (B, M), as of tokenizers": (REAL.long(), "mask=masks.Padding(keep=t.bool())", PADDED),
    "integers (N, M)": (SEEN.long(), "mask=masks.Keep(t != 0)", wanted(SEEN)),
    "integers (N, M), hidden": ((~SEEN).int(), "mask=masks.Hide(t != 0)", wanted(SEEN)),
    "bytes (B, N, M)": (SEEN.byte().expand(B, N, M), "mask=masks.Keep(t != 0)", wanted(SEEN)),
    "0 and -inf (N, M)": (added(SEEN), "bias=t", wanted(SEEN)),
    "0 and -inf (N, M), as a mask": (added(SEEN), "mask=masks.Keep(t == 0)", wanted(SEEN)),
    "0 and the least of floats (B, 1, N, M)": (added(SEEN.expand(B, 1, N, M), -1e30), "bias=t", wanted(SEEN)),
    "0 and -10000 (N, M)": (added(SEEN, -10000.0), "mask=masks.Keep(t == 0)", wanted(SEEN)),
    "0.0 and 1.0 (N, M)": (SEEN.double(), "mask=masks.Keep(t != 0)", wanted(SEEN)),
    "0.0 and 1.0 (N, M), hidden": ((~SEEN).double(), "mask=masks.Hide(t != 0)", wanted(SEEN)),
    "booleans (B, M)": (REAL, "mask=masks.Padding(keep=t)", PADDED),
    "booleans (M,)": (REAL[0], "mask=masks.Padding(keep=t[None])", wanted(REAL[0].expand(B, 1, N, M))),
    "booleans (H, N, M)": (OF_HEADS, "mask=masks.Keep(t[None])", wanted(OF_HEADS[None])),
    "booleans (B * H, N, M)": (OF_HEADS.repeat(B, 1, 1), "mask=masks.Keep(t.unflatten(0, (2, 3)))", wanted(OF_HEADS)),
    "a list": (SEEN.tolist(), "mask=masks.Keep(torch.as_tensor(mask))", wanted(SEEN)),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_remedy_for_a_mask_works(name: str) -> None:
    given, written, expected = MASKS[name]
    with pytest.raises((TypeError, ValueError), match="remedy: ") as error:
        attend(Q, K, V, mask=given)
    code = written.removeprefix("mask=")
    assert code in str(error.value)
    options = eval(f"dict({written})", {"masks": masks, "torch": torch, "t": given, "mask": given})
    torch.testing.assert_close(attend(Q, K, V, **options), expected, **TIGHT)


@pytest.mark.parametrize("name", [name for name in MASKS if "-inf" in name or "tokenizers" in name])
def test_no_remedy_is_the_inverse_of_what_was_meant(name: str) -> None:
    """Nor does it lead in a circle: what it names first is what such a mask usually means."""
    given, _, _ = MASKS[name]
    with pytest.raises(TypeError, match="remedy: ") as error:
        attend(Q, K, V, mask=given)
    first = re.findall(r"masks\.\w+\([^()]*(?:\(\))?\)|bias=t", str(error.value))[0]
    assert first != "masks.Keep(t != 0)"
    assert first == ("bias=t" if "inf" in name else "masks.Padding(keep=t.bool())")


@pytest.mark.parametrize(
    "make, code, same",
    [
        (lambda: masks.Padding(keep=REAL.long()), "Padding(keep=t.bool())", (REAL.long(), REAL)),
        (lambda: masks.Padding(REAL.long()), "Padding(keep=t.bool())", (REAL.long(), REAL)),
        (lambda: masks.Padding(REAL), "Padding(keep=t)", (REAL, REAL)),
        (lambda: masks.Padding(keep=REAL[0]), "keep[None]", (REAL[0], REAL[:1])),
        (lambda: masks.Padding(keep=added(REAL)), "Padding(keep=t == 0)", (added(REAL), REAL)),
        (lambda: masks.Hide((~REAL).long()), "masks.Padding(keep=t == 0)", ((~REAL).long(), REAL)),
    ],
)
def test_the_remedy_for_padding_works(make: Callable[[], Any], code: str, same: tuple[Tensor, Tensor]) -> None:
    with pytest.raises((TypeError, ValueError), match="remedy: ") as error:
        make()
    assert code in str(error.value)
    given, real = same
    made = eval(code, {"masks": masks, "Padding": masks.Padding, "t": given, "keep": given})
    made = made if isinstance(made, masks.Mask) else masks.Padding(keep=made)
    torch.testing.assert_close(attend(Q, K, V, mask=made), attend(Q, K, V, mask=masks.Padding(keep=real)), **TIGHT)


def test_hidden_padding_is_told_the_opposite() -> None:
    with pytest.raises(ValueError, match=r"a \(B, M\) mask of padding is masks.Padding\(keep=~t\)"):
        attend(Q, K, V, mask=masks.Hide(~REAL))


@pytest.mark.parametrize(
    "given, code",
    [
        (SEEN, "mask="),
        (SEEN.long(), "bias.to(q.dtype)"),
        (numbers(B, N, M), "bias[:, None]"),
        (numbers(H, N, M), "bias[None]"),
        (numbers(B, M), "bias[:, None, None]"),
    ],
)
def test_the_remedy_for_a_bias_works(given: Tensor, code: str) -> None:
    with pytest.raises((TypeError, ValueError), match="remedy: ") as error:
        attend(Q, K, V, bias=given)
    assert code in str(error.value)
    options = {"mask": given} if code == "mask=" else {"bias": eval(code, {"bias": given, "q": Q})}
    assert attend(Q, K, V, **options).shape == (B, H, N, D + 1)


# ----------------------------------------------------------------------------------------------------
# Arguments as others name them


X, MEMORY = numbers(B, N, W), numbers(B, M, W)


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(W, H, **options).double()


def theirs() -> nn.MultiheadAttention:
    """Torch's, with the weights of `layer()`."""
    made = nn.MultiheadAttention(W, H, batch_first=True, dtype=torch.float64)
    made.load_state_dict(layouts.export(layer(), "torch"))
    return made


SQUARE = torch.ones(N, N).tril().bool()

# To the call: what is given to torch's layer, and what to ours after reading the remedy.
CALLS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "attn_mask": ({"attn_mask": ~SQUARE}, "mask=masks.Hide(attn_mask)", {"mask": masks.Hide(~SQUARE)}),
    "attn_mask of floats": ({"attn_mask": added(SQUARE)}, "bias=attn_mask", {"bias": added(SQUARE)}),
    "key_padding_mask": (
        {"key_padding_mask": ~REAL[:, :N]},
        "mask=masks.Padding(keep=~key_padding_mask)",
        {"mask": masks.Padding(keep=REAL[:, :N])},
    ),
    "is_causal": ({"is_causal": True, "attn_mask": ~SQUARE}, "mask=masks.Causal()", {"mask": masks.Causal()}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_remedy_for_an_argument_of_torchs_layer_works(name: str) -> None:
    given, remedy, options = CALLS[name]
    argument = next(iter(given))
    with pytest.raises(
        TypeError,
        match=re.escape(f"the call of MultiHeadAttention: expected arguments of its own, received {argument}="),
    ) as error:
        layer()(X, **given)
    assert remedy in str(error.value)
    expected = theirs()(X, X, X, need_weights=False, **given)[0]
    torch.testing.assert_close(layer()(X, **options), expected, **TIGHT)


def test_weights_of_each_head_average_to_torchs() -> None:
    with pytest.raises(TypeError, match=r"average_attn_weights=; remedy: leave it out: .*weights.mean\(1\)"):
        layer()(X, need_weights=True, average_attn_weights=True)
    weights = layer()(X, need_weights=True)[1]
    torch.testing.assert_close(weights.mean(1), theirs()(X, X, X)[1], **TIGHT)


@pytest.mark.parametrize(
    "given, remedy, options",
    [
        ({"batch_first": True}, "leave it out: inputs are (B, N, W)", {}),
        ({"kdim": 11}, "key_dim=", {"key_dim": 11}),
        ({"vdim": 11}, "value_dim=", {"value_dim": 11}),
        ({"add_zero_attn": True}, "sinks=True", {"sinks": True}),
        ({"num_key_value_heads": 1}, "num_kv_heads=", {"num_kv_heads": 1}),
        ({"enable_gqa": True}, "num_kv_heads=", {"num_kv_heads": 1}),
        ({"drop_out": 0.1}, "the nearest is dropout=", {"dropout": 0.1}),
        ({"device": "cpu"}, "MultiHeadAttention(...).to(device)", {}),
        ({"dtype": torch.half}, "MultiHeadAttention(...).to(dtype)", {}),
    ],
)
def test_the_remedy_for_an_argument_of_torchs_constructor_works(
    given: dict[str, Any], remedy: str, options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="MultiHeadAttention: expected arguments of its own") as error:
        MultiHeadAttention(W, H, **given)
    assert f"remedy: {remedy}" in str(error.value)
    MultiHeadAttention(W, H, **options).to("cpu").to(torch.half)


def test_a_zero_key_is_a_sink_of_zero() -> None:
    ours = layer(sinks=True)
    module = nn.MultiheadAttention(W, H, batch_first=True, add_zero_attn=True, dtype=torch.float64)
    module.load_state_dict(layouts.export(layer(), "torch"))
    torch.testing.assert_close(ours(X), module(X, X, X)[0], **TIGHT)
    with pytest.raises(TypeError, match=re.escape("add_zero_attn=; remedy: sinks=torch.zeros(H)")):
        attend(Q, K, V, add_zero_attn=True)
    attend(Q, K, V, sinks=torch.zeros(H))


def test_extra_keys_stay_with_torchs_module() -> None:
    with pytest.raises(TypeError, match=r"add_bias_kv=; remedy: none here; regard.swap\(nn.MultiheadAttention"):
        MultiHeadAttention(W, H, add_bias_kv=True)
    regard.swap(nn.MultiheadAttention(W, H, add_bias_kv=True))


@pytest.mark.parametrize(
    "given, remedy, options",
    [
        ({"attn_mask": SEEN}, "mask=attn_mask for one in which True may attend", {"mask": SEEN}),
        ({"attn_mask": added(SEEN)}, "bias=attn_mask", {"bias": added(SEEN)}),
        ({"dropout_p": 0.0}, "dropout=", {"dropout": 0.0}),
    ],
)
def test_the_remedy_for_an_argument_of_torchs_function_works(
    given: dict[str, Any], remedy: str, options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="attend: expected arguments of its own") as error:
        attend(Q, K, V, **given)
    assert remedy in str(error.value)
    torch.testing.assert_close(attend(Q, K, V, **options), F.scaled_dot_product_attention(Q, K, V, **given), **TIGHT)


def test_grouped_heads_need_no_word() -> None:
    with pytest.raises(TypeError, match="enable_gqa=; remedy: leave it out: k and v may have fewer heads"):
        attend(Q, K[:, :1], V[:, :1], enable_gqa=True)
    expected = F.scaled_dot_product_attention(Q, K[:, :1], V[:, :1], enable_gqa=True)
    torch.testing.assert_close(attend(Q, K[:, :1], V[:, :1]), expected, **TIGHT)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: regard.measure(Q, K, is_causal=True), r"measure: .*remedy: mask=masks.Causal\(\)"),
        (lambda: regard.attention_weights(Q, K, attn_mask=SEEN), "attention_weights: .*remedy: mask=masks.Hide"),
        (lambda: regard.explain(Q, K, V, dropout_p=0.1), "attend: .*remedy: dropout="),
        (lambda: attend(Q, K, V, need_weights=True), r"remedy: regard.attention_weights\(q, k, ...\)"),
        (lambda: layer(need_weights=True), r"remedy: it belongs to the call: layer\(x, need_weights=...\)"),
        (lambda: layer(mask=masks.Causal()), r"remedy: it belongs to the call: layer\(x, mask=...\)"),
        (lambda: layer()(X, dropout=0.1), r"it belongs to the constructor: MultiHeadAttention\(..., dropout=...\)"),
        (lambda: layer()(X, position=1), "remedy: the nearest is positions="),
        (lambda: layer()(X, zzz=1), "remedy: there are query, key, value, mask, bias"),
        (lambda: layer()(X, past_key_value=1), r"remedy: cache=regard.KVCache\(\)"),
        (lambda: layer()(X, attention_mask=REAL), r"remedy: mask=masks.Padding\(keep=attention_mask.bool\(\)\)"),
        (lambda: regard.AttentionBlock(layer())(X, is_causal=True), r"remedy: mask=masks.Causal\(\)"),
        (lambda: layouts.load(layer().state_dict(), H, batch_first=True), "MultiHeadAttention: .*remedy: leave it out"),
        (lambda: MultiHeadAttention.from_config("gpt2", kdim=5), "MultiHeadAttention: .*remedy: key_dim="),
    ],
)
def test_other_places_say_it_as_well(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("name", [name for name in INSTEAD if name != "need_weights"])
def test_every_foreign_name_has_something_to_write_wherever_it_is_given(name: str) -> None:
    given = {name: 1}
    for call in (
        lambda: MultiHeadAttention(W, H, **given),
        lambda: layer()(X, **given),
        lambda: attend(Q, K, V, **given),
    ):
        with pytest.raises(TypeError, match=f"received {name}=; remedy: [^{{}}]+$"):
            call()


# ----------------------------------------------------------------------------------------------------
# State dicts


def test_a_module_is_told_from_its_state_dict() -> None:
    module = theirs()
    words = re.escape("received MultiheadAttention; remedy: layouts.load(module.state_dict(), num_heads=3)")
    for call in (
        lambda: layouts.load(module),
        lambda: layouts.load(module, num_heads=3),
        lambda: layouts.load_block(module),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    torch.testing.assert_close(layouts.load(module.state_dict(), num_heads=3)(X), module(X, X, X)[0], **TIGHT)
    with pytest.raises(TypeError, match=r"remedy: safetensors.torch.load_file\(path\)"):
        layouts.load("model.safetensors", num_heads=3)
    with pytest.raises(TypeError, match="num_heads: expected the number of heads, which a state dict does not contain"):
        layouts.load(module.state_dict())
