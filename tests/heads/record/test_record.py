"""Records: parts of weights, rollout, tables, and files that give back what was written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle import Oracle, close
from heads.oracle_hands import B, H, Hand, M, N, W, WithMemory, by_einsum, by_operator, dense, drawn, made, noise
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import regard
from regard import measures
from regard.heads import LayerRecord, Record, Table
from regard.masks import Causal

pytestmark = pytest.mark.on_device

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def hand(*given: Tensor, keep: Any = None, measures: Any = None, core: Any = by_operator) -> tuple[Record, Any]:
    """What was seen of attention by hand on some texts (B, N, W), and the model."""
    model = made(Hand(core))
    with torch.no_grad(), regard.watch(model, measures=measures, keep=keep) as seen:
        for x in given or (noise(B, N, W),):
            model(x)
    return seen, model


def llama(*, keep: Any = "qk", measures: Any = None, generate: bool = False, **options: Any) -> Record:
    model, given = hf_models.model("llama"), {"input_ids": hf_models.some_ids()}
    with torch.no_grad(), regard.watch(model, measures=measures, keep=keep, **options) as seen:
        model.generate(**given, **GREEDY) if generate else model(**given)
    return seen


# The layers of a record


def test_layers_by_name_and_by_number() -> None:
    seen = llama(keep=None)
    names = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert seen.layers == names
    assert len(seen) == 2
    assert [layer.name for layer in seen] == names
    assert seen[0] is seen[names[0]] is seen[f"{names[0]}#0"] is seen[-2]
    assert names[1] in seen
    assert "model.layers.2.self_attn" not in seen
    assert repr(seen) == "Record of 2 layers"
    assert repr(seen[0]).startswith("Layer('model.layers.0.self_attn', self, entropy, peak, target, distance")
    assert repr(Record()) == "Record of 0 layers"
    for wrong in (2, -3):
        with pytest.raises(IndexError, match=f"layer {wrong}: there are 2"):
            seen[wrong]
    with pytest.raises(KeyError, match=r"no layer 'self_attn'; there are model\.layers\.0\.self_attn, model"):
        seen["self_attn"]
    for wrong in (True, None, 0.0):
        with pytest.raises(TypeError, match="layer: expected a name or a number, received"):
            seen[wrong]  # type: ignore[index]


def test_what_was_not_measured() -> None:
    seen, _ = hand(measures=["entropy", "peak"])
    assert seen[0]["peak"] is seen[0].peak
    with pytest.raises(AttributeError, match="'distance' was not measured in layer; there are entropy, peak, target"):
        _ = seen[0].distance
    assert not hasattr(seen[0], "_private")
    several, _ = hand(noise(B, N, W), noise(3, 5, W), measures=["entropy", "peak", measures.Links(2)])
    for name in ("target", "links"):
        with pytest.raises(AttributeError, match=f"'{name}' has no mean over the 2 texts that were seen"):
            getattr(several[0], name)
    with pytest.raises(AttributeError, match="`seen` is per query, and there were several texts"):
        _ = several[0].seen


def test_means_over_texts_of_several_lengths() -> None:
    """2 texts of 7 tokens and 3 of 5: 29 queries; keys beyond the shorter text got nothing from it."""
    x, y = noise(B, N, W), noise(3, 5, W, seed=8)
    seen, model = hand(x, y)
    first, second = Oracle(dense(model, x)), Oracle(dense(model, y))
    assert seen[0].texts == 2
    assert seen[0].count.tolist() == [29] * H
    for name in ("entropy", "distance", "peak", "on_first"):
        both = torch.cat([getattr(o, name)().movedim(1, 0).flatten(1) for o in (first, second)], 1)
        close(getattr(seen[0], name), both.mean(1), name)
    received = first.received().sum(0)
    received[:, :5] += second.received().sum(0)
    close(seen[0].received, received / 29, "received")
    assert seen[0].counts["entropy"].tolist() == [29] * H


# Parts of the weights

PARTS: dict[str, tuple[dict[str, Any], Any]] = {
    "all": ({}, (...,)),
    "a head": ({"head": 2}, (slice(None), 2)),
    "the last head": ({"head": -1}, (slice(None), -1)),
    "heads": ({"head": [2, 0]}, (slice(None), [2, 0])),
    "heads from the end": ({"head": [-1, 1]}, (slice(None), [-1, 1])),
    "a slice of heads": ({"head": slice(1, None)}, (slice(None), slice(1, None))),
    "every second head": ({"head": slice(None, None, 2)}, (slice(None), slice(None, None, 2))),
    "rows": ({"rows": slice(2, 5)}, (..., slice(2, 5), slice(None))),
    "last rows": ({"rows": slice(-3, None)}, (..., slice(-3, None), slice(None))),
    "a row": ({"rows": 3}, (..., 3, slice(None))),
    "the last row": ({"rows": -1}, (..., -1, slice(None))),
    "no rows": ({"rows": slice(5, 2)}, (..., slice(5, 2), slice(None))),
    "columns": ({"cols": slice(1, 4)}, (..., slice(1, 4))),
    "more columns than there are": ({"cols": slice(4, 99)}, (..., slice(4, 99))),
    "the first column": ({"cols": 0}, (..., 0)),
    "the last column": ({"cols": -1}, (..., -1)),
    "a text": ({"batch": 1}, (1,)),
    "the last text": ({"batch": -1}, (-1,)),
    "one number": ({"head": 1, "rows": 5, "cols": 2, "batch": 0}, (0, 1, 5, 2)),
    "a part": ({"head": [1], "rows": slice(3, 6), "cols": slice(0, 4), "batch": 1}, (1, [1], slice(3, 6), slice(0, 4))),
}


def _padded() -> Record:
    model, given = hf_models.model("bert"), hf_models.inputs("bert", padded=True)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(**given)
    return seen


def _sinks() -> Record:
    model = WithMemory(drawn(regard.MultiHeadAttention(W, 6, head_dim=5, num_kv_heads=3, sinks=True)))
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(noise(B, N, W), mask=Causal())
    return seen


def _cross() -> Record:
    model = WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=True)))
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(noise(B, N, W), y := noise(B, M, W, seed=6), y)
    return seen


RECORDS = {
    "llama": llama,
    "generated": lambda: llama(generate=True),
    "padded": _padded,
    "sinks": _sinks,
    "cross": _cross,
    "by hand": lambda: hand(keep="qk")[0],
    "by einsum": lambda: hand(keep="qk", core=by_einsum)[0],
    "the last of two": lambda: hand(noise(3, 5, W), noise(B, N, W), keep="qk")[0],
}


@pytest.fixture(scope="module", params=RECORDS)
def kept(request: Any) -> LayerRecord:
    return RECORDS[request.param]()[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_cut_from_the_whole(name: str, kept: LayerRecord) -> None:
    asked, index = PARTS[name]
    whole = kept.weights()
    assert whole.shape == (*kept.text.shape, kept.text.queries, kept.text.total)  # type: ignore[union-attr]
    got, right = kept.weights(**asked), whole[index]
    assert got.shape == right.shape
    torch.testing.assert_close(got.to(right), right, atol=1e-6, rtol=1e-6)


def test_the_whole_is_what_the_model_says() -> None:
    oracles = hf_models.eager("llama", hf_models.model("llama", "eager"), {"input_ids": hf_models.some_ids()})
    seen = llama()
    for name, oracle in oracles.items():
        close(seen[name].weights(), oracle.p, name, 1e-6)
        close(seen[name].entropy, oracle.entropy(), name)


def test_weights_that_were_not_kept() -> None:
    seen, _ = hand()
    with pytest.raises(ValueError, match='weights: expected a watch with keep="qk", received one that kept nothing'):
        seen[0].weights()
    for keep in (None, "qk"):
        with pytest.raises(ValueError, match='output: expected a watch with keep="qkv", received one that did not'):
            _ = hand(keep=keep)[0][0].output


def test_parts_that_are_not_there() -> None:
    layer = hand(keep="qk")[0][0]
    beyond = ({"head": 3}, {"head": -4}, {"head": [0, 3]}, {"rows": N}, {"rows": -N - 1}, {"cols": N}, {"batch": B})
    for wrong in beyond:
        with pytest.raises(IndexError, match=rf"{next(iter(wrong))} -?\d+: there are (3|7|2)"):
            layer.weights(**wrong)  # type: ignore[arg-type]
    for wrong in ({"rows": slice(0, 5, 2)}, {"cols": slice(None, None, -1)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a slice without a step, received slice"):
            layer.weights(**wrong)  # type: ignore[arg-type]
    for wrong in ({"head": True}, {"head": "1"}, {"head": 1.0}, {"rows": [1, 2]}, {"cols": True}, {"batch": slice(1)}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}: expected a number or a slice, received"):
            layer.weights(**wrong)  # type: ignore[arg-type]


def test_what_the_heads_gave() -> None:
    """P v, and after the projection the layer's own output."""
    seen, model = hand(keep="qkv")
    x = model.norm(noise(B, N, W))
    v = model.layer.v(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, N, E)
    torch.testing.assert_close(seen[0].output, (seen[0].weights() @ v).detach())


