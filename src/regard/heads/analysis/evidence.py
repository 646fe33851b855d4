"""What heads do beside their resting place: the evidence that roles are decided by.

Most heads rest on a few keys (the first token, special tokens, another sink) when they have nothing to say. Here these
keys are set aside: the attention of a text is computed again with them hidden, so that the softmax renormalises what is
left, and each query counts by what it has left. The same is computed of uniform attention, with the same keys hidden.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, K numbers per query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import measure_call, plane_of
from regard.heads.record.chunk_plane import known_of_padding
from regard.heads.record.sequences import SequenceRecord, weights_of
from regard.heads.record.shared_planes import mask_key
from regard.kernels import Call
from regard.masks import Hide, Keep
from regard.measures import (
    Distance,
    Duplicate,
    Entropy,
    Induction,
    Measure,
    MeasureRun,
    Near,
    Pairs,
    PairSets,
    Plane,
    Received,
    Strip,
    Tokens,
)
from regard.measures.base import NO_TOKEN

__all__ = ["BEFORE", "Evidence", "TokenFacts", "evidence_of"]

BEFORE = AFTER = 8  # offsets to each side that may be a role
NEAR = 3  # tokens to each side that are local
SINK = 0.3  # the mean weight of a key over the queries that see it, from which it is a sink (Gu et al. 2024)
LEFT = 0.01  # of a query's mass beside the resting place, from which it is counted
LEAST_QUERIES = 8  # that must see a key if it is to be a sink: of fewer, its neighbours are most


class TokenFacts(NamedTuple):
    """What is known of the tokens of a text besides their ids."""

    special: Tensor | None = None  # (1|B, M) True for special tokens
    classes: Mapping[str, Tensor] = {}  # (1|B, M) True for the tokens of a class
    same_word: Tensor | None = None  # (1|B, N, K) the other tokens of each token's word; -1 for none
    related: Mapping[str, tuple[Tensor, Tensor]] = {}  # content words and those of them that are related: (1|B, N, K)


@dataclass
class Evidence:
    """Sums over the queries of one or more texts, for each head. Texts are added by `+`.

    Attributes:
        roles: for each role (4, H): the mass on it among what is left; that of uniform attention; all that is left; and
            how many queries are counted. For "broad" and "long-range" nats and tokens in the place of masses.
        resting: (5, H): the number of queries, and their mass on the first token, on special tokens, on sinks
            elsewhere, and on what is left.
        output: (2, H): the norm-weighted output of all keys, and of those that are set aside.
        aside: (B, H, M) True for the keys that were set aside, of one text; None of several, or of a file.
    """

    roles: dict[str, Tensor]
    resting: Tensor
    output: Tensor
    aside: Tensor | None = None

    def __add__(self, other: Evidence) -> Evidence:
        names = dict.fromkeys([*self.roles, *other.roles])
        nothing = torch.zeros_like(self.resting[:4])
        roles = {name: self.roles.get(name, nothing) + other.roles.get(name, nothing) for name in names}
        return Evidence(roles, self.resting + other.resting, self.output + other.output)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, as a record's file has it."""
        named = {f"role.{name}": values for name, values in self.roles.items()}
        named |= {"resting": self.resting, "output": self.output}
        return {f"evidence/{name}": values for name, values in named.items()}

    @property
    def rest(self) -> Tensor:
        """The share of a head's mass (H,) that is not on its resting place."""
        return self.resting[4] / self.resting[0].clamp(min=1)


