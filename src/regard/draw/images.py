"""An image for `look`: what a processor makes of it, and the labels of the record that comes of it.

Letters: B batch, N tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.draw.encoding import OPTIONAL, Encoded, takes
from regard.draw.image_grid import REMEDY, ImageGrid, VisionTower, patch_grid, vision_tower
from regard.errors import bad_type, bad_value, missing_extra, shape_of
from regard.heads import LayerRecord, Record

__all__ = [
    "ImageInputs",
    "Picture",
    "check_reads_text",
    "encode_image",
    "extended",
    "label_layers",
    "pixels_of",
    "takes_ids",
]

PER_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids")  # of the inputs of a vision-language model


@dataclass
class Picture:
    """The picture that a model was shown, and where its patches are: `Record.image`.

    Attributes:
        pixels: (H, W, 3) in 0 to 255, as the model got it: resized and cropped.
        grids: the grid of each layer, by name.
    """

    pixels: Tensor
    grids: dict[str, ImageGrid] = field(default_factory=dict)


@dataclass
class ImageInputs:
    """What a model is run on for an image, and a text if it reads one."""

    inputs: dict[str, Any]
    pixels: Tensor  # (H, W, 3) in 0 to 255
    tower: VisionTower
    tokenizer: Any = None

    @property
    def has_text(self) -> bool:
        return "input_ids" in self.inputs

    def words(self) -> list[str]:
        """The tokens of the text, image tokens included."""
        ids = self.inputs["input_ids"]
        named = hasattr(self.tokenizer, "convert_ids_to_tokens") or hasattr(self.tokenizer, "id_to_token")
        return Encoded({"input_ids": ids}, False).tokens(self.tokenizer) if named else [str(i) for i in ids[0].tolist()]


def encode_image(model: nn.Module, processor: Any, text: Any, image: Any) -> ImageInputs:
    """An image, and a text, by a processor of transformers (or a callable like it), on the model's device."""
    if not takes(model, "pixel_values"):
        expected = "none, for this model takes no pixel_values"
        raise bad_value("image", expected=expected, received=type(image).__name__, remedy="a model that reads images")
    _check_processor(processor)
    _check_text(model, processor, text)
    picture = _as_pil(pixels_of(image))
    said = {} if text is None else {"text": [text]}
    encoded = dict(processor(images=picture, return_tensors="pt", **said))
    if "pixel_values" not in encoded:
        received = ", ".join(encoded) or "nothing"
        raise bad_value("processor", expected="one that returns pixel_values for an image", received=received)
    optional = OPTIONAL | {"mm_token_type_ids"}
    parameter = next(model.parameters(), torch.empty(0, device="cpu"))
    inputs = {
        name: _moved(torch.as_tensor(x) if hasattr(x, "__array__") else x, parameter)
        for name, x in encoded.items()
        if name not in optional or takes(model, name)
    }
    pixels = _shown(inputs["pixel_values"], processor)
    pixels = _bytes(picture) if pixels is None else pixels
    return ImageInputs(inputs, pixels, vision_tower(model), getattr(processor, "tokenizer", processor))


def extended(encoded: ImageInputs, new: list[int]) -> ImageInputs:
    """The same with more tokens of text at the end, none of them of the image."""
    inputs, ids = dict(encoded.inputs), encoded.inputs["input_ids"]
    inputs["input_ids"] = torch.cat([ids, ids.new_tensor([new])], 1)
    for name in PER_TOKEN:
        if isinstance(inputs.get(name), Tensor) and inputs[name].shape == ids.shape:
            inputs[name] = F.pad(inputs[name], (0, len(new)), value=int(name == "attention_mask"))
    return ImageInputs(inputs, encoded.pixels, encoded.tower, encoded.tokenizer)


