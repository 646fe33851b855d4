"""`load`, `load_block`, `export`, `names`: find the layout, check the keys, and go through the canonical form."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.layer import AttentionBlock, MultiHeadAttention
from regard.layouts import (
    bert,
    distilbert,
    gpt2,
    llama,
    meta_llama,
    nanogpt,
    neox,
    qkv_layer,
    separate,
    t5,
    timm,
    torch_mha,
    w_q,
    w_qs,
    wqkv,
)
from regard.layouts import canonical as form
from regard.layouts.base import Layout, Tensors
from regard.layouts.rotary_pairs import convert_pairs
from regard.positions import Rotary

__all__ = ["LAYOUTS", "export", "load", "load_block", "names"]

Pairs = Literal["halves", "interleaved"]

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        separate.layout,
        llama.layout,
        meta_llama.layout,
        w_q.layout,
        w_qs.layout,
        qkv_layer.layout,
        neox.layout,
        torch_mha.layout,
        gpt2.layout,
        nanogpt.layout,
        bert.layout,
        distilbert.layout,
        timm.layout,
        wqkv.layout,
        wqkv.modernbert,
        t5.layout,
    )
}

_FROM_SHAPES = frozenset(
    {
        "embed_dim",
        "num_kv_heads",
        "head_dim",
        "value_head_dim",
        "query_dim",
        "key_dim",
        "value_dim",
        "bias",
        "out_bias",
        "sinks",
    }
)


def names() -> list[str]:
    """The layouts there are.

    >>> "llama" in names()
    True
    """
    return list(LAYOUTS)


def load(
    state_dict: Mapping[str, Tensor],
    num_heads: int | None = None,
    *,
    prefix: str = "",
    layout: str = "auto",
    rotary_pairs: Pairs | None = None,
    bidirectional: bool = True,
    max_distance: int = 128,
    **layer_options: Any,
) -> MultiHeadAttention:
    """A layer with the weights of another's state dict, copied; dtype and device are those of the tensors.

    Args:
        state_dict: of an attention module, or of a whole model with `prefix`.
        num_heads: H, which no state dict tells; kv heads and widths are read from the shapes.
        prefix: what stands before the attention's own keys, such as "model.layers.0.self_attn.".
        layout: one of `names()`; "auto" finds it by keys and shapes.
        rotary_pairs: how rotary pairs lie in the rows of q and k, where it is not as the layout has them
            ("interleaved" for GGUF); they are turned to what `position_encoding` wants, which is halves by default.
        bidirectional, max_distance: of the relative position bias, where there is one (T5).
        layer_options: what no weight tells: `position_encoding`, `dropout`, `scale`, `softcap`, `kernel`, `qk_norm`.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(10, 2, batch_first=True)
    >>> ours = load(theirs.state_dict(), num_heads=2)
    >>> x = torch.randn(3, 7, 10)
    >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    num_heads = _check_given(state_dict, num_heads)
    found, chosen = _select(state_dict, prefix, layout)
    beside = [key for key in ("norm.weight", "norm.bias") if chosen.keys.get(key) in found]
    if beside:
        raise bad_value(
            "state_dict",
            expected="an attention layer alone",
            received=f"a LayerNorm beside it: {chosen.keys[beside[0]]!r}",
            remedy="layouts.load_block, which gives an AttentionBlock",
        )
    return form.build(*_read(found, chosen, num_heads, rotary_pairs, bidirectional, max_distance, layer_options))


def load_block(
    state_dict: Mapping[str, Tensor],
    num_heads: int | None = None,
    *,
    prefix: str = "",
    layout: str = "auto",
    eps: float | None = None,
    block_dropout: float = 0.0,
    rotary_pairs: Pairs | None = None,
    bidirectional: bool = True,
    max_distance: int = 128,
    **layer_options: Any,
) -> AttentionBlock:
    """As `load`, for a state dict with the LayerNorm that follows the residual: layouts "bert" and "w_qs".

    Args:
        eps: of the LayerNorm; as the originals have it by default (1e-12 for BERT, 1e-6 for w_qs).
        block_dropout: on what the layer adds to the residual.

    >>> import torch
    >>> block = AttentionBlock(MultiHeadAttention(6, 2))
    >>> load_block(export(block, "bert"), num_heads=2)(torch.randn(1, 3, 6)).shape
    torch.Size([1, 3, 6])
    """
    num_heads = _check_given(state_dict, num_heads)
    found, chosen = _select(state_dict, prefix, layout)
    if chosen.keys.get("norm.weight") not in found:
        raise bad_value(
            "state_dict",
            expected="a LayerNorm beside the attention layer",
            received=sorted(found),
            remedy="layouts.load, which gives the layer alone",
        )
    return form.build_block(
        *_read(found, chosen, num_heads, rotary_pairs, bidirectional, max_distance, layer_options),
        eps=chosen.norm_eps if eps is None else eps,
        dropout=block_dropout,
    )


