"""Encoders, decoders, both, generated text; records that kept less; the smallest and the widest of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import TEXT, VIEWS, Look, Written, some_cells, stack, write

import regard

pytestmark = pytest.mark.slow

SOURCE = ["the", "source", "has", "eleven", "tokens", "in", "it", ",", "or", "does", "it"]
TARGET = ["le", "but", "en", "a", "sept", ",", "oui"]


def every_view(tab: Look) -> None:
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        assert tab.text(".status") == "", view
        assert tab.page.locator(f"section.{view}").is_visible()


def right_values(tab: Look, page: Written, layer: int, head: int, n: int, m: int, count: int = 8) -> None:
    weights = page.weights(layer, head)
    assert tuple(weights.shape) == (n, m)
    for i, j in some_cells(range(n), range(m), count):
        tab.over(i + 0.5, j + 0.5, (0, n, 0, m))
        assert abs(float(tab.readout["value"]) - float(weights[i, j])) <= float(tab.readout["step"]) <= 1e-4


def bart() -> torch.nn.Module:
    import transformers

    sizes = {
        "d_model": 20,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 5,
        "encoder_ffn_dim": 7,
        "decoder_ffn_dim": 7,
        "vocab_size": 97,
        "max_position_embeddings": 31,
    }
    return transformers.BartModel(transformers.BartConfig(**sizes))


def t5() -> torch.nn.Module:
    import transformers

    return transformers.T5Model(
        transformers.T5Config(
            d_model=20, num_layers=1, num_decoder_layers=2, num_heads=5, d_kv=4, d_ff=7, vocab_size=97
        )
    )


@pytest.mark.parametrize("make", [bart, t5])
def test_encoder_and_decoder(look: Callable[..., Look], folder: Path, make: Callable[[], Any]) -> None:
    """Self and cross attention, each with the tokens of its side."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        parameter.data *= 4
    source, target = torch.randint(3, 97, (1, len(SOURCE))), torch.randint(3, 97, (1, len(TARGET)))
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(input_ids=source, decoder_input_ids=target)
    kinds = [layer.kind for layer in seen]
    assert kinds == ["self", "self", "cross", "self", "cross"]
    page = write(folder / f"{make.__name__}.html", seen, (SOURCE, TARGET))
    tab = look(page)
    every_view(tab)
    sides = {0: (SOURCE, SOURCE), 1: (TARGET, TARGET), 2: (TARGET, SOURCE)}
    for layer, (queries, keys) in sides.items():
        tab.do(
            lambda layer=layer: tab.ask("layer => regard.state.set({view: 'head', layer, head: 2, zoom: ''})", layer)
        )
        assert tab.texts(".queries button") == queries
        assert tab.texts(".keys button") == keys
        right_values(tab, page, layer, 2, len(queries), len(keys))
    assert "cross attention" in tab.text("h2")
    tab.click("#tab-flow")
    assert "of every token y of the other text" in tab.text(".diagram")
    assert f"x ({len(TARGET)}, 20)" in tab.text(".stage >> nth=0")
    tab.click("#tab-model")
    assert tab.texts(".layer h3")[2].startswith("2 · cross")


def test_generated_text(look: Callable[..., Look], folder: Path, smollm2: Any) -> None:
    """A decoder that writes on: prompt and what came after are one map, and nobody looks ahead."""
    model = smollm2
    prompt = "Once upon a time there was"
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        written = prompt + model.generate(prompt, 5)
    tokens = model.tokenize(written)[: seen[0].text.total]
    page = write(folder / "generated.html", seen, tokens)
    tab = look(page)
    every_view(tab)
    assert tab.page.locator("a.head").count() == 0
    tab.click("#tab-model")
    assert tab.page.locator("a.head").count() == 270
    n = len(tokens)
    tab.do(lambda: tab.ask("regard.state.set({view: 'head', layer: 9, head: 3})"))
    assert tab.texts(".queries button")[:4] == ["Once", "upon", "a", "time"]
    right_values(tab, page, 9, 3, n, n, 12)
    tab.over(0.5, n - 0.5, (0, n, 0, n))
    assert float(tab.readout["value"]) == 0
    tab.click("#tab-flow")
    said = tab.text(".arrow >> nth=0")
    assert f"→ (9, {n}, 64)" in said
    assert f"→ (3, {n}, 64)" in said
    assert "3 heads share each" in said
    assert "after their rotation by position (rotary)" in said
    query = tab.ask("+document.getElementById('flow-token').value")
    hidden = tab.ask("[...document.querySelectorAll('#flow-keys tr[data-key]')].map(r => r.dataset.hidden)")
    assert hidden == ["0"] * (query + 1) + ["1"] * (n - query - 1)


