"""`regard look --image`: a picture, and a model of transformers that reads it, from files on this machine."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

from regard.errors import bad_value, missing_extra
from regard.models import EMBEDDED

__all__ = ["load_image_model", "open_picture", "with_image_token"]


def open_picture(path: Path) -> Any:
    """The picture in a file, as an image of PIL."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing_extra("Pillow", "draw") from None
    if not path.is_file():
        received = f"a folder: {path}" if path.is_dir() else f"no such file: {path}"
        raise bad_value("--image", expected="a file with a picture", received=received)
    remedy = "a PNG or JPEG file"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                return picture.convert("RGB")
    except UnidentifiedImageError:
        raise bad_value("--image", expected="a picture", received=f"another file: {path}", remedy=remedy) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        received = f"more than {Image.MAX_IMAGE_PIXELS:,} pixels in {path}"
        raise bad_value(
            "--image", expected="a picture of usual size", received=received, remedy="a smaller one"
        ) from None
    except (OSError, SyntaxError, ValueError) as error:  # (what PIL raises for a file that breaks off)
        received = f"a damaged one: {path} ({error})"
        raise bad_value("--image", expected="a picture", received=received, remedy=remedy) from None


def load_image_model(name: str, dtype: Any) -> tuple[Any, Any]:
    """A model of transformers and its processor, from the folder that `save_pretrained` wrote both to."""
    if name in EMBEDDED:
        expected = "a model that reads images, with --image"
        raise bad_value("--model", expected=expected, received=f"{name}, which reads text", remedy="--model FOLDER")
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise bad_value(
            "--model",
            expected="a folder with config.json, with --image",
            received=f"no such folder: {name}" if not folder.is_dir() else f"none in {name}",
            remedy="model.save_pretrained(folder); processor.save_pretrained(folder)",
        )
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        words = (
            "--image: expected transformers, which loads such models, received none; remedy: pip install transformers"
        )
        raise ImportError(words) from None
    with _quiet():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
        model = kind.from_pretrained(folder, local_files_only=True, **({} if dtype is None else {"dtype": dtype}))
        return model.eval(), _processor(transformers, folder)


def _processor(transformers: Any, folder: Path) -> Any:
    """The processor in the folder: of text and images, or of images alone."""
    errors = []
    for kind in ("AutoProcessor", "AutoImageProcessor"):
        try:
            found = getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            errors.append(error)
            continue
        if hasattr(found, "image_processor") or hasattr(found, "image_mean"):
            return found
    why = str(errors[-1]).strip().splitlines()[0] if errors else "a tokenizer alone"
    raise bad_value(
        "--model",
        expected=f"the model's image processor in {folder}, with --image",
        received=why,
        remedy="processor.save_pretrained(folder)",
    )


def with_image_token(processor: Any, text: str) -> str:
    """A text with the token that stands for the image: by the processor's chat template, or at its beginning."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or token in text:
        return text
    if getattr(processor, "chat_template", None):
        said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        return processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return f"{token} {text}"


@contextlib.contextmanager
def _quiet() -> Any:
    """transformers prints bars and advice while it loads, which are not for the reader of this command."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
