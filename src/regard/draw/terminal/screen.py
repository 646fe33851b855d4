"""What a stream can show: its width, colours and encoding, and how many columns a text takes. (Without rich, which is
an extra: `draw.terminal` works with torch alone.)

Tokens are untrusted text. They are printed through `Screen.fit` alone, which removes control characters and returns
exactly as many columns as were asked for.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value

__all__ = ["EDGES", "Screen", "columns"]

Depth = Literal["plain", "256", "true"]

LEAST, PIPE, USUAL = 20, 100, 80  # columns: the minimum, the width of a pipe, of a terminal of unknown width
EDGES = (0.05, 0.15, 0.35, 0.65)  # the weights at which the next shade begins: about even steps of the square root
BLOCKS, ASCII = " ░▒▓█", " .:*#"
UNSEEN, UNKNOWN = -1, -2  # instead of a shade: a weight of exactly 0, as of masked keys; NaN

# From indigo over magenta to yellow, as sRGB. Lightness (OKLab's) rises evenly from 0.27 to 0.90, so that the darkest
# can be told from black and the lightest from white.
ANCHORS = (0x1A1E56, 0x3D237E, 0x6821A0, 0x9E2998, 0xCF3582, 0xF15661, 0xFF8549, 0xFFB257, 0xFFDB69)
CUBE = (17, 18, 54, 91, 126, 162, 168, 203, 209, 215, 221)  # the same in the 256-colour palette
LEVELS = 8 * (len(ANCHORS) - 1) + 1
DARK, LIGHT = "38;5;16", "38;5;231"  # text colours, on a light background and on a dark one

_PLAIN = {"…": "~", "⏎": "\\n", "␍": "\\r", "⇥": "\\t", "␀": "\\0", "␣": "_", "◌": ""}  # for encodings without them
_MARKS = 4  # combining marks on one letter, at most


@dataclass(frozen=True)
class Screen:
    """What is drawn on. `terminal`: a person looks at it, it is no pipe."""

    width: int = PIPE
    depth: Depth = "plain"
    encoding: str = "utf-8"
    terminal: bool = False

    @classmethod
    def of(cls, file: Any, width: int | None = None, colour: bool | None = None) -> Screen:
        """From a stream and the environment; `width` and `colour` override them."""
        terminal = _is_terminal(file)
        encoding = getattr(file, "encoding", None) or "utf-8"  # (io.StringIO has none)
        if os.environ.get("LC_ALL") in ("C", "POSIX"):
            encoding = "ascii"
        columns = _stream_width(file, terminal) if width is None else checked_width(width)
        return cls(columns, colour_depth(colour, terminal), encoding, terminal)

    @property
    def colours(self) -> bool:
        return self.depth != "plain"

    @cached_property
    def shades(self) -> str:
        """Characters for weights from 0 to 1, one more than there are `EDGES`."""
        return BLOCKS if self.carries(BLOCKS) else ASCII

    @cached_property
    def halves(self) -> bool:
        """Whether one line can show two rows of a map: it takes colours and half blocks."""
        return self.colours and self.carries("▀▄")

    def carries(self, text: str) -> bool:
        """Whether the encoding can express a text."""
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    # Texts

    def bold(self, text: str) -> str:
        return self._styled("1", text)

    def dim(self, text: str) -> str:
        return self._styled("2", text)

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours and text.strip() else text

    def fit(self, text: str, width: int, *, right: bool = False) -> str:
        """A text in exactly `width` columns: cut with an ellipsis, or padded with spaces."""
        parts = self.letters(text)
        if sum(map(columns, parts)) > width:
            parts = _cut(parts, width, self._carried("…")[0])
        blank = " " * (width - sum(map(columns, parts)))
        shown = self._isolated("".join(parts))
        return blank + shown if right else shown + blank

    def down(self, text: str, height: int, width: int) -> list[str]:
        """A text written from top to bottom, as `height` lines of `width` columns, aligned at the bottom."""
        parts = self.letters(text)
        if len(parts) > height:
            parts = [*parts[: max(height - 1, 0)], *self._carried("…")][:height]
        lines = [" " * width] * (height - len(parts))
        return lines + [self.fit(part, width) for part in parts]

    def columns(self, text: str) -> int:
        """The columns that a text takes on this screen."""
        return sum(map(columns, self.letters(text)))

    def letters(self, text: str) -> list[str]:
        """The letters of a text, each with its combining marks, as this screen shows them."""
        return [part for cluster in clusters(text) for part in self._carried(cluster)]

    def _carried(self, cluster: str) -> list[str]:
        """A letter with its marks; or replacements, a column each, if the encoding lacks it."""
        if self.carries(cluster):
            return [cluster]
        if self.carries(cluster[0]):  # the letter without its marks
            return [cluster[0]]
        return list(_PLAIN.get(cluster[0], "?" * columns(cluster)))

    def _isolated(self, text: str) -> str:
        """Isolate right-to-left text, so that it does not reorder what stands beside it."""
        right_to_left = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
        isolate = right_to_left and (self.terminal or self.colours) and self.carries("\u2066")
        return f"\u2066{text}\u2069" if isolate else text

    # Weights

    def levels(self, weights: Tensor) -> Any:
        """The shade of each weight, as nested lists."""
        known = weights.nan_to_num(0.0).clamp(0, 1)
        if self.colours:
            levels = (known.sqrt() * (self._colour_count - 1)).round().long()
        else:
            levels = torch.bucketize(known, torch.tensor(EDGES, dtype=known.dtype, device=known.device), right=True)
        levels[known == 0] = UNSEEN
        levels[weights.isnan()] = UNKNOWN
        return levels.tolist()

    @property
    def _colour_count(self) -> int:
        return len(CUBE) if self.depth == "256" else LEVELS

    def cells(self, levels: list[int], wide: int, texts: list[str] | None = None) -> str:
        """A row of a map, each cell `wide` columns; with colours a cell may hold a text."""
        shown = [" " * wide] * len(levels) if texts is None else texts
        if not self.colours:
            return "".join(self._shade(level) * wide for level in levels)
        return coloured(
            ("", "?" * wide) if level == UNKNOWN else (self._background(level) + self._foreground(level, text), text)
            for level, text in zip(levels, shown, strict=True)
        )

    def two_rows(self, upper: list[int], lower: list[int]) -> str:
        """Two rows of a map in one line, a column for each cell."""
        return coloured(map(self._two_cells, upper, lower))

    def _two_cells(self, above: int, below: int) -> tuple[str, str]:
        if UNKNOWN in (above, below):
            return "", "?"
        if above == below:
            return self._background(above), " "
        if above == UNSEEN:
            return "38;" + self._colour(below), "▄"
        below_codes = f";{self._background(below)}" if below != UNSEEN else ""
        return f"38;{self._colour(above)}{below_codes}", "▀"

    def _shade(self, level: int) -> str:
        return "?" if level == UNKNOWN else self.shades[max(level, 0)]

    def _background(self, level: int) -> str:
        return "" if level == UNSEEN else "48;" + self._colour(level)

    def _foreground(self, level: int, text: str) -> str:
        """The colour of a text on the colour of a level."""
        if not text.strip() or level == UNSEEN:
            return ""
        light = level > 0.55 * (self._colour_count - 1)
        return ";" + (DARK if light else LIGHT)

    def _colour(self, level: int) -> str:
        if self.depth == "256":
            return f"5;{CUBE[level]}"
        return "2;" + ";".join(map(str, rgb(level)))


def rgb(level: int) -> tuple[int, int, int]:
    """The colour of a level from 0 to LEVELS - 1, between two anchors."""
    first, eighths = divmod(level, 8)
    a, b = ANCHORS[first], ANCHORS[min(first + 1, len(ANCHORS) - 1)]
    red, green, blue = (round((a >> s & 255) * (8 - eighths) / 8 + (b >> s & 255) * eighths / 8) for s in (16, 8, 0))
    return red, green, blue


def coloured(parts: Iterable[tuple[str, str]]) -> str:
    """(codes, text) pairs as one line with escape codes; neighbours of the same colour share them."""
    line = ""
    for codes, run in groupby(parts, lambda part: part[0]):
        text = "".join(text for _, text in run)
        line += f"\x1b[{codes}m{text}\x1b[0m" if codes else text
    return line


# The stream and the environment


def checked_width(width: object) -> int:
    """A width that the caller asked for."""
    if isinstance(width, bool) or not isinstance(width, int):
        raise bad_type("width", expected="a number of columns", received=repr(width))
    if width < LEAST:
        raise bad_value("width", expected=f"at least {LEAST} columns", received=width)
    return width


def colour_depth(colour: object, terminal: bool) -> Depth:
    """Which colours are used: by default those of a terminal, unless NO_COLOR is set; none in a pipe, unless
    FORCE_COLOR or CLICOLOR_FORCE is set."""
    if colour not in (None, True, False):
        raise bad_type("colour", expected="True, False or None", received=repr(colour))
    environment = os.environ.get
    if colour is None:
        forced = any(environment(name, "") not in ("", "0", "false") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
        colour = not environment("NO_COLOR") and (forced or (terminal and environment("TERM") != "dumb"))
    if not colour:
        return "plain"
    return "true" if environment("COLORTERM", "").lower() in ("truecolor", "24bit") else "256"


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no such method, or a closed stream
        return False


def _stream_width(file: Any, terminal: bool) -> int:
    width = 0
    with suppress(ValueError):
        width = int(os.environ.get("COLUMNS", ""))
    if width <= 0 and terminal:
        width = USUAL
        with suppress(AttributeError, ValueError, OSError):
            width = os.get_terminal_size(file.fileno()).columns or USUAL
    return max(LEAST, width if width > 0 else PIPE)


# The width of text


def columns(text: str) -> int:
    """The columns of a terminal that a text takes: 0 for combining marks, 2 for wide letters.

    >>> columns("cat"), columns("猫"), columns("e\u0301"), columns("🐈")
    (3, 2, 1, 2)
    """
    return sum(map(_columns, text))


def _columns(c: str) -> int:
    if c.isascii():
        return 1
    if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me", "Cf") or _joins_hangul(c):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def _joins_hangul(c: str) -> bool:
    """Whether it is a Hangul vowel or final consonant, which joins the syllable before it."""
    return "\u1160" <= c <= "\u11ff" or "\ud7b0" <= c <= "\ud7ff"


def clusters(text: str) -> Iterator[str]:
    """The letters of a text, each with its marks, in characters whose width all terminals agree on."""
    cluster = ""
    for c in _portable(text):
        if _columns(c):
            if cluster:
                yield cluster
            cluster = c
        elif len(cluster) <= _MARKS:
            cluster = (cluster or "◌") + c
    if cluster:
        yield cluster


def _portable(text: str) -> Iterator[str]:
    """The characters of a text without what terminals draw differently (joined emoji, variation selectors, skin tones,
    flags), and with escapes for control characters."""
    before = ""
    for c in unicodedata.normalize("NFC", text):
        if c in "\u200c\u200d" or "\ufe00" <= c <= "\ufe0f":  # joiners, variation selectors
            continue
        if "\U0001f3fb" <= c <= "\U0001f3ff" and before and _columns(before) == 2:  # a skin tone
            continue
        if "\U0001f1e6" <= c <= "\U0001f1ff":  # a letter of a flag
            c = chr(ord(c) - 0x1F1E6 + ord("A"))
        before = c
        yield from c if c.isprintable() else f"\\u{ord(c):04x}"


def _cut(parts: list[str], width: int, ellipsis: str) -> list[str]:
    """As many letters as fit, and an ellipsis."""
    kept, left = [], width - columns(ellipsis)
    for part in parts:
        left -= columns(part)
        if left < 0:
            break
        kept.append(part)
    return [*kept, ellipsis] if width else []