def test_measures_alone(look: Callable[..., Look], minilm: Any, real: Written, folder: Path) -> None:
    """Where no q and k were kept, the page says so, and shows what there is."""
    with regard.watch(minilm) as seen, torch.no_grad():
        minilm(minilm.encode(TEXT))
    tab = look(write(folder / "measures.html", seen, real.tokens))
    every_view(tab)
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        if view not in ("story", "table"):
            assert "kept" in tab.text(".note >> nth=0") or "kept" in tab.text("main"), view
            assert 'keep="qk' in tab.text("main"), view
    assert "entropy" in tab.text(".compare")
    tab.do(lambda: tab.ask("regard.state.set({view: 'head', layer: 0, head: 0})"))
    assert "Measures" in tab.text(".details")
    assert "Mass by relative position" in tab.text(".details")
    tab.press("]", "ArrowRight")
    assert tab.page.input_value("#pick-head") == "2"
    tab.click("#tab-model")
    assert tab.page.locator("a.head").count() == 72
    assert tab.page.locator(".thumb").count() == 0
    tab.click("#tab-table")
    assert tab.page.locator("tbody tr").count() == 72


def test_maps_without_vectors(look: Callable[..., Look], minilm: Any, real: Written, folder: Path) -> None:
    with regard.watch(minilm, keep="qk") as seen, torch.no_grad():
        minilm(minilm.encode(TEXT))
    page = write(folder / "maps.html", seen, real.tokens)
    tab = look(page, "#view=flow&layer=1")
    assert 'watch(model, keep="qkv")' in tab.text(".note >> nth=0")
    assert tab.page.locator(".strip.weights").count() == 12
    every_view(tab)
    tab.do(lambda: tab.ask("regard.state.set({view: 'head', layer: 2, head: 2})"))
    right_values(tab, page, 2, 2, 17, 17)


