"""`load`, `load_block`, `export`, `names`: find the layout, check the keys, convert through the canonical form."""

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
    canonical,
    deepseek,
    diffllama,
    distilbert,
    g_proj,
    gemma,
    gpt2,
    llama,
    llama4,
    meta_llama,
    nanogpt,
    neox,
    qkv_layer,
    qwen3_next,
    separate,
    t5,
    timm,
    torch_mha,
    w_q,
    w_qs,
    wqkv,
)
from regard.layouts.base import Layout, Tensors
from regard.layouts.rotary_pairs import convert_pairs
from regard.layouts.variant import Given, VariantLayout
from regard.positions import Rotary
from regard.variants import DifferentialAttention, LatentAttention

__all__ = ["LAYOUTS", "VARIANTS", "export", "load", "load_block", "names"]

Pairs = Literal["halves", "interleaved"]

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        separate.layout,
        qwen3_next.layout,  # (before llama, whose names it has)
        llama.layout,
        g_proj.layout,
        gemma.layout,
        gemma.gemma3n,
        gemma.gemma3n_shared,
        llama4.layout,
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

# Of layers that are no `MultiHeadAttention`; "auto" takes the first with its marker among the keys.
VARIANTS: dict[str, VariantLayout] = {
    layout.name: layout for layout in (deepseek.layout, deepseek.minicpm3, diffllama.layout)
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
        "shares_kv",
    }
)


