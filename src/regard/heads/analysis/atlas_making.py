"""Make an atlas: run a model over a treebank and over probes, and write down what each head does.

Letters: B batch, H query heads, N tokens.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.analysis import probes, treebank
from regard.heads.analysis.atlas import Atlas, Entry, sample_of
from regard.heads.analysis.evidence import Evidence, TokenFacts, evidence_of
from regard.heads.analysis.intervals import interval
from regard.heads.analysis.related_words import Related
from regard.heads.analysis.roles import CLASSES, ROLES, UNINFORMATIVE, Role, Rule, decide, roles, score_of
from regard.heads.analysis.syntax import Syntax, syntax
from regard.heads.analysis.syntax.run import context_of, find_tokenizer, shuffled_copy
from regard.heads.analysis.syntax.texts import TokenizedText, batches_of_one_length, tokenized
from regard.heads.analysis.token_classes import is_punctuation, looks_special
from regard.heads.analysis.token_facts import same_word
from regard.heads.analysis.treebank import Sentence
from regard.heads.progress import track
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating

__all__ = ["make_atlas"]

OTHER = "of another sentence: "  # prefix of the classes that belong to another sentence
ANSWER = 3  # tokens of an answer in the probe of retrieval
LENGTH = 40  # random tokens of a probe, before they are repeated
MOSTLY = 0.6  # the share from which a position says more of a head than a relation of syntax
SHUFFLED = 300  # sentences that are read with shuffled weights
_RULES: dict[str, Rule] = {rule.name: rule for rule in ROLES}
_POSITIONS = ("previous", "next", "itself")


def make_atlas(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
    seed: int = 0,
    name: str = "",
) -> Atlas:
    """What each head of a model does, over the sentences of a treebank and over probes.

    Roles by position, copies and classes are shares of what is left beside the resting place, over all sentences; those
    of syntax are `heads.syntax`; induction is probed by repeated random tokens, too. `made` has the controls: how many
    heads have a role with shuffled weights, how many roles of word classes there are with the classes of another
    sentence, and how many roles agree between two halves of the sentences.

    Args:
        model: any torch model that `regard.watch` sees, called with ids (B, N) alone.
        path: a CoNLL-U file.
        tokenizer, limit, batch_size, progress, seed: as for `heads.syntax`.
        name: of the model; by default its own.
    """
    tokenizer = find_tokenizer(model, tokenizer)
    sentences = treebank.read(path, limit)
    texts = [(s, tokenized(tokenizer, [s], [])) for s in sentences]
    longest = context_of(model, tokenizer)
    texts = [(s, text) for s, text in texts if 3 <= len(text.ids) <= longest]
    if not texts:
        raise bad_value(os.fspath(path), expected="at least one sentence that the model reads", received="none")
    with evaluating(model):
        related = Related.of(model, texts)  # (of the shuffled model, too: embeddings of it would be noise)
        layers, halves = _evidence(model, tokenizer, texts, related, batch_size, track_as("sentences", progress))
        random = shuffled_copy(model, seed)
    bar = track_as("sentences, shuffled", progress)
    _, by_chance = _evidence(random, tokenizer, texts[:SHUFFLED], related, batch_size, bar)
    grammar = syntax(model, path, tokenizer=tokenizer, limit=limit, batch_size=batch_size, progress=progress, seed=seed)
    whole = [a + b for a, b in zip(*halves, strict=True)]
    decided = [decide(layer, evidence) for layer, evidence in zip(layers, whole, strict=True)]
    probed, chance = probe_entries(model, tokenizer, progress), _by_chance(by_chance)
    entries = [
        [_entries(role, evidence, grammar, probed, chance) for role in of_layer]
        for of_layer, evidence in zip(decided, whole, strict=True)
    ]
    rests = [[(1 - role.rest, role.output, role.rests_on or "") for role in of_layer] for of_layer in decided]
    made = {
        "treebank": os.path.basename(os.fspath(path)),
        "sentences": len(texts),
        "tokens": sum(len(text.ids) for _, text in texts),
        "seed": seed,
        "regard": metadata.version("regard"),
        "torch": torch.__version__,
        **_controls(layers, halves, by_chance, grammar),
    }
    return Atlas(name or getattr(model, "name", ""), layers, entries, rests, made, sample_of(model))


def track_as(what: str, progress: bool) -> Callable[[list[list[int]]], Iterable[list[int]]]:
    """`track` with a label."""
    return functools.partial(track, what=what, progress=progress)


def _evidence(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[tuple[Sentence, TokenizedText]],
    related: Related | None,
    batch_size: int,
    tracked: Callable[[list[list[int]]], Iterable[list[int]]],
) -> tuple[list[str], tuple[list[Evidence], list[Evidence]]]:
    """The layers of self attention, and the evidence of each, for two halves of the texts: every other batch."""
    totals: tuple[dict[str, Evidence], dict[str, Evidence]] = ({}, {})
    device = next((parameter.device for parameter in model.parameters()), None)
    batches = batches_of_one_length([text._replace(questions=[None]) for _, text in texts], batch_size)  # type: ignore[list-item]
    batches = [half for batch in batches for half in (batch[::2], batch[1::2]) if half]
    sizes = [0, 0]
    for batch in tracked(batches):
        of_half = int(sizes[1] < sizes[0])  # the smaller one
        sizes[of_half] += len(batch)
        ids = torch.tensor([texts[i][1].ids for i in batch], device=device)
        facts = _facts(tokenizer, [texts[i] for i in batch], ids, related)
        with torch.no_grad(), watch(model, measures=[], keep="qkv") as seen:
            model(ids)
        shared: dict[Any, Any] = {}
        for layer in seen:
            if layer.kind == "self" and layer.text is not None and layer.shape[2:] == (ids.shape[1],) * 2:
                found, total = evidence_of(layer.text, facts, shared), totals[of_half].get(layer.name)
                totals[of_half][layer.name] = found if total is None else total + found
    first, second = totals
    if not first or not second:
        raise bad_value("texts", expected="at least two sentences", received=len(texts))
    layers = [name for name in first if name in second]
    return layers, ([first[name] for name in layers], [second[name] for name in layers])


def _facts(
    tokenizer: Any, texts: Sequence[tuple[Sentence, TokenizedText]], ids: Tensor, related: Related | None
) -> TokenFacts:
    """What a treebank and a tokenizer know of sentences of one length."""
    words = [text.words_of_tokens for _, text in texts]
    read = getattr(tokenizer, "id_to_token", None) or tokenizer.convert_ids_to_tokens
    tokens = [[read(number) or "" for number in text.ids] for _, text in texts]
    tags = [
        ["" if word < 0 else sentence.words[word].upos for word in text.words_of_tokens] for sentence, text in texts
    ]
    device = ids.device
    # What belongs to no word is special, or a space, or punctuation that the treebank's words left out.
    special = torch.tensor(
        [
            [word < 0 and looks_special(t) for word, t in zip(*row, strict=True)]
            for row in zip(words, tokens, strict=True)
        ],
        device="cpu",
    )
    classes = {
        name: torch.tensor([[tag == upos for tag in row] for row in tags], device="cpu")
        for upos, name in CLASSES.items()
    }
    if len(texts) > 1:
        classes |= {OTHER + name: which.roll(1, 0) for name, which in classes.items()}
    classes["punctuation"] = torch.tensor([[is_punctuation(token) for token in row] for row in tokens], device="cpu")
    classes = {name: which.to(device) for name, which in classes.items()}
    pairs = {} if related is None else related.of_texts(texts, OTHER)
    return TokenFacts(special.to(device), classes, same_word(words, ids.shape[1], device), pairs)


def probe_entries(model: nn.Module, tokenizer: Any, progress: bool = True) -> dict[tuple[str, int], list[Entry]]:
    """What probes say of heads, by layer and head: induction on repeated random tokens; of decoders, retrieval."""
    words = tokenizer.get_vocab_size() if hasattr(tokenizer, "get_vocab_size") else len(tokenizer)
    if words <= 2 * LENGTH:
        return {}
    ids = probes.repeated(words, length=LENGTH, batch=4)
    device = next((parameter.device for parameter in model.parameters()), None)
    with evaluating(model), torch.no_grad(), watch(model, measures=[], keep="qk") as seen:
        model(ids.to(device))
    entries: dict[tuple[str, int], list[Entry]] = {}
    for role in roles(seen, atlas=False):
        if role.role == "induction":
            score, baseline, low, high = (float(x or 0.0) for x in (role.score, role.baseline, role.low, role.high))
            entry = Entry("induction", score, baseline, low, high, ids.shape[0] * LENGTH, "probe", role.clear)
            entries[role.layer, role.head] = [entry]
    causal = not any(layer.weights(batch=0).triu(1).any() for layer in seen if layer.kind == "self")
    if causal:
        found, rule = probes.retrieval(model, tokenizer, progress=progress), _RULES["retrieval"]
        n = ANSWER * len(found.runs)
        for layer, head, score in found.rows():
            baseline = float(found.baseline[layer][head])
            if score >= rule.least and score >= rule.over_baseline * baseline:
                numbers = score, baseline, *interval(score, n)
                entry = Entry("retrieval", *numbers, n, "probe", score >= rule.clear)
                entries.setdefault((layer, head), []).append(entry)
    return entries


def _by_chance(shuffled: tuple[list[Evidence], list[Evidence]]) -> dict[str, float]:
    """The largest share of each role that a head with shuffled weights has."""
    whole = [a + b for a, b in zip(*shuffled, strict=True)]
    names = {name for evidence in whole for name in evidence.roles}
    return {
        name: max(float((x[0] / x[2].clamp(min=1e-9)).max()) for e in whole if (x := e.roles.get(name)) is not None)
        for name in names
    }


def _entries(
    role: Role,
    evidence: Evidence,
    grammar: Syntax,
    probed: dict[tuple[str, int], list[Entry]],
    chance: dict[str, float],
) -> list[Entry]:
    """What a head does, in order."""
    names = [role.role, *role.also] if role.role is not None else []
    sums = {name: values[:, role.head].tolist() for name, values in evidence.roles.items()}
    entries = []
    for name in names:
        if name in sums and not name.startswith(OTHER):
            found = _share(name, *sums[name])
            rule = _RULES[name]
            clear = found.score >= rule.clear and found.score >= rule.clear_over * found.baseline
            entries.append(replace(found, clear=clear, shuffled=chance.get(name)))
    of_probes = probed.get((role.layer, role.head), [])
    entries = [entry for entry in entries if entry.role not in {other.role for other in of_probes}] + of_probes
    for row in grammar.syntactic:
        if (row.layer, row.head) == (role.layer, role.head):
            assert row.role is not None
            numbers = row.accuracy, row.baseline, row.low, row.high, row.n
            where = row.relation, row.direction
            entries.append(Entry(row.role, *numbers, "syntax", True, *where, shuffled=row.shuffled))
    return in_order(entries)


def in_order(entries: list[Entry]) -> list[Entry]:
    """The most telling first: copies, a position that is most of it, syntax, what else is clear, the rest."""
    order = {name: i for i, name in enumerate(_RULES)}
    return sorted(entries, key=lambda entry: (_rank(entry), order.get(entry.role, 0), -entry.score))


def _rank(entry: Entry) -> int:
    """How telling an entry is: 0 is the most."""
    if entry.role in UNINFORMATIVE:
        return 5
    if entry.role in ("induction", "duplicate", "retrieval") and entry.clear:
        return 0
    if (entry.role in _POSITIONS or entry.role.startswith("offset")) and entry.score >= MOSTLY:
        return 1
    if entry.source == "syntax":
        return 2
    return 3 if entry.clear else 4


def _share(name: str, mass: float, uniform: float, left: float, queries: float) -> Entry:
    found = score_of(name, mass, uniform, left, queries)
    return Entry(name, found.score, found.baseline, found.low, found.high, int(left))


def _controls(
    layers: list[str],
    halves: tuple[list[Evidence], list[Evidence]],
    shuffled: tuple[list[Evidence], list[Evidence]],
    grammar: Syntax,
) -> dict[str, Any]:
    """What there is to distrust: roles with shuffled weights, roles with another sentence's classes, and halves that
    differ."""
    one, two = ([role for pair in zip(layers, half, strict=True) for role in decide(*pair)] for half in halves)
    both = [(a, b) for a, b in zip(one, two, strict=True) if a.informative or b.informative]
    agree = sum(a.role == b.role or a.role in b.also or b.role in a.also for a, b in both)
    whole = [a + b for a, b in zip(*halves, strict=True)]
    random = [role for layer, a, b in zip(layers, *shuffled, strict=True) for role in decide(layer, a + b)]
    crossed = [role for pair in zip(layers, map(_of_others, whole), strict=True) for role in decide(*pair)]
    return {
        "shuffled": sum(role.informative for role in random),
        "other_sentences": sum(role.informative for role in crossed),
        "other_sentences_syntax": grammar.crossed,
        "halves_agree": f"{agree} of {len(both)}",
        "halves_same": f"{sum(a.role == b.role for a, b in both)} of {len(both)}",
    }


def _of_others(evidence: Evidence) -> Evidence:
    """The evidence with the classes of other sentences in the place of a sentence's own."""
    classes = {name.removeprefix(OTHER): x for name, x in evidence.roles.items() if name.startswith(OTHER)}
    return replace(evidence, roles=classes)
