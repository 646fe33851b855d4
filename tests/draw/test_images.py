"""Images: grids of patches, labels and spans of what models read, figures over the picture."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from draw import tiny_vision
from draw.tiny_models import gpt2
from PIL import Image
from transformers import SwinConfig, SwinModel, ViTMAEConfig, ViTMAEModel

import regard
from regard.draw import ImageGrid, patch_grid
from regard.draw.scene import Scene

PROMPT = "what is <image> this ?"


def picture(height: int = 31, width: int = 43) -> np.ndarray:
    """Random bytes (H, W, 3)."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def places(rows: int, cols: int) -> list[str]:
    return [f"r{row}c{col}" for row in range(rows) for col in range(cols)]


# Vision transformers


@pytest.mark.parametrize(
    "make, processor, before, rows, cols",
    [
        (tiny_vision.vit, tiny_vision.image_processor(21, 35), ["[CLS]"], 3, 5),
        (tiny_vision.clip_vision, tiny_vision.cropping_processor(35), ["[CLS]"], 5, 5),
        (tiny_vision.siglip, tiny_vision.image_processor(21, 21), [], 3, 3),
        (tiny_vision.dinov2, tiny_vision.image_processor(21, 35), ["[CLS]", "[REG0]", "[REG1]"], 3, 5),
    ],
)
def test_a_vision_transformer(make, processor, before, rows, cols) -> None:
    model = make()
    seen = regard.look(model, processor, image=picture(), show=False)
    assert seen.tokens == before + places(rows, cols)
    assert seen.image.pixels.shape == (7 * rows, 7 * cols, 3)
    grid = seen.image.grids[seen.layers[0]]
    assert grid == ImageGrid(rows, cols, len(before), names=tuple(before))
    inputs = dict(processor(images=Image.fromarray(picture()), return_tensors="pt"))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    assert len(maps) == len(seen) == 2
    for layer, expected in zip(seen, maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-5, rtol=1e-4)
        assert layer.weights().std() > 1e-3  # (not uniform)


def test_a_learned_query_that_pools_the_patches() -> None:
    seen = regard.look(tiny_vision.siglip(head=True), tiny_vision.image_processor(21, 21), image=picture(), show=False)
    assert seen.tokens == (places(3, 3), ["[PROBE0]"])
    labels = [(panel.queries.text, panel.keys.text) for panel in Scene(seen)]
    assert labels == [*[(places(3, 3), places(3, 3))] * 2, (["[PROBE0]"], places(3, 3))]


@pytest.mark.parametrize("kind", ["pil", "grey", "numpy", "tensor", "floats"])
def test_kinds_of_images(kind) -> None:
    bytes_ = picture() if kind != "grey" else np.repeat(picture()[..., :1], 3, axis=2)
    given = {
        "pil": lambda: Image.fromarray(bytes_),
        "grey": lambda: Image.fromarray(bytes_[..., 0]),
        "numpy": lambda: bytes_,
        "tensor": lambda: torch.tensor(bytes_),
        "floats": lambda: torch.tensor(bytes_) / 255,
    }[kind]()
    model, processor = tiny_vision.vit(), tiny_vision.image_processor()
    seen = regard.look(model, processor, image=given, show=False)
    expected = regard.look(model, processor, image=Image.fromarray(bytes_), show=False)
    torch.testing.assert_close(seen[1].weights(), expected[1].weights(), atol=0, rtol=0)


def test_the_picture_is_the_one_that_the_model_got() -> None:
    """Resized and cropped: the left and right of a wide picture are not there."""
    wide = np.zeros((35, 105, 3), np.uint8)
    wide[:, 35:70] = 200
    seen = regard.look(tiny_vision.clip_vision(), tiny_vision.cropping_processor(35), image=wide, show=False)
    assert (seen.image.pixels.float() - 200).abs().max() <= 1


