"""`watch_all`: watch a model over many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type
from regard.heads.analysis.roles import collect_evidence
from regard.heads.progress import track
from regard.heads.record.record import Record
from regard.heads.watch import watch
from regard.measures import MeasureLike

__all__ = ["evaluating", "run", "watch_all"]


def watch_all(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    roles: bool = True,
    progress: bool = True,
) -> Record:
    """Run a model over a corpus, in eval mode and without gradient; returns one record of means per head.

    Args:
        model: any model that `watch` can see.
        batches: inputs, one after another: a text (for regard's models), a tensor, a tuple of arguments, or a mapping
            of named ones (as returned by a tokenizer of transformers, or by `encode_batch` of regard's models).
        measures, layers: as for `watch`.
        roles: collect the evidence that `seen.roles()` decides by, which takes about as long as the attention itself.
        progress: a bar on a terminal.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> seen = watch_all(layer, [torch.randn(1, 5, 16), torch.randn(3, 7, 16)], progress=False)
    >>> seen[0].entropy.shape, seen[0].count  # 5 + 3 * 7 queries
    (torch.Size([2]), tensor([26, 26]))
    """
    if isinstance(batches, (str, Mapping)):
        raise bad_type(
            "batches",
            expected="several, one after another",
            received=f"one {type(batches).__name__}",
            remedy="a list of it",
        )
    watching = watch(model, measures=measures, layers=layers)
    watching.filing.tracker.rereads = False  # a text that starts like the last one is another text
    with evaluating(model), watching as seen, torch.no_grad():
        for batch in track(batches, "watching", progress):
            run(model, batch)
            if roles:
                collect_evidence(seen)
    return seen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode within a `with` block; then each of its modules is as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model on a text, a tensor, a tuple of arguments or a mapping of named ones."""
    if isinstance(batch, str):
        encode = getattr(model, "encode", None)
        if encode is None:
            raise bad_type(
                "batch",
                expected="tensors, for this model has no tokenizer",
                received="a text",
                remedy="what its tokenizer gives, as a mapping: tokenizer(text, return_tensors='pt')",
            )
        return model(encode(batch))
    if hasattr(batch, "_asdict"):  # a named tuple, such as `encode_batch` gives
        return model(**batch._asdict())
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return model(**batch)
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    raise bad_type("batch", expected="a text, a tensor, a tuple or a mapping", received=type(batch).__name__)
