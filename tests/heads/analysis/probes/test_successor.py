"""Ordered lists, and heads that write the next member by construction."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from heads import hf_models
from heads.planted import PlantedDecoder, PlantedHead, before
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from regard.heads import probes
from regard.heads.analysis.probes.successor import LISTS, _ordered, _single_tokens
from regard.models import EMBEDDED

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")

LAYER, V = "blocks.0.attention", 31
ROUND = [3, 5, 7, 11, 13, 3]  # a circle of five
LINE = [17, 19, 23, 29]


def following(*lists: list[int], size: int = V) -> Tensor:
    """The matrix that turns each member into the next."""
    matrix = torch.zeros(size, size)
    for ids in lists:
        matrix[ids[1:], ids[:-1]] = 1.0
    return matrix


def planted(*lists: list[int], size: int = V) -> PlantedDecoder:
    """Heads that write the successor, the token itself, the one before, against the successor, and nothing. Where they
    attend does not matter."""
    heads = [
        PlantedHead(writes=following(*lists, size=size)),
        PlantedHead(writes=torch.eye(size)),
        PlantedHead(writes=following(*lists, size=size).mT),
        before(41),
        PlantedHead(),
    ]
    heads[3].writes = -following(*lists, size=size)
    return PlantedDecoder(size, 41, heads)


def test_planted_heads() -> None:
    result = probes.successor(planted(ROUND, LINE), {"round": ROUND, "line": LINE}, seeds=[0, 1, 2])
    assert result.runs[2:4] == ("round, seed 2", "line, seed 0")
    assert result[LAYER].tolist() == [1, 0, 0, 0, 0]
    assert result.more["copies"][LAYER][1] == 1.0
    assert result.more["copies"][LAYER][[0, 2, 4]].tolist() == [0] * 3
    assert result.baseline[LAYER].tolist() == pytest.approx([(1 / 5 + 1 / 4) / 2] * 5)
    margin = result.more["margin"][LAYER].tolist()
    assert [margin[i] for i in (0, 1, 3, 4)] == pytest.approx([1.0, 0.0, -1.0, 0.0])
    assert -1 / 2 <= margin[2] <= -1 / 3  # one of the two or three others gets 1
    assert result.spread[LAYER].tolist() == [0] * 5
    by_list = result.by_list()
    assert list(by_list) == ["round", "line"]
    assert by_list["line"][LAYER].tolist() == [1, 0, 0, 0, 0]
    assert result.best(1) == [(LAYER, 0)]


def test_one_list_of_two() -> None:
    """A head that knows the circle alone has half of the score."""
    result = probes.successor(planted(ROUND), {"round": ROUND, "line": LINE}, seeds=[0])
    assert result[LAYER][0] == 0.5
    assert result.by_run[LAYER][:, 0].tolist() == [1.0, 0.0]
    assert result.spread[LAYER][0] == 0.5


def test_the_end_of_a_line_and_the_first_token_are_not_asked_about() -> None:
    """A head that knows the next of 17 and 19 alone: of three members one or two are asked about."""
    for seed in range(5):
        result = probes.successor(planted([17, 19]), {"line": [17, 19, 23]}, seeds=[seed])
        order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
        asked = [i for i in order[1:] if i < 2]
        assert result[LAYER][0].item() == pytest.approx((0 in asked) / len(asked))


def word_tokenizer(first: bool) -> Any:
    """Days are words; of months only three; nothing else."""
    words = [*LISTS["days"][:-1], "March", "April", "May"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(["<s>", "<unk>", *words, "a"])}, "<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if first:
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("first", [False, True])
def test_texts(first: bool) -> None:
    """With a special token in front all members are asked about."""
    model: Any = planted([2, 3, 4, 5, 6, 7, 8, 2], size=13)
    model.tokenizer = word_tokenizer(first)
    caught: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    result = probes.successor(model, {"days": LISTS["days"], "spring": ("March", "April", "May")}, seeds=[0])
    assert [run.split(",")[0] for run in result.runs] == ["days", "spring"]
    assert result.by_run[LAYER][:, 0].tolist() == [1.0, 0.0]
    assert [len(ids[0]) for ids in caught] == ([8, 4] if first else [7, 3])
    assert sorted(caught[0][0, first:].tolist()) == [2, 3, 4, 5, 6, 7, 8]


def test_members_that_are_not_one_token() -> None:
    """Are left out, and so is what they follow."""
    words = ["Monday", "Tuesday", "Tuesday evening", "Friday", "Monday"]
    assert _single_tokens(word_tokenizer(True), words) == [2, 3, None, 6, 2]
    assert _ordered([2, 3, None, 6, 2]) == ([2, 3, 6], [1, -1, 0])


def test_what_cannot_be_asked() -> None:
    model = planted(LINE)
    with pytest.raises(
        ValueError, match="tokenizer: expected one, for the model has none of its own, received none; rem"
    ):
        probes.successor(model)
    with pytest.raises(ValueError, match="tokenizer: expected one, for the model has none of its own, received none"):
        probes.successor(model, {"days": LISTS["days"]})
    with pytest.raises(ValueError, match="lists: expected one at least, received none"):
        probes.successor(model, {})
    with pytest.raises(ValueError, match="seeds: expected one at least, received none"):
        probes.successor(model, {"line": LINE}, seeds=[])
    for ids in ([17, 19], [17, 19, 17], [17, 19, 19, 23]):
        with pytest.raises(
            ValueError, match=r"lists\['line'\]: expected 3 members or more that are one token, each onc"
        ):
            probes.successor(model, {"line": ids})
    with pytest.raises(ValueError, match=r"lists\['line'\]: expected tokens below 31, received 31"):
        probes.successor(model, {"line": [17, 19, 31]})
    with pytest.raises(ValueError, match="model: expected a decoder with a last norm and a projection"):
        probes.successor(hf_models.model("bert"), {"line": LINE})


@WITH_SMOLLM2
@pytest.mark.slow
def test_a_successor_head_of_smollm2(smollm2: Any) -> None:
    """Head 3 of layer 23 counts: most digits become the next one, and none stays itself."""
    result = probes.successor(smollm2, seeds=[0])
    assert result.best(1) == [("blocks.23.attention", 3)]
    assert result.by_list()["digits"]["blocks.23.attention"][3] > 0.5
    assert result.more["copies"]["blocks.23.attention"][3] < 0.05
