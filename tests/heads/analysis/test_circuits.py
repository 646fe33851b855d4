"""`heads.circuits` against dense matrices that are written out, against models that run, and for planted heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from heads.analysis.circuit_models import (
    CONFIGS,
    LAYERS,
    V,
    W,
    leave_matrix,
    made,
    norm_matrix,
    ov_matrices,
    qk_matrices,
    score_of,
)
from torch import Tensor, nn

import regard
from regard.heads import circuits
from regard.heads.analysis.circuits.factored import eigenvalue_score
from regard.layer import MultiHeadAttention
from regard.models import blank
from regard.positions import Rotary, YaRN

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unscaled(x: Tensor) -> Tensor:
    """Rows whose mean is 0 and whose square is 1 in the mean: the scale of a norm is 1 for them."""
    x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt()


# Factored matrices


def test_factored_matrices() -> None:
    left, right, gram = normal(2, 7, 3), normal(2, 3, 7, seed=1), normal(7, 7, seed=2)
    matrix = circuits.FactoredMatrix(left, right)
    torch.testing.assert_close(matrix.dense(), left @ right)
    torch.testing.assert_close(matrix.norm(), torch.linalg.matrix_norm(left @ right), **EXACT)
    for found, dense in ((matrix.eigenvalues(), left @ right), (matrix.eigenvalues(gram), left @ right @ gram)):
        right_ones = torch.linalg.eigvals(dense)
        for own, all_of_them in zip(found, right_ones, strict=True):
            for value in own:
                assert (all_of_them - value).abs().min() < 1e-12
        torch.testing.assert_close(found.sum(-1), right_ones.sum(-1), **EXACT)
    assert repr(matrix) == "FactoredMatrix((2, 7, 3) @ (2, 3, 7))"


def test_eigenvalue_scores() -> None:
    values = torch.tensor([[3 + 4j, 3 - 4j], [-2, -1], [1, -1], [2j, -2j], [0, 0]], dtype=torch.complex128)
    assert eigenvalue_score(values).tolist() == pytest.approx([0.6, -1, 0, 0, 0])


# W_OV and W_QK against a layer that runs


@pytest.mark.parametrize("kind", CONFIGS)
def test_ov_is_what_a_head_adds(kind: str) -> None:
    """A text of one token: each head attends to it with weight 1. Biases are 0; then the norm's scale is 1, too."""
    model = made(kind)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    for i, block in enumerate(model.blocks):
        x = unscaled(normal(1, 1, W, seed=i))
        with regard.watch(block, measures=[], keep="qkv") as seen, torch.no_grad():
            block(x)
        added = seen[0].projected()[0, :, 0]  # (H, W)
        for head in range(block.attention.num_heads):
            matrix = circuits.ov(model, i, head)
            assert matrix.left.shape == (W, block.attention.head_dim)
            torch.testing.assert_close(x[0, 0] @ matrix.dense(), added[head], **EXACT)


def interleaved(model: Any) -> Any:
    for block in model.blocks:
        block.attention.position_encoding = Rotary(4, base=11.0, interleaved=True)
    return model


def with_amplitude(model: Any) -> Any:
    for block in model.blocks:
        block.attention.position_encoding = Rotary(4, scaling=YaRN(3.0, 7))
        assert block.attention.position_encoding.attention_factor != 1
    return model


@pytest.mark.parametrize("kind", [*CONFIGS, "interleaved", "with an amplitude"])
def test_qk_is_the_score(kind: str) -> None:
    """Of every query with every key, at any positions, before and after it."""
    of_kind = {"interleaved": interleaved, "with an amplitude": with_amplitude}
    model = of_kind[kind](made("as Llama")) if kind in of_kind else made(kind)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    n, block = 5, model.blocks[1]
    x = unscaled(normal(1, n, W))
    with regard.watch(block, measures=[], keep="qkv") as seen, torch.no_grad():
        block(x, positions=torch.arange(3, 3 + n))
    layer = block.attention
    keys = seen[0].k.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
    scores = seen[0].q @ keys.mT * layer.head_dim**-0.5  # (1, H, N, N)
    for head in range(layer.num_heads):
        for i in range(n):
            for j in range(n):
                matrix = circuits.qk(model, "blocks.1.attention", head, offset=i - j)
                found = x[0, i] @ matrix.left @ (matrix.right @ x[0, j])
                torch.testing.assert_close(found, scores[0, head, i, j], **EXACT)


