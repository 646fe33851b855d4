"""Roles of heads whose weights are given: each gets its role, its score and the baseline that the closed form says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from heads import hf_models
from heads.oracle_hands import Hand, W, by_operator, made, noise
from torch import Tensor, nn

import regard
from regard import measures
from regard.draw.scene import Scene
from regard.heads import ROLES, Record, Roles, token_kinds

N = 11
TOKENS = ["[CLS]", "one", ",", "two", "[SEP]", "three", "four", "five", "six", ".", "[SEP]"]
RULES = {rule.name: rule for rule in ROLES}


class Given(nn.Module):
    """Attention with the weights that it is given, (H, N, M): by hand, or by torch's function, as a mask that is added
    to scores of 0. A weight of 0 is e^-60, so that every key is seen; one of -1 is hidden from all."""

    def __init__(self, weights: Tensor, way: str = "torch") -> None:
        super().__init__()
        scores = weights.clamp(min=0).log().clamp(min=-60.0).masked_fill(weights < 0, -math.inf)
        self.register_buffer("scores", scores)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        heads, n, m = self.scores.shape
        v = x.new_ones(x.shape[0], heads, m, 2)
        if self.way == "torch":
            q, k = v.new_zeros(x.shape[0], heads, n, 2), v.new_zeros(x.shape[0], heads, m, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.scores)
        else:
            out = torch.softmax(self.scores.expand(x.shape[0], -1, -1, -1), -1) @ v
        return out.transpose(1, 2).flatten(2)


class Reads(nn.Module):
    """A model of token ids, so that a watch can find them."""

    def __init__(self, layer: Given) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.zeros(*ids.shape, W, dtype=torch.float64))


def onto(*keys: Any) -> Tensor:
    """The weights (N, N) of a head whose query i looks at each `key(i)` alike."""
    weights = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        for key in keys:
            weights[i, key(i) if callable(key) else key] += 1 / len(keys)
    return weights


def within(i: int) -> range:
    return range(max(i - 2, 0), min(i + 3, N))


EVEN = torch.full((N, N), 1 / N, dtype=torch.float64)
LOCAL = torch.stack([torch.tensor([j in within(i) for j in range(N)]).double() for i in range(N)])
LOCAL /= LOCAL.sum(-1, keepdim=True)
NEAR = sum(len(range(max(i - 3, 0), min(i + 4, N))) for i in range(N)) / N**2  # of equal weights: 65 / 121

# The weights of each head; its role, score, baseline, and what else would fit. Of N tokens, N - 1 have one before.
HEADS: dict[str, tuple[Tensor, float, float, list[str]]] = {
    "previous": (onto(lambda i: max(i - 1, 0)), (N - 1) / N, (N - 1) / N**2, ["local"]),
    "next": (onto(lambda i: min(i + 1, N - 1)), (N - 1) / N, (N - 1) / N**2, ["local"]),
    "itself": (onto(lambda i: i), 1.0, 1 / N, ["local"]),
    "separator": (onto(4), 1.0, 2 / N, []),
    "punctuation": (onto(2, 9), 1.0, 2 / N, []),
    "first": (onto(0), 1.0, 1 / N, ["long-range"]),
    "local": (LOCAL, 1.0, NEAR, []),
    "long-range": (onto(lambda i: i + 5 if i < 6 else i - 5), 5.0, (N**2 - 1) / (3 * N), []),
    "broad": (EVEN, math.log(N), math.log(N), []),
    "none": (onto(*(lambda i, d=d: i + d if i < 6 else i - d for d in (2, 5))), math.nan, math.nan, []),
}


def seen_of(weights: Tensor, way: str = "torch", batch: int = 1, **options: Any) -> Record:
    model = Given(weights, way)
    with torch.no_grad(), regard.watch(model, **options) as seen:
        model(noise(batch, weights.shape[1], W))
    return seen


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("way", ["torch", "by hand"])
def test_each_head_has_its_role(way: str, batch: int) -> None:
    found = seen_of(torch.stack([weights for weights, *_ in HEADS.values()]), way, batch).roles(tokens=TOKENS)
    assert len(found) == len(HEADS)
    for head, (name, (_, score, baseline, also)) in enumerate(HEADS.items()):
        one = found["Given", head]
        if name == "none":
            assert (one.role, one.score, one.baseline, one.least) == (None, None, None, None)
            continue
        assert one.role == name
        assert one.score == pytest.approx(score, abs=1e-5), name
        assert one.baseline == pytest.approx(baseline, abs=1e-5), name
        assert one.least == pytest.approx(max(RULES[name].least, RULES[name].over_baseline * baseline), abs=1e-5)
        assert one.also == also, name
        assert one.evidence[name] == one.score


def test_without_tokens_neither_separators_nor_punctuation() -> None:
    found = seen_of(torch.stack([HEADS[name][0] for name in ("separator", "punctuation", "first")])).roles()
    assert [one.role for one in found] == [None, None, "first"]
    assert "separator" not in found[0].evidence


T = 13


def repeating(tokens: int, way: str = "torch", causal: bool = False) -> Record:
    """Some tokens twice. The second time, head 0 looks at the token after the copy, head 1 at the copy, head 2 nowhere
    in particular."""
    n = 2 * tokens
    copied, after, even = (torch.eye(n, dtype=torch.float64) for _ in range(3))
    for i in range(tokens, n):
        copied[i], after[i] = 0, 0
        copied[i, i - tokens] = after[i, i - tokens + 1] = 1
    even[:] = torch.ones(n, n).tril() if causal else 1.0
    even /= even.sum(-1, keepdim=True)
    weights = torch.stack([after, copied, even])
    if causal:
        weights = weights.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -1)
    model = Reads(Given(weights, way))
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.arange(tokens).repeat(2)[None])
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["torch", "by hand"])
def test_copies(way: str, causal: bool) -> None:
    """Equal weights have 1 of 26 keys there, or of the i + 1 that come no later. The copy of the first token tells of
    no duplicate: it may be looked at for being the first."""
    seen = repeating(T, way, causal)
    found = seen.roles()
    for head, (name, first) in enumerate((("induction", T), ("duplicate", T + 1))):
        baseline = sum(1 / (i + 1 if causal else 2 * T) for i in range(first, 2 * T)) / (2 * T - first)
        one = found["layer", head]
        assert one.role == name
        assert one.score == pytest.approx(1.0, abs=1e-6)
        assert one.baseline == pytest.approx(baseline, abs=1e-6)
        assert one.least == pytest.approx(max(0.4, 3 * baseline), abs=1e-6)
        assert found["layer", 2].evidence[name] == pytest.approx(baseline, abs=1e-6)
    assert found["layer", 2].role == "broad"
    assert seen[0].counts["induction"].tolist() == [T] * 3
    assert seen[0].counts["duplicate_apart"].tolist() == [T - 1] * 3


def test_a_role_takes_some_queries() -> None:
    assert repeating(10).roles()[0].role == "induction"
    assert repeating(9).roles()[0].role != "induction"  # nine queries tell of it
    assert repeating(11).roles()[1].role == "duplicate"
    assert repeating(10).roles()[1].role != "duplicate"
    before = torch.diag(torch.ones(4, dtype=torch.float64), -1)
    before[0, 0] = 1
    assert seen_of(before[None]).roles()[0].role == "previous"
    assert seen_of(before[None, :4, :4]).roles()[0].role is None
    assert all(rule.queries >= 5 for rule in ROLES)


def word_ids(text: str) -> Tensor:
    words = text.split()
    return torch.tensor([[sorted(set(words)).index(word) for word in words]])


@pytest.mark.parametrize("offset, role", [(-1, "previous"), (0, "itself"), (1, "next")])
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
def test_ordinary_texts_that_repeat_a_word(text: str, offset: int, role: str) -> None:
    """A head that looks at a neighbour is that, though the neighbour be a copy, or stand after one."""
    ids = word_ids(text)
    n = ids.shape[1]
    at = (torch.arange(n) + offset).clamp(0, n - 1)
    model = Reads(Given(torch.nn.functional.one_hot(at, n).double()[None]))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    (one,) = seen.roles()
    assert one.role == role
    assert not {"induction", "duplicate"} & set(one.also)


@pytest.mark.parametrize("first", ["#", '"', "-", "[SEP]"])
def test_a_sink_is_no_head_of_punctuation(first: str) -> None:
    """Where the text begins with a mark: by its words, and by classes of token ids."""
    words = [first, *TOKENS[1:]]
    weights = torch.stack([onto(0), onto(2, 9), onto(4)])
    by_words = seen_of(weights).roles(tokens=words)
    model, ids = Reads(Given(weights)), torch.arange(N)[None]
    kinds = {"punctuation": [0, 2, 9] if first != "[SEP]" else [2, 9], "separator": [4, 10, *[0] * (first == "[SEP]")]}
    with torch.no_grad(), regard.watch(model, measures=[*measures.DEFAULT, measures.Tokens(kinds)]) as seen:
        model(ids)
    for found in (by_words, seen.roles()):
        assert [one.role for one in found] == ["first", "punctuation", "separator"]
        assert not {"punctuation", "separator"} & set(found[0].also)
        assert found[0].evidence["punctuation"] == pytest.approx(0.0, abs=1e-6)
    for mine, theirs in zip(by_words, seen.roles(), strict=True):
        assert (mine.role, mine.also) == (theirs.role, theirs.also)
        assert mine.evidence == pytest.approx(theirs.evidence, abs=1e-5)
    a, b, c = (sum(j in own for j in range(N)) / N for own in ((0,), (2, 9), (4, 10)))
    assert [one.baseline for one in by_words] == pytest.approx([a, b, c], abs=1e-5)
    assert float(seen[0].per_head("tokens")[0, 0]) == pytest.approx(float(first != "[SEP]"), abs=1e-5)  # as it is


@pytest.mark.parametrize("batch", [1, 3])
def test_one_answer_everywhere(batch: int) -> None:
    """A record knows its tokens: what it says, the page shows, and what is drawn in a terminal or a figure."""
    weights = torch.stack([HEADS[name][0] for name in ("separator", "punctuation", "first", "previous")])
    seen = seen_of(weights, batch=batch)
    assert [one.role for one in seen.roles()] == [None, None, "first", "previous"]
    for tokens in ([TOKENS] * batch, TOKENS if batch == 1 else [TOKENS] * batch):
        seen.tokens = tokens
        found = seen.roles()
        assert [one.role for one in found] == ["separator", "punctuation", "first", "previous"]
        assert found == seen.roles(tokens=tokens)
        for item in range(batch):
            assert Scene(seen, item=item)[0].roles == list(found)
    seen.tokens = TOKENS[:5]  # of another text: they tell nothing of this one
    assert [one.role for one in seen.roles()] == [None, None, "first", "previous"]


def test_tokens_of_source_and_target() -> None:
    """Of an encoder and a decoder: each layer has those of its own text."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = Given(onto(4)[None]), Given(onto(2, 9)[None])
            self.cross = made(Hand(by_operator))

        def forward(self, x: Tensor) -> None:
            self.source(x)
            self.target(x)
            self.cross(noise(1, N, W), noise(1, N, W, seed=6))

    model = Both()
    with torch.no_grad(), regard.watch(model) as seen:
        model(noise(1, N, W))
    words = ["a"] * N
    for pair, right in (((TOKENS, words), ["separator", None]), ((words, TOKENS), [None, "punctuation"])):
        seen.tokens = pair
        assert [one.role for one in seen.roles()] == right
        assert [panel.role(0) for panel in Scene(seen) if panel.layer.kind == "self"] == right