# Vision-language models


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava(strategy) -> None:
    model, processor = tiny_vision.llava(strategy), tiny_vision.llava_processor(strategy)
    seen = regard.look(model, processor, PROMPT, image=picture(), show=False)
    of_image, of_text = seen.tokens
    before = ["[CLS]"] if strategy == "full" else []
    assert of_image == ["[CLS]", *places(5, 5)]
    assert of_text == ["what", "is", *before, *places(5, 5), "this", "?"]
    grid = seen.image.grids["model.language_model.layers.0.self_attn"]
    first = 2 + len(before)
    assert (grid.rows, grid.cols, grid.first) == (5, 5, first)
    spans = [("text", range(first)), ("image", range(first, first + 25)), ("text", range(first + 25, first + 27))]
    assert grid.spans(len(of_text)) == spans
    assert [panel.queries.text for panel in Scene(seen)] == [of_image, of_image, of_text, of_text]
    inputs = processor(text=[PROMPT], images=Image.fromarray(picture()), return_tensors="pt")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    for layer, expected in zip(list(seen)[2:], maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-5, rtol=1e-4)


def test_qwen2_vl() -> None:
    """Four patches become one token of the text; the encoder has them in squares of four."""
    model, processor = tiny_vision.qwen2_vl(), tiny_vision.QwenProcessor()
    text = "what is <start> <image> <end> this ?"
    seen = regard.look(model, processor, text, image=picture(28, 42), show=False)
    of_image, of_text = seen.tokens
    assert of_image[:8] == ["r0c0", "r0c1", "r1c0", "r1c1", "r0c2", "r0c3", "r1c2", "r1c3"]
    assert sorted(of_image) == sorted(places(4, 6))
    assert of_text == ["what", "is", "<start>", *places(2, 3), "<end>", "this", "?"]
    inputs = processor(text=[text], images=Image.fromarray(picture(28, 42)), return_tensors="pt")
    assert patch_grid(model, inputs) == ImageGrid(2, 3, first=3)
    assert patch_grid(model, inputs, tower=True) == ImageGrid(4, 6, block=2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    for layer, expected in zip(list(seen)[2:], maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "regard"])
