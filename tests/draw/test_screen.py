"""What a stream can show: colours, widths, encodings, and the width of text."""

from __future__ import annotations

import io
import os
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from draw.drawings import WORDS, Tty, noise, record, shown, wide
from rich.cells import cell_len

from regard.draw.terminal.screen import ANCHORS, CUBE, LEVELS, UNKNOWN, UNSEEN, Screen, columns, rgb
from regard.draw.terminal.views import terminal, terminal_text

# Colours


def _lightness(red: int, green: int, blue: int) -> float:
    """CIE L*, by which OKLab is not made."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 216 / 24389 else luminance * 24389 / 27


def test_lightness_rises_evenly() -> None:
    found = [_lightness(*rgb(level)) for level in range(LEVELS)]
    steps = [b - a for a, b in pairwise(found)]
    even = (found[-1] - found[0]) / len(steps)
    assert all(0.6 * even < step < 1.4 * even for step in steps)
    assert found[0] > 10
    assert found[-1] < 92
    assert rgb(0) == (0x1A, 0x1E, 0x56)
    assert rgb(LEVELS - 1) == tuple(ANCHORS[-1] >> s & 255 for s in (16, 8, 0))


def test_lightness_of_256_colours_rises() -> None:
    cube = [0, 95, 135, 175, 215, 255]
    found = [_lightness(*(cube[(n - 16) // step % 6] for step in (36, 6, 1))) for n in CUBE]
    assert all(b - a > 2 for a, b in pairwise(found))


def test_no_number_and_no_weight() -> None:
    weights = torch.tensor([0.0, float("nan"), 1.0])
    assert Screen().levels(weights) == [UNSEEN, UNKNOWN, 4]
    assert Screen().cells([UNSEEN, UNKNOWN, 4], 2) == "  ??██"
    screen = Screen(depth="256")
    assert screen.cells(screen.levels(weights), 2) == "  ??\x1b[48;5;221m  \x1b[0m"
    assert screen.two_rows([UNSEEN, UNKNOWN, 10, 10], [10, 3, UNSEEN, 10]) == (
        "\x1b[38;5;221m▄\x1b[0m?\x1b[38;5;221m▀\x1b[0m\x1b[48;5;221m \x1b[0m"
    )


# Streams


def printed(file: Any, **options: Any) -> str:
    terminal(record(noise(1, 2, 5, 5)), WORDS, file=file, **options)
    return file.getvalue()


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = printed(io.StringIO())
    assert "\x1b" not in drawn
    assert "▓" in drawn
    terminal(record(noise(1, 2, 5, 5)), WORDS)
    assert capsys.readouterr().out == drawn == terminal_text(record(noise(1, 2, 5, 5)), WORDS) + "\n"


@pytest.mark.parametrize(
    "environment, terminal, depth",
    [
        ({}, True, "256"),
        ({}, False, "plain"),
        ({"COLORTERM": "truecolor"}, True, "true"),
        ({"COLORTERM": "24bit"}, True, "true"),
        ({"COLORTERM": "truecolor"}, False, "plain"),
        ({"TERM": "dumb"}, True, "plain"),
        ({"NO_COLOR": "1"}, True, "plain"),
        ({"NO_COLOR": ""}, True, "256"),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, "plain"),
        ({"FORCE_COLOR": "1"}, False, "256"),
        ({"FORCE_COLOR": "0"}, False, "plain"),
        ({"CLICOLOR_FORCE": "1", "COLORTERM": "truecolor"}, False, "true"),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, "256"),
    ],
)
def test_colours_as_the_environment_says(
    environment: dict[str, str], terminal: bool, depth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = Tty() if terminal else io.StringIO()
    assert Screen.of(file).depth == depth
    assert ("\x1b[" in printed(file)) == (depth != "plain")
    assert Screen.of(file, colour=False).depth == "plain"
    assert Screen.of(file, colour=True).depth in ("256", "true")


def test_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Screen.of(io.StringIO()).width == 100
    assert Screen.of(Tty()).width == 80  # one that does not tell
    for said, width in (("57", 57), ("7", 20), ("0", 100), ("many", 100), ("", 100)):
        monkeypatch.setenv("COLUMNS", said)
        assert Screen.of(io.StringIO()).width == width
    assert Screen.of(io.StringIO(), 43).width == 43


@pytest.mark.skipif(os.name != "posix", reason="a terminal is made with os.openpty")
def test_the_width_of_a_terminal() -> None:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 61, 0, 0))
        with open(theirs, "w", closefd=False, encoding="utf-8") as file:
            assert Screen.of(file) == Screen(61, "256", "utf-8", True)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    "encoding, shades, labels",
    [
        ("utf-8", "░▒▓█", ["猫", "né", "⏎"]),
        ("cp437", "░▒▓█", ["??", "né", "\\n"]),
        ("latin-1", ".:*#", ["??", "né", "\\n"]),
        ("ascii", ".:*#", ["??", "n?", "\\n"]),
    ],
)
@pytest.mark.parametrize("colour", [True, False])
def test_what_an_encoding_lacks(encoding: str, shades: str, labels: list[str], colour: bool) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    weights = torch.tensor([[0.06, 0.2, 0.74], [0.06, 0.4, 0.54], [0.2, 0.4, 0.4]])[None, None]
    terminal(record(weights), ["猫", "né", "\n"], file=file, width=50, colour=colour)
    file.flush()
    drawn = raw.getvalue().decode(encoding)
    for label in labels:
        assert re.search(rf"^ *{re.escape(label)}  ", shown(drawn), re.M)
    assert colour or {*shades} <= {*drawn}
    assert "▀" not in drawn or encoding in ("utf-8", "cp437")


def test_lc_all_c_asks_for_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert printed(io.StringIO()).isascii()
    assert printed(Tty(), colour=True).isascii()


# Texts


@pytest.mark.parametrize(
    "text, taken",
    [
        ("cat", 3),
        ("猫", 2),
        ("e\u0301", 1),
        ("한", 2),
        ("\u1112\u1161\u11ab", 2),
        ("\u0301", 1),
        ("👨‍👩‍👧", 6),
        ("❤️", 1),
        ("👍🏽", 2),
        ("🇩🇪", 2),
        ("שלום", 4),
        ("\x1b[2J", 9),
        ("", 0),
    ],
)
def test_columns_of_a_text(text: str, taken: int) -> None:
    for screen in (Screen(), Screen(encoding="ascii")):
        fitted = screen.fit(text, 11)
        assert wide(fitted) == cell_len(fitted) == columns(fitted) == 11
        assert not fitted.rstrip() or fitted.isprintable()
    assert Screen().columns(text) == taken
    assert Screen().fit(text, taken).strip("\u2066\u2069") == "".join(Screen().letters(text))


def test_cut_with_an_ellipsis() -> None:
    screen = Screen()
    assert screen.fit("yesterday", 5) == "yest…"
    assert screen.fit("猫猫猫", 5) == "猫猫…"
    assert screen.fit("猫猫猫", 4) == "猫… "
    assert screen.fit("猫猫猫", 4, right=True) == " 猫…"
    assert screen.fit("yesterday", 0) == ""
    assert Screen(encoding="ascii").fit("yesterday", 5) == "yest~"
    assert screen.down("cat", 5, 2) == ["  ", "  ", "c ", "a ", "t "]
    assert screen.down("yesterday", 3, 1) == ["y", "e", "…"]
    assert len(screen.fit("a" + "\u0301" * 10_000, 3)) < 11


def test_right_to_left_is_kept_apart_on_terminals_alone() -> None:
    assert Screen(terminal=True).fit("שלום", 6) == "\u2066שלום\u2069  "
    assert Screen().fit("שלום", 6) == "שלום  "
    assert Screen(terminal=True).fit("cat", 6) == "cat   "
    assert Screen(terminal=True, encoding="cp1255").fit("שלום", 6) == "שלום  "