def export(module: MultiHeadAttention | AttentionBlock, layout: str) -> Tensors:
    """The weights of a layer (or block) as another names and packs them: a plain dict of copies.

    Raises where the other could not be built so; what no weight tells (rotary, dropout) has to be told it apart.

    >>> sorted(export(MultiHeadAttention(6, 2), "gpt2"))
    ['c_attn.bias', 'c_attn.weight', 'c_proj.bias', 'c_proj.weight']
    """
    chosen = _named(layout)
    form.check_expressible(module, chosen)
    layer, tensors = form.take(module)
    form.check_biases(
        tensors,
        chosen,
        remedy="a bias of zeros changes nothing: layer.q_proj.bias = nn.Parameter("
        "torch.zeros(rows)), and likewise for the others; or export as 'separate'",
    )
    tensors = _turned(tensors, layer.num_heads, layer.num_kv_heads, layer.position_encoding, None, chosen.pairs)
    return chosen.from_canonical(tensors, layer.num_heads)


def _read(
    found: Tensors,
    layout: Layout,
    num_heads: int,
    pairs: Pairs | None,
    bidirectional: bool,
    max_distance: int,
    layer_options: Mapping[str, Any],
) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    """Canonical tensors, sizes and options."""
    options = {**layout.options, **layer_options}
    for option in _FROM_SHAPES & options.keys():
        raise bad_value(
            option,
            expected="to be read from the shapes of the tensors",
            received=f"{option}={options[option]!r}",
            remedy=f"leave {option} out",
        )
    out = found[layout.keys["out_proj.weight"]]
    if out.dim() != 2:
        raise bad_value(layout.keys["out_proj.weight"], expected="a matrix", received=f"shape {shape_of(out)}")
    form.divide("num_heads", num_heads, out.shape[0 if layout.transposed else -1], "columns that out_proj reads")
    tensors = layout.to_canonical(found, num_heads)
    form.check_biases(tensors, layout, remedy="add the missing keys, or name another layout")
    size = form.sizes(tensors, num_heads, layout)
    if "position_encoding.weight" in tensors:
        if options.get("position_encoding") is not None:
            raise bad_value(
                "position_encoding",
                expected="None, for the state dict brings a relative position bias",
                received=type(options["position_encoding"]).__name__,
            )
        options["position_encoding"] = form.relative_bias(
            tensors["position_encoding.weight"], num_heads, bidirectional=bidirectional, max_distance=max_distance
        )
    encoding = options.get("position_encoding")
    tensors = _turned(tensors, num_heads, size["num_kv_heads"], encoding, pairs or layout.pairs, None)
    return tensors, size, options


def _turned(
    tensors: Tensors, heads: int, kv_heads: int, encoding: object, stored: Pairs | None, wanted: Pairs | None
) -> Tensors:
    """Rotary pairs from one order to another; a side that is not told is as the layer's `Rotary`, else halves."""
    rotary = encoding if isinstance(encoding, Rotary) else None
    own: Pairs = "interleaved" if rotary is not None and rotary.interleaved else "halves"
    if (stored is None and wanted is None) or (stored or own) == (wanted or own):
        return tensors
    return convert_pairs(tensors, heads, kv_heads, wanted or own, rotary.width if rotary is not None else None)


def _check_given(state_dict: object, num_heads: int | None) -> int:
    """The number of heads. Raises where either was not given, or a module for its state dict."""
    if not isinstance(state_dict, Mapping):
        heads, remedy = getattr(state_dict, "num_heads", "...") if num_heads is None else num_heads, ""
        if isinstance(state_dict, nn.Module):
            remedy = f"layouts.load(module.state_dict(), num_heads={heads})"
        elif isinstance(state_dict, (str, os.PathLike)):
            remedy = "safetensors.torch.load_file(path)"
        raise bad_type(
            "state_dict",
            expected="names and tensors, as module.state_dict() gives them",
            received=type(state_dict).__name__,
            remedy=remedy,
        )
    if num_heads is None:
        raise bad_type(
            "num_heads",
            expected="the number of heads, which no state dict tells",
            received="None",
            remedy="layouts.load(state_dict, num_heads=...)",
        )
    return num_heads


