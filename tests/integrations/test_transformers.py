"""`attn_implementation="regard"`: the same answers as transformers' own attention, for many families.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from heads import hf_models
from torch import Tensor
from transformers import masking_utils

import regard
import regard.integrations.transformers as integration
from regard.integrations.transformers_masks import LazyMask
from regard.masks import Causal, Documents, Mask, Padding, Window

FAMILIES = [name for name, zoo in hf_models.ZOO.items() if zoo.interface]

# Tiny sizes by the names that configurations have for them; each takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 6),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 40),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 5),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_key_value_heads": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"num_key_value_heads": 6}
_MORE = """afmoe apertus arcee biogpt bitnet cohere cohere2 doge ernie4_5 exaone4 gemma gemma3_text glm glm4 gpt_bigcode
granite helium jais2 laguna lfm2 llama4_text minimax_m2 ministral3 mixtral modernbert-decoder nanochat olmo olmo2 olmo3
olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm
starcoder2 vaultgemma"""
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _MORE.split()},
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    "diffllama": {"num_key_value_heads": 2},
}


def decoder(family: str, **more: Any) -> Any:
    """A tiny random decoder of a family, with eager attention."""
    kind = transformers.CONFIG_MAPPING[family]
    usual = kind()
    given = {name: x for name, x in SIZES.items() if getattr(usual, name, None) is not None}
    if getattr(usual, "layer_types", None):
        given["layer_types"] = [usual.layer_types[0], usual.layer_types[-1]]
    config = kind(**given | more)
    config._attn_implementation = config._experts_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return made


def padded() -> dict[str, Tensor]:
    """Two texts of 13 tokens, the second with four of padding on the left."""
    ids = hf_models.some_ids()
    keep = torch.ones_like(ids)
    keep[1, :4] = 0
    return {"input_ids": ids, "attention_mask": keep}


class Spy:
    """The masks that `attend` is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[Mask | None] = []
        monkeypatch.setattr(integration, "attend", self.attend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.masks.append(options["mask"])
        return regard.attend(q, k, v, **options)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def main_output(out: Any) -> Tensor:
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    raise AssertionError(list(out))


@pytest.mark.parametrize("with_padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_answers(family: str, with_padding: bool, spy: Spy) -> None:
    if with_padding and not hf_models.can_be_padded(family):
        pytest.skip("nothing to pad")
    model = hf_models.model(family, "eager", padded=with_padding)
    given = hf_models.inputs(family, padded=with_padding)
    given = {k: x.to(model.dtype) if getattr(x, "dtype", None) is torch.float64 else x for k, x in given.items()}
    with torch.no_grad():
        right = main_output(model(**given))
        model.set_attn_implementation("regard")
        ours = main_output(model(**given))
    assert spy.masks
    assert not any(type(mask).__name__ == "Keep" for mask in spy.masks)  # nothing dense
    error = (ours - right).abs()
    if "attention_mask" in given and error.dim() == 3 and error.shape[1] == given["attention_mask"].shape[1]:
        error = error[given["attention_mask"].bool()]
    assert error.max() < 1e-5 * right.abs().max().clamp(min=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_the_same_answers_and_gradients_of_more_families(family: str, spy: Spy) -> None:
    model = decoder(family, **MORE_FAMILIES[family])
    given = padded()
    real = given["attention_mask"].bool()

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        logits = model(**given).logits[real]
        logits.square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return logits.detach(), gradients

    right, gradients = run()
    model.set_attn_implementation("regard")
    ours, ours_gradients = run()
    assert spy.masks
    assert (ours - right).abs().max() < 1e-5 * right.abs().max()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (ours_gradients[name] - gradient).abs().max() < 1e-4 * largest, name


# Masks


def test_windows_padding_and_packed_texts_are_masks_not_dense(spy: Spy) -> None:
    mistral = hf_models.model("mistral", "eager").float()
    mistral.set_attn_implementation("regard")
    with torch.no_grad():
        mistral(**padded())
        assert repr(spy.masks[0]) == "Window(5) & Padding(keep=(2, 13))"
        spy.masks.clear()
        places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]])
        ids = padded()["input_ids"][:1]
        packed = mistral(input_ids=ids, position_ids=places, use_cache=False).logits
        mistral.set_attn_implementation("eager")
        torch.testing.assert_close(
            packed, mistral(input_ids=ids, position_ids=places, use_cache=False).logits, rtol=0, atol=1e-5
        )
    assert {type(part) for part in regard.masks.conjuncts(spy.masks[0])} == {Documents, Window}


