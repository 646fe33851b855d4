"""Two records that must be the same, bit for bit."""

from __future__ import annotations

import torch

import regard

__all__ = ["same"]


def same(seen: regard.Record, expected: regard.Record) -> None:
    assert seen.layers == expected.layers
    assert seen.unseen == expected.unseen
    for layer, other in zip(seen, expected, strict=True):
        assert (layer.kind, layer.texts) == (other.kind, other.texts)
        assert list(layer.values) == list(other.values)
        assert all(torch.equal(layer[name], other[name]) for name in layer.values)
        if layer.texts > 1:
            continue
        assert torch.equal(layer.seen, other.seen)
        assert list(layer.counts) == list(other.counts)
        assert all(torch.equal(layer.counts[name], other.counts[name]) for name in layer.counts)
        assert layer.uniform is not None
        assert other.uniform is not None
        assert all(torch.equal(layer.uniform[name], other.uniform[name]) for name in layer.uniform.values)