# Rollout


def test_rollout() -> None:
    """Two layers: R = A_2 A_1, A the rows of (mean over heads + 1) / 2, for rows that sum to 1."""
    seen = llama()
    first, second = ((layer.weights().double().mean(1) + torch.eye(13)) / 2 for layer in seen)
    close(seen.rollout(), second @ first, "rollout", 1e-6)
    close(seen.rollout().sum(-1), torch.ones(2, 13), "rows", 1e-6)


def test_rollout_leaves_cross_attention_out() -> None:
    model = drawn(nn.TransformerDecoder(nn.TransformerDecoderLayer(28, 4, 13, batch_first=True, dropout=0.0), 2))
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(noise(B, N, 28), noise(B, M, 28, seed=6))
    assert [layer.kind for layer in seen] == ["self", "cross"] * 2
    assert repr(seen) == "Record of 4 layers, 2 of them cross"
    first, second = ((seen[i].weights().mean(1) + torch.eye(N)) / 2 for i in (0, 2))
    close(seen.rollout(), second @ first, "rollout", 1e-9)


def test_rollouts_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='weights: expected a watch with keep="qk"'):
        llama(keep=None).rollout()
    with pytest.raises(ValueError, match=r"rollout: expected self attention of one text in all layers, received sizes"):
        _cross().rollout()
    both = llama()
    both.by_name["other"] = hand(keep="qk")[0][0]
    with pytest.raises(ValueError, match=r"received sizes \{\(\d+, \d+\), \(\d+, \d+\)\}"):
        both.rollout()
    monkeypatch.setattr("regard.heads.record.record.DENSE", 12)
    with pytest.raises(ValueError, match="rollout: expected at most 12 tokens, for it builds dense maps, received 13"):
        llama().rollout()


