"""What `ablate` takes from the record of another run: outputs, queries, keys, values and weights of its heads.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.errors import bad_value, shape_of
from regard.heads.capture.observed import ObservedCall
from regard.heads.interventions.changes import TokenNumbers
from regard.heads.record.record import LayerRecord, Record

__all__ = ["keys_of_source", "output_of_source", "queries_of_source", "rows_of_source", "weights_of_source"]


def _layer(source: Record, layer: str) -> LayerRecord:
    """The record of a layer, of one forward."""
    if layer not in source:
        raise bad_value("source", expected=f"a record of {layer}", received=f"one of {source.layers}")
    record = source[layer]
    if record.texts > 1:
        raise bad_value(
            "source",
            expected="a record of one forward, for the outputs of the last alone are kept",
            received=f"one of {record.texts}",
        )
    return record


def output_of_source(source: Record, layer: str, output: Tensor) -> Tensor:
    """The outputs of a layer in the source, (B, H, N, E) with its own B and N."""
    record = _layer(source, layer)
    if record.output.shape[1::2] != output.shape[1::2]:
        raise bad_value(
            f"source of {layer}",
            expected=f"heads and their width as in {shape_of(output)}",
            received=shape_of(record.output),
        )
    return record.output.to(output)


def rows_of_source(layer: str, what: str, tensor: Tensor, like: Tensor, first: int) -> Tensor:
    """Rows of a tensor (B, H, N, ...) of the source, from the first one on, as many as `like` has."""
    n = like.shape[2]
    chunk = tensor[:, :, first : first + n]
    if chunk.shape != like.shape:
        raise bad_value(
            f"source of {layer}",
            expected=f"{what} {shape_of(like)}",
            received=f"{shape_of(tensor)}, of which queries {first} to {first + n} are wanted",
        )
    return chunk


def queries_of_source(source: Record, attention: ObservedCall, tokens: TokenNumbers) -> Tensor:
    """The queries (B, H, N, D) of the source for those of an attention call."""
    record = _layer(source, attention.layer)
    _check_inputs(record)
    assert attention.call is not None
    return rows_of_source(attention.layer, "queries", record.q, attention.call.q, tokens.first_row)


def keys_of_source(
    source: Record, attention: ObservedCall, what: Literal["k", "v"], tokens: TokenNumbers, chosen: Tensor
) -> Tensor:
    """The keys (B, G, M, D) or values (B, G, M, E) of the source for the `chosen` keys (M,) of an attention call; the
    others are not to be used."""
    record = _layer(source, attention.layer)
    _check_inputs(record)
    assert attention.call is not None
    kept = record.k if what == "k" else record.v
    like = attention.call.k if what == "k" else attention.call.v
    last = int(tokens.keys[chosen].max())
    axes = (0, 1, 3)
    if [kept.shape[i] for i in axes] != [like.shape[i] for i in axes] or last >= kept.shape[2]:
        raise bad_value(
            f"source of {attention.layer}",
            expected=f"{'keys' if what == 'k' else 'values'} {shape_of(like)}",
            received=shape_of(kept),
            remedy="texts of the same length" if last >= kept.shape[2] else "",
        )
    return kept[:, :, tokens.keys.clamp(0, kept.shape[2] - 1)]


def weights_of_source(source: Record, attention: ObservedCall, heads: list[int], tokens: TokenNumbers) -> _Weights:
    """The weights of the source for the queries and keys of an attention call: a function of rows."""
    record, (batch, count, n, m) = _layer(source, attention.layer), attention.shape
    first = tokens.first_row
    if record.shape[:2] != (batch, count) or first + n > record.num_queries or tokens.totals[1] > record.num_keys:
        raise bad_value(
            f"source of {attention.layer}",
            expected=f"weights {(batch, count, n, m)}",
            received=f"{record.shape}, of which queries {first} to {first + n} are wanted",
            remedy="texts of the same length",
        )
    return _Weights(record, heads, tokens)


class _Weights:
    """Weights of some heads of a record, row by row."""

    def __init__(self, record: LayerRecord, heads: list[int], tokens: TokenNumbers) -> None:
        self.record, self.heads, self.tokens = record, heads, tokens

    def __call__(self, rows: slice) -> Tensor:
        """(B, h, n, M), for rows of the attention call."""
        first, keys, total = self.tokens.first_row, self.tokens.keys, self.record.num_keys
        weights = self.record.weights(self.heads, slice(first + rows.start, first + rows.stop))
        here = keys < total  # (a cache of fixed size has more keys than the sequence)
        elsewhere = torch.ones(total, dtype=torch.bool, device=keys.device)
        elsewhere[keys[here]] = False
        if weights[..., elsewhere].any():
            raise bad_value(
                f"source of {self.record.name}",
                expected=f"weights on the {len(keys)} keys of this run alone",
                received=f"weights on {total} keys",
                remedy="texts of the same length",
            )
        return torch.where(here, weights[..., keys.clamp(max=total - 1)], 0.0)


def _check_inputs(record: LayerRecord) -> None:
    """Raise if q, k and v were not kept, and say why."""
    if record.keeps_values:
        return
    by_hand = record.text is not None and any(piece.weights is not None for piece in record.text.pieces)
    rolling = record.keeps_output and not by_hand
    raise bad_value(
        f"source of {record.name}",
        expected='q, k and v of a watch with keep="qkv"',
        received="the difference of two softmaxes"
        if record.signed
        else ("attention by hand" if by_hand else "a cache that rotates its keys anew" if rolling else "none"),
        remedy='what="output"'
        if record.signed
        else ('what="output" or what="pattern"' if by_hand or rolling else 'watch(model, keep="qkv")'),
    )