@pytest.mark.parametrize("name", ["previous", "next", "itself", "separator", "punctuation", "first", "local"])
def test_a_role_takes_more_than_its_least(name: str) -> None:
    """A head that mixes a role with equal weights has it from the least on, and below it has not."""
    pure, score, baseline, _ = HEADS[name]
    least = max(RULES[name].least, RULES[name].over_baseline * baseline)
    share = (least - baseline) / (score - baseline)  # score = share * pure + (1 - share) * even
    weights = torch.stack([s * pure + (1 - s) * EVEN for s in (share - 0.01, share + 0.01)])
    below, above = seen_of(weights).roles(tokens=TOKENS)
    assert name not in (below.role, *below.also)
    assert below.evidence[name] == pytest.approx(least - 0.01 * (score - baseline), abs=1e-5)
    assert name in (above.role, *above.also)


def test_long_range_and_broad_take_their_share_of_the_baseline() -> None:
    """1.2 times as far as equal weights; 0.78 of their entropy, which is that of some number of keys, e^(0.78 ln N)."""
    far, _, mean, _ = HEADS["long-range"]
    shares = [(1.2 * mean - 0) / 5 + d for d in (-0.01, 0.01)]  # the rest stays where it is, at distance 0
    near, further = seen_of(torch.stack([s * far + (1 - s) * torch.eye(N) for s in shares])).roles()
    assert "long-range" not in (near.role, *near.also)
    assert "long-range" in (further.role, *further.also)
    keys = N**0.78  # 6.49
    few, many = (onto(*range(int(keys) + d)) for d in (0, 1))
    narrow, broad = seen_of(torch.stack([few, many])).roles()
    assert "broad" not in (narrow.role, *narrow.also)
    assert "broad" in (broad.role, *broad.also)
    assert broad.evidence["broad"] == pytest.approx(math.log(7), abs=1e-5)


