"""How what heads write to the residual stream at one token becomes logits, along the stream alone.

`attribution` and probes of what heads write (`heads.probes.successor`, `copy_suppression`) are made of this.

Letters: H heads, E head width of v, W model width, T tokens whose logits are asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.interventions.residual_stream import TokenTrace, block_sums, logit_direction
from regard.heads.record.record import LayerRecord
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating

__all__ = ["DirectLogits", "direct_logits"]


@dataclass
class DirectLogits:
    """One run of a model, at one token of the text. A vector (W,) that a layer's output projection adds to the stream
    there adds its products with `directions[layer]` (T, W) to the logits of `tokens`.

    Attributes:
        layers: the layers of self-attention, which keep q, k, v and outputs.
        tokens: T token ids.
        directions: for each layer (T, W), in float64.
        writes: for each layer what each head adds, (H, W), and the bias (W,) of the output projection.
        sums: the logits (T,) of the tokens, before a softcap.
        softcap: of the logits, if the model has one.
    """

    layers: list[LayerRecord]
    tokens: list[int]
    directions: dict[str, Tensor]
    writes: dict[str, tuple[Tensor, Tensor]]
    sums: Tensor
    softcap: float | None

    def of_keys(self, layer: LayerRecord) -> Tensor:
        """What each head would add to the logits if it gave all its weight to one key: (H, M, T). The sum over keys,
        times the weights, is what the head adds."""
        output = layer.output
        if not torch.equal(layer.entered, output):
            raise bad_value(
                layer.name,
                expected="heads whose outputs enter the output projection as they are",
                received="a gate or a norm between them",
            )
        assert layer.projection is not None
        slices = layer.projection[0].double().unflatten(1, (layer.heads, -1)).permute(1, 2, 0)  # (H, E, W)
        values = layer.v[0].double()  # (G, M, E)
        values = values.repeat_interleave(layer.heads // values.shape[0], 0)
        return values @ (slices @ self.directions[layer.name].mT)


def direct_logits(
    model: nn.Module, ids: Tensor, position: int, tokens: Sequence[int] | Callable[[Tensor], Sequence[int]]
) -> DirectLogits:
    """Run a decoder on token ids (N,), and find how its heads add to the logits of some tokens at `position`.

    `tokens` may be a function of the logits (V,). Models whose layers do not add to one stream are refused.
    """
    unembedding = _unembedding(model)
    trace = TokenTrace(model, unembedding, len(ids), position)
    with evaluating(model), torch.no_grad(), trace, watch(model, measures=[], keep="qkv") as seen:
        out = model(ids[None])
    logits = (out if isinstance(out, Tensor) else out.logits)[0, position].double()
    chosen = list(tokens(logits) if callable(tokens) else tokens)
    layers = [layer for layer in seen if layer.kind == "self"]
    writes = {layer.name: _writes(layer, position) for layer in layers}
    directions: dict[str, Tensor] = {}
    with evaluating(model), torch.no_grad():
        blocks = block_sums(model, trace, layers, writes)
        found = [logit_direction(model, trace, blocks[-1].output, logits, token) for token in chosen]
        at_end = torch.stack([direction for direction, _, _ in found])  # (T, W)
        sums = at_end @ blocks[-1].output + at_end.new_tensor([constant for _, constant, _ in found])
        carried = 1.0  # the factor of the stream after a block in the stream at the end
        for block in reversed(blocks):
            for name, (factor, norm) in block.added.items():
                into = at_end if norm is None else torch.stack([norm.transposed(row) for row in at_end])
                directions[name] = into * factor * carried
            carried *= block.carry
    return DirectLogits(layers, chosen, directions, writes, sums, found[0][2] if found else None)


def _writes(layer: LayerRecord, position: int) -> tuple[Tensor, Tensor]:
    """What each head adds at a token, through its slice of the output projection, (H, W), and the bias (W,)."""
    if layer.why_not_projected():
        raise bad_value(
            layer.name,
            expected="an output projection of (W, H * E)",
            received=layer.why_not_projected(),
            remedy="regard.models.load, for a model that it knows",
        )
    assert layer.projection is not None
    weight, bias = layer.projection
    entered = layer.entered[0, :, position].double()  # (H, E)
    heads = torch.einsum("he,whe->hw", entered, weight.double().unflatten(1, tuple(entered.shape)))
    return heads, heads.new_zeros(heads.shape[1]) if bias is None else bias.double()


def _unembedding(model: nn.Module) -> nn.Module:
    """The projection to the vocabulary."""
    get = getattr(model, "get_output_embeddings", None)
    unembedding = getattr(model, "head", None) if get is None else get()
    weight = getattr(unembedding, "weight", None)
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or is_encoder_decoder:
        raise bad_value(
            "model",
            expected="a decoder with a last norm and a projection to the vocabulary",
            received=type(model).__name__,
            remedy="a language model, such as models.load('smollm2')",
        )
    assert isinstance(unembedding, nn.Module)
    return unembedding
