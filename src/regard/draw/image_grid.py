"""Where the patches of an image lie in a sequence, by a model's configuration and what it was run on.

    grid = patch_grid(vit, {"pixel_values": pixels})                 a vision transformer: [CLS], patches
    grid = patch_grid(vlm, inputs)                                   the text of a vision-language model
    grid = patch_grid(vlm, inputs, tower=True)                       its image encoder

Letters: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["ImageGrid", "VisionTower", "check_fits", "patch_grid", "vision_tower"]

REMEDY = "watch the model yourself, and draw.image(..., grid=draw.ImageGrid(rows, cols, first))"
CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")  # parameters: one token before the patches
DISTILLATION_TOKENS = ("distillation_token", "dist_token")


@dataclass(frozen=True)
class ImageGrid:
    """The patches of one image in a sequence: `rows * cols` tokens from position `first` on, row by row.

    Attributes:
        rows, cols: patches down and across.
        first: the position of the first patch.
        block: patches come in squares of `block * block`, row by row within a square (image encoders of Qwen-VL);
            1 for row by row over the whole image.
        order: which square stands first in the sequence, which second, and so on, where they are not row by row: the
            image encoder of Qwen2.5-VL has them window by window.
        names: what the tokens before the patches are called, the last of them stands directly before the first patch.

    >>> grid = ImageGrid(2, 3, first=1, names=("[CLS]",))
    >>> grid.labels()
    ['[CLS]', 'r0c0', 'r0c1', 'r0c2', 'r1c0', 'r1c1', 'r1c2']
    >>> grid.position(1, 2), grid.place(6), grid.place(0)
    (6, (1, 2), None)
    """

    rows: int
    cols: int
    first: int = 0
    block: int = 1
    names: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("cols", 1), ("first", 0), ("block", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise bad_value(f"ImageGrid {name}", expected=f"an integer from {least}", received=repr(value))
        if self.rows % self.block or self.cols % self.block:
            received = f"{self.rows} rows and {self.cols} cols"
            raise bad_value("ImageGrid", expected=f"rows and cols that {self.block} divides", received=received)
        squares = self.count // self.block**2
        if self.order and sorted(self.order) != list(range(squares)):
            expected = f"each of the {squares} squares once"
            raise bad_value("ImageGrid order", expected=expected, received=f"{self.order!s:.40}")
        if len(self.names) > self.first:
            expected = f"at most {self.first}, for so many tokens stand before the patches"
            raise bad_value("ImageGrid names", expected=expected, received=str(len(self.names)))

    @property
    def count(self) -> int:
        """How many patches there are."""
        return self.rows * self.cols

    @property
    def span(self) -> range:
        """The positions of the patches."""
        return range(self.first, self.first + self.count)

    def positions(self) -> Tensor:
        """The position of each patch in the sequence, (rows, cols).

        >>> ImageGrid(2, 4, first=5, block=2).positions().tolist()
        [[5, 6, 9, 10], [7, 8, 11, 12]]
        >>> ImageGrid(1, 3, order=(2, 0, 1)).positions().tolist()
        [[1, 2, 0]]
        """
        size = self.block
        squares = torch.arange(self.count, device="cpu").view(-1, size, size)
        if self.order:
            squares = squares[torch.tensor(self.order, device="cpu").argsort()]
        squares = squares.view(self.rows // size, self.cols // size, size, size)
        return squares.transpose(1, 2).reshape(self.rows, self.cols) + self.first

    def position(self, row: int, col: int) -> int:
        """The position of one patch."""
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            expected = f"a row below {self.rows} and a col below {self.cols}"
            raise bad_value("patch", expected=expected, received=f"({row}, {col})")
        return int(self.positions()[row, col])

    def place(self, position: int) -> tuple[int, int] | None:
        """The (row, col) of a position; None if it is no patch."""
        if position not in self.span:
            return None
        row, col = (self.positions() == position).nonzero()[0].tolist()
        return row, col

    def labels(self, tokens: Sequence[str] | None = None) -> list[str]:
        """Labels of a sequence: patches by their place, the tokens before them by `names`, all others by `tokens`.

        >>> ImageGrid(1, 2, first=1).labels(["see", "<image>", "<image>", "here"])
        ['see', 'r0c0', 'r0c1', 'here']
        """
        if tokens is None:
            labels = [str(i) for i in range(self.first)] + [""] * self.count
        else:
            labels = [str(token) for token in tokens]
        check_fits(self, len(labels), "tokens")
        labels[self.first - len(self.names) : self.first] = self.names
        for row, positions in enumerate(self.positions().tolist()):
            for col, position in enumerate(positions):
                labels[position] = f"r{row}c{col}"
        return labels

    def spans(self, tokens: int, other: str = "text") -> list[tuple[str, range]]:
        """A sequence of so many tokens as spans of text and image, in order.

        >>> ImageGrid(2, 3, first=4).spans(12)
        [('text', range(0, 4)), ('image', range(4, 10)), ('text', range(10, 12))]
        """
        check_fits(self, tokens, "tokens")
        spans = [(other, range(self.first)), ("image", self.span), (other, range(self.span.stop, tokens))]
        return [(name, span) for name, span in spans if span]

    def is_image(self, tokens: int) -> Tensor:
        """True for the patches of a sequence of so many tokens, (N,)."""
        check_fits(self, tokens, "tokens")
        mask = torch.zeros(tokens, dtype=torch.bool, device="cpu")
        mask[self.first : self.span.stop] = True
        return mask


def check_fits(grid: ImageGrid, tokens: int, what: str) -> None:
    """Refuse a grid that ends beyond a sequence."""
    if grid.span.stop > tokens:
        expected = f"at least {grid.span.stop}, for {grid.rows} x {grid.cols} patches from position {grid.first} on"
        raise bad_value(what, expected=expected, received=str(tokens), remedy="another ImageGrid")


class VisionTower(NamedTuple):
    """The part of a model that reads an image: its name in the model ("" for the model itself), and configuration."""

    name: str
    module: nn.Module
    config: Any

    def has(self, layer: str) -> bool:
        """Whether a layer is in it, by name."""
        return not self.name or layer == self.name or layer.startswith(f"{self.name}.")

    def order(self, rows: int, cols: int) -> tuple[int, ...]:
        """The order of squares of patches, (rows, cols) of them, where windows of squares follow each other
        (Qwen2.5-VL); () for row by row."""
        if getattr(self.config, "fullatt_block_indexes", None) is None:
            return ()
        config = self.config
        side = config.window_size // config.spatial_merge_size // config.patch_size  # of a window, in squares
        squares = torch.arange(rows * cols, device="cpu").view(rows, cols)
        windows = [part for band in squares.split(side, 0) for part in band.split(side, 1)]
        return tuple(torch.cat([window.flatten() for window in windows]).tolist())

    def special_tokens(self) -> tuple[str, ...]:
        """The tokens before the patches, by the parameters that they are: a class token, registers."""
        parameters = {name.rpartition(".")[2]: x for name, x in self.module.named_parameters()}
        names = ["[CLS]"] if any(name in parameters for name in CLASS_TOKENS) else []
        names += ["[DIST]"] if any(name in parameters for name in DISTILLATION_TOKENS) else []
        names += [f"[REG{i}]" for i in range(getattr(self.config, "num_register_tokens", 0) or 0)]
        return tuple(names)


def vision_tower(model: nn.Module) -> VisionTower:
    """The part of a model of transformers that reads an image."""
    config = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return VisionTower("", model, config)
    for name, module in model.named_modules():
        if name and type(getattr(module, "config", None)) is type(vision):
            return VisionTower(name, module, vision)
    return VisionTower("", model, vision)


def patch_grid(model: nn.Module, inputs: Mapping[str, Any], *, tower: bool = False, item: int = 0) -> ImageGrid:
    """Where the patches lie in the sequence that a model of transformers reads.

    Args:
        model: a vision transformer, or a vision-language model whose text has a token for each patch.
        inputs: what it is run on: "pixel_values"; of a vision-language model "input_ids" (B, N) too, and
            "image_grid_thw" where the processor gives it.
        tower: of a vision-language model, the sequence of its image encoder instead of its text.
        item: which text of the batch.

    Which tokens of a text are image is said by the configuration's `image_token_id`, the grid by `image_grid_thw`, or
    by the size of `pixel_values` and the configuration's `patch_size`; both with `spatial_merge_size`.

    >>> from types import SimpleNamespace
    >>> model = torch.nn.Module()
    >>> model.config = SimpleNamespace(patch_size=16, num_register_tokens=2)
    >>> model.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 8))
    >>> patch_grid(model, {"pixel_values": torch.zeros(1, 3, 32, 48)})
    ImageGrid(rows=2, cols=3, first=3, block=1, names=('[CLS]', '[REG0]', '[REG1]'), order=())
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    vision, config = vision_tower(model), getattr(model, "config", None)
    if getattr(vision.config, "mask_ratio", None) is not None:
        received = f"{type(vision.module).__name__}, which leaves some out and shuffles the others (mask_ratio)"
        raise bad_value("model", expected="one that reads all patches in order", received=received)
    rows, cols = _patches(vision, inputs)
    merge = _merge(config, vision.config)
    image_id = getattr(config, "image_token_id", None)
    image_id = getattr(config, "image_token_index", None) if image_id is None else image_id
    if tower or image_id is None:
        names = vision.special_tokens()
        block = merge if "image_grid_thw" in inputs else 1
        return ImageGrid(rows, cols, len(names), block, names, vision.order(rows // block, cols // block))
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        received = "none" if ids is None else type(ids).__name__
        raise bad_type("input_ids", expected="token ids (B, N), which say where the image is", received=received)
    first, count = _image_span(ids[item], image_id)
    rows, cols = rows // merge, cols // merge
    strategy = getattr(config, "vision_feature_select_strategy", "default")
    names = vision.special_tokens() if strategy == "full" else ()
    if count != rows * cols + len(names):
        expected = f"{rows} x {cols} image tokens, by the configuration"
        raise bad_value("image", expected=expected, received=f"{count} in the text", remedy=REMEDY)
    return ImageGrid(rows, cols, first + len(names), names=names)


def _merge(*configs: Any) -> int:
    """How many patches, along each side, become one token of a text."""
    sizes = (getattr(config, "spatial_merge_size", None) for config in configs)
    return next((size for size in sizes if isinstance(size, int)), 1)


def _patches(vision: VisionTower, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of patches that an image encoder cuts an image into."""
    sizes = inputs.get("image_grid_thw")
    if isinstance(sizes, Tensor):
        if sizes.shape != (1, 3) or int(sizes[0, 0]) != 1:
            raise bad_value("image_grid_thw", expected="one image, [[1, rows, cols]]", received=f"{sizes.tolist()}")
        return int(sizes[0, 1]), int(sizes[0, 2])
    patch = _pair(getattr(vision.config, "patch_size", None))
    if patch is None:
        received = type(vision.module).__name__
        raise bad_value("model", expected="patch_size in its configuration", received=received, remedy=REMEDY)
    pixels = inputs.get("pixel_values")
    if pixels is None:
        size = _pair(getattr(vision.config, "image_size", None))
    elif isinstance(pixels, Tensor) and pixels.dim() == 4:
        size = (pixels.shape[2], pixels.shape[3])
    else:
        received = f"shape {shape_of(pixels)}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise bad_value("pixel_values", expected="one image, (B, 3, height, width)", received=received, remedy=REMEDY)
    if size is None:
        raise bad_value("inputs", expected="pixel_values", received=", ".join(inputs) or "none")
    if size[0] < patch[0] or size[1] < patch[1]:
        raise bad_value("image", expected=f"at least one patch of {patch[0]} x {patch[1]}", received=f"{size} pixels")
    return size[0] // patch[0], size[1] // patch[1]


def _pair(size: Any) -> tuple[int, int] | None:
    """A size as (height, width)."""
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def _image_span(ids: Tensor, image_id: int) -> tuple[int, int]:
    """The first position of the image tokens of one text, (N,), and how many there are."""
    positions = (ids == image_id).nonzero().flatten().tolist()
    if not positions:
        raise bad_value("text", expected=f"image tokens (id {image_id})", received="none")
    first, count = positions[0], len(positions)
    if positions[-1] - first + 1 != count:
        received = f"{count} from {first} to {positions[-1]}"
        raise bad_value(
            "text", expected="the image tokens of one image, side by side", received=received, remedy=REMEDY
        )
    return first, count