def _named(name: str) -> Layout:
    if name not in LAYOUTS:
        raise bad_value(
            "layout", expected=f"one of {', '.join(names())}", received=repr(name), remedy=_nearest(name, names())
        )
    return LAYOUTS[name]


def _select(state_dict: Mapping[str, Tensor], prefix: str, name: str) -> tuple[Tensors, Layout]:
    """The tensors under the prefix, and their layout: with all of its keys there and none besides."""
    if prefix and not prefix.endswith(".") and any(key.startswith(f"{prefix}.") for key in state_dict):
        prefix += "."
    found = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
    if not found:
        raise bad_value(
            "prefix",
            expected="what stands before the attention's keys",
            received=repr(prefix),
            remedy=_nearest(prefix, _prefixes(state_dict)),
        )
    candidates = list(LAYOUTS.values()) if name == "auto" else [_named(name)]
    matching = [layout for layout in candidates if layout.matches(found)]
    if not matching:
        raise _no_match(found, prefix, candidates)
    layout = min(matching, key=lambda each: len(each.unknown(found)))
    for key, meaning in layout.refused.items():
        if key in found:
            raise bad_value(f"layout {layout.name!r}", expected="plain attention", received=f"{key!r}: {meaning}")
    for key in layout.unknown(found):
        raise bad_value(
            f"layout {layout.name!r}",
            expected="no keys besides its own",
            received=repr(key),
            remedy=_nearest(key, [k for k in layout.keys.values() if k not in found]),
        )
    found = {key: tensor for key, tensor in found.items() if key not in layout.ignored}
    for key, tensor in found.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            received = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise bad_type(
                key, expected="a floating-point tensor", received=received, remedy="dequantise the weights first"
            )
    return found, layout


def _no_match(found: Tensors, prefix: str, candidates: list[Layout]) -> ValueError:
    """Keys deeper down that would do; else the key that is missing from the nearest layout; else what there is."""
    deeper = [p for p in _prefixes(found) if any(layout.matches(_under(found, p)) for layout in candidates)]
    if deeper:
        more = f" (or another of {len(deeper)})" if len(deeper) > 1 else ""
        return bad_value(
            "state_dict",
            expected="the keys of one attention layer",
            received="them under a prefix",
            remedy=f"prefix={prefix + deeper[0]!r}{more}",
        )
    best = min(candidates, key=lambda each: len(each.missing(found)) - sum(key in found for key in each.keys.values()))
    missing = best.missing(found)
    if missing and any(key in found for key in best.keys.values()):
        return bad_value(
            "state_dict",
            expected=f"{missing[0]!r}, as layout {best.name!r} has it",
            received=sorted(found)[:12],
            remedy=_nearest(missing[0], best.unknown(found)),
        )
    if not missing:
        shapes = {key: tuple(tensor.shape) for key, tensor in found.items()}
        return bad_value(
            "state_dict",
            expected=f"the shapes of layout {best.name!r} ({best.origin})",
            received=shapes,
            remedy="layout='auto'",
        )
    known, shown = ", ".join(layout.name for layout in candidates), sorted(found)[:12]
    theirs = {key: layout.name for layout in candidates for key in layout.keys.values()}
    near = [(key, close) for key in shown for close in difflib.get_close_matches(key, theirs, n=1)]
    remedy = f"the nearest to {near[0][0]!r} is {near[0][1]!r}, of layout {theirs[near[0][1]]!r}" if near else ""
    return bad_value("state_dict", expected=f"the keys of one of the layouts {known}", received=shown, remedy=remedy)


def _under(found: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}


def _prefixes(keys: Mapping[str, Any]) -> list[str]:
    """Every dotted beginning, in order: "a.", "a.b."."""
    found = {".".join(parts[:i]) + "." for parts in (key.split(".") for key in keys) for i in range(1, len(parts))}
    return sorted(found)


def _nearest(name: str, among: list[str]) -> str:
    near = difflib.get_close_matches(name, among, n=1, cutoff=0.5)
    return f"the nearest is {near[0]!r}" if near else ""