def names() -> list[str]:
    """The names of all layouts.

    >>> "llama" in names()
    True
    """
    return [*LAYOUTS, *VARIANTS]


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
) -> Any:  # a MultiHeadAttention, or the layer of a variant
    """A layer with a copy of the weights in another library's state dict, in their dtype and on their device: a
    `MultiHeadAttention`, or a `LatentAttention` or `DifferentialAttention` where the keys are of one.

    Args:
        state_dict: of an attention module, or of a whole model with `prefix`.
        num_heads: H, which a state dict does not contain; kv heads and widths are read from the shapes.
        prefix: the prefix of the attention's keys, such as "model.layers.0.self_attn.".
        layout: one of `names()`; "auto" finds it by keys and shapes.
        rotary_pairs: the order of rotary pairs in the rows of q and k, if it is not that of the layout ("interleaved"
            for GGUF); they are converted to the order of `position_encoding`, which is halves by default.
        bidirectional, max_distance: of the relative position bias, if there is one (T5).
        layer_options: arguments that do not follow from weights: `position_encoding`, `dropout`, `scale`, `softcap`,
            `kernel`, `qk_norm`, `v_norm`, `gate` (its activation), `query_scale`; `num_kv_heads` if the layer shares
            another one's keys and values; `lambda_init` of differential attention.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(10, 2, batch_first=True)
    >>> ours = load(theirs.state_dict(), num_heads=2)
    >>> x = torch.randn(3, 7, 10)
    >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    num_heads = _check_given(state_dict, num_heads)
    variant = _variant(state_dict, prefix, layout)
    if variant is not None:
        found, tensors = variant
        return found.load(tensors, Given(num_heads, rotary_pairs, layer_options))
    tensors, chosen = _select(state_dict, prefix, layout)
    norms = [key for key in ("norm.weight", "norm.bias") if chosen.keys.get(key) in tensors]
    if norms:
        raise bad_value(
            "state_dict",
            expected="an attention layer only",
            received=f"a LayerNorm too: {chosen.keys[norms[0]]!r}",
            remedy="layouts.load_block, which returns an AttentionBlock",
        )
    return canonical.build(*_read(tensors, chosen, num_heads, rotary_pairs, bidirectional, max_distance, layer_options))


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
    """As `load`, for a state dict that includes the LayerNorm after the residual: layouts "bert" and "w_qs".

    Args:
        eps: of the LayerNorm; by default that of the originals (1e-12 for BERT, 1e-6 for w_qs).
        block_dropout: dropout on the layer's output, before the residual.

    >>> import torch
    >>> block = AttentionBlock(MultiHeadAttention(6, 2))
    >>> load_block(export(block, "bert"), num_heads=2)(torch.randn(1, 3, 6)).shape
    torch.Size([1, 3, 6])
    """
    num_heads = _check_given(state_dict, num_heads)
    tensors, chosen = _select(state_dict, prefix, layout)
    if chosen.keys.get("norm.weight") not in tensors:
        raise bad_value(
            "state_dict",
            expected="an attention layer and a LayerNorm",
            received=sorted(tensors),
            remedy="layouts.load, which returns the layer only",
        )
    return canonical.build_block(
        *_read(tensors, chosen, num_heads, rotary_pairs, bidirectional, max_distance, layer_options),
        eps=chosen.norm_eps if eps is None else eps,
        dropout=block_dropout,
    )


def export(
    module: MultiHeadAttention | AttentionBlock | LatentAttention | DifferentialAttention, layout: str
) -> Tensors:
    """A copy of the weights of a layer or block, named and packed as in another library.

    Raises if the other library has no such layer. Settings that are not weights (rotary, dropout) are not exported.

    >>> sorted(export(MultiHeadAttention(6, 2), "gpt2"))
    ['c_attn.bias', 'c_attn.weight', 'c_proj.bias', 'c_proj.weight']
    """
    if layout in VARIANTS:
        return VARIANTS[layout].export(module)
    chosen = _named(layout)
    if isinstance(module, (LatentAttention, DifferentialAttention)):
        fitting = [name for name, variant in VARIANTS.items() if isinstance(module, variant.kind)]
        raise bad_type(
            f"export as {layout!r}",
            expected="a MultiHeadAttention or an AttentionBlock",
            received=type(module).__name__,
            remedy=f"layout={fitting[0]!r}",
        )
    canonical.check_expressible(module, chosen)
    layer, tensors = canonical.take(module)
    canonical.check_biases(
        tensors,
        chosen,
        remedy="a bias of zeros changes nothing: layer.q_proj.bias = nn.Parameter("
        "torch.zeros(rows)), and likewise for the others; or export as 'separate'",
    )
    tensors = _with_pairs(tensors, layer.num_heads, layer.num_kv_heads, layer.position_encoding, None, chosen.pairs)
    return chosen.from_canonical(tensors, layer.num_heads)


def _read(
    stored: Tensors,
    layout: Layout,
    num_heads: int,
    pairs: Pairs | None,
    bidirectional: bool,
    max_distance: int,
    layer_options: Mapping[str, Any],
) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    """The canonical tensors, and the sizes and options of their layer."""
    options = {**layout.options, **layer_options}
    for option, why in layout.asks.items():
        if option not in options:
            raise bad_value(option, expected=f"an argument, for the weights do not tell: {why}", received="none")
    for option in (_FROM_SHAPES - layout.asks.keys()) & options.keys():
        raise bad_value(
            option,
            expected="no argument: it is read from the shapes of the tensors",
            received=f"{option}={options[option]!r}",
            remedy=f"leave {option} out",
        )
    out = stored[layout.keys["out_proj.weight"]]
    if out.dim() != 2:
        raise bad_value(layout.keys["out_proj.weight"], expected="a matrix", received=f"shape {shape_of(out)}")
    canonical.divide("num_heads", num_heads, out.shape[0 if layout.transposed else -1], "columns that out_proj reads")
    tensors = layout.to_canonical(stored, num_heads)
    canonical.check_biases(tensors, layout, remedy="add the missing keys, or name another layout")
    size = canonical.sizes(tensors, num_heads, layout)
    if "position_encoding.weight" in tensors:
        if options.get("position_encoding") is not None:
            raise bad_value(
                "position_encoding",
                expected="None, because the state dict has a relative position bias",
                received=type(options["position_encoding"]).__name__,
            )
        options["position_encoding"] = canonical.relative_bias(
            tensors["position_encoding.weight"], num_heads, bidirectional=bidirectional, max_distance=max_distance
        )
    encoding = options.get("position_encoding")
    kv_heads = size.get("num_kv_heads", 1)  # (without keys there is nothing to convert)
    tensors = _with_pairs(tensors, num_heads, kv_heads, encoding, pairs or layout.pairs, None)
    return tensors, size, options


def _with_pairs(
    tensors: Tensors, heads: int, kv_heads: int, encoding: object, stored: Pairs | None, wanted: Pairs | None
) -> Tensors:
    """Convert rotary pairs from the stored to the wanted order; None means the order of the layer's `Rotary`."""
    rotary = encoding if isinstance(encoding, Rotary) else None
    layer_order: Pairs = "interleaved" if rotary is not None and rotary.interleaved else "halves"
    if (stored is None and wanted is None) or (stored or layer_order) == (wanted or layer_order):
        return tensors
    return convert_pairs(tensors, heads, kv_heads, wanted or layer_order, rotary.width if rotary is not None else None)


