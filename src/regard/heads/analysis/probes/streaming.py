"""Streaming heads: attention limited to the first tokens and a recent window gives nearly the same output (Xiao et al.
2024, "DuoAttention"). The others are retrieval heads.

Letters: B batch, H query heads, N queries, M keys, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import plane_of
from regard.checks import whole_number
from regard.errors import bad_value
from regard.heads.analysis.probes.induction import texts_or_random_tokens
from regard.heads.analysis.probes.inputs import device_of
from regard.heads.analysis.probes.result import ProbeResult, layer_means, self_attention
from regard.heads.progress import track
from regard.heads.record.record import LayerRecord
from regard.heads.record.sequences import kept_call
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating
from regard.kernels import Call
from regard.kernels.precision import fixed_precision
from regard.kernels.run import run_measured
from regard.masks import Mask, Prefix, Window
from regard.measures import MeasureRun

__all__ = ["Streaming", "streaming"]


@dataclass(repr=False)
class Streaming(ProbeResult):
    """The score is how much a head's contribution changes if its attention is limited to sinks and a window: the norm
    of the difference over the norm of the contribution, over all queries from which the limit hides something. The
    lowest are streaming heads. `print` it.

    Attributes:
        baseline: the score of equal weights on all visible keys, with the head's own values.
        more: "outside", the mean weight on what is hidden; "uniform", that of equal weights.
        sinks, window: the limit.
    """

    sinks: int
    window: int

    title: ClassVar[str] = "change"
    lowest_first: ClassVar[bool] = True

    def streaming_heads(self, threshold: float = 0.1) -> list[tuple[str, int]]:
        """The heads whose change is below a threshold, as (layer, head), the lowest first."""
        return [(row["layer"], row["head"]) for row in self.table() if row["change"] < threshold]

    def kv_heads(self, count: int, threshold: float = 0.1) -> dict[str, list[int]]:
        """For each layer with `count` kv heads the streaming ones: those of which all query heads change by less than a
        threshold. They may forget what is outside of sinks and window (`regard.HeadCache`)."""
        found = {}
        for layer, change in self.scores.items():
            whole_number("count", count, at_least=1)
            if change.shape[0] % count:
                raise bad_value(
                    "count", expected=f"a divisor of the {change.shape[0]} heads of {layer}", received=count
                )
            most = change.unflatten(0, (count, -1)).amax(1)  # (G,); a head without a score is not below
            found[layer] = (most < threshold).nonzero()[:, 0].tolist()
        return found

    def caption(self) -> str:
        """The limit, and the number of texts."""
        return f"change by {self.sinks} sinks and a window of {self.window}: mean over {len(self.runs)} texts"


def streaming(
    model: nn.Module,
    texts: Sequence[str | Tensor] | None = None,
    *,
    sinks: int = 4,
    window: int = 64,
    length: int = 128,
    seeds: Sequence[int] = (0, 1),
    tokenizer: Any = None,
    progress: bool = True,
    **options: Any,
) -> Streaming:
    """How much each head's contribution changes if it may see only the first `sinks` tokens and the last `window` ones,
    its own included (Xiao et al. 2024). It is computed layer by layer from the queries, keys and values of the intact
    run, with the model's own mask, scale and biases. The memory is O(N).

    Args:
        model: a decoder that `watch` sees. (For an encoder the window reaches to both sides.)
        texts: texts, or token ids (N,), longer than `sinks` + `window`; by default random tokens that come twice, so
            that heads which look up the first copy must look past the window.
        length, seeds: of the random tokens: each text is `length` tokens, twice.
        tokenizer: for texts, if the model has none.
        progress: show a progress bar on a terminal.
        options: further arguments of the model's forward.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=31, inner=7, context=97, causal=True)
    >>> result = streaming(Decoder(config), sinks=2, window=5, length=17)
    >>> result["blocks.0.attention"].shape, len(result.runs)
    (torch.Size([3]), 2)
    """
    whole_number("sinks", sinks, at_least=0)
    whole_number("window", window, at_least=1)
    rows = texts_or_random_tokens(model, texts, length, seeds, tokenizer)
    for name, ids in rows:
        if len(ids) <= sinks + window:
            raise bad_value(
                name, expected=f"more than {sinks + window} tokens, sinks and window", received=f"{len(ids)} tokens"
            )
    found: list[dict[str, tuple[Tensor, ...]]] = []
    with evaluating(model), torch.no_grad():
        for _, ids in track(rows, "streaming", progress):
            with watch(model, measures=[], keep="qkv") as seen:
                model(ids.to(device_of(model))[None], **options)
            found.append({layer.name: _of_layer(layer, sinks, window) for layer in self_attention(seen)})
    change, baseline, uniform, outside = (
        layer_means([{name: numbers[i] for name, numbers in run.items()} for run in found]) for i in range(4)
    )
    more = {"outside": outside[0], "uniform": uniform[0]}
    return Streaming(change[0], baseline[0], change[1], tuple(name for name, _ in rows), more, sinks, window)


def _of_layer(layer: LayerRecord, sinks: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The change, that of equal weights, the mass outside of equal weights, and the head's own: (H,) each."""
    assert layer.text is not None
    call = kept_call(layer.text)
    if call is None:
        raise bad_value(
            layer.name,
            expected="queries, keys and values that can be kept",
            received="attention written by hand, or in several calls",
            remedy="F.scaled_dot_product_attention in the model, one call for the text",
        )
    limit, hides = _limit(call, layer.key_padding, sinks, window)
    rows = layer.last_tokens()[:, :1] & hides[:, None]  # (B, 1, N)
    gram = _gram(layer)
    even = replace(call, q=torch.zeros_like(call.q), softcap=None, biases=(), sinks=None)
    change, outside = _compared(call, limit, rows, gram)
    return change, *_compared(even, limit, rows, gram), outside


