"""Files that come from others: only regular ones are opened, and what is wrong with one is said in words."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard import models
from regard.heads import Record, load_pruned
from regard.heads.analysis import treebank
from regard.models import packaged as embedded
from regard.models.files import open_regular, open_safetensors, parse_json, read_json

CONFIG = {
    "model_type": "bert",
    "vocab_size": 11,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 1,
    "intermediate_size": 7,
    "max_position_embeddings": 13,
}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def _at_most_20_seconds() -> Iterator[None]:
    """What waits for a pipe waits for ever."""

    def ring(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def put(path: Path, kind: str) -> str:
    """Something else in the place of a file; gives its name in words."""
    if path.exists():
        path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir(parents=True)
    else:
        path.symlink_to("/dev/zero")
    return kind


KINDS = pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])


@KINDS
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "model.safetensors",
    ],
)
def test_only_files_are_opened(folder: Path, name: str, kind: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    put(folder / name, kind)
    with pytest.raises(ValueError, match=rf"{name}: expected a file, received {kind}$"):
        models.load(folder)


@KINDS
def test_a_tokenizer_that_is_no_file(folder: Path, kind: str) -> None:
    put(folder / "tokenizer.json", kind)
    found = models.source(folder)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: expected a file, received {kind}$"):
        found.tokenizer()


@KINDS
def test_an_index_and_a_shard_that_are_no_files(folder: Path, kind: str) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "part.safetensors"}}))
    put(folder / "part.safetensors", kind)
    with pytest.raises(ValueError, match=rf"part\.safetensors: expected a file, received {kind}$"):
        models.load(folder)
    put(index, kind)
    with pytest.raises(ValueError, match=rf"index\.json: expected a file, received {kind}$"):
        models.load(folder)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_model_that_is_neither_folder_nor_file(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "m.gguf", kind)
    with pytest.raises(ValueError, match=rf"m\.gguf: expected a file, received {kind}$"):
        models.load(tmp_path / "m.gguf")


@KINDS
@pytest.mark.parametrize("read", [Record.load, load_pruned, treebank.read])
def test_records_pruned_models_and_treebanks_are_files(tmp_path: Path, read, kind: str) -> None:
    put(tmp_path / "it", kind)
    with pytest.raises(ValueError, match=rf"it: expected a file, received {kind}$"):
        read(tmp_path / "it")


def test_notes_that_are_no_file_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "regard").mkdir()
    put(tmp_path / "regard" / "checked.json", "a pipe")
    assert embedded._remembered() == {}


def test_a_file_that_is_not_there_is_told_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected a folder with none\.json, received none in it"):
        read_json(tmp_path / "none.json")


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("[1]")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert read_json(tmp_path / "two") == [1]


# ----------------------------------------------------------------------------------------------------
# JSON


@pytest.mark.parametrize(
    "text, words",
    [
        (DEEP, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 10_000, "4300 digits"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        (b"\xff", "can't decode byte"),
        (b'"\xed\xa0\x80"', "can't decode byte"),
    ],
)
def test_what_is_no_json(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^it: expected JSON, received one that is damaged or cut short \(.*{words}"):
        parse_json(text, "it")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "model.safetensors.index.json",
    ],
)
def test_deep_json_is_told_in_words(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(DEEP)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"{name}: expected JSON, received .*nested too deeply"):
        models.load(folder)


def test_a_deep_tokenizer_is_told_in_words(folder: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers, which reads it, is not installed")
    (folder / "tokenizer.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer\.json, received .*damaged"):
        models.source(folder).tokenizer()


HEADERS = {
    "deep": DEEP.encode(),
    "no object": b"[]",
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe",
    "a tensor that is none": b'{"a": 3}',
    "a shape below 0": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "a huge shape": b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}',
    "a tensor beyond the end": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "offsets in the wrong order": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    "an unknown type": b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_of_safetensors_that_is_none(folder: Path, header: str) -> None:
    said = HEADERS[header]
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said)
    words = r"model\.safetensors: expected a safetensors file, received one that is damaged or cut short"
    with pytest.raises(ValueError, match=words):
        open_safetensors(folder / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        models.load(folder)


@pytest.mark.parametrize("length", [0, 7, 8, 2**40, 2**64 - 1])
def test_a_header_longer_than_its_file(folder: Path, length: int) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length)[: length if length < 8 else 8])
    with pytest.raises(ValueError, match=r"expected a safetensors file, received one that is damaged"):
        models.load(folder)
