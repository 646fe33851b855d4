"""`sweep` on models in which it is known which head carries the answer; `attribution_patching` against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import hf_models
from heads.interventions.test_ablate import WITH_MINILM, hf, regard_model, seen_of
from heads.oracle_hands import CORES, B, H, Hand, N, W, by_operator, made, noise
from torch import Tensor, nn

from regard import models
from regard.heads import Patching, ablate, attribution_patching, sweep
from regard.models import Decoder

HEAD = 4  # of the second layer of the planted model
TOKEN = 3  # in which the two texts differ
LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def planted() -> tuple[nn.Module, Tensor, Tensor]:
    """A decoder of which one head alone gives anything to the stream, and two texts that differ in one token."""
    model = regard_model(Decoder, causal=True, positions="rotary").model
    for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
        by_head = block.attention.out_proj.weight.data.unflatten(1, (6, -1))
        by_head[:, [head for head in range(6) if (i, head) != (1, HEAD)]] = 0
    clean = hf_models.some_ids(1)
    corrupt = clean.clone()
    corrupt[0, TOKEN] = (clean[0, TOKEN] + 31) % 97
    return model, clean, corrupt


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 11] - logits[0, -1, 23]


def only(result: Patching, *at: int) -> None:
    """All is restored there, and nothing anywhere else."""
    right = torch.zeros_like(result.matrix())
    right[at] = 1.0
    torch.testing.assert_close(result.matrix(), right, rtol=1e-5, atol=1e-5)


def test_the_head_that_carries_the_answer() -> None:
    model, clean, corrupt = planted()
    result = sweep(model, clean, corrupt, metric)
    only(result, 1, HEAD)
    assert list(result.scores) == LAYERS
    with torch.no_grad():
        assert result.clean == pytest.approx(metric(model(clean)).item())
        assert result.corrupt == pytest.approx(metric(model(corrupt)).item())
    assert result.raw[LAYERS[1]][HEAD].item() == pytest.approx(result.clean, rel=1e-5)
    assert result.raw[LAYERS[0]].tolist() == pytest.approx([result.corrupt] * 6, rel=1e-5)
    best = result.table()[0]
    assert (best["layer"], best["head"]) == (LAYERS[1], HEAD)
    assert best["restored"] == pytest.approx(1.0, rel=1e-5)
    assert str(result).startswith("output of one head at a time; metric ")
    assert "restored" in str(result)
    assert not model.training


def test_the_token_at_which_it_does() -> None:
    """Its output at the last token, and for values the token that differs."""
    model, clean, corrupt = planted()
    result = sweep(model, clean, corrupt, metric, positions=True, heads={1: [2, HEAD]})
    assert result.matrix().shape == (2, 6, 13)
    assert result.matrix()[0].isnan().all()
    assert result.matrix()[1, [0, 1, 3, 5]].isnan().all()
    right = torch.zeros(2, 13)
    right[1, -1] = 1.0
    torch.testing.assert_close(result.matrix()[1, [2, HEAD]], right, rtol=1e-5, atol=1e-5)
    assert len(result.table()) == 26
    assert result.table()[0]["position"] == 12
    values = sweep(model, clean, corrupt, metric, positions=True, what="v", heads={1: [HEAD]}).matrix()[1, HEAD]
    keys = sweep(model, clean, corrupt, metric, positions=True, what="k", heads={1: [HEAD]}).matrix()[1, HEAD]
    for by_token in (values, keys):
        assert by_token[TOKEN].abs() > 1e-3
        assert by_token[[i for i in range(13) if i != TOKEN]].abs().max() < 1e-5
    queries = sweep(model, clean, corrupt, metric, what="q", heads={1: [HEAD]}).matrix()[1, HEAD]
    assert queries.abs() < 1e-5  # the last token is the same in both


def test_keys_and_values_make_the_answer_together() -> None:
    """From the corrupted run with clean keys the rest of the way goes by values: pattern is all that keys do."""
    model, clean, corrupt = planted()
    keys, pattern = (sweep(model, clean, corrupt, metric, what=what).matrix() for what in ("k", "pattern"))  # type: ignore[arg-type]
    torch.testing.assert_close(keys, pattern, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_by_mapping(family: str) -> None:
    """Each score is that of an `ablate` by hand; a batch of two pairs is one metric."""
    one = hf(family)
    clean = {"input_ids": hf_models.some_ids()}
    corrupt = {"input_ids": hf_models.some_ids(seed=29)}

    def mean(out: Any) -> Tensor:
        return out.logits[:, -1, 5].mean()

    result = sweep(one.model, clean, corrupt, mean, heads={1: [2]})
    source = seen_of(one.model, lambda: one.model(**clean))
    with torch.no_grad(), ablate(one.model, {1: [2]}, "patch", source):
        right = mean(one.model(**corrupt))
    assert result.raw[one.layers[1]][2].item() == pytest.approx(right.item(), rel=1e-5)
    share = (right.item() - result.corrupt) / (result.clean - result.corrupt)
    assert result[1][2].item() == pytest.approx(share, rel=1e-4)


@WITH_MINILM
def test_texts() -> None:
    model = models.load("minilm", check=False)
    right = model.encode("The cat sat on the mat.")
    with torch.no_grad():
        direction = model(right)[0, 0].clone()
    result = sweep(
        model,
        "The cat sat on the mat.",
        "The dog sat on the mat.",
        lambda out: out[0, 0] @ direction,
        heads={5: [1, 2]},
    )
    assert result.tokens == model.tokenize("The dog sat on the mat.")
    assert len(result.table()) == 2


# By gradients


@pytest.mark.parametrize("core", [by_operator, CORES[2]], ids=lambda core: core.__name__)
@pytest.mark.parametrize("positions", [False, True])
def test_exact_where_all_is_linear_in_the_heads(positions: bool, core: Any) -> None:
    """No norm and no feed forward after the heads."""
    model, clean, corrupt = made(Hand(core)), noise(B, N, W), noise(B, N, W, seed=8)

    def of_output(out: Tensor) -> Tensor:
        return (out * noise(*out.shape, seed=9)).sum()

    right = sweep(model, clean, corrupt, of_output, positions=positions)
    got = attribution_patching(model, clean, corrupt, of_output, positions=positions)
    torch.testing.assert_close(got.matrix(), right.matrix(), rtol=1e-5, atol=1e-6)
    assert got.matrix().shape == ((1, H, N) if positions else (1, H))
    assert (got.clean, got.corrupt) == pytest.approx((right.clean, right.corrupt))
    assert right.matrix().abs().max() > 0.05
    assert str(got).startswith("estimated by gradients; metric ")


def test_near_the_sweep_elsewhere() -> None:
    """Of a random decoder with norms and feed forwards; with weights of the size that models begin with."""
    model = regard_model(Decoder, causal=True, positions="rotary").model
    for parameter in model.parameters():
        parameter.data *= 0.2 if parameter.dim() > 1 else 1.0
    ids = hf_models.some_ids(1)
    other = ids.clone()
    other[0, TOKEN] = (ids[0, TOKEN] + 31) % 97
    right = sweep(model, ids, other, metric).matrix().flatten()
    got = attribution_patching(model, ids, other, metric).matrix().flatten()
    assert torch.corrcoef(torch.stack([got, right]))[0, 1] > 0.99
    model, clean, corrupt = planted()
    estimate = attribution_patching(model, clean, corrupt, metric).matrix()
    assert estimate.abs().argmax().item() == 6 + HEAD
    assert estimate.abs().flatten().sort().values[-2] < 1e-6


def test_parameters_that_do_not_learn() -> None:
    """Gradients by the heads' outputs need no gradient of the parameters, and leave none."""
    model, clean, corrupt = planted()
    right = attribution_patching(model, clean, corrupt, metric)
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(False)
    got = attribution_patching(model, clean, corrupt, metric)
    torch.testing.assert_close(got.matrix(), right.matrix(), rtol=1e-6, atol=1e-9)


