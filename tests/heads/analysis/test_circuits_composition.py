"""Composition scores against dense products, random matrices, and a planted pair of heads."""

from __future__ import annotations

import pytest
import torch
from heads.analysis.circuit_models import CONFIGS, LAYERS, W, leave_matrix, made, ov_matrices, qk_matrices
from torch import Tensor

import regard
from regard.heads import circuits
from regard.positions import Rotary

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ratio(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.matrix_norm(a @ b) / torch.linalg.matrix_norm(a) / torch.linalg.matrix_norm(b))


@pytest.mark.parametrize("kind, offset", [*((kind, 0) for kind in CONFIGS), ("as Llama", 3), ("as NeoX", -2)])
def test_all_pairs(kind: str, offset: int) -> None:
    """Against products of W x W matrices: what an earlier head writes, as it arrives, with each side of a later one."""
    model = made(kind)
    found = circuits.composition(model, offset=offset)
    total = LAYERS * 6
    assert found.heads == [(layer, head) for layer in range(LAYERS) for head in range(6)]
    right = {name: torch.full((total, total), torch.nan, dtype=torch.float64) for name in "qkv"}
    for later in range(LAYERS):
        reads = qk_matrices(model.blocks[later], offset), ov_matrices(model.blocks[later])
        for earlier in range(later):
            arrives = leave_matrix(model.blocks[earlier:later])
            for i, writes in enumerate(ov_matrices(model.blocks[earlier])):
                for j, (qk, ov) in enumerate(zip(*reads, strict=True)):
                    at = earlier * 6 + i, later * 6 + j
                    right["q"][at] = ratio(writes @ arrives, qk)
                    right["k"][at] = ratio(writes @ arrives, qk.T)
                    right["v"][at] = ratio(writes @ arrives, ov)
    assert list(found.scores) == ["q", "k", "v"]
    for name, scores in found.scores.items():
        torch.testing.assert_close(scores, right[name], equal_nan=True, **EXACT)
    assert found.score("k", (0, 5), (2, 1)) == pytest.approx(right["k"][5, 13].item())
    assert found.score("q", (0, 5), (0, 1)) != found.score("q", (0, 5), (0, 1)), "NaN: they are in one layer"


def test_values_of_another_width_and_layers_of_different_sizes() -> None:
    """D = 3, E = 5; 2, 4 and 6 heads; weights wide enough that the rows of Gram matrices come in several parts."""
    width = 71
    layers = [
        circuits.LayerWeights(
            str(i), normal(h, 3, width, seed=i), normal(g, 3, width), normal(g, 5, width, seed=9), normal(h, width, 5)
        )
        for i, (h, g) in enumerate([(2, 2), (4, 2), (6, 3)])
    ]
    found = circuits.composition(circuits.ModelWeights(layers))
    assert found.scores["v"].shape == (12, 12)
    for i, (first, head) in enumerate(found.heads):
        for j, (second, other) in enumerate(found.heads):
            if first >= second:
                assert all(scores[i, j].isnan() for scores in found.scores.values())
                continue
            writes = circuits.ov(circuits.ModelWeights(layers), first, head).dense()
            qk = circuits.qk(circuits.ModelWeights(layers), second, other).dense()
            assert float(found.scores["q"][i, j]) == pytest.approx(ratio(writes, qk), abs=1e-12)
            assert float(found.scores["k"][i, j]) == pytest.approx(ratio(writes, qk.T), abs=1e-12)
            ov = circuits.ov(circuits.ModelWeights(layers), second, other).dense()
            assert float(found.scores["v"][i, j]) == pytest.approx(ratio(writes, ov), abs=1e-12)


def test_float32() -> None:
    """Sums of squares that cancel: the scores are those of float64 to a part of 1e-5 of a typical score."""
    exact = circuits.composition(made("as Llama"))
    rounded = circuits.composition(made("as Llama").float())
    for name, scores in rounded.scores.items():
        assert scores.dtype is torch.float32
        torch.testing.assert_close(scores.double(), exact.scores[name], equal_nan=True, atol=1e-5, rtol=1e-5)


def test_random_matrices() -> None:
    """For random matrices the square of the score is 1 / W in the mean; another seed draws others."""
    one, same, other = (circuits.composition(made("as Llama"), seed=seed).baselines for seed in (0, 0, 1))
    assert one == same
    assert one != other
    for line in (*one.values(), *other.values()):
        assert line.mean == pytest.approx(W**-0.5, rel=0.1)
        assert 0 < line.std < 0.3 * line.mean


