"""`attribution` against the logit without what a head adds to the stream, the scale of the last norm held fixed."""

from __future__ import annotations

import math
import re
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from heads import hf_models
from heads.hf_models import some_ids
from heads.oracle_hands import Hand, W, by_operator, drawn
from heads.tiny_models import EXPERTS, HYBRID, LATENT, tiny
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from regard.heads import Attribution, Table, attribution
from regard.models import Decoder, Encoder, ModelConfig

LLAMA: dict[str, Any] = {
    "layers": 2,
    "embed_dim": 42,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 14,
    "vocabulary": 97,
    "inner": 47,
    "context": 37,
    "causal": True,
    "positions": "rotary",
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "mlp_bias": False,
    "bias": False,
}
OURS: dict[str, dict[str, Any]] = {
    "as SmolLM2": LLAMA | {"tied": True},
    "as Llama": LLAMA,
    "as GPT-2": LLAMA
    | {
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "bias": True,
        "tied": True,
    },
    "as NeoX": LLAMA | {"norm": "layer", "order": "parallel", "bias": True, "mlp_bias": True},
    "as Mistral": LLAMA | {"window": 5},
}
THEIRS = {  # the last norm, the output projection of layer i, and how many heads
    "gpt2": ("transformer.ln_f", "transformer.h.{}.attn.c_proj", 3),
    "gpt_neox": ("gpt_neox.final_layer_norm", "gpt_neox.layers.{}.attention.dense", 3),
    "llama": ("model.norm", "model.layers.{}.self_attn.o_proj", 6),
    "mistral": ("model.norm", "model.layers.{}.self_attn.o_proj", 6),
    "qwen3": ("model.norm", "model.layers.{}.self_attn.o_proj", 6),
    "gpt_oss": ("model.norm", "model.layers.{}.self_attn.o_proj", 6),
    "bloom": ("transformer.ln_f", "transformer.h.{}.self_attention.dense", 3),
    "gptj": ("transformer.ln_f", "transformer.h.{}.attn.out_proj", 3),
}


def ours(kind: str) -> Decoder:
    model = drawn(Decoder(ModelConfig(**OURS[kind])))
    assert isinstance(model, Decoder)
    model.tie()
    return model


def by_force(model: Any, ids: Tensor, norm: str, projections: list[str], heads: int, position: int, target: int) -> Any:
    """For each layer, head by head: the logit as it is, less the logit without what the head adds to the stream, both
    by the last norm with the scale that it has there. And the model's own logit."""
    stream: list[Tensor] = []
    added: list[Tensor] = []  # (H, W) of each layer

    def note(projection: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0][0, position].unflatten(-1, (heads, -1))
        alone = torch.eye(heads, dtype=x.dtype)[:, :, None] * x  # (H, H, E): all heads but one are 0
        apart = alone.flatten(1)
        with torch.no_grad():
            weight = projection.weight.mT if type(projection).__name__ == "Conv1D" else projection.weight
            added.append(apart @ weight.mT)

    hooks = [model.get_submodule(norm).register_forward_pre_hook(lambda _, args: stream.append(args[0]))]
    hooks += [model.get_submodule(name).register_forward_hook(note) for name in projections]
    with torch.no_grad():
        out = model(ids[None])
        logits = (out if isinstance(out, Tensor) else out.logits)[0, position]
    for hook in hooks:
        hook.remove()
    x, last = stream[0][0, position].double(), model.get_submodule(norm)
    centred = getattr(last, "bias", None) is not None
    eps = getattr(last, "eps", None) or getattr(last, "variance_epsilon", None)
    scale = (x.var(unbiased=False) if centred else x.square().mean()).add(eps).sqrt()
    head = model.head if isinstance(model, Decoder) else model.get_output_embeddings()

    def logit(x: Tensor) -> Tensor:
        y = (x - x.mean() if centred else x) / scale * last.weight.double()
        y = y + last.bias.double() if centred else y
        return y @ head.weight[target].double() + (0 if head.bias is None else head.bias[target].double())

    with torch.no_grad():
        right = [torch.stack([logit(x) - logit(x - a.double()) for a in layer]) for layer in added]
    return right, logits[target].item()


