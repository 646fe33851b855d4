"""Every error reads alike: what, expected, received, remedy."""

from __future__ import annotations

import pytest
import torch

from regard.errors import bad_type, bad_value, missing_extra, printable, shape_of


@pytest.mark.parametrize("build, kind", [(bad_value, ValueError), (bad_type, TypeError)])
def test_the_sentence(build: type, kind: type[Exception]) -> None:
    error = build("width", expected="an even number", received=7)
    assert type(error) is kind
    assert str(error) == "width: expected an even number, received 7"
    error = build("width", expected="an even number", received=7, remedy="pass 8")
    assert str(error) == "width: expected an even number, received 7; remedy: pass 8"


def test_a_missing_package_names_what_brings_it() -> None:
    error = missing_extra("matplotlib", "draw")
    assert type(error) is ImportError
    assert str(error) == "matplotlib is not installed; it comes with: pip install 'regard[draw]'"


def test_shapes_are_plain_tuples() -> None:
    assert shape_of(torch.zeros(2, 3, 5)) == "(2, 3, 5)"
    assert shape_of(torch.zeros(7)) == "(7,)"
    assert shape_of(torch.zeros(())) == "()"


COMMANDS = [*map(chr, (*range(32), *range(127, 160))), *"\u202a\u202e\u2066\u2069\u200e\u061c\u2028\ufeff"]


@pytest.mark.parametrize("c", [*COMMANDS, "\ud800", "\U000e0041"])
def test_what_commands_a_terminal_is_printed_as_an_escape(c: str) -> None:
    shown = printable(f"a{c}b")
    assert shown.isprintable()
    assert c not in shown
    assert shown.encode().decode("unicode_escape").encode("utf-16", "surrogatepass") == f"a{c}b".encode(
        "utf-16", "surrogatepass"
    )
    assert (printable(f"a{c}b", lines=True) == f"a{c}b") == (c in "\n\t")
    assert c not in str(bad_value(f"a{c}b", expected="others", received=f"{c}", remedy=c)) or c in "\n\t"


@pytest.mark.parametrize(
    "text", ["cat", "naïve 猫 قطة שלום", "👩\u200d🚀 می\u200cخواهم", "e\u0301", "a\u00a0b", "\\u001b", ""]
)
def test_texts_are_printed_as_they_are(text: str) -> None:
    assert printable(text) == text
