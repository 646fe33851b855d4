"""What a stream can show: how wide it is, which colours and characters it has, how many columns a text takes.

Tokens are others' text. Whatever is printed of one goes through `Screen.fit`, which lets no control character pass and
gives exactly as many columns as were asked for.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value

__all__ = ["EDGES", "Screen", "columns"]

Depth = Literal["plain", "256", "true"]

LEAST, PIPE, USUAL = 20, 100, 80  # columns: the fewest that are drawn for, of a pipe, of a terminal that does not tell
EDGES = (0.05, 0.15, 0.35, 0.65)  # the weights at which the next shade begins: about even in their square roots
BLOCKS, ASCII = " ░▒▓█", " .:*#"
UNSEEN, UNKNOWN = -1, -2  # instead of a shade: a weight of exactly 0, as of keys that are hidden; no number

# From indigo over magenta to yellow, as sRGB. Lightness (OKLab's) rises evenly from 0.27 to 0.90, so that the darkest
# can be told from black and the lightest from white.
ANCHORS = (0x1A1E56, 0x3D237E, 0x6821A0, 0x9E2998, 0xCF3582, 0xF15661, 0xFF8549, 0xFFB257, 0xFFDB69)
CUBE = (17, 18, 54, 91, 126, 162, 168, 203, 209, 215, 221)  # the same way through the 256 colours
LEVELS = 8 * (len(ANCHORS) - 1) + 1
DARK, LIGHT = "38;5;16", "38;5;231"  # what is written on a light colour, and on a dark one

_PLAIN = {"…": "~", "⏎": "\\n", "␍": "\\r", "⇥": "\\t", "␀": "\\0", "␣": "_", "◌": ""}  # where an encoding lacks them
_MARKS = 4  # on one letter, at most


@dataclass(frozen=True)
class Screen:
    """What is drawn on. `terminal` says that somebody looks at it, and not a program."""

    width: int = PIPE
    depth: Depth = "plain"
    encoding: str = "utf-8"
    terminal: bool = False

    @classmethod
    def of(cls, file: Any, width: int | None = None, colour: bool | None = None) -> Screen:
        """As a stream and the environment say, but for what the caller says."""
        terminal = _is_terminal(file)
        encoding = getattr(file, "encoding", None) or "utf-8"  # (a stream of text, in memory, has none)
        if os.environ.get("LC_ALL") in ("C", "POSIX"):
            encoding = "ascii"
        return cls(
            _width(file, terminal) if width is None else asked(width), depth(colour, terminal), encoding, terminal
        )

    @property
    def colours(self) -> bool:
        return self.depth != "plain"

    @cached_property
    def shades(self) -> str:
        """From none to all, one more than there are `EDGES`."""
        return BLOCKS if self.carries(BLOCKS) else ASCII

    @cached_property
    def halves(self) -> bool:
        """Whether one line can show two rows of a map: by colours, and the half blocks."""
        return self.colours and self.carries("▀▄")

    def carries(self, text: str) -> bool:
        """Whether the encoding has these characters."""
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
        """A text in exactly so many columns: cut with an ellipsis, or filled with spaces."""
        parts = self.letters(text)
        if sum(map(columns, parts)) > width:
            parts = _cut(parts, width, self._carried("…")[0])
        blank = " " * (width - sum(map(columns, parts)))
        shown = self._isolated("".join(parts))
        return blank + shown if right else shown + blank

    def down(self, text: str, height: int, width: int) -> list[str]:
        """A text from top to bottom: so many lines, at the bottom of which it ends, of so many columns."""
        parts = self.letters(text)
        if len(parts) > height:
            parts = [*parts[: max(height - 1, 0)], *self._carried("…")][:height]
        lines = [" " * width] * (height - len(parts))
        return lines + [self.fit(part, width) for part in parts]

    def columns(self, text: str) -> int:
        """How many columns a text takes here."""
        return sum(map(columns, self.letters(text)))

    def letters(self, text: str) -> list[str]:
        """A text letter by letter, each with its marks, as it is shown here."""
        return [part for cluster in clusters(text) for part in self._carried(cluster)]

    def _carried(self, cluster: str) -> list[str]:
        """A letter with its marks; or what stands for it, a column each, where the encoding lacks it."""
        if self.carries(cluster):
            return [cluster]
        if self.carries(cluster[0]):  # the letter without its marks
            return [cluster[0]]
        return list(_PLAIN.get(cluster[0], "?" * columns(cluster)))

    def _isolated(self, text: str) -> str:
        """What is written from right to left, kept from moving what stands beside it."""
        leftwards = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
        return (
            f"\u2066{text}\u2069" if leftwards and (self.terminal or self.colours) and self.carries("\u2066") else text
        )

    # Weights

    def levels(self, weights: Tensor) -> Any:
        """The shade of each weight, as nested lists."""
        known = weights.nan_to_num(0.0).clamp(0, 1)
        if self.colours:
            found = (known.sqrt() * ((len(CUBE) if self.depth == "256" else LEVELS) - 1)).round().long()
        else:
            found = torch.bucketize(known, torch.tensor(EDGES, dtype=known.dtype), right=True)
        found[known == 0] = UNSEEN
        found[weights.isnan()] = UNKNOWN
        return found.tolist()

    def cells(self, levels: list[int], wide: int, texts: list[str] | None = None) -> str:
        """A row of a map, each cell so many columns wide; with colours a cell may hold a text."""
        shown = [" " * wide] * len(levels) if texts is None else texts
        if not self.colours:
            return "".join(self._shade(level) * wide for level in levels)
        return painted(
            ("", "?" * wide) if level == UNKNOWN else (self._back(level) + self._on(level, text), text)
            for level, text in zip(levels, shown, strict=True)
        )

    def two_rows(self, upper: list[int], lower: list[int]) -> str:
        """Two rows of a map in one line, a column for each cell."""
        return painted(map(self._two, upper, lower))

    def _two(self, above: int, below: int) -> tuple[str, str]:
        if UNKNOWN in (above, below):
            return "", "?"
        if above == below:
            return self._back(above), " "
        if above == UNSEEN:
            return "38;" + self._colour(below), "▄"
        return f"38;{self._colour(above)}" + (f";{self._back(below)}" if below != UNSEEN else ""), "▀"

    def _shade(self, level: int) -> str:
        return "?" if level == UNKNOWN else self.shades[max(level, 0)]

    def _back(self, level: int) -> str:
        return "" if level == UNSEEN else "48;" + self._colour(level)

    def _on(self, level: int, text: str) -> str:
        """In which colour something is written on a colour."""
        if not text.strip() or level == UNSEEN:
            return ""
        light = level > 0.55 * ((len(CUBE) if self.depth == "256" else LEVELS) - 1)
        return ";" + (DARK if light else LIGHT)

    def _colour(self, level: int) -> str:
        if self.depth == "256":
            return f"5;{CUBE[level]}"
        return "2;" + ";".join(map(str, rgb(level)))


def rgb(level: int) -> tuple[int, int, int]:
    """A colour, of 0 to LEVELS - 1: between two anchors."""
    first, part = divmod(level, 8)
    a, b = ANCHORS[first], ANCHORS[min(first + 1, len(ANCHORS) - 1)]
    red, green, blue = (round((a >> s & 255) * (8 - part) / 8 + (b >> s & 255) * part / 8) for s in (16, 8, 0))
    return red, green, blue


def painted(parts: Iterable[tuple[str, str]]) -> str:
    """Texts, each with the codes of its colours; neighbours that share them are painted at once."""
    found = ""
    for codes, run in groupby(parts, lambda part: part[0]):
        text = "".join(text for _, text in run)
        found += f"\x1b[{codes}m{text}\x1b[0m" if codes else text
    return found


# What the stream and the environment say


def asked(width: object) -> int:
    """A width that the caller asks for."""
    if isinstance(width, bool) or not isinstance(width, int):
        raise bad_type("width", expected="a number of columns", received=repr(width))
    if width < LEAST:
        raise bad_value("width", expected=f"at least {LEAST} columns", received=width)
    return width


def depth(colour: object, terminal: bool) -> Depth:
    """Which colours: by default those that a terminal has, if nobody objects; in a pipe none, if nobody insists."""
    if colour not in (None, True, False):
        raise bad_type("colour", expected="True, False or None", received=repr(colour))
    said = os.environ.get
    if colour is None:
        forced = any(said(name, "") not in ("", "0", "false") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
        colour = not said("NO_COLOR") and (forced or (terminal and said("TERM") != "dumb"))
    if not colour:
        return "plain"
    return "true" if said("COLORTERM", "").lower() in ("truecolor", "24bit") else "256"


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # what has no such thing, or is closed
        return False


def _width(file: Any, terminal: bool) -> int:
    try:
        said = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        said = 0
    if said <= 0 and terminal:
        try:
            said = os.get_terminal_size(file.fileno()).columns
        except (AttributeError, ValueError, OSError):
            said = 0
        said = said or USUAL
    return max(LEAST, said if said > 0 else PIPE)


# How many columns a text takes


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: none for marks on a letter, two for wide letters.

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
    """A vowel or a last consonant, that joins the syllable before it."""
    return "\u1160" <= c <= "\u11ff" or "\ud7b0" <= c <= "\ud7ff"


def clusters(text: str) -> Iterator[str]:
    """A text letter by letter, each with its marks, in characters whose width all terminals agree on."""
    found = ""
    for c in _agreed(text):
        if _columns(c):
            if found:
                yield found
            found = c
        elif len(found) <= _MARKS:
            found = (found or "◌") + c
    if found:
        yield found


def _agreed(text: str) -> Iterator[str]:
    """Without what some terminals draw as one and others as several: joined emoji, their looks and tones, flags. And
    without what is no text but a command to the terminal."""
    before = ""
    for c in unicodedata.normalize("NFC", text):
        if c in "\u200c\u200d" or "\ufe00" <= c <= "\ufe0f":  # (non-)joiners, variation selectors
            continue
        if "\U0001f3fb" <= c <= "\U0001f3ff" and before and _columns(before) == 2:  # a tone of skin
            continue
        if "\U0001f1e6" <= c <= "\U0001f1ff":  # a letter of a flag
            c = chr(ord(c) - 0x1F1E6 + ord("A"))
        before = c
        yield from c if c.isprintable() else f"\\u{ord(c):04x}"


def _cut(parts: list[str], width: int, ellipsis: str) -> list[str]:
    """As many as fit, with an ellipsis."""
    kept, left = [], width - columns(ellipsis)
    for part in parts:
        left -= columns(part)
        if left < 0:
            break
        kept.append(part)
    return [*kept, ellipsis] if width else []