def check(model: Any, norm: str, projections: list[str], heads: int, position: int) -> None:
    ids, target = some_ids(1, 13)[0], 7
    found = attribution(model, ids, target, position=position)
    right, logit = by_force(model, ids, norm, projections, heads, position, target)
    assert found.target == target
    assert found.logit == pytest.approx(logit, abs=1e-4)
    assert sum(s.sum().item() for s in found.scores.values()) + found.rest == pytest.approx(logit, abs=1e-4)
    assert len(found.scores) == len(projections)
    for got, wanted in zip(found.scores.values(), right, strict=True):
        assert wanted.abs().min() > 1e-5, "heads that add nothing prove nothing"
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("position", [-1, 4])
@pytest.mark.parametrize("kind", OURS)
def test_our_decoders(kind: str, position: int) -> None:
    model = ours(kind)
    check(model, "norm", [f"blocks.{i}.attention.out_proj" for i in range(2)], 6, position)
    assert list(attribution(model, some_ids(1, 13), 7).scores) == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize("position", [-1, 4])
@pytest.mark.parametrize("family", THEIRS)
def test_their_decoders(family: str, position: int) -> None:
    norm, projection, heads = THEIRS[family]
    check(hf_models.model(family), norm, [projection.format(i) for i in range(2)], heads, position)


# Norms that add 1 to their weight, norms after the heads, factors of logits and of the stream, gates, parallel layers:
# a class of transformers, its sizes, and its output projections.
MORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "afmoe": ("AfmoeForCausalLM", EXPERTS, "self_attn.o_proj"),
    "bitnet": ("BitNetForCausalLM", {}, "self_attn.o_proj"),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.3}, "self_attn.o_proj"),
    "cohere2": ("Cohere2ForCausalLM", {"logit_scale": 0.3}, "self_attn.o_proj"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", EXPERTS | LATENT, "self_attn.o_proj"),
    "exaone4": ("Exaone4ForCausalLM", {}, "self_attn.o_proj"),
    "gemma": ("GemmaForCausalLM", {}, "self_attn.o_proj"),
    "gemma2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}, "self_attn.o_proj"),
    "gemma3": ("Gemma3ForCausalLM", {}, "self_attn.o_proj"),
    "glm4": ("Glm4ForCausalLM", {}, "self_attn.o_proj"),
    "granite": ("GraniteForCausalLM", {"residual_multiplier": 0.7, "logits_scaling": 3.0}, "self_attn.o_proj"),
    "jamba": (
        "JambaForCausalLM",
        EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False, "mamba_dt_rank": 3},
        "self_attn.o_proj",
    ),
    "laguna": ("LagunaForCausalLM", EXPERTS, "self_attn.o_proj"),
    "nemotron": ("NemotronForCausalLM", {}, "self_attn.o_proj"),
    "olmo2": ("Olmo2ForCausalLM", {}, "self_attn.o_proj"),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 24, "ffn_dim": 13}, "self_attn.out_proj"),
    "phi": ("PhiForCausalLM", {}, "self_attn.dense"),
    "qwen3_next": ("Qwen3NextForCausalLM", EXPERTS | HYBRID, "self_attn.o_proj"),
    "stablelm": ("StableLmForCausalLM", {"use_parallel_residual": True}, "self_attn.o_proj"),
    "starcoder2": ("Starcoder2ForCausalLM", {}, "self_attn.o_proj"),
}


