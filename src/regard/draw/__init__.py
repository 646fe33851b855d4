"""Pictures of what heads attend to: in the terminal, as a figure, as one page that opens anywhere."""

from regard.draw.figure import figure
from regard.draw.figure.image_maps import image, image_readers
from regard.draw.image_grid import ImageGrid, patch_grid
from regard.draw.look import look, read
from regard.draw.page import notebook, page
from regard.draw.terminal import terminal, terminal_text
from regard.heads import Record

__all__ = [
    "ImageGrid",
    "figure",
    "image",
    "image_readers",
    "look",
    "page",
    "patch_grid",
    "read",
    "terminal",
    "terminal_text",
]

Record.shown_by = staticmethod(notebook)  # a record shows itself in a notebook