# Tables


def test_table() -> None:
    """A row for each head: measures per query as means, previous, itself and next from the offsets."""
    x = noise(B, N, W)
    seen, model = hand(x)
    oracle, rows = Oracle(dense(model, x)), seen.table()
    assert isinstance(rows, Table)
    assert len(rows) == H
    names = ["layer", "head", "entropy", "peak", "distance", "offset", "previous", "itself", "next", "on_first"]
    assert sorted(rows[0]) == sorted(names)
    for head, row in enumerate(rows):
        assert (row["layer"], row["head"]) == ("layer", head)
        for name in names[2:]:
            assert row[name] == pytest.approx(getattr(oracle, name)()[:, head].mean().item(), abs=1e-5), name


def test_table_of_everything() -> None:
    """What is asked for itself is not taken from the offsets; classes of tokens have a column each; cross says so."""
    model, given = hf_models.model("t5"), hf_models.inputs("t5")
    kinds = measures.Tokens({"low": [5, 7, 9], "high": [11, 13]})
    wanted = [
        "offsets",
        "previous",
        "induction",
        "contribution",
        "received",
        "divergence",
        measures.Links(2),
        measures.Heatmap(3),
        measures.Local(2),
        kinds,
    ]
    with torch.no_grad(), regard.watch(model, measures=wanted) as seen:
        model(**given)
    rows = seen.table()
    assert len(rows) == 6 * 3
    first, cross = rows[0], next(row for row in rows if "EncDec" in row["layer"])
    around = {"previous", "itself", "next", "local"}
    assert set(first) == {"layer", "head", "induction", "contribution", "low", "high"} | around
    assert cross["kind"] == "cross"
    assert "kind" not in first
    ids, p = given["input_ids"], hf_models.eager("t5", hf_models.model("t5", "eager"), given)[first["layer"]].p
    for name, wanted_ids in (("low", (5, 7, 9)), ("high", (11, 13))):
        chosen = torch.isin(ids, torch.tensor(wanted_ids))[:, None, None]
        assert first[name] == pytest.approx((p * chosen).sum(-1)[:, 0].mean().item(), abs=1e-5)


