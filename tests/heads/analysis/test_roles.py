"""Roles of heads that were planted: each is named rightly, causal or not, padded or not, also where it mostly rests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads.oracle_hands import Hand, W, by_operator, made, noise
from torch import Tensor, nn

import regard
from regard.draw.scene import Scene
from regard.heads import ROLES, Record, Role, Roles
from regard.heads.analysis import probes
from regard.heads.analysis.evidence import evidence_of
from regard.heads.analysis.roles import UNINFORMATIVE, decide
from regard.heads.analysis.token_facts import facts_of
from regard.masks import Causal, Padding

RULES = {rule.name: rule for rule in ROLES}
Look = Callable[[int, list[int]], dict[int, float]]  # query i of a text of ids -> {key: weight}; they sum to 1


def at(offset: int) -> Look:
    """All on the token at an offset; on itself where there is none."""
    return lambda i, ids: {i + offset if 0 <= i + offset < len(ids) else i: 1.0}


def copies(after: int) -> Look:
    """On the last earlier copy of the token, or on the token after it; on itself where there is none."""

    def look(i: int, ids: list[int]) -> dict[int, float]:
        earlier = [j for j in range(i) if ids[j] == ids[i]]
        return {earlier[-1] + after if earlier else i: 1.0}

    return look


def onto(*keys: int) -> Look:
    return lambda i, ids: {key % len(ids): 1 / len(keys) for key in keys}


def even(i: int, ids: list[int]) -> dict[int, float]:
    return {j: 1 / len(ids) for j in range(len(ids))}


def within(reach: int) -> Look:
    def look(i: int, ids: list[int]) -> dict[int, float]:
        keys = [j for j in range(i - reach, i + reach + 1) if 0 <= j < len(ids)]
        return {j: 1 / len(keys) for j in keys}

    return look


def mixed(*parts: tuple[float, Look]) -> Look:
    def look(i: int, ids: list[int]) -> dict[int, float]:
        total: dict[int, float] = {}
        for share, of in parts:
            for key, weight in of(i, ids).items():
                total[key] = total.get(key, 0.0) + share * weight
        return total

    return look


class Planted(nn.Module):
    """A model of token ids whose heads attend as they are told: by regard's function, torch's, or by hand. 0 is
    padding. A weight of 0 is e^-60. If it is causal, what would be later is left out; if nothing is left, the query
    attends to itself."""

    def __init__(self, *heads: Look, causal: bool = False, way: str = "regard") -> None:
        super().__init__()
        self.looks, self.causal, self.way = heads, causal, way

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, n = input_ids.shape
        weights = torch.zeros(batch, len(self.looks), n, n, dtype=torch.float64)
        for b, row in enumerate(input_ids.tolist()):
            tokens = [i for i, number in enumerate(row) if number]
            ids = [row[i] for i in tokens]
            for h, look in enumerate(self.looks):
                for i, query in enumerate(tokens):
                    seen = {j: w for j, w in look(i, ids).items() if j <= i or not self.causal} or {i: 1.0}
                    for j, weight in seen.items():
                        weights[b, h, query, tokens[j]] += weight / sum(seen.values())
        scores = weights.log().clamp(min=-60.0)
        q = scores.new_zeros(batch, len(self.looks), n, 2)
        v = torch.ones_like(q)
        keep = input_ids != 0
        if self.way == "regard":
            mask = Padding(keep=keep) & Causal() if self.causal else Padding(keep=keep)
            return regard.attend(q, q, v, mask=mask, bias=scores).transpose(1, 2).flatten(2)
        visible = keep[:, None, None] & (torch.ones(n, n, dtype=torch.bool).tril() if self.causal else True)
        scores = scores.masked_fill(~visible, -math.inf)
        if self.way == "torch":
            out = torch.nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=scores)
        else:
            out = torch.softmax(scores, -1) @ v
        return out.transpose(1, 2).flatten(2)


def watched(model: nn.Module, *texts: Tensor, **options: Any) -> Record:
    with torch.no_grad(), regard.watch(model, **options) as seen:
        for ids in texts:
            model(ids)
    return seen


def ids_of(tokens: int = 29, padding: int = 0, batch: int = 1) -> Tensor:
    """Different tokens; with padding before those of the second text."""
    ids = torch.arange(1, tokens + 1).repeat(batch, 1)
    if padding:
        ids = torch.stack([ids[0], torch.cat([torch.zeros(padding, dtype=torch.long), ids[0, : tokens - padding]])])
    return ids


PLANTED: dict[str, Look] = {
    "previous": at(-1),
    "offset -3": at(-3),
    "itself": at(0),
    "local": within(3),
    "broad": even,
    "resting only": onto(0),
}
LATER: dict[str, Look] = {"next": at(1), "offset +5": at(5)}
MIXED: dict[str, Look] = {
    "previous": mixed((0.6, onto(0)), (0.4, at(-1))),
    "offset -3": mixed((0.8, onto(0)), (0.2, at(-3))),
    "local": mixed((0.5, onto(0)), (0.5, within(2))),
    "broad": mixed((0.4, onto(0)), (0.6, even)),
}


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["regard", "torch", "by hand"])
def test_planted_heads(way: str, causal: bool, padding: int) -> None:
    heads = PLANTED if causal else PLANTED | LATER
    seen = watched(Planted(*heads.values(), causal=causal, way=way), ids_of(padding=padding))
    for name, role in zip(heads, seen.roles(), strict=True):
        assert role.role == name
        assert role.clear
        if name not in ("broad", "resting only"):
            assert role.score is not None
            assert role.score > 0.75  # (the first or last few tokens have none at the offset, and attend to themselves)
            assert role.baseline is not None
            assert role.low is not None
            assert role.high is not None
            assert role.baseline < role.low < role.score <= role.high + 1e-9


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_what_a_head_does_that_mostly_rests(causal: bool, padding: int) -> None:
    """The resting place is set aside: the share of what is left is that of the pure head."""
    seen = watched(Planted(*MIXED.values(), causal=causal), ids_of(padding=padding))
    for (name, _), role, rests in zip(MIXED.items(), seen.roles(), (0.6, 0.8, 0.5, 0.4), strict=True):
        assert role.role == name
        assert role.rests_on == "first"
        if not causal:  # (where little comes before, most is on the first token)
            assert 1 - role.rest == pytest.approx(rests, abs=0.12)  # (some of the rest falls on the first token, too)
        assert role.describe().startswith("rests on the first token 0.")


def test_scores_in_closed_form() -> None:
    """11 tokens, the first set aside: the others have 0.4 on the token before, but for the second, which has the first
    before it. Uniform attention has 1 of 10 keys there, for the 9 queries that have one."""
    (role,) = watched(Planted(MIXED["previous"]), ids_of(11)).roles()
    left = 9 * 0.4 + 1e-9
    assert role.score == pytest.approx(1.0, abs=1e-5)
    assert role.baseline == pytest.approx(0.1, abs=1e-5)
    assert role.least == pytest.approx(0.4)
    assert role.rest == pytest.approx(left / 11, abs=1e-5)
    assert role.evidence["first"] == pytest.approx((10 * 0.6 + 1 + 0.4) / 11, abs=1e-5)
    (role,) = watched(Planted(even), ids_of(11)).roles()
    assert (role.score, role.baseline) == pytest.approx((math.log(10), math.log(10)), abs=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["regard", "by hand"])
def test_a_sink_need_not_be_the_first_token(way: str, causal: bool) -> None:
    model = Planted(onto(3), mixed((0.6, onto(3)), (0.4, at(-1))), at(-1), causal=causal, way=way)
    only, mostly, other = watched(model, ids_of()).roles()
    assert only.rests_on == "sink"
    assert only.role == ("sink" if causal else "resting only")  # (what comes before the sink attends to itself)
    assert (mostly.role, mostly.rests_on) == ("previous", "sink")
    assert mostly.score is not None
    assert mostly.score > 0.85
    assert (other.role, other.rests_on) == ("previous", None)


@pytest.mark.parametrize("causal", [False, True])
def test_copies(causal: bool) -> None:
    """Random tokens, repeated: induction and duplicate, also with most of the mass at rest, and no such role where the
    text does not repeat itself."""
    ids = probes.repeated(97, length=23, batch=3, first=96)[:, 1:] + 1
    heads = copies(1), copies(0), mixed((0.7, onto(0)), (0.3, copies(1))), at(-1), even
    seen = watched(Planted(*heads, causal=causal), ids)
    assert [role.role for role in seen.roles()] == ["induction", "duplicate", "induction", "previous", "broad"]
    once = watched(Planted(*heads, causal=causal), ids[:, :23])
    assert not {"induction", "duplicate"} & {name for role in once.roles() for name in (role.role, *role.also)}


def test_ids_may_be_written_over() -> None:
    """What roles need of a text is copied when it is seen."""
    ids = probes.repeated(97, length=23, batch=3, first=96)[:, 1:] + 1
    seen = watched(Planted(copies(1), causal=True), ids)
    ids.zero_()
    assert seen.roles()[0].role == "induction"


def word_ids(text: str) -> Tensor:
    words = text.split()
    return torch.tensor([[1 + sorted(set(words)).index(word) for word in words]])


@pytest.mark.parametrize("offset, name", [(-1, "previous"), (0, "itself"), (1, "next")])
@pytest.mark.parametrize(
    "text",
    [
        "it was a very very good day for all of us here",
        "we flew to bo ra bo ra and back to our old house",
        "no no no no no no no no no no no no no",
        "a b a b a b a b a b a b a b a b a b a b a b a b",
        "a b c a b c a b c a b c a b c a b c a b c a b c",
    ],
)
def test_a_doubled_word_makes_no_induction_head(text: str, offset: int, name: str) -> None:
    (role,) = watched(Planted(at(offset)), word_ids(text)).roles()
    assert role.role == name
    assert not {"induction", "duplicate"} & {role.role, *role.also}


TEXT = "[CLS] one , two [SEP] three four ; five six seven . eight ##th nine ##th ten : eleven [SEP]"
TOKENS = TEXT.split()
MARKS = [i for i, token in enumerate(TOKENS) if token in ",;.:"]


def test_classes_of_tokens() -> None:
    """Separators are special tokens, so a resting place; punctuation is not, also where one mark takes all."""
    pieces = {12: 13, 13: 12, 14: 15, 15: 14}
    heads = {
        "separator": onto(4, 19),
        "punctuation": onto(*MARKS),
        "first": mixed((0.5, onto(0)), (0.5, lambda i, ids: {(7 * i + 3) % 20: 0.5, (11 * i + 6) % 20: 0.5})),
    }
    seen = watched(Planted(*heads.values(), onto(11)), ids_of(20))
    assert [role.role for role in seen.roles(tokens=TOKENS)][:2] == ["separator", "punctuation"]
    assert seen.roles(tokens=TOKENS)[3].role == "punctuation"
    assert "punctuation" not in seen.roles()[1].evidence
    assert seen.roles(tokens=TOKENS)[0].rests_on == "separator"
    word = mixed((0.3, at(-1)), (0.7, lambda i, ids: {pieces.get(i, i - 1 if i else 0): 1.0}))
    of_word = watched(Planted(word), ids_of(20)).roles(tokens=TOKENS)[0]
    assert of_word.evidence["same word"] == pytest.approx(0.85, abs=1e-4)  # half of the tokens before are, too


def test_special_tokens_are_not_asked() -> None:
    """Queries that are special tokens do not count: here only those look at the next token."""
    special = {0, 4, 19}
    look: Look = lambda i, ids: at(1)(i, ids) if i in special else at(-1)(i, ids)  # noqa: E731
    (role,) = watched(Planted(look), ids_of(20)).roles(tokens=TOKENS)
    assert role.role == "previous"
    assert role.evidence["next"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("share, has, clear", [(0.15, False, False), (0.3, True, False), (0.5, True, True)])
def test_a_role_takes_its_share(share: float, has: bool, clear: bool) -> None:
    """Of what is left: mixed with equal weights."""
    (role,) = watched(Planted(mixed((share, at(-5)), (1 - share, even))), ids_of(97)).roles()
    assert ("offset -5" in (role.role, *role.also)) == has
    if clear:
        assert (role.role, role.clear) == ("offset -5", True)


def test_a_role_takes_some_queries() -> None:
    assert watched(Planted(at(-1)), ids_of(7)).roles()[0].role == "previous"
    assert watched(Planted(at(-1)), ids_of(5)).roles()[0].role != "previous"  # of 5 queries 3 tell of it


def test_several_texts_add_up() -> None:
    """The evidence of a watch of two texts is the sum of theirs; `watch_all` collects it batch by batch."""
    model = Planted(at(-1), mixed((0.6, onto(0)), (0.4, at(-1))), even)
    texts = ids_of(13), ids_of(17)
    both = watched(model, *texts)
    single = [watched(model, text) for text in texts]
    apart = [evidence_of(one[0].text, facts_of(one, one[0].text, None)) for one in single]
    assert both.roles() == Roles(decide(both.layers[0], apart[0] + apart[1]))
    collected = regard.heads.watch_all(model, texts, progress=False)
    assert [role.role for role in collected.roles()] == ["previous", "previous", "broad"]
    for one, other in zip(collected.roles(), both.roles(), strict=True):
        assert one.evidence == pytest.approx(other.evidence, abs=1e-6)
    assert collected[0].earlier == []
    assert regard.heads.watch_all(model, texts, progress=False, roles=False)[0].evidence is None


def test_generation_with_a_cache(tmp_path: Any) -> None:
    """Chunks of a sequence are one text: the roles are those of the text read at once."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(22, num_heads=2).double().eval()
    x, cache = torch.randn(1, 19, 22, dtype=torch.float64), regard.KVCache()
    with torch.no_grad(), regard.watch(layer) as whole:
        layer(x, mask=Causal())
    with torch.no_grad(), regard.watch(layer) as pieces:
        for part in x.split(7, dim=1):
            layer(part, mask=Causal(), cache=cache)
    for one, other in zip(whole.roles(), pieces.roles(), strict=True):
        assert one.role == other.role
        assert one.evidence == pytest.approx(other.evidence, abs=1e-5)
    whole.save(tmp_path / "record.safetensors")
    for one, other in zip(whole.roles(), Record.load(tmp_path / "record.safetensors").roles(), strict=True):
        assert one == other


