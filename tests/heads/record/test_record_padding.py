"""One text or a padded batch, padded left or right: every measure, the table and the roles are the same.

Texts of several lengths are watched one by one, then as one batch. What a record says of them is compared: means per
head of all measures, of the uniform baseline, the table, the roles; and the numbers of each text by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle import close
from heads.oracle_hands import drawn
from torch import Tensor, nn

import regard
from regard import masks, measures, models
from regard.draw.scene import Scene
from regard.heads import Record, token_kinds, watch_all
from regard.models import EMBEDDED, Decoder, Encoder, ModelConfig
from regard.models.base import padded

WITH = {
    name: pytest.mark.skipif(EMBEDDED[name].folder() is None, reason=f"the weights of {name} are not installed")
    for name in ("minilm", "smollm2")
}
PAD = 7  # a token that occurs in the texts, too: padding is known by the mask, not by its id
TEXTS = [[5, 11, 7, 13, 11, 7, 17, 5, 11, 13, 5], [7, 3, 3, 19, 3], [2, 7, 23, 2, 7, 23, 2, 7], [29, 7, 11], [5, 7]]


def every_measure() -> list[Any]:
    """All that there are, with arguments that differ from the defaults where there are some."""
    return [
        *["entropy", "peak", "distance", "offset", "received", "on_first", "previous", "itself", "next"],
        *["induction", "duplicate", "contribution", "max_logit"],
        measures.Offsets(3, 2),
        measures.Local(2),
        measures.Near(2, 3),
        measures.Heatmap(4, 3),
        measures.Crop(1, 4, 0, 3),
        measures.Links(3),
        measures.Divergence(0.001),
        measures.Tokens({"some": [3, 11], "padding's": [PAD], "same": "same"}),
    ]


def test_no_measure_is_forgotten() -> None:
    made = {type(one).__name__ for one in measures.as_measures(every_measure())}
    shipped = {
        name
        for name in measures.__all__
        if isinstance(kind := getattr(measures, name), type) and issubclass(kind, measures.Measure)
    }
    assert made == shipped - {"Measure", "PerQuery", "PerKey", "Pairs", "PairSets"}  # (given for one number of queries)


Batches = tuple[list[Any], dict[str, list[Any]]]  # one by one; and as one batch, padded right and left


def rows_of(make: Callable[[Tensor, Tensor], Any], texts: list[list[int]], longest: int = 0) -> Batches:
    """What `make` gives of ids and of where they are tokens, (B, N) each, for texts alone and for all together."""
    alone = [make(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.bool)) for text in texts]
    several = {side: padded(texts, PAD, side=side) for side in ("right", "left")}
    more = {side: padded([*texts, [PAD] * longest], PAD, side=side) for side in several} if longest else several
    return alone, {side: [make(batch.ids[: len(texts)], batch.keep[: len(texts)])] for side, batch in more.items()}


def same(got: Record, right: Record, near: float) -> None:
    assert got.layers == right.layers
    for mine, theirs in zip(got, right, strict=True):
        assert torch.equal(mine.count, theirs.count)
        for one, other in ((mine, theirs), (mine.uniform, theirs.uniform)):
            assert one is not None
            assert other is not None
            names = [name for name, axis in other.axes.items() if axis != "choice"]
            assert {name for name in names if other.has(name)} == {name for name in names if one.has(name)}
            assert {n: c.tolist() for n, c in one.counts.items() if n not in ("heatmap", "crop")} == {
                n: c.tolist() for n, c in other.counts.items() if n not in ("heatmap", "crop")
            }
            for name in names:
                if other.has(name):
                    close(one.per_head(name), other.per_head(name), f"{name} of {mine.name}", near)
    for mine, theirs in zip(got.table(), right.table(), strict=True):
        assert (mine.pop("layer"), mine.keys()) == (theirs.pop("layer"), theirs.keys())
        assert mine == pytest.approx(theirs, abs=near, rel=near)


def same_roles(got: Record, right: Record) -> None:
    assert [(one.role, one.also) for one in got.roles()] == [(one.role, one.also) for one in right.roles()]


def bert(way: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any]]:
    def make(ids: Tensor, keep: Tensor) -> dict[str, Tensor]:
        positions = (keep.cumsum(1) - 1).clamp(min=0)  # learned positions are counted from the first token
        return {"input_ids": ids, "attention_mask": keep.long(), "position_ids": positions}

    return hf_models.model("bert", way), make


def llama(way: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any]]:
    return hf_models.model("llama", way, padded=True), lambda ids, keep: {
        "input_ids": ids,
        "attention_mask": keep.long(),
    }


def ours(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any]]:
    config = ModelConfig(layers=2, embed_dim=18, num_heads=3, vocabulary=31, inner=7, context=43, **options)
    return drawn(kind(config)).float(), lambda ids, keep: {"ids": ids, "keep": keep}


class ByHand(nn.Module):
    """Attention of a user's own, with a softmax by hand."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding, self.q, self.k = nn.Embedding(31, 15), nn.Linear(15, 15), nn.Linear(15, 15)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (f(x).unflatten(-1, (3, 5)).transpose(1, 2) for f in (self.q, self.k, nn.Identity()))
        hidden = ~keep[:, None, None]
        if self.causal:
            hidden = hidden | torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / 5**0.5).masked_fill(hidden, -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Torchs(nn.Module):
    """`nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(31, 15), nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.layer(x, x, x, key_padding_mask=~keep, need_weights=False)[0]


def handmade(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any]]:
    return drawn(model).float(), lambda ids, keep: {"ids": ids, "keep": keep}


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[Tensor, Tensor], Any]]]] = {
    "regard encoder": lambda: ours(Encoder, order="post"),
    "regard decoder": lambda: ours(Decoder, positions="rotary", num_kv_heads=1),
    "regard decoder, learned positions": lambda: ours(Decoder),
    "bert, sdpa": lambda: bert("sdpa"),
    "bert, eager": lambda: bert("eager"),
    "llama, sdpa": lambda: llama("sdpa"),
    "llama, eager": lambda: llama("eager"),
    "by hand": lambda: handmade(ByHand(causal=False)),
    "by hand, causal": lambda: handmade(ByHand(causal=True)),
    "nn.MultiheadAttention": lambda: handmade(Torchs()),
}


@pytest.mark.parametrize("which", ["default", "every measure"])
@pytest.mark.parametrize("name", MODELS)
def test_one_by_one_or_in_a_padded_batch(name: str, which: str) -> None:
    model, make = MODELS[name]()
    options = {"measures": every_measure()} if which == "every measure" else {}
    alone, batches = rows_of(make, TEXTS)
    right = watch_all(model, alone, progress=False, **options)
    for batch in batches.values():
        got = watch_all(model, batch, progress=False, **options)
        same(got, right, 2e-5)
        same_roles(got, right)


def test_texts_that_are_all_padded() -> None:
    """To a fixed length, as tokenizers do with padding="max_length"."""
    model, make = MODELS["llama, sdpa"]()
    alone, batches = rows_of(make, TEXTS, longest=17)
    right = watch_all(model, alone, progress=False, measures=every_measure())
    for batch in batches.values():
        same(watch_all(model, batch, progress=False, measures=every_measure()), right, 2e-5)


@pytest.mark.parametrize("name", ["regard encoder", "llama, eager", "bert, sdpa", "by hand"])
def test_the_numbers_of_each_text(name: str) -> None:
    """Not means alone: each text's own numbers stand where its tokens do."""
    model, make = MODELS[name]()
    alone, batches = rows_of(make, TEXTS)
    single = [watch_all(model, [one], progress=False, measures=every_measure()) for one in alone]
    for side, (batch,) in batches.items():
        got = watch_all(model, [batch], progress=False, measures=every_measure())
        longest = max(map(len, TEXTS))
        for item, text in enumerate(TEXTS):
            first = 0 if side == "right" else longest - len(text)
            own = slice(first, first + len(text))
            for number, layer in enumerate(single[item]):
                for what, axis in layer.axes.items():
                    if not layer.has(what):
                        continue
                    mine, theirs = got[number].last()[what], layer.last()[what]
                    if what == "links":
                        tokens = theirs.keys[0]
                        close(mine.weights[item, :, own, : tokens.shape[-1]], theirs.weights[0], what, 2e-5)
                    elif what == "target":
                        best = layer.last()["links"].weights[0]
                        clear = best[..., 0] > best[..., 1] + 1e-5  # equal tokens may have equal weights
                        assert torch.equal(mine[item, :, own][clear], theirs[0][clear] + first)
                    elif axis == "query":
                        close(mine[item, :, own], theirs[0], what, 2e-5)
                    elif axis == "key":
                        close(mine[item, :, own], theirs[0], what, 2e-5)
                        assert float(mine[item].sum()) == pytest.approx(float(theirs.sum()), abs=1e-4)
                    elif axis == "map":
                        rows, cols = theirs.shape[2:]
                        close(mine[item, :, :rows, :cols], theirs[0], what, 2e-5)
                        assert float(mine[item].sum()) == pytest.approx(float(theirs.sum()), abs=1e-4)
                    else:
                        close(mine[item], theirs[0], what, 2e-5)


@pytest.mark.parametrize("name", ["regard decoder", "llama, sdpa"])
def test_measured_again_from_what_was_kept(name: str) -> None:
    model, make = MODELS[name]()
    few = ["received", measures.Offsets(2, 1), measures.Heatmap(4, 3), measures.Crop(1, 4, 0, 3), "on_first"]
    for batch in rows_of(make, TEXTS)[1].values():
        with torch.no_grad(), regard.watch(model, measures=few, keep="qk") as seen:
            model(**batch[0])
        for layer in seen:
            again = layer.measure(few)
            for what in ("received", "offsets", "heatmap", "crop", "on_first"):
                close(again[what], layer.last()[what], what)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_record_in_a_file(side: str, tmp_path: Any) -> None:
    model, make = MODELS["regard decoder"]()
    seen = watch_all(model, rows_of(make, TEXTS)[1][side], progress=False)
    seen.save(tmp_path / "record.safetensors")
    loaded = Record.load(tmp_path / "record.safetensors")
    same(loaded, seen, 0.0)
    same_roles(loaded, seen)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_what_is_written_after_prompts_padded_on_the_left(way: str) -> None:
    """A prompt, then token after token from a cache: as if each text had been read alone."""
    model = hf_models.model("llama", way, padded=True)
    new = [[11, 3, 7], [13, 7, 5], [2, 2, 2], [7, 29, 7], [3, 5, 7]]
    whole = [text + more for text, more in zip(TEXTS, new, strict=True)]
    few = [one for one in every_measure() if not isinstance(one, measures.Divergence)]
    few.append("divergence")  # (unsmoothed: how long a text will be is not known while it is written)
    right = watch_all(model, [{"input_ids": torch.tensor([text])} for text in whole], progress=False, measures=few)
    batch = padded(TEXTS, PAD, side="left")
    keep = batch.keep.long()
    with torch.no_grad(), regard.watch(model, measures=few) as seen:
        cache = model(input_ids=batch.ids, attention_mask=keep, use_cache=True).past_key_values
        for step in range(3):
            keep = torch.cat([keep, torch.ones(len(TEXTS), 1, dtype=torch.long)], 1)
            ids = torch.tensor([more[step : step + 1] for more in new])
            model(input_ids=ids, attention_mask=keep, past_key_values=cache, use_cache=True)
    for mine, theirs in zip(seen, right, strict=True):
        assert torch.equal(mine.count, theirs.count)
        for name in [name for name, axis in theirs.axes.items() if axis != "choice" and theirs.has(name)]:
            close(mine.per_head(name), theirs.per_head(name), name, 2e-5)


def test_means_over_batches_of_several_lengths() -> None:
    """Against the formula, from dense weights: each query counts once, whichever batch it came in."""
    model, make = MODELS["regard decoder"]()
    parts = [TEXTS[:2], TEXTS[2:], [[3, 5, 7, 11, 13]]]
    batches = [rows_of(make, part)[1][side][0] for part, side in zip(parts, ("right", "left", "right"), strict=True)]
    seen = watch_all(
        model, batches, progress=False, measures=["entropy", "on_first", "received", measures.Offsets(2, 0)]
    )
    sums: dict[str, Tensor] = {}
    queries = 0
    for text in [text for part in parts for text in part]:
        with torch.no_grad(), regard.watch(model, keep="qk") as one:
            model(torch.tensor([text]))
        p = one[1].weights()[0].double()  # (H, N, N)
        n = len(text)
        queries += n
        terms = {
            "entropy": torch.special.entr(p).sum((1, 2)),
            "on_first": p[:, :, 0].sum(1),
            "received": torch.nn.functional.pad(p.sum(1), (0, 11 - n)),
            "offsets": torch.stack([p.diagonal(-d, 1, 2).sum(1) for d in (2, 1, 0)], 1),
        }
        sums = {name: term + sums.get(name, 0) for name, term in terms.items()}
    assert seen[1].count.tolist() == [queries] * 3
    for name, total in sums.items():
        close(seen[1].per_head(name), total / queries, name, 2e-5)
    for row in seen.table()[3:]:
        assert row["previous"] == pytest.approx(float(sums["offsets"][row["head"], 1]) / queries, abs=1e-5)


class Confident(measures.PerKey):
    """A measure of a user's own, summed over queries: padding is none of them."""

    gives = {"confident": "key"}

    def of(self, strip: measures.Strip, prepared: Any) -> Tensor:
        return (strip.weights > 0.3).to(strip.weights.dtype).sum(2)


def test_measures_of_ones_own() -> None:
    model, make = MODELS["regard encoder"]()
    alone, batches = rows_of(make, TEXTS)
    right = watch_all(model, alone, progress=False, measures=[Confident()])
    assert right[0].per_head("confident").any()
    for batch in batches.values():
        same(watch_all(model, batch, progress=False, measures=[Confident()]), right, 1e-6)


def test_roles_by_tokens_in_words() -> None:
    """Each text's own words, or as many as there are slots: separators and punctuation are where its tokens are."""
    model, make = MODELS["regard decoder"]()
    words = [
        [",;.:!?"[token % 6] if token % 3 == 0 else "[SEP]" if token % 3 == 1 else "a" for token in text]
        for text in TEXTS
    ]
    evidence = []
    for side, batch in rows_of(make, TEXTS)[1].items():
        seen = watch_all(model, batch, progress=False)
        longest = max(map(len, TEXTS))
        blank = [["[PAD]"] * (longest - len(row)) for row in words]
        filled = [row + more if side == "right" else more + row for row, more in zip(words, blank, strict=True)]
        for given in (words, filled):
            evidence.append([one.evidence for one in seen.roles(tokens=given)])
    assert {"separator", "punctuation"} <= set(evidence[0][0])
    for one in evidence[1:]:
        for mine, theirs in zip(one, evidence[0], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_map_is_that_of_the_text(tmp_path: Any) -> None:
    """Without padding, labelled with its own tokens: drawn of what was kept, or of a heatmap in a file."""
    model, make = MODELS["regard decoder"]()
    words = [[f"w{token}" for token in text] for text in TEXTS]
    batch = rows_of(make, TEXTS)[1]["left"][0]
    with torch.no_grad(), regard.watch(model, measures=["entropy", measures.Heatmap(4)]) as seen:
        model(**batch)
    kept = Scene(seen, words, item=1)[0]
    size = len(TEXTS[1])
    assert kept.queries.text == kept.keys.text == words[1]
    close(kept.pooled(11, 11), seen[0].weights(batch=1)[:, -size:, -size:], "kept")
    seen.save(tmp_path / "record.safetensors")
    with torch.no_grad(), regard.watch(model, measures=["entropy", measures.Heatmap(4)]) as alone:
        model(torch.tensor(TEXTS[1:2]))
    panel, right = Scene(Record.load(tmp_path / "record.safetensors"), words, item=1)[0], Scene(alone, words[1])[0]
    assert panel.queries.text == panel.keys.text == words[1]
    close(panel.pooled(4, 4), right.pooled(4, 4), "of the text")


# Which queries are padding


def found_padding(mask: Any, n: int = 5, m: int = 5, batch: int = 2) -> list[list[bool]] | None:
    layer = regard.MultiHeadAttention(6, num_heads=2)
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.randn(batch, n, 6), mask=mask)
    found = seen[0].last_padding()
    return None if found is None else found[:, 0].tolist()


def test_a_query_that_sees_itself_or_is_seen_is_no_padding() -> None:
    keep = torch.tensor([[True] * 5, [True, True, True, False, False]])
    both = [[False] * 5, [False, False, False, True, True]]
    pairs = keep[:, None, :].expand(2, 5, 5)
    assert found_padding(masks.Padding(keep=keep)) == both
    assert found_padding(masks.Padding(torch.tensor([5, 3]))) == both
    assert found_padding(masks.Causal() & masks.Keep(pairs)) == both
    assert found_padding(masks.Keep(pairs & pairs.mT)) == both
    assert found_padding(masks.Hide(~pairs)) == both
    assert found_padding(~masks.Hide(pairs)) == both
    assert found_padding(masks.Keep(pairs) | masks.Keep(torch.zeros(5, 5, dtype=torch.bool))) == both
    # nobody sees itself; all see the others; a token that is seen by others is one
    assert found_padding(masks.Keep(~torch.eye(5, dtype=torch.bool))) is None
    assert found_padding(masks.Keep(torch.ones(5, 5, dtype=torch.bool).tril(-1))) is None
    graph = torch.ones(5, 5, dtype=torch.bool)
    graph[2, 2] = False
    assert found_padding(masks.Keep(graph)) is None
    assert found_padding(masks.Prefix(3)) is None
    assert found_padding(masks.Causal() & masks.Window(2)) is None


def test_cross_attention_has_no_padding_queries() -> None:
    """Of a padded memory as long as the queries: all queries count, and the first key is the first token."""
    layer = regard.MultiHeadAttention(6, num_heads=2)
    x, memory = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    keep = torch.tensor([[True] * 5, [False, False, True, True, True]])
    with torch.no_grad(), regard.watch(layer, keep="qk") as seen:
        layer(x, memory, mask=masks.Padding(keep=keep))
    p = seen[0].weights()
    assert seen[0].kind == "cross"
    assert seen[0].count.tolist() == [10, 10]
    close(seen[0].received, p.sum(2), "received")
    close(seen[0].on_first, torch.stack([p[0, :, :, 0], p[1, :, :, 2]]), "on_first")


# Real models


SENTENCES = [
    "The old sailor told us a story about the storm, and we believed every word of it.",
    "Birds sing.",
    "She gave the book to her brother because he had asked for it.",
]


@WITH["minilm"]
def test_minilm() -> None:
    """`encode_batch`, as the docstring of `watch_all` offers it; head 0.2 looks at the token before."""
    model = models.load("minilm", check=False)
    right = watch_all(model, SENTENCES, progress=False)
    got = watch_all(model, [model.encode_batch(SENTENCES)], progress=False)
    same(got, right, 1e-4)
    same_roles(got, right)
    assert got.table()[2]["previous"] > 0.9
    assert got.roles()[2].role == "previous"
    kinds = measures.Tokens(token_kinds(model))
    by_kind = [
        watch_all(model, batches, progress=False, measures=["previous", kinds])
        for batches in (SENTENCES, [model.encode_batch(SENTENCES)])
    ]
    same(by_kind[1], by_kind[0], 1e-4)


@WITH["smollm2"]
@pytest.mark.slow
def test_smollm2() -> None:
    model = models.load("smollm2", check=False)
    right = watch_all(model, SENTENCES, progress=False)
    rows = [model.encode(text)[0].tolist() for text in SENTENCES]
    for side in ("right", "left"):
        batch = padded(rows, side=side)
        got = watch_all(model, [batch], progress=False)
        same(got, right, 2e-3)
        same_roles(got, right)
