"""Retrieval heads: a needle in a haystack (Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context
Factuality").

Letters: H heads, N tokens, A tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_value
from regard.heads.analysis.probes.haystack import Haystack, haystack, random_parts, text_parts
from regard.heads.analysis.probes.inputs import device_of, logits_of, tokenizer_of, vocabulary_size
from regard.heads.analysis.probes.result import ProbeResult, layer_means, self_attention
from regard.heads.analysis.syntax.run import context_of
from regard.heads.progress import track
from regard.heads.record.record import LayerRecord
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating
from regard.measures import Pairs

__all__ = ["Retrieval", "retrieval"]


@dataclass(repr=False)
class Retrieval(ProbeResult):
    """The score is the share of answer tokens at whose prediction the most attended key is that token in the needle.
    `print` it.

    Attributes:
        baseline: the score of a key drawn at random.
        more: "mass", the mean weight on the right keys.
        answered: the share of answer tokens that the model itself predicts; NaN if it returns no logits.
    """

    answered: float

    title: ClassVar[str] = "retrieval"

    def caption(self) -> str:
        """How many texts, and how much of the answers the model knew."""
        return f"retrieval: mean over {len(self.runs)} texts; the model predicts {self.answered:.1%} of the answers"


def retrieval(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    lengths: Sequence[int] = (256, 512),
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    seeds: Sequence[int] = (0,),
    synthetic: bool = False,
    progress: bool = True,
    **options: Any,
) -> Retrieval:
    """Which heads of a decoder look up an answer: a sentence with it is placed at several depths of a long text, which
    ends with the question and the answer (Wu et al. 2024). The memory is O(N): no map is kept.

    Args:
        model: called with token ids (1, N): regard's, transformers', or any other that `watch` sees.
        tokenizer: of tokenizers or transformers; by default the model's own. If there is none the text is random
            tokens: two that are the key, then the three of the answer, and the key again at the end.
        lengths: tokens of the whole text; `depths`: where the needle is, from 0 to 1; one text for each pair and seed.
        seeds: for the filler and the needle.
        synthetic: random tokens even if there is a tokenizer.
        progress: show a progress bar on a terminal.
        options: further arguments of the model's forward.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=31, inner=7, context=97, causal=True)
    >>> result = retrieval(Decoder(config), lengths=[53], depths=[0.2, 0.8])
    >>> result["blocks.0.attention"].shape, len(result.runs)
    (torch.Size([3]), 2)
    """
    _check(model, lengths, depths, seeds)
    found = None if synthetic else tokenizer_of(model, tokenizer)
    texts: list[tuple[str, Haystack]] = []
    for seed, length, depth in product(seeds, lengths, depths):
        generator = torch.Generator().manual_seed(seed)
        parts = random_parts(vocabulary_size(model), generator) if found is None else text_parts(found, generator)
        texts.append((f"length {length}, depth {depth:g}, seed {seed}", haystack(parts, length, depth)))
    scores: list[dict[str, Tensor]] = []
    masses: list[dict[str, Tensor]] = []
    chances: list[dict[str, Tensor]] = []
    answered: list[float] = []
    with evaluating(model), torch.no_grad():
        for _, text in track(texts, "retrieval", progress):
            ids = text.ids.to(device_of(model))[None]
            with watch(model, measures=[Pairs(text.keys), "peak"]) as seen:
                output = model(ids, **options)
            answered.append(_share_predicted(logits_of(output), text))
            layers = self_attention(seen)
            scores.append({layer.name: _share_retrieved(layer.target[0], text) for layer in layers})
            masses.append({layer.name: layer.per_head("pairs") for layer in layers})
            chances.append({layer.name: _chance(layer) for layer in layers})
    means, by_run = layer_means(scores)
    more = {"mass": layer_means(masses)[0]}
    runs = tuple(run for run, _ in texts)
    return Retrieval(means, layer_means(chances)[0], by_run, runs, more, sum(answered) / len(answered))


def _share_retrieved(target: Tensor, text: Haystack) -> Tensor:
    """The share (H,) of answer tokens whose most attended key, `target` (H, N), is that token in the needle."""
    keys = text.keys[text.queries].to(target.device)  # (A, K)
    return (target[:, text.queries.to(target.device), None] == keys).any(-1).float().mean(1)


def _chance(layer: LayerRecord) -> Tensor:
    """The mean weight (H,) on the right keys if it were equal on all visible keys."""
    assert layer.uniform is not None
    return layer.uniform.per_head("pairs").expand(layer.heads)


def _share_predicted(logits: Tensor | None, text: Haystack) -> float:
    """The share of answer tokens that are the likeliest by the logits (1, N, V)."""
    if logits is None or logits.shape[1] != len(text.ids):
        return float("nan")
    predicted = logits[0, text.queries.to(logits.device)].argmax(-1).cpu()
    return float((predicted == text.ids[text.queries + 1]).float().mean())


def _check(model: nn.Module, lengths: Sequence[int], depths: Sequence[float], seeds: Sequence[int]) -> None:
    for what, values in (("lengths", lengths), ("depths", depths), ("seeds", seeds)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise bad_value(what, expected="a list with one number at least", received=repr(values))
    context = context_of(model, None)
    for length in lengths:
        if whole_number("lengths", length, at_least=1) > context:
            raise bad_value("lengths", expected=f"at most {context} tokens, the model's context", received=length)
    for depth in depths:
        if not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
            raise bad_value("depths", expected="numbers from 0 to 1", received=repr(depth))
    for seed in seeds:
        whole_number("seeds", seed, at_least=0)
