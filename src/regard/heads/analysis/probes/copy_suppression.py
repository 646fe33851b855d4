"""Copy suppression: heads that write against the tokens they attend to (McDougall et al. 2023, "Copy Suppression:
Comprehensively Understanding an Attention Head").

Letters: H heads, M keys, T different tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.analysis.probes.induction import texts_or_random_tokens
from regard.heads.analysis.probes.inputs import device_of, tokenizer_of
from regard.heads.analysis.probes.result import ProbeResult, layer_means
from regard.heads.interventions.direct_logits import DirectLogits, direct_logits
from regard.heads.progress import track
from regard.heads.record.record import LayerRecord

__all__ = ["CopySuppression", "copy_suppression"]

# Each ends where a word that was said may come again.
TEXTS = (
    "When Mary and John went to the store, John gave a drink to",
    "When Tom and Anna went to the park, Anna gave a ball to",
    "Then David and Sarah had a long talk, and David said something to",
    "After Paul and Lisa left the office, Lisa sent a letter to",
    "The cat looked at the dog, and then the dog looked at the",
    "The king sent for the queen, but the queen did not answer the",
    "All is fair in love and war, but there is more war than",
    "He bought apples and bread. At home he ate the bread and the",
    "The doctor asked the nurse a question, and the nurse answered the",
    "First it was cold and then it was warm, and at night it was again",
    "The red box is on the table and the blue box is under the",
    "London is larger than Oxford, and the river of Oxford flows to",
)


@dataclass(repr=False)
class CopySuppression(ProbeResult):
    """The score is what a head adds to the logits of the tokens it attends to, over the mean of the text's tokens: each
    key's own token, times the weight on the key, summed. Negative: it suppresses copies; positive: it copies. The first
    token of the text is no key. `print` it.

    Attributes:
        baseline: the score with equal weights on all visible keys.
        more: "against", the share of the weight that is on keys whose own token the head writes against.
    """

    title: ClassVar[str] = "adds"
    lowest_first: ClassVar[bool] = True

    def caption(self) -> str:
        """What the score is, and the number of texts."""
        return f"adds to the logits of the tokens attended to: mean over {len(self.runs)} texts"


def copy_suppression(
    model: nn.Module,
    texts: Sequence[str | Tensor] | None = None,
    *,
    tokenizer: Any = None,
    length: int = 13,
    seeds: Sequence[int] = (0, 1, 2, 3, 4, 5, 6),
    progress: bool = True,
) -> CopySuppression:
    """Which heads write against the tokens that they attend to, at the end of texts where a word may come again
    (McDougall et al. 2023). What each head adds along the stream is exact for the run (see `heads.attribution`).

    Args:
        model: a decoder as `heads.attribution` takes it.
        texts: texts, or token ids (N,); by default twelve short ones, or without a tokenizer random tokens that are
            repeated, up to the last.
        tokenizer: for texts, if the model has none.
        length, seeds: of the random tokens.
        progress: show a progress bar on a terminal.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=31, inner=7, context=13, causal=True)
    >>> result = copy_suppression(Decoder(config), [torch.tensor([3, 5, 7, 3, 5])])
    >>> result["blocks.0.attention"].shape, result.runs
    (torch.Size([3]), ('texts[0]',))
    """
    if texts is None and tokenizer_of(model, tokenizer) is not None:
        texts = TEXTS
    rows = texts_or_random_tokens(model, texts, length, seeds, tokenizer)
    if texts is None:
        rows = [(name, ids[:-1]) for name, ids in rows]
    for name, ids in rows:
        if len(set(ids[1:].tolist())) < 2:
            raise bad_value(name, expected="two different tokens after the first", received=f"{len(ids)} tokens")
    found: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = []
    for _, ids in track(rows, "copy suppression", progress):
        tokens, numbers = ids.unique(return_inverse=True)
        run = direct_logits(model, ids.to(device_of(model)), len(ids) - 1, tokens.tolist())
        found.append({layer.name: _on_own_tokens(run, layer, numbers) for layer in run.layers})
    adds, even, against = (
        layer_means([{name: numbers[i] for name, numbers in run.items()} for run in found]) for i in range(3)
    )
    runs = tuple(name for name, _ in rows)
    return CopySuppression(adds[0], even[0], adds[1], runs, {"against": against[0]})


def _on_own_tokens(run: DirectLogits, layer: LayerRecord, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the heads of a layer add to the logits of the tokens that they attend to at the last query, the same for
    equal weights, and the share of the weight on keys that they write against: (H,) each. `numbers` (M,): which of the
    tokens each key is."""
    logits = run.of_keys(layer)  # (H, M, T)
    index = numbers.to(logits.device)[None, :, None].expand(len(logits), -1, 1)
    own = logits.gather(2, index)[..., 0] - logits.mean(-1)  # (H, M)
    weights = layer.weights(rows=-1, batch=0).to(own)  # (H, M)
    visible = (weights > 0).any(0).to(own)
    own, weights = own[:, 1:], weights[:, 1:]  # without the first token
    even = (own * visible[1:]).sum(1) / visible.sum()
    against = (weights * (own < 0)).sum(1) / weights.sum(1).clamp(min=torch.finfo(own.dtype).tiny)
    return (weights * own).sum(1), even, against