def test_the_mean_is_not_read_after_a_layer_norm() -> None:
    model = made("as GPT-2")
    ones = torch.ones(W, dtype=torch.float64)
    assert (ones @ circuits.ov(model, 0, 1).dense()).abs().max() < 1e-12
    assert (ones @ circuits.qk(model, 0, 1).dense()).abs().max() < 1e-12
    assert (circuits.qk(model, 0, 1).dense() @ ones).abs().max() < 1e-12
    assert (ones @ circuits.ov(made("as Llama"), 0, 1).dense()).abs().max() > 1e-2


# Copying and matching against the V x V matrix


def ends(model: Any, number: int, centre: bool) -> tuple[Tensor, Tensor]:
    """What the heads of a layer read of each token, (V, W), and what they write as logits, (W, V)."""
    embedding = model.embedding.tokens.weight.detach()
    unembedding = model.head.weight.detach() if hasattr(model, "head") else embedding
    unembedding = unembedding - unembedding.mean(0) if centre else unembedding
    reads = embedding @ norm_matrix(model.embedding.norm) @ leave_matrix(model.blocks[:number])
    writes = leave_matrix(model.blocks[number:]) @ norm_matrix(model.norm) @ unembedding.T
    return reads, writes


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_copying(kind: str, centre: bool) -> None:
    model = made(kind)
    found = circuits.copying(circuits.read(model, tied=kind == "as BERT"), centre=centre)
    assert list(found.scores) == [f"blocks.{i}.attention" for i in range(LAYERS)]
    for i, block in enumerate(model.blocks):
        reads, writes = ends(model, i, centre)
        dense = [reads @ matrix @ writes for matrix in ov_matrices(block)]
        assert dense[0].shape == (V, V)
        torch.testing.assert_close(found[i], torch.stack([score_of(matrix) for matrix in dense]), **EXACT)
        traces = torch.stack([matrix.trace() for matrix in dense])
        torch.testing.assert_close(found.eigenvalues[f"blocks.{i}.attention"].sum(-1).real, traces, **EXACT)


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("kind, offset", [*((kind, 0) for kind in CONFIGS), ("as Llama", 3), ("as NeoX", -2)])
def test_matching(kind: str, offset: int, centre: bool) -> None:
    model = made(kind)
    found = circuits.matching(model, offset=offset, centre=centre)
    for i, block in enumerate(model.blocks):
        tokens, _ = ends(model, i, centre)
        keys = tokens - tokens.mean(0) if centre else tokens
        right = torch.stack([score_of(tokens @ matrix @ keys.T) for matrix in qk_matrices(block, offset)])
        torch.testing.assert_close(found[i], right, **EXACT)
    assert found.offset == offset


def test_offsets_matter_with_rotary_alone() -> None:
    near, far = (circuits.matching(made("as Llama"), offset=offset)[0] for offset in (0, 5))
    assert (near - far).abs().max() > 1e-2
    near, far = (circuits.matching(made("as GPT-2"), offset=offset)[0] for offset in (0, 5))
    assert torch.equal(near, far)


def test_the_mean_of_the_unembedding_changes_nothing() -> None:
    """Added to every token's row it adds the same to all logits; so the score is the same, unless as published."""
    model = made("as Llama")
    before = [circuits.copying(model, centre=centre)[1] for centre in (True, False)]
    model.head.weight.data += normal(W, seed=5)
    after = [circuits.copying(model, centre=centre)[1] for centre in (True, False)]
    torch.testing.assert_close(before[0], after[0], **EXACT)
    assert (before[1] - after[1]).abs().max() > 1e-3


