"""What a layer may be told: one case of each kind, and random combinations of them.

Letters: B batch, H query heads, N tokens, M keys.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distributed.compare import BATCH, HEAD, HEADS, TOKENS, WIDTH, Case, layer, normal, shaken
from regard import AttentionBlock
from regard.kernels import available
from regard.layer import Gate, Norm
from regard.masks import Blocks, Causal, Chunk, Documents, Hide, Keep, Padding, Prefix, Window
from regard.positions import Alibi, DynamicNTK, RelativeBias, Rotary


def flags(*shape: int, seed: int = 5) -> Tensor:
    """True for three of five."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def integers(high: int, *shape: int, seed: int = 6) -> Tensor:
    """From 0 to high - 1."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def masks(tokens: int = TOKENS, keys: int = TOKENS, heads: int = HEADS, batch: int = BATCH) -> dict[str, Any]:
    """One of each kind, and compositions."""
    lengths = torch.tensor([keys, keys // 3, *([keys - 2] * batch)])[:batch]
    return {
        "causal": Causal(),
        "window": Window(5),
        "wide window": Window(keys - 3),
        "window both ways": Window(before=4, after=7),
        "lengths": Padding(lengths=lengths),
        "one sees nothing": Padding(lengths=torch.tensor([0, keys, keys])[:batch]),
        "keep": Padding(keep=flags(batch, keys)),
        "documents": Documents(integers(3, batch, tokens).sort(1).values, integers(3, batch, keys).sort(1).values),
        "scattered documents": Documents(integers(3, batch, tokens), integers(3, batch, keys, seed=7)),
        "causal chunks": Causal() & Chunk(5, start=1),
        "blocks of each head": Blocks(integers(-(-keys // 3) + 1, batch, heads, -(-tokens // 4), 2) - 1, 3, 4),
        "causal or prefix": Causal() | Prefix(7),
        "causal or prefixes": Causal() | Prefix(integers(keys, batch)),
        "pairs": Keep(flags(tokens, keys)),
        "pairs of each head": Keep(flags(batch, heads, tokens, keys)),
        "pairs of each head, for all": Keep(flags(1, heads, tokens, keys)),
        "keys of each head": Keep(flags(1, heads, 1, keys)),
        "some heads see, with padding": Keep(flags(1, heads, 1, 1)) & Padding(keep=flags(batch, keys)),
        "plain tensor": flags(batch, tokens, keys),
        "hide": Hide(flags(batch, 1, tokens, keys)),
        "not a window": ~Window(before=3, after=3),
        "not padding, and causal": Causal() & ~Padding(lengths=torch.tensor([3, 5, 7])[:batch]),
        "causal documents with padding": Causal()
        & Documents(integers(3, batch, tokens), integers(3, batch, keys))
        & Padding(lengths=lengths),
        "window or one of each head": Window(3) | (Causal() & Keep(flags(batch, heads, tokens, keys))),
    }


class WithBias(nn.Module):
    """A layer and a dense bias that is learned."""

    def __init__(self, *shape: int, **options: Any) -> None:
        super().__init__()
        self.layer, self.bias = layer(**options), nn.Parameter(normal(*shape, seed=8))

    def forward(self, *inputs: Tensor, **options: Any) -> Any:
        return self.layer(*inputs, bias=self.bias, **options)


class Own(nn.Module):
    """A block as somebody writes it: what goes into the layer has been through a norm, and says nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer(position_encoding=Rotary(HEAD))
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31), nn.GELU(), nn.Linear(31, WIDTH))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.layer(self.norm(x), **options)
        return x + self.mlp(x)


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = layer(**options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False, **options)  # type: ignore[return-value]


def made(mask: Any = None, *, case: dict[str, Any] | None = None, **options: Any) -> Case:
    """A case of a layer with some options."""
    case = {"options": {}, **(case or {})}
    case["options"] = {**case["options"], **({} if mask is None else {"mask": mask})}
    return Case(module=lambda: layer(**options), **case)


