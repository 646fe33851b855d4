"""Tiny random models of diffusers, with inputs: of both kinds, those whose attention goes through its registry of
backends (`REGISTRY`) and those whose processors call torch's function themselves (`PROCESSORS`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

Made = tuple[Any, dict[str, Any]]

TEXT = 7  # tokens
BATCH = 2


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def padded(dtype: torch.dtype = torch.bool) -> Tensor:
    """(B, TEXT), the second text with two tokens of padding."""
    keep = torch.ones(BATCH, TEXT, dtype=dtype)
    keep[1, -2:] = 0
    return keep


def flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=5,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=11,
        pooled_projection_dim=13,
        axes_dims_rope=(4, 4, 4),
    )
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
    ids = torch.stack([torch.zeros(15), rows.flatten(), columns.flatten()], -1)
    return model, {
        "hidden_states": numbers(BATCH, 15, 5),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "pooled_projections": numbers(BATCH, 13),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def qwen_image() -> Made:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=5,
        out_channels=5,
        num_layers=1,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=11,
        axes_dims_rope=(4, 4, 4),
    )
    return model, {
        "hidden_states": numbers(BATCH, 15, 5),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_hidden_states_mask": padded(),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 3, 5)]] * BATCH,
    }


def wan() -> Made:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=5,
        out_channels=5,
        text_dim=11,
        freq_dim=8,
        ffn_dim=13,
        num_layers=1,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 3, 4, 6),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
    }


def hunyuan_video() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=5,
        out_channels=5,
        num_attention_heads=3,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=11,
        pooled_projection_dim=13,
        rope_axes_dim=(4, 4, 4),
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 3, 4, 6),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_attention_mask": padded(),
        "pooled_projections": numbers(BATCH, 13),
        "guidance": torch.tensor([1.0, 1.0]),
    }


def ltx() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=5,
        out_channels=5,
        num_attention_heads=3,
        attention_head_dim=12,
        cross_attention_dim=36,
        num_layers=1,
        caption_channels=11,
    )
    return model, {
        "hidden_states": numbers(BATCH, 30, 5),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "timestep": torch.tensor([3, 7]),
        "encoder_attention_mask": padded(torch.float32),
        "num_frames": 2,
        "height": 3,
        "width": 5,
    }


def sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=5,
        num_layers=2,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=11,
        caption_projection_dim=36,
        pooled_projection_dim=13,
        out_channels=5,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 3, 5),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "pooled_projections": numbers(BATCH, 13),
        "timestep": torch.tensor([3, 7]),
    }


def pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=5,
        out_channels=5,
        num_layers=1,
        cross_attention_dim=36,
        sample_size=8,
        patch_size=1,
        caption_channels=11,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 3, 5),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_attention_mask": padded(torch.float32),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=5,
        num_layers=1,
        sample_size=6,
        patch_size=2,
        num_embeds_ada_norm=17,
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 6, 6),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([3, 5]),
    }


def cogvideox() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        in_channels=5,
        out_channels=5,
        time_embed_dim=8,
        text_embed_dim=11,
        num_layers=1,
        sample_width=6,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=TEXT,
    )
    return model, {
        "hidden_states": numbers(BATCH, 3, 5, 4, 6),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "timestep": torch.tensor([3, 7]),
    }


def unet() -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(12, 24),
        norm_num_groups=6,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=11,
        attention_head_dim=3,
    )
    return model, {
        "sample": numbers(BATCH, 4, 6, 6),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_attention_mask": padded(),
    }


def lumina2() -> Made:  # grouped kv heads
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=5,
        hidden_size=48,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(32, 32, 32),
        cap_feat_dim=11,
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 4, 6),
        "timestep": torch.tensor([0.3, 0.7]),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_attention_mask": padded(),
    }


def vae() -> Made:
    model = diffusers.AutoencoderKL(
        block_out_channels=(12,), norm_num_groups=6, latent_channels=3, down_block_types=("DownEncoderBlock2D",)
    )
    return model, {"sample": numbers(BATCH, 3, 6, 10)}


def sana() -> Made:  # linear attention of the image, softmax on the text
    model = diffusers.SanaTransformer2DModel(
        in_channels=5,
        out_channels=5,
        num_attention_heads=3,
        attention_head_dim=12,
        num_layers=1,
        num_cross_attention_heads=3,
        cross_attention_head_dim=12,
        cross_attention_dim=36,
        caption_channels=11,
        sample_size=8,
    )
    return model, {
        "hidden_states": numbers(BATCH, 5, 4, 6),
        "encoder_hidden_states": numbers(BATCH, TEXT, 11),
        "encoder_attention_mask": padded(torch.float32),
        "timestep": torch.tensor([3, 7]),
    }


REGISTRY: dict[str, Callable[[], Made]] = {
    "flux": flux,
    "qwen_image": qwen_image,
    "wan": wan,
    "hunyuan_video": hunyuan_video,
    "ltx": ltx,
}
PROCESSORS: dict[str, Callable[[], Made]] = {
    "sd3": sd3,
    "pixart": pixart,
    "dit": dit,
    "cogvideox": cogvideox,
    "unet": unet,
    "lumina2": lumina2,
    "vae": vae,
    "sana": sana,
}


def make(name: str) -> Made:
    """A model in eval mode, with weights that let scores differ, and its inputs."""
    torch.manual_seed(0)
    model, inputs = {**REGISTRY, **PROCESSORS}[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
            elif isinstance(module, nn.Conv2d):
                module.weight.normal_(0, module.weight[0].numel() ** -0.5)
    return model.eval(), inputs