def test_a_table_as_text() -> None:
    rows = Table([{"layer": "a", "head": 0, "peak": 0.25}, {"layer": "long", "head": 11, "kind": "cross"}])
    assert str(rows).splitlines() == ["layer  head   peak  kind", "a         0  0.250", "long     11         cross"]
    assert str(Table()) == "(no rows)"
    assert str(hand()[0].table()).splitlines()[0].split()[:3] == ["layer", "head", "entropy"]


def test_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Table([{"head": 0}, {"head": 1}])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pandas is not installed; it comes with: pip install 'regard\[tables\]'"):
        rows.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    assert rows.to_pandas() == ("frame", [{"head": 0}, {"head": 1}])


# Files


class Confident(measures.PerQuery):
    """A measure of one's own."""

    gives = {"confident": "query"}

    def __init__(self, least: float = 0.5) -> None:
        self.least = least

    def of(self, strip: measures.Strip, prepared: Any) -> Tensor:
        return (strip.weights.amax(-1) > self.least).to(strip.weights.dtype)


class Entropy(measures.PerQuery):
    """Of one's own, by the name of another: in bits."""

    gives = {"entropy": "query"}

    def __init__(self, base: float) -> None:
        self.base = base

    def of(self, strip: measures.Strip, prepared: Any) -> Tensor:
        return strip.entropies / torch.tensor(self.base).log()


def everything() -> list[Any]:
    return [
        *("entropy", "peak", "distance", "offset", "received", "on_first", "previous", "next", "itself"),
        *("induction", "duplicate", "contribution", "divergence"),
        measures.Offsets(3, 2),
        measures.Local(2),
        measures.Heatmap(3, 2),
        measures.Crop(1, 4, 0, 3),
        measures.Links(3),
        Confident(0.7),
        measures.Tokens({"odd": range(1, 97, 2), "few": [5, 7, 11]}),
    ]


def _family(family: str, *forwards: dict[str, Any], **options: Any) -> Record:
    model = hf_models.model(family)
    with torch.no_grad(), regard.watch(model, measures=everything(), **options) as seen:
        for given in forwards:
            model(**given)
    return seen


def _generated() -> Record:
    model = hf_models.model("llama")
    with regard.watch(model, measures=everything()) as seen:
        model.generate(hf_models.some_ids(), **GREEDY)
    return seen


FILES = {
    "one text": lambda: _family("bert", hf_models.inputs("bert")),
    "padded": lambda: _family("bert", hf_models.inputs("bert", padded=True)),
    "kept": lambda: _family("llama", {"input_ids": hf_models.some_ids()}, keep="qkv"),
    "cross": lambda: _family("t5", hf_models.inputs("t5")),
    "called again": lambda: _family("albert", hf_models.inputs("albert")),
    "two texts": lambda: _family("llama", *({"input_ids": hf_models.some_ids(b, n)} for b, n in ((2, 13), (3, 7)))),
    "three texts": lambda: _family("t5", *[hf_models.inputs("t5")] * 3),
    "generated": _generated,
    "by hand": lambda: hand()[0],
    "no measures": lambda: hand(measures=[], keep="qk")[0],
    "bits": lambda: hand(measures=[Entropy(2.0)])[0],
    "float64": lambda: _sinks(),
}