def test_an_encoder_that_sorts_patches_into_windows(implementation: str) -> None:
    """Qwen2.5-VL: 4 x 6 patches in squares of four, in windows of two by two squares; the second layer sees all."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    import regard.integrations.transformers

    text = "what is <start> <image> <end> this ?"
    model, processor = tiny_vision.qwen2_5_vl(), tiny_vision.QwenProcessor()
    model.set_attn_implementation(implementation)
    seen = regard.look(model, processor, text, image=picture(28, 42), show=False)
    tower = [f"model.visual.blocks.{i}.attn" for i in range(2)]
    assert seen.layers[:2] == tower
    assert not seen.unseen
    of_image, of_text = seen.tokens
    assert of_text == ["what", "is", "<start>", *places(2, 3), "<end>", "this", "?"]
    assert sorted(of_image) == sorted(places(4, 6))
    assert sorted(of_image[:16]) == sorted(f"r{row}c{col}" for row in range(4) for col in range(4))  # the first window
    inputs = processor(text=[text], images=Image.fromarray(picture(28, 42)), return_tensors="pt")
    given: list[dict[str, torch.Tensor]] = []
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda _, args, call: given.append(call | {"x": args[0]}), with_kwargs=True
        )
        for block in model.model.visual.blocks
    ]
    with torch.no_grad():
        right = model(**inputs).logits
        for hook in hooks:
            hook.remove()
        with regard.watch(model):
            torch.testing.assert_close(model(**inputs).logits, right, atol=1e-5, rtol=1e-4)
    assert len(given) == 2
    for name, block, call in zip(tower, model.model.visual.blocks, given, strict=True):
        # The patches stand where the encoder has them: angles of one row are the same, and those of one column.
        cos, grid = call["position_embeddings"][0], seen.image.grids[name]
        rows, columns = cos[grid.positions()][..., :2], cos[grid.positions()][..., 2:4]  # (4, 6, 2)
        assert torch.equal(rows, rows[:, :1].expand_as(rows))
        assert torch.equal(columns, columns[:1].expand_as(columns))
        assert not torch.equal(rows, rows[:1].expand_as(rows))
        # The weights are those of each window alone.
        x = block.attn.qkv(call["x"]).view(24, 3, 2, 8).permute(1, 2, 0, 3)
        q, k = apply_rotary_pos_emb_vision(*(y.transpose(0, 1) for y in x[:2]), *call["position_embeddings"])
        which = torch.bucketize(torch.arange(24), call["cu_seqlens"][1:], right=True)
        scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * 8**-0.5
        expected = scores.masked_fill(which[:, None] != which, -float("inf")).softmax(-1)
        torch.testing.assert_close(seen[name].weights()[0], expected, atol=1e-5, rtol=1e-4)
    assert call["cu_seqlens"].numel() == 2 < given[0]["cu_seqlens"].numel()


def test_two_towers_have_tokens_of_their_own() -> None:
    seen = regard.look(tiny_vision.clip(), tiny_vision.ClipProcessor(), "a cat [EOS]", image=picture(), show=False)
    for panel in Scene(seen):
        expected = ["[CLS]", *places(3, 3)] if "vision" in panel.name else ["a", "cat", "[EOS]"]
        assert panel.queries.text == panel.keys.text == expected
    assert set(seen.image.grids) == {name for name in seen.layers if "vision" in name}


@pytest.mark.parametrize("make", [tiny_vision.llava, tiny_vision.qwen2_vl])
def test_what_is_generated_is_read_with_the_image(make) -> None:
    model = make()
    is_qwen = make is tiny_vision.qwen2_vl
    processor = tiny_vision.QwenProcessor() if is_qwen else tiny_vision.llava_processor()
    seen = regard.look(model, processor, PROMPT, image=picture(), generate=4, show=False)
    without = regard.look(model, processor, PROMPT, image=picture(), show=False)
    n = len(without.tokens[1])
    assert seen.tokens[1][:n] == without.tokens[1]
    assert len(seen.tokens[1]) == n + 3
    assert isinstance(seen.generated, str)
    torch.testing.assert_close(seen[-1].weights()[..., :n, :n], without[-1].weights(), atol=1e-5, rtol=1e-4)


def test_each_patch_is_a_word() -> None:
    labels = regard.heads.analysis.labels.Labels.of(["Ġsee", "r0c0", "r0c1", "ing"])
    assert labels.words == ["see", "r0c0", "r0c1", "ing"]


def test_tokens_of_both_sequences_are_saved(tmp_path) -> None:
    seen = regard.look(tiny_vision.llava(), tiny_vision.llava_processor(), PROMPT, image=picture(), show=False)
    seen.save(tmp_path / "seen.safetensors")
    again = regard.heads.Record.load(tmp_path / "seen.safetensors")
    assert again.tokens == seen.tokens
    assert [panel.keys for panel in Scene(again)] == [panel.keys for panel in Scene(seen)]


def test_the_page_has_the_labels(tmp_path) -> None:
    path = tmp_path / "page.html"
    regard.look(tiny_vision.llava(), tiny_vision.llava_processor(), PROMPT, image=picture(), html=path, show=False)
    text = path.read_text()
    assert "<title>what is (image) this ?</title>" in text
    meta = json.loads(text.split('id="regard-meta">')[1].split("</script>")[0])
    (run,) = meta["runs"]
    assert run["texts"][1]["tokens"] == ["what", "is", *places(5, 5), "this", "?"]
    assert [layer["grid"]["first"] for layer in run["layers"]] == [1, 1, 2, 2]
    data = base64.b64decode(run["image"]["source"].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (run["image"]["width"], run["image"]["height"]) == (35, 35)


def test_a_large_picture_is_made_small_for_the_page() -> None:
    seen = regard.look(tiny_vision.vit(), tiny_vision.image_processor(), image=picture(), show=False)
    plain = len(str(regard.draw.page(seen)))
    seen.image.pixels = torch.tensor(picture(1024, 2048))  # (noise, which no JPEG makes small)
    assert len(str(regard.draw.page(seen))) < plain + 110_000


# Grids


def test_positions_and_places_are_inverse() -> None:
    for grid in (ImageGrid(3, 5, 7), ImageGrid(4, 6, 2, block=2), ImageGrid(1, 1)):
        positions = grid.positions()
        assert sorted(positions.flatten().tolist()) == list(grid.span)
        for row in range(grid.rows):
            for col in range(grid.cols):
                assert grid.place(grid.position(row, col)) == (row, col)
        assert grid.place(grid.first - 1) is None
        assert grid.place(grid.span.stop) is None
        assert grid.is_image(grid.span.stop + 2).nonzero().flatten().tolist() == list(grid.span)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ImageGrid(0, 3), "ImageGrid rows: expected an integer from 1, received 0"),
        (lambda: ImageGrid(3, 4, block=2), "ImageGrid: expected rows and cols that 2 divides, received 3 rows"),
        (lambda: ImageGrid(3, 5, names=("[CLS]",)), "ImageGrid names: expected at most 0, for so many tokens stand"),
        (lambda: ImageGrid(3, 5, 1).spans(15), "tokens: expected at least 16, for 3 x 5 patches from position 1 on"),
        (lambda: ImageGrid(3, 5).position(3, 0), r"patch: expected a row below 3 and a col below 5, received \(3, 0\)"),
        (
            lambda: patch_grid(tiny_vision.qwen2_vl(), {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}),
            "image_grid_thw: expected one image",
        ),
        (
            lambda: patch_grid(tiny_vision.llava(), {"input_ids": torch.tensor([[2, 10, 10, 3]])}),
            "image: expected 5 x 5 image tokens, by the configuration, received 2 in the text; remedy: watch the model",
        ),
        (
            lambda: patch_grid(tiny_vision.llava(), {"input_ids": torch.tensor([[2, 10, 3, 10]])}),
            "text: expected the image tokens of one image, side by side, received 2 from 1 to 3",
        ),
        (
            lambda: patch_grid(tiny_vision.llava(), {"input_ids": torch.tensor([[2, 3]])}),
            r"text: expected image tokens \(id 10\), received none",
        ),
        (
            lambda: patch_grid(tiny_vision.vit(), {"pixel_values": torch.zeros(3, 21, 35)}),
            r"pixel_values: expected one image, \(B, 3, height, width\), received shape \(3, 21, 35\)",
        ),
        (
            lambda: patch_grid(ViTMAEModel(ViTMAEConfig(patch_size=7, image_size=21, **tiny_vision.SIZES)), {}),
            "model: expected one that reads all patches in order, received ViTMAEModel, which leaves some out",
        ),
        (lambda: patch_grid(gpt2(), {}), "model: expected patch_size in its configuration, received GPT2LMHeadModel"),
    ],
)
def test_grids_that_cannot_be(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys) -> None:
    text = (Path(__file__).parents[2] / "docs" / "heads.md").read_text(encoding="utf-8")
    code = text.split("## Images")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "heads.md", "exec"), {})
    assert "14 14 5 ['[CLS]', '[REG0]', '[REG1]', '[REG2]', '[REG3]', 'r0c0', 'r0c1']" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cls.png", "heads.png", "readers.png"]


# Figures


@pytest.fixture(scope="module")
def dino() -> regard.heads.Record:
    return regard.look(tiny_vision.dinov2(), tiny_vision.image_processor(), image=picture(), show=False)


@pytest.fixture(scope="module")
def qwen() -> regard.heads.Record:
    model, processor = tiny_vision.qwen2_vl(), tiny_vision.QwenProcessor()
    return regard.look(model, processor, "what is <image> this ?", image=picture(28, 42), show=False)


def drawn_maps(figure) -> dict[str, torch.Tensor]:
    return {x.get_label(): torch.tensor(np.asarray(x.get_array())) for x in figure.axes[0].images}


def texts_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("token, position", [("[CLS]", 0), ("[REG1]", 2), ("r2c1", 14), (14, 14), (-1, 17)])
def test_one_tokens_weights_over_the_picture(dino, token, position, tmp_path) -> None:
    path = tmp_path / "map.png"
    figure = regard.draw.image(dino, 1, 2, token, path=path)
    maps = drawn_maps(figure)
    weights = dino[1].weights(2, position, batch=0)
    torch.testing.assert_close(maps["1.2"], weights[3:].view(3, 5))
    assert maps["picture"].shape == (21, 35, 3)
    texts = texts_of(figure)
    assert {"image", "[CLS]", "[REG0]", "[REG1]"} <= set(texts)
    assert f"{float(weights[3:].sum()):.3f}" in texts
    assert f"{float(weights[0]):.3f}" in texts
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 50


def test_squares_lie_where_their_patches_are(dino) -> None:
    """The colour of the darkest square is at the place of the patch with the largest weight."""
    figure = regard.draw.image(dino, 0, 1, "[CLS]", torch.ones(21, 35, 3), dpi=100)
    figure.canvas.draw()
    weights = dino[0].weights(1, 0, batch=0)[3:].view(3, 5)
    drawn = next(x for x in figure.axes[0].images if x.get_label() == "0.1")
    left, right, bottom, top = drawn.get_extent()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    shade = torch.empty(3, 5)
    for row in range(3):
        for col in range(5):
            x, y = left + (col + 0.5) * (right - left) / 5, top + (row + 0.5) * (bottom - top) / 3
            shade[row, col] = 765 - pixels[int(y * 100), int(x * 100)].sum()
    assert shade.flatten().argsort()[-3:].tolist() == weights.flatten().argsort()[-3:].tolist()


def test_all_heads_of_a_layer(dino) -> None:
    figure = regard.draw.image(dino, "encoder.layer.0.attention", None, "[CLS]")
    maps = drawn_maps(figure)
    assert [name for name in maps if name != "picture"] == ["0.0", "0.1", "0.2"]
    for head in range(3):
        torch.testing.assert_close(maps[f"0.{head}"], dino[0].weights(head, 0, batch=0)[3:].view(3, 5))
    scales = {x.norm.vmax for x in figure.axes[0].images if x.get_label() != "picture"}
    assert scales == {float(dino[0].weights(None, 0, batch=0)[:, 3:].max())}


def test_patches_in_squares_are_put_in_rows(qwen) -> None:
    """The image encoder of Qwen2-VL: r0c2 is the fifth token, r1c0 the third."""
    maps = drawn_maps(regard.draw.image(qwen, 0, 1, "r1c0"))
    weights = qwen[0].weights(1, 2, batch=0)
    assert maps["0.1"].shape == (4, 6)
    assert maps["0.1"][0, 2] == weights[4]
    assert maps["0.1"][3, 5] == weights[23]


def test_a_word_looks_at_the_picture(qwen) -> None:
    figure = regard.draw.image(qwen, 3, 0, "this")
    weights = qwen[3].weights(0, 8, batch=0)
    torch.testing.assert_close(drawn_maps(figure)["3.0"], weights[2:8].view(2, 3))
    assert {"image", "what", "is", "this", "?"} <= set(texts_of(figure))


def test_words_that_look_at_a_patch(qwen) -> None:
    key = qwen.image.grids[qwen.layers[3]].position(1, 2)
    texts = texts_of(regard.draw.image_readers(qwen, 3, 1, (1, 2)))
    weights = qwen[3].weights(1, None, key, batch=0)
    for position, word in ((0, "what"), (8, "this"), (9, "?")):
        assert texts[texts.index(word) + 1] == f"{float(weights[position]):.3f}"
    figure = regard.draw.image_readers(qwen, 3, None, (1, 2))
    readers = next(x for ax in figure.axes for x in ax.images if x.get_label() == "readers")
    expected = torch.stack([qwen[3].weights(head, None, key, batch=0)[[0, 1, 8, 9]] for head in range(2)], 1)
    torch.testing.assert_close(torch.tensor(np.asarray(readers.get_array()))[:-1], expected)


def test_a_record_of_watch_alone() -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(*[torch.randn(2, 8, 8)] * 3, need_weights=False)
    grid = ImageGrid(2, 3, first=1)
    figure = regard.draw.image(seen, 0, 1, "0", torch.rand(5, 7, 3), grid, item=1)
    torch.testing.assert_close(drawn_maps(figure)["0.1"], seen[0].weights(1, 0, batch=1)[1:7].view(2, 3))


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"grid": None}, TypeError, "grid: expected an ImageGrid, which says where the patches of .*, received None"),
        ({"grid": ImageGrid(3, 5)}, ValueError, "tokens of .*: expected at least 15, for 3 x 5 patches .*received 8"),
        ({"image": None}, TypeError, "image: expected the picture, received None"),
        ({"head": 2}, ValueError, "head: expected from 0 to 1, or None for all, received 2"),
        ({"token": "cat"}, ValueError, "token: expected one of 0, r0c0, r0c1 ... 7, received 'cat'"),
        ({"token": 8}, ValueError, "token: expected a label, or a position below 8, received 8"),
        ({"item": 3}, ValueError, "item: expected from 0 to 0, received 3"),
        ({"width": 1.5}, ValueError, "width: expected at least .* inches, received 1.5"),
        ({"path": "map.gif"}, ValueError, "path: expected one that ends in .png, .svg, .pdf, received 'map.gif'"),
    ],
)
def test_figures_that_cannot_be(given, error, words) -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(*[torch.randn(1, 8, 8)] * 3, need_weights=False)
    usual = {"layer": 0, "head": 1, "token": 0, "image": torch.rand(5, 7, 3), "grid": ImageGrid(2, 3, first=1)}
    with pytest.raises(error, match=words):
        regard.draw.image(seen, **(usual | given))


def test_matplotlib_is_an_extra(monkeypatch, dino) -> None:
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed; it comes with: pip install 'regard\[draw\]'"):
        regard.draw.image(dino, 0, 0, 0)


def test_pillow_is_an_extra(monkeypatch) -> None:
    model, processor = tiny_vision.vit(), tiny_vision.image_processor()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Pillow is not installed; it comes with: pip install 'regard\[draw\]'"):
        regard.look(model, processor, image=torch.rand(5, 7, 3), show=False)


# What the caller got wrong


def test_a_vision_transformer_without_an_image() -> None:
    words = (
        r"image: expected an image, for ViTModel reads no text, received None; remedy: look\(model, processor, image="
    )
    model, processor = tiny_vision.vit(), tiny_vision.image_processor()
    for given in ((), (processor,), (processor, "a cat"), ("a cat",)):
        with pytest.raises(TypeError, match=words):
            regard.look(model, *given, show=False)
    seen = regard.look(model, {"pixel_values": torch.randn(1, 3, 21, 35)}, show=False)  # (what it is called on)
    assert len(seen.layers) == 2


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"model": gpt2}, ValueError, "image: expected none, for this model takes no pixel_values, received ndarray"),
        ({"processor": None}, TypeError, "processor: expected the model's image processor, received None; remedy: loo"),
        (
            {"processor": tiny_vision.tokenizer},
            TypeError,
            "processor: expected one that takes images, received .*; remedy: AutoProcessor or AutoImageProcessor",
        ),
        ({"text": "a cat"}, TypeError, "text: expected none, for ViTModel reads an image alone, received str"),
        ({"image": "cat.png"}, TypeError, r"image: expected a PIL image, .*received str; remedy: PIL.Image.open\(path"),
        ({"image": [[1, 2]]}, TypeError, r"image: expected a PIL image, or an array or tensor \(H, W, 3\), received l"),
        (
            {"image": torch.zeros(3, 21, 35)},
            ValueError,
            r"image: expected shape \(H, W, 3\), received shape \(3, 21, 35\); remedy: image.permute\(1, 2, 0\)",
        ),
        ({"image": torch.zeros(21, 35)}, ValueError, r"image: expected shape \(H, W, 3\), received shape \(21, 35\)"),
        ({"image": torch.full((5, 7, 3), 2.0)}, ValueError, "image: expected bytes, or floats from 0 to 1, received"),
        ({"image": torch.zeros(5, 7, 3).long()}, TypeError, "image: expected bytes, .* received torch.int64"),
        ({"generate": 3}, ValueError, "generate: expected 0, for this model reads an image alone, received 3"),
        ({"target": "a cat"}, ValueError, "target: expected none, with an image, received str"),
        (
            {"model": tiny_vision.llava, "processor": tiny_vision.llava_processor},
            TypeError,
            "text: expected a text, which this model reads with the image, received None",
        ),
        (
            {"model": tiny_vision.llava, "processor": tiny_vision.llava_processor, "text": "what is this ?"},
            ValueError,
            "text: expected '<image>' once, where the image is read, received 0 of them; remedy: '<image>' in the text",
        ),
        (
            {"model": tiny_vision.llava, "processor": tiny_vision.llava_processor, "text": [PROMPT]},
            TypeError,
            "text: expected one text, with one image, received list",
        ),
    ],
)
def test_what_the_caller_got_wrong(given, error, words) -> None:
    made = {"model": tiny_vision.vit, "processor": tiny_vision.image_processor} | given
    model, processor = (make() if callable(make) else make for make in (made.pop("model"), made.pop("processor")))
    with pytest.raises(error, match=words):
        regard.look(model, processor, **({"image": picture(), "show": False} | made))


def test_patches_that_are_not_in_one_sequence() -> None:
    model = SwinModel(SwinConfig(image_size=28, patch_size=7, embed_dim=6, depths=[1], num_heads=[2], window_size=2))
    words = r"image: expected 16 tokens in .*, with a grid of 4 x 4 patches, received 4 tokens in each of 4 parts"
    with pytest.raises(ValueError, match=words):
        regard.look(model, tiny_vision.image_processor(28, 28), image=picture(), show=False)