def _limit(call: Call, key_padding: Tensor | None, sinks: int, window: int) -> tuple[Mask, Tensor]:
    """The mask of sinks and window, and the queries (1|B, N) from which it may hide something. In a padded text the
    sinks are its first tokens."""
    plane = plane_of(call)
    positions = plane.k_positions
    if key_padding is not None:
        last = torch.iinfo(torch.int64).max
        positions = positions.expand_as(key_padding).masked_fill(key_padding, last)
    first = positions.amin(1)  # (1|B,)
    limit = Window(before=window - 1, after=window - 1) | Prefix(first + sinks)
    return limit, plane.q_positions - first[:, None] >= sinks + window


def _compared(call: Call, limit: Mask, rows: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """The relative change of each head's contribution by a limit, and the mean weight on what it hides: (H,) each, over
    the queries `rows` (B, 1, N)."""
    limited = replace(call, mask=limit if call.mask is None else call.mask & limit)
    (out, lse), (limited_out, limited_lse) = _forward(call), _forward(limited)
    counts = rows.to(lse.dtype)

    def norm(x: Tensor) -> Tensor:
        squares = torch.einsum("bhne,hef,bhnf->bhn", x, gram, x)  # |x W|^2 = x (W W^T) x^T
        return (squares * counts).sum((0, 2)).clamp(min=0).sqrt()

    change = norm(out.to(gram) - limited_out.to(gram)) / norm(out.to(gram)).clamp(min=torch.finfo(gram.dtype).tiny)
    outside = -torch.expm1(limited_lse - lse).where(rows, 0.0)  # the rest of the mass is e^(lse of a part - lse)
    return change, outside.sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, E) and the log-sum-exp (B, H, N) of the scores."""
    with fixed_precision(call.q):
        out, lse = run_measured(call, MeasureRun([], plane_of(call)), output=True)
    assert out is not None
    return out, lse


def _gram(layer: LayerRecord) -> Tensor:
    """For each head W W^T (H, E, E) of its slice of the output projection; the identity if a head's output does not
    enter it as it is, or it is not known."""
    output = layer.output
    if layer.projection is None or not torch.equal(layer.entered, output):
        return torch.eye(output.shape[-1], dtype=torch.float64, device=output.device).expand(layer.heads, -1, -1)
    slices = layer.projection[0].double().unflatten(1, (layer.heads, -1)).permute(1, 2, 0)  # (H, E, W)
    return slices @ slices.mT