def same(got: LayerRecord, right: LayerRecord) -> None:
    """Everything that can be asked of a layer."""
    assert (got.name, got.kind, got.texts, got.heads) == (right.name, right.kind, right.texts, right.heads)
    assert got.axes == right.axes
    assert sorted(got.values) == sorted(right.values)
    for name, value in right.values.items():
        for mine, theirs in zip(_tuple(got.values[name]), _tuple(value), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), name
    for name in right._sums_of_last():
        assert torch.equal(got.per_head(name), right.per_head(name)), name
    assert torch.equal(got.count, right.count)
    assert got.counts.keys() == right.counts.keys()
    for name, count in right.counts.items():
        assert torch.equal(got.counts[name], count), name
    assert torch.equal(got.last_seen(), right.last_seen())
    assert (got.uniform is None) == (right.uniform is None)
    if right.uniform is not None:
        same(got.uniform, right.uniform)  # type: ignore[arg-type]


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


@pytest.mark.of_cpu("what is loaded is on the CPU")
@pytest.mark.parametrize("name", FILES)
def test_what_was_saved_is_loaded(name: str, tmp_path: Path) -> None:
    right = FILES[name]()
    right.save(tmp_path / "record.safetensors")
    got = Record.load(str(tmp_path / "record.safetensors"))
    assert got.layers == right.layers
    for mine, theirs in zip(got, right, strict=True):
        same(mine, theirs)
    assert got.table() == right.table()
    if name != "no measures" and name != "bits":
        assert got.roles() == right.roles()
    with pytest.raises(ValueError, match='weights: expected a watch with keep="qk", received one that kept nothing'):
        got[0].weights()
    # And once more: what was loaded can be saved.
    got.save(tmp_path / "again.safetensors")
    for mine, theirs in zip(Record.load(tmp_path / "again.safetensors"), right, strict=True):
        same(mine, theirs)


def test_measures_are_what_they_were(tmp_path: Path) -> None:
    """regard's own with their options; others by what they gave."""
    FILES["one text"]().save(tmp_path / "record")
    found = {type(one).__name__: one for one in Record.load(tmp_path / "record")[0].measures}
    assert (found["Offsets"].before, found["Offsets"].after) == (3, 2)  # type: ignore[attr-defined]
    assert (found["Crop"].r1, found["Crop"].c1) == (4, 3)  # type: ignore[attr-defined]
    assert found["Local"].width == 2  # type: ignore[attr-defined]
    assert found["Tokens"].names == ("odd", "few")  # type: ignore[attr-defined]
    assert found["Stored"].gives == {"confident": "query"}


def test_tokens_of_a_loaded_record(tmp_path: Path) -> None:
    model, given = hf_models.model("bert"), hf_models.inputs("bert")
    with torch.no_grad(), regard.watch(model) as seen:
        model(**given)
    seen.tokens = tokens = [["[CLS]", *"abc,efghi.k", "[SEP]"]] * 2
    seen.save(tmp_path / "record")
    loaded = Record.load(tmp_path / "record")
    loaded.tokens = None
    for mine, theirs in zip(loaded.roles(), seen.roles(), strict=True):
        assert (mine.role, mine.also) == (theirs.role, theirs.also)
        assert mine.evidence == pytest.approx(theirs.evidence, abs=1e-6)
    with pytest.raises(ValueError, match="tokens: expected a record whose text is kept, received one that was loaded"):
        loaded.roles(tokens=tokens)


def test_a_record_of_nothing(tmp_path: Path) -> None:
    Record().save(tmp_path / "record")
    assert Record.load(tmp_path / "record").layers == []