def evidence_of(text: SequenceRecord, facts: TokenFacts, shared: dict[Any, Any] | None = None) -> Evidence:
    """The evidence in one text (or a batch of texts), whose q and k were kept. `shared`: a dict for the layers of one
    text, which keep there what they have in common: uniform attention."""
    reader = _Reader(text, {} if shared is None else shared, (id(facts), _address(text.ids)))
    first = reader.first  # (1|B, M)
    special = torch.zeros_like(first) if facts.special is None else facts.special.to(first.device)
    counts = reader.tokens & ~special[:, special.shape[1] - reader.queries :]  # (1|B, N) queries
    special = special & ~first
    plain = reader.watched(special) or reader.measured([Received(), Tokens({"first": first, "special": special})], None)
    received = plain.values["received"]
    sinks = reader.sinks(received, first | special)
    fixed = (first | special)[:, None]  # (1|B, 1, M)
    hidden = fixed | sinks if sinks.any() else fixed

    measures = [Near(BEFORE, AFTER), Entropy(), Distance(), *_copies(text)]
    measures += [] if facts.same_word is None else [Pairs(facts.same_word)]
    measures += [PairSets([keys for pair in facts.related.values() for keys in pair])] if facts.related else []
    names = list(facts.classes)
    members = {name: which.to(first.device) & ~first & ~special for name, which in facts.classes.items()}
    classes: list[Measure] = [Tokens(members)] if members else []
    # A class is measured with its sinks: a head may rest on a full stop because it is punctuation.
    together = bool(names) and hidden is fixed
    found = _Shares(reader, hidden, counts, measures + (classes if together else []))
    roles = _positions(found) | found.copied() | found.averages()
    if facts.same_word is not None:
        roles["same word"] = _beyond_position(roles["same word"], facts.same_word, found, reader)
    roles |= {name: found.among(2 * i, 2 * i + 1, keys) for i, (name, (_, keys)) in enumerate(facts.related.items())}
    if names:
        of_classes = found if together else _Shares(reader, fixed, counts, classes)
        sums = of_classes.sums_of_each(of_classes.values["tokens"], of_classes.uniform["tokens"])
        roles |= dict(zip(names, sums, strict=True))
    resting = _resting(plain, found, counts)
    aside = hidden.expand(reader.batch, reader.heads, -1)
    return Evidence(roles, resting, reader.output(received, hidden), aside)


def _copies(text: SequenceRecord) -> list[Measure]:
    """Induction and duplicate, where the token ids are known."""
    ids = text.ids
    if ids is None or ids.shape[1] != text.total:
        return []
    if text.key_padding is not None:
        ids = ids.expand(text.shape[0], -1).masked_fill(text.key_padding, NO_TOKEN)
    return [Induction(ids), Duplicate(ids)]


def _positions(found: _Shares) -> dict[str, Tensor]:
    """The sums of roles by relative position."""
    near, uniform = found.values["near"], found.uniform["near"]
    names = {-1: "previous", 0: "itself", 1: "next"}
    sums = zip(range(-BEFORE, AFTER + 1), found.sums_of_each(near, uniform), strict=True)
    roles = {names.get(offset, f"offset {offset:+d}"): of_offset for offset, of_offset in sums}
    local = slice(BEFORE - NEAR, BEFORE + NEAR + 1)
    roles["local"] = found.sums(near[..., local].sum(-1), uniform[..., local].sum(-1))
    return roles


def _beyond_position(sums: Tensor, keys: Tensor, found: _Shares, reader: _Reader) -> Tensor:
    """The sums (4, H) of given pairs (1|B, N, K), whose baseline is the larger of uniform attention and of what the
    head's own offsets explain: a head that attends to the token before finds pieces of the same word, too."""
    near, weight = found.values["near"], found.weight
    profile = (near * weight[..., None]).sum((0, 2)) / weight.sum((0, 2)).clamp(min=1e-30)[:, None]  # (H, offsets)
    slots = torch.arange(reader.keys - reader.queries, reader.keys, device=keys.device)
    places = keys - slots[:, None] + BEFORE  # (1|B, N, K)
    inside = (keys >= 0) & (places >= 0) & (places <= BEFORE + AFTER)
    expected = (profile[:, places.clamp(0, BEFORE + AFTER)] * inside).sum(-1).transpose(0, 1)  # (1|B, H, N)
    explained = (expected * weight * found.counts["pairs"]).sum((0, 2))
    return torch.stack([sums[0], torch.maximum(sums[1], explained), sums[2], sums[3]])


def _resting(plain: _Measured, found: _Shares, counts: Tensor) -> Tensor:
    weight = counts[:, None].to(plain.mass.dtype)  # (1|B, 1, N)
    on = plain.values["tokens"]  # (B, H, N, 2)
    parts = on[..., 0], on[..., 1], found.left
    first, special, left = ((part * weight).sum((0, 2)) for part in parts)
    queries = weight.expand_as(plain.mass).sum((0, 2))
    mass = plain.mass.mul(weight).sum((0, 2))
    learned = queries - mass  # of layers with learned sinks
    return torch.stack([queries, first, special, (mass - first - special - left).clamp(min=0) + learned, left])


class _Measured(NamedTuple):
    """Measures of a text, some of whose keys may be hidden."""

    values: dict[str, Any]
    counts: dict[str, Tensor]  # which queries count, for some of them: (B, H, N)
    mass: Tensor  # (B, H, N): what the visible keys have of the whole text's mass


