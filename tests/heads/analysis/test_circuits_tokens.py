"""The tokens that heads write: against dense matrices, against attribution, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from heads.analysis.circuit_models import CONFIGS, V, leave_matrix, made, norm_matrix, ov_matrices
from torch import Tensor

import regard
from regard.heads import attribution, circuits

EXACT = {"atol": 1e-10, "rtol": 1e-10}
WORDS = {"<unk>": 0, "the": 1, "cat": 2, "\x1b[2J": 3} | {f"w{i}": i for i in range(4, V)}


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def unembedded(model: Any, rows: Tensor, number: int) -> Tensor:
    """What a layer writes (..., W) as logits (..., V), less their mean."""
    unembedding = model.head.weight if hasattr(model, "head") else model.embedding.tokens.weight
    logits = rows @ leave_matrix(model.blocks[number:]) @ norm_matrix(model.norm) @ unembedding.detach().T
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_writes(kind: str) -> None:
    model = made(kind)
    weights = circuits.read(model, tied=kind == "as BERT")
    tokens = model.embedding.tokens.weight.detach() @ norm_matrix(model.embedding.norm)
    for i, head, token in ((0, 0, 5), (1, 3, 0), (2, 5, V - 1)):
        found = circuits.writes(weights, i, head, token, top=7)
        reads = tokens @ leave_matrix(model.blocks[:i])
        right = unembedded(model, reads[token] @ ov_matrices(model.blocks[i])[head], i)
        torch.testing.assert_close(found.logits, right, **EXACT)
        order = right.argsort(descending=True).tolist()
        assert [one.token for one in found.promotes] == order[:7]
        assert [one.token for one in found.suppresses] == order[::-1][:7]
        assert found.promotes[3].adds == pytest.approx(right[order[3]].item())
        assert found.rank == order.index(token) + 1


def test_writes_after_a_layer() -> None:
    """A token as the stream holds it after a layer, in place of its embedding."""
    model, states = made("as Llama"), []
    with torch.no_grad():
        model.hidden(torch.tensor([[5]]), states=states)
    found = circuits.writes(circuits.read(model, after=1), 2, 4, 5)
    right = unembedded(model, states[1][0, 0] @ ov_matrices(model.blocks[2])[4], 2)
    torch.testing.assert_close(found.logits, right, **EXACT)


@pytest.mark.parametrize("position", [-1, 3])
@pytest.mark.parametrize("kind", ["as SmolLM2", "as Llama", "as GPT-2", "as NeoX"])
def test_logit_lens_is_attribution_but_for_the_scale(kind: str, position: int) -> None:
    """Attribution divides by the scale of the last norm; differences between two tokens have no mean in them."""
    model, ids = made(kind), torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(ids)
    a, b = (attribution(model, ids, token, position=position) for token in (7, 11))
    states: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    x = states[0][0, position]
    scale = (x.var(unbiased=False) if CONFIGS[kind]["norm"] == "layer" else x.square().mean()).sqrt()
    for layer in range(3):
        for head in range(6):
            found = circuits.logit_lens(model, seen, layer, head, position=position, top=V)
            by_token = {one.token: one.adds for one in found.promotes}
            difference = (by_token[7] - by_token[11]) / scale.item()
            assert difference == pytest.approx((a[layer][head] - b[layer][head]).item(), abs=1e-5)
            assert found.logits.sum().item() == pytest.approx(0, abs=1e-9)
            assert found.rank is None


def test_logit_lens_of_another_item_and_of_an_encoder() -> None:
    model, ids = made("as BERT"), torch.tensor([[3, 1, 4], [1, 5, 9]])
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(ids)
    found = circuits.logit_lens(circuits.read(model, tied=True), seen, 1, 2, position=1, item=1)
    torch.testing.assert_close(found.logits, unembedded(model, seen[1].projected()[1, 2, 1], 1), **EXACT)
    with pytest.raises(ValueError, match="model: expected a projection to the vocabulary"):
        circuits.logit_lens(model, seen, 1, 2)


def test_texts() -> None:
    model = made("as Llama")
    model.tokenizer = tokenizer()
    by_text, by_number = (circuits.writes(model, 1, 2, token, top=V) for token in ("cat", 2))
    assert by_text.promotes == by_number.promotes
    words = {number: word for word, number in WORDS.items()}
    assert all(one.text == words[one.token] for one in by_text.promotes)
    lines = str(by_text).splitlines()
    assert lines[0].startswith(
        f"blocks.1.attention head 2 at 'cat', the token itself is number {by_text.rank} of {V}; "
    )
    assert lines[1].split() == ["promotes", "adds", "suppresses", "takes"]
    assert "\x1b" not in str(by_text)
    row = by_text.table()[0]
    assert row["promotes"] == repr(by_text.promotes[0].text)
    assert row["takes"] == by_text.suppresses[0].adds
    assert circuits.writes(made("as Llama"), 1, 2, 2).promotes[0].text.startswith("token ")
    other = circuits.writes(made("as Llama"), 1, 2, "cat", tokenizer=tokenizer())
    assert other.promotes[0].text == by_text.promotes[0].text


def test_wrong_tokens() -> None:
    model = made("as Llama")
    for token in (V, -1, True, 1.0, None):
        with pytest.raises(ValueError, match="token: expected a token below 23, received"):
            circuits.writes(model, 0, 0, token)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer: expected one, for the model has none of its own, received none"):
        circuits.writes(model, 0, 0, "cat")
    with pytest.raises(
        ValueError, match=r"token: expected one token, received 'the cat', which is 2: \[1, 2\]; remedy"
    ):
        circuits.writes(model, 0, 0, "the cat", tokenizer=tokenizer())
    with pytest.raises(ValueError, match="top: expected at least 1, received 0"):
        circuits.writes(model, 0, 0, 1, top=0)


def test_wrong_records() -> None:
    model, ids = made("as Llama"), torch.tensor([[3, 1, 4]])
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(ids)
    for position in (3, -4, True, 1.0):
        with pytest.raises(ValueError, match="position: expected one of 3, received"):
            circuits.logit_lens(model, seen, 0, 0, position=position)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="item: expected one of 1, received 1"):
        circuits.logit_lens(model, seen, 0, 0, item=1)
    with pytest.raises(
        TypeError, match=r"record: expected what watch\(model, keep='qkv'\) gives, received LayerRecord"
    ):
        circuits.logit_lens(model, seen[0], 0, 0)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="record: expected one of this model, with 2 layers, received one with 3 layers of 6 heads"
    ):
        circuits.logit_lens(made("as Llama", layers=2), seen, 0, 0)
    with regard.watch(model) as without, torch.no_grad():
        model(ids)
    with pytest.raises(ValueError, match='output: expected a watch with keep="qkv", received one that did not keep it'):
        circuits.logit_lens(model, without, 0, 0)
