"""Which heads carry the answer: activation patching head by head, and its estimate by gradients.

A model is run on a clean input and on a corrupted one, for which a metric differs. `sweep` puts one head of the clean
run into the corrupted one at a time; `attribution_patching` estimates all of that from one backward pass.

Letters: B batch, H query heads, N queries, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.heads.capture.observed import ObservedCall
from regard.heads.interventions.ablate import WHAT, What, ablate
from regard.heads.interventions.changes import Changes
from regard.heads.interventions.head_choice import Heads, selected_heads
from regard.heads.interventions.patching_result import Patching, check_metrics, metric_value
from regard.heads.progress import track
from regard.heads.record.record import Record
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating, run

__all__ = ["attribution_patching", "sweep"]

Metric = Callable[[Any], Tensor]


def sweep(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    metric: Metric,
    *,
    positions: bool = False,
    what: What = "output",
    heads: Heads | None = None,
    progress: bool = True,
) -> Patching:
    """Activation patching: run the corrupted input with one head at a time taken from the clean run, and see how far
    the metric comes back. One forward for each head, or for each head and token.

    Args:
        model: any model that `watch` can see; it is run in eval mode, without gradient.
        clean, corrupt: inputs of the same length: a text (for regard's models), a tensor, a tuple of arguments, or a
            mapping of named ones.
        metric: a function of the model's output that gives one number, such as a difference of logits.
        positions: patch each token by itself.
        what: what is taken from the clean run: "output", "q", "k", "v" or "pattern", as for `ablate`.
        heads: only these, given as to `ablate`.
        progress: show a progress bar on a terminal.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> clean, corrupt = torch.randn(2, 1, 5, 16)
    >>> result = sweep(layer, clean, corrupt, lambda out: out[0, -1].sum())
    >>> result.matrix().shape, torch.allclose(result.matrix().sum(), torch.ones(()), atol=1e-3)  # linear in its heads
    (torch.Size([1, 2]), True)
    """
    _check(what, positions)
    with evaluating(model), torch.no_grad():
        source, value = _record(model, clean, metric)
        corrupted = float(metric_value(metric(run(model, corrupt))))
        check_metrics(value, corrupted)
        sizes = {layer.name: layer.heads for layer in source}
        of_keys = what in ("k", "v")
        lengths = {layer.name: layer.num_keys if of_keys else layer.num_queries for layer in source}
        shapes = {name: (count, lengths[name]) if positions else (count,) for name, count in sizes.items()}
        raw = {name: torch.full(shape, float("nan"), device="cpu") for name, shape in shapes.items()}
        places = [
            (layer, head, token)
            for layer, head in selected_heads(heads, sizes)
            for token in (range(lengths[layer]) if positions else [None])
        ]
        for layer, head, token in track(places, "patching", progress):
            tokens = {} if token is None else {"keys" if of_keys else "queries": token}
            with ablate(model, {layer: [head]}, "patch", source, what=what, **tokens):
                patched = float(metric_value(metric(run(model, corrupt))))
            raw[layer][(head,) if token is None else (head, token)] = patched
    return Patching.of(raw, value, corrupted, what=what, tokens=_tokens(model, corrupt))


def attribution_patching(
    model: nn.Module, clean: Any, corrupt: Any, metric: Metric, *, positions: bool = False
) -> Patching:
    """An estimate of `sweep` for all heads at once (Nanda 2023): the gradient of the metric by each head's output on
    the corrupted run, times what the clean run would change in it. Two forwards and one backward.

    It is exact where the metric is linear in the heads' outputs. `positions` splits the estimate by tokens.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> clean, corrupt = torch.randn(2, 1, 5, 16)
    >>> def metric(out):
    ...     return out[0, -1].sum()
    >>> estimate, exact = attribution_patching(layer, clean, corrupt, metric), sweep(layer, clean, corrupt, metric)
    >>> torch.allclose(estimate.raw["MultiHeadAttention"], exact.raw["MultiHeadAttention"], atol=1e-5)
    True
    """
    _check("output", positions)
    with evaluating(model):
        with torch.no_grad():
            source, value = _record(model, clean, metric)
        with torch.enable_grad(), _Outputs(model) as seen:
            loss = metric_value(metric(run(model, corrupt)))
        if not loss.requires_grad:
            raise bad_value(
                "metric",
                expected="one with a gradient",
                received="one without",
                remedy="no `no_grad`, `detach`, `item` or `argmax` on the way to it",
            )
        corrupted = loss.item()
        check_metrics(value, corrupted)
        gradients = torch.autograd.grad(loss, list(seen.outputs.values()), allow_unused=True)
    raw = {}
    for (layer, output), gradient in zip(seen.outputs.items(), gradients, strict=True):
        gradient = torch.zeros_like(output) if gradient is None else gradient
        if layer not in source or source[layer].output.shape != output.shape:
            received = shape_of(source[layer].output) if layer in source else f"layers {source.layers}"
            expected = f"outputs {shape_of(output)} of {layer}, as those of corrupt"
            raise bad_value("clean", expected=expected, received=received, remedy="texts of the same length")
        change = (gradient.double() * (source[layer].output - output.detach()).double()).sum((0, 3))  # (H, N)
        raw[layer] = (corrupted + (change if positions else change.sum(1))).float().cpu()
    return Patching.of(raw, value, corrupted, estimated=True, tokens=_tokens(model, corrupt))


class _Outputs(Changes):
    """Keeps the heads' outputs (B, H, N, E) of each layer, to take gradients by them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.outputs: dict[str, Tensor] = {}

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        if attention.layer in self.outputs:
            raise bad_value(
                "corrupt", expected="a text that is read at once", received=f"several calls of {attention.layer}"
            )
        self.changed = attention.module, list(range(output.shape[1]))
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        self.outputs[attention.layer] = output
        return output


def _record(model: nn.Module, clean: Any, metric: Metric) -> tuple[Record, float]:
    """The record of a run, and its metric."""
    with watch(model, measures=[], keep="qkv", exact=True) as source:
        out = run(model, clean)
    return source, float(metric_value(metric(out)))


def _check(what: object, positions: object) -> None:
    if what not in WHAT:
        raise bad_value("what", expected=", ".join(map(repr, WHAT)), received=repr(what))
    if not isinstance(positions, bool):
        raise bad_type("positions", expected="True or False", received=repr(positions))


def _tokens(model: nn.Module, text: Any) -> list[str] | None:
    """The tokens of a text as they are spelled; None if it is no text."""
    return model.tokenize(text) if isinstance(text, str) and callable(getattr(model, "tokenize", None)) else None  # type: ignore[operator]
