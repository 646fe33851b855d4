"""Files of records that are damaged: each is refused in words, or is a record of which everything can be asked."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

import regard
from regard.heads import Record
from regard.measures import Entropy, Heatmap, Links, Offsets, Peak, PerQuery, Previous, Received, Tokens
from regard.models import Decoder, ModelConfig

pytestmark = pytest.mark.on_device

NAN, INF = math.nan, math.inf


class Confident(PerQuery):
    gives = {"confident": "query"}

    def of(self, strip, prepared):
        return (strip.weights.amax(-1) > 0.9).to(strip.weights.dtype)


B, H, N = 2, 3, 5  # texts, heads, tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a record of two texts says of itself, and its tensors."""
    torch.manual_seed(0)
    own = [
        Entropy(),
        Peak(),
        Previous(),
        Offsets(2, 1),
        Received(),
        Links(2),
        Heatmap(3),
        Tokens({"few": [1, 2, 3]}),
        Confident(),
    ]
    sizes = ModelConfig(layers=2, embed_dim=12, num_heads=H, vocabulary=11, inner=7, context=13, causal=True)
    model = Decoder(sizes).eval()
    with torch.no_grad(), regard.watch(model, measures=own) as seen:
        for tokens in (N, N + 2):
            model(torch.randint(0, 11, (B, tokens)))
    seen.tokens = [["a"] * (N + 2)] * B
    path = tmp_path_factory.mktemp("record") / "record"
    seen.save(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["regard.record"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(about["layers"]) == 2
    return about, tensors


def written(about: Any, tensors: dict[str, Tensor]) -> bytes:
    said = about if isinstance(about, str) else json.dumps(about)
    return as_bytes({name: x.contiguous() for name, x in tensors.items()}, metadata={"regard.record": said})


def outcome(path: Path, content: bytes) -> str:
    """ "loaded", where everything can be asked of it; or "refused", in words with the name of the file."""
    path.write_bytes(content)
    try:
        record = Record.load(path)
    except ValueError as error:
        said = str(error)
        assert said.startswith(f"{path}: "), said
        assert "expected" in said, said
        assert "received" in said, said
        assert len(said) < 800, said
        return "refused"
    record.table()
    repr(record)
    for layer in record:
        assert layer.values.keys() <= layer.axes.keys()
        assert layer.count.shape == (layer.heads,)
        for name in layer.counts:
            assert layer.per_head(name).shape[0] == layer.heads
    record.roles()
    return "loaded"


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*where, key)
        yield from places(one, (*where, key))


def changed(about: Any, where: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    whole = inner = copy.deepcopy(about)
    for key in where[:-1]:
        inner = inner[key]
    change(inner, where[-1])
    return whole


BAD: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    10**6,
    3 * 10**8,
    2**63,
    10**30,
    2.5,
    NAN,
    INF,
    "",
    "x",
    "1",
    [],
    [0],
    [[]],
    {},
    {"a": "query"},
    ["x", "x"],
    "Measure",
    "rollout",
    "../x",
]


def test_the_record_itself_is_loaded(saved, tmp_path: Path) -> None:
    assert outcome(tmp_path / "record", written(*saved)) == "loaded"


def test_what_a_file_says_of_itself_is_checked_wherever_it_is_changed(saved, tmp_path: Path) -> None:
    about, tensors = saved
    rng, outcomes = random.Random(0), []
    first = about | {"layers": about["layers"][:1]}  # (the second is like it)
    tensors = {name: x for name, x in tensors.items() if name.startswith("0/")}
    first["tokens"] = [["a", "b"]]
    for where in places(first):
        cases: list[Any] = [lambda inner, key: inner.pop(key)]
        cases += [lambda inner, key, bad=bad: inner.__setitem__(key, bad) for bad in rng.sample(BAD, 2)]
        if isinstance(where[-1], int):
            cases.append(lambda inner, key: inner.append(inner[key]))  # there twice
        for case in cases:
            outcomes.append(outcome(tmp_path / "record", written(changed(first, where, case), tensors)))
    assert len(outcomes) > 200
    assert outcomes.count("refused") > 0.8 * len(outcomes)


def wrong_tensors(tensors: dict[str, Tensor], name: str) -> Iterator[dict[str, Tensor]]:
    x = tensors[name]
    rest = {other: one for other, one in tensors.items() if other != name}
    yield rest
    yield rest | {f"{name}x": x}
    yield rest | {f"x{name}": x}
    yield rest | {name.replace("0/", "7/", 1).replace("1/", "8/", 1): x}
    for other in (x[None], x[:0], x[..., :-1] if x.dim() else x, torch.cat([x, x], -1) if x.dim() else x, x.flatten()):
        yield rest | {name: other}
    for dtype in (torch.float32, torch.int64, torch.bool, torch.int8):
        yield rest | {name: x.to(dtype)}
    yield rest | {name: torch.zeros(0, 2**31)}
    if not x.is_floating_point() and x.dtype is not torch.bool:
        yield rest | {name: x - 1000}
        yield rest | {name: x + 1000}


def test_tensors_are_checked_each_of_them(saved, tmp_path: Path) -> None:
    about, tensors = saved[0] | {"layers": saved[0]["layers"][:1]}, saved[1]
    tensors = {name: x for name, x in tensors.items() if name.startswith("0/")}
    cases = [other for name in tensors for other in wrong_tensors(tensors, name)]
    cases = random.Random(0).sample(cases, 200)
    outcomes = [outcome(tmp_path / "record", written(about, other)) for other in cases]
    assert outcomes.count("refused") > 0.7 * len(outcomes)


def test_bytes_are_checked_wherever_they_are_cut_or_flipped(saved, tmp_path: Path) -> None:
    whole, rng, outcomes = written(*saved), random.Random(0), []
    header = 8 + struct.unpack_from("<Q", whole)[0]
    for at in [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1, *rng.sample(range(len(whole)), 20)]:
        outcomes.append(outcome(tmp_path / "record", whole[:at]))
    assert set(outcomes) == {"refused"}
    for _ in range(100):
        file = bytearray(whole)
        file[rng.randrange(header)] ^= 1 << rng.randrange(8)
        outcomes.append(outcome(tmp_path / "record", bytes(file)))
    assert outcomes.count("refused") > 0.8 * len(outcomes)


def test_flags_are_0_or_1(saved, tmp_path: Path) -> None:
    about, tensors = saved
    wild = tensors | {"0/seen": torch.full(tensors["0/seen"].shape, 7, dtype=torch.uint8).view(torch.bool)}
    (tmp_path / "record").write_bytes(written(about, wild))
    seen = Record.load(tmp_path / "record")[0].last_seen()
    assert set(seen.view(torch.uint8).flatten().tolist()) == {1}


@pytest.mark.parametrize("size", ["batch", "heads", "queries", "keys"])
def test_a_huge_count_takes_no_memory(saved, tmp_path: Path, size: str) -> None:
    """3e8 heads, in a file that is as small as ever: with an empty tensor, too, which may have any shape."""
    about, tensors = saved
    huge = changed(about, ("layers", 0, size), lambda inner, key: inner.__setitem__(key, 300_000_000))
    shape = [huge["layers"][0][name] for name in ("batch", "heads", "queries")]
    for others in (tensors, tensors | {"0/seen": torch.zeros(*shape[:2], 0, dtype=torch.bool)}):
        (tmp_path / "record").write_bytes(written(huge, others))
        with pytest.raises(ValueError, match=r"record: .*expected .*received "):
            Record.load(tmp_path / "record")


@pytest.mark.parametrize(
    "said, words",
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"version": 1', "Expecting"),
        ("1" * 10_000, "4300 digits"),
        ("[]", "regard.record: expected an object"),
        ('{"version": 1}', "layers: expected a list of objects"),
        ('{"version": true, "layers": []}', "version: expected version 1"),
        ('{"version": 1, "layers": [], "tokens": [["a"]], "pair": true}', "tokens: expected two lists"),
        ('{"version": 1, "layers": [], "tokens": [[["a"]]]}', "tokens: expected tokens in a list"),
        ('{"version": 1, "layers": [{}]}', r"layers\[0\].kind: expected a string, received None"),
    ],
)
def test_what_is_no_description_of_a_record(tmp_path: Path, said: str, words: str) -> None:
    (tmp_path / "record").write_bytes(written(said, {}))
    with pytest.raises(ValueError, match=rf"record: .*{words}"):
        Record.load(tmp_path / "record")


@pytest.mark.on_meta
def test_a_baseline_of_a_baseline_is_refused(saved, tmp_path: Path) -> None:
    about, tensors = saved
    twice = copy.deepcopy(about)
    layer = next((layer for layer in twice["layers"] if "uniform" in layer), None)
    assert layer is not None
    layer["uniform"]["uniform"] = layer["uniform"]
    layer["uniform"] = dict(layer["uniform"], uniform=dict(layer["uniform"], uniform=None))
    (tmp_path / "record").write_bytes(written(twice, tensors))
    with pytest.raises(ValueError, match="expected one baseline, described and with its tensors"):
        Record.load(tmp_path / "record")


def test_a_record_does_not_change_with_its_file(saved, tmp_path: Path) -> None:
    content = written(*saved)
    (tmp_path / "record").write_bytes(content)
    seen = Record.load(tmp_path / "record")
    before = seen[0].per_head("entropy").clone()
    with (tmp_path / "record").open("r+b") as file:
        file.write(bytes(len(content)))
    assert torch.equal(seen[0].per_head("entropy"), before)
    assert seen[0].heads == H
