"""`importance` against finite differences and closed forms, `leave_one_out` against heads that are left out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle_hands import B, Hand, N, W, by_operator, made, noise
from torch import Tensor, nn

from regard.heads import Importance, Table, ablate, importance, leave_one_out, prune
from regard.models import Encoder, ModelConfig

FAMILIES = ("bert", "llama", "gpt_oss", "t5", "albert", "bloom")


class Sum(nn.Module):
    """Three heads over two keys that are seen alike, with values v (B, 2, 3, 1): the output is the sum over heads of
    their mean value, for each query the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, v: Tensor) -> Tensor:
        v = v.transpose(1, 2)  # (B, 3, 2, 1)
        p = torch.softmax(v.new_zeros(*v.shape[:2], 2, 2), -1)
        heads = (p @ v).transpose(1, 2)  # (B, 2, 3, 1)
        return (heads[..., 0] * self.weight).sum(-1)  # (B, 2)


def values(batch: int = 5, seed: int = 3) -> Tensor:
    return noise(batch, 2, 3, 1, seed=seed)


def test_closed_form() -> None:
    """L = sum over queries of y = 2 sum_h g_h m_h, so dL/dg_h = 2 m_h, m_h the mean of the head's two values."""
    v = values()
    right = (2 * v.mean(1)[..., 0]).abs().mean(0).float()  # (3,)
    found = importance(Sum(), lambda model, v: model(v).sum(1), [v], normalize=False)
    assert list(found.scores) == ["Sum"]
    assert found.examples == 5
    torch.testing.assert_close(found["Sum"], right)
    normal = importance(Sum(), lambda model, v: model(v).sum(1), [v])
    torch.testing.assert_close(normal[0], right / right.norm())
    torch.testing.assert_close(normal[0].norm(), torch.tensor(1.0))


def test_closed_form_of_leaving_one_out() -> None:
    """Without head h the mean loss falls by 2 times the mean of its values."""
    v = values()
    found = leave_one_out(Sum(), lambda model, v: model(v).sum(1), [v])
    torch.testing.assert_close(found["Sum"], -2 * v.mean((0, 1))[:, 0].float())
    assert found.examples == 5


# One example at a time, or several: the absolute value is taken of each


def _each(model: Any, batch: Any) -> Tensor:
    return losses(model, batch)


def _mean(model: Any, batch: Any) -> Tensor:
    return losses(model, batch).mean()


def losses(model: Any, batch: Any) -> Tensor:
    """Some loss for each text, (B,): of a mapping, or of one tensor."""
    out = model(**batch)[0] if isinstance(batch, dict) else model(batch)
    wave = torch.sin(torch.arange(out[0].numel(), dtype=out.dtype)).view_as(out[0])
    return (out * wave).flatten(1).sum(1)


def parts(batch: Any, *sizes: int) -> list[Any]:
    if isinstance(batch, dict):
        split = {name: x.split(sizes) for name, x in batch.items()}
        return [{name: x[i] for name, x in split.items()} for i in range(len(sizes))]
    return list(batch.split(sizes))


def case(name: str) -> tuple[nn.Module, Any]:
    """A model, and five texts."""
    if name == "by hand":
        return made(Hand(by_operator)), noise(5, N, W)
    given = {"input_ids": hf_models.some_ids(5)}
    if name in ("t5",):
        given["decoder_input_ids"] = hf_models.some_ids(5, 7, seed=13)
    return hf_models.model(name), given


def close(got: Importance, right: Importance) -> None:
    assert list(got.scores) == list(right.scores)
    assert got.examples == right.examples
    for layer in got.scores:
        torch.testing.assert_close(got[layer], right[layer], msg=lambda m, layer=layer: f"{layer}: {m}")


@pytest.mark.parametrize("loss", [_each, _mean])
@pytest.mark.parametrize("name", ["by hand", *FAMILIES])
def test_a_batch_of_five_is_five_batches_of_one(name: str, loss: Callable[..., Tensor]) -> None:
    model, batch = case(name)
    right = importance(model, _each, parts(batch, 1, 1, 1, 1, 1), normalize=False)
    assert right.examples == 5
    for sizes in ((5,), (2, 3), (1, 4)):
        close(importance(model, loss, parts(batch, *sizes), normalize=False), right)


