"""Checks of values from files: each kind of value is accepted, or refused with its name."""

from __future__ import annotations

import math

import pytest

from regard.models.fields import ROWS, flag, integer, number, several, word

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [1, 7, ROWS])
def test_an_integer(value):
    assert integer("it", value) == value


@pytest.mark.parametrize("value", [True, 3.0, "3", None, [3], {}])
def test_what_is_no_integer(value):
    with pytest.raises(TypeError, match=r"^it: expected a positive integer, received "):
        integer("it", value)


@pytest.mark.parametrize("value", [0, -1, ROWS + 1, 10**400])
def test_an_integer_out_of_bounds(value):
    with pytest.raises(ValueError, match=rf"^it: expected a positive integer, at most {ROWS}, received .{{1,40}}$"):
        integer("it", value)


def test_an_integer_with_bounds_of_its_own():
    assert integer("it", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"^it: expected an integer from 0 on, at most 5, received 6$"):
        integer("it", 6, least=0, most=5)
    with pytest.raises(ValueError, match=r"^it: expected an integer from -1 on, at most 5, received -2$"):
        integer("it", -2, least=-1, most=5)


@pytest.mark.parametrize("value", [1e-6, 0.5, 3, 1e30])
def test_a_number(value):
    assert number("it", value, above=0.0) == value
    assert type(number("it", value)) is float


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0, -1e-9, 2e30, 10**400, -(10**400)])
def test_a_number_out_of_bounds(value):
    with pytest.raises(ValueError, match=r"^it: expected a finite number above 0, at most 1e\+30, received "):
        number("it", value, above=0.0)


@pytest.mark.parametrize("value", [True, "1e-6", None, [1.0]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^it: expected a finite number from 2 on, received "):
        number("it", value, least=2.0)


def test_flags_and_words():
    assert flag("it", False) is False
    assert word("it", "so") == "so"
    for value in (0, 1, "true", None):
        with pytest.raises(TypeError, match=r"^it: expected true or false, received "):
            flag("it", value)
    for value in (0, None, ["so"]):
        with pytest.raises(TypeError, match=r"^it: expected a string, received "):
            word("it", value)


def test_lists():
    assert several("it", [1, 2], integer) == (1, 2)
    with pytest.raises(ValueError, match=r"^it\[1\]: expected a positive integer, at most \d+, received 0$"):
        several("it", [1, 0], integer)
    with pytest.raises(TypeError, match=r"^it: expected a list, received 'ab'$"):
        several("it", "ab", word)
    with pytest.raises(ValueError, match=r"^it: expected a list of 2, received one of 3$"):
        several("it", [1, 2, 3], integer, count=2)