def test_the_table_of_thresholds() -> None:
    assert [rule.name for rule in ROLES] == ["induction", "duplicate", *[n for n in HEADS if n != "none"]]
    for rule in ROLES:
        assert re.search(r"\(\w+( et al\.)? \d{4}\)|ours|as for previous", rule.source), rule
        assert rule.least >= 0
        assert rule.over_baseline > 0


# Several texts at once, and one after another


def test_a_padded_batch() -> None:
    """Each text has separators of its own, and padding has none: by the weights themselves."""
    rows = [TOKENS, ["[CLS]", "one", "!", "[SEP]"]]
    weights = torch.stack([0.7 * onto(4) + 0.3 * onto(3), onto(3), onto(2)])
    found = seen_of(weights, batch=2).roles(tokens=rows)
    for head, (separator, punctuation) in enumerate([((0.7 + 0.3) / 2, 0.0), (0.5, 0.0), (0.0, 1.0)]):
        assert found["Given", head].evidence["separator"] == pytest.approx(separator, abs=1e-5)
        assert found["Given", head].evidence["punctuation"] == pytest.approx(punctuation, abs=1e-5)
    assert found["Given", 2].role == "punctuation"
    assert found["Given", 2].baseline == pytest.approx((2 + 1) / 2 / N, abs=1e-6)


