"""Successor heads: reading a member of an ordered list, they write the next one, Monday -> Tuesday (Gould et al. 2023,
"Successor Heads: Recurring, Interpretable Attention Heads In The Wild").

Letters: H heads, M keys, T members of a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_value
from regard.heads.analysis.probes.inputs import device_of, special_prefix, token_ids, tokenizer_of, vocabulary_size
from regard.heads.analysis.probes.result import ProbeResult, layer_means
from regard.heads.interventions.direct_logits import DirectLogits, direct_logits
from regard.heads.progress import track
from regard.heads.record.record import LayerRecord

__all__ = ["LISTS", "Successor", "successor"]

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
# A list that ends with its first member is a circle.
LISTS: dict[str, tuple[str, ...]] = {
    "days": (*_DAYS, _DAYS[0]),
    "months": (*_MONTHS, _MONTHS[0]),
    "digits": tuple(map(str, range(10))),
    "numbers": _NUMBERS,
    "letters": tuple(map(chr, range(ord("A"), ord("Z") + 1))),
}
LEAST = 3  # members of a list


class OrderedList(NamedTuple):
    """Token ids, each once, and for each the index of its successor; -1 for none."""

    members: list[int]
    successors: list[int]


@dataclass(repr=False)
class Successor(ProbeResult):
    """The score is the share of members that a head's values turn into their successor: of the logits of all members,
    it adds most to that of the successor. `print` it.

    Attributes:
        baseline: the share for a member drawn at random.
        more: "copies", the share that is turned into itself; "margin", the logit of the successor over the mean of the
            others, at a weight of 1. The member itself is none of these others, so that a head which only writes
            against it has no margin.
    """

    title: ClassVar[str] = "successor"

    def by_list(self) -> dict[str, dict[str, Tensor]]:
        """For each list the scores of each layer, (H,)."""
        names = [run.rpartition(", seed ")[0] for run in self.runs]
        return {
            name: {
                layer: scores[[i for i, other in enumerate(names) if other == name]].mean(0)
                for layer, scores in self.by_run.items()
            }
            for name in dict.fromkeys(names)
        }


def successor(
    model: nn.Module,
    lists: Mapping[str, Sequence[str] | Sequence[int]] | None = None,
    *,
    tokenizer: Any = None,
    seeds: Sequence[int] = (0, 1, 2),
    progress: bool = True,
) -> Successor:
    """Which heads write the successor of the token that they attend to (Gould et al. 2023). The model reads the members
    of a list in random order; what each head makes of each member, by its values, the output projection and the last
    norm, is exact for that run (see `heads.attribution`).

    Args:
        model: a decoder as `heads.attribution` takes it.
        lists: by name, members as texts or token ids, in order; a list that ends with its first member is a circle. By
            default days, months, digits, numbers and letters. Members that are not one token are left out.
        tokenizer: for texts, if the model has none.
        seeds: for the order in which members are read; the first token of a text is not asked about.
        progress: show a progress bar on a terminal.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=31, inner=7, context=13, causal=True)
    >>> result = successor(Decoder(config), {"tens": [10, 20, 30]}, seeds=[0, 1])
    >>> result.runs, result["blocks.0.attention"].shape
    (('tens, seed 0', 'tens, seed 1'), torch.Size([3]))
    """
    found = tokenizer_of(model, tokenizer)
    ordered = _default_lists(found) if lists is None else _given_lists(lists, found, vocabulary_size(model))
    if not seeds:
        raise bad_value("seeds", expected="one at least", received="none")
    prefix = [] if found is None else special_prefix(found)
    scores: list[dict[str, Tensor]] = []
    copies: list[dict[str, Tensor]] = []
    margins: list[dict[str, Tensor]] = []
    chances: list[dict[str, Tensor]] = []
    runs = [(name, whole_number("seeds", seed, at_least=0)) for name in ordered for seed in seeds]
    for name, seed in track(runs, "successor", progress):
        members, successors = ordered[name]
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed), device="cpu")
        ids = torch.tensor(prefix + [members[i] for i in order.tolist()], device=device_of(model))
        run = direct_logits(model, ids, len(ids) - 1, members)
        asked = [(len(prefix) + place, i) for place, i in enumerate(order.tolist()) if successors[i] >= 0]
        asked = [(place, i) for place, i in asked if place > 0]
        of_layers = {layer.name: _answers(run, layer, asked, successors) for layer in run.layers}
        scores.append({layer: numbers[0] for layer, numbers in of_layers.items()})
        copies.append({layer: numbers[1] for layer, numbers in of_layers.items()})
        margins.append({layer: numbers[2] for layer, numbers in of_layers.items()})
        chances.append({layer: torch.full_like(numbers[0], 1 / len(members)) for layer, numbers in of_layers.items()})
    means, by_run = layer_means(scores)
    more = {"copies": layer_means(copies)[0], "margin": layer_means(margins)[0]}
    labels = tuple(f"{name}, seed {seed}" for name, seed in runs)
    return Successor(means, layer_means(chances)[0], by_run, labels, more)


def _answers(
    run: DirectLogits, layer: LayerRecord, asked: Sequence[tuple[int, int]], successors: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of keys, asked about as (place, index of the member), that a layer's heads turn into the successor, and
    into themselves; and the margin of the successor: (H,) each."""
    logits = run.of_keys(layer)[:, [place for place, _ in asked]]  # (H, keys, T)
    own = torch.tensor([i for _, i in asked], device=logits.device)
    following = torch.tensor([successors[i] for _, i in asked], device=logits.device)
    largest = logits.argmax(-1).where(logits.amax(-1) > logits.amin(-1), -1)  # (a head that writes nothing: none)
    of_own, of_following = (
        logits.gather(2, i[None, :, None].expand(len(logits), -1, 1))[..., 0] for i in (own, following)
    )
    others = (logits.sum(-1) - of_own - of_following) / (logits.shape[-1] - 2)
    margin = of_following - others
    return (largest == following).double().mean(1), (largest == own).double().mean(1), margin.mean(1)


