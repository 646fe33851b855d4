"""`regard look --image`: a picture in a file, and a model in a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draw import tiny_vision
from typer.testing import CliRunner

from regard.cli import app, images

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["look", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("picture") / "cat.png"
    torch.manual_seed(0)
    Image.fromarray((torch.rand(30, 40, 3) * 255).byte().numpy()).save(path)
    return str(path)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    tiny_vision.vit().save_pretrained(folder)
    tiny_vision.image_processor().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llava")
    tiny_vision.llava().save_pretrained(folder)
    tiny_vision.llava_processor().save_pretrained(folder)
    return str(folder)


def test_a_picture_for_a_vision_transformer(vit: str, picture: str, tmp_path: Path) -> None:
    out = run("-m", vit, "--image", picture, "--html", str(tmp_path / "a.html"))
    assert "2 layers x 3 heads, 16 tokens" in out  # 3 x 5 patches and the class token
    assert "cat.png</title>" in (tmp_path / "a.html").read_text(encoding="utf-8")
    out = run("-m", vit, "--image", picture, "--layer", "1", "--head", "2", "--without", "0.1")
    assert "r0c0" in out
    assert "heads that change most, without 0.1:" in out


def test_its_figure_is_over_the_picture(
    vit: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="a figure needs matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("regard.draw.image", lambda seen, *given, path: drawn.append((*given, path)))
    where = tmp_path / "a.png"
    run("-m", vit, "--image", picture, "--layer", "1", "--png", str(where))
    assert drawn == [("layers.1.attention", None, 0, where)]
    run("-m", vit, "--image", picture, "--png", str(tmp_path / "b.svg"))  # (all layers: as of a text)
    assert "<svg" in (tmp_path / "b.svg").read_text(encoding="utf-8")


def test_a_picture_and_a_text(llava: str, picture: str) -> None:
    out = run("what is this ?", "-m", llava, "--image", picture, "-n", "3", "--against", "a cat")
    assert "4 layers x 3 heads" in out
    assert "generated:" in out
    assert "heads that change most, a cat:" in out


class Template:
    image_token, chat_template = "<i>", "a template"

    def apply_chat_template(self, said: Any, **options: Any) -> str:
        return f"{said[0]['role']}: <i> {said[0]['content'][1]['text']} {sorted(options)}"


def test_where_the_image_stands_in_a_text() -> None:
    assert images.with_image_token(Template(), "a <i> b") == "a <i> b"
    assert images.with_image_token(Template(), "a") == "user: <i> a ['add_generation_prompt', 'tokenize']"
    Plain = type("Plain", (), {"image_token": "<i>"})
    assert images.with_image_token(Plain(), "a") == "<i> a"
    assert images.with_image_token(object(), "a") == "a"


def test_what_it_refuses(vit: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(words: str, *arguments: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=words):
            run(*arguments)

    refuses("text: expected a text, or a picture by --image, received none")
    refuses("--model: expected a model that reads images, .* received minilm, which reads text", "--image", picture)
    refuses("--image: expected a file with a picture, received no such file: none.png", "--image", "none.png")
    refuses("--image: expected a file with a picture, received a folder", "--image", str(tmp_path))
    (tmp_path / "a.png").write_text("no picture")
    refuses("--image: expected a picture, received another file: .*a.png; remedy", "--image", str(tmp_path / "a.png"))
    (tmp_path / "b.png").write_bytes(Path(picture).read_bytes()[:900])
    refuses("--image: expected a picture, received a damaged one: .*b.png", "--image", str(tmp_path / "b.png"))
    with monkeypatch.context() as patched:
        patched.setattr(Image, "MAX_IMAGE_PIXELS", 700)
        refuses("--image: expected a picture of usual size, received more than 700 pixels", "--image", picture)
    refuses(
        "--model: expected a folder with config.json, .* no such folder: nobody", "-m", "nobody", "--image", picture
    )
    refuses("--model: expected a folder with config.json, .* none in", "-m", str(tmp_path), "--image", picture)
    refuses("text: expected none, for ViTModel reads", "a", "-m", vit, "--image", picture, error=TypeError)
    refuses("--treebank: expected none with --image", "-m", vit, "--image", picture, "--treebank", "a.conllu")
    refuses("dtype: expected one of float32", "-m", vit, "--image", picture, "--dtype", "int3")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "PIL", None)
        refuses(r"Pillow is not installed; it comes with: .*regard\[draw\]", "--image", picture, error=ImportError)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", None)
        refuses("--image: expected transformers", "-m", vit, "--image", picture, error=ImportError)


def test_a_model_without_images_or_processor(picture: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=7
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"--model: expected the model's image processor in .*remedy: processor.save_pr"
    ):
        run("-m", str(tmp_path), "--image", picture)
    tiny_vision.image_processor().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"image: expected none, for this model takes no pixel_values"):
        run("-m", str(tmp_path), "--image", picture)
