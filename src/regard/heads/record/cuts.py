"""Parts of an attention call whose weights are those of the whole.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.kernels import Call
from regard.masks import Keep

__all__ = ["STRIP", "cut"]

STRIP = 2**22  # weights that are built at a time


def cut(call: Call, items: slice, heads: list[int], rows: slice) -> Call:
    """The part of a call that some texts, heads and rows need: exact, for a row's weights depend on its own scores."""
    shared = call.shape[1] // call.k.shape[1]
    index = torch.tensor(heads, device=call.q.device)

    def of_heads(x: Tensor) -> Tensor:
        return x[:, index] if x.shape[1] > 1 else x

    def of_items(x: Tensor) -> Tensor:
        return x[items] if x.shape[0] > 1 else x

    tile = call.tile(slice(*items.indices(call.shape[0])), rows, slice(0, call.shape[3]))
    mask = None if call.mask is None else Keep(of_heads(call.mask.block(tile)))
    return replace(
        call,
        q=call.q[items][:, index, rows],
        k=call.k[items][:, index // shared],
        v=call.v[items][:, index // shared],
        mask=mask,
        biases=tuple(bias.part(tile, index.to(bias.weight.device)) for bias in call.biases),
        positions=of_items(call.positions_of_queries(rows)),
        key_positions=None if call.key_positions is None else of_items(call.key_positions),
        sinks=None if call.sinks is None else of_items(call.sinks)[:, index],
        dropout=None,
    )