def test_padding_is_not_seen() -> None:
    """BERT, two texts: the mean is over queries, of what is given to keys that are separators."""
    model, given = hf_models.model("bert", "eager"), hf_models.inputs("bert", padded=True)
    with torch.no_grad(), regard.watch(model) as seen:
        p = model(**given, output_attentions=True).attentions[0]  # (B, H, N, M)
    rows = [["a"] * 12 + ["[SEP]"], ["[SEP]", *"bcdefg", "[SEP]"]]
    columns = torch.tensor([[t == "[SEP]" for t in [*row, *[""] * (13 - len(row))]] for row in rows])
    columns[1, 0] = False  # the first token may be looked at for being the first
    on = (p * columns[:, None, None]).sum(-1)  # (B, H, N)
    right = torch.cat([on[0], on[1, :, :8]], 1).mean(1)  # over 13 + 8 queries
    even = (columns[0].sum() + columns[1].sum()) / (13 + 8)
    for head in range(3):
        one = seen.roles(tokens=rows)[seen.layers[0], head]
        assert one.evidence["separator"] == pytest.approx(right[head].item(), abs=1e-5)
        if one.role == "separator":
            assert one.baseline == pytest.approx(even.item(), abs=1e-5)


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(dict.fromkeys(["[PAD]", *TOKENS]))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="one"))
    made.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    return made