def test_files_of_others(tmp_path: Path) -> None:
    text, other, broken = (tmp_path / name for name in ("text", "other", "broken"))
    text.write_text("not a file of tensors at all")
    save_file({"weight": torch.zeros(3)}, other)
    broken.write_bytes(b"")
    for path in (text, other, broken):
        with pytest.raises(ValueError, match=f"{path}: expected a file that a record's `save` wrote, received "):
            Record.load(path)
    with pytest.raises(FileNotFoundError):
        Record.load(tmp_path / "nowhere")


def test_files_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "record"
    hand()[0].save(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["regard.record"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["version"] == 1
    save_file(tensors, path, metadata={"regard.record": json.dumps(about | {"version": 2})})
    with pytest.raises(ValueError, match="record: version: expected version 1 of the format, received 2"):
        Record.load(path)


def test_safetensors_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen, _ = hand()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: seen.save(tmp_path / "record"), lambda: Record.load(tmp_path / "record")):
        with pytest.raises(ImportError, match=r"safetensors is not installed; it comes with: pip install 'regard\["):
            call()


def test_what_was_kept_is_not_written(tmp_path: Path) -> None:
    for keep in (None, "qkv"):
        hand(keep=keep)[0].save(tmp_path / str(keep))
    assert (tmp_path / "qkv").stat().st_size == (tmp_path / "None").stat().st_size


def test_names_of_a_file_do_not_command_the_terminal(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("\x1b[2J\n\u202e", regard.MultiHeadAttention(6, num_heads=2))

        def forward(self, x):
            return next(iter(self.children()))(x)

    with regard.watch(model := Odd()) as seen, torch.no_grad():
        model(torch.randn(1, 5, 6))
    seen.save(tmp_path / "seen.safetensors")
    loaded = regard.heads.Record.load(tmp_path / "seen.safetensors")
    assert loaded.layers == ["\x1b[2J\n\u202e"]
    with pytest.raises(AttributeError) as error:
        _ = loaded[0].nothing
    for said in (str(loaded.table()), str(loaded.roles()), repr(loaded[0]), str(error.value)):
        assert all(line.isprintable() for line in said.split("\n"))
        assert "\\u202e" in said
    assert len(str(loaded.table()).split("\n")) == 3  # (a line for each head, whatever is in its name)


# What draw and serve ask of a record


def test_a_layer_says_its_sizes_and_whether_it_was_read_in_chunks() -> None:
    prompt, generated = llama(), llama(generate=True)
    assert prompt[0].shape == tuple(prompt[0].weights().shape)
    assert generated[0].shape == tuple(generated[0].weights().shape)
    assert (prompt[0].num_chunks, generated[0].num_chunks) == (1, 5)
    assert (prompt[0].query_padding, prompt[0].key_padding) == (None, None)


def test_pooled_weights_are_sums_of_weights() -> None:
    layer = hand(keep="qk")[0][0]
    n, m = layer.shape[2:]
    close(layer.pooled_weights(n, m), layer.weights(), "one cell for each weight")
    close(layer.pooled_weights(1, 1)[..., 0, 0], layer.weights().sum((2, 3)), "one cell for all")
    with pytest.raises(ValueError, match='weights: expected a watch with keep="qk"'):
        hand()[0][0].pooled_weights(1, 1)


def test_values_can_be_dropped_and_weights_stay() -> None:
    seen = llama(keep="qkv")
    before = seen[0].weights()
    assert seen[0].keeps_values
    seen[0].drop_values()
    layer = seen[0]
    assert (layer.keeps_values, layer.keeps_output, layer.has_input, layer.projection) == (False, False, False, None)
    assert torch.equal(seen[0].weights(), before)
    assert seen[1].keeps_values


def test_a_record_of_some_layers_shares_them() -> None:
    seen = llama()
    assert list(seen.subset(seen.layers[1:])) == [seen[1]]


def test_scalars_are_the_columns_of_the_table() -> None:
    seen = llama()
    for name, values in seen[0].scalars().items():
        assert [row[name] for row in seen.table() if row["layer"] == seen.layers[0]] == values.tolist()