def positions(*shape: int) -> Tensor:
    """Where tokens stand: not one after the other."""
    return integers(2 * TOKENS, *shape, seed=9)


def _layers() -> dict[str, Case]:
    causal, both = Causal(), {"options": {"need_weights": True}}
    ntk = DynamicNTK(2.0, trained_length=7)
    return {
        "plain": made(),
        "no biases": made(bias=False),
        "4 kv heads": made(causal, num_kv_heads=4),
        "6 kv heads": made(num_kv_heads=6),
        "3 kv heads": made(causal, num_kv_heads=3),
        "2 kv heads": made(num_kv_heads=2),
        "1 kv head": made(causal, num_kv_heads=1),
        "rotary": made(causal, position_encoding=Rotary(HEAD)),
        "part of the width turned": made(position_encoding=Rotary(HEAD, width=4, interleaved=True)),
        "rotary beyond the trained length": made(causal, position_encoding=Rotary(HEAD, scaling=ntk)),
        "alibi": made(causal, position_encoding=Alibi(HEADS)),
        "relative": made(position_encoding=RelativeBias(HEADS, num_buckets=8, max_distance=17)),
        "relative, causal": made(causal, position_encoding=RelativeBias(HEADS, bidirectional=False), num_kv_heads=4),
        "dense bias": Case(lambda: WithBias(TOKENS, TOKENS), {"mask": causal}),
        "dense bias of each head": Case(lambda: WithBias(BATCH, HEADS, TOKENS, TOKENS), {"mask": causal}),
        "dense bias of each key": Case(lambda: WithBias(1, HEADS, 1, TOKENS, num_kv_heads=2)),
        "dense bias of each query": Case(lambda: WithBias(BATCH, 1, TOKENS, 1, sinks=True)),
        "dense bias and alibi": Case(lambda: WithBias(1, HEADS, TOKENS, TOKENS, position_encoding=Alibi(HEADS))),
        "sinks": made(sinks=True),
        "sinks where a row sees nothing": made(Padding(lengths=torch.tensor([0, 17])), sinks=True),
        "dropout": made(causal, dropout=0.3, num_kv_heads=4, case={"train": True}),
        "all dropped": made(dropout=1.0, case={"train": True}),
        "dropout in evaluation": made(dropout=0.3),
        "softcap": made(causal, softcap=1.7),
        "norm of heads": made(causal, qk_norm="rms", position_encoding=Rotary(HEAD), num_kv_heads=4),
        "layer norm of heads": made(qk_norm="layer", num_kv_heads=2),
        "norms without weights, and of values": made(
            causal, qk_norm=Norm(weight="none"), v_norm="rms", num_kv_heads=4, position_encoding=Rotary(HEAD)
        ),
        "zero-centred norm": made(qk_norm=Norm(weight="zero-centred"), num_kv_heads=3),
        "gate of each element": made(causal, gate=Gate(bias=True), num_kv_heads=4, value_head_dim=7),
        "gate of each head": made(gate=Gate("head", "softplus"), num_kv_heads=2),
        "wider values": made(causal, value_head_dim=7, num_kv_heads=6),
        "scale": made(scale=0.7),
        "all at once": made(
            causal & Padding(lengths=torch.tensor([TOKENS, 19])),
            num_kv_heads=4,
            value_head_dim=5,
            softcap=2.3,
            sinks=True,
            dropout=0.2,
            qk_norm="rms",
            case={"train": True},
            position_encoding=RelativeBias(HEADS, num_buckets=8, max_distance=17),
        ),
        "positions": made(causal, position_encoding=Rotary(HEAD), case={"options": {"positions": positions(TOKENS)}}),
        "positions of each": made(
            Window(11),
            position_encoding=Rotary(HEAD, scaling=ntk),
            case={"options": {"positions": positions(BATCH, TOKENS)}},
        ),
        "positions and alibi": made(
            causal, position_encoding=Alibi(HEADS), case={"options": {"positions": positions(BATCH, TOKENS)}}
        ),
        "cross": made(case={"keys": 37}),
        "cross, fewer keys, causal": made(causal, position_encoding=Rotary(HEAD), case={"keys": 13}),
        "cross, more keys, causal": made(causal, position_encoding=Rotary(HEAD), num_kv_heads=4, case={"keys": 37}),
        "cross with positions": made(
            causal, position_encoding=Alibi(HEADS), case={"keys": 37, "options": {"positions": positions(TOKENS)}}
        ),
        "cross, one key": made(case={"keys": 1}),
        "weights": made(causal, num_kv_heads=4, position_encoding=Alibi(HEADS), sinks=True, case=both),
        "weights of each head": made(Keep(flags(BATCH, HEADS, TOKENS, TOKENS)), softcap=2.0, case=both),
        "no batch": made(causal, case={"batch": None}),
        "no batch, cross, weights": made(case={"batch": None, "keys": 37, **both}),
        "one token": made(causal, case={"tokens": 1}),
        "two tokens": made(causal, case={"tokens": 2}),
        "no text": made(causal, case={"batch": 0}),
        "without gradients": made(causal, num_kv_heads=4, case={"gradients": False}),
        "float32": made(causal, num_kv_heads=4, case={"dtype": torch.float32}),
        "pre": Case(lambda: shaken(AttentionBlock(layer(), norm="pre")), {"mask": causal}),
        "post": Case(lambda: shaken(AttentionBlock(layer(), norm="post"))),
        "pre, cross": Case(lambda: shaken(AttentionBlock(layer(), norm="pre")), {"mask": causal}, keys=37),
        "checkpointed": Case(lambda: Checkpointed(num_kv_heads=4, dropout=0.2), {"mask": causal}, train=True),
    }