def test_many_texts() -> None:
    """Two texts, of 11 and 7 tokens: means over 18 queries."""
    words = tokenizer()
    long = torch.tensor([[words.token_to_id(t) for t in TOKENS]])
    short = torch.tensor([[words.token_to_id(t) for t in ("[CLS]", "one", "two", "[SEP]", "six", ".", "[SEP]")]])
    first = torch.stack([onto(4), onto(2, 9)])
    second = torch.zeros(2, 7, 7, dtype=torch.float64)
    second[0, :, 6], second[1, :, 5] = 1, 1
    kinds = token_kinds(words)
    assert set(kinds) == {"special", "separator", "punctuation"}
    joint = Joined(first, second)
    with torch.no_grad(), regard.watch(joint, measures=["entropy", "distance", measures.Tokens(kinds)]) as seen:
        joint(long)
        joint(short)
    separator, punctuation = seen.roles()
    assert seen["Joined"].count.tolist() == [18, 18]
    for one, name, even in ((separator, "separator", 2 * 11 / 11 + 2 * 7 / 7), (punctuation, "punctuation", 2 + 1)):
        assert one.role == name
        assert one.score == pytest.approx(1.0, abs=1e-6)
        assert one.baseline == pytest.approx(even / 18, abs=1e-6)
    with torch.no_grad(), regard.watch(joint) as seen:
        joint(long)
        joint(short)
    words = r"tokens: expected a record of one text, which they belong to, received 2 texts; remedy: measures\.Tokens"
    with pytest.raises(ValueError, match=words):
        seen.roles(tokens=TOKENS)


class Joined(nn.Module):
    """One layer whose weights depend on the length of the text."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.scores = {w.shape[1]: w.log().clamp(min=-60.0) for w in weights}

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.scores[ids.shape[1]]
        q = scores.new_zeros(ids.shape[0], scores.shape[0], ids.shape[1], 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=scores).transpose(1, 2).flatten(2)


# What is shown, and what is found


def test_what_is_shown() -> None:
    found = seen_of(torch.stack([HEADS[name][0] for name in ("none", "previous", "first")])).roles()
    assert isinstance(found, Roles)
    assert str(found).splitlines()[0].split() == ["layer", "head", "role", "score", "baseline", "least", "also"]
    assert str(found).splitlines()[1].split() == ["Given", "1", "previous", "0.909", "0.083", "0.500", "local"]
    assert str(found).endswith("2 of 3 heads have a role")
    assert [row["head"] for row in found.table()] == [1, 2]
    assert [(one.head, one.role) for one in found.of("first")] == [(2, "first")]
    assert found.of("induction") == []
    assert found[1].role == "previous"
    assert [one.head for one in found[1:]] == [1, 2]
    with pytest.raises(KeyError, match="no head 7 in layer 'Given'"):
        found["Given", 7]


def test_the_highest_score_comes_first() -> None:
    weights = torch.stack([s * HEADS["previous"][0] + (1 - s) * EVEN for s in (0.8, 1.0, 0.9)])
    assert [one.head for one in seen_of(weights).roles().of("previous")] == [1, 2, 0]


def test_cross_attention_has_no_roles() -> None:
    model = made(Hand(by_operator))
    with torch.no_grad(), regard.watch(model) as seen:
        model(noise(2, 7, W), noise(2, 13, W, seed=6))
    assert seen[0].kind == "cross"
    assert seen.roles() == []
    assert str(seen.roles()) == "(no rows)\n0 of 0 heads have a role"


def test_wrong_tokens() -> None:
    seen = seen_of(EVEN[None])
    for wrong in (TOKENS[:-1], [*TOKENS, "more"], [TOKENS, TOKENS], []):
        with pytest.raises(ValueError, match=r"tokens: expected 11 for each of 1 texts, received \[[\d, ]*\]"):
            seen.roles(tokens=wrong)
    with pytest.raises(ValueError, match=r"tokens: expected 11 for each of 3 texts, received \[11, 12, 4\]"):
        seen_of(EVEN[None], batch=3).roles(tokens=[TOKENS, [*TOKENS, "more"], TOKENS[:4]])
    for wrong in ([[1, 2]], [TOKENS, None], [None]):
        with pytest.raises(TypeError, match="tokens: expected a list of words, or a list of lists of them, received"):
            seen.roles(tokens=wrong)


def test_records_that_do_not_tell() -> None:
    few = seen_of(EVEN[None], measures=["entropy", "distance"])
    assert few.roles()[0].role == "broad"
    with pytest.raises(ValueError, match='tokens: expected a record that has measured "received", received entropy'):
        few.roles(tokens=TOKENS)
    for none in ([], ["received"]):
        words = "roles: expected a record with the default measures, or others that roles are decided by, received "
        with pytest.raises(ValueError, match=words + (none[0] if none else "none")):
            seen_of(EVEN[None], measures=none).roles()
