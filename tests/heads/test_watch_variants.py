"""A watch on `LatentAttention`, in both forms, and on `DifferentialAttention`, whose weights may be below 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import DifferentialAttention, KVCache, LatentAttention, LatentCache, measures
from regard.masks import Causal, Padding
from regard.positions import Rotary

pytestmark = pytest.mark.on_device

B, H, N, W = 2, 3, 11, 14


class Model(nn.Module):
    """An embedding, and one attention layer or several."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(29, W)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor, caches: Any = None, mask: Any = None) -> Tensor:
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            options = {} if caches is None else {"cache": caches[i]}
            x = x + layer(x, mask=Causal() if mask is None else Causal() & mask, **options)
        return x


def latent(absorb: bool | None = None, **options: Any) -> LatentAttention:
    torch.manual_seed(2)
    sizes = {"kv_rank": 10, "nope_head_dim": 5, "rope_head_dim": 4, "value_head_dim": 7, **options}
    return LatentAttention(W, H, **sizes, position_encoding=Rotary(4, interleaved=True), absorb=absorb)  # type: ignore[arg-type]


def differential(**options: Any) -> DifferentialAttention:
    torch.manual_seed(3)
    return DifferentialAttention(W, 6, num_kv_heads=3, head_dim=4, position_encoding=Rotary(4), **options)


IDS = torch.randint(0, 29, (B, N), generator=torch.Generator().manual_seed(4))


def weights_of(model: Model, mask: Any = None) -> Tensor:
    """The weights of the only layer, as it gives them itself."""
    with torch.no_grad():
        options = {"mask": Causal() if mask is None else Causal() & mask, "need_weights": True}
        return model.layers[0](model.embedding(IDS), **options)[1]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def generated(model: Model, caches: Any, first: int = 6) -> Tensor:
    return torch.cat([model(IDS[:, :first], caches), *(model(IDS[:, i : i + 1], caches) for i in range(first, N))], 1)


class TestLatent:
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("absorb", [None, False, True])
    @torch.no_grad()
    def test_generation_is_one_map_with_the_same_weights(self, absorb: bool | None, exact: bool) -> None:
        model = Model(latent(absorb)).eval()
        blind = generated(model, [LatentCache()])
        with regard.watch(model, keep="qkv", exact=exact) as seen:
            watched = generated(model, [LatentCache()])
        close(watched, blind)
        layer = seen["layers.0"]
        assert seen.layers == ["layers.0"]
        assert layer.num_chunks == 6
        weights = weights_of(model)
        close(layer.weights(), weights)
        close(layer.entropy, torch.special.entr(weights).sum(-1))
        close(layer.received, weights.sum(2))
        # (W, H * E) of the heads' outputs in either form: what heads add sums up to the layer's output
        out = model.layers[0](model.embedding(IDS), mask=Causal())
        close(layer.projected().sum(1), out)

    @torch.no_grad()
    def test_a_head_is_what_the_equations_say_unless_absorbed_is_forced(self) -> None:
        shapes = {}
        for absorb in (None, True):
            model = Model(latent(absorb)).eval()
            with regard.watch(model, keep="qkv") as seen:
                generated(model, [LatentCache()])
            shapes[absorb] = [tuple(x.shape) for x in (seen[0].k, seen[0].v, seen[0].output)]
        assert shapes[None] == [(B, H, N, 9), (B, H, N, 7), (B, H, N, 7)]
        assert shapes[True] == [(B, 1, N, 14), (B, 1, N, 10), (B, H, N, 10)]  # the latents, and means of them

    @torch.no_grad()
    def test_contributions_are_the_same_in_both_forms(self) -> None:
        found = []
        for absorb in (False, True):
            model = Model(latent(absorb)).eval()
            with regard.watch(model, measures=[measures.Contribution()]) as seen:
                model(IDS)
            found.append((seen[0].contribution, seen[0].contributed))
        for plain, absorbed in zip(*found, strict=True):
            close(plain, absorbed)

    @pytest.mark.parametrize("absorb", [None, True])
    def test_heads_are_ablated_with_gradients(self, absorb: bool | None) -> None:
        model = Model(latent(absorb)).eval()
        with regard.ablate(model, {0: [1]}):
            without = model(IDS)
        gradient = torch.autograd.grad(without.sum(), model.layers[0].out_proj.weight)[0]
        other = Model(latent(False)).eval()
        with torch.no_grad():
            other.layers[0].out_proj.weight[:, 7:14] = 0
        close(without, other(IDS))
        assert gradient[:, 7:14].abs().amax() == 0
        assert gradient[:, :7].abs().amax() > 0

    @torch.no_grad()
    def test_patching_and_roles(self) -> None:
        model = Model(latent()).eval()
        with regard.watch(model, keep="qkv") as seen:
            whole = model(IDS)
        for what in ("output", "q", "k", "v", "pattern"):
            with regard.ablate(model, {0: [0, 2]}, mode="patch", source=seen, what=what):
                close(model(IDS), whole)
        assert len(seen.roles(atlas=False)) == H