def _default_lists(tokenizer: Any) -> dict[str, OrderedList]:
    """Those of `LISTS` of which three members are single tokens."""
    if tokenizer is None:
        raise bad_value(
            "tokenizer",
            expected="one, for the model has none of its own",
            received="none",
            remedy="lists={name: token ids in order}",
        )
    found = {name: _ordered(_single_tokens(tokenizer, words)) for name, words in LISTS.items()}
    found = {name: one for name, one in found.items() if len(one.members) >= LEAST and max(one.successors) >= 0}
    if not found:
        raise bad_value("tokenizer", expected=f"one with tokens for members of {', '.join(LISTS)}", received="none")
    return found


def _given_lists(
    lists: Mapping[str, Sequence[str] | Sequence[int]], tokenizer: Any, vocabulary: int
) -> dict[str, OrderedList]:
    if not lists:
        raise bad_value("lists", expected="one at least", received="none")
    found: dict[str, OrderedList] = {}
    for name, items in lists.items():
        what = f"lists[{name!r}]"
        if all(isinstance(item, str) for item in items):
            if tokenizer is None:
                raise bad_value("tokenizer", expected="one, for the model has none of its own", received="none")
            ids = _single_tokens(tokenizer, items)  # type: ignore[arg-type]
        else:
            ids = [whole_number(what, item, at_least=0) for item in items]
            if any(token >= vocabulary for token in ids):
                raise bad_value(what, expected=f"tokens below {vocabulary}", received=max(ids))
        once = [token for token in ids if token is not None]
        once = once[:-1] if _is_circle(ids) else once
        if len(once) < LEAST or len(set(once)) < len(once):
            raise bad_value(what, expected=f"{LEAST} members or more that are one token, each once", received=items)
        found[name] = _ordered(ids)
    return found


def _single_tokens(tokenizer: Any, words: Sequence[str]) -> list[int | None]:
    """The token of each word, None if it has several; with a leading space or without, as more of them are one."""
    variants = [[token_ids(tokenizer, before + word) for word in words] for before in (" ", "")]
    singles = [[ids[0] if len(ids) == 1 else None for ids in variant] for variant in variants]
    return max(singles, key=lambda tokens: sum(token is not None for token in tokens))


def _is_circle(ids: Sequence[int | None]) -> bool:
    return len(ids) > 1 and ids[0] is not None and ids[0] == ids[-1]


def _ordered(ids: Sequence[int | None]) -> OrderedList:
    """The members that are tokens, and their successors.

    >>> _ordered([7, 5, None, 6, 7])
    OrderedList(members=[7, 5, 6], successors=[1, -1, 0])
    """
    members = list(dict.fromkeys(token for token in ids if token is not None))
    following = {a: b for a, b in pairwise(ids) if a is not None and b is not None}
    return OrderedList(members, [members.index(following[m]) if m in following else -1 for m in members])
