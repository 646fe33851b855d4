"""Softmaxes that are not attention, attention without an axis of heads, and attention in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from heads import hf_models
from heads.oracle import Oracle, agree, wanted
from heads.oracle_hands import B, E, H, Hand, M, N, W, by_operator, drawn, noise
from torch import Tensor, nn

import regard

K, S = 5, 2  # codes of a book, or experts; slots of each


def watched(model: nn.Module, *args: Any, **given: Any) -> Any:
    with torch.no_grad(), regard.watch(model, measures=wanted()) as seen:
        model(*args, **given)
    return seen


class After(nn.Module):
    """Attention, and then something else."""

    def __init__(self, something: nn.Module) -> None:
        super().__init__()
        self.layer, self.something = drawn(Hand(by_operator)), drawn(something)

    def forward(self, x: Tensor) -> Tensor:
        return self.something(self.layer(x))


class Learned(nn.Module):
    """With something that it has learned."""

    def __init__(self, of: Callable[[Learned, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of
        self.book, self.more = nn.Parameter(torch.randn(K, W)), nn.Parameter(torch.randn(K, W))
        self.slots = nn.Parameter(torch.randn(W, K, S))
        self.experts = nn.ModuleList([nn.Linear(W, W) for _ in range(K)])
        self.gate, self.key, self.value = nn.Linear(W, K), nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("moving", torch.randn(K, W, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self, x)


def codes(m: Learned, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)  # (B * N, W)
    return (torch.mm(flat, m.book.t()).softmax(-1) @ m.book).view_as(x)


def codes_by_distance(m: Learned, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return ((-torch.cdist(flat, m.book)).softmax(-1) @ m.book).view_as(x)


def codes_by_squares(m: Learned, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ m.moving.t() + m.moving.pow(2).sum(1)
    return torch.einsum("nk,kd->nd", torch.softmax(-far / 0.7, 1), m.moving).view_as(x)


def codes_of_each_text(m: Learned, x: Tensor) -> Tensor:
    book = F.normalize(m.book, dim=-1).unsqueeze(0).expand(x.shape[0], -1, -1)
    return (F.normalize(x, dim=-1) @ book.mT * 3).softmax(-1) @ m.more.repeat(x.shape[0], 1, 1)


def codes_projected(m: Learned, x: Tensor) -> Tensor:
    """Keys and values are projections of what was learned."""
    k, v = m.key(m.book)[None].expand(x.shape[0], -1, -1), m.value(m.book)[None].expand(x.shape[0], -1, -1)
    return torch.bmm(x, k.transpose(1, 2)).div(3).softmax(-1) @ v


def soft_mixture(m: Learned, x: Tensor) -> Tensor:
    """Puigcerver et al. 2023: slots are mixtures of tokens, tokens are mixtures of slots."""
    scores = torch.einsum("bnd,dks->bnks", x, m.slots)
    dispatch, combine = scores.softmax(1), scores.flatten(2).softmax(-1)
    slots = torch.einsum("bnd,bnks->bksd", x, dispatch)
    done = torch.stack([expert(slots[:, i]) for i, expert in enumerate(m.experts)], 1)
    return torch.einsum("bsd,bns->bnd", done.flatten(1, 2), combine)


def soft_mixture_by_matmul(m: Learned, x: Tensor) -> Tensor:
    """Dispatched before it is known that the same scores combine."""
    scores = x @ m.slots.flatten(1)  # (B, N, K * S)
    slots = scores.softmax(dim=1).transpose(1, 2) @ x
    done = torch.cat([expert(part) for expert, part in zip(m.experts, slots.chunk(K, 1), strict=True)], 1)
    return scores.softmax(dim=-1) @ done


def noisy_router(m: Learned, x: Tensor) -> Tensor:
    """Shares of experts, each of which says one thing for all tokens of a text."""
    shares = (m.gate(x) + 0.1 * torch.ones(K, dtype=x.dtype)).softmax(-1)  # (B, N, K)
    return shares @ torch.stack([expert(x.mean(1)) for expert in m.experts], 1)


def router_by_likeness(m: Learned, x: Tensor) -> Tensor:
    shares = (F.normalize(x, dim=-1) @ F.normalize(m.book, dim=-1).t()).softmax(-1)
    return torch.einsum("bnk,bkd->bnd", shares, torch.stack([expert(x.mean(1)) for expert in m.experts], 1))


NOT = [
    codes,
    codes_by_distance,
    codes_by_squares,
    codes_of_each_text,
    codes_projected,
    soft_mixture,
    soft_mixture_by_matmul,
    noisy_router,
    router_by_likeness,
]


@pytest.mark.parametrize("of", NOT, ids=lambda of: of.__name__)
def test_learned_keys_and_values_are_not_attention(of: Callable[[Learned, Tensor], Tensor]) -> None:
    seen = watched(After(Learned(of)), noise(B, N, W))
    assert seen.layers == ["layer"]
    assert seen.unseen == {}


# Learned queries are attention; and so is what has no axis of heads


def pooled(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    p = (m.book @ m.key(x).transpose(1, 2)).softmax(-1)  # (B, K, N)
    return p @ m.value(x), p


def pooled_by_einsum(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.einsum("kd,bnd->bkn", m.book, x).softmax(-1)
    return torch.einsum("bkn,bnd->bkd", p, x), p


def pooled_by_expansion(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    q = m.book.unsqueeze(0).repeat(x.shape[0], 1, 1)
    p = torch.bmm(q, m.key(x).mT).mul(0.3).softmax(2)
    return torch.bmm(p, m.value(x)), p


def learned_tokens_among_themselves(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    q = m.book.expand(x.shape[0], -1, -1)
    p = (q @ m.key(q).mT).softmax(-1)
    return p @ m.value(q), p


def with_learned_keys_beside(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.cat([m.book.expand(x.shape[0], -1, -1), m.key(x)], 1)
    v = torch.cat([m.more.expand(x.shape[0], -1, -1), m.value(x)], 1)
    p = (x @ k.mT).softmax(-1)
    return p @ v, p


def pooled_by_function(m: Learned, x: Tensor) -> tuple[Tensor, Tensor]:
    q = m.book.expand(x.shape[0], -1, -1)
    return F.scaled_dot_product_attention(q, x, x, scale=0.3), (0.3 * q @ x.mT).softmax(-1)


ONE_HEAD = [
    pooled_by_function,
    pooled,
    pooled_by_einsum,
    pooled_by_expansion,
    learned_tokens_among_themselves,
    with_learned_keys_beside,
]


@pytest.mark.parametrize("batch", [2, 3, 1, K])
@pytest.mark.parametrize("of", ONE_HEAD, ids=lambda of: of.__name__)
def test_one_head_of_learned_queries(of: Callable[[Learned, Tensor], tuple[Tensor, Tensor]], batch: int) -> None:
    model, x = drawn(Learned(lambda m, x: of(m, x)[0])), noise(batch, N, W)
    seen = watched(model, x)
    assert seen.layers == ["Learned"]
    assert seen.unseen == {}
    with torch.no_grad():
        agree(seen[0], Oracle(of(model, x)[1][:, None]), kind=None)


class Image(nn.Module):
    """Self attention over an image, as in SAGAN; keys and values may be pooled, as in BigGAN."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.pool = pool
        self.f, self.g, self.h = nn.Conv2d(W, 3, 1), nn.Conv2d(W, 3, 1), nn.Conv2d(W, E, 1)
        self.o = nn.Conv2d(E, W, 1)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, g, h = self.f(x), self.g(x), self.h(x)
        if self.pool:
            g, h = F.max_pool2d(g, 2), F.max_pool2d(h, 2)
        f, g, h = f.flatten(2), g.flatten(2), h.flatten(2)
        return torch.bmm(f.permute(0, 2, 1), g).softmax(-1), h

    def forward(self, x: Tensor) -> Tensor:
        p, h = self.weights(x)
        return x + self.o(torch.bmm(h, p.permute(0, 2, 1)).view(x.shape[0], E, *x.shape[2:]))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("pool", [False, True])
