"""The two models with real weights: every measure of regard's and of transformers' is that of the eager maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import regard
from regard.models import EMBEDDED

TEXT = "The cat that I saw yesterday ran away, and the dog that I saw yesterday ran away, too."


def needs(name: str) -> Any:
    return pytest.mark.skipif(EMBEDDED[name].installed() is None, reason=f"the weights of {name} are not installed")


@pytest.fixture(scope="module")
def minilm() -> Any:
    ours = regard.models.load("minilm", check=False)
    return ours, AutoModel.from_pretrained(EMBEDDED["minilm"].folder() / "model").eval()  # type: ignore[operator]


@pytest.fixture(scope="module")
def both_smollm2(smollm2: Any) -> Any:
    """The second with the weights of the first: transformers takes long to read the file (test_packaged.py does)."""
    ours = smollm2.config
    config = LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.embed_dim,
        intermediate_size=ours.inner,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rotary_base},
        rms_norm_eps=ours.norm_eps,
        max_position_embeddings=ours.context,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config).eval()
    theirs.to_empty(device="cpu")
    theirs.load_state_dict({_their_name(name): x for name, x in smollm2.state_dict().items()})
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # (its frequencies are in no state dict)
    return smollm2, theirs


def _their_name(name: str) -> str:
    """A parameter of our decoder as transformers' Llama calls it."""
    for mine, other in (
        ("embedding.tokens", "model.embed_tokens"),
        ("blocks.", "model.layers."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.out_proj", "self_attn.o_proj"),
        ("attention.", "self_attn."),
        ("gate.", "gate_proj."),
        ("up.", "up_proj."),
        ("down.", "down_proj."),
        ("head.", "lm_head."),
    ):
        name = name.replace(mine, other)
    return f"model.{name}" if name.startswith("norm") else name


def eager(model: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    """The weights of each layer, as transformers builds them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return list(model(ids, output_attentions=True, **options).attentions)
    finally:
        model.set_attn_implementation(before)


def check(
    model: nn.Module, ids: Tensor, maps: list[Tensor], atol: float, rows: Tensor | None = None, **options: Any
) -> None:
    with torch.no_grad(), regard.watch(model, measures=wanted(ids=True)) as seen:
        model(ids, **options)
    assert len(seen) == len(maps)
    for layer, weights in zip(seen, maps, strict=True):
        agree(layer, Oracle(weights, ids=ids), rows=rows, atol=atol)


@needs("minilm")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
def test_minilm(minilm: Any, whose: str) -> None:
    ours, theirs = minilm
    ids = ours.encode(TEXT)
    check(ours if whose == "regard" else theirs, ids, eager(theirs, ids), atol=1e-5)


@needs("minilm")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
def test_minilm_on_a_padded_batch(minilm: Any, whose: str) -> None:
    ours, theirs = minilm
    ids, keep = ours.encode_batch([TEXT, "A short one."])
    maps = eager(theirs, ids, attention_mask=keep.long())
    if whose == "regard":
        # (at padding the two differ: what is summed over all queries is not compared)
        with torch.no_grad(), regard.watch(ours, measures=wanted(ids=True)) as seen:
            ours(ids, keep=keep)
        for layer, weights in zip(seen, maps, strict=True):
            sums = ("received", "offsets", "heatmap", "divergence")
            agree(layer, Oracle(weights, ids=ids), rows=keep, without=sums, atol=3e-5)
    else:
        check(theirs, ids, maps, atol=1e-5, rows=keep, attention_mask=keep.long())


@needs("smollm2")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
@pytest.mark.slow
def test_smollm2(both_smollm2: Any, whose: str) -> None:
    """(Thirty layers of float32 differ by rounding between two implementations: both are held to the same maps.)"""
    ours, theirs = both_smollm2
    ids = ours.encode(TEXT)
    check(ours if whose == "regard" else theirs, ids, eager(theirs, ids), atol=1e-5 if whose != "regard" else 2e-4)


@needs("smollm2")
@pytest.mark.slow
def test_smollm2_writing(smollm2: Any) -> None:
    """The map of what it wrote, token by token from its cache, is that of one forward over all of it."""
    ours = smollm2
    with regard.watch(ours, measures=["entropy", "received", "induction"]) as seen:
        text = ours.generate(TEXT, 7)
    ids = torch.cat([ours.encode(TEXT), ours.encode(text)], 1)
    with torch.no_grad(), regard.watch(ours, measures=["entropy", "received", "induction"]) as once:
        ours(ids[:, :-1])
    for a, b in zip(seen, once, strict=True):
        for name in ("entropy", "received", "induction"):
            close(a[name], b[name], f"{a.name} {name}", 1e-3)
