"""A watch on eager attention of transformers: the mask is what the module's own function makes of it.

Most add it to the scores, whatever its dtype: a boolean one hides nothing, for True is 1. Others hide by it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from heads import hf_models
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard

N = 13


def planes() -> dict[str, Tensor]:
    """Masks (B, 1, N, N): causal, and the last four keys of the second text hidden, in the ways that are in use."""
    sees = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    sees[1, ..., 9:] = False
    low = torch.finfo(torch.float64).min
    return {
        "boolean": sees,
        "integers": sees.long(),
        "bytes": sees.to(torch.uint8),
        "zeros and ones": sees.double(),
        "lowest": torch.zeros(2, 1, N, N, dtype=torch.float64).masked_fill(~sees, low),
        "infinite": torch.zeros(2, 1, N, N, dtype=torch.float64).masked_fill(~sees, float("-inf")),
        "ten thousand": (1.0 - sees.double()) * -10000.0,
        "a bias": torch.randn(2, 3, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    }


@pytest.mark.parametrize("kind", planes())
def test_planes_that_a_model_is_given(kind: str) -> None:
    model = hf_models.model("bert", "eager")
    given = {"input_ids": hf_models.some_ids(), "attention_mask": planes()[kind]}
    with regard.watch(model, measures=wanted(), keep="qk") as seen, torch.no_grad():
        right = model(**given, output_attentions=True).attentions
    for layer, weights in enumerate(right):
        close(seen[layer].weights(), weights, kind)
        agree(seen[layer], Oracle(weights))


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_boolean_plane_hides_by_sdpa_alone(way: str) -> None:
    model = hf_models.model("llama", way)
    given = {"input_ids": hf_models.some_ids(), "attention_mask": planes()["boolean"]}
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(**given, use_cache=False)
    assert bool(seen[0].weights()[..., 0, 5].any()) == (way == "eager")


def test_chunks_of_seamless() -> None:
    """Its speech encoder makes a boolean mask of chunks and hands it to eager attention."""
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

    torch.manual_seed(0)
    config = transformers.SeamlessM4Tv2Config(
        hidden_size=33,
        speech_encoder_layers=2,
        speech_encoder_attention_heads=3,
        speech_encoder_intermediate_size=17,
        feature_projection_input_dim=7,
        add_adapter=False,
        speech_encoder_chunk_size=4,
        speech_encoder_left_chunk_num=1,
        position_embeddings_type="relative_key",
    )
    model = SeamlessM4Tv2SpeechEncoder(config).double().eval()
    model.set_attn_implementation("eager")
    keep = torch.ones(2, N, dtype=torch.int64)
    keep[1, 9:] = 0
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        out = model(torch.randn(2, N, 7, dtype=torch.float64), attention_mask=keep, output_attentions=True)
    for layer, weights in enumerate(out.attentions):
        close(seen[layer].weights(), weights, "weights")
        assert weights[1, :, 0, 9:].min() > 0.01, "nothing is hidden"


def test_the_text_side_of_grounding_dino() -> None:
    """Phrases shall not see each other; eager attention adds the boolean mask which says so."""
    torch.manual_seed(0)
    made: Any = transformers
    text = made.BertConfig(**hf_models._BERT | {"hidden_size": 36, "vocab_size": 1013})
    backbone = made.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=12,
        depths=[1, 1, 1],
        num_heads=[1, 1, 1],
        window_size=2,
        out_features=["stage2", "stage3"],
    )
    config = transformers.GroundingDinoConfig(
        text_config=text,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        num_queries=5,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=17,
        decoder_ffn_dim=17,
        num_feature_levels=2,
    )
    ids = torch.tensor([[101, 5, 7, 1012, 11, 13, 1012, 102]])
    computed: list[Tensor] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        computed.append(output[1])

    model = transformers.GroundingDinoModel(config).eval()
    model.set_attn_implementation("eager")
    hooks = [m.register_forward_hook(note) for m in model.modules() if type(m).__name__ == "BertSelfAttention"]
    with regard.watch(model, layers="text_backbone", keep="qk") as seen, torch.no_grad():
        model(pixel_values=torch.randn(1, 3, 32, 32), input_ids=ids)
    for hook in hooks:
        hook.remove()
    assert len(computed) == len(seen.layers) == 2
    for layer, weights in enumerate(computed):
        close(seen[layer].weights(), weights, "weights")
        assert weights[0, :, 1, 5].min() > 0.001, "another phrase is seen"


class Own(nn.Module):
    """A module that asks transformers for a function, and has its own for the eager way."""

    is_causal = False

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(14, 42).double()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 7)).permute(2, 0, 3, 1, 4)
        function = ALL_ATTENTION_FUNCTIONS.get_interface("eager", self.function)
        return function(self, q * 3, k, v, mask)


def added(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    weights = (q @ k.mT * 7**-0.5 + mask).softmax(-1)
    return (weights @ v).transpose(1, 2), weights


def hidden(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    weights = (q @ k.mT * 7**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2), weights


def unread(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    weights = (q @ k.mT * 7**-0.5).softmax(-1)
    return (weights @ v).transpose(1, 2), weights


def turned(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    weights = (q @ k.mT * 7**-0.5).masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), weights


def merged(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    out, weights = added(module, q, k, v, mask)
    return out.flatten(2), weights


@pytest.mark.parametrize("function", [added, hidden, unread, turned, merged])
def test_functions_of_a_module_s_own(function: Any) -> None:
    """They add it, hide by it, do not read it, read it the other way round: the record is of what they compute."""
    model = Own(function)
    x = torch.randn(2, N, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with regard.watch(model, measures=wanted(), keep="qk") as seen, torch.no_grad():
        _, weights = model(x, planes()["boolean"])
    close(seen[0].weights(), weights, function.__name__)
    if function is not turned:  # (where what is hidden is turned round, no mask says what is padding)
        agree(seen[0], Oracle(weights))


def test_what_is_not_read_is_named() -> None:
    """Neither its arguments nor weights that it gives back explain what a function computed."""

    def other(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return (q @ k.mT).square().softmax(-1).matmul(v).transpose(1, 2), None

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Own(added), Own(other)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.second(self.first(x, mask)[0].flatten(2), mask)[0]

    model = Two()
    watch = regard.watch(model)
    with watch as seen:
        model(torch.randn(2, N, 14, dtype=torch.float64), planes()["boolean"])
    assert seen.layers == ["first"]
    assert "'eager' computed other than what its arguments say" in watch.unseen["second"]
