"""Models of diffusers on regard's kernels beside the same models with diffusers' own backend, "native" (torch's SDPA).

    python benchmarks/diffusers_backend.py [--models flux dit pixart] [--seconds 6]

    forward   one step of denoising, without gradient
    train     forward and backward

Random weights, sizes of the family with fewer layers: whole models, whole passes. Contestants take turns in one run;
times are medians, the table shows their time / ours. The largest difference between the outputs of both, relative to
the largest output, is of the same run.

Rows of the JSON: model, what, tokens, seconds of each contestant, and the difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from side_by_side import machine, save, table, take_turns
from torch import Tensor

from regard.integrations.diffusers import release, use

TEXT = 128  # tokens of text
CONTESTANTS = ("regard", "native")
Made = tuple[Any, dict[str, Any]]


def flux(side: int) -> Made:
    """Joint attention of text and image, through the registry of backends."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=12,
        joint_attention_dim=768,
        pooled_projection_dim=768,
        axes_dims_rope=(8, 28, 28),
    )
    places = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(side), torch.arange(side))
    return model, {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, TEXT, 768),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def dit(side: int) -> Made:
    """Self attention, by a processor that calls torch's function."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=12, attention_head_dim=64, num_layers=4, sample_size=2 * side, patch_size=2
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2 * side, 2 * side),
        "timestep": torch.tensor([500]),
        "class_labels": torch.tensor([3]),
    }


def pixart(side: int) -> Made:
    """Self attention, and cross attention to a padded text."""
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=12,
        attention_head_dim=64,
        num_layers=4,
        cross_attention_dim=768,
        sample_size=2 * side,
        caption_channels=768,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(2, TEXT, 768),
        "encoder_attention_mask": (torch.arange(TEXT) < torch.tensor([[TEXT], [20]])).float(),
        "timestep": torch.tensor([500, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


MODELS: dict[str, tuple[str, Callable[[int], Made]]] = {
    "flux": ("Flux, 2 + 2 layers of width 768, 128 tokens of text", flux),
    "dit": ("DiT, 4 layers of width 768", dit),
    "pixart": ("PixArt, 4 layers of width 768, 2 texts, padded", pixart),
}
CASES = (("forward", 16), ("forward", 32), ("forward", 64), ("train", 32))  # and the side of the image, in patches


def measure(name: str, what: str, side: int, seconds: float) -> dict[str, Any]:
    """One row of the JSON."""
    title, build = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build(side)
    model.eval()  # (in training DiT drops labels, each time others)

    def step(set_up: Callable[[Any], Any]) -> Tensor:
        set_up(model)  # (microseconds; both are the same model)
        with torch.set_grad_enabled(what == "train"):
            out = model(**inputs, return_dict=False)[0]
            if what == "train":
                model.zero_grad(set_to_none=True)
                out.square().mean().backward()
        return out.detach()

    runs = {"regard": lambda: step(use), "native": lambda: step(release)}
    ours, theirs = runs["regard"](), runs["native"]()
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    times = take_turns(runs, seconds=seconds, rounds=5)
    return {"model": title, "what": what, "tokens": side * side, "difference": difference} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="*", type=int, default=[16, 32, 64], help="sides of images, in patches")
    parser.add_argument("--json", default=str(Path(__file__).with_name("results") / "diffusers_backend.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for what, side in [case for case in CASES if case[1] in options.sides]:
            rows.append(measure(name, what, side, options.seconds))
            print(_line(rows[-1]), flush=True)
            if options.json:
                save(options.json, rows)
    print(table(["native's time / ours", "what", "tokens", "ours", "native", "difference"], [_line(r) for r in rows]))


def _line(row: dict[str, Any]) -> list[str]:
    ratio = f"{row['native'] / row['regard']:.2f}"
    ours = f"{row['regard'] * 1e3:,.1f} ms"
    return [row["model"], row["what"], f"{row['tokens']:,}", ours, ratio, f"{row['difference']:.0e}"]


if __name__ == "__main__":
    main()