def _kernels() -> dict[str, Case]:
    """Each kernel by name, in both dtypes (the native one has no float64)."""
    found = {}
    for kernel in available():
        for dtype in (torch.float64, torch.float32) if kernel != "native" else (torch.float32,):
            for kind in ("none", "causal", "window both ways", "keep"):
                mask = masks().get(kind)
                options: dict[str, Any] = {} if kernel == "fused" else {"sinks": True, "num_kv_heads": 4}
                name = f"{kernel} {dtype}, mask {kind}".replace("torch.", "")
                found[name] = made(mask, kernel=kernel, **options, case={"dtype": dtype})
    return found


def combination(number: int) -> Case:
    """A random one."""
    draw = random.Random(number)
    batch, tokens = draw.choice([1, 2, 3]), draw.choice([5, 11, 29, 41])
    keys = draw.choice([None, None, None, 7, 31])
    kind = draw.choice(["none", *masks()])
    mask = masks(tokens, tokens if keys is None else keys, batch=batch).get(kind)
    encoding = draw.choice([None, Rotary(HEAD), Alibi(HEADS), RelativeBias(HEADS, num_buckets=8, max_distance=17)])
    place = draw.choice([None, None, (tokens,), (batch, tokens)])
    case = {
        "batch": batch,
        "tokens": tokens,
        "keys": keys,
        "train": draw.random() < 0.7,
        "dtype": draw.choice([torch.float64, torch.float32]),
        "options": {} if place is None else {"positions": positions(*place)},
    }
    return made(
        mask,
        case=case,
        num_kv_heads=draw.choice([1, 2, 3, 4, 6, 12]),
        position_encoding=encoding,
        dropout=draw.choice([0.0, 0.0, 0.4]),
        softcap=draw.choice([None, None, 1.3]),
        sinks=draw.random() < 0.3,
        qk_norm=draw.choice([None, None, "rms", "layer"]),
        value_head_dim=draw.choice([HEAD, 5]),
        bias=draw.random() < 0.5,
    )


LAYERS = _layers()
MASKS = {f"mask: {name}": made(mask, num_kv_heads=4) for name, mask in masks().items()}
BENEATH = _kernels()
RANDOM = {f"random {number}": combination(number) for number in range(60)}
