"""The role of each head, or none: with its score, its evidence, and the baseline that a head without a mind would have.

The baseline is measured, not assumed: the same score of equal weights on all keys that may be seen, on the same text.
Thresholds are in one table, with their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.analysis.token_classes import SEPARATORS, is_punctuation
from regard.heads.record.table import Shown, Table, scalars
from regard.measures import Offsets, Tokens

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record
    from regard.heads.record.sequences import SequenceRecord

__all__ = ["ROLES", "Role", "Roles", "roles"]


class Rule(NamedTuple):
    """A role: its score, the least that it takes, where that is from, and how many queries it takes."""

    name: str
    least: float
    over_baseline: float  # how many times the baseline's score it takes
    source: str
    queries: int = 5  # how many queries it takes that tell of it; fewer are luck


# The first that fits is a head's role: what says most comes first. Scores are means over queries.
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
    Rule("long-range", 0.0, 1.2, "farther away on average than equal weights are; factor ours"),
    Rule("broad", 0.0, 0.78, "entropy over 3.8 of ln 128 nats, 0.78 of what equal weights have (Clark et al. 2019)"),
)
NEAR = 3  # tokens to each side that are local


@dataclass
class Role:
    """A head's role: `score` against `least` and the `baseline`; `evidence` holds every score of the head, and `also`
    the other roles that would fit."""

    layer: str
    head: int
    role: str | None
    score: float | None = None
    baseline: float | None = None
    least: float | None = None
    also: list[str] = field(default_factory=list)
    evidence: dict[str, float] = field(default_factory=dict)


class Roles(list[Role], Shown):  # type: ignore[misc]
    """One for each head of each layer; `print` shows those that have a role, a notebook as a table."""

    __repr__ = Shown.__repr__
    layers: Sequence[str] = ()  # all that were watched, in the order of their calls

    def of(self, role: str) -> list[Role]:
        """The heads that have a role, the highest score first."""
        return sorted((one for one in self if one.role == role), key=lambda one: -(one.score or 0.0))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            layer, head = which
            for one in self:
                if one.layer == layer and one.head == head:
                    return one
            raise KeyError(f"no head {head} in layer {layer!r}")
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
        without = sum(one.role is None for one in self)
        return f"{len(self) - without} of {len(self)} heads have a role"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.caption()}"


def roles(record: Record, tokens: Sequence[str] | Sequence[Sequence[str]] | None = None) -> Roles:
    """Name the role of each head of self attention.

    Args:
        record: what `watch` saw, with the default measures (or entropy, distance, offsets, on_first and received).
        tokens: the text's tokens, in words, or a list of them for each item of the batch: by them separators and
            punctuation are known. By default `record.tokens`, where they are those of the text. Over many texts measure
            `measures.Tokens(heads.token_kinds(tokenizer))` instead.

    A role takes some queries that tell of it (`Rule.queries`). What could be looked at for another reason tells of
    nothing: induction and duplicate are told by copies that are neither next to the query nor the text's first token,
    separators and punctuation by those that are not its first token. Induction and duplicate need a text that repeats
    itself, such as `heads.probes` make.
    """
    words = {layer.name: tokens for layer in record} if tokens is not None else tokens_of(record, record.tokens)
    found = Roles()
    found.layers = record.layers
    for layer in record:
        if layer.kind != "self":
            continue
        scores = _scores(layer, words[layer.name])
        for head in range(layer.heads):
            own = {name: Score(*(x[head].item() for x in score)) for name, score in scores.items()}
            found.append(_role(layer.name, head, own))
    return found


def tokens_of(record: Record, tokens: Any) -> dict[str, list[list[str]] | None]:
    """The tokens of each layer's text, a list for each item of the batch, by the layer's name; None where `tokens` are
    not those. `tokens` are as `record.tokens`: a list, a list of lists, or a pair of such, of source and target."""
    pair = isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens)
    sides = list(tokens) if pair else [tokens, tokens]
    target = first_of_target(record)
    return {layer.name: _fitting(layer, sides[number >= target]) for number, layer in enumerate(record)}


def first_of_target(record: Record) -> int:
    """The number of a decoder's first layer, which looks across: the self attention before the first cross
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
    assert layer.text is not None
    batch, total = layer.text.shape[0], layer.text.total
    rows = [list(row) for row in tokens] if isinstance(tokens[0], (list, tuple)) else [list(tokens)]
    if len(layer.text.pieces) > 1:  # (the last token was written, not read)
        rows = [row[:-1] if len(row) == total + 1 else row for row in rows]
    fits = len(rows) == batch and all(len(row) == total or (batch > 1 and len(row) < total) for row in rows)
    return [[str(token) for token in row] for row in rows] if fits else None


