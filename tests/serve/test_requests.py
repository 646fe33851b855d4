"""Requests that are refused before anything is computed."""

from __future__ import annotations

import re

import pytest
from serve.serving import BAD

from regard.serve.requests import Limits, RequestError, parse_index, parse_range


def test_at_most_so_many_tokens_in_a_crop():
    assert parse_range("rows", "3-7", 10, 4) == slice(3, 7)
    with pytest.raises(RequestError, match="rows: expected first-last within 0-10, at most 4 of them, received '3-8'"):
        parse_range("rows", "3-8", 10, 4)
    assert parse_index("head", "3", 4) == 3


@pytest.mark.parametrize("body, status, words", BAD)
def test_what_is_wrong_is_said_in_words(client, body, status, words):
    answer = client.ask("POST", "/api/look", body, content_type="application/json; charset=utf-8")
    assert (answer.status, bool(re.match(words, answer.json["error"]))) == (status, True), answer.json
    assert len(answer.json["error"]) < 250


def test_limits_for_longer_texts():
    longer = Limits.of_tokens(8192)
    assert (longer.tokens, longer.characters, longer.memory) == (8192, 64_000, 4 * Limits().memory)
    assert Limits.of_tokens(100) == Limits(tokens=100)