def test_a_planted_induction_circuit() -> None:
    """Head 0.1 copies one part of the stream to another; the key of head 1.2 reads that part, its query the first: the
    K-composition of an induction head with a previous-token head. Nothing else is planted."""
    width, d = 211, 5
    eye = torch.eye(width, dtype=torch.float64)
    tokens, before = eye[:d], eye[d : 2 * d]
    names = ("query", "key", "value", "output")
    shapes = ((6, d, width), (3, d, width), (3, d, width), (6, width, d))
    drawn = [[normal(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in range(2)]
    first, second = (circuits.LayerWeights(f"{i}", **dict(zip(names, drawn[i], strict=True))) for i in range(2))  # type: ignore[arg-type]
    first.value[0], first.output[1] = tokens, before.T  # kv head 0 serves heads 0 and 1
    second.query[2], second.key[1] = tokens, before  # kv head 1 serves heads 2 and 3
    found = circuits.composition(circuits.ModelWeights([first, second]))
    planted, baseline = found.score("k", (0, 1), (1, 2)), found.baselines["k"]
    assert planted == pytest.approx(d**-0.5)  # |P| / |P| |P| for a matrix P of rank d whose singular values are 1
    assert planted > baseline.mean + 20 * baseline.std
    assert found.score("q", (0, 1), (1, 2)) == pytest.approx(0, abs=1e-7)
    rows = found.table()
    assert {(row["kind"], row["head"], row["its head"]) for row in rows[:2]} == {("k", 1, 2), ("k", 1, 3)}
    assert all(row["over"] == pytest.approx(row["score"] / baseline.mean) for row in rows[:2])
    assert rows[2]["score"] < 0.6 * planted


def test_pruned_models() -> None:
    """Heads that are left have the scores that they had."""
    model = made("as Llama")
    whole = circuits.composition(model)
    regard.prune(model, {1: [0, 1, 4]})
    found = circuits.composition(model)
    assert len(found.heads) == 15
    assert found.score("v", (1, 1), (2, 5)) == pytest.approx(whole.score("v", (1, 3), (2, 5)), abs=1e-12)
    assert found.score("k", (0, 4), (1, 2)) == pytest.approx(whole.score("k", (0, 4), (1, 5)), abs=1e-12)


def test_rotary_enters_the_norm_of_the_product() -> None:
    """Partly rotated: at another offset another W_QK, and so other scores; V does not depend on it."""
    model = made("as NeoX")
    assert isinstance(model.blocks[0].attention.position_encoding, Rotary)
    near, far = (circuits.composition(model, offset=offset).scores for offset in (0, 2))
    assert (near["k"] - far["k"]).nan_to_num().abs().max() > 1e-3
    assert torch.equal(near["v"].nan_to_num(), far["v"].nan_to_num())


def test_tables() -> None:
    found = circuits.composition(made("as Llama"), kinds="kv")
    rows = found.table(7)
    assert len(rows) == 14
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    best = rows[0]
    later = int(best["later"].split(".")[1]), best["its head"]
    assert found.score(best["kind"], (int(best["layer"].split(".")[1]), best["head"]), later) == best["score"]
    lines = str(found).splitlines()
    assert lines[0].startswith("composition of 18 heads; random matrices: k 0.2")
    assert lines[1].split() == ["kind", "layer", "head", "later", "its", "head", "score", "over"]
    assert len(lines) == 12


def test_one_layer_has_no_pairs() -> None:
    found = circuits.composition(made("as Llama", layers=1))
    assert found.scores["q"].isnan().all()
    assert not found.table()


def test_wrong_arguments() -> None:
    model = made("as Llama")
    for kinds in ("", "x", ["qk"], "qkx"):
        with pytest.raises(ValueError, match="kinds: expected some of q, k and v, received"):
            circuits.composition(model, kinds=kinds)
    found = circuits.composition(model, kinds="k")
    with pytest.raises(ValueError, match="kind: expected one of k, received 'q'"):
        found.score("q", (0, 0), (1, 0))
    for wrong in ((0, 6), (3, 0), ("blocks.0.attention", 0)):
        with pytest.raises(ValueError, match=r"earlier: expected \(layer, head\) of the model, by number, received"):
            found.score("k", wrong, (1, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"later: expected \(layer, head\) of the model, by number, received \(9, 9\)"):
        found.score("k", (0, 0), (9, 9))
