"""Where roles are decided: the role of each head, or none, with its score, its evidence and its baseline.

The baseline is measured, not assumed: the same score for uniform attention on the same text, that is equal weights on
all visible keys. Thresholds are in one table, `ROLES`, with their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.analysis.token_classes import SEPARATORS, is_punctuation
from regard.heads.record.table import Shown, Table
from regard.measures import Offsets, Tokens

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record

__all__ = ["ROLES", "Role", "Roles", "roles"]


class Rule(NamedTuple):
    """When a head has a role: the least score, the least ratio to the baseline, and the least number of queries."""

    name: str
    least: float
    over_baseline: float  # least ratio of the score to that of uniform attention
    source: str
    queries: int = 5  # least number of queries that the score is a mean over; with fewer it may be luck


# A head's role is the first rule that it meets, so specific roles come first. Scores are means over queries.
ROLES = (
    Rule("induction", 0.4, 3.0, "mass on the token after earlier copies (Olsson et al. 2022); threshold ours", 10),
    Rule("duplicate", 0.4, 3.0, "mass on earlier copies (Wang et al. 2022); threshold ours", 10),
    Rule("previous", 0.5, 1.5, "over half of the mass on the token before (Clark et al. 2019)"),
    Rule("next", 0.5, 1.5, "over half of the mass on the token after (Clark et al. 2019)"),
    Rule("itself", 0.5, 1.5, "over half of the mass on the token itself; threshold as for previous"),
    Rule("separator", 0.6, 1.5, "over 0.6 of the mass on separators (Clark et al. 2019)"),
    Rule("punctuation", 0.6, 1.5, "over 0.6 of the mass on punctuation (Clark et al. 2019)"),
    Rule("first", 0.3, 1.5, "over 0.3 of the mass on the first token: a sink (Gu et al. 2024)"),
    Rule("local", 0.6, 1.5, "over 0.6 of the mass within three tokens; threshold ours"),
    Rule("long-range", 0.0, 1.2, "farther away on average than uniform attention; factor ours"),
    Rule("broad", 0.0, 0.78, "entropy over 3.8 of ln 128 nats, 0.78 of uniform attention's (Clark et al. 2019)"),
)
NEAR = 3  # tokens to each side that are local


@dataclass
class Role:
    """A head's role: `score`, the `least` score for it, and the `baseline`; `evidence` holds every score of the head,
    and `also` the other roles whose rules it meets."""

    layer: str
    head: int
    role: str | None
    score: float | None = None
    baseline: float | None = None
    least: float | None = None
    also: list[str] = field(default_factory=list)
    evidence: dict[str, float] = field(default_factory=dict)


class Roles(list[Role], Shown):  # type: ignore[misc]
    """A `Role` for each head of each layer; `print` shows those that have a role, a notebook as a table."""

    __repr__ = Shown.__repr__
    layers: Sequence[str] = ()  # all that were watched, in call order

    def of(self, role: str) -> list[Role]:
        """The heads that have a role, the highest score first."""
        return sorted((head for head in self if head.role == role), key=lambda head: -(head.score or 0.0))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            layer, number = which
            for head in self:
                if head.layer == layer and head.head == number:
                    return head
            raise KeyError(f"no head {number} in layer {layer!r}")
        return super().__getitem__(which)

    def table(self) -> Table:
        """A row for each head that has a role."""
        rows = (
            {
                "layer": r.layer,
                "head": r.head,
                "role": r.role,
                "score": r.score,
                "baseline": r.baseline,
                "least": r.least,
                "also": ", ".join(r.also),
            }
            for r in self
            if r.role is not None
        )
        return Table(rows, self.layers)

    def caption(self) -> str:
        """How many heads have a role."""
        without = sum(head.role is None for head in self)
        return f"{len(self) - without} of {len(self)} heads have a role"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.caption()}"


def roles(record: Record, tokens: Sequence[str] | Sequence[Sequence[str]] | None = None) -> Roles:
    """Name the role of each head of self attention.

    Args:
        record: what `watch` saw, with the default measures (or entropy, distance, offsets, on_first and received).
        tokens: the tokens as text, or a list of them for each item of the batch: separators and punctuation are
            recognised by them. By default `record.tokens`, if they are those of the text. For many texts measure
            `measures.Tokens(heads.token_kinds(tokenizer))` instead.

    A score needs enough queries (`Rule.queries`). What a head may attend to for another reason does not count: for
    induction and duplicate, copies next to the query and the first token; for separators and punctuation, the first
    token. Induction and duplicate need a text that repeats itself, such as `heads.probes` make.
    """
    words = {layer.name: tokens for layer in record} if tokens is not None else tokens_of(record, record.tokens)
    roles = Roles()
    roles.layers = record.layers
    for layer in record:
        if layer.kind != "self":
            continue
        scores = _scores(layer, words[layer.name])
        for head in range(layer.heads):
            of_head = {name: Score(*(x[head].item() for x in score)) for name, score in scores.items()}
            roles.append(_role(layer.name, head, of_head))
    return roles


def tokens_of(record: Record, tokens: Any) -> dict[str, list[list[str]] | None]:
    """The tokens of each layer's text, by the layer's name: a list for each item of the batch; None if `tokens` do not
    fit the text. `tokens` are as `record.tokens`: a list, a list of lists, or a pair of such (source, target)."""
    pair = isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens)
    sides = list(tokens) if pair else [tokens, tokens]
    target = first_of_target(record)
    return {layer.name: _fitting(layer, sides[number >= target]) for number, layer in enumerate(record)}


def first_of_target(record: Record) -> int:
    """The index of the first layer of a decoder with cross attention: the self attention before the first cross
    attention."""
    kinds = [layer.kind for layer in record]
    if "cross" not in kinds:
        return len(kinds)
    first = kinds.index("cross")
    return first - 1 if first and kinds[first - 1] == "self" else first


def _fitting(layer: LayerRecord, tokens: Any) -> list[list[str]] | None:
    """Tokens in lists, if they are those of the one text that a layer has seen."""
    if not isinstance(tokens, (list, tuple)) or not tokens or layer.texts != 1 or not layer.has("received"):
        return None
    batch, total = layer.batch_size, layer.num_keys
    rows = [list(row) for row in tokens] if isinstance(tokens[0], (list, tuple)) else [list(tokens)]
    if layer.num_chunks > 1:  # generated: the last token was never an input
        rows = [row[:-1] if len(row) == total + 1 else row for row in rows]
    fits = len(rows) == batch and all(len(row) == total or (batch > 1 and len(row) < total) for row in rows)
    return [[str(token) for token in row] for row in rows] if fits else None


class Score(NamedTuple):
    """The score for a role, that of uniform attention, and how many queries these are means over: numbers for one head,
    or (H,) each for all."""

    score: Any
    baseline: Any
    queries: Any


def _role(layer: str, head: int, scores: dict[str, Score]) -> Role:
    fitting = [
        rule
        for rule in ROLES
        if rule.name in scores
        and scores[rule.name].queries >= rule.queries
        and scores[rule.name].score > rule.least
        and scores[rule.name].score >= rule.over_baseline * scores[rule.name].baseline
        and (scores[rule.name].baseline > 0 or rule.least > 0)
    ]
    evidence = {name: score for name, (score, _, _) in scores.items()}
    if not fitting:
        return Role(layer, head, None, evidence=evidence)
    rule = fitting[0]
    score, baseline, _ = scores[rule.name]
    least = max(rule.least, rule.over_baseline * baseline)
    return Role(layer, head, rule.name, score, baseline, least, [other.name for other in fitting[1:]], evidence)


def _scores(layer: LayerRecord, tokens: Any) -> dict[str, Score]:
    """The scores of all heads, for each role that can be decided from what was measured."""
    uniform = layer.uniform
    if uniform is None:
        raise bad_value("roles", expected="a record with its baseline", received=f"none in {layer.name}")
    counts = layer.counts
    scores: dict[str, Score] = {}

    def add(name: str, score: Tensor, baseline: Tensor, queries: Tensor) -> None:
        scores[name] = Score(score, baseline.expand_as(score), queries)

    of_heads, of_uniform = _scalars_without_confounds(layer), _scalars_without_confounds(uniform)
    role_of_measure = {"on_first": "first", "distance": "long-range", "entropy": "broad"}
    for name, score in of_heads.items():
        if name in of_uniform:
            queries = counts.get(f"{name}_apart", counts.get(name, layer.count))
            add(role_of_measure.get(name, name), score, of_uniform[name][:1], queries)
    offsets = next((measure for measure in layer.measures if isinstance(measure, Offsets)), None)
    if offsets is not None and min(offsets.before, offsets.after) >= NEAR:
        near = slice(offsets.before - NEAR, offsets.before + NEAR + 1)
        profile, baseline = layer.per_head("offsets"), uniform.per_head("offsets")
        add("local", profile[:, near].sum(1), baseline[:1, near].sum(1), layer.count)
    if tokens is not None:
        if not layer.has("received"):
            raise bad_value("tokens", expected='a record that has measured "received"', received=", ".join(layer.axes))
        for name, keys in _keys_by_class(layer, tokens).items():
            add(name, _mass_on(layer, keys), _mass_on(uniform, keys)[:1], layer.count)
    scores = {name: score for name, score in scores.items() if any(rule.name == name for rule in ROLES)}
    if not scores:
        raise bad_value(
            "roles",
            expected="a record with the default measures, or others that roles are decided by",
            received=", ".join(layer.axes) or "none",
            remedy="watch(model)",
        )
    return scores


def _scalars_without_confounds(layer: LayerRecord) -> dict[str, Tensor]:
    """The measures of a layer that are one number per head, (H,), without what a head may attend to for another reason:
    copies next to the query, and the first token."""
    values = layer.scalars()
    for name in ("induction", "duplicate"):
        if name in values and layer.has(f"{name}_apart"):
            values[name] = layer.per_head(f"{name}_apart")
    if layer.has("tokens_first"):
        names = next(measure.names for measure in layer.measures if isinstance(measure, Tokens))
        rest = layer.per_head("tokens") - layer.per_head("tokens_first")
        values |= dict(zip(names, rest.clamp(min=0).unbind(1), strict=True))
    return values


def _keys_by_class(layer: LayerRecord, tokens: Any) -> dict[str, Tensor]:
    """Which keys (1|B, M) are separators, and which are punctuation, the first token excluded."""
    if layer.texts > 1:
        raise bad_value(
            "tokens",
            expected="a record of one text, which they belong to",
            received=f"{layer.texts} texts",
            remedy="measures.Tokens(heads.token_kinds(tokenizer)) when watching",
        )
    rows = [tokens] if tokens and isinstance(tokens[0], str) else list(tokens)
    if not all(isinstance(row, (list, tuple)) and all(isinstance(t, str) for t in row) for row in rows):
        raise bad_type("tokens", expected="a list of words, or a list of lists of them", received=f"{tokens!r:.60}")
    batch, longest = layer.batch_size, layer.num_keys
    least = longest if batch == 1 else 0  # in a batch, shorter texts are padded
    if len(rows) not in (1, batch) or not all(least <= len(row) <= longest for row in rows):
        raise bad_value(
            "tokens", expected=f"{longest} for each of {batch} texts", received=f"{[len(row) for row in rows]}"
        )
    padded = [_with_padding(row, layer, item) for item, row in enumerate(rows)]
    first = torch.zeros(len(rows), longest, dtype=torch.bool)
    padding = layer.key_padding
    for item in range(len(rows)):
        first[item, 0 if padding is None else int(padding[item].int().argmin())] = True
    return {
        "separator": torch.tensor([[t in SEPARATORS for t in row] for row in padded]) & ~first,
        "punctuation": torch.tensor([[is_punctuation(t) for t in row] for row in padded]) & ~first,
    }


def _with_padding(row: Sequence[str], layer: LayerRecord, item: int) -> list[str]:
    """The tokens of one text with "" for padding, on the left or on the right: one for each key."""
    padding = None if layer.key_padding is None else layer.key_padding[item]
    if padding is not None and len(row) == int((~padding).sum()):
        words = iter(row)
        return ["" if is_padding else next(words) for is_padding in padding.tolist()]
    return [*row, *[""] * (layer.num_keys - len(row))]


def _mass_on(layer: LayerRecord, keys: Tensor) -> Tensor:
    """The mean mass (H,) on some keys, from what each key received."""
    received = layer.last()["received"]  # (B, H, M)
    keys = keys.to(received.device)
    return (received * keys[:, None]).sum((0, 2)) / layer.last_tokens().sum((0, 2)).clamp(min=1)
