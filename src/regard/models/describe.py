"""Describe a model: its sizes, and the steps, shapes and costs of one layer."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from regard.errors import printable
from regard.models.blocks import Block
from regard.summary import Step, table

if TYPE_CHECKING:
    from regard.models.base import TextModel

__all__ = ["describe", "facts", "walk"]


def facts(model: TextModel) -> dict[str, str]:
    """The main facts about a model, by name."""
    config = model.config
    counts, width = _head_counts(model), config.head_dim or config.embed_dim // config.num_heads
    parameters = sum(p.numel() for p in model.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    windows = sorted({window for i in range(config.layers) if (window := config.window_of(i)) is not None})
    lines = {
        "family": f"{config.family}, {config.kind}",
        "layers": f"{config.layers}, {_heads(counts, width)}",
        "widths": f"{config.embed_dim:,} (model), {config.inner:,} (feed-forward), {config.vocabulary:,} (vocabulary)",
        "positions": f"{config.positions}, {config.context:,} tokens" if config.context else config.positions,
        "parameters": f"{parameters:,} ({str(model.dtype).removeprefix('torch.')}, {size / 2**20:,.1f} MB)",
    }
    if windows:
        lines["window"] = ", ".join(map(str, windows)) + " tokens"
    if config.kind == "decoder":
        element = next(model.parameters()).element_size()
        lines["cache"] = f"{sum(kv for _, kv in counts) * 2 * width * element:,} bytes per token, all layers together"
    if model.unused:
        lines["left aside"] = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in model.unused))
    return lines


def _head_counts(model: TextModel) -> list[tuple[int, int]]:
    """The heads and kv heads of each layer, as they are now; the config has the numbers before pruning."""
    layers = [block.attention for block in model.blocks if isinstance(block, Block)]
    return [(layer.num_heads, layer.num_kv_heads) for layer in layers]


def _heads(counts: list[tuple[int, int]], width: int) -> str:
    """The heads of all layers in words; equal neighbouring layers are grouped.

    >>> _heads([(9, 3), (9, 3), (9, 3)], 64)
    'each with 9 heads of width 64, 3 kv heads'
    >>> _heads([(9, 3), (9, 3), (4, 4)], 64)
    'with heads of width 64: 9 (3 kv) in layers 0-1, 4 in layer 2'
    """
    if len(set(counts)) == 1:
        heads, kv = counts[0]
        return f"each with {heads} heads of width {width}" + ("" if kv == heads else f", {kv} kv heads")
    groups = []
    for (heads, kv), run in groupby(range(len(counts)), key=counts.__getitem__):
        first, *rest = run
        where = f"layers {first}-{rest[-1]}" if rest else f"layer {first}"
        groups.append(f"{heads}{'' if kv == heads else f' ({kv} kv)'} in {where}")
    return f"with heads of width {width}: {', '.join(groups)}"


def walk(block: Block, tokens: int) -> list[Step]:
    """The steps of one block, attention and feed-forward part, for a text of `tokens` tokens."""
    width = block.attention.embed_dim
    shape = (1, tokens, width)

    def norm(module: nn.Module) -> Step:
        return Step("norm", type(module).__name__, shape, sum(p.numel() for p in module.parameters()))

    def projection(step: str, name: str, what: str) -> Step:
        linear: nn.Linear = getattr(block.mlp, name)
        count = sum(p.numel() for p in linear.parameters())
        return Step(step, what, (1, tokens, linear.out_features), count, tokens * linear.weight.numel())

    mlp = block.mlp
    inner = [projection("widen", "up", f"mlp.up, {mlp.activation}" if mlp.gate is None else "mlp.up, times the gate")]
    if mlp.gate is not None:
        inner.insert(0, projection("gate", "gate", f"mlp.gate, {mlp.activation}"))
    inner.append(projection("narrow", "down", "mlp.down"))
    first, second = norm(block.attention_norm), norm(block.mlp_norm)
    attention, add = block.attention.walk(tokens), Step("add", "the residual", shape)
    if block.order == "post":
        return [*attention, add, first, *inner, add, second]
    if block.order == "parallel":
        return [first, *attention, second, *inner, Step("add", "both to the residual", shape)]
    return [first, *attention, add, second, *inner, add]


def describe(model: TextModel, tokens: int) -> str:
    """See `TextModel.describe`."""
    lines = facts(model)
    name_width = max(map(len, lines))
    title = printable(model.name or model.config.family)
    head = [title, *(f"  {name:<{name_width}}  {printable(value)}" for name, value in lines.items())]
    first = model.blocks[0]
    assert isinstance(first, Block)
    which = "One layer" if len(set(_head_counts(model))) == 1 else "Layer 0"
    return "\n".join([*head, "", f"{which} of {model.config.layers}, {tokens:,} tokens:", table(walk(first, tokens))])