def test_chunks() -> None:
    for padding, offset, kind in ([0, 0], 0, LazyMask), ([0, 3], 0, Tensor), ([0, 0], 4, LazyMask), ([0, 0], 3, Tensor):
        rule = masking_utils.chunked_causal_mask_function(4, torch.tensor(padding))
        found = integration.mask(2, 5, 9, 4 + offset, offset, mask_function=rule, allow_is_causal_skip=False)
        right = masking_utils.sdpa_mask(2, 5, 9, 4 + offset, offset, mask_function=rule, allow_is_causal_skip=False)
        assert type(found) is kind
        assert torch.equal(found & True, right)
    llama4 = decoder("llama4_text", attention_chunk_size=5, layer_types=["chunked_attention"] * 2)
    ids = hf_models.some_ids()
    with torch.no_grad():
        right = llama4(ids).logits
        llama4.set_attn_implementation("regard")
        torch.testing.assert_close(llama4(ids).logits, right, rtol=0, atol=1e-4)


def test_blocks_of_an_image_that_see_each_other() -> None:
    groups = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    rule = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(groups))
    found = integration.mask(1, 8, 8, mask_function=rule, allow_is_causal_skip=False)
    assert isinstance(found, LazyMask)
    i = torch.arange(8)
    same = (groups[0][:, None] == groups[0]) & (groups[0] >= 0)
    assert torch.equal(found.dense()[0, 0], (i[:, None] >= i) | same)


def test_a_rule_of_ones_own_is_built_dense() -> None:
    rule = lambda b, h, q, k: (k <= q) & (k % 2 == 0)  # noqa: E731
    found = integration.mask(1, 5, 5, mask_function=rule, allow_is_causal_skip=False)
    assert type(found) is Tensor
    assert found[0, 0].int().tolist()[4] == [1, 0, 1, 0, 1]


def test_a_mask_that_models_may_handle_as_a_tensor() -> None:
    keep = torch.tensor([[False, True, True, True, True]])
    mask = LazyMask(Causal() & Padding(keep=keep), 2, (1, 1, 3, 5), "cpu")
    dense = (Causal() & Padding(keep=keep)).dense(3, 5)
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype, mask.dim(), mask.ndim) == ((1, 1, 3, 5), torch.bool, 4, 4)
    for out, right in [
        (mask[:, :, :, :4], dense[..., :4]),
        (mask.to(torch.float32), dense.float()),
        (~mask, ~dense),
        (mask & True, dense),
        (torch.cat([mask, mask], -1), torch.cat([dense, dense], -1)),
        (torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0)),
        (mask.clone(), dense),
    ]:
        assert type(out) is Tensor
        assert torch.equal(out, right)
    assert repr(mask) == "LazyMask(Causal() & Padding(keep=[False, True, True, True, True]), (1, 1, 3, 5))"


# Generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_generation_with_caches(family: str, cache: str) -> None:
    model = hf_models.model(family, "eager").float()
    options = {"max_new_tokens": 7, "do_sample": False, "disable_compile": True, "cache_implementation": cache}
    given = padded()
    right = model.generate(**given, **options)
    model.set_attn_implementation("regard")
    assert torch.equal(model.generate(**given, **options), right)


def test_from_pretrained(tmp_path: Any) -> None:
    model = hf_models.model("llama", "eager").float()
    model.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard")
    assert ours.config._attn_implementation == "regard"
    ids = hf_models.some_ids()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


# Training


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients(reentrant: bool | None) -> None:
    gradients = []
    for implementation in ("eager", "regard"):
        model = hf_models.model("gemma2", "eager").float().train()
        model.set_attn_implementation(implementation)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        given = padded()
        labels = given["input_ids"].clone()
        labels[1, :5] = -100  # padding, and the first token, which is predicted from padding
        model(**given, labels=labels).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, right in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], right, rtol=1e-3, atol=1e-5)