class _Shares:
    """What heads do with what is left, and what uniform attention does, where some keys are hidden: (1|B, 1|H, M)."""

    def __init__(self, reader: _Reader, hidden: Tensor, counts: Tensor, measures: list[Measure]) -> None:
        measured, uniform = reader.measured(measures, hidden), reader.uniform(measures, hidden)
        self.values, self.uniform, self.counts = measured.values, uniform.values, measured.counts
        self.left = measured.mass  # (B, H, N)
        self.weight = self.left * counts[:, None]  # (B, H, N): what each query counts

    def sums(self, mass: Tensor, uniform: Tensor, counted: Tensor | None = None) -> Tensor:
        """(4, H): mass, that of uniform attention, what is left, queries; of numbers per query (B, H, N)."""
        weight = self.weight if counted is None else self.weight * counted
        parts = weight * mass, weight * uniform, weight, (weight > LEFT).to(weight.dtype)
        return torch.stack([part.sum((0, 2)) for part in parts])

    def sums_of_each(self, mass: Tensor, uniform: Tensor) -> list[Tensor]:
        """`sums` of each of K numbers per query, (B, H, N, K)."""
        heads = self.weight.transpose(0, 1).flatten(1)[:, None]  # (H, 1, B * N)
        parts = [
            (heads @ x.expand(*self.weight.shape, -1).transpose(0, 1).flatten(1, 2))[:, 0] for x in (mass, uniform)
        ]  # (H, K) each
        left, queries = heads[:, 0].sum(1), (heads[:, 0] > LEFT).to(heads.dtype).sum(1)
        return [torch.stack([a, b, left, queries]) for a, b in zip(*(part.unbind(1) for part in parts), strict=True)]

    def copied(self) -> dict[str, Tensor]:
        """Induction and duplicate, without copies next to the query; the other tokens of a query's word."""
        names = {"induction_apart": "induction", "duplicate_apart": "duplicate", "pairs": "same word"}
        return {
            role: self.sums(self.values[name], self.uniform[name], self.counts[name])
            for name, role in names.items()
            if name in self.values
        }

    def among(self, candidates: int, chosen: int, keys: Tensor) -> Tensor:
        """(4, H): the mass on some pairs, number `chosen` of the sets (1|B, N, K), as a share of that on candidates;
        for the queries that have any."""
        sets, uniform = self.values["pair_sets"], self.uniform["pair_sets"]
        asked = (keys >= 0).any(-1)[:, None].to(sets.device)
        weight = self.weight * asked * sets[..., candidates]
        mass = sets[..., chosen] / sets[..., candidates].clamp(min=1e-30)
        even = uniform[..., chosen] / uniform[..., candidates].clamp(min=1e-30)
        parts = weight * mass, weight * even, weight, (weight > LEFT).to(weight.dtype)
        return torch.stack([part.sum((0, 2)) for part in parts])

    def averages(self) -> dict[str, Tensor]:
        """Entropy and distance."""
        names = {"entropy": "broad", "distance": "long-range"}
        return {role: self.sums(self.values[name], self.uniform[name]) for name, role in names.items()}


