"""Tiny models of transformers that read images, with random weights, and their processors."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

WORDS = ["[PAD]", "[EOS]", "what", "is", "this", "?", "a", "cat", "<start>", "<end>", "<image>"]
IMAGE = WORDS.index("<image>")
SIZES: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
PATCH = 7


def sharp(model: Any) -> Any:
    """The model with large weights: at their usual size attention is uniform, and nothing can be told apart."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d, nn.Embedding)):
                module.weight.normal_(std=0.5)
    return model.eval()


def vit() -> ViTModel:
    return sharp(ViTModel(ViTConfig(image_size=(21, 35), patch_size=PATCH, intermediate_size=7, **SIZES)))


def clip_vision() -> CLIPVisionModel:
    return sharp(CLIPVisionModel(CLIPVisionConfig(image_size=35, patch_size=PATCH, intermediate_size=7, **SIZES)))


def siglip() -> SiglipVisionModel:
    sizes: dict[str, Any] = {"image_size": 21, "patch_size": PATCH, "intermediate_size": 7, "vision_use_head": False}
    return sharp(SiglipVisionModel(SiglipVisionConfig(**sizes, **SIZES)))


def dinov2() -> Dinov2WithRegistersModel:
    """Made for 5 x 5 patches, run on 3 x 5."""
    config = Dinov2WithRegistersConfig(image_size=35, patch_size=PATCH, num_register_tokens=2, **SIZES)
    return sharp(Dinov2WithRegistersModel(config))


def clip() -> CLIPModel:
    text: dict[str, Any] = {
        "vocab_size": 11,
        "max_position_embeddings": 13,
        "intermediate_size": 7,
        "eos_token_id": 1,
        **SIZES,
    }
    vision: dict[str, Any] = {"image_size": 21, "patch_size": PATCH, "intermediate_size": 7, **SIZES}
    return sharp(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=5)))


def llava(strategy: str = "default") -> LlavaForConditionalGeneration:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=35, patch_size=PATCH, intermediate_size=7, **SIZES),
        text_config=LlamaConfig(
            vocab_size=11, num_key_value_heads=1, intermediate_size=7, bos_token_id=None, eos_token_id=None, **SIZES
        ),
        image_token_index=IMAGE,
        image_seq_length=25,
        vision_feature_select_strategy=strategy,
    )
    return sharp(LlavaForConditionalGeneration(config))


QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
    "video_token_id": 5,
}


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    vision: dict[str, Any] = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 16,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
    }
    config = Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN_IDS)
    return sharp(Qwen2VLForConditionalGeneration(config))


def qwen2_5_vl() -> Qwen2_5_VLForConditionalGeneration:
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 7,
        "patch_size": PATCH,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN_IDS)
    return sharp(Qwen2_5_VLForConditionalGeneration(config))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = WhitespaceSplit()
    special: dict[str, Any] = {
        "pad_token": "[PAD]",
        "eos_token": "[EOS]",
        "additional_special_tokens": ["<image>", "<start>", "<end>"],
    }
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def image_processor(height: int = 21, width: int = 35) -> ViTImageProcessorPil:
    return ViTImageProcessorPil(size={"height": height, "width": width})


def cropping_processor(side: int = 35) -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def llava_processor(strategy: str = "default") -> LlavaProcessor:
    return LlavaProcessor(
        cropping_processor(),
        tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
    )


class QwenProcessor:
    """Qwen2VLProcessor needs torchvision for its videos: its image processor and a tokenizer, put together."""

    image_token = "<image>"

    def __init__(self) -> None:
        limits: dict[str, Any] = {"min_pixels": 14 * 14, "max_pixels": 42 * 28}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, **limits)
        self.tokenizer = tokenizer()

    def __call__(self, text: list[str], images: Any, return_tensors: str) -> dict[str, Any]:
        of_image = dict(self.image_processor(images=images, return_tensors=return_tensors))
        count = int(of_image["image_grid_thw"].prod()) // 4
        of_text = self.tokenizer(
            [part.replace("<image>", " <image>" * count) for part in text],
            return_tensors=return_tensors,
            return_token_type_ids=False,
        )
        return {**of_text, **of_image, "mm_token_type_ids": (of_text["input_ids"] == IMAGE).int()}


class ClipProcessor:
    """A tokenizer and an image processor, for a model of two towers."""

    def __init__(self) -> None:
        self.image_processor, self.tokenizer = image_processor(21, 21), tokenizer()

    def __call__(self, text: list[str], images: Any, return_tensors: str) -> dict[str, Any]:
        of_text = self.tokenizer(text, return_tensors=return_tensors, return_token_type_ids=False)
        return {**of_text, **self.image_processor(images=images, return_tensors=return_tensors)}