class Score(NamedTuple):
    """What tells of a role: the score, that of equal weights, and how many queries these are means over. Of one head,
    or of all, (H,) each."""

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
    """For each role: the score of each head (H,), and that of equal weights."""
    uniform = layer.uniform
    if uniform is None:
        raise bad_value("roles", expected="a record with its baseline", received=f"none in {layer.name}")
    counts = layer.counts
    scores: dict[str, Score] = {}

    def add(name: str, ours: Tensor, even: Tensor, queries: Tensor) -> None:
        scores[name] = Score(ours, even.expand_as(ours), queries)

    ours, theirs = told_by(layer), told_by(uniform)
    renamed = {"on_first": "first", "distance": "long-range", "entropy": "broad"}
    for name, score in ours.items():
        if name in theirs:
            queries = counts.get(f"{name}_apart", counts.get(name, layer.count))
            add(renamed.get(name, name), score, theirs[name][:1], queries)
    offsets = next((one for one in layer.measures if isinstance(one, Offsets)), None)
    if offsets is not None and min(offsets.before, offsets.after) >= NEAR:
        near = slice(offsets.before - NEAR, offsets.before + NEAR + 1)
        profile, even = layer.per_head("offsets"), uniform.per_head("offsets")
        add("local", profile[:, near].sum(1), even[:1, near].sum(1), layer.count)
    if tokens is not None:
        if not layer.has("received"):
            raise bad_value("tokens", expected='a record that has measured "received"', received=", ".join(layer.axes))
        for name, columns in _columns(layer, tokens).items():
            add(name, _on(layer, columns), _on(uniform, columns)[:1], layer.count)
    scores = {name: score for name, score in scores.items() if any(rule.name == name for rule in ROLES)}
    if not scores:
        raise bad_value(
            "roles",
            expected="a record with the default measures, or others that tell of roles",
            received=", ".join(layer.axes) or "none",
            remedy="watch(model)",
        )
    return scores


def told_by(layer: LayerRecord) -> dict[str, Tensor]:
    """The measures of a layer that are one number per head, (H,), without what could be looked at for another reason:
    of copies those that stand apart, of classes of tokens what is not the text's first."""
    found = scalars(layer)
    for name in ("induction", "duplicate"):
        if name in found:
            apart = f"{name}_apart"
            found |= {name: layer.per_head(apart)} if layer.has(apart) else {}
    if layer.has("tokens_first"):
        names = next(one.names for one in layer.measures if isinstance(one, Tokens))
        rest = layer.per_head("tokens") - layer.per_head("tokens_first")
        found |= dict(zip(names, rest.clamp(min=0).unbind(1), strict=True))
    return found


def _columns(layer: LayerRecord, tokens: Any) -> dict[str, Tensor]:
    """Which keys (1|B, M) are separators, which are punctuation, but for the first token."""
    if layer.texts > 1:
        raise bad_value(
            "tokens",
            expected="one text, for they are its own",
            received=f"{layer.texts} texts",
            remedy="measures.Tokens(heads.token_kinds(tokenizer)) when watching",
        )
    assert layer.text is not None
    rows = [tokens] if tokens and isinstance(tokens[0], str) else list(tokens)
    if not all(isinstance(row, (list, tuple)) and all(isinstance(t, str) for t in row) for row in rows):
        raise bad_type("tokens", expected="a list of words, or a list of lists of them", received=f"{tokens!r:.60}")
    longest = layer.text.total
    alone = layer.text.shape[0] == 1  # (of several texts some are shorter, and padded)
    if len(rows) not in (1, layer.text.shape[0]) or any(len(r) > longest or (alone and len(r) < longest) for r in rows):
        raise bad_value(
            "tokens",
            expected=f"{longest} for each of {layer.text.shape[0]} texts",
            received=f"{[len(row) for row in rows]}",
        )
    padded = [_in_slots(row, layer.text, item) for item, row in enumerate(rows)]
    first = torch.zeros(len(rows), longest, dtype=torch.bool)
    hidden = layer.text.key_padding
    for item in range(len(rows)):
        first[item, 0 if hidden is None else int(hidden[item].int().argmin())] = True
    return {
        "separator": torch.tensor([[t in SEPARATORS for t in row] for row in padded]) & ~first,
        "punctuation": torch.tensor([[is_punctuation(t) for t in row] for row in padded]) & ~first,
    }


def _in_slots(row: Sequence[str], text: SequenceRecord, item: int) -> list[str]:
    """The tokens of one text as they lie among all keys, "" for padding: where there is some on the left, after it."""
    padding = None if text.key_padding is None else text.key_padding[item]
    if padding is not None and len(row) == int((~padding).sum()):
        words = iter(row)
        return ["" if hidden else next(words) for hidden in padding.tolist()]
    return [*row, *[""] * (text.total - len(row))]


def _on(layer: LayerRecord, columns: Tensor) -> Tensor:
    """The mean mass (H,) on some keys, from what each key received."""
    received = layer.last()["received"]  # (B, H, M)
    columns = columns.to(received.device)
    return (received * columns[:, None]).sum((0, 2)) / layer.last_tokens().sum((0, 2)).clamp(min=1)