def by_gradient(
    model: Any, ids: Tensor, projection: str, position: int, target: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The gradient (W,) of the logit (before a softcap) at each output projection, by way of the stream alone: other
    modules of a layer are cut off from it, the scales of norms are held fixed. With what each head gives there (H, W).
    And the logit."""
    leaves: list[Tensor] = []
    given: list[tuple[Tensor, Tensor]] = []
    before_cap: list[Tensor] = []

    def leaf(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        given.append((args[0].reshape(len(ids), -1)[position], module.weight))
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    def fixed(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x, bias = args[0], getattr(module, "bias", None)
        eps = next(e for name in ("eps", "variance_epsilon") if isinstance(e := getattr(module, name, None), float))
        centred = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")
        square = x.var(-1, unbiased=False, keepdim=True) if centred else x.square().mean(-1, keepdim=True)
        scale, bias = square.add(eps).sqrt(), 0 if bias is None else bias
        return (out - bias) * scale / scale.detach() + bias

    def cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def alone(x: Any) -> Any:
            return x.detach() if isinstance(x, Tensor) else x

        return tuple(map(alone, args)), {name: alone(x) for name, x in kwargs.items()}

    hooks = [model.get_output_embeddings().register_forward_hook(lambda module, args, out: before_cap.append(out))]
    for name, module in model.named_modules():
        if name.endswith(projection):
            hooks.append(module.register_forward_hook(leaf))
        elif "Norm" in type(module).__name__ and hasattr(module, "weight"):
            hooks.append(module.register_forward_hook(fixed))
        elif re.search(r"\.\d+\.", name) and not isinstance(module, nn.Dropout):
            hooks.append(module.register_forward_pre_hook(cut, with_kwargs=True))
    logits = model(ids[None]).logits
    logits = before_cap[0] if getattr(model.config, "final_logit_softcapping", None) else logits
    logit = logits[0, position, target]
    gradients = torch.autograd.grad(logit, leaves)
    for hook in hooks:
        hook.remove()
    right = []
    for (entered, weight), gradient in zip(given, gradients, strict=True):
        heads = model.config.num_attention_heads
        parts = torch.einsum("he,whe->hw", entered.view(heads, -1), weight.unflatten(1, (heads, -1)))
        right.append((parts.detach(), gradient.reshape(len(ids), -1)[position]))
    return right, logit.detach()


@pytest.mark.parametrize("kind", MORE)
def test_more_of_their_decoders(kind: str) -> None:
    made, sizes, projection = MORE[kind]
    model, ids, position, target = tiny(made, sizes), some_ids(1, 13)[0], 6, 7
    found = attribution(model, ids, target, position=position)
    right, logit = by_gradient(model, ids, projection, position, target)
    assert found.logit == pytest.approx(logit.item(), abs=1e-4)
    assert found.softcap == (3.0 if kind == "gemma2" else None)
    assert sum(s.sum().item() for s in found.scores.values()) + found.rest == pytest.approx(found.logit, abs=1e-5)
    assert len(found.scores) == len(right) > 0
    for got, (parts, gradient) in zip(found.scores.values(), right, strict=True):
        assert (parts @ gradient).abs().min() > 1e-6, "heads that add nothing prove nothing"
        torch.testing.assert_close(got, parts @ gradient, rtol=1e-3, atol=1e-5)


def test_a_logit_before_its_cap() -> None:
    model, ids = tiny("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}), some_ids(1, 13)
    found = attribution(model, ids, 7)
    with torch.no_grad():
        capped = model(ids).logits[0, -1, 7].item()
    assert 3.0 * math.tanh(found.logit / 3.0) == pytest.approx(capped, abs=1e-5)
    assert str(found).startswith(f"logit {found.logit:.3f} of token 7 before the cap of 3, of which")


def test_in_half_the_precision() -> None:
    """Rounding is not taken for another model."""
    model = hf_models.model("llama").to(torch.bfloat16)
    found = attribution(model, some_ids(1, 13), 7)
    assert found.logit == pytest.approx(attribution(hf_models.model("llama"), some_ids(1, 13), 7).logit, abs=0.2)


def test_a_layer_that_is_called_twice() -> None:
    """Each call has its own share."""
    model = ours("as Llama")
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    found = attribution(model, some_ids(1, 13), 7)
    assert list(found.scores) == ["blocks.0.attention", "blocks.0.attention#1"]
    right, _ = by_force(model, some_ids(1, 13)[0], "norm", ["blocks.0.attention.out_proj"], 6, -1, 7)
    for got, wanted in zip(found.scores.values(), right, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)


# Texts and targets

WORDS = {"<s>": 0, "<unk>": 1, "the": 2, "cat": 3, "sat": 4, "on": 5, "mat": 6}


def tokenizer() -> tokenizers.Tokenizer:
    """Of words, which begins each text with <s>."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("whose", ["ours", "tokenizers", "transformers"])
def test_texts(whose: str) -> None:
    """A text begins as the tokenizer begins it, a target is the word alone."""
    if whose == "ours":
        model: Any = ours("as Llama")
        model.tokenizer, given = tokenizer(), {}
    else:
        model = hf_models.model("llama")
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token="<s>")
        given = {"tokenizer": tokenizer() if whose == "tokenizers" else theirs}
    ids = torch.tensor([0, 2, 3, 4, 5, 2])
    found, right = attribution(model, "the cat sat on the", "mat", **given), attribution(model, ids, 6)
    assert found.target == 6
    assert found.logit == right.logit
    for layer in right.scores:
        assert torch.equal(found[layer], right[layer])