def test_a_model_in_training_stays_so() -> None:
    model, clean, corrupt = planted()
    model.train()
    sweep(model, clean, corrupt, metric, heads={0: [0]})
    attribution_patching(model, clean, corrupt, metric)
    assert all(module.training for module in model.modules())


# The result


def test_layers_of_several_sizes() -> None:
    """As those of encoders and decoders: where there is no head or token there is NaN."""
    result = Patching.of({"a": torch.tensor([[1.0, 3.0]]), "b": torch.tensor([[2.0], [5.0]])}, clean=5.0, corrupt=1.0)
    matrix = result.matrix()
    assert matrix.shape == (2, 2, 2)
    assert matrix.nan_to_num(-9).tolist() == [[[0, 0.5], [-9, -9]], [[0.25, -9], [1, -9]]]
    assert [row["restored"] for row in result.table()] == [1.0, 0.5, 0.25, 0.0]
    assert result.by_token


# What is refused


def test_refused() -> None:
    model, clean, corrupt = planted()

    def refused(kind: type[Exception], words: str, function: Any = sweep, **options: Any) -> None:
        given = {"clean": clean, "corrupt": corrupt, "metric": metric, **options}
        with pytest.raises(kind, match=words):
            function(model, **given)

    for function in (sweep, attribution_patching):
        one_number = "metric: expected a function of the output that gives one number, a tensor, received"
        refused(TypeError, rf"{one_number} a tensor of shape \(1, 13, 97\)", function, metric=lambda out: out)
        refused(TypeError, f"{one_number} float", function, metric=lambda out: 1.0)
        refused(
            ValueError, "metric: expected a finite number, received nan", function, metric=lambda x: x.sum() * torch.nan
        )
        refused(
            ValueError, "metric: expected another value for the clean run .* received .* twice", function, corrupt=clean
        )
        refused(TypeError, "positions: expected True or False, received 3", function, positions=3)
    refused(ValueError, "what: expected 'output', 'q', 'k', 'v', 'pattern', received 'z'", what="z")
    refused(
        ValueError,
        r"source of blocks.0.attention: expected outputs \(1, 6, 11, 14\), received|heads",
        corrupt=corrupt[:, :11],
        clean=clean[:, :7],
    )
    refused(ValueError, r"heads: expected layers of the model: blocks.0.attention, .* received 5", heads={5: [0]})
    words = (
        r"clean: expected outputs \(1, 6, 11, 14\) of blocks.0.attention, .* received \(1, 6, 7, 14\); remedy: texts"
    )
    refused(ValueError, words, attribution_patching, corrupt=corrupt[:, :11], clean=clean[:, :7])
    detached = "metric: expected one with a gradient, received one without; remedy: no `no_grad`"
    refused(ValueError, detached, attribution_patching, metric=lambda out: metric(out).detach())


class Twice(nn.Module):
    """A decoder that reads a text in two chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        cache = self.model.new_cache()  # type: ignore[operator]
        return torch.cat([self.model(chunk, cache=cache) for chunk in ids.split([7, 6], 1)], 1)


def test_texts_in_chunks() -> None:
    """A sweep counts tokens through all chunks; gradients would be of several outputs."""
    model, clean, corrupt = planted()
    result = sweep(Twice(model), clean, corrupt, metric, positions=True, heads={1: [HEAD]})
    assert result.matrix()[1, HEAD, -1].item() == pytest.approx(1.0, rel=1e-5)
    lm = ReadsTwice(hf("llama").model)
    words = r"corrupt: expected a text that is read at once, received several calls of lm\.model\.layers\.0\.self_attn"
    with pytest.raises(ValueError, match=words):
        attribution_patching(lm, clean, corrupt, metric)


class ReadsTwice(nn.Module):
    """The same with a model of transformers, whose cache takes gradients."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor) -> Tensor:
        first = self.lm(input_ids=ids[:, :7], use_cache=True)
        return self.lm(input_ids=ids[:, 7:], past_key_values=first.past_key_values).logits