def test_against_dense_weights() -> None:
    """Random heads of a padded batch: shares, rest and baseline by the weights themselves."""
    torch.manual_seed(1)
    layer = regard.MultiHeadAttention(21, num_heads=3).double().eval()
    layer.q_proj.weight.data *= 8
    x, lengths = torch.randn(2, 17, 21, dtype=torch.float64), torch.tensor([17, 11])
    with torch.no_grad(), regard.watch(layer, keep="qk") as seen:
        layer(x, mask=Padding(lengths=lengths))
    weights = seen[0].weights()
    for head, role in enumerate(seen.roles()):
        mass = uniform = left = 0.0
        for b, n in enumerate(lengths.tolist()):
            p = weights[b, head, :n, :n].clone()
            sinks = (p.sum(0) > 0.3 * n) & (torch.arange(n) > 0)
            p[:, 0] = 0
            p[:, sinks] = 0
            rest = p.sum(1)
            visible = n - 1 - int(sinks.sum())
            for i in range(1, n):
                if not sinks[i - 1] and i > 1:
                    mass += float(p[i, i - 1])
                    uniform += float(rest[i]) / visible
            left += float(rest.sum())
        assert role.evidence["previous"] == pytest.approx(mass / left, abs=1e-6)
        assert role.rest == pytest.approx(left / 28, abs=1e-6)


