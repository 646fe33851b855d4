"""`syntax`: read a treebank, run the model and its shuffled copy over it, count and report."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.analysis import treebank
from regard.heads.analysis.syntax.questions import (
    Pair,
    Question,
    coreference_questions,
    dependency_questions,
    mention_heads,
    questions_from_pairs,
)
from regard.heads.analysis.syntax.report import Halves, Syntax, report
from regard.heads.analysis.syntax.scores import Tally, without_sinks, word_weights
from regard.heads.analysis.syntax.texts import (
    TokenizedText,
    batches_of_one_length,
    passages,
    questions_of_others,
    tokenized,
)
from regard.heads.analysis.treebank import Sentence
from regard.heads.module_names import CONTEXT_LENGTHS
from regard.heads.progress import track
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating

__all__ = [
    "PASSAGE",
    "check_arguments",
    "context_of",
    "count_answers",
    "find_tokenizer",
    "random_halves",
    "shuffled_copy",
    "syntax",
]

PASSAGE = 256  # coreference crosses sentences: a document is read in passages of at most so many tokens


def syntax(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
    seed: int = 0,
    pairs: Sequence[Sequence[Pair]] | None = None,
) -> Syntax:
    """Which heads of a model follow the relations of a treebank (Clark et al. 2019), and which baselines do as well.

    For each relation and direction the head is chosen on one half of the sentences, drawn by `seed`, and reported on
    the other half. Two baselines are chosen and reported in the same way: the best fixed offset ("the next word"), and
    the best head of the same model with the entries of each weight matrix shuffled. A head is syntactic, and has a
    role, if the low end of its 95 % interval is at least 10 points over the best offset (Voita et al. 2019), and over
    the shuffled model. Heads other than the best need the margin on both halves. Special tokens, the first token and
    other sinks of a head are no candidates. Heads of a decoder, and offsets beside them, are asked only what has an
    answer before the word.
    Coreference, if the file marks entities (CorefUD's brackets): the share of mentions whose head word attends most,
    among the head words of earlier mentions, to an antecedent; its baseline is the nearest mention.
    `heads.coreference` tells pronouns and nouns apart.

    Args:
        model: any torch model that `regard.watch` sees, called with ids (B, N) alone. It is left as it is; a copy with
            shuffled weights is made beside it.
        path: a CoNLL-U file.
        tokenizer: a `tokenizers.Tokenizer` or a fast tokenizer of transformers; by default the model's own.
        limit: read only the first `limit` sentences.
        batch_size: the largest number of texts computed at once; a batch holds texts of one length.
        progress: show a progress bar on a terminal (with rich, of the extra "cli").
        seed: for the halves and the shuffled weights.
        pairs: coreference within sentences, instead of the file's: for each sentence a list of (head word of a mention,
            head words of its antecedents, head words of all candidates), words numbered from 0.
    """
    check_arguments(model, batch_size, seed)
    tokenizer = find_tokenizer(model, tokenizer)
    sentences = treebank.read(path, limit)
    if not sentences:
        raise bad_value(os.fspath(path), expected="at least one sentence", received="none")
    texts, halves, counts = _texts(tokenizer, sentences, pairs, context_of(model, tokenizer), seed)
    batches = batches_of_one_length(texts, batch_size)
    others = questions_of_others(texts[: counts["sentences"]])
    with evaluating(model):
        heads, trained, crossed = count_answers(model, texts, halves, track(batches, "heads", progress), others)
        random = shuffled_copy(model, seed)
    _, shuffled, _ = count_answers(random, texts, halves, track(batches, "heads, shuffled", progress))
    result = report(heads, trained, shuffled, counts=counts)
    return replace(result, crossed=len(report(heads, crossed, shuffled).syntactic))


def check_arguments(model: nn.Module, batch_size: int, seed: int) -> None:
    """Raise if the arguments are not what `syntax` and `coreference` take."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="a torch.nn.Module", received=type(model).__name__)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise bad_value(
            "model",
            expected="an encoder or a decoder, which reads one text",
            received="an encoder and a decoder",
            remedy="model.get_encoder()",
        )
    for what, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if type(value) is not int:
            raise bad_type(what, expected=f"an integer, at least {least}", received=repr(value))
        if value < least:
            raise bad_value(what, expected=f"an integer, at least {least}", received=value)


def find_tokenizer(model: nn.Module, tokenizer: Any) -> Any:
    """The tokenizer that was passed, or the model's own."""
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise bad_value(
            "tokenizer",
            expected="one, as the model has none",
            received="None",
            remedy="pass a tokenizers.Tokenizer or a fast tokenizer of transformers",
        )
    return tokenizer