def test_the_likeliest_by_default() -> None:
    model, ids = ours("as Llama"), some_ids(1, 13)
    with torch.no_grad():
        logits = model(ids)[0]
    assert attribution(model, ids).target == logits[-1].argmax()
    assert attribution(model, ids[0], position=3).target == logits[3].argmax()
    assert attribution(model, ids[0].int(), 5).target == 5


def test_the_model_is_as_it_was() -> None:
    """Modules that were in training are again, and no others."""
    model = ours("as Llama")
    model.train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    attribution(model, some_ids(1, 13))
    assert [module.training for module in model.modules()] == before
    assert not model.norm._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


def test_what_is_shown() -> None:
    found = Attribution({"a": torch.tensor([0.5, -2.0]), "b": torch.tensor([1.0])}, rest=3.25, logit=2.75, target=7)
    assert isinstance(found.table(), Table)
    assert found.table()[0] == {"layer": "a", "head": 1, "adds": -2.0}
    assert str(found).splitlines() == [
        "logit 2.750 of token 7, of which 3.250 is not the heads'",
        "layer  head    adds",
        "a         1  -2.000",
        "b         0   1.000",
        "a         0   0.500",
    ]
    assert found["b"] is found[1]


# What is refused


def test_models_that_have_no_such_sum() -> None:
    ids = some_ids(1, 5)
    words = "model: expected a decoder with a last norm and a projection to the vocabulary, received {}"
    encoder = Encoder(ModelConfig(layers=1, embed_dim=6, num_heads=3, vocabulary=97, inner=7, context=13))
    for model in (hf_models.model("bert"), encoder, Hand(by_operator), hf_models.model("t5")):
        with pytest.raises(ValueError, match=words.format(type(model).__name__)):
            attribution(model, ids)
    words = (
        "model: expected layers that add what their heads give to the stream: as it is, scaled, or after a norm, "
        r"received {}, whose stream is no sum of these"
    )
    post = drawn(Decoder(ModelConfig(**LLAMA | {"order": "post"})))
    with pytest.raises(ValueError, match=words.format(r"blocks\.0 \(Block\)")):
        attribution(post, ids)


