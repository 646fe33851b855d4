"""What the site (mkdocs.yml) changes in pages that are written to be read in the repository, too."""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?:src|examples|benchmarks|tests|[A-Z]+\.md)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files that are not part of the site become their text. Lists may be indented by two spaces, and begin
    right below a paragraph, as most renderers of Markdown have it; Python-Markdown wants four, and an empty line."""
    parts, begin = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_prose(markdown[begin : fence.start()]), fence[0].replace("```python torchrun", "```python", 1)]
        begin = fence.end()
    return "".join([*parts, _prose(markdown[begin:])])


def _prose(text: str) -> str:
    text = OUTSIDE.sub(r"\1", text)
    text = re.sub(r"^( +)(?=\S)", r"\1\1", text, flags=re.MULTILINE)
    text = re.sub(r"(\n\n(?: {4}\S.*\n)+)(?=[-*] )", r"\1\n", text)  # a paragraph of a list, before its next item
    return re.sub(r"^(?![-*] |\s|\||#|<)(.+\n)(?=[-*] )", r"\1\n", text, flags=re.MULTILINE)
