"""What does a token cost from the cache of latent attention? One step of decoding at several lengths of the cache: the
absorbed form, the plain form, and the attention of DeepSeek-V3 in transformers with its own cache; and bytes per token.

    python benchmarks/latent.py [--seconds 3] [--json benchmarks/results/latent.json] [--lengths 128 512 2048 4096]

A ratio is another's time divided by that of the absorbed form: above 1 the absorbed form is ahead. All hold the same
weights, and their outputs are compared before they are timed. Rows of the JSON: length, seconds of each contestant, and
bytes per token of each kind of cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import machine, save, table, take_turns
from torch import Tensor, nn
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import regard
from regard.masks import Causal

WIDTH, HEADS, RANK, ROPE, NOPE, VALUE = 2048, 16, 512, 64, 128, 128  # as of DeepSeek-V2-Lite
Step = Callable[[], Tensor]


def theirs() -> tuple[nn.Module, nn.Module]:
    """DeepSeek-V3's attention of these sizes, and its rotary embedding."""
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        num_hidden_layers=1,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return DeepseekV3Attention(config, layer_idx=0).eval(), DeepseekV3RotaryEmbedding(config)


def layer_of(module: nn.Module, absorb: bool) -> regard.LatentAttention:
    """Our layer with the same weights."""
    rotary = regard.positions.Rotary(ROPE, interleaved=True)
    return regard.layouts.load(module.state_dict(), HEADS, position_encoding=rotary, absorb=absorb).eval()


def our_step(layer: regard.LatentAttention, text: Tensor) -> Step:
    """One token after the others of a text (1, M, W)."""
    cache, length = regard.LatentCache(capacity=2 * text.shape[1]), text.shape[1] - 1
    layer(text[:, :length], mask=Causal(), cache=cache)

    def step() -> Tensor:
        cache.truncate(length)
        return layer(text[:, length:], mask=Causal(), cache=cache)

    return step


def their_step(module: nn.Module, rotary: nn.Module, text: Tensor) -> Step:
    """The same by transformers."""
    cache, length = DynamicCache(), text.shape[1] - 1

    def run(x: Tensor, start: int) -> Tensor:
        places = rotary(x, torch.arange(start, start + x.shape[1])[None])
        options: dict[str, Any] = {"position_embeddings": places, "attention_mask": None, "past_key_values": cache}
        return module(x, **options)[0]

    run(text[:, :length], 0)

    def step() -> Tensor:
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
        return run(text[:, length:], length)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each row, at least")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096], help="tokens in the cache")
    parser.add_argument("--json", default="benchmarks/results/latent.json", help="where the numbers go")
    options = parser.parse_args()

    torch.manual_seed(0)
    module, rotary = theirs()
    layers = {"absorbed": layer_of(module, True), "plain": layer_of(module, False)}
    size = layers["absorbed"].cache_sizes()
    rows: list[dict[str, object]] = []
    lines = []
    with torch.inference_mode():
        for length in options.lengths:
            text = torch.randn(1, length + 1, WIDTH)
            contestants = {name: our_step(layer, text) for name, layer in layers.items()}
            contestants["transformers"] = their_step(module, rotary, text)
            outputs = {name: step() for name, step in contestants.items()}
            for name, out in outputs.items():
                torch.testing.assert_close(out, outputs["absorbed"], rtol=1e-4, atol=1e-5, msg=name)
            times = take_turns(contestants, seconds=options.seconds, rounds=options.rounds)
            rows.append({"length": length, "seconds": times, "bytes_per_token": size})
            others = (f"{times[name] / times['absorbed']:.2f}" for name in ("plain", "transformers"))
            lines.append([f"{length:,}", f"{times['absorbed'] * 1e3:.2f}", *others])
            print(" | ".join(lines[-1]), flush=True)
    print("\n" + table(["tokens in the cache", "absorbed, ms", "plain / absorbed", "transformers / absorbed"], lines))
    print("\nbytes per token: " + ", ".join(f"{name} {count:,}" for name, count in size.items()))
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    save(options.json, rows)


if __name__ == "__main__":
    main()