@pytest.mark.parametrize(
    "kind, sizes, words",
    [
        ("BertLMHeadModel", {"is_decoder": True}, r"bert\.encoder\.layer\.0 \(BertLayer\), whose stream is no sum"),
        ("DogeForCausalLM", {}, r"model\.layers\.0 \(DogeDecoderLayer\), whose stream is no sum"),
        (
            "MiniMaxForCausalLM",
            EXPERTS | {"layer_types": ["full_attention"] * 2, "num_local_experts": 3},
            r"model\.layers\.0 \(MiniMaxDecoderLayer\), whose stream is no sum of these",
        ),
        ("OpenAIGPTLMHeadModel", {"n_embd": 24, "n_head": 6, "n_layer": 2}, r"transformer\.h\.0 \(Block\), whose"),
        ("DiffLlamaForCausalLM", {"num_key_value_heads": 2}, "received one that several attentions enter together"),
    ],
)
def test_models_that_add_in_other_ways(kind: str, sizes: dict[str, Any], words: str) -> None:
    """A stream that is normalised itself, or gated: shares would be wrong, and no one would know."""
    with pytest.raises(ValueError, match=words):
        attribution(tiny(kind, sizes), some_ids(1, 5))


class Scaled(nn.Module):
    """A language model whose logits are something else than a multiple of the projection's."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model, self.head = model, model.head

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.model(ids))


def test_logits_that_are_something_else() -> None:
    words = r"model: expected logits that are the normalised stream times the vocabulary, received -?\d+\.\d{4} where"
    with pytest.raises(ValueError, match=words):
        attribution(Scaled(ours("as Llama")), some_ids(1, 5))


def test_factors_need_digits() -> None:
    """In half the precision a factor of the residual stream cannot be told exactly."""
    model = tiny("GraniteForCausalLM", {"residual_multiplier": 0.7})
    assert attribution(model, some_ids(1, 5), 7).target == 7
    with pytest.raises(ValueError, match="whose stream is no sum of these"):
        attribution(model.to(torch.bfloat16), some_ids(1, 5))


class Odd(nn.Module):
    """A language model by hand, whose output projection has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(97, W), Hand(by_operator)
        self.layer.o, self.mix = nn.Identity(), nn.Linear(12, W)
        self.norm, self.head = nn.LayerNorm(W), nn.Linear(W, 97)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(self.norm(x + self.mix(self.layer(x))))


def test_a_projection_that_is_not_known() -> None:
    words = r"layer: expected an output projection of \(W, H \* E\), received none by a known name; remedy: regard"
    with pytest.raises(ValueError, match=words):
        attribution(Odd(), some_ids(1, 5))


def test_a_projection_with_an_adapter() -> None:
    """Its weight alone would be that of the model without."""
    model, ids = hf_models.model("llama").float(), some_ids(1, 13)
    adapter = peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(adapter, model)
    model.eval()
    with pytest.raises(ValueError, match="self_attn: expected an output projection of"):
        attribution(model, ids, 7)


def test_wrong_texts() -> None:
    model = ours("as Llama")
    for text in (some_ids(2, 5), torch.zeros(0, dtype=torch.int64), torch.zeros(3), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(
            ValueError,
            match=r"text: expected token ids \(N,\) or \(1, N\), one at least, received "
            r"torch\.\w+ of shape",
        ):
            attribution(model, text)
    for text in ([1, 2], None, 3):
        with pytest.raises(TypeError, match="text: expected a text or token ids, received"):
            attribution(model, text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer: expected one, for the model has none of its own, received none"):
        attribution(model, "the cat")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    with pytest.raises(ValueError, match="text: expected one token at least, received ''"):
        attribution(model, "", tokenizer=bare)


def test_wrong_targets() -> None:
    model, ids = ours("as Llama"), some_ids(1, 5)
    for target in (97, -1, True, 1.0):
        with pytest.raises(ValueError, match="target: expected a token below 97, received"):
            attribution(model, ids, target)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"target: expected one token, received 'the cat', which is 2: \[2, 3\]; remedy"
    ):
        attribution(model, ids, "the cat", tokenizer=tokenizer())


@pytest.mark.parametrize("position", [5, -6, True, 1.0])
def test_wrong_positions(position: Any) -> None:
    with pytest.raises(ValueError, match=f"position: expected one of 5 tokens, received {position!r}"):
        attribution(ours("as Llama"), some_ids(1, 5), position=position)