def test_images_have_one_head(pool: bool, batch: int) -> None:
    model, x = drawn(Image(pool)), noise(batch, W, 4, 6)
    seen = watched(model, x)
    with torch.no_grad():
        agree(seen[0], Oracle(model.weights(x)[0][:, None]), kind=None)


def test_a_head_of_learned_queries_can_be_ablated() -> None:
    model, x = drawn(Learned(lambda m, x: pooled(m, x)[0])), noise(3, N, W)
    with torch.no_grad(), regard.ablate(model, {0: [0]}):
        assert not model(x).any()


def test_weights_on_several_values_are_one_attention() -> None:
    """As in the structure module of AlphaFold: the same weights on values, points and pairs."""

    def of(m: Learned, x: Tensor) -> Tensor:
        p = (x @ m.key(x).mT).softmax(-1)
        return p @ m.value(x) + torch.einsum("bij,bjd->bid", p, x)

    model, x = drawn(Learned(of)), noise(B, N, W)
    assert watched(model, x).layers == ["Learned"]
    with torch.no_grad(), regard.ablate(model, {0: [0]}):
        assert not model(x).any()


# Attention in parts


def local(m: Learned, x: Tensor) -> Tensor:
    """Each token looks at its block."""
    q = x.unflatten(1, (-1, 2))  # (B, blocks, 2, W)
    q = q.unflatten(-1, (H, -1))
    p = torch.einsum("bcqhd,bckhd->bchqk", q, q).softmax(-1)
    return torch.einsum("bchqk,bckhd->bcqhd", p, q).flatten(3).flatten(1, 2)


