"""The picture that a model was shown, as a page carries it: a small JPEG within the description."""

from __future__ import annotations

import base64
import io
from typing import Any

from regard.draw.scene import Panel, Scene

__all__ = ["grid_content", "image_content"]

SIDES = (384, 256, 160, 96)  # pixels of the longer side, at most: the first that is small enough
MOST = 75_000  # bytes, which are 100,000 in base64


def image_content(scene: Scene) -> dict[str, Any]:
    """`{"image": {...}}` with its address and size; nothing without a picture, or without Pillow."""
    picture = scene.record.image
    if picture is None or not picture.grids:
        return {}
    try:
        from PIL import Image
    except ImportError:
        return {}
    high, wide, _ = picture.pixels.shape
    image, data = Image.frombytes("RGB", (wide, high), picture.pixels.contiguous().numpy().tobytes()), b""
    for side in SIDES:
        small = image.copy()
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
        data = file.getvalue()
        if len(data) <= MOST:
            break
    # (as it was: a picture made small may be a pixel off in its shape)
    source = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return {"image": {"source": source, "width": wide, "height": high}}


def grid_content(panel: Panel, scene: Scene) -> dict[str, Any]:
    """`{"grid": {...}}`: where the patches of the picture are among the keys of a layer."""
    picture = scene.record.image
    grid = None if picture is None else picture.grids.get(panel.name)
    if grid is None or panel.shape != panel.layer.shape[2:]:
        return {}
    return {"grid": {"rows": grid.rows, "cols": grid.cols, "first": grid.first, "block": grid.block}}
