"""`qk_clip`: scale down the queries and keys of heads whose largest score is too large, as done with Muon.

Letters: H query heads, G kv heads, D head width of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.prune.readers import read_attention
from regard.heads.interventions.prune.selection import attention_modules
from regard.heads.interventions.prune.sizes import AttentionSizes, HeadKind
from regard.heads.record.record import Record
from regard.heads.training.monitor import Sample, monitor_of

__all__ = ["qk_clip"]


@torch.no_grad()
def qk_clip(model: nn.Module, tau: float = 100.0, seen: Record | Sample | None = None) -> dict[tuple[str, int], float]:
    """Scale the weights of q and k in place where a head's largest score is above tau, so that it becomes tau (Kimi K2,
    2025). Call it after the optimizer's step.

    With one query head to a kv head both projections take the root of the factor; else the queries take all of it, for
    other heads have the same keys.

    Args:
        model: what was seen.
        tau: the largest score that is let be.
        seen: a record in which `max_logit` was measured, or a sample of a `regard.monitor`; by default the last sample
            of the model's monitor. A sample is used once: until the next one nothing is done.

    Returns:
        The factors of scores, by layer and head; of those that were scaled.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(8, num_heads=2, bias=False)
    >>> _ = layer.q_proj.weight.data[:4].mul_(1000)  # head 0
    >>> x = torch.randn(1, 5, 8)
    >>> with regard.watch(layer, measures="max_logit") as seen:
    ...     _ = layer(x)
    >>> list(regard.heads.qk_clip(layer, tau=10.0, seen=seen))
    [('MultiHeadAttention', 0)]
    >>> with regard.watch(layer, measures="max_logit") as seen:
    ...     _ = layer(x)
    >>> round(seen[0].max_logit[:, 0].max().item(), 3)
    10.0
    """
    if not tau > 0:
        raise bad_value("tau", expected="a number above 0", received=tau)
    if seen is None:
        seen = _last_sample(model)
    if isinstance(seen, Sample):
        if seen.used:
            return {}
        seen.used = True
        seen = seen.record
    if not isinstance(seen, Record):
        raise bad_type("seen", expected="a record, or a sample of a monitor", received=type(seen).__name__)
    modules = {name or type(model).__name__: module for name, module in attention_modules(model).items()}
    factors = _factors(seen, tau)
    found: dict[str, AttentionSizes] = {}
    for name, _ in factors:  # all are checked before any is changed
        if name not in modules:
            raise bad_value("model", expected=f"the one that was seen, with {name}", received="one without")
        found[name] = read_attention(name, modules[name])
        _check_no_norm(found[name])
    for (name, head), factor in factors.items():
        _scale(found[name], head, factor)
    return factors


def _factors(seen: Record, tau: float) -> dict[tuple[str, int], float]:
    """What the scores of heads above tau are to be multiplied by, by layer and head. (A module that runs several times
    in a forward is several layers of the record.)"""
    factors: dict[tuple[str, int], float] = {}
    for layer in seen:
        if not layer.has("max_logit"):
            raise bad_value(
                "seen",
                expected="a record in which max_logit was measured",
                received=f"{layer.name} without it",
                remedy='watch(model, measures="max_logit")',
            )
        largest = layer.last()["max_logit"].amax((0, 2)).tolist()  # (H,)
        name = layer.name.partition("#")[0]
        for head, score in enumerate(largest):
            if score > tau:
                factors[name, head] = min(tau / score, factors.get((name, head), 1.0))
    return factors


def _last_sample(model: nn.Module) -> Sample:
    watching = monitor_of(model)
    if watching is None or watching.last is None:
        raise bad_value(
            "seen",
            expected="a record, or a monitor of this model that has sampled it",
            received="neither",
            remedy="regard.monitor(model, every=1), or qk_clip(model, tau, seen)",
        )
    return watching.last


def _check_no_norm(attention: AttentionSizes) -> None:
    for name in ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"):
        if getattr(attention.projecting, name, None) is not None:
            raise bad_value(
                attention.name,
                expected="queries and keys that are not normalised",
                received=f"{name}, which undoes any scaling of them",
                remedy="such scores are bounded by the norm's own weight",
            )


def _scale(attention: AttentionSizes, head: int, factor: float) -> None:
    h, g = attention.counts["query"], attention.counts["kv"]
    both = h == g
    for rows in _rows(attention, "query", head):
        rows.mul_(factor**0.5 if both else factor)
    for rows in _rows(attention, "kv", head) if both else ():
        rows.mul_(factor**0.5)


def _rows(attention: AttentionSizes, kind: HeadKind, head: int) -> Iterator[Tensor]:
    """The part of the weight and of the bias of one head's queries, or keys: the first run of the kind that each name
    of a parameter has (values come after keys)."""
    found: set[str] = set()
    for size in attention.sizes:
        name = size.name.rpartition("_")[2]  # weight or bias
        if size.axis is None or name in found or name not in ("weight", "bias"):
            continue
        start = 0
        for run, width in size.runs:
            if run == kind:
                found.add(name)
                parameter: Tensor = getattr(size.owner, size.name)
                yield parameter.narrow(size.axis, start + head * width, width)
                break
            start += attention.counts[run] * width