def first_and_local(m: Learned, x: Tensor) -> Tensor:
    """All look at the first token, and at their block: one softmax, whose keys go two ways."""
    q = x.unflatten(1, (-1, 2))
    scores = torch.cat([q @ x[:, None, :1].mT, q @ q.mT], -1)
    p = scores.softmax(-1)
    return (p[..., :1] @ x[:, None, :1] + p[..., 1:] @ q).flatten(1, 2)


def mixed_between_heads(m: Learned, x: Tensor) -> Tensor:
    """Talking heads."""
    q = x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.einsum("bhnm,hg->bgnm", (q @ q.mT).softmax(-1), m.slots[:H, :H, 0])
    return (p @ q).transpose(1, 2).flatten(2)


def multiplied_and_summed(m: Learned, x: Tensor) -> Tensor:
    p = (x @ m.key(x).mT).softmax(-1)
    return (p.unsqueeze(-1) * x.unsqueeze(1)).sum(2)


def one_of_another(m: Learned, x: Tensor) -> Tensor:
    """Weights times weights, as in Nystroem's approximation."""
    few = x[:, ::2]
    p, q = (x @ few.mT).softmax(-1), (few @ x.mT).softmax(-1)
    return (p @ q) @ x


PARTS = [local, first_and_local, mixed_between_heads, multiplied_and_summed, one_of_another]


@pytest.mark.parametrize("of", PARTS, ids=lambda of: of.__name__)
def test_what_cannot_be_read_is_named_and_left_out(of: Callable[[Learned, Tensor], Tensor]) -> None:
    model, x = After(Learned(of)), noise(B, 6, W)
    with torch.no_grad():
        right = model(x)
        with regard.watch(model) as seen:
            assert torch.equal(model(x), right)
    assert seen.layers == ["layer"]
    assert list(seen.unseen) == ["something"]
    words = "could not be followed to a product with values" if of is not first_and_local else "computed in parts"
    assert words in seen.unseen["something"]
    with (
        pytest.raises(ValueError, match=r"could not be followed|computed in parts"),
        torch.no_grad(),
        regard.ablate(model, {"something": [0]}),
    ):
        model(x)


def test_products_that_are_returned_are_no_attention() -> None:
    """The likeness of two texts, as a model gives it back."""

    def of(m: Learned, x: Tensor) -> Tensor:
        return (m.key(x) @ m.value(x).mT).softmax(-1)

    seen = watched(After(Learned(of)), noise(B, N, W))
    assert seen.layers == ["layer"]
    assert seen.unseen == {}


# Models of transformers

BERT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "vocab_size": 97,
    "max_position_embeddings": 70,
}
BART: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 24,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 17,
    "vocab_size": 97,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "d_ff": 17, "num_layers": 2, "num_heads": 3}
LEVELS = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}


def _pair(tokens: int = 13) -> dict[str, Tensor]:
    return {"input_ids": hf_models.some_ids(2, tokens), "decoder_input_ids": hf_models.some_ids(2, 7)}


def _first(tokens: int = 13) -> Tensor:
    return (torch.arange(tokens) == 0).long().expand(2, -1)


def _detr() -> tuple[Any, dict[str, Any]]:
    levels = transformers.ResNetConfig(**LEVELS, out_features=["stage2", "stage3", "stage4"])
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
    model = transformers.DeformableDetrModel(
        transformers.DeformableDetrConfig(
            **{**BART, **sizes},
            backbone_config=levels,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
        )
    )
    return model, {"pixel_values": torch.zeros(2, 3, 64, 64)}