def _check_given(state_dict: object, num_heads: int | None) -> int:
    """The number of heads. Raises if it is missing, or if `state_dict` is a module or a path."""
    if not isinstance(state_dict, Mapping):
        heads, remedy = getattr(state_dict, "num_heads", "...") if num_heads is None else num_heads, ""
        if isinstance(state_dict, nn.Module):
            remedy = f"layouts.load(module.state_dict(), num_heads={heads})"
        elif isinstance(state_dict, (str, os.PathLike)):
            remedy = "safetensors.torch.load_file(path)"
        raise bad_type(
            "state_dict",
            expected="a mapping of names to tensors, as module.state_dict() returns it",
            received=type(state_dict).__name__,
            remedy=remedy,
        )
    if num_heads is None:
        raise bad_type(
            "num_heads",
            expected="the number of heads, which a state dict does not contain",
            received="None",
            remedy="layouts.load(state_dict, num_heads=...)",
        )
    return num_heads


def _named(name: str) -> Layout:
    """The layout of this name, of `MultiHeadAttention`."""
    if name in VARIANTS:
        kind = VARIANTS[name].kind.__name__
        raise bad_value("layout", expected="one of MultiHeadAttention", received=f"{name!r}, of {kind}", remedy="load")
    if name not in LAYOUTS:
        raise bad_value(
            "layout", expected=f"one of {', '.join(names())}", received=repr(name), remedy=_nearest(name, names())
        )
    return LAYOUTS[name]


def _select(state_dict: Mapping[str, Tensor], prefix: str, name: str) -> tuple[Tensors, Layout]:
    """The tensors under the prefix, and the layout whose keys they are: all required ones, and no others."""
    if prefix and not prefix.endswith(".") and any(key.startswith(f"{prefix}.") for key in state_dict):
        prefix += "."
    tensors = _under(state_dict, prefix)
    if not tensors:
        raise bad_value(
            "prefix",
            expected="the prefix of an attention layer's keys",
            received=repr(prefix),
            remedy=_nearest(prefix, _prefixes(state_dict)),
        )
    found = [layout for layout in LAYOUTS.values() if not layout.named_only]
    candidates = found if name == "auto" else [_named(name)]
    matching = [layout for layout in candidates if layout.matches(tensors)]
    if not matching:
        raise _no_match(tensors, prefix, candidates)
    layout = min(matching, key=lambda each: len(each.unknown(tensors)))
    for key, meaning in layout.refused.items():
        if key in tensors:
            raise bad_value(f"layout {layout.name!r}", expected="plain attention", received=f"{key!r}: {meaning}")
    for key in layout.unknown(tensors):
        raise bad_value(
            f"layout {layout.name!r}",
            expected="no keys but its own",
            received=repr(key),
            remedy=_nearest(key, [k for k in layout.keys.values() if k not in tensors]),
        )
    tensors = {key: tensor for key, tensor in tensors.items() if key not in layout.ignored}
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            received = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise bad_type(
                key, expected="a floating-point tensor", received=received, remedy="dequantise the weights first"
            )
    return tensors, layout