class TestDifferential:
    @pytest.mark.parametrize("exact", [False, True])
    @torch.no_grad()
    def test_generation_is_one_map_of_the_difference(self, exact: bool) -> None:
        model = Model(differential()).eval()
        blind = generated(model, [KVCache()])
        with regard.watch(model, keep="qk", exact=exact) as seen:
            watched = generated(model, [KVCache()])
        close(watched, blind)
        layer, weights = seen[0], weights_of(model)
        assert seen.layers == ["layers.0"]
        assert not seen.unseen
        assert layer.shape == (B, 6, N, N)
        assert layer.signed
        assert (weights < 0).any()
        close(layer.weights(), weights)
        close(layer.weights(head=4, rows=slice(3, 8), cols=slice(1, 5), batch=1), weights[1, 4, 3:8, 1:5])
        terms = [layer.weights(term=term) for term in (0, 1)]
        for term in terms:
            close(term.sum(-1), torch.ones(B, 6, N))
            assert (term >= 0).all()
        close(terms[0] - model.layers[0].lambda_() * terms[1], weights)

    @pytest.mark.parametrize("chunks, padded", [(1, False), (1, True), (6, False)])
    @torch.no_grad()
    def test_measures_of_signed_weights(self, chunks: int, padded: bool) -> None:
        mask = Padding(lengths=torch.tensor([N, 7])) if padded else None
        model = Model(differential()).eval()
        asked = ["peak", "received", "on_first", "previous", "itself", "offsets", "induction", "duplicate", "entropy"]
        with regard.watch(model, [*asked, measures.Heatmap(5, 5), measures.Links(2), measures.Local(2)]) as seen:
            if chunks == 1:
                model(IDS, mask=mask)
            else:
                generated(model, [KVCache()])
        layer, weights = seen[0], weights_of(model, mask)
        real = torch.ones(B, N, dtype=torch.bool)
        if padded:
            real[1, 7:] = False
        close(layer.peak, weights.amax(-1))
        assert torch.equal(layer.target, weights.argmax(-1))
        close(layer.received, (weights * real[:, None, :, None]).sum(2))
        close(layer.on_first, weights[..., 0])
        close(layer.itself, weights.diagonal(dim1=2, dim2=3))
        before = torch.nn.functional.pad(weights.diagonal(-1, 2, 3), (1, 0))
        close(layer.previous, before)
        close(layer.offsets[:, :, 7], (before * real[:, None]).sum(2) / real.sum(1)[:, None])
        distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
        close(layer.local, (weights * (distance <= 2)).sum(-1))
        earlier = (IDS[:, :, None] == IDS[:, None, :]) & (torch.arange(N)[:, None] > torch.arange(N))
        counted = earlier.any(-1)[:, None].expand(-1, 6, -1)
        close(layer.duplicate[counted], (weights * earlier[:, None]).sum(-1)[counted])
        close(layer.links.weights, weights.topk(2, -1).values)
        if not padded:
            close(layer.heatmap.sum((2, 3)), weights.sum((2, 3)))
        with pytest.raises(
            AttributeError, match=r"'entropy' was not measured in layers.0: it needs probabilities, and"
        ):
            _ = layer.entropy

    @torch.no_grad()
    def test_without_being_asked_nothing_that_needs_probabilities_is_measured(self) -> None:
        model = Model(differential()).eval()
        with regard.watch(model) as seen:
            for _ in range(2):
                model(IDS)
        missing = {"entropy", "distance", "offset"}
        assert not missing & seen[0].values.keys()
        assert missing.isdisjoint(seen.table()[0])
        assert seen[0].received.shape[0] == 6  # a mean per head

    @torch.no_grad()
    def test_long_texts_are_measured_some_rows_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Model(differential()).eval()
        found = []
        for strip in (2**22, B * 6 * N * 2):  # all rows at once, and two at a time
            monkeypatch.setattr("regard.heads.record.signed_weights.STRIP", strip)
            with regard.watch(model, ["peak", "received", "offsets"]) as seen:
                model(IDS)
            found.append(seen[0])
        for name in ("peak", "received", "offsets"):
            close(found[1][name], found[0][name])

    @torch.no_grad()
    def test_beside_other_layers(self) -> None:
        model = Model(
            regard.MultiHeadAttention(W, 2), differential(), regard.MultiHeadAttention(W, 2), differential()
        ).eval()
        whole = model(IDS)
        for exact in (False, True):
            with regard.watch(model, keep="qk", exact=exact) as seen:
                close(model(IDS), whole)
            assert [layer.signed for layer in seen] == [False, True, False, True]
            assert seen["layers.0"].entropy.shape == (B, 2, N)
            assert len(seen.subset(["layers.0", "layers.2"]).roles(atlas=False)) == 4

    def test_outputs_and_gradients_are_those_of_the_model_unwatched(self) -> None:
        model = Model(differential(norm_affine=True))
        out = model(IDS)
        expected = torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))
        with regard.watch(model):
            watched = model(IDS)
        close(watched, out)
        for a, b in zip(torch.autograd.grad(watched.pow(2).sum(), list(model.parameters())), expected, strict=True):
            close(a, b, 1e-4)

    @torch.no_grad()
    def test_heads_are_ablated_and_patched(self) -> None:
        model = Model(differential()).eval()
        with regard.watch(model, keep="qkv") as seen:
            whole = model(IDS)
        assert seen[0].v.shape == (B, 3, N, 8)
        close(seen[0].projected().sum(1), whole - model.embedding(IDS))
        with regard.ablate(model, {0: [1]}):
            without = model(IDS)
        other = Model(differential()).eval()
        other.layers[0].out_proj.weight[:, 8:16] = 0
        close(without, other(IDS))
        with regard.ablate(model, {0: [1]}, mode="patch", source=seen):
            close(model(IDS), whole)
        with (
            pytest.raises(ValueError, match=r"received the difference of two softmaxes; remedy: mode=\"zero\""),
            regard.ablate(model, {0: [1]}, mode="hide", keys=[0]),
        ):
            model(IDS)
        for what in ("q", "k", "v"):
            with (
                pytest.raises(ValueError, match=r"received the difference of two softmaxes; remedy: what=\"output\""),
                regard.ablate(model, {0: [1]}, mode="patch", source=seen, what=what),
            ):
                model(IDS)

    @torch.no_grad()
    def test_what_is_refused_in_words(self, tmp_path: Path) -> None:
        model = Model(differential(), regard.MultiHeadAttention(W, 2)).eval()
        with regard.watch(model, keep="qkv") as seen:
            model(IDS)
        words = r"expected a layer with one softmax, received layers.0, whose weights are the difference of two"
        for what, ask in {
            "roles": seen.roles,
            "rollout": seen.rollout,
            "a picture": lambda: regard.draw.terminal(seen),
            "q": lambda: seen[0].q,
            "k": lambda: seen[0].k,
        }.items():
            with pytest.raises(ValueError, match=f"{what}: {words}"):
                ask()
        assert seen._repr_html_() is None
        with pytest.raises(ValueError, match=r"measures: .*received Entropy\(\): it needs probabilities"):
            seen[0].measure("entropy")
        with pytest.raises(ValueError, match=r"term: expected 0, 1 or None, received 2"):
            seen[0].weights(term=2)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"term: expected a layer whose weights are the difference of two softmaxes"
        ):
            seen[1].weights(term=0)
        seen.save(tmp_path / "record.safetensors")
        loaded = regard.heads.Record.load(tmp_path / "record.safetensors")
        assert [layer.signed for layer in loaded] == [True, False]
        close(loaded[0].received, seen[0].received.cpu())
        with pytest.raises(ValueError, match=f"a picture: {words}"):
            regard.draw.terminal(loaded)


