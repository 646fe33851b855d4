"""`qkv proj`: vision transformers as in timm and DINO, and those of Qwen-VL, with rotary positions; q, k, v stacked;
perhaps a norm of each head's q and k."""

from regard.layouts.base import IN_AND_OUT, Layout, linear

layout = Layout(
    name="timm",
    origin="timm, ViT, DINO, the vision towers of Qwen-VL",
    keys=linear(qkv="qkv", out_proj="proj", q_norm="q_norm", k_norm="k_norm"),
    biases=IN_AND_OUT,
    can=frozenset({"rotary"}),
    pairs="halves",
)