def label_layers(model: nn.Module, encoded: ImageInputs, seen: Record) -> None:
    """Set a record's tokens, and where each layer's patches are."""
    tower, inputs = encoded.tower, encoded.inputs
    of_text = [layer for layer in seen if not tower.has(layer.name)]
    pooling = [layer for layer in seen if tower.has(layer.name) and layer.num_queries != layer.num_keys]
    if pooling and (of_text or len({layer.num_queries for layer in pooling}) > 1):
        for layer in pooling:
            del seen.by_name[layer.name]
            seen.unseen[layer.name] = "its queries are no tokens: they pool the patches"
        pooling = []
    of_image = [layer for layer in seen if tower.has(layer.name) and layer not in pooling]
    seen.image = Picture(encoded.pixels)
    sides: dict[str, list[str]] = {}
    if of_image:
        grid = patch_grid(model, inputs, tower=True)
        sides["image"] = grid.labels()
        _check_layers(of_image, len(sides["image"]), grid)
        seen.image.grids |= {layer.name: grid for layer in of_image}
        if pooling:  # (as SigLIP has it: learned queries over all patches)
            _check_layers(pooling, len(sides["image"]), grid)
            sides["text"] = [f"[PROBE{i}]" for i in range(pooling[0].num_queries)]
    if of_text:
        words = encoded.words()
        if _reads_image_in_text(model):
            grid = patch_grid(model, inputs)
            words = grid.labels(words)
            _check_layers(of_text, len(words), grid)
            seen.image.grids |= {layer.name: grid for layer in of_text}
        sides["text"] = words
    order = ["text", "image"] if of_text and of_image and seen.layers[0] == of_text[0].name else ["image", "text"]
    named = [name for name in order if name in sides]
    seen.tokens = tuple(sides[name] for name in named) if len(named) == 2 else sides[named[0]] if named else None
    if len(named) == 2:
        seen.source_layers = tuple(layer.name for layer in (of_text if named[0] == "text" else of_image))


def _check_layers(layers: list[LayerRecord], tokens: int, grid: ImageGrid) -> None:
    """Refuse layers that do not attend over the tokens that the configuration lets one expect."""
    for layer in layers:
        if layer.batch_size != 1 or layer.num_keys != tokens:
            received = f"{layer.num_keys} tokens"
            received += f" in each of {layer.batch_size} parts" if layer.batch_size > 1 else ""
            raise bad_value(
                "image",
                expected=f"{tokens} tokens in {layer.name}, with a grid of {grid.rows} x {grid.cols} patches",
                received=received,
                remedy=REMEDY,
            )


def _reads_image_in_text(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return any(isinstance(getattr(config, name, None), int) for name in ("image_token_id", "image_token_index"))


# What was given


def pixels_of(image: Any) -> Tensor:
    """An image as a tensor (H, W, 3) in 0 to 255: a PIL image, or an array or tensor (H, W, 3) of bytes, or of numbers
    from 0 to 1.

    >>> pixels_of(torch.ones(2, 3, 3))[0, 0].tolist()
    [255, 255, 255]
    """
    if hasattr(image, "convert") and hasattr(image, "size"):  # of PIL, in any mode
        return _bytes(image.convert("RGB"))
    if not isinstance(image, Tensor):
        if not hasattr(image, "__array__"):
            raise bad_type(
                "image",
                expected="a PIL image, or an array or tensor (H, W, 3)",
                received=type(image).__name__,
                remedy="PIL.Image.open(path)" if isinstance(image, str) or hasattr(image, "__fspath__") else "",
            )
        image = torch.as_tensor(image)
    if image.dim() != 3 or image.shape[2] != 3 or not image.numel():
        remedy = "image.permute(1, 2, 0)" if image.dim() == 3 and image.shape[0] == 3 else ""
        raise bad_value("image", expected="shape (H, W, 3)", received=f"shape {shape_of(image)}", remedy=remedy)
    image = image.detach().cpu()
    if image.dtype is torch.uint8:
        return image
    if not image.is_floating_point():
        raise bad_type("image", expected="bytes, or floats from 0 to 1", received=str(image.dtype))
    low, high = (float(x) for x in image.aminmax())
    if not (low >= 0 and high <= 1):
        raise bad_value("image", expected="bytes, or floats from 0 to 1", received=f"floats from {low:g} to {high:g}")
    return (image.double() * 255).round().to(torch.uint8)


def _bytes(picture: Any) -> Tensor:
    """The pixels (H, W, 3) of a picture of PIL in the mode RGB."""
    width, height = picture.size
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3).clone()


