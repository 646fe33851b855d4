"""Sentences about heads: what each kind does, with what it links in the text."""

from __future__ import annotations

import torch
from draw.drawings import noise, places, record

from regard.draw.scene import Scene
from regard.draw.sentences import sentences
from regard.heads.analysis.atlas import Atlas, Entry

N = 13
TOKENS = [f"w{i}" for i in range(N)]


def test_the_clearest_head_of_each_kind() -> None:
    before, after = (places(N, [min(max(i + d, 0), N - 1) for i in range(N)]) for d in (-1, 1))
    weaker = 0.5 * before + 0.5 / N
    seen = record(torch.cat([weaker, before], 1), torch.cat([after, noise(1, 1, N, N)], 1))
    scene = Scene(seen, TOKENS)
    told = sentences(scene)
    assert [(one.layer, one.head, one.role) for one in told] == [(0, 1, "previous"), (1, 0, "next")]
    assert told[0].text(scene).startswith("Head 0.1 attends to the token before (1.00 of what it does beside resting")
    for one, offset in zip(told, (-1, 1), strict=True):
        assert one.links
        assert all(key == query + offset and weight > 0.9 for query, key, weight in one.links)
        assert all(f"w{query} -> w{key}" in one.text(scene) for query, key, _ in one.links)
    assert sentences(scene, most=1) == told[:1]


def test_a_relation_of_syntax_is_known_of_the_model() -> None:
    seen = record(noise(1, 2, N, N))
    scene = Scene(seen, TOKENS)
    entry = Entry("determiner and noun", 0.8, 0.58, 0.77, 0.83, 904, "syntax", True, "det", "to head", shuffled=0.09)
    atlas = Atlas("model", seen.layers, [[[entry], []]], [[(0.5, None, "first"), (0.1, None, "")]])
    scene[0].roles = [atlas.applied(role) for role in scene[0].roles]
    (one,) = sentences(scene)
    words = "Head 0.0 takes determiners to their nouns (80% right in a treebank, best offset 58%, shuffled weights 9%)"
    assert one.text(scene).startswith(words)


def test_nothing_to_say() -> None:
    assert sentences(Scene(record(noise(1, 2, 5, 5)), TOKENS[:5])) == []