def test_measured_heatmaps(look: Callable[..., Look], folder: Path) -> None:
    """Maps that were measured small and saved, without q and k."""
    layer = regard.MultiHeadAttention(12, num_heads=3)
    torch.manual_seed(2)
    with regard.watch(layer, measures=["entropy", regard.measures.Heatmap(7)]) as seen, torch.no_grad():
        layer(torch.randn(1, 23, 12))
    seen.save(folder / "heatmaps.safetensors")
    saved = regard.heads.Record.load(folder / "heatmaps.safetensors")
    assert not saved[0].exact
    tab = look(write(folder / "heatmaps.html", saved), "#view=head&layer=0&head=1")
    assert tab.ask("regard.layer.map.shape") == [3, 7, 7]
    heat = seen[0].heatmap[0, 1] / torch.bincount(torch.arange(23) * 7 // 23)[:, None]
    for i, j in some_cells(range(7), range(7), 10):
        tab.over(i + 0.5, j + 0.5, (0, 7, 0, 7))
        assert abs(float(tab.readout["value"]) - float(heat[i, j])) <= float(tab.readout["step"])
    every_view(tab)


@pytest.mark.parametrize("layers, heads, tokens", [(1, 1, 1), (1, 1, 2), (1, 3, 1), (2, 1, 5)])
def test_the_smallest(look: Callable[..., Look], folder: Path, layers: int, heads: int, tokens: int) -> None:
    page = write(
        folder / f"{layers}.{heads}.{tokens}.html", stack(layers, heads, tokens), [f"t{i}" for i in range(tokens)]
    )
    tab = look(page)
    every_view(tab)
    tab.do(lambda: tab.ask("regard.state.set({view: 'head', layer: 0, head: 0})"))
    right_values(tab, page, 0, 0, tokens, tokens, 3)
    box = tab.page.locator("#map").bounding_box()
    assert box["width"] >= 40
    assert box["height"] >= 40
    tab.page.focus("#map")
    tab.press("ArrowRight", "ArrowDown", "+", "+", "-", "0", "]")


def test_marks_alone(look: Callable[..., Look], folder: Path) -> None:
    """A text of nothing but special tokens still has something to show when these are hidden."""
    page = write(folder / "marks.html", stack(1, 2, 3), ["[CLS]", "[MASK]", "[SEP]"])
    tab = look(page, "#view=head&specials=0")
    assert tab.texts(".queries button") == ["[CLS]", "[MASK]", "[SEP]"]
    tab.over(1.5, 1.5, (0, 3, 0, 3))
    assert tab.readout["query"] == "1-2"
    every_view(tab)


@pytest.mark.parametrize("layers, heads", [(24, 16), (3, 40)])
def test_many_heads(look: Callable[..., Look], folder: Path, layers: int, heads: int) -> None:
    page = write(folder / f"many{heads}.html", stack(layers, heads, 6, 2 * heads), list("abcdef"))
    tab = look(page, "#view=model")
    assert tab.page.locator("a.head").count() == layers * heads
    rows = tab.ask(
        "new Set([...document.querySelectorAll('.layer:first-child a.head')].map(a => Math.round(a.getBoundingClientRect().top))).size"
    )
    assert rows == (1 if heads == 16 else 3)  # a layer is a row, unless its maps would be too small
    assert tab.overflow() <= 0
    small = tab.ask(
        "Math.min(...[...document.querySelectorAll('.thumb')].slice(0, heads).map(t => t.getBoundingClientRect().width))".replace(
            "heads", str(heads)
        )
    )
    assert small >= 38
    every_view(tab)
    tab.click("#tab-model")
    tab.page.mouse.move(600, 600)
    for _ in range(12):
        tab.page.mouse.wheel(0, 900)
        tab.page.wait_for_timeout(20)
    tab.until("[...document.querySelectorAll('a.head')].slice(-5).every(a => a.painted)")


def test_a_batch(look: Callable[..., Look], minilm: Any, folder: Path) -> None:
    """One text of several; the padding of the shorter one is not drawn."""
    texts = ["The cat ran away", "Yes"]
    batch = minilm.encode_batch(texts)
    with regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
        minilm(batch.ids, keep=batch.keep)
    page = write(folder / "batch.html", seen, [minilm.tokenize(text) for text in texts], item=1)
    tab = look(page, "#view=head&layer=1&head=3")
    assert tab.texts(".keys button") == ["[CLS]", "yes", "[SEP]"]
    exact = seen[1].weights(3, batch=1)
    for i, j in some_cells(range(3), range(3), 6):
        tab.over(i + 0.5, j + 0.5, (0, 3, 0, 3))
        assert abs(float(tab.readout["value"]) - float(exact[i, j])) <= float(tab.readout["step"])


def test_not_a_number(look: Callable[..., Look], folder: Path) -> None:
    """What a model computed wrongly is not shown as nothing."""
    layer = regard.MultiHeadAttention(8, num_heads=2)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.full((1, 3, 8), torch.nan))
    tab = look(write(folder / "nan.html", seen, list("abc")))
    every_view(tab)
    tab.click("#tab-head")
    tab.over(1.5, 1.5, (0, 3, 0, 3))
    assert tab.readout["value"] == "NaN"
    assert tab.text("#readout").startswith("b → b –")
    assert "entropy\t–" in tab.text(".details")
    tab.click("#tab-table")
    tab.click("#sort-entropy")
    assert tab.page.locator("tbody tr").count() == 2
