"""What looks wrong with heads in training, in words.

Entropy that collapses and scores that grow both precede training that diverges (Zhai et al. 2023; Dehghani et al.
2023).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionWarning", "Health", "Limits"]


class AttentionWarning(UserWarning):
    """A head, or a layer, that looks wrong in training."""


@dataclass(frozen=True)
class Limits:
    """From where on a monitor warns. Changes are against the first sample.

    Args:
        entropy: of a layer's mean entropy over that of equal weights: warns below it, if it also halved.
        max_logit: of a head's largest score: warns above it, if it also doubled.
        output: of a head's output, as a share of the largest in its layer: warns below it.
        sink: of the weight on the key that receives most: warns above it (with 16 keys or more).
    """

    entropy: float = 0.1
    max_logit: float = 50.0
    output: float = 1e-3
    sink: float = 0.99


@dataclass(frozen=True)
class LayerState:
    """What a sample knows of one layer, a number per head."""

    name: str
    keys: int
    entropy: list[float]  # over that of equal weights
    max_logit: list[float]
    output: list[float]  # root of the mean square
    sink: list[float]


class Health:
    """Compares samples with the first one. Each kind of warning is given once for each layer."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.first: dict[str, LayerState] = {}
        self.told: set[tuple[str, str]] = set()

    def check(self, layers: list[LayerState]) -> list[str]:
        """What is wrong now and was not told before."""
        found: list[str] = []
        for layer in layers:
            first = self.first.setdefault(layer.name, layer)
            for kind, words in (
                ("entropy", self._entropy(layer, first)),
                ("max_logit", self._max_logit(layer, first)),
                ("dead", self._dead(layer)),
                ("sink", self._sink(layer)),
            ):
                if words and (kind, layer.name) not in self.told:
                    self.told.add((kind, layer.name))
                    found.append(f"{layer.name}: {words}")
        return found

    def _entropy(self, layer: LayerState, first: LayerState) -> str:
        if not layer.entropy:
            return ""
        now, before = (sum(x.entropy) / len(x.entropy) for x in (layer, first))
        if now >= self.limits.entropy or now > before / 2:
            return ""
        return (
            f"entropy collapses: {now:.0%} of that of equal weights, {before:.0%} at first; "
            "a lower learning rate, a longer warm-up, qk_norm or regard.heads.qk_clip help"
        )

    def _max_logit(self, layer: LayerState, first: LayerState) -> str:
        grown = [
            (now, head, before)
            for head, (now, before) in enumerate(zip(layer.max_logit, first.max_logit, strict=False))
            if now > self.limits.max_logit and now > 2 * abs(before)
        ]
        if not grown:
            return ""
        now, head, before = max(grown)
        return (
            f"scores grow: head {head} has {now:.0f}, {before:.1f} at first ({len(grown)} heads above "
            f"{self.limits.max_logit:g}); regard.heads.qk_clip or qk_norm keep them small"
        )

    def _dead(self, layer: LayerState) -> str:
        largest = max(layer.output, default=0.0)
        dead = [head for head, norm in enumerate(layer.output) if norm < self.limits.output * largest]
        if not dead:
            return ""
        return f"heads {_few(dead)} are dead: their output is below {self.limits.output:g} of the largest in the layer"

    def _sink(self, layer: LayerState) -> str:
        at_rest = [head for head, share in enumerate(layer.sink) if share > self.limits.sink]
        if layer.keys < 16 or not at_rest:
            return ""
        return f"heads {_few(at_rest)} only rest: one key receives over {self.limits.sink:.0%} of their weight"


def _few(heads: list[int]) -> str:
    return ", ".join(map(str, heads[:8])) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")
