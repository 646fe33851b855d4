"""What a caller can get wrong: each case works as one would expect, or raises with words that say what to do. Never a
crash, never a silent wrong answer."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention, RollingCache, attend, attention_weights, explain
from regard.masks import Causal, Hide, Keep, Mask, Padding, Window
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
KERNELS = ["auto", "blockwise", "reference"]
WAITS = pytest.mark.of_cpu("elsewhere nobody waits for the answer whether keys are finite, and torch's kernel leaks")
B, H, N, M, D = 2, 3, 5, 7, 11


def tensors(batch: int = B, heads: int = H, n: int = N, m: int = M, d: int = D, e: int = D) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = (batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, e)
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


# ----------------------------------------------------------------------------------------------------
# Arguments of attend


Q = torch.zeros(B, H, N, D)
K = torch.zeros(B, H, M, D)
HERE, ELSEWHERE = Q.device, torch.device("cpu" if Q.is_meta else "meta")

WRONG_TENSORS = {
    "five axes": (
        (Q[None], K[None], K[None]),
        ValueError,
        r"q, k, v: expected q \(B, H, N, D\).*received \(1, 2, 3, 5, 11\)",
    ),
    "three axes": ((Q[0], K[0], K[0]), ValueError, r"received \(3, 5, 11\), .*remedy: heads have an axis of their own"),
    "integers": ((Q.int(), K.int(), K.int()), TypeError, "expected one dtype of float32, .*received torch.int32"),
    "complex": ((Q.cfloat(), K.cfloat(), K.cfloat()), TypeError, "expected one dtype of .*received torch.complex64"),
    "two dtypes": (
        (Q, K.double(), K),
        TypeError,
        "received torch.float32, torch.float64, torch.float32; remedy: convert",
    ),
    "two devices": (
        (Q, torch.empty_like(K, device=ELSEWHERE), K),
        ValueError,
        f"q, k, v: expected one device, received {HERE}, {ELSEWHERE}, {HERE}",
    ),
    "two batches": ((Q, K[:1], K[:1]), ValueError, r"expected one batch size.*remedy: share keys .* k.expand\(B"),
    "two widths": ((Q, K[..., :7], K), ValueError, "q, k: expected the same head width D, received 11 and 7"),
    "two lengths": ((Q, K, K[:, :, :5]), ValueError, r"k, v: expected the same heads and length .*\(2, 3, 5, 11\)"),
    "two head counts": ((Q, K, K[:, :1]), ValueError, r"k, v: expected the same heads and length"),
    "heads that do not divide": (
        (Q, K[:, :2], K[:, :2]),
        ValueError,
        "kv heads: expected a divisor of the 3 query heads",
    ),
    "more kv heads": ((Q[:, :1], K, K), ValueError, "kv heads: expected a divisor of the 1 query heads, received 3"),
    "no kv heads": (
        (Q, K[:, :0], K[:, :0]),
        ValueError,
        "kv heads: expected a divisor of the 3 query heads, received 0",
    ),
    "a list": (([1.0], K, K), TypeError, "q: expected a tensor, received list"),
    "nothing": ((Q, None, K), TypeError, "k: expected a tensor, received NoneType"),
    "a string": ((Q, K, "values"), TypeError, "v: expected a tensor, received str"),
    "an array": ((np.zeros(Q.shape, np.float32), K, K), TypeError, "q: expected a tensor, received ndarray"),
}


@pytest.mark.on_meta
@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_wrong_tensors(what: str) -> None:
    given, error, words = WRONG_TENSORS[what]
    with pytest.raises(error, match=words):
        attend(*given)


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mask of integers": (
        {"mask": torch.ones(N, M).long()},
        TypeError,
        r"received dtype torch.int64; remedy: masks.Keep\(t !=",
    ),
    "mask of floats": ({"mask": torch.ones(N, M)}, TypeError, r"masks.Keep\(t != 0\).*masks.Hide\(t.*bias=t"),
    "mask as a list": ({"mask": [[True]]}, TypeError, "mask: expected a regard.masks.Mask .*received list"),
    "mask as a string": ({"mask": "causal"}, TypeError, r"received str; remedy: masks.Causal\(\)"),
    "mask as a class": ({"mask": Causal}, TypeError, "mask: expected a regard.masks.Mask .*received type"),
    "mask that is a bias": ({"mask": Alibi(H)}, TypeError, "mask: expected a regard.masks.Mask .*received Alibi"),
    "mask (B, M)": (
        {"mask": torch.ones(B, M).bool()},
        ValueError,
        r"\(B, M\) mask of real tokens is masks.Padding\(keep",
    ),
    "mask (M, N)": ({"mask": torch.ones(M, N).bool()}, ValueError, r"= \(2, 3, 5, 7\), received \(1, 1, 7, 5\)"),
    "mask (M,)": (
        {"mask": torch.ones(M).bool()},
        ValueError,
        r"received shape \(7,\); remedy: padding is masks.Padding",
    ),
    "mask elsewhere": (
        {"mask": torch.ones(N, M, device=ELSEWHERE).bool()},
        ValueError,
        f"mask: expected device {HERE}.*received {ELSEWHERE}",
    ),
    "padding elsewhere": (
        {"mask": Causal() & ~Padding(lengths=torch.ones(B, device=ELSEWHERE).int())},
        ValueError,
        f"mask: expected device {HERE}, as q's, received {ELSEWHERE}",
    ),
    "bias of integers": ({"bias": torch.ones(N, M).int()}, TypeError, "bias: expected a floating-point .*torch.int32"),
    "bias of booleans": ({"bias": torch.ones(N, M).bool()}, TypeError, "remedy: a boolean mask goes to mask="),
    "bias of three axes": ({"bias": torch.ones(H, N, M)}, ValueError, r"received shape \(3, 5, 7\); remedy: unsqueeze"),
    "bias of five axes": ({"bias": torch.ones(1, B, H, N, M)}, ValueError, r"received shape \(1, 2, 3, 5, 7\)"),
    "bias (M, N)": (
        {"bias": torch.ones(M, N)},
        ValueError,
        r"broadcasts to .* = \(2, 3, 5, 7\), received \(1, 1, 7, 5\)",
    ),
    "bias of other heads": ({"bias": torch.ones(1, 2, N, M)}, ValueError, r"= \(2, 3, 5, 7\), received \(1, 2, 5, 7\)"),
    "alibi of other heads": ({"bias": Alibi(2)}, ValueError, "bias Slopes: expected 3 heads, received 2"),
    "relative of other heads": ({"bias": RelativeBias(2)}, ValueError, "bias Buckets: expected 3 heads, received 2"),
    "bias that is a mask": ({"bias": Causal()}, TypeError, "bias: expected a tensor, a bias object .*received Causal"),
    "bias elsewhere": (
        {"bias": torch.ones(N, M, device=ELSEWHERE)},
        ValueError,
        f"bias: expected device {HERE}.*received {ELSEWHERE}",
    ),
    "positions of floats": (
        {"positions": torch.ones(N)},
        TypeError,
        "positions: expected an integer tensor, received dtype",
    ),
    "positions of booleans": (
        {"positions": torch.ones(N).bool()},
        TypeError,
        "positions: expected an integer.*torch.bool",
    ),
    "positions of complex": ({"positions": torch.ones(N).cfloat()}, TypeError, "positions: expected an integer tensor"),
    "positions of the keys": (
        {"positions": torch.arange(M)},
        ValueError,
        r"expected shape \(5,\) or \(2, 5\), received .*7",
    ),
    "positions of a batch": (
        {"positions": torch.zeros(3, N).int()},
        ValueError,
        r"positions: .*received shape \(3, 5\)",
    ),
    "positions as a list": (
        {"positions": [0, 1, 2, 3, 4]},
        TypeError,
        "positions: expected an int or an integer tensor, received list",
    ),
    "positions as a string": (
        {"positions": "first"},
        TypeError,
        "positions: expected an int or an integer tensor, received str",
    ),
    "positions as a float": (
        {"positions": 2.5},
        TypeError,
        "positions: expected an int or an integer tensor, received float",
    ),
    "positions as a truth": (
        {"positions": True},
        TypeError,
        "positions: expected an int or an integer tensor, received bool",
    ),
    "positions elsewhere": (
        {"positions": torch.arange(N, device=ELSEWHERE)},
        ValueError,
        f"positions: expected device {HERE}, .*received {ELSEWHERE}",
    ),
    "key_positions as a list": (
        {"key_positions": [0] * M},
        TypeError,
        "key_positions: expected an integer .*received list",
    ),
    "key_positions of queries": (
        {"key_positions": torch.arange(N)},
        ValueError,
        r"key_positions: expected shape \(7,\)",
    ),
    "sinks of other heads": (
        {"sinks": torch.zeros(2)},
        ValueError,
        r"sinks: expected shape \(H,\) = \(3,\), received .*\(2,\)",
    ),
    "sinks of a batch": ({"sinks": torch.zeros(1, H)}, ValueError, r"sinks: expected shape .*received shape \(1, 3\)"),
    "sinks as a list": ({"sinks": [0.0] * H}, TypeError, "sinks: expected a floating-point tensor .*received list"),
    "sinks of integers": ({"sinks": torch.zeros(H).int()}, TypeError, "sinks: expected a floating-point .*torch.int32"),
    "sinks elsewhere": (
        {"sinks": torch.zeros(H, device=ELSEWHERE)},
        ValueError,
        f"sinks: expected device {HERE}.*received {ELSEWHERE}",
    ),
    "dropout above one": ({"dropout": 2.0}, ValueError, "dropout: expected a probability from 0 to 1, received 2.0"),
    "dropout below zero": ({"dropout": -0.1}, ValueError, "dropout: expected a probability from 0 to 1, received -0.1"),
    "dropout of nan": ({"dropout": math.nan}, ValueError, "dropout: expected a probability from 0 to 1, received nan"),
    "dropout as a truth": ({"dropout": True}, TypeError, "dropout: expected a number, received bool True"),
    "dropout as a string": ({"dropout": "0.1"}, TypeError, "dropout: expected a number, received str '0.1'"),
    "generator as a seed": (
        {"dropout": 0.1, "generator": 3},
        TypeError,
        "generator: expected a torch.Generator, received int",
    ),
    "softcap of zero": (
        {"softcap": 0},
        ValueError,
        "softcap: expected a positive number, or None for no cap, received 0",
    ),
    "softcap below zero": ({"softcap": -3.0}, ValueError, "softcap: expected a positive number.*received -3.0"),
    "softcap of inf": ({"softcap": math.inf}, ValueError, "softcap: expected a positive number.*received inf"),
    "softcap of nan": ({"softcap": math.nan}, ValueError, "softcap: expected a positive number.*received nan"),
    "softcap as a truth": ({"softcap": True}, TypeError, "softcap: expected a number, received bool True"),
    "softcap as a string": ({"softcap": "30"}, TypeError, "softcap: expected a number, received str '30'"),
    "scale as a string": ({"scale": "x"}, TypeError, "scale: expected a number, received str 'x'"),
    "kernel unknown": (
        {"kernel": "flash"},
        ValueError,
        r'kernel: expected "auto" or one of \[.*\], received \'flash\'',
    ),
    "kernel as nothing": ({"kernel": None}, ValueError, 'kernel: expected "auto" or one of .*received None'),
    "fused with dropout": (
        {"kernel": "fused", "dropout": 0.1},
        ValueError,
        "kernel 'fused': expected a call that it can serve, received one it cannot: SDPA has its own .*kernel=\"auto\"",
    ),
    "fused with sinks": ({"kernel": "fused", "sinks": torch.zeros(H)}, ValueError, "one it cannot: it has no sinks"),
    "fused with softcap": ({"kernel": "fused", "softcap": 3.0}, ValueError, "one it cannot: it has no softcap"),
}


@pytest.mark.on_meta
@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_wrong_options(what: str) -> None:
    options, error, words = WRONG_OPTIONS[what]
    with pytest.raises(error, match=words):
        attend(Q, K, K, **options)


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "what", [w for w in WRONG_OPTIONS if w.split()[0] in ("mask", "bias", "positions", "sinks", "softcap")]
)
def test_weights_and_explanations_refuse_the_same(what: str) -> None:
    options, error, words = WRONG_OPTIONS[what]
    with pytest.raises(error, match=words):
        attention_weights(Q, K, **options)
    with pytest.raises(error, match=words):
        explain(Q, K, K, **options)


def test_an_unknown_stage() -> None:
    with pytest.raises(
        ValueError, match=r"stage: expected one of \('scaled', 'capped', 'biased', 'weights'\), received 'raw'"
    ):
        attention_weights(Q, K, stage="raw")


@pytest.mark.on_meta
def test_more_queries_than_keys_do_not_say_where_they_stand() -> None:
    with pytest.raises(
        ValueError, match=r"positions: expected the queries' own.*received key_positions alone, with 7 queries"
    ):
        attend(K, Q, Q, mask=Causal(), key_positions=torch.arange(N))


# ----------------------------------------------------------------------------------------------------
# Arguments of the layer


X = torch.zeros(B, N, 12)

WRONG_LAYERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads that do not divide": (
        {"num_heads": 5},
        ValueError,
        "num_heads: expected a divisor of embed_dim = 12, received 5; remedy: pass head_dim",
    ),
    "kv heads that do not divide": (
        {"num_kv_heads": 2},
        ValueError,
        "num_kv_heads: expected a divisor of num_heads = 3, received 2",
    ),
    "more kv heads": ({"num_kv_heads": 6}, ValueError, "num_kv_heads: expected a divisor of num_heads = 3, received 6"),
    "no heads": ({"num_heads": 0}, ValueError, "num_heads: expected an integer of at least 1, received 0"),
    "half a head": ({"num_heads": 1.5}, ValueError, "num_heads: expected an integer of at least 1, received 1.5"),
    "no width": ({"embed_dim": 0}, ValueError, "embed_dim: expected an integer of at least 1, received 0"),
    "a truth for a width": (
        {"embed_dim": True},
        ValueError,
        "embed_dim: expected an integer of at least 1, received True",
    ),
    "no head width": ({"head_dim": 0}, ValueError, "head_dim: expected an integer of at least 1, received 0"),
    "negative value width": (
        {"value_head_dim": -1},
        ValueError,
        "value_head_dim: expected an integer of at least 1, received -1",
    ),
    "negative query width": (
        {"query_dim": -1},
        ValueError,
        "query_dim: expected an integer of at least 1, received -1",
    ),
    "no key width": ({"key_dim": 0}, ValueError, "key_dim: expected an integer of at least 1, received 0"),
    "a word for a width": (
        {"value_dim": "7"},
        ValueError,
        "value_dim: expected an integer of at least 1, received '7'",
    ),
    "dropout above one": ({"dropout": 1.5}, ValueError, "dropout: expected a probability from 0 to 1, received 1.5"),
    "dropout below zero": ({"dropout": -1}, ValueError, "dropout: expected a probability from 0 to 1, received -1"),
    "dropout as a truth": ({"dropout": True}, TypeError, "dropout: expected a number, received bool True"),
    "dropout as a word": ({"dropout": "0.1"}, TypeError, "dropout: expected a number, received str '0.1'"),
    "unknown norm": ({"qk_norm": "batch"}, ValueError, 'qk_norm: expected "rms", "layer" or None, received \'batch\''),
    "unknown init": ({"init": "zeros"}, ValueError, 'init: expected "xavier" or "normal", received \'zeros\''),
    "rotary of another width": (
        {"position_encoding": Rotary(6)},
        ValueError,
        "position_encoding: expected Rotary of head width 4, received 6",
    ),
    "positions as a word": (
        {"position_encoding": "rotary"},
        TypeError,
        "position_encoding: expected Rotary, Alibi, RelativeBias or None, received str",
    ),
}


@pytest.mark.on_meta
@pytest.mark.parametrize("what", WRONG_LAYERS)
def test_wrong_layers(what: str) -> None:
    options, error, words = WRONG_LAYERS[what]
    with pytest.raises(error, match=words):
        MultiHeadAttention(**{"embed_dim": 12, "num_heads": 3, **options})


WRONG_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "another width": (
        (X[..., :7],),
        {},
        ValueError,
        r"query: expected shape \(B, length, 12\) or \(length, 12\), received \(2, 5, 7\)",
    ),
    "another key width": (
        (X, X[..., :7]),
        {},
        ValueError,
        r"key: expected shape .*received \(2, 5, 7\); remedy: inputs are batch",
    ),
    "another value width": ((X, X, X[..., :7]), {}, ValueError, r"value: expected shape .*received \(2, 5, 7\)"),
    "four axes": ((X[None],), {}, ValueError, r"query: expected shape .*received \(1, 2, 5, 12\)"),
    "one axis": ((X[0, 0],), {}, ValueError, r"query: expected shape .*received \(12,\)"),
    "a key without a batch": ((X, X[0]), {}, ValueError, r"key: expected shape .*received \(5, 12\)"),
    "another batch": ((X, X[:1]), {}, ValueError, r"key: expected a batch of 2, as the query's, received \(1, 5, 12\)"),
    "key and value lengths": ((X, X, X[:, :3]), {}, ValueError, r"key, value: expected the same length, received"),
    "another dtype": (
        (X.double(),),
        {},
        TypeError,
        r"query: expected torch.float32, as the layer's weights, received torch.float64",
    ),
    "integers": (
        (X.long(),),
        {},
        TypeError,
        "query: expected torch.float32, as the layer's weights, received torch.int64",
    ),
    "another key dtype": (
        (X, X.double()),
        {},
        TypeError,
        r"key: expected torch.float32, .*received torch.float64; remedy: .*key.to",
    ),
    "another value dtype": ((X, X, X.half()), {}, TypeError, "value: expected torch.float32, .*received torch.float16"),
    "another device": (
        (torch.empty_like(X, device=ELSEWHERE),),
        {},
        ValueError,
        f"query: expected device {HERE}, as the layer's weights, received {ELSEWHERE}",
    ),
    "another key device": (
        (X, torch.empty_like(X, device=ELSEWHERE)),
        {},
        ValueError,
        f"key: expected device {HERE}, as the layer's weights, received {ELSEWHERE}",
    ),
    "a list": (([[1.0] * 12],), {}, TypeError, "query: expected a tensor, received list"),
    "nothing": ((None,), {}, TypeError, "query: expected a tensor, received NoneType"),
    "a word": ((X, "memory"), {}, TypeError, "key: expected a tensor, received str"),
    "a list of values": ((X, X, [1.0]), {}, TypeError, "value: expected a tensor, received list"),
    "a list for a cache": (
        (X,),
        {"cache": []},
        TypeError,
        "cache: expected a KVCache or a RollingCache, received list",
    ),
    "a number for positions": (
        (X,),
        {"positions": 3},
        TypeError,
        "positions: expected an integer tensor, received int",
    ),
    "a list for positions": (
        (X,),
        {"positions": [0, 1, 2, 3, 4]},
        TypeError,
        "positions: expected an (int or an )?integer tensor, received list",
    ),
    "other positions": (
        (X,),
        {"positions": torch.arange(3)},
        ValueError,
        r"positions: expected shape \(5,\) or \(2, 5\), received shape",
    ),
    "a float mask": (
        (X,),
        {"mask": torch.zeros(N, N)},
        TypeError,
        r"mask: expected a boolean tensor.*masks.Keep\(t != 0\)",
    ),
    "a padding mask": (
        (X,),
        {"mask": torch.ones(B, N).bool()},
        ValueError,
        r"a \(B, M\) mask of real tokens is masks.Padding",
    ),
    "a boolean bias": ((X,), {"bias": torch.ones(N, N).bool()}, TypeError, "bias: expected a floating-point tensor"),
}


@pytest.mark.on_meta
@pytest.mark.parametrize("what", WRONG_CALLS)
@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_wrong_calls(what: str, encoding: str) -> None:
    inputs, options, error, words = WRONG_CALLS[what]
    layer = MultiHeadAttention(12, 3, position_encoding=Alibi(3) if encoding == "alibi" else None)
    with pytest.raises(error, match=words):
        layer(*inputs, **options)


@pytest.mark.on_meta
def test_another_dtype_on_meta() -> None:
    with pytest.raises(
        TypeError, match=r"query: expected torch.float32, as the layer's weights, received torch.float16"
    ):
        MultiHeadAttention(12, 3).to("meta")(X.to("meta").half())


def test_modules_that_are_no_position_encoding() -> None:
    with pytest.raises(TypeError, match=r"expected .*(bias object|Rotary).*received Linear"):
        MultiHeadAttention(12, 3, position_encoding=nn.Linear(4, 4))(X)


def test_position_encodings_of_other_heads() -> None:
    with pytest.raises(ValueError, match="expected 3 heads, received 2"):
        MultiHeadAttention(12, 3, position_encoding=Alibi(2))(X)


@pytest.mark.on_meta
def test_a_cache_that_is_too_small() -> None:
    layer, cache = MultiHeadAttention(12, 3), KVCache(limit=7)
    with torch.no_grad():
        layer(X, cache=cache)
        with pytest.raises(ValueError, match="cache: expected at most 7 tokens, received 5 held and 5 new"):
            layer(X, cache=cache)
        assert layer(X[:, :2], cache=cache).shape == (B, 2, 12)


def test_a_cache_of_another_batch_or_layer() -> None:
    layer, cache = MultiHeadAttention(12, 3), KVCache()
    with torch.no_grad():
        layer(X, cache=cache)
        with pytest.raises(
            ValueError, match=r"cached keys: .*\(2, 3, 4\), received \(1, 3, 4\); remedy: one cache per layer"
        ):
            layer(X[:1], cache=cache)
        with pytest.raises(
            ValueError, match=r"cache: expected one for each layer, received one with \d+ tokens of another"
        ):
            MultiHeadAttention(12, 2)(X, cache=cache)


# ----------------------------------------------------------------------------------------------------
# Sizes of zero


ZEROS = {
    "no queries": {"n": 0},
    "no keys": {"m": 0},
    "neither": {"n": 0, "m": 0},
    "no batch": {"batch": 0},
    "no heads": {"heads": 0},
    "no width": {"d": 0},
    "no value width": {"e": 0},
}
SOME_MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(2) | Window(before=1, after=3),
    "padding": Padding(lengths=torch.tensor([2])),
}


@pytest.mark.parametrize("what", [z for z in ZEROS if z != "no heads"])
@pytest.mark.parametrize("mask", SOME_MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("extras", ["plain", "sinks, softcap, bias and dropout"])
def test_sizes_of_zero_work_with_gradient(what: str, mask: str, kernel: str, extras: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(**ZEROS[what]))
    options: dict[str, Any] = {"mask": SOME_MASKS[mask], "kernel": kernel}
    if extras != "plain":
        options |= {"sinks": torch.zeros(H, dtype=torch.float64), "softcap": 3.0, "bias": Alibi(H), "dropout": 0.1}
    # memory that was used before holds NaN: what is not written shows
    stale = [torch.full_like(x, math.nan) for x in (q, k, v) for _ in range(8)]
    del stale
    out = attend(q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.isfinite().all()
    if not k.shape[2]:
        assert (out == 0).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()
        if not q.shape[2] or not k.shape[2]:
            assert (gradient == 0).all()
    weights = attention_weights(q, k, mask=options["mask"])
    assert weights.shape == (*q.shape[:3], k.shape[2])


def test_keys_of_no_width_are_all_alike() -> None:
    q, k, v = tensors(d=0)
    for kernel in KERNELS:
        expected = v.mean(2, keepdim=True).expand(B, H, N, D)
        torch.testing.assert_close(attend(q, k, v, kernel=kernel), expected, **TIGHT)


@pytest.mark.parametrize("batch, n, m", [(2, 0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 3)])
@pytest.mark.parametrize(
    "encoding", [None, Rotary(4), Alibi(3), RelativeBias(3)], ids=["none", "rotary", "alibi", "relative"]
)
def test_the_layer_takes_sizes_of_zero(batch: int, n: int, m: int, encoding: nn.Module | None) -> None:
    layer = MultiHeadAttention(12, 3, position_encoding=encoding, sinks=True)
    out, weights = layer(torch.zeros(batch, n, 12), torch.zeros(batch, m, 12), mask=Causal(), need_weights=True)
    assert out.shape == (batch, n, 12)
    assert weights.shape == (batch, 3, n, m)
    assert torch.equal(
        out, layer.out_proj.bias.expand_as(out)
    )  # nothing to see: 0, and the bias of the last projection
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.on_meta
def test_a_cache_takes_no_tokens() -> None:
    layer = MultiHeadAttention(12, 3, position_encoding=Rotary(4))
    for cache in (KVCache(), RollingCache(3, 1)):
        with torch.no_grad():
            assert layer(X[:, :0], cache=cache).shape == (B, 0, 12)
            layer(X, cache=cache)
            assert layer(X[:, :0], cache=cache).shape == (B, 0, 12)


# ----------------------------------------------------------------------------------------------------
# NaN and inf


HIDING = {
    "causal": (Causal(), M - 1),
    "padding": (Padding(lengths=torch.tensor([M - 2, M - 2])), M - 1),
    "keep": (Keep(torch.arange(M)[None] != 3), 3),
    "hide": (Hide(torch.arange(M)[None] == 3), 3),
    "window": (Window(before=2, after=0), 0),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("kernel", [pytest.param("auto", marks=WAITS), *KERNELS[1:]])
def test_what_is_hidden_does_not_leak(kernel: str, hiding: str, where: str, bad: float, softcap: float | None) -> None:
    """Rows that may not see a broken key are as if it were any other; and so are all gradients that they give."""
    mask, slot = HIDING[hiding]
    clean = tensors()
    broken = [x.clone() for x in clean]
    if where in ("key", "both"):
        broken[1][:, :, slot, 4] = bad
    if where in ("value", "both"):
        broken[2][:, :, slot, 4] = bad
    hidden = ~mask.dense(N, M)[0, 0, :, slot]  # (N,)
    assert hidden.any()
    results = []
    for given in (clean, broken):
        given = [x.clone().requires_grad_() for x in given]
        out = attend(*given, mask=mask, softcap=softcap, kernel=kernel)
        dq, dk, dv = torch.autograd.grad(out[:, :, hidden].square().sum(), given)
        results.append((out[:, :, hidden].detach(), dq[:, :, hidden], dk, dv))
    for name, right, ours in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        others = [i for i in range(M) if i != slot] if name in ("dk", "dv") else slice(None)
        if name in ("dk", "dv") and not hidden.all():
            continue  # a row that sees it, and is not asked for, has a weight of NaN times a gradient of 0
        torch.testing.assert_close(ours[:, :, others], right[:, :, others], **TIGHT, msg=lambda t, n=name: f"{n}: {t}")
        if name in ("dk", "dv"):
            assert (ours[:, :, slot] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_a_broken_query_spoils_its_own_row_alone(kernel: str, bad: float, mask: Mask | None) -> None:
    q, k, v = tensors()
    expected = attend(q, k, v, mask=mask, kernel="reference")
    q[1, 2, 3, 4] = bad
    out = attend(q, k, v, mask=mask, kernel=kernel)
    assert out[1, 2, 3].isnan().all()
    others = torch.ones(B, H, N, dtype=torch.bool)
    others[1, 2, 3] = False
    torch.testing.assert_close(out[others], expected[others], **TIGHT)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "mask", [None, Causal(), Padding(lengths=torch.tensor([5, 7]))], ids=["none", "causal", "padding"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_broken_item_spoils_no_other(kernel: str, mask: Mask | None, which: int) -> None:
    given = tensors()
    right = [x.clone().requires_grad_() for x in given]
    given[which][1] = math.nan
    given = [x.requires_grad_() for x in given]
    ours, theirs = (attend(*x, mask=mask, kernel=kernel) for x in (given, right))
    # where all keys of an item are NaN and none is hidden, torch's kernel takes its rows for empty ones
    assert ours[1].isnan().any() or (kernel in ("auto", "fused") and mask is None and which == 1)
    torch.testing.assert_close(ours[0], theirs[0], **TIGHT)
    for mine, good in zip(
        torch.autograd.grad(ours.sum(), given), torch.autograd.grad(theirs.sum(), right), strict=True
    ):
        torch.testing.assert_close(mine[0], good[0], **TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_visible_nan_is_not_swept_under_the_carpet(kernel: str) -> None:
    for which, mask in itertools.product((1, 2), (None, Causal(), Keep(torch.ones(N, M).bool()))):
        given = tensors()
        given[which][0, 0, 0, 4] = math.nan
        out = attend(*given, mask=mask, kernel=kernel)
        assert out[0, 0, :, 4].isnan().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing_are_zero_with_zero_gradient(kernel: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    hidden = torch.zeros(N, M, dtype=torch.bool)
    hidden[2] = True
    out = attend(q, k, v, mask=Hide(hidden), kernel=kernel)
    assert (out[:, :, 2] == 0).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[:, :, 2] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    nothing = attend(q, k, v, mask=Padding(lengths=torch.tensor([0])), kernel=kernel)
    assert (nothing == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(nothing.sum(), (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_of_minus_infinity_hides(kernel: str) -> None:
    q, k, v = tensors()
    visible = torch.ones(N, M).tril().bool()
    visible[1] = False
    bias = torch.zeros(N, M, dtype=torch.float64).masked_fill(~visible, -math.inf)
    out = attend(q, k, v, bias=bias, kernel=kernel)
    torch.testing.assert_close(out, attend(q, k, v, mask=visible, kernel="reference"), **TIGHT)
    assert (out[:, :, 1] == 0).all()


# ----------------------------------------------------------------------------------------------------
# Numbers at the edge


@pytest.mark.parametrize("kernel", [*KERNELS, "fused"])
@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 1, 1e-30, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_any_scale(scale: float, kernel: str, mask: Mask | None) -> None:
    q, k, v = tensors(n=M)
    visible = torch.ones(M, M).bool() if mask is None else mask.dense(M)
    s = (q @ k.mT * float(scale)).masked_fill(~visible, -math.inf)
    if kernel == "fused" and "fused: no" in explain(q, k, v, scale=scale, mask=mask):
        with pytest.raises(ValueError, match="kernel 'fused': expected a call that it can serve"):
            attend(q, k, v, scale=scale, mask=mask, kernel=kernel)
        return
    torch.testing.assert_close(attend(q, k, v, scale=scale, mask=mask, kernel=kernel), s.softmax(-1) @ v, **TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_huge_softcap_is_none_and_a_tiny_one_is_uniform(kernel: str) -> None:
    q, k, v = tensors()
    torch.testing.assert_close(attend(q, k, v, softcap=1e6, kernel=kernel), attend(q, k, v), rtol=1e-8, atol=1e-8)
    near = v.mean(2, keepdim=True).expand(B, H, N, D)
    torch.testing.assert_close(attend(q, k, v, softcap=1e-9, kernel=kernel), near, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_huge_scores_choose_one_key(kernel: str) -> None:
    q, k, v = (x.float() for x in tensors())
    out = attend(q * 1e18, k * 1e18, v, kernel=kernel)
    best = (q @ k.mT).argmax(-1)
    torch.testing.assert_close(out, v.gather(2, best[..., None].expand(B, H, N, D)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("kernel", KERNELS)
def test_narrow_positions_do_not_wrap_around(dtype: torch.dtype, kernel: str) -> None:
    q, k, v = tensors(n=M)
    at = torch.arange(M)
    for options in ({"mask": Window(before=2, after=1)}, {"bias": Alibi(H)}, {"bias": RelativeBias(H)}):
        wide = attend(q, k, v, positions=at, key_positions=at, kernel=kernel, **options)
        narrow = attend(q, k, v, positions=at.to(dtype), key_positions=at.to(dtype), kernel=kernel, **options)
        assert torch.equal(narrow, wide)


FUSED = pytest.param("fused", marks=pytest.mark.of_cpu("torch has no fused attention for float64 elsewhere"))


@pytest.mark.parametrize("kernel", [*KERNELS, FUSED])
@pytest.mark.parametrize(
    "layout", ["expanded batch", "expanded heads", "expanded keys", "columns", "every other", "one key"]
)
def test_any_strides(kernel: str, layout: str) -> None:
    q, k, v = tensors()
    if layout == "expanded batch":
        q, k, v = (x[:1].expand(5, -1, -1, -1) for x in (q, k, v))
    elif layout == "expanded heads":
        q, k, v = (x[:, :1].expand(-1, 5, -1, -1) for x in (q, k, v))
    elif layout == "expanded keys":
        k, v = (x[:, :, :1].expand(-1, -1, M, -1) for x in (k, v))
    elif layout == "columns":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    elif layout == "every other":
        q, k, v = (x[..., ::2] for x in (q, k, v))
    else:
        k, v = k[:, :, :1], v[:, :, :1]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    out, right = attend(*leaves, mask=Causal(), kernel=kernel), attend(*plain, mask=Causal(), kernel="reference")
    torch.testing.assert_close(out, right, **TIGHT)
    ours, theirs = (torch.autograd.grad(o.square().sum(), x) for o, x in ((out, leaves), (right, plain)))
    torch.testing.assert_close(ours, theirs, **TIGHT)


ODD_THINGS = """
    import itertools, math, torch, regard
    from regard.masks import Causal, Keep, Padding, Window

    torch.manual_seed(0)
    tried = 0
    sizes = itertools.product((0, 1, 3), (0, 2), (0, 1, 17), (0, 1, 33), (0, 1, 8), (0, 1, 8))
    for batch, heads, n, m, d, e in sizes:
        for kernel, mask in itertools.product((*regard.kernels.available(), "auto"), (None, Causal(), Window(2))):
            q, k, v = torch.randn(batch, heads, n, d), torch.randn(batch, heads, m, d), torch.randn(batch, heads, m, e)
            try:
                out = regard.attend(q, k, v, mask=mask, kernel=kernel)
            except ValueError as error:
                assert "expected" in str(error), error
            else:
                assert out.shape == (batch, heads, n, e) and out.isfinite().all()
            tried += 1
    for kernel in (*regard.kernels.available(), "auto"):  # very wide heads, one key, all expanded from one number
        wide = 256 if kernel == "native" else 70_000
        q, k = torch.randn(1, 1, 3, wide), torch.randn(1, 1, 5, wide)
        assert regard.attend(q, k, k, kernel=kernel).isfinite().all()
        one = torch.ones(1, 1, 1, 1).expand(3, 5, 7, 11)
        assert torch.allclose(regard.attend(one, one, one, mask=Causal(), kernel=kernel), one)
        assert regard.attend(one, one[:, :, :1], one[:, :, :1], kernel=kernel).isfinite().all()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(2, 3, 5, 7).to(dtype)
            for scale in (0.0, -1.0):
                try:
                    assert regard.attend(x, x, x, mask=Causal(), scale=scale, kernel=kernel).isfinite().all()
                except ValueError as error:
                    assert kernel in ("fused", "native") and "expected" in str(error), error
        tried += 1
    print("tried", tried)
"""


def test_nothing_kills_the_process() -> None:
    source = Path(regard.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ODD_THINGS)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("tried ")