class _Reader:
    """Computes measures of a text from the q and k that were kept."""

    def __init__(self, text: SequenceRecord, shared: dict[Any, Any], key: Any) -> None:
        self.text, only, self.shared, self.key = text, text.pieces[0], shared, key
        self.batch, self.heads, self.queries, self.keys = *text.shape, text.queries, text.total
        self.device = only.found.seen.device
        numbers = torch.arange(self.keys, device=self.device)
        self.known = known_of_padding(text, text.padding, numbers)
        self.call: Call | None = None
        if len(text.pieces) == 1 and only.call is not None and text.keys:
            self.call = replace(only.call, k=text.keys[0], v=text.keys[0])
            self.plane = replace(plane_of(self.call), **self.known)
        else:
            start = max(self.keys - self.queries, 0)
            rows = torch.arange(start, start + self.queries, device=self.device)
            dtype = only.call.dtype if only.call is not None else torch.float32
            self.plane = Plane(
                self.batch, self.heads, self.queries, self.keys, rows[None], numbers[None], dtype, **self.known
            )
        self.lse: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """Which key is the text's first token: (1|B, M)."""
        return self.plane.is_first

    @property
    def tokens(self) -> Tensor:
        """Which queries are no padding: (1|B, N)."""
        padding = self.plane.padding
        none = torch.zeros(1, self.queries, dtype=torch.bool, device=self.device)
        return ~(none if padding is None else padding)

    def watched(self, special: Tensor) -> _Measured | None:
        """What the watch has measured already: mass received, mass on the first token and on special tokens (1|B, M),
        where there are none. None if something has to be computed."""
        found = self.text.pieces[0].found
        names = ("received", "on_first")
        if self.call is None or found.lse is None or special.any() or any(name not in found.values for name in names):
            return None
        received, first = (found.values[name] for name in names)
        self.lse = found.lse
        values = {"received": received, "tokens": torch.stack([first, torch.zeros_like(first)], -1)}
        return _Measured(values, {}, self._mass(self.call, found.lse, found.seen))

    def _mass(self, call: Call, lse: Tensor, seen: Tensor) -> Tensor:
        """What keys have of the whole mass, (B, H, N): 1, or what learned sinks leave."""
        return seen.to(lse.dtype) if call.sinks is None else _mass_beside_sinks(call, lse)

    def measured(self, measures: list[Measure], hidden: Tensor | None) -> _Measured:
        """Measures of the heads' weights, renormalised over the keys that are not hidden: (1|B, 1|H, M)."""
        if self.call is None:
            return self._by_strips(measures, hidden, uniform=False)
        call = self.call if hidden is None else replace(_hiding(self.call, hidden), sinks=None)
        found = measure_call(call, measures, plane=replace(self.plane))
        assert found.lse is not None
        if hidden is None:
            self.lse = found.lse
            mass = self._mass(call, found.lse, found.seen)
        else:
            assert self.lse is not None
            mass = (found.lse - self.lse).exp().nan_to_num(0.0) * found.seen
        return _Measured(found.values, found.counts, mass)

    def uniform(self, measures: list[Measure], hidden: Tensor) -> _Measured:
        """The same of equal weights on all keys that are visible and not hidden."""
        call = self.call
        if call is None:
            return self._by_strips(measures, hidden, uniform=True)
        if call.mask is not None and not call.mask.shared_by_heads():
            return self._uniform(call, measures, hidden.expand(-1, self.heads, -1))
        # Heads with the same sinks share it, and so do layers.
        patterns, number = hidden.unique(dim=1, return_inverse=True)
        kinds = tuple(type(measure) for measure in measures)
        key = (self.key, mask_key(call.mask), call.q_start, self.plane.k_positions.shape, kinds)
        key = (*key, patterns.shape, patterns.cpu().numpy().tobytes())
        if key not in self.shared:
            self.shared[key] = self._uniform(call, measures, patterns)
        found: _Measured = self.shared[key]
        if patterns.shape[1] == 1:
            return found
        of_heads = {name: x[:, number] for name, x in found.values.items()}
        return _Measured(of_heads, {name: x[:, number] for name, x in found.counts.items()}, found.mass[:, number])

    def _uniform(self, call: Call, measures: list[Measure], hidden: Tensor) -> _Measured:
        """Measures of equal weights, for each pattern of hidden keys (1|B, H, M) a head."""
        heads, mask = hidden.shape[1], call.mask
        q = torch.zeros(self.batch, heads, self.queries, 1, dtype=call.dtype, device=self.device)
        k = torch.zeros(self.batch, heads, self.keys, 1, dtype=call.dtype, device=self.device)
        even = replace(call, q=q, k=k, v=k, scale=1.0, softcap=None, biases=(), sinks=None, mask=mask)
        plane = replace(self.plane, heads=heads)
        found = measure_call(_hiding(even, hidden), measures, plane=plane)
        return _Measured(found.values, found.counts, found.seen.to(call.dtype))

    def _by_strips(self, measures: list[Measure], hidden: Tensor | None, uniform: bool) -> _Measured:
        """The same for attention that was read in chunks, or written by hand."""
        run = MeasureRun(measures, replace(self.plane))
        mass = torch.zeros(self.batch, self.heads, self.queries, dtype=self.plane.dtype, device=self.device)
        for strip in self._strips(uniform):
            weights = strip.weights
            if hidden is not None:
                weights = weights.masked_fill(hidden[..., strip.columns][:, :, None], 0.0)
            left = weights.sum(-1)
            mass[strip.where] = left
            if hidden is not None:
                weights, left = weights / left.clamp(min=1e-30)[..., None], (left > 0).to(left.dtype)
            run.add(replace(strip, weights=weights, mass=left))
        found = run.result()
        return _Measured(found.values, found.counts, mass)

    def _strips(self, uniform: bool) -> Iterator[Strip]:
        """The weights of the text, some rows at a time."""
        text, at = self.text, 0
        keys = torch.cat(text.keys, 2) if text.keys else None
        for piece in text.pieces:
            if uniform and piece.call is not None:
                even = replace(piece.call, q=piece.call.q * 0, softcap=None, biases=(), sinks=None)
                piece = replace(piece, call=even)
            step = max(1, 2**22 // max(1, self.batch * self.heads * piece.numbers.numel()))
            for row in range(0, piece.queries, step):
                rows = slice(row, min(row + step, piece.queries))
                weights = weights_of(piece, keys, slice(None), list(range(self.heads)), rows).to(self.plane.dtype)
                if uniform and piece.call is None:
                    weights = (weights > 0).to(weights.dtype)
                    weights /= weights.sum(-1, keepdim=True).clamp(min=1)
                sides = slice(0, self.batch), slice(0, self.heads), slice(at + rows.start, at + rows.stop)
                yield Strip(self.plane, *sides, piece.runs, weights, weights.sum(-1))
            at += piece.queries

    def sinks(self, received: Tensor, fixed: Tensor) -> Tensor:
        """Keys (B, H, M) other than the fixed ones (1|B, M) that take most of the queries' mass."""
        queries = self.queries_of_keys() if self.call is None else self._shared_queries(self.call)
        return (received > SINK * queries) & (queries >= LEAST_QUERIES) & ~fixed[:, None]

    def _shared_queries(self, call: Call) -> Tensor:
        """`queries_of_keys`, once for layers with the same mask."""
        key = ("queries", self.key, mask_key(call.mask), call.q_start, self.batch, self.queries, self.keys)
        if key not in self.shared:
            self.shared[key] = self.queries_of_keys()
        return self.shared[key]

    def queries_of_keys(self) -> Tensor:
        """How many queries, padding left out, may see each key: (1|B, 1|H, M)."""
        counted = self.tokens[:, None, :, None]
        if self.call is None:
            total = torch.zeros(self.batch, self.heads, self.keys, device=self.device)
            for strip in self._strips(uniform=True):
                seen = (strip.weights > 0) & counted[:, :, strip.rows]
                total[..., strip.columns] += seen.sum(2)
            return total
        mask = self.call.mask
        if mask is None:
            return self.tokens.sum(1).view(-1, 1, 1).expand(-1, 1, self.keys)
        total = 0
        step = max(1, 2**24 // max(1, self.batch * self.keys))
        for row in range(0, self.queries, step):
            rows = slice(row, min(row + step, self.queries))
            seen = mask.block(self.call.tile(slice(0, self.batch), rows, slice(0, self.keys)))
            seen = seen.expand(*seen.shape[:2], rows.stop - rows.start, self.keys) & counted[:, :, rows]
            total = total + seen.sum(2)
        assert isinstance(total, Tensor)
        return total

    def output(self, received: Tensor, hidden: Tensor) -> Tensor:
        """(2, H): what all keys add to the heads' outputs, each by the norm of its value (after the head's slice of the
        output projection, where it is known), and what the hidden ones add. 0 where values are not known."""
        text = self.text
        if not text.values:
            return received.new_zeros(2, self.heads)
        values = torch.cat(text.values, 2).to(received.dtype)  # (B, G, M, E)
        shared = self.heads // values.shape[1]
        projection = text.pieces[0].projection
        weight = None if projection is None or not projection.plain else projection.weight
        if weight is None or weight.shape[1] != self.heads * values.shape[3]:
            norms = values.norm(dim=-1).repeat_interleave(shared, 1)  # (B, H, M)
        else:
            slices = weight.detach().to(values.dtype).unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # (H, E, W)
            gram = (slices @ slices.mT).unflatten(0, (-1, shared))  # (G, H / G, E, E)
            of_heads = values[:, :, None] @ gram  # (B, G, H / G, M, E)
            norms = (of_heads * values[:, :, None]).sum(-1).clamp(min=0).sqrt().flatten(1, 2)
        added = received * norms
        return torch.stack([added.sum((0, 2)), (added * hidden).sum((0, 2))])


def _address(ids: Tensor | None) -> Any:
    return None if ids is None else (ids.data_ptr(), ids.shape)


def _hiding(call: Call, hidden: Tensor) -> Call:
    """The same attention without some keys: (1|B, 1|H, M)."""
    mask, hide = call.mask, Hide(hidden[:, :, None])
    if isinstance(mask, Keep) and mask.tensor.numel() * hidden.shape[1] <= 2**24:  # one dense mask is quicker than two
        visible = mask.tensor if mask.sense else ~mask.tensor
        return replace(call, mask=Keep(visible & ~hidden[:, :, None]))
    return replace(call, mask=hide if mask is None else mask & hide)


def _mass_beside_sinks(call: Call, lse: Tensor) -> Tensor:
    """What keys have of the mass (B, H, N) where a layer has learned sinks."""
    assert call.sinks is not None
    return (1 - (call.sinks[..., None].to(lse.dtype) - lse).exp()).clamp(min=0).nan_to_num(0.0)