def test_what_is_shown() -> None:
    found = watched(Planted(even, at(-1), onto(0)), ids_of()).roles()
    assert isinstance(found, Roles)
    columns = ["layer", "head", "role", "score", "baseline", "least", "rests", "on", "rest", "also"]
    assert str(found).splitlines()[0].split() == columns
    assert str(found).endswith("3 of 3 heads have a role, 1 one beside resting and looking everywhere")
    assert [one.head for one in found.informative] == [1]
    assert [(one.head, one.role) for one in found.of("previous")] == [(1, "previous")]
    assert found.of("induction") == []
    assert found[0, 1].role == found["Planted", 1].role == "previous"
    assert [one.head for one in found[1:]] == [1, 2]
    with pytest.raises(KeyError, match="no head 7 in layer 'Planted'"):
        found["Planted", 7]


def test_in_words() -> None:
    found = watched(Planted(at(-1), mixed((0.6, onto(0)), (0.4, at(1))), onto(0), even), ids_of()).roles()
    assert found[0].describe().startswith("the token before 1.00 (uniform 0.0")
    assert found[1].describe().startswith("rests on the first token 0.6")
    assert "; else: the token after 0.97 (uniform 0.0" in found[1].describe()
    assert found[2].describe() == "rests only, on the first token 1.00"
    assert found[3].describe() == "many tokens alike 3.33 (uniform 3.33)"
    assert Role("a", 0, None).describe() == "no role"