def test_grouped_heads_are_repeated_ones() -> None:
    """The scores are those of a model with a kv head for each query head."""
    model, full = made("as Llama"), made("as Llama", num_kv_heads=6)
    state = model.state_dict()
    for i in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            key = f"blocks.{i}.attention.{name}.weight"
            state[key] = state[key].unflatten(0, (3, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    for function in (circuits.copying, circuits.matching):
        for a, b in zip(function(model).scores.values(), function(full).scores.values(), strict=True):
            torch.testing.assert_close(a, b, **EXACT)
    for kind, scores in circuits.composition(model).scores.items():
        torch.testing.assert_close(scores, circuits.composition(full).scores[kind], equal_nan=True, **EXACT)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_after_some_layers(kind: str) -> None:
    """The stream after a layer, of each token by itself; the layers before read the embedding as ever."""
    model = made(kind)
    model.train()
    weights = circuits.read(model, after=1, tied=kind == "as BERT")
    assert model.training
    states: list[Tensor] = []
    with torch.no_grad():
        (model.hidden if kind != "as BERT" else model)(torch.arange(V)[:, None], states=states)
    torch.testing.assert_close(weights.tokens, states[1][:, 0], **EXACT)
    found = circuits.copying(weights)
    plain = circuits.copying(circuits.read(model, tied=kind == "as BERT"))
    torch.testing.assert_close(found[0], plain[0], **EXACT)
    for i in (1, 2):
        _, writes = ends(model, i, centre=True)
        reads = states[1][:, 0] @ leave_matrix(model.blocks[1:i])
        right = torch.stack([score_of(reads @ matrix @ writes) for matrix in ov_matrices(model.blocks[i])])
        torch.testing.assert_close(found[i], right, **EXACT)
    assert "tokens are taken after 1 layer" in found.caption()


# Planted heads


def planted() -> circuits.ModelWeights:
    """Heads of width 5: one that writes what it reads, one that writes the opposite, one that turns it by a quarter."""
    read = normal(1, 6, W)
    quarter = torch.kron(torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(3)).double()
    output = torch.stack([read[0].T, -read[0].T, read[0].T @ quarter])
    embedding = normal(V, W, seed=3)
    query = torch.stack([read[0], -read[0], quarter @ read[0]])
    layer = circuits.LayerWeights("planted", query, read, read, output)
    return circuits.ModelWeights([layer], embedding, embedding)


@pytest.mark.parametrize("centre", [True, False])
def test_planted_heads(centre: bool) -> None:
    """W_OV and W_QK are A^T A, -A^T A and A^T J A: all eigenvalues are positive, negative, imaginary."""
    assert circuits.copying(planted(), centre=centre)[0].tolist() == pytest.approx([1, -1, 0], abs=1e-10)
    assert circuits.matching(planted(), centre=centre)[0].tolist() == pytest.approx([1, -1, 0], abs=1e-10)


def test_a_head_whose_ov_is_the_identity() -> None:
    identity = torch.eye(W, dtype=torch.float64)[None]
    tokens = torch.eye(W, dtype=torch.float64)  # each token is a direction of its own
    layer = circuits.LayerWeights("whole", identity, identity, identity, identity)
    weights = circuits.ModelWeights([layer], tokens, tokens)
    assert circuits.copying(weights)[0].item() == pytest.approx(1)
    found = circuits.writes(weights, 0, 0, token=7)
    assert found.rank == 1
    assert found.promotes[0] == (7, "token 7", pytest.approx(1 - 1 / W))
    assert found.suppresses[0].adds == pytest.approx(-1 / W)


# Tables


def test_tables() -> None:
    found = circuits.copying(planted())
    rows = found.table()
    assert [(row["layer"], row["head"]) for row in rows] == [("planted", 0), ("planted", 2), ("planted", 1)]
    assert [row["copying"] for row in rows] == pytest.approx([1, 0, -1], abs=1e-10)
    lines = str(found).splitlines()
    assert lines[0].startswith("copying of 3 heads, median ")
    assert lines[1].split() == ["layer", "head", "copying"]
    assert lines[2].split() == ["planted", "0", "1.000"]
    assert str(circuits.matching(planted(), offset=3)).startswith("offset 3: matching of 3 heads")


def test_what_is_left_out_is_said() -> None:
    assert circuits.read(made("as Llama")).notes == ("norms are folded in, their scales left out",)
    assert circuits.read(made("as GPT-2")).notes[1:] == ("biases are left out", "positions are left out")
    post = circuits.read(made("as BERT"), tied=True)
    assert post.notes[0] == "norms are folded in (all on the way from layer to layer), their scales left out"
    assert post.notes[-1] == "the token embedding is taken for the unembedding"
    assert "the token embedding is taken for the unembedding" in str(circuits.copying(post))
    assert circuits.read(made("as Llama"), tied=True).notes == circuits.read(made("as Llama")).notes


# Refusals


def test_encoders_have_no_unembedding() -> None:
    weights = circuits.read(made("as BERT"))
    expected = (
        r"model: expected a projection to the vocabulary \(unembedding\), received Encoder, which has none; "
        r"remedy: circuits.read\(model, tied=True\), which takes the token embedding for it"
    )
    with pytest.raises(ValueError, match=expected):
        circuits.copying(weights)
    with pytest.raises(ValueError, match=expected):
        circuits.writes(weights, 0, 0, token=1)
    assert circuits.matching(weights)[0].shape == (6,)


def test_normalised_queries_and_keys_are_refused() -> None:
    model = made("as Llama", qk_norm="rms")
    expected = (
        r"blocks\.\d\.attention: expected scores that are a product of q and k, received q and k that are normalised "
        r"per head \(qk_norm\); remedy: circuits.ov, circuits.copying, circuits.composition\(model, kinds='v'\)"
    )
    for refused in (
        lambda: circuits.matching(model),
        lambda: circuits.qk(model, 0, 0),
        lambda: circuits.composition(model),
    ):
        with pytest.raises(ValueError, match=expected):
            refused()
    assert circuits.copying(model)[0].shape == (6,)
    assert list(circuits.composition(model, kinds="v").scores) == ["v"]


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(6, 3)


def test_models_whose_stream_is_not_known() -> None:
    for model in (Alone(), nn.Linear(2, 3), None):
        with pytest.raises(
            ValueError,
            match=r"model: expected a model of regard.models, or one of transformers of the families bert.*whose norms "
            rf"and residual stream are known, received {type(model).__name__}; remedy: circuits.ModelWeights\(",
        ):
            circuits.copying(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected weights with values, received some on the meta device"):
        circuits.read(blank("minilm"))
    layer = planted().layers[0]
    with pytest.raises(ValueError, match="model: expected an embedding of tokens, received none"):
        circuits.matching(circuits.ModelWeights([layer]))
    with pytest.raises(ValueError, match=r"model: expected a projection to the vocabulary.*remedy: a language model"):
        circuits.copying(circuits.ModelWeights([layer]))
    with pytest.raises(ValueError, match="layers: expected one at least, received none"):
        circuits.ModelWeights([])


def test_weights_that_something_changes() -> None:
    """An adapter, a parametrisation, a head that is no projection: what is computed is not the weight alone."""
    model = made("as Llama")
    model.blocks[1].attention.v_proj = nn.Sequential(model.blocks[1].attention.v_proj)
    with pytest.raises(
        ValueError,
        match=r"blocks\.1\.attention\.v_proj: expected a plain nn\.Linear, received Sequential whose weight is a "
        "NoneType; remedy: merge adapters, remove parametrisations, read before quantising or sharding",
    ):
        circuits.read(model)
    model = made("as Llama")
    nn.utils.parametrizations.weight_norm(model.blocks[2].attention.out_proj)
    with pytest.raises(
        ValueError, match=r"out_proj: expected a plain nn\.Linear, received ParametrizedLinear whose weight"
    ):
        circuits.read(model)
    model = made("as Llama")
    model.embedding.tokens = nn.Identity()
    with pytest.raises(ValueError, match=r"embedding\.tokens: expected a plain nn\.Embedding, received Identity whose"):
        circuits.read(model)


@pytest.mark.parametrize("what", ["key", "value", "output"])
def test_weights_that_do_not_fit(what: str) -> None:
    shapes = {"query": (6, 4, W), "key": (3, 4, W), "value": (3, 5, W), "output": (6, W, 5)}
    wrong = {"key": (3, 5, W), "value": (2, 5, W), "output": (6, 5, W)}
    given = {name: normal(*(wrong[name] if name == what else shape)) for name, shape in shapes.items()}
    with pytest.raises(
        ValueError, match=rf"mine: {what}: expected \(.*\) for query \(6, 4, 17\), G a divisor of H, rec"
    ):
        circuits.LayerWeights("mine", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mine: key: expected \(4, 4, 17\).*received \(4, 4, 17\)"):
        circuits.LayerWeights("mine", normal(6, 4, W), normal(4, 4, W), normal(4, 5, W), normal(6, W, 5))


def test_wrong_arguments() -> None:
    model = made("as Llama")
    for layer in (3, -4, "blocks.3.attention", True, 1.0, None):
        with pytest.raises(
            ValueError, match=r"layer: expected one of 3, such as 0 or 'blocks\.0\.attention', received"
        ):
            circuits.ov(model, layer, 0)  # type: ignore[arg-type]
    for head in (6, -7, True, "0"):
        with pytest.raises(ValueError, match="head: expected one of 6, received"):
            circuits.qk(model, 0, head)  # type: ignore[arg-type]
    for offset in (1.0, True, None):
        with pytest.raises(
            TypeError, match="offset: expected an integer: how far the key is before the query, received"
        ):
            circuits.matching(model, offset=offset)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after: expected at most 3 layers, received 4"):
        circuits.read(model, after=4)
    with pytest.raises(ValueError, match="after: expected at least 0, received -1"):
        circuits.read(model, after=-1)
    for wrong in (True, 0.0):
        with pytest.raises(TypeError, match=f"after: expected an integer, received {type(wrong).__name__} {wrong}"):
            circuits.read(model, after=wrong)  # type: ignore[arg-type]
    last, number = circuits.ov(model, -1, -1), circuits.ov(model, 2, 5)
    assert torch.equal(last.left, number.left)
    assert math.isclose(last.norm().item(), number.norm().item())