def _of(kind: str, given: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    made = getattr(transformers, kind)
    return made(made.config_class(**options)), given


SPARSE: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str, int]] = {
    "longformer": (
        lambda: _of(
            "LongformerModel",
            {"input_ids": hf_models.some_ids(), "global_attention_mask": _first()},
            **BERT,
            attention_window=[4, 4],
        ),
        "encoder.layer.{}.attention.self",
        0,
    ),
    "led": (
        lambda: _of(
            "LEDModel",
            _pair() | {"global_attention_mask": _first()},
            **BART,
            attention_window=4,
            max_encoder_position_embeddings=40,
            max_decoder_position_embeddings=40,
        ),
        "encoder.layers.{}.self_attn.longformer_self_attn",
        4,
    ),
    "pegasus_x": (
        lambda: _of("PegasusXModel", _pair(16), **BART, max_position_embeddings=40, num_global_tokens=3, block_size=4),
        "encoder.layers.{}.self_attn",
        4,
    ),
    "big_bird": (
        lambda: _of(
            "BigBirdModel",
            {"input_ids": hf_models.some_ids(2, 64)},
            **BERT,
            block_size=4,
            attention_type="block_sparse",
            num_random_blocks=1,
        ),
        "encoder.layer.{}.attention.self",
        0,
    ),
    "longt5": (
        lambda: _of("LongT5Model", _pair(), **T5, local_radius=3),
        "encoder.block.{}.layer.0.LocalSelfAttention",
        4,
    ),
    "longt5, global": (
        lambda: _of(
            "LongT5Model", _pair(), **T5, local_radius=3, global_block_size=4, encoder_attention_type="transient-global"
        ),
        "encoder.block.{}.layer.0.TransientGlobalSelfAttention",
        4,
    ),
    "reformer": (
        lambda: _of(
            "ReformerModel",
            {"input_ids": hf_models.some_ids(2, 16)},
            **{n: BERT[n] for n in ("num_hidden_layers", "hidden_size", "num_attention_heads")},
            attn_layers=["local", "local"],
            attention_head_size=8,
            axial_pos_embds=False,
            max_position_embeddings=40,
            local_attn_chunk_length=4,
            vocab_size=97,
        ),
        "encoder.layers.{}.attention.self_attention",
        0,
    ),
    "nystromformer": (
        lambda: _of(
            "NystromformerModel",
            {"input_ids": hf_models.some_ids(2, 12)},
            **BERT,
            num_landmarks=4,
            conv_kernel_size=3,
            segment_means_seq_len=12,
        ),
        "encoder.layer.{}.attention.self",
        0,
    ),
    "deformable_detr": (_detr, "encoder.layers.{}.self_attn.attn", 2),
}


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_attention_of_transformers_is_named_and_left_out(family: str) -> None:
    make, name, others = SPARSE[family]
    torch.manual_seed(3)
    model, given = make()
    watching = regard.watch(model.eval(), measures=["entropy"])
    if others:
        with torch.no_grad(), watching as seen:
            model(**given)
        assert len(seen.layers) == others
        assert not any(layer.startswith(name.format(i)) for i in range(2) for layer in seen.layers)
    else:
        with pytest.raises(ValueError, match="saw none: " + name.format(0)), torch.no_grad(), watching:
            model(**given)
    assert {name.format(0), name.format(1)} <= set(watching.unseen)


def test_prophetnets_second_stream_is_named_beside_the_first() -> None:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "encoder_ffn_dim": 17,
        "decoder_ffn_dim": 17,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 3,
        "num_decoder_attention_heads": 3,
        "max_position_embeddings": 40,
        "ngram": 2,
    }
    model, given = _of("ProphetNetModel", _pair(), **sizes)
    with torch.no_grad(), regard.watch(model.eval(), measures=["entropy"], keep="qk") as seen:
        out = model(**given, output_attentions=True)
    assert list(seen.unseen) == ["decoder.layers.0.self_attn"]
    torch.testing.assert_close(seen["decoder.layers.0.self_attn"].weights(), out.decoder_attentions[0])


@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("family", hf_models.ZOO)
def test_ordinary_models_are_seen_to_the_last(family: str, way: str) -> None:
    zoo = hf_models.ZOO[family]
    if way == "sdpa" and not zoo.sdpa:
        way = "eager"
    model = hf_models._fresh(family, way)
    with torch.no_grad(), regard.watch(model, measures=["entropy"]) as seen:
        model(**hf_models.inputs(family))
    assert seen.layers
    assert seen.unseen == {}


# Functions that show nothing


class Operator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]
        return out.transpose(1, 2).flatten(2)


def test_operators_that_show_nothing_are_named() -> None:
    seen = watched(After(Operator()), noise(B, N, W))
    assert seen.layers == ["layer"]
    assert "_scaled_dot_product_flash_attention_for_cpu" in seen.unseen["something"]


def test_scripted_parts_are_named() -> None:
    model, x = After(nn.Identity()), noise(B, M, W)
    with torch.no_grad():
        model.something = torch.jit.trace(drawn(Hand(by_operator)), (x,))
        model.plain = torch.jit.trace(nn.Linear(W, W).double(), (x,))
        seen = watched(model, x)
    assert seen.layers == ["layer"]
    assert seen.unseen == {"something": "it was traced or scripted by torch.jit, which shows nothing"}
