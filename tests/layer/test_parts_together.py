"""Parts in any combination: cached or not, by the reference kernel and the chosen one, copied, compiled, exported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard import KVCache, MultiHeadAttention, layouts
from regard.layer import Gate, Norm
from regard.masks import Causal, Window
from regard.positions import Alibi, MultiAxisRotary, Rotary, Temperature

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-11, "atol": 1e-11}


@st.composite
def layers(draw: st.DrawFn) -> MultiHeadAttention:
    """A layer of any sizes and parts, in float64, every parameter random."""
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, head_dim = groups * per_group, 2 * draw(st.integers(2, 5))
    norms = st.builds(
        Norm,
        kind=st.just("rms"),
        over=st.sampled_from(["head", "width"]),
        weight=st.sampled_from(["plain", "zero-centred", "none"]),
    )
    sections = (1, head_dim // 2 - 1)
    encodings: list[Any] = [None, Rotary(head_dim), Rotary(head_dim, interleaved=True), Alibi(heads)]
    encodings += [MultiAxisRotary(head_dim, sections), MultiAxisRotary(head_dim, sections, order="separate")]
    layer = MultiHeadAttention(
        draw(st.integers(1, 13)),
        heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        value_head_dim=draw(st.integers(1, 7)),
        bias=draw(st.booleans()),
        qk_norm=draw(st.none() | norms),
        v_norm=draw(st.none() | norms),
        position_encoding=draw(st.sampled_from(encodings)),
        gate=draw(
            st.none() | st.builds(Gate, st.sampled_from(["element", "head"]), st.sampled_from(["sigmoid", "softplus"]))
        ),
        query_scale=draw(st.none() | st.builds(Temperature, st.integers(1, 5))),
        sinks=draw(st.booleans()),
    ).double()
    torch.manual_seed(draw(st.integers(0, 99)))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.eval()


def positions_of(layer: MultiHeadAttention, batch: int, tokens: int) -> Tensor | None:
    if not isinstance(layer.position_encoding, MultiAxisRotary):
        return None
    return torch.randint(0, 50, (batch, tokens, 2), generator=torch.Generator().manual_seed(tokens))


@given(
    layers(),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([Causal(), Window(3)]),
)
@settings(max_examples=20)
@torch.no_grad()
def test_cached_and_by_any_kernel(layer: MultiHeadAttention, batch: int, split: list[int], mask: Any) -> None:
    tokens = sum(split)
    x = torch.randn(batch, tokens, layer.embed_dim, dtype=torch.float64)
    at, cache = positions_of(layer, batch, tokens), KVCache()
    whole = layer(x, mask=mask, positions=at)
    places = [None] * len(split) if at is None else at.split(split, 1)
    pieces = zip(x.split(split, 1), places, strict=True)
    parts = [layer(part, mask=mask, positions=where, cache=cache) for part, where in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TIGHT)
    layer.kernel = "reference"
    torch.testing.assert_close(layer(x, mask=mask, positions=at), whole, **TIGHT)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x, mask=mask, positions=at), whole, **TIGHT)


@given(layers())
@settings(max_examples=15)
@torch.no_grad()
def test_exported_with_our_own_names_and_back(layer: MultiHeadAttention) -> None:
    state = layouts.export(layer, "separate")
    assert state.keys() == layer.state_dict().keys()
    kinds = {True: "zero-centred", False: "plain"}

    def told(norm: nn.Module | None) -> Norm | None:
        if norm is None:
            return None
        over = "head" if norm.normalized_shape[0] in (layer.head_dim, layer.value_head_dim) else "width"  # type: ignore[index]
        weight = "none" if not list(norm.parameters()) else kinds["Zero" in type(norm).__name__]
        return Norm(over=over, weight=weight)  # type: ignore[arg-type]

    options = {"qk_norm": told(layer.q_norm), "query_scale": layer.query_scale, "gate": layer.gate}
    options["position_encoding"] = layer.position_encoding
    if layer.v_norm is not None and told(layer.v_norm).over != "head":  # type: ignore[union-attr]
        return  # (a norm of values over all heads: no model has it, and `load` reads one over each head)
    again = layouts.load(state, layer.num_heads, layout="separate", v_norm=told(layer.v_norm), **options)
    x = torch.randn(2, 5, layer.embed_dim, dtype=torch.float64)
    at = positions_of(layer, 2, 5)
    torch.testing.assert_close(again(x, mask=Causal(), positions=at), layer(x, mask=Causal(), positions=at), **TIGHT)


@pytest.mark.slow
def test_compiled_with_all_of_them() -> None:
    torch.manual_seed(4)
    layer = MultiHeadAttention(
        14,
        6,
        num_kv_heads=3,
        head_dim=10,
        qk_norm=Norm(weight="zero-centred"),
        v_norm=Norm(weight="none"),
        position_encoding=Rotary(10, width=4),
        gate=Gate(),
        query_scale=Temperature(3),
        sinks=True,
    ).double()
    x = torch.randn(2, 11, 14, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (11, 7):
        out, wanted = compiled(x[:, :n], mask=Causal()), layer(x[:, :n], mask=Causal())
        torch.testing.assert_close(out, wanted, **TIGHT)
        ours = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        theirs = torch.autograd.grad(wanted.square().sum(), list(layer.parameters()))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **TIGHT)


def test_what_cannot_be_sharded_is_refused_in_words() -> None:
    from regard.layer import ValueMix
    from regard.parallel.heads import check_both

    for what, options in {
        "shares_kv": {"shares_kv": True},
        "value_mix": {"value_mix": ValueMix()},
        "MultiAxisRotary": {"position_encoding": MultiAxisRotary(4, (1, 1))},
    }.items():
        layer = MultiHeadAttention(12, 3, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"layer 0: expected a layer without {what}, which cannot be sharded"):
            check_both("layer 0", layer, None, None)