def test_dropout_is_ours_and_can_be_repeated() -> None:
    model = decoder("llama", attention_dropout=0.3).train()
    model.set_attn_implementation("regard")
    ids = hf_models.some_ids()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids).logits.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))


@pytest.mark.slow
def test_compiled() -> None:
    model = hf_models.model("mistral", "eager").float()
    model.set_attn_implementation("regard")
    given = padded()
    with torch.no_grad():
        right = model(**given).logits
        compiled = torch.compile(model, backend="eager")(**given).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(compiled[real], right[real], rtol=0, atol=1e-5)


# Looking


def test_what_is_watched_is_what_eager_says() -> None:
    given = hf_models.inputs("gpt_oss")
    eager = hf_models.model("gpt_oss", "eager")
    right = hf_models.eager("gpt_oss", eager, given)
    eager.set_attn_implementation("regard")
    with regard.watch(eager, keep="qk") as seen, torch.no_grad():
        eager(**given)
    assert seen.layers == list(right)
    for name, oracle in right.items():
        torch.testing.assert_close(seen[name].weights(), oracle.weights, rtol=0, atol=1e-5)


def test_ablation() -> None:
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    outputs = []
    for implementation in ("sdpa", "regard"):
        model.set_attn_implementation(implementation)
        with regard.ablate(model, {"model.layers.1.self_attn": [2, 4]}), torch.no_grad():
            outputs.append(model(**given).logits)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_weights_are_given_to_who_asks() -> None:
    model, ids = hf_models.model("gpt_oss", "eager"), hf_models.some_ids()
    with torch.no_grad():
        right = model(ids, output_attentions=True).attentions
        model.set_attn_implementation("regard")
        ours = model(ids, output_attentions=True).attentions
    for weights, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


# What is refused


def test_arguments_that_would_change_the_result_are_refused() -> None:
    q = torch.randn(1, 2, 3, 5)
    module = torch.nn.Identity()
    for name, x, words in [
        ("sinks", torch.zeros(1, 2, 3, 1), r"expected sinks \(H,\) as s_aux, .* received sinks=Tensor from Identity"),
        ("block_indices", torch.zeros(1, 1, 3, 1), "expected no choice of blocks of keys"),
        ("cache", object(), r"expected no paged cache \(continuous batching\)"),
        ("tilt", torch.zeros(3), "expected arguments of attention that it knows, received tilt=Tensor"),
    ]:
        with pytest.raises(ValueError, match=words):
            integration.attention(module, q, q, q, None, **{name: x})
    integration.attention(module, q, q, q, None, sliding_window=3, position_ids=torch.arange(3), sinks=None)


def test_chosen_keys_alone_are_seen() -> None:
    q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
    chosen = torch.tensor([[0, 1], [0, 1], [1, 2], [0, 3], [2, 4]]).expand(2, 5, 2)
    out, _ = integration.attention(torch.nn.Identity(), q, k, v, None, indices=chosen)
    keep = torch.zeros(2, 5, 5, dtype=torch.bool).scatter_(-1, chosen, True) & torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(out.transpose(1, 2), regard.attend(q, k, v, mask=keep))


def test_a_model_that_chooses_keys(spy: Spy) -> None:
    """With fewer than there are, so that it matters which."""
    model = decoder("deepseek_v32", **_LATENT, index_topk=4)
    given = padded()
    with torch.no_grad():
        right = model(**given).logits
        model.set_attn_implementation("regard")
        ours = model(**given).logits
    assert all("Keep" in repr(mask) for mask in spy.masks)
    real = given["attention_mask"].bool()
    torch.testing.assert_close(ours[real], right[real], rtol=0, atol=1e-4)
    all_keys = decoder("deepseek_v32", **_LATENT, index_topk=64)
    with torch.no_grad():
        assert (all_keys(**given).logits - right)[real].abs().max() > 1e-2


@pytest.mark.slow
def test_an_old_version_is_told_in_words() -> None:
    code = """
import sys, types
sys.modules["transformers"] = types.ModuleType("transformers")
try:
    import regard.integrations.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "expected transformers 5 or newer" in done.stdout
    assert "remedy: pip install 'transformers>=5'" in done.stdout
