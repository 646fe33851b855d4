"""How much a model needs each head: by gradients (Michel et al. 2019), or by leaving out one head at a time.

Letters: B batch, H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.capture.observed import ObservedCall
from regard.heads.interventions.ablate import ablate
from regard.heads.interventions.changes import Changes, refuse_checkpoints
from regard.heads.interventions.head_choice import Heads, selected_heads
from regard.heads.progress import track
from regard.heads.record.table import PerHead, Table

__all__ = ["Importance", "importance", "leave_one_out"]

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(repr=False)
class Importance(PerHead):
    """A number for each head: `scores[layer]` is (H,). The larger, the more the model needs it."""

    examples: int

    def ranked(self) -> list[tuple[str, int, float]]:
        """(layer, head, score), the least needed first; heads without a score (NaN) are left out."""
        return sorted((row for row in self.rows() if not math.isnan(row[2])), key=lambda row: row[2])

    def least(self, count: int) -> dict[str, list[int]]:
        """The `count` heads that are needed least, as `prune` and `ablate` take them; every layer keeps one head."""
        ranked = [layer for layer, _, _ in self.ranked()]
        most = sum(min(ranked.count(layer), len(s) - 1) for layer, s in self.scores.items())
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
            raise bad_value("count", expected=f"0 to {most} heads, for every layer keeps one", received=repr(count))
        chosen: dict[str, list[int]] = {}
        for layer, head, _ in self.ranked():
            if sum(map(len, chosen.values())) == count:
                break
            if len(chosen.get(layer, [])) < len(self.scores[layer]) - 1:
                chosen.setdefault(layer, []).append(head)
        return {layer: sorted(heads) for layer, heads in chosen.items()}

    def table(self) -> Table:
        """A row for each head, the most needed first."""
        rows = ({"layer": layer, "head": head, "importance": s} for layer, head, s in reversed(self.ranked()))
        return Table(rows, self.scores)

    def __str__(self) -> str:
        return str(self.table())


class _Gates(Changes):
    """Multiplies the output of each head, for each item of the batch, by a gate of 1, and keeps the gates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.gates: dict[str, list[Tensor]] = {}

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        refuse_checkpoints(attention.layer)
        self.changed = attention.module, list(range(output.shape[1]))
        gate = torch.ones(output.shape[:2], dtype=output.dtype, device=output.device, requires_grad=True)  # (B, H)
        self.gates.setdefault(attention.layer, []).append(gate)
        return output * gate[:, :, None, None]


def importance(
    model: nn.Module, loss_fn: LossFunction, batches: Iterable[Any], *, normalize: bool = True, progress: bool = True
) -> Importance:
    """The sensitivity of the loss to each head (Michel et al. 2019): the mean over examples of |dL/dg| at a gate g = 1
    on the head's output.

    Args:
        model: any model that `watch` can see; in eval mode, or without dropout, the result is exact.
        loss_fn: `loss_fn(model, batch)` returns the losses of a batch: one for each example (B,), or their mean.
        batches: what `loss_fn` takes, one after another.
        normalize: divide the scores of each layer by their l2 norm, as the paper does.
        progress: show a progress bar on a terminal.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> result = importance(layer, lambda model, x: model(x).square().mean((1, 2)), [torch.randn(3, 5, 16)])
    >>> result["MultiHeadAttention"].shape, result.examples
    (torch.Size([2]), 3)
    """
    sums: dict[str, Tensor] = {}
    examples = 0
    for batch in track(batches, "importance", progress):
        with torch.enable_grad(), _Gates(model) as gates:
            loss = _check_loss(loss_fn(model, batch))
            if not gates.gates:
                raise bad_value("loss_fn", expected="one that runs the model", received="no attention was computed")
            size = next(iter(gates.gates.values()))[0].shape[0]
            for layer, gradients in _gate_gradients(loss, gates.gates).items():
                # the gradient of a mean over B examples is 1 / B of that of each example
                total = gradients.abs().sum(0).double() * (size if loss.dim() == 0 else 1)  # (H,)
                sums[layer] = sums.get(layer, 0) + total
        examples += size
    if not examples:
        raise bad_value("batches", expected="one at least", received="none")
    scores = {layer: (total / examples).float() for layer, total in sums.items()}
    if normalize:
        scores = {layer: s / s.norm().clamp(min=1e-20) for layer, s in scores.items()}
    return Importance(scores, examples)


def _gate_gradients(loss: Tensor, gates: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The gradient (B, H) of the loss by the gates of each layer, summed over the calls of the layer."""
    if not loss.requires_grad:
        raise bad_value(
            "loss_fn",
            expected="a loss with a gradient",
            received="one without",
            remedy="no `no_grad`, `detach` or `argmax` on the way to it",
        )
    all_gates = [gate for of_layer in gates.values() for gate in of_layer]
    gradients = iter(torch.autograd.grad(loss.sum(), all_gates, allow_unused=True))
    sums: dict[str, Tensor] = {}
    for layer, of_layer in gates.items():
        of_calls = [torch.zeros_like(gate) if (d := next(gradients)) is None else d for gate in of_layer]
        if len({d.shape for d in of_calls}) > 1:
            raise bad_value(layer, expected="one batch size within a batch", received="several calls of other sizes")
        if loss.dim() and len(loss) != len(of_calls[0]):
            raise bad_value(
                "loss_fn",
                expected=f"a loss for each of the {len(of_calls[0])} examples of {layer}",
                received=f"{len(loss)} losses",
                remedy="their mean",
            )
        sums[layer] = torch.stack(of_calls).sum(0)
    return sums


def leave_one_out(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    heads: Heads | None = None,
    progress: bool = True,
) -> Importance:
    """How much the mean loss over all examples rises without each head: the model is run once for each head, or for
    each of `heads`, given as to `ablate` (the score of the others is NaN).

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> leave_one_out(layer, lambda model, x: model(x).square().mean(), [torch.randn(3, 5, 16)])[0].shape
    torch.Size([2])
    """
    batches = list(batches)
    if not batches:
        raise bad_value("batches", expected="one at least", received="none")
    with torch.no_grad():
        sizes: list[int] = []
        losses: list[float] = []
        heads_of: dict[str, int] = {}
        for batch in batches:
            with _Counting(model) as counting:
                losses.append(_check_loss(loss_fn(model, batch)).mean().item())
            if not counting.shapes:
                raise bad_value("loss_fn", expected="one that runs the model", received="no attention was computed")
            sizes.append(next(iter(counting.shapes.values()))[0])
            heads_of |= {layer: shape[1] for layer, shape in counting.shapes.items()}
        intact = _mean(losses, sizes)
        scores = {layer: torch.full((count,), float("nan"), device="cpu") for layer, count in heads_of.items()}
        for layer, head in track(selected_heads(heads, heads_of), "leaving one out", progress):
            with ablate(model, {layer: [head]}):
                without = [_check_loss(loss_fn(model, batch)).mean().item() for batch in batches]
            scores[layer][head] = _mean(without, sizes) - intact
    return Importance(scores, sum(sizes))


class _Counting(Changes):
    """Notes the batch size and number of heads of each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        self.shapes[attention.layer] = tuple(output.shape)
        return output


def _mean(losses: list[float], sizes: list[int]) -> float:
    """The mean over all examples, from the means of batches."""
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


def _check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() > 1 or not loss.is_floating_point():
        received = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise bad_type("loss_fn", expected="a loss for each example (B,), or their mean", received=received)
    return loss
