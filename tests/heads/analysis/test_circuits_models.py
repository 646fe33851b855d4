"""Circuits of transformers' models, read in memory; and of the two real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from heads import hf_models
from heads.analysis.circuit_models import score_of
from heads.tiny_models import tiny
from torch import Tensor

from regard import models
from regard.heads import circuits
from regard.models import EMBEDDED

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")
WITH_MINILM = pytest.mark.skipif(EMBEDDED["minilm"].folder() is None, reason="the weights of it are not installed")
EXACT = {"atol": 1e-10, "rtol": 1e-10}


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt_neox"])
def test_in_memory_as_from_its_files(family: str, tmp_path: Path) -> None:
    """The same scores as of the model that `models.load` makes of what `save_pretrained` writes."""
    theirs = hf_models.model(family)
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path)
    for function in (circuits.copying, circuits.matching):
        for a, b in zip(function(theirs).scores.values(), function(ours).scores.values(), strict=True):
            torch.testing.assert_close(a, b, **EXACT)
    one, other = circuits.composition(theirs), circuits.composition(ours)
    for kind, scores in one.scores.items():
        torch.testing.assert_close(scores, other.scores[kind], equal_nan=True, **EXACT)
    torch.testing.assert_close(circuits.read(theirs, after=1).tokens, circuits.read(ours, after=1).tokens, **EXACT)
    assert all(name in dict(theirs.named_modules()) for name in circuits.copying(theirs).scores)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def test_gpt2_by_its_own_weights() -> None:
    """Conv1D weights (in, out), q, k and v side by side, LayerNorm, a tied head."""
    model = hf_models.model("gpt2")
    found = circuits.copying(model)
    assert list(found.scores) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    tokens = state["transformer.wte.weight"]
    width = tokens.shape[1]
    mean = torch.eye(width, dtype=torch.float64) - 1 / width
    heads, d = model.config.n_head, width // model.config.n_head
    for i, name in enumerate(found.scores):
        before = mean @ torch.diag(state[f"transformer.h.{i}.ln_1.weight"])
        after = mean @ torch.diag(state["transformer.ln_f.weight"]) @ centred(tokens).T
        value, out = state[f"{name}.c_attn.weight"][:, 2 * width :], state[f"{name}.c_proj.weight"]
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            dense = tokens @ before @ value[:, part] @ out[part] @ after
            assert found[i][head].item() == pytest.approx(score_of(dense).item(), abs=1e-10)


def test_llama_by_its_own_weights() -> None:
    """Grouped heads, RMSNorm, a head of its own."""
    model = hf_models.model("llama")
    found = circuits.copying(model, centre=False)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for i, name in enumerate(found.scores):
        assert name == f"model.layers.{i}.self_attn"
        for head in range(config.num_attention_heads):
            kv = slice(head // group * d, (head // group + 1) * d)
            reads = state["model.embed_tokens.weight"] * state[f"model.layers.{i}.input_layernorm.weight"]
            value = state[f"{name}.v_proj.weight"][kv]
            out = state[f"{name}.o_proj.weight"][:, head * d : (head + 1) * d]
            dense = reads @ value.T @ out.T @ torch.diag(state["model.norm.weight"]) @ state["lm_head.weight"].T
            assert found[i][head].item() == pytest.approx(score_of(dense).item(), abs=1e-10)


def test_qwen3_has_values_alone() -> None:
    model = hf_models.model("qwen3")
    assert circuits.copying(model)[0].shape == (6,)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: expected scores that are a product of q and k"):
        circuits.matching(model)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_their_encoders(family: str) -> None:
    model = hf_models.model(family)
    with pytest.raises(
        ValueError, match=r"received \w+Model, which has none.*remedy: circuits.read\(model, tied=True\)"
    ):
        circuits.copying(model)
    weights = circuits.read(model, tied=True)
    assert weights.layers[0].leaves
    assert circuits.copying(weights)[1].isfinite().all()


def test_models_without_their_head() -> None:
    """The layers are read; there is no unembedding, unless the embedding is asked for."""
    body = hf_models.model("llama").model
    assert circuits.composition(body).scores["q"].shape == (12, 12)
    with pytest.raises(ValueError, match="received LlamaModel, which has none"):
        circuits.copying(body)
    assert circuits.copying(circuits.read(body, tied=True))[0].shape == (6,)


def test_other_models_are_refused() -> None:
    """A family whose norms are not known, and weights that an adapter changes."""
    model: Any = tiny("GemmaForCausalLM", {})
    with pytest.raises(
        ValueError, match=r"whose norms and residual stream are known, received GemmaForCausalLM.*gemma"
    ):
        circuits.copying(model)
    model = hf_models.model("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["o_proj"], r=2), model)
    with pytest.raises(ValueError, match=r"received LlamaForCausalLM \(.*self_attn.o_proj"):
        circuits.copying(model)


# The real ones


@WITH_SMOLLM2
@pytest.mark.slow
def test_smollm2(smollm2: Any) -> None:
    """The best induction heads copy, by tokens after the first layer; their keys read what the best previous-token head
    writes. Measured: copying 0.823 of 18.6 (number 17 of 270), 0.338 of 17.3 (73) and 0.972 of 23.2 (3), the median
    0.121; -0.980 of 24.4, which suppresses what it attends to. K-composition of 16.0 with 17.3 0.168, of 17.8 with 18.6
    0.175, of random matrices 0.042."""
    weights = circuits.read(smollm2, after=1)
    found = circuits.copying(weights)
    values = torch.cat([*found.scores.values()])
    assert found[18][6] > values.quantile(0.9)
    assert found[17][3] > values.quantile(0.65)
    assert found[23][2] > values.quantile(0.95)
    assert found[24][4] < values.quantile(0.05)
    assert found[18][6] == pytest.approx(0.823, abs=0.01)
    assert circuits.writes(weights, 23, 2, " Mary").promotes[0].text == " Mary"
    composed = circuits.composition(weights, kinds="k")
    assert composed.baselines["k"].mean == pytest.approx(576**-0.5, rel=0.01)
    for later, feeding in (((17, 3), [(16, 0)]), ((17, 4), [(16, 0)]), ((18, 6), [(17, 8), (16, 0)])):
        column = composed.scores["k"][:, composed.heads.index(later)].nan_to_num(nan=-1.0)
        best = column.topk(len(feeding) + 1)
        assert [composed.heads[i] for i in best.indices.tolist()][:-1] == feeding
        assert best.values[-2] > 3.5 * composed.baselines["k"].mean
        assert best.values[-1] < 0.5 * best.values[-2], "no other head comes near"


@WITH_MINILM
def test_minilm() -> None:
    """Six layers after whose norms the stream goes on: all pairs have a score, and copying has no unembedding."""
    weights = circuits.read(models.load("minilm", check=False))
    found = circuits.composition(weights, kinds="k")
    values = found.scores["k"][found.scores["k"].isfinite()]
    assert len(values) == 12 * 12 * 15
    assert found.baselines["k"].mean == pytest.approx(384**-0.5, rel=0.01)
    with pytest.raises(ValueError, match="received Encoder, which has none"):
        circuits.copying(weights)
