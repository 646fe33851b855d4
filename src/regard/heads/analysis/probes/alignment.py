"""Alignment: how monotonic the cross-attention of an encoder and a decoder is, as in speech and translation.

Letters: B texts, H heads, N queries, M keys, K keys near the diagonal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.heads.analysis.probes.result import ProbeResult, layer_means
from regard.heads.progress import track
from regard.heads.record.record import LayerRecord, Record
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating, run
from regard.measures import Pairs, PerKey, Strip
from regard.measures.base import ranks

__all__ = ["Alignment", "alignment"]


@dataclass(repr=False)
class Alignment(ProbeResult):
    """The score is the mean weight within one step of the diagonal. `print` it.

    Attributes:
        baseline: the same with the text's queries in random order; for a head that is always on one key there is no
            difference.
        more: "uniform", the score of equal weights; "monotonic", the share of queries whose most attended key is not
            before that of the query before; "by chance", that share in random order.
    """

    title: ClassVar[str] = "diagonal"

    def caption(self) -> str:
        """The number of texts."""
        return f"weight within one step of the diagonal: mean over {len(self.runs)} texts"


def alignment(
    source: Record | nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    query_keep: Tensor | None = None,
    progress: bool = True,
) -> Alignment:
    """How far each head of cross-attention follows its source from beginning to end. Query i of N is at i M / N of M
    keys; one step is a key, or M / N keys if there are more keys than queries. Padding is left out. Memory is O(N + M).

    Args:
        source: a record of `watch(model, keep="qk")`, or a model, which is run on `batches`.
        batches: inputs of the model, one after another, as for `heads.watch_all`.
        query_keep: for a record, (B, N) True for the queries that are no padding; by default as the self-attention of
            the same queries shows it.
        progress: show a progress bar on a terminal.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.randn(3, 5, 16), torch.randn(3, 7, 16))
    >>> result = alignment(seen)
    >>> result["MultiHeadAttention"].shape, len(result.runs)
    (torch.Size([2]), 3)
    """
    if isinstance(source, Record):
        if batches is not None:
            raise bad_value("batches", expected="none beside a record", received=type(batches).__name__)
        texts = _texts(source, query_keep)
    else:
        texts = _run(source, batches, query_keep, progress)
    if not texts:
        raise bad_value("alignment", expected="texts of two queries and two keys at least", received="none")
    columns: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for name in ("diagonal", "permuted", "uniform", "monotonic", "by chance"):
        columns[name] = layer_means([{layer: numbers[name] for layer, numbers in text.items()} for text in texts])
    more = {name: columns[name][0] for name in ("uniform", "monotonic", "by chance")}
    runs = tuple(f"text {i}" for i in range(len(texts)))
    return Alignment(columns["diagonal"][0], columns["permuted"][0], columns["diagonal"][1], runs, more)


Numbers = dict[str, dict[str, Tensor]]  # of one text: for each layer, by name, (H,)


def _run(model: Any, batches: Iterable[Any] | None, query_keep: Tensor | None, progress: bool) -> list[Numbers]:
    if not isinstance(model, nn.Module):
        raise bad_type("source", expected="a record or a model", received=type(model).__name__)
    if batches is None or query_keep is not None:
        raise bad_value(
            "alignment",
            expected="a model with batches, or a record",
            received="no batches" if batches is None else "a model with query_keep",
            remedy='watch(model, keep="qk"), and its record',
        )
    texts: list[Numbers] = []
    with evaluating(model), torch.no_grad():
        for batch in track(batches, "alignment", progress):
            with watch(model, measures=[], keep="qk") as seen:
                run(model, batch)
            texts += _texts(seen, None)
    return texts


def _texts(seen: Record, query_keep: Tensor | None) -> list[Numbers]:
    """The numbers of each text of a record that has two queries and two keys."""
    layers = [layer for layer in seen if layer.kind == "cross"]
    if not layers:
        raise bad_value("source", expected="cross-attention", received="none that was seen")
    by_layer = {layer.name: _of_layer(layer, _query_padding(seen, layer, query_keep)) for layer in layers}
    if len({len(texts) for texts in by_layer.values()}) > 1:
        raise bad_value("source", expected="the same texts in all layers", received=seen.texts_differ())
    several = range(len(next(iter(by_layer.values()))))
    together = [{name: texts[b] for name, texts in by_layer.items()} for b in several]
    return [{name: one for name, one in text.items() if one} for text in together if all(text.values())]


def _query_padding(seen: Record, layer: LayerRecord, query_keep: Tensor | None) -> Tensor | None:
    """True for padding queries (B, N) of cross-attention: as given, or as a layer of self-attention has them."""
    shape = (layer.batch_size, layer.num_queries)
    if query_keep is not None:
        if query_keep.dtype is not torch.bool or tuple(query_keep.shape) != shape:
            raise bad_value(
                "query_keep",
                expected=f"booleans of shape {shape}",
                received=f"{query_keep.dtype} of shape {shape_of(query_keep)}",
            )
        return ~query_keep
    found = (other.query_padding for other in seen if (other.batch_size, other.num_queries) == shape)
    return next((padding for padding in found if padding is not None), None)


def _of_layer(layer: LayerRecord, query_padding: Tensor | None) -> list[dict[str, Tensor]]:
    """The numbers (H,) of each text; {} for a text with fewer than two queries or keys."""
    batch, _, n, m = layer.shape
    device = layer.last_seen().device
    padding = None if query_padding is None else query_padding.to(device)
    rank, counts = (x.expand(batch, -1) for x in ranks(padding, n, device))
    key_rank, key_counts = (x.expand(batch, -1) for x in ranks(layer.key_padding, m, device))
    keys = _near_diagonal(rank, counts, key_rank, key_counts)  # (B, N, K)
    measured = layer.measure([Pairs(keys), "peak", _ReceivedFrom(rank >= 0)])
    numbers: list[dict[str, Tensor]] = []
    for b in range(batch):
        real, size, of_keys = rank[b] >= 0, int(counts[b]), int(key_counts[b])
        if size < 2 or of_keys < 2:
            numbers.append({})
            continue
        near, there = keys[b, real], keys[b, real] >= 0  # (n, K)
        received = measured["received_from"][b][:, near.clamp(min=0)] * there  # (H, n, K)
        target = key_rank[b][measured["target"][b][:, real].clamp(min=0)]  # (H, n)
        monotonic, by_chance = _monotonic(target, of_keys)
        numbers.append(
            {
                "diagonal": measured["pairs"][b][:, real].mean(1),
                "permuted": received.sum((1, 2)) / size**2,
                "uniform": (there.sum() / (size * of_keys)).expand(layer.heads),
                "monotonic": monotonic,
                "by chance": by_chance,
            }
        )
    return numbers


def _near_diagonal(rank: Tensor, counts: Tensor, key_rank: Tensor, key_counts: Tensor) -> Tensor:
    """The keys (B, N, K) within one step of each query's place on the diagonal; -1 for none. `rank`: the number of each
    query (B, N) in its text, -1 for padding; `counts` (B, 1): how many there are; the same of keys.

    >>> five, ten = torch.arange(5)[None], torch.arange(10)[None]
    >>> _near_diagonal(five, torch.tensor([[5]]), ten, torch.tensor([[10]]))[0, 1:3].tolist()
    [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]
    """
    n, m = counts.clamp(min=1), key_counts
    step = torch.maximum(n, m)  # in units of 1 / n keys: |key n - rank m| <= step
    first = -torch.div(step - rank * m, n, rounding_mode="floor")  # (B, N) rounded up
    last = torch.div(rank * m + step, n, rounding_mode="floor")
    width = int((2 * torch.div(step, n, rounding_mode="floor")).max()) + 2
    wanted = first[..., None] + torch.arange(width, device=rank.device)  # (B, N, K)
    there = (wanted >= 0) & (wanted <= last[..., None]) & (wanted < m[..., None]) & (rank >= 0)[..., None]
    slot_of_rank = key_rank.masked_fill(key_rank < 0, key_rank.shape[1]).argsort(1)  # (B, M) tokens, then padding
    slots = slot_of_rank.gather(1, wanted.clamp(0, key_rank.shape[1] - 1).flatten(1)).view(wanted.shape)
    keys = slots.where(there, -1)
    return keys[..., (keys >= 0).flatten(0, 1).any(0)] if bool(there.any()) else keys


def _monotonic(target: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The share of steps between queries at which the target (H, n) does not move backwards, and that share in random
    order: half of the pairs, and half of the equal ones.

    >>> _monotonic(torch.tensor([[0, 1, 1, 3], [3, 2, 1, 0]]), 5)
    (tensor([1., 0.]), tensor([0.5833, 0.5000]))
    """
    heads, n = target.shape
    places = target + keys * torch.arange(heads, device=target.device)[:, None]
    times = torch.bincount(places.flatten(), minlength=heads * keys).view(heads, keys)
    equal = (times * (times - 1)).sum(1) / (n * (n - 1))
    return (target[:, 1:] >= target[:, :-1]).float().mean(1), (1 + equal) / 2


class _ReceivedFrom(PerKey):
    """The mass (B, H, M) that each key gets from some queries, (B, N) True for those."""

    gives = {"received_from": "key"}

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return (strip.weights * strip.of_queries(self.queries)[:, None, :, None]).sum(2)
