"""Write the table in docs/variants.md and its picture from `regard.presets`.

python docs/variants.py            needs matplotlib
"""

from __future__ import annotations

import re
from pathlib import Path

from regard.presets import CONFIGURATIONS, Configuration

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "variants.md", HERE / "images" / "variants.png"
MARKED = re.compile(r"(<!-- variants -->\n)(.*?)(<!-- /variants -->)", re.DOTALL)
BYTES = 2  # of a number in bfloat16
HEADER = (
    "model",
    "year",
    "layers",
    "heads",
    "kv heads",
    "width",
    "layer: all heads",
    "layer: kept",
    "model: all heads",
    "model: kept",
    "beyond windows",
    "parts",
)


def by_year() -> list[tuple[str, Configuration]]:
    """All models, the oldest first, as they stand in the table of presets within a year."""
    return sorted(CONFIGURATIONS.items(), key=lambda item: item[1].year)


def in_all_layers(config: Configuration) -> int:
    """Bytes that a token leaves in the caches of all layers."""
    return BYTES * sum(config.kept(layer) for layer in range(config.layers))


def in_unbounded_layers(config: Configuration) -> int:
    """Bytes of those that stay however long the text grows: in layers without a window or chunks."""
    return BYTES * sum(config.kept(layer) for layer, kind in enumerate(config.kinds) if kind == "full")


def with_all_heads(config: Configuration) -> int:
    """Bytes of a token if each query head of each layer kept keys and values of its own."""
    return BYTES * config.layers * config.kept_by_all_heads() if config.causal else 0


def parts_of(config: Configuration) -> str:
    """What a model's attention is made of, in words."""
    parts, kinds = config.parts, config.kinds
    groups = config.num_kv_heads or config.num_heads

    def some(kind: str) -> str:
        count = kinds.count(kind)
        return "" if count == config.layers else f" in {count} of {config.layers} layers"

    rotary = "rotary" if config.rotary_width is None or parts.latent else f"rotary of {config.rotary_width} numbers"
    words = {
        "encoder": not config.causal,
        "grouped kv heads": groups < config.num_heads,
        f"latent of {parts.latent.kv_rank} + {parts.latent.rotary_dim}" if parts.latent else "": True,
        {"rotary": rotary, "relative": "relative bias", "learned": "learned positions"}[config.positions]: True,
        f"rotary in sections {parts.sections}": bool(parts.sections),
        f"none in every {_ordinal(parts.no_rotary_every)} layer": parts.no_rotary_every is not None,
        f"window of {config.window}{some('window')}": "window" in kinds,
        f"chunks of {parts.chunk}{some('chunk')}": "chunk" in kinds,
        f"linear attention{some('linear')}": "linear" in kinds,
        "norm of q and k": config.qk_norm is not None or parts.norm_after_rotary,
        "norm of v": parts.v_norm,
        f"softcap {parts.softcap}": parts.softcap is not None,
        "sinks": parts.sinks,
        "gate": parts.gate,
        "temperature by position": parts.temperature,
        f"last {parts.shared_kv_layers} layers share kv": parts.shared_kv_layers > 0,
    }
    return ", ".join(word for word, there in words.items() if there and word)


def _ordinal(number: int | None) -> str:
    return {2: "2nd", 3: "3rd"}.get(number or 0, f"{number}th")


def _bytes(count: int) -> str:
    return f"{count:,}" if count else ""


def row(name: str, config: Configuration) -> list[str]:
    """One line of the table."""
    kept, bounded = in_all_layers(config), in_unbounded_layers(config)
    each = BYTES * max(config.kept(layer) for layer in range(config.layers))
    return [
        name,
        str(config.year),
        str(config.layers),
        str(config.num_heads),
        str(config.num_kv_heads or config.num_heads),
        str(config.head_dim or config.embed_dim // config.num_heads),
        _bytes(BYTES * config.kept_by_all_heads() if config.causal else 0),
        _bytes(each),
        _bytes(with_all_heads(config)),
        _bytes(kept),
        "0" if kept and not bounded else _bytes(bounded),
        parts_of(config),
    ]


def table() -> str:
    """The table, in Markdown."""
    rows = [list(HEADER), ["---"] * len(HEADER), *(row(*item) for item in by_year())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def picture(path: Path) -> None:
    """Bytes of a token in the caches, of all decoders: if all heads kept their own, as kept, and beyond windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = [(name, config) for name, config in by_year() if config.causal][::-1]
    figure = Figure(figsize=(9, 0.32 * len(models) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(models))
    bars = (
        ("if each query head kept its own keys and values", with_all_heads, "#d9dde3", 0.8),
        ("kept", in_all_layers, "#7aa6c2", 0.8),
        ("kept for good, beyond windows and chunks", in_unbounded_layers, "#1f4e79", 0.36),
    )
    for label, count, colour, height in bars:
        axes.barh(places, [count(config) / 1024 for _, config in models], height, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yticks(places, [f"{name}, {config.year}" for name, config in models])
    axes.set_xlabel("KiB per token, all layers, bfloat16")
    axes.set_xlim(left=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda found: found[1] + table() + found[3], page), encoding="utf-8")
    picture(PICTURE)


if __name__ == "__main__":
    main()