def test_one_answer_everywhere() -> None:
    """A record knows its tokens: what it says, the page shows, and what is drawn in a terminal or a figure."""
    seen = watched(Planted(onto(4, 19), onto(*MARKS), onto(0), at(-1)), ids_of(20))
    assert [one.role for one in seen.roles()][2:] == ["resting only", "previous"]
    seen.tokens = TOKENS
    found = seen.roles()
    assert [one.role for one in found] == ["separator", "punctuation", "resting only", "previous"]
    assert found == seen.roles(tokens=TOKENS)
    assert Scene(seen)[0].roles == list(found)
    seen.tokens = TOKENS[:5]  # of another text: they tell nothing of this one
    assert "punctuation" not in seen.roles()[1].evidence


def test_the_table_of_thresholds() -> None:
    assert len({rule.name for rule in ROLES}) == len(ROLES)
    assert set(RULES) > UNINFORMATIVE
    for rule in ROLES:
        assert rule.source
        assert rule.least >= 0
        assert rule.clear >= rule.least or rule.name in UNINFORMATIVE
        assert rule.queries >= 5


def test_cross_attention_has_no_roles() -> None:
    model = made(Hand(by_operator))
    with torch.no_grad(), regard.watch(model) as seen:
        model(noise(2, 7, W), noise(2, 13, W, seed=6))
    assert seen[0].kind == "cross"
    assert seen.roles() == []