@contextmanager
def gate(projection: nn.Module, heads: int, head: int, text: int, value: float) -> Iterator[None]:
    """One head of one text, multiplied by a number, by a hook on the output projection."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0].unflatten(-1, (heads, -1)).clone()
        x[text, :, head] *= value
        return (x.flatten(-2),)

    handle = projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "name,layer,projection,heads",
    [
        ("by hand", "layer", "layer.o", 3),
        ("bert", "encoder.layer.0.attention.self", "encoder.layer.0.attention.output.dense", 3),
        ("llama", "model.layers.1.self_attn", "model.layers.1.self_attn.o_proj", 6),
        ("t5", "decoder.block.0.layer.1.EncDecAttention", "decoder.block.0.layer.1.EncDecAttention.o", 3),
        ("bloom", "transformer.h.0.self_attention", "transformer.h.0.self_attention.dense", 3),
    ],
)
def test_finite_differences(name: str, layer: str, projection: str, heads: int) -> None:
    """With steps that are large beside the float32 of some norms, and small beside the corners of ReLU."""
    model, batch = case(name)
    found = importance(model, _each, [batch], normalize=False)[layer]
    step, right = 1e-3, torch.zeros(5, heads, dtype=torch.float64)
    with torch.no_grad():
        for text in range(5):
            for head in range(heads):
                for side in (1, -1):
                    with gate(model.get_submodule(projection), heads, head, text, 1 + side * step):
                        right[text, head] += side * losses(model, batch)[text] / (2 * step)
    assert right.sign().diff(dim=0).any(), "signs that never differ do not need absolute values"
    torch.testing.assert_close(found, right.abs().mean(0).float(), rtol=2e-3, atol=3e-4)


def test_normalised_layer_by_layer() -> None:
    model, batch = case("llama")
    raw, normal = (importance(model, _each, [batch], normalize=flag) for flag in (False, True))
    for layer in raw.scores:
        torch.testing.assert_close(normal[layer], raw[layer] / raw[layer].square().sum().sqrt())
    assert raw[0].norm() != pytest.approx(raw[1].norm().item(), rel=0.01)


def test_a_layer_that_does_not_matter() -> None:
    """No gradient comes to it: 0, and 0 when normalised."""
    model, batch = case("bert")

    def first(model: Any, batch: Any) -> Tensor:
        return model(**batch, output_hidden_states=True).hidden_states[1].flatten(1).sin().sum(1)

    found = importance(model, first, [batch])
    assert found[0].all()
    assert not found[1].any()


def test_nothing_is_left_behind() -> None:
    """No gradient on any parameter, within `no_grad` too; and the model gives what it gave."""
    model, batch = case("llama")
    right = losses(model, batch)
    with torch.no_grad():
        found = importance(model, _each, [batch])
    assert not found[0].requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(losses(model, batch), right)


def test_two_runs_within_one_batch() -> None:
    """A loss that reads two texts: the gate of a head is one for both."""
    model, x, y = made(Hand(by_operator)), noise(B, N, W), noise(B, N, W, seed=8)

    def both(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch[0]) + 2 * losses(model, batch[1])

    found = importance(model, both, [(x, y)], normalize=False)
    right = torch.zeros(B, 3, dtype=torch.float64)
    for given, factor in ((x, 1), (y, 2)):
        for head in range(3):
            with torch.no_grad():
                sides = []
                for value in (2.0, 0.0):
                    out = torch.zeros(B, dtype=torch.float64)
                    for text in range(B):
                        with gate(model.layer.o, 3, head, text, value):
                            out[text] = losses(model, given)[text]
                    sides.append(out)
            right[:, head] += factor * (sides[0] - sides[1]) / 2  # (the loss is linear in the gate)
    torch.testing.assert_close(found[0], right.abs().mean(0).float())


# Leaving one out


@pytest.mark.parametrize("loss", [_each, _mean])
@pytest.mark.parametrize("name", ["by hand", "bert", "albert", "t5"])
def test_leaving_one_out_is_ablating_by_hand(name: str, loss: Callable[..., Tensor]) -> None:
    """The mean is over examples, also where batches differ in size."""
    model, batch = case(name)
    with torch.no_grad():
        whole = losses(model, batch).mean()
        found = leave_one_out(model, loss, parts(batch, 2, 3))
        assert found.examples == 5
        for layer, scores in found.scores.items():
            assert scores.shape == (3,)
            for head in range(3):
                with ablate(model, {layer: [head]}):
                    rise = losses(model, batch).mean() - whole
                assert abs(rise) > 1e-6
                torch.testing.assert_close(scores[head].double(), rise, rtol=1e-4, atol=1e-6)


def test_only_some_are_left_out() -> None:
    model, batch = case("bert")
    whole = leave_one_out(model, _each, [batch])
    names = list(whole.scores)
    found = leave_one_out(model, _each, [batch], heads={1: [2], f"{names[0]}#0": [0]})
    assert found[0][0] == whole[0][0]
    assert found[1][2] == whole[1][2]
    assert found[0][1:].isnan().all()
    assert found[1][:2].isnan().all()
    assert sorted((layer, head) for layer, head, _ in found.ranked()) == [(names[0], 0), (names[1], 2)]
    assert len(found.table()) == 2
    assert found.least(2) == {names[0]: [0], names[1]: [2]}


# What comes of it

SCORES = Importance({"a": torch.tensor([0.5, 0.1, 0.4]), "b": torch.tensor([0.2, 0.3])}, examples=7)


def test_ranked() -> None:
    assert [(layer, head) for layer, head, _ in SCORES.ranked()] == [("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 0)]
    assert [row["head"] for row in SCORES.table()] == [0, 2, 1, 0, 1]
    assert isinstance(SCORES.table(), Table)
    assert str(SCORES).splitlines() == [
        "layer  head  importance",
        "a         0       0.500",
        "a         2       0.400",
        "b         1       0.300",
        "b         0       0.200",
        "a         1       0.100",
    ]


@pytest.mark.parametrize(
    "count,right", [(0, {}), (1, {"a": [1]}), (2, {"a": [1], "b": [0]}), (3, {"a": [1, 2], "b": [0]})]
)
def test_least_never_empties_a_layer(count: int, right: dict[str, list[int]]) -> None:
    """The third is head 1 of b, which would be left with none: head 2 of a goes in its place."""
    assert SCORES.least(count) == right


def test_least_is_what_prune_and_ablate_take() -> None:
    config = ModelConfig(layers=2, embed_dim=10, num_heads=5, vocabulary=13, inner=7, context=11, order="post")
    model, ids = Encoder(config).eval(), torch.tensor([[1, 2, 3]])
    gone = importance(model, lambda model, ids: model(ids)[:, 0, 0], [ids]).least(7)
    assert sum(map(len, gone.values())) == 7
    assert all(len(heads) <= 4 for heads in gone.values())
    with torch.no_grad(), ablate(model, gone):  # type: ignore[arg-type]
        right = model(ids)
    with torch.no_grad():
        torch.testing.assert_close(prune(model, gone)(ids), right)


@pytest.mark.parametrize("count", [-1, 4, 1.0, True, "2", None])
def test_counts_that_cannot_be(count: Any) -> None:
    with pytest.raises(ValueError, match="count: expected 0 to 3 heads, for every layer keeps one, received"):
        SCORES.least(count)


# What is refused


@pytest.mark.parametrize("function", [importance, leave_one_out])
def test_losses_that_are_none(function: Any) -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    for wrong, words in [
        (lambda model, x: model(x), r"a tensor of shape \(2, 7, 2\)"),
        (lambda model, x: model(x).sum().item(), "float"),
        (lambda model, x: model(x).sum().long(), r"a tensor of shape \(\)"),
        (lambda model, x: None, "NoneType"),
    ]:
        expected = rf"loss_fn: expected a loss for each example \(B,\), or their mean, received {words}"
        with pytest.raises(TypeError, match=expected):
            function(model, wrong, [x])
    with pytest.raises(ValueError, match="loss_fn: expected one that runs the model, received no attention"):
        function(model, lambda model, x: x.sum(), [x])
    with pytest.raises(ValueError, match="batches: expected one at least, received none"):
        function(model, _each, [])


def test_losses_without_a_gradient() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)

    def frozen(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return losses(model, x)

    for wrong in (frozen, lambda model, x: losses(model, x).detach()):
        with pytest.raises(ValueError, match="loss_fn: expected a loss with a gradient, received one without; remedy"):
            importance(model, wrong, [x])


def test_losses_of_something_else_than_the_examples() -> None:
    """A loss for each token is not one for each text."""
    model, x = made(Hand(by_operator)), noise(B, N, W)
    with pytest.raises(
        ValueError,
        match="loss_fn: expected a loss for each of the 2 examples of layer, received 14 losses; remedy: their mean",
    ):
        importance(model, lambda model, x: model(x).sum(-1).flatten(), [x])


def test_runs_of_other_sizes_within_one_batch() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    with pytest.raises(ValueError, match="layer: expected one batch size within a batch, received several calls"):
        importance(model, lambda model, x: model(x).sum() + model(x[:1]).sum(), [x])


def test_heads_that_are_not_there() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    for wrong in ("layers", 1, -1, True):
        with pytest.raises(ValueError, match=f"heads: expected layers of the model: layer, received {wrong!r}"):
            leave_one_out(model, _each, [x], heads={wrong: [0]})
    with pytest.raises(ValueError, match=r"heads of layer: expected numbers below 3, received \[3\]"):
        leave_one_out(model, _each, [x], heads={0: [3]})
    with pytest.raises(ValueError, match="heads of 0: expected head numbers from 0, received -1"):
        leave_one_out(model, _each, [x], heads={0: [-1]})
    with pytest.raises(ValueError, match="heads of 0: expected each head once, received 2 more than once"):
        leave_one_out(model, _each, [x], heads={0: [2, 2]})


def test_a_model_that_is_none() -> None:
    for function in (importance, leave_one_out):
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, received function"):
            function(losses, _each, [noise(B, N, W)])  # type: ignore[arg-type]


def test_scores_are_finite_where_nothing_is() -> None:
    found = importance(Sum(), lambda model, v: (model(v) * 0).sum(1), [values()])
    assert not found[0].any()
    assert all(math.isfinite(score) for *_, score in found.ranked())