class OwnLatent(LatentAttention):
    """A class of the user's own: torch functions in it are followed one by one."""


class OwnDifferential(DifferentialAttention):
    """The same."""


@pytest.mark.parametrize("kind", [OwnLatent, OwnDifferential])
@torch.no_grad()
def test_subclasses_are_seen_the_same(kind: type[nn.Module]) -> None:
    layer = latent() if kind is OwnLatent else differential()
    layer.__class__ = kind
    model = Model(layer).eval()
    caches = [LatentCache() if kind is OwnLatent else KVCache() for _ in range(2)]
    blind = generated(model, caches[:1])
    with regard.watch(model, keep="qk") as seen:
        close(generated(model, caches[1:]), blind)
    assert seen.layers == ["layers.0"]
    assert seen[0].num_chunks == 6
    close(seen[0].weights(), weights_of(model))


def test_measures_that_need_probabilities() -> None:
    named = {"Entropy", "Distance", "Offset", "Divergence", "Contribution"}
    every = {name: getattr(measures, name) for name in measures.__all__}
    kinds = {
        name: kind for name, kind in every.items() if isinstance(kind, type) and issubclass(kind, measures.Measure)
    }
    assert {name for name, kind in kinds.items() if kind.needs_probabilities} == named


@pytest.mark.slow
@torch.no_grad()
def test_diffllama_of_transformers_shows_its_softmaxes_one_by_one() -> None:
    """It computes both softmaxes twice, each time for half of the values: each of these calls is seen as a layer of its
    own, with the weights of both softmaxes as heads. Ours shows their difference."""
    from transformers import DiffLlamaConfig, DiffLlamaModel

    torch.manual_seed(5)
    config = DiffLlamaConfig(
        hidden_size=12,
        intermediate_size=8,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=4,
        num_hidden_layers=1,
        vocab_size=29,
    )
    model = DiffLlamaModel(config).eval()
    with regard.watch(model, keep="qk") as seen:
        model(IDS)
    assert seen.layers == ["layers.0.self_attn", "layers.0.self_attn#1"]
    assert [layer.heads for layer in seen] == [12, 12]
    close(seen[0].weights(), seen[1].weights())
