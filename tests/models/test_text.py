"""Text to token ids and back, and what is said of ids and flags that are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard.models import Batch, Decoder, Encoder, ModelConfig
from regard.models.base import padded, tokenizing

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "to", "be", "or", "not", "that", "is", "question"]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def of_words() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(WORDS[:3])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def new(kind: str = "decoder", **changes: Any) -> Any:
    options = {
        "layers": 2,
        "embed_dim": 6,
        "num_heads": 3,
        "vocabulary": 11,
        "inner": 7,
        "context": 13,
        "kind": kind,
        "causal": kind == "decoder",
        "pad": 0,
    }
    made = Decoder if kind == "decoder" else Encoder
    return made(ModelConfig(**(options | changes)), of_words()).eval()


BOTH = pytest.mark.parametrize("kind", ["decoder", "encoder"])


# ----------------------------------------------------------------------------------------------------
# There and back


@BOTH
def test_encode(kind: str) -> None:
    ids = new(kind).encode("to be or not")
    assert ids.tolist() == [[1, 4, 5, 6, 7, 2]]
    assert ids.dtype == torch.int64


def test_tokenize() -> None:
    assert new().tokenize("to be, Hamlet") == ["[CLS]", "to", "be", "[UNK]", "[UNK]", "[SEP]"]


def test_empty_text_is_its_special_tokens() -> None:
    assert new().encode("").tolist() == [[1, 2]]
    assert new().tokenize("") == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize(
    "ids",
    [[1, 4, 5, 2], (1, 4, 5, 2), torch.tensor([1, 4, 5, 2]), torch.tensor([[1, 4, 5, 2]]), iter([1, 4, 5, 2])],
    ids=["list", "tuple", "(N,)", "(1, N)", "iterator"],
)
def test_decode(ids: Any) -> None:
    assert new().decode(ids) == "to be"


def test_decode_with_special_tokens() -> None:
    assert new().decode([1, 4, 2], skip_special=False) == "[CLS] to [SEP]"


def test_a_tokenizer_that_panics_is_an_error_in_words() -> None:
    model = new()
    model.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("(a+)+(?!a)$|(a|aa)+b"), "isolated"
    )
    assert model.encode("ab").tolist() == [[1, 3, 2]]
    words = r"text: expected one that the tokenizer can cut, received one of 61 characters at which it gives up \(Onig"
    for call in (model.encode, model.tokenize, lambda text: model.encode_batch(["a", text])):
        with pytest.raises(ValueError, match=words):
            call("a" * 60 + "c")


@pytest.mark.parametrize("other", [KeyboardInterrupt, SystemExit, KeyError])
def test_tokenizing_lets_others_through(other: type[BaseException]) -> None:
    with pytest.raises(other), tokenizing("text"):
        raise other


def test_decode_of_nothing() -> None:
    assert new().decode([]) == ""
    assert new().decode(torch.empty(0, dtype=torch.int64)) == ""


def test_decode_of_one_number() -> None:
    assert new().decode(torch.tensor(4)) == "to"


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 1, 3), (2, 2, 2)], ids=str)
def test_decode_of_several_texts_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ids: expected one text, \(N,\) or \(1, N\), received \("):
        new().decode(torch.full(shape, 4))


@pytest.mark.parametrize(
    "ids", [torch.tensor([4.0, 5.0]), torch.tensor([True]), [4.5], ["to"], [[4, 5], [6]], [None], 4, None], ids=repr
)
def test_decode_of_what_are_no_ids(ids: Any) -> None:
    with pytest.raises(TypeError, match="ids: expected"):
        new().decode(ids)


@pytest.mark.parametrize("ids", [[-1], torch.tensor([-1]), [1 << 40]], ids=repr)
def test_decode_of_impossible_ids(ids: Any) -> None:
    with pytest.raises(ValueError, match="ids: expected"):
        new().decode(ids)


# ----------------------------------------------------------------------------------------------------
# Batches


def test_encode_batch_pads_on_the_right() -> None:
    batch = new().encode_batch(["to be", "not"])
    assert batch.ids.tolist() == [[1, 4, 5, 2], [1, 7, 2, 0]]
    assert batch.keep.tolist() == [[True] * 4, [True, True, True, False]]
    assert batch.lengths.tolist() == [4, 3]
    assert isinstance(batch, Batch)


def test_encode_batch_pads_on_the_left() -> None:
    batch = new().encode_batch(["to be", "not"], pad="left")
    assert batch.ids.tolist() == [[1, 4, 5, 2], [0, 1, 7, 2]]
    assert batch.keep.tolist() == [[True] * 4, [False, True, True, True]]


def test_padding_is_the_models_own_token() -> None:
    assert new(pad=9).encode_batch(["to be", "not"]).ids[1, -1] == 9
    assert new(pad=None).encode_batch(["to be", "not"]).ids[1, -1] == 0


def test_encode_batch_takes_any_sequence() -> None:
    assert new().encode_batch(("to", "be")).ids.shape == (2, 3)


@pytest.mark.parametrize("side", ["middle", None, True], ids=repr)
def test_encode_batch_on_no_side(side: Any) -> None:
    with pytest.raises(ValueError, match='pad: expected "right" or "left"'):
        new().encode_batch(["to"], pad=side)


def test_encode_batch_of_one_text() -> None:
    with pytest.raises(TypeError, match=r"texts: expected a list of texts, received one text; remedy: encode\(text\)"):
        new().encode_batch("to be")


def test_encode_batch_of_no_text() -> None:
    with pytest.raises(ValueError, match="texts: expected at least one, received none"):
        new().encode_batch([])


@pytest.mark.parametrize("texts", [[5], [None], [b"to"], [["to"]]], ids=repr)
def test_encode_batch_of_what_is_no_text(texts: Any) -> None:
    with pytest.raises(TypeError, match="text: expected a string, received"):
        new().encode_batch(texts)


@pytest.mark.parametrize("text", [5, None, b"to", ["to"]], ids=repr)
def test_encode_of_what_is_no_text(text: Any) -> None:
    with pytest.raises(TypeError, match="text: expected a string, received"):
        new().encode(text)
    with pytest.raises(TypeError, match="text: expected a string, received"):
        new().tokenize(text)


def test_padded() -> None:
    assert padded([[5, 6, 7], [], [8]], value=3).ids.tolist() == [[5, 6, 7], [3, 3, 3], [8, 3, 3]]
    assert padded([[5, 6, 7], [], [8]], side="left").keep.tolist() == [[True] * 3, [False] * 3, [False, False, True]]


def test_pad_of_nothing() -> None:
    with pytest.raises(ValueError, match="texts: expected at least one, received none"):
        padded([])
    assert padded([[]]).ids.shape == (1, 0)


# ----------------------------------------------------------------------------------------------------
# Ids


@BOTH
def test_one_text_without_the_batch(kind: str) -> None:
    model, ids = new(kind), torch.tensor([1, 4, 5, 2])
    torch.testing.assert_close(model(ids), model(ids[None])[0])
    keep = torch.tensor([True, True, True, False])
    torch.testing.assert_close(model(ids, keep=keep)[:3], model(ids[None], keep=keep[None])[0, :3])


@BOTH
def test_short_integers(kind: str) -> None:
    model, ids = new(kind), torch.tensor([[1, 4, 5, 2]])
    torch.testing.assert_close(model(ids.int()), model(ids))


@pytest.mark.parametrize("ids, said", [([11, 3], "11"), ([3, -1], "-1"), ([2, 1 << 40], str(1 << 40))], ids=str)
@BOTH
def test_ids_beyond_the_vocabulary(kind: str, ids: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=f"ids: expected from 0 to 10, the vocabulary, received {said}"):
        new(kind)(torch.tensor([ids]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.complex64], ids=str)
@BOTH
def test_ids_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"ids: expected an integer tensor \(N,\) or \(B, N\), received dtype {dtype}"):
        new(kind)(torch.ones(1, 3, dtype=dtype))


@pytest.mark.parametrize("ids", [[[1, 2]], "to be", None, 5], ids=repr)
@BOTH
def test_ids_that_are_no_tensor(kind: str, ids: Any) -> None:
    with pytest.raises(TypeError, match=r"ids: expected an integer tensor .*remedy: model\.encode\(text\)"):
        new(kind)(ids)


@pytest.mark.parametrize("shape", [(), (1, 1, 3), (0,), (2, 0)], ids=str)
@BOTH
def test_ids_of_another_shape(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ids: expected \(N,\) or \(B, N\) with at least one token, received \("):
        new(kind)(torch.zeros(shape, dtype=torch.int64))


@BOTH
def test_no_rows_are_no_rows(kind: str) -> None:
    assert new(kind)(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 11 if kind == "decoder" else 6)


@BOTH
def test_more_ids_than_learned_positions(kind: str) -> None:
    with pytest.raises(ValueError, match="ids: expected at most 13 tokens, the number of learned positions"):
        new(kind)(torch.ones(1, 14, dtype=torch.int64))


@BOTH
def test_padding_does_not_count_as_a_position(kind: str) -> None:
    keep = torch.tensor([[True] * 13 + [False] * 4])
    assert new(kind)(torch.ones(1, 17, dtype=torch.int64), keep=keep)[:, :13].isfinite().all()


# ----------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@BOTH
def test_keep_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        TypeError,
        match=r"keep: expected a boolean tensor, True where there is a token, received dtype "
        rf"{dtype}; remedy: attention_mask\.bool\(\)",
    ):
        new(kind)(torch.ones(2, 3, dtype=torch.int64), keep=torch.ones(2, 3, dtype=dtype))


@BOTH
def test_keep_that_is_no_tensor(kind: str) -> None:
    with pytest.raises(TypeError, match=r"keep: expected a boolean tensor, .*received list"):
        new(kind)(torch.ones(1, 2, dtype=torch.int64), keep=[[True, True]])


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 2), (2, 4), (2, 1, 3)], ids=str)
@BOTH
def test_keep_of_another_shape(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"keep: expected one flag per token.*received \("):
        new(kind)(torch.ones(2, 3, dtype=torch.int64), keep=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("columns", [2, 3, 4, 6], ids=str)
def test_keep_with_a_cache_is_for_all_tokens(columns: int) -> None:
    model = new()
    cache = model.new_cache()
    model(torch.ones(2, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="keep: expected one flag per token, 3 cached and 2 new"):
        model(torch.ones(2, 2, dtype=torch.int64), cache=cache, keep=torch.ones(2, columns, dtype=torch.bool))
    assert len(cache[0]) == 3


def test_a_row_without_tokens_is_finite() -> None:
    keep = torch.tensor([[True, True, True], [False, False, False]])
    for kind in ("decoder", "encoder"):
        assert new(kind)(torch.ones(2, 3, dtype=torch.int64), keep=keep)[0].isfinite().all()


# ----------------------------------------------------------------------------------------------------
# Without a tokenizer


@pytest.mark.parametrize("what", ["encode", "tokenize", "encode_batch", "decode"])
@BOTH
def test_without_a_tokenizer(kind: str, what: str) -> None:
    model = new(kind)
    model.tokenizer = None
    given = {"encode_batch": ["to"], "decode": [4]}.get(what, "to")
    said = r"tokenizer: expected one beside the weights.*received none; remedy: pass token ids, or set model\.tokenizer"
    with pytest.raises(ValueError, match=said):
        getattr(model, what)(given)
    assert model(torch.tensor([[4]])).isfinite().all()