def _variant(state_dict: Mapping[str, Tensor], prefix: str, name: str) -> tuple[VariantLayout, Tensors] | None:
    """The layout of another kind of layer whose marker is among the keys under the prefix, and the tensors there."""
    candidates = list(VARIANTS.values()) if name == "auto" else [VARIANTS[name]] if name in VARIANTS else []
    dotted = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    for each in (prefix, dotted):
        tensors = _under(state_dict, each)
        for layout in candidates:
            if layout.marker in tensors:
                return layout, tensors
    markers = tuple(f".{layout.marker}" for layout in candidates)
    nested = sorted(key for key in _under(state_dict, dotted) if key.endswith(markers)) if markers else []
    if nested:
        first = next(nested[0].removesuffix(marker) for marker in markers if nested[0].endswith(marker))
        more = f" (or another of {len(nested)})" if len(nested) > 1 else ""
        raise bad_value(
            "state_dict",
            expected="the keys of one attention layer",
            received="keys with a prefix",
            remedy=f"prefix={dotted + first + '.'!r}{more}",
        )
    if name in VARIANTS:
        marker = VARIANTS[name].marker
        received = sorted(_under(state_dict, dotted))[:12]
        raise bad_value("state_dict", expected=f"{marker!r}, as layout {name!r} has it", received=received)
    return None


def _no_match(tensors: Tensors, prefix: str, candidates: list[Layout]) -> ValueError:
    """The error if no layout matches: names a prefix under which one does, or the key missing from the nearest one."""
    prefixes = [p for p in _prefixes(tensors) if any(layout.matches(_under(tensors, p)) for layout in candidates)]
    if prefixes:
        more = f" (or another of {len(prefixes)})" if len(prefixes) > 1 else ""
        return bad_value(
            "state_dict",
            expected="the keys of one attention layer",
            received="keys with a prefix",
            remedy=f"prefix={prefix + prefixes[0]!r}{more}",
        )
    best = min(
        candidates, key=lambda each: len(each.missing(tensors)) - sum(key in tensors for key in each.keys.values())
    )
    missing = best.missing(tensors)
    if missing and any(key in tensors for key in best.keys.values()):
        return bad_value(
            "state_dict",
            expected=f"{missing[0]!r}, as layout {best.name!r} has it",
            received=sorted(tensors)[:12],
            remedy=_nearest(missing[0], best.unknown(tensors)),
        )
    if not missing:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        return bad_value(
            "state_dict",
            expected=f"the shapes of layout {best.name!r} ({best.origin})",
            received=shapes,
            remedy="layout='auto'",
        )
    known, shown = ", ".join(layout.name for layout in candidates), sorted(tensors)[:12]
    origins = {key: layout.name for layout in candidates for key in layout.keys.values()}
    near = [(key, close) for key in shown for close in difflib.get_close_matches(key, origins, n=1)]
    remedy = f"the nearest to {near[0][0]!r} is {near[0][1]!r}, of layout {origins[near[0][1]]!r}" if near else ""
    return bad_value("state_dict", expected=f"the keys of one of the layouts {known}", received=shown, remedy=remedy)


def _under(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors whose names start with the prefix, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _prefixes(keys: Mapping[str, Any]) -> list[str]:
    """All prefixes of dotted names, sorted: "a.", "a.b."."""
    split = [key.split(".") for key in keys]
    return sorted({".".join(parts[:i]) + "." for parts in split for i in range(1, len(parts))})


def _nearest(name: str, candidates: list[str]) -> str:
    """A remedy with the most similar name, or nothing."""
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"the nearest is {near[0]!r}" if near else ""
