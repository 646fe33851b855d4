"""For the site's reference: examples in docstrings (`>>> ...`) become blocks of code. Markdown would quote them."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to an empty line, as doctest has it


class Examples(griffe.Extension):
    """Fences the examples of each docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe once for each object that it has read."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