def _as_pil(pixels: Tensor) -> Any:
    """Pixels (H, W, 3) as an image of PIL, which every processor takes."""
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("Pillow", "draw") from None
    height, width, _ = pixels.shape
    return Image.frombytes("RGB", (width, height), pixels.contiguous().numpy().tobytes())


def _check_processor(processor: Any) -> None:
    if processor is None or not callable(processor):
        received = "None" if processor is None else type(processor).__name__
        expected = "the model's image processor"
        raise bad_type("processor", expected=expected, received=received, remedy="look(model, processor, image=image)")
    try:
        parameters = inspect.signature(processor).parameters
    except (TypeError, ValueError):  # (no signature is known: let it be called)
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    tokenizes = hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor")
    if "images" not in parameters and (tokenizes or not takes_any):
        raise bad_type(
            "processor",
            expected="one that takes images",
            received=type(processor).__name__,
            remedy="AutoProcessor or AutoImageProcessor.from_pretrained(...)",
        )


def _check_text(model: nn.Module, processor: Any, text: Any) -> None:
    """Refuse texts that do not fit the model: none for a vision-language model, one for a vision transformer."""
    name, takes_text = type(model).__name__, takes_ids(model)
    if text is None and takes_text:
        expected = "a text, which this model reads with the image"
        raise bad_type("text", expected=expected, received="None", remedy="look(model, processor, text, image=image)")
    if text is not None and not takes_text:
        raise bad_type("text", expected=f"none, for {name} reads an image alone", received=type(text).__name__)
    if text is not None and not isinstance(text, str):
        raise bad_type("text", expected="one text, with one image", received=type(text).__name__)
    token = getattr(processor, "image_token", None)
    if isinstance(text, str) and isinstance(token, str) and _reads_image_in_text(model) and text.count(token) != 1:
        raise bad_value(
            "text",
            expected=f"{token!r} once, where the image is read",
            received=f"{text.count(token)} of them",
            remedy=f"{token!r} in the text, or processor.apply_chat_template(..., tokenize=False)",
        )


def check_reads_text(model: nn.Module, given: Any) -> None:
    """Refuse a text, or nothing but a processor, for a model that reads images alone."""
    reads_images = takes(model, "pixel_values") and not takes_ids(model)
    if reads_images and (given is None or isinstance(given, str) or callable(getattr(given, "preprocess", None))):
        raise bad_type(
            "image",
            expected=f"an image, for {type(model).__name__} reads no text",
            received="None",
            remedy="look(model, processor, image=image)",
        )


def takes_ids(model: nn.Module) -> bool:
    """Whether a model reads a text: its forward names `input_ids` (vision transformers may take any keyword)."""
    return "input_ids" in inspect.signature(model.forward).parameters


def _moved(x: Any, parameter: Tensor) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(parameter.device, parameter.dtype) if x.is_floating_point() else x.to(parameter.device)


def _shown(pixel_values: Any, processor: Any) -> Tensor | None:
    """The picture that a model got, (H, W, 3), from what it is run on: after the processor resized and cropped it. None
    if the pixels are not those of one picture."""
    if not isinstance(pixel_values, Tensor) or pixel_values.dim() != 4 or pixel_values.shape[:2] != (1, 3):
        return None
    pixels = pixel_values[0].double().cpu()
    part = getattr(processor, "image_processor", processor)
    mean, std = (getattr(part, name, None) for name in ("image_mean", "image_std"))
    if getattr(part, "do_normalize", True) and mean is not None and std is not None:
        mean, std = (torch.as_tensor(list(x), dtype=torch.float64).view(-1, 1, 1) for x in (mean, std))
        pixels = pixels * std + mean
    else:
        low, high = pixels.aminmax()
        pixels = pixels if low >= 0 and high <= 1 else (pixels - low) / (high - low).clamp(min=1e-9)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
