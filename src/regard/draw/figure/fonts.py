"""Text in figures: how wide it is, and a font for each of its characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

__all__ = ["Fonts"]

# Fonts for other scripts, tried in this order for a character that the user's fonts do not have. (matplotlib falls back
# to them too, but only if they are named, and warns of a name that is not installed.)
FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo"),
    *("Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Hebrew"),
    *("Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Symbols2", "Noto Sans Math", "Noto Emoji"),
    *("Segoe UI Symbol", "Segoe UI Emoji", "Symbola", "Unifont", "STIXGeneral"),
)


class Fonts:
    """The user's fonts, fallbacks for characters that they do not have, and □ for what no font has."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties

        names = dict.fromkeys([*FontProperties().get_family(), "DejaVu Sans"])  # (the last comes with matplotlib)
        self.usual = [name for name in names if _font_file(name)]
        self.families = list(self.usual)  # fallbacks are appended when a text needs them
        self._known: dict[tuple[str, bool], bool] = {}

    def style(self, size: float, bold: bool = False) -> dict[str, Any]:
        """Arguments for a text of matplotlib: no formulas ($ is a dollar sign), no LaTeX."""
        return {"fontproperties": self._font(size, bold), "parse_math": False, "usetex": False}

    def _font(self, size: float, bold: bool) -> FontProperties:
        from matplotlib.font_manager import FontProperties

        look = {"family": self.usual, "weight": "bold"} if bold else {"family": self.families, "weight": "normal"}
        return FontProperties(style="normal", variant="normal", stretch="normal", size=size, **look)

    def width(self, text: str, size: float, bold: bool = False) -> float:
        """The width of a line in inches, 5% more than it takes: hinting makes letters wider."""
        from matplotlib.textpath import text_to_path

        text, font = self.clean(text, bold), self._font(size, bold)
        return 1.05 * text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72

    def widest(self, texts: Sequence[str], size: float) -> float:
        """The width of the longest of some lines, in inches."""
        return max((self.width(text, size) for text in texts), default=0.0)

    def short(self, text: str, most: int) -> str:
        """A text cut to so many columns, with an ellipsis; wide characters take two."""
        text, columns = self.clean(text[: 4 * most]) + ("…" if len(text) > 4 * most else ""), 0
        for i, character in enumerate(text):
            columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if columns > most:
                return text[: max(i - 1, 0)] + "…"
        return text

    def clean(self, text: str, bold: bool = False) -> str:
        """A text with □ for characters that no font has."""
        return "".join(self._drawable(character, bold) for character in text)

    def _drawable(self, character: str, bold: bool) -> str:
        if "\ufe00" <= character <= "\ufe0f":  # variation selectors
            return ""
        if character in "\u200c\u200d":  # joiners: nothing to draw
            return character if self._has(character, bold, fallback=False) else ""
        if not character.isprintable():
            return " "
        return character if self._has(character, bold, fallback=not bold) else "□"

    def _has(self, character: str, bold: bool, fallback: bool) -> bool:
        """Whether a font has this character; a fallback that has it joins the families."""
        if (character, bold) not in self._known:
            families = self.usual if bold else self.families
            known = any(ord(character) in _characters(_font_file(name, bold)) for name in families)
            others = [name for name in FALLBACKS if name not in families] if fallback and not known else []
            other = next((name for name in others if ord(character) in _characters(_font_file(name))), None)
            if other:
                self.families.append(other)
            self._known[character, bold] = known or other is not None
        return self._known[character, bold]


def _font_file(name: str, bold: bool = False) -> Any:
    """The file of a font, or None if it is not installed."""
    from matplotlib.font_manager import FontProperties, fontManager

    if name in FALLBACKS and name not in fontManager.get_font_names():
        return None  # (`findfont` would log that it is not there)
    try:
        wanted = FontProperties(family=[name], weight="bold" if bold else "normal")
        return fontManager.findfont(wanted, fallback_to_default=False)
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _characters(file: Any) -> frozenset[int]:
    """The code points that a font has; none for bitmap fonts, such as coloured emoji."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(file).get_charmap()) if file else frozenset()
    except (OSError, RuntimeError):
        return frozenset()
