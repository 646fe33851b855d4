"""Safetensors files: mapped, in shards, damaged, or of another kind; a wrong one raises an error that names it."""

from __future__ import annotations

import gc
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from models.tiny import change_tensors, logits, save, some_ids

from regard import models

EXACT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save(tmp_path, "llama")
    return tmp_path


# ----------------------------------------------------------------------------------------------------
# Shards


@pytest.mark.parametrize("mmap", [True, False])
def test_a_mapped_file_is_part_of_the_model(llama, mmap):
    """Whoever writes into it changes the weights; a copy is one's own."""
    model = models.load(llama, mmap=mmap)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = (llama / "model.safetensors").stat().st_size
    with (llama / "model.safetensors").open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(header)
        file.write(bytes(size - header))
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert bool(changed) is mmap


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    from models.tiny import Original

    Original("llama").make().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def _index(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def _write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_model(sharded, tmp_path_factory):
    whole, ids = tmp_path_factory.mktemp("whole"), some_ids()
    theirs = save(whole, "llama")
    with torch.no_grad():
        torch.testing.assert_close(models.load(sharded)(ids), logits(theirs, ids), **EXACT)


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"expected the shard {gone.name}, as the index says, received none; remedy:"):
        models.load(sharded)


def test_a_tensor_that_the_index_lists_and_no_shard_has(sharded):
    index = _index(sharded)
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = sorted(sharded.glob("*.safetensors"))[0].name
    _write_index(sharded, index)
    with pytest.raises(
        ValueError, match=r"expected the tensor 'model\.layers\.7\.mlp\.up_proj\.weight', as the index s"
    ):
        models.load(sharded)


def test_an_index_that_leaves_a_shard_out(sharded):
    index, last = _index(sharded), sorted(sharded.glob("*.safetensors"))[-1].name
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
    _write_index(sharded, index)
    with pytest.raises(ValueError, match=r"expected the tensor .*received none of that name"):
        models.load(sharded)


@pytest.mark.parametrize("index", [{}, [], {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}, 7])
def test_an_index_without_a_map(index, sharded):
    _write_index(sharded, index)
    with pytest.raises(ValueError, match=r"index\.json: expected the index of a sharded model.*no weight_map"):
        models.load(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None])
def test_an_index_that_points_elsewhere(file, sharded):
    index = _index(sharded)
    index["weight_map"]["model.norm.weight"] = file
    _write_index(sharded, index)
    with pytest.raises(ValueError, match=r"expected (names of files beside it|the shard|a file)"):
        models.load(sharded)


def test_a_damaged_shard_is_named(sharded):
    broken = sorted(sharded.glob("*.safetensors"))[1]
    broken.write_bytes(broken.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{broken.name}: expected a safetensors file, received one that is damaged"):
        models.load(sharded)


def test_one_whole_file_comes_before_an_old_index(sharded):
    """The whole file is what transformers reads too."""
    theirs = save(sharded, "llama", seed=1)
    index = sharded / "model.safetensors.index.json"
    if not index.is_file():
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    ids = some_ids(1, 7)
    with torch.no_grad():
        torch.testing.assert_close(models.load(sharded)(ids), logits(theirs, ids), **EXACT)


# ----------------------------------------------------------------------------------------------------
# Damaged files

BROKEN = r"model\.safetensors: expected a safetensors file, received one that is damaged or cut short.*remedy: fetch"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 2003, -1, -101])
def test_a_file_that_was_cut_short(size, llama):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


def test_a_file_with_more_than_it_tells_of(llama):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


def test_random_bytes(llama):
    (llama / "model.safetensors").write_bytes(os.urandom(5003))
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


@pytest.mark.parametrize("length", [0, 1, 17, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_that_lies_about_its_length(length, llama):
    file = llama / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a": 7}',
        '{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 99]}}',
        '{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_is_none(header, llama):
    (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4)
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


def test_a_git_lfs_pointer_instead_of_the_file(llama):
    """What a clone without git-lfs leaves."""
    (llama / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5003\n", encoding="ascii"
    )
    with pytest.raises(ValueError, match=BROKEN):
        models.load(llama)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_a_pickle_is_refused_and_never_opened(name, llama):
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(
        ValueError, match=rf"received {name}, which are pickles and can run code; remedy: save .*safetens"
    ):
        models.load(llama)


def test_no_weights_at_all(llama):
    (llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected weights in model\.safetensors, whole or in shards, received none"):
        models.load(llama)


def test_weights_under_another_name_are_named(llama):
    (llama / "model.safetensors").rename(llama / "model.fp16.safetensors")
    with pytest.raises(
        ValueError, match=r"expected weights in model\.safetensors.*received .*model\.fp16\.safetensors"
    ):
        models.load(llama)


def test_a_failed_load_leaves_nothing_behind(llama):
    """Neither a model half made nor an open file."""
    change_tensors(llama, lambda there: there | {"model.norm.weight": torch.ones(5)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        models.load(llama)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is models.Decoder and one.name == llama.name]
    if Path("/proc/self/maps").exists():
        assert str(llama) not in Path("/proc/self/maps").read_text()