def context_of(model: nn.Module, tokenizer: Any) -> float:
    """How many tokens a model reads at once."""
    config = getattr(model, "config", None)
    limits = [*(getattr(config, name, None) for name in CONTEXT_LENGTHS), getattr(tokenizer, "model_max_length", None)]
    return min((n for n in limits if isinstance(n, int) and n > 0), default=float("inf"))


def _texts(
    tokenizer: Any, sentences: list[Sentence], pairs: Sequence[Sequence[Pair]] | None, longest: float, seed: int
) -> tuple[list[TokenizedText], list[int], dict[str, int]]:
    """The texts that the model reads, the half of each, and counts of what was read and skipped. Sentences come first;
    passages follow if the file marks entities."""
    given = [[]] * len(sentences) if pairs is None else questions_from_pairs(pairs, sentences)
    alone = [
        tokenized(tokenizer, [sentence], dependency_questions(sentence) + more)
        for sentence, more in zip(sentences, given, strict=True)
    ]
    fitting = [(s, text) for s, text in zip(sentences, alone, strict=True) if len(text.ids) <= longest]
    texts = [text for _, text in fitting]
    counts = {
        "sentences": len(texts),
        "sentences longer than the model reads": len(alone) - len(texts),
        "words without a token": sum(text.words - len(set(text.words_of_tokens) - {-1}) for text in texts),
    }
    halves = random_halves(len(texts), seed)
    if pairs is None and any(sentence.mentions for sentence in sentences):
        lengths = ((sentence, len(text.ids)) for sentence, text in fitting)
        read_together = list(passages(lengths, min(longest, PASSAGE)))
        texts += [tokenized(tokenizer, p, coreference_questions(mention_heads(p))) for p in read_together]
        halves += random_halves(len(read_together), seed)
    return texts, halves, counts


def random_halves(count: int, seed: int) -> list[int]:
    """A random half, 0 or 1, for each of `count` texts."""
    return [
        place % 2
        for place in torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    ]


def _attention_maps(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """For texts of one length, (B, N), each layer's name and weights, (B, H, N, N). Only layers whose queries and keys
    are the tokens of the text."""
    with torch.no_grad(), watch(model, measures=[], keep="qk") as seen:
        model(ids)
    for name in seen.layers:
        if seen[name].kind == "self":
            weights = seen[name].weights()
            if weights.shape[-2:] == (ids.shape[1], ids.shape[1]):
                yield name, weights


def count_answers(
    model: nn.Module,
    texts: Sequence[TokenizedText],
    halves: Sequence[int],
    batches: Iterable[list[int]],
    others: Sequence[list[Question]] = (),
) -> tuple[list[tuple[str, int]], Halves, Halves]:
    """The heads of a model, their answers in each half of the texts, and their answers to `others`, a list for each
    text."""
    heads: list[tuple[str, int]] = []
    tallies, crossed = (Tally(), Tally()), (Tally(), Tally())
    device = next((parameter.device for parameter in model.parameters()), None)
    for batch in batches:
        ids = torch.tensor([texts[i].ids for i in batch], device=device)
        heads, by_text = [], [[] for _ in batch]
        # Tokens are merged to words layer by layer: there are fewer words, so all layers fit in memory.
        for name, weights in _attention_maps(model, ids):
            heads += [(name, head) for head in range(weights.shape[1])]
            for i, layers, maps in zip(batch, by_text, weights.float(), strict=True):
                layers.append(word_weights(maps, texts[i].words_of_tokens, texts[i].words))
        if not heads:
            raise bad_value("model", expected="self-attention over the tokens of a text", received="none that was seen")
        for i, layers in zip(batch, by_text, strict=True):
            weights = torch.cat(layers)  # (C, n, n)
            if texts[i].first_word >= 0:
                weights[..., texts[i].first_word] = 0.0
            if all(question.candidates is None for question in texts[i].questions):  # (antecedents may be sinks)
                weights = without_sinks(weights)
            tallies[halves[i]].add(weights, texts[i].questions)
            if i < len(others):
                crossed[halves[i]].add(weights, others[i])
    return heads, tallies, crossed


def shuffled_copy(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each weight matrix in random order: of the same size, with nothing
    learned."""
    shuffled = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in shuffled.parameters():
            if parameter.dim() > 1:
                order = torch.randperm(parameter.numel(), generator=generator, device="cpu").to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return shuffled
