"""Every error reads alike: what, expected, received, remedy."""

from __future__ import annotations

import pytest
import torch

from regard.errors import bad_type, bad_value, missing_extra, shape_of


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