def test_wrong_tokens() -> None:
    seen = watched(Planted(even), ids_of(11))
    words = list("abcdefghijk")
    for wrong in (words[:-1], [*words, "more"], [words, words], []):
        with pytest.raises(ValueError, match=r"tokens: expected 11 for each of 1 texts, received \[[\d, ]*\]"):
            seen.roles(tokens=wrong)
    for wrong in ([[1, 2]], [words, None], [None]):
        with pytest.raises(TypeError, match="tokens: expected a list of words, or a list of lists of them, received"):
            seen.roles(tokens=wrong)
    several = watched(Planted(even), ids_of(11), ids_of(13))
    with pytest.raises(ValueError, match="tokens: expected a record of one text, which they belong to, received 2"):
        several.roles(tokens=words)


def test_a_text_that_was_too_long_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr(importlib.import_module("regard.heads.record.filing"), "MOST_FOR_ROLES", 100)
    seen = watched(Planted(even), ids_of(29))
    with pytest.raises(ValueError, match=r'roles: expected q and k of the text.*remedy: watch\(model, keep="qk"\)'):
        seen.roles()
    assert watched(Planted(even), ids_of(29), keep="qk").roles()[0].role == "broad"


def test_what_is_kept_for_roles_is_not_given_out() -> None:
    seen = watched(Planted(even), ids_of(11))
    assert not seen[0].exact
    with pytest.raises(ValueError, match='keep="qk"'):
        seen[0].weights()
    with pytest.raises(ValueError, match='keep="qkv"'):
        _ = seen[0].k
