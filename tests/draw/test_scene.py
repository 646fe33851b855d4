"""A scene: which tokens label which layer, and maps pooled to any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.draw.page.pack import packed
from regard.draw.scene import Scene, sizes
from regard.masks import Causal
from regard.measures import Heatmap


def watched(n: int = 7, heads: int = 3, batch: int = 1, mask=None, **options) -> regard.heads.Record:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(heads * 5, num_heads=heads)
    with regard.watch(layer, **({"keep": "qk"} | options)) as seen, torch.no_grad():
        layer(torch.randn(batch, n, heads * 5), mask=mask)
    return seen


class Translator(torch.nn.Module):
    """An encoder of one layer and a decoder of one, with nothing in their names to tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (regard.MultiHeadAttention(6, num_heads=2) for _ in range(3))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read = self.one(source)
        return self.three(self.two(target, mask=Causal()), read, read)


@given(n=st.integers(1, 40), cells=st.integers(1, 45))
@settings(deadline=None, max_examples=60)
def test_sizes_count_the_tokens_of_each_cell(n: int, cells: int) -> None:
    cells = min(n, cells)
    counted = sizes(n, cells)
    assert counted.sum() == n
    assert counted.min() >= 1
    assert counted.tolist() == [sum(t * cells // n == cell for t in range(n)) for cell in range(cells)]


@given(n=st.integers(1, 23), rows=st.integers(1, 25), cols=st.integers(1, 25), causal=st.booleans())
@settings(deadline=None, max_examples=25)
def test_a_pooled_cell_is_what_a_query_of_it_gives_to_its_keys(n: int, rows: int, cols: int, causal: bool) -> None:
    panel = Scene(watched(n, mask=Causal() if causal else None))[0]
    pooled, weights = panel.pooled(rows, cols), panel.layer.weights(batch=0)
    assert pooled.shape == (3, min(rows, n), min(cols, n))
    r, c = (torch.arange(n) * min(cells, n) // n for cells in (rows, cols))
    for i in range(pooled.shape[1]):
        for j in range(pooled.shape[2]):
            block = weights[:, r == i][:, :, c == j]
            torch.testing.assert_close(pooled[:, i, j], block.sum(2).mean(1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(pooled.sum(2), torch.ones(3, pooled.shape[1]), atol=1e-5, rtol=0)


def test_without_q_and_k_measured_heatmaps_are_drawn(tmp_path) -> None:
    exact = Scene(watched(11))[0]
    watched(11, measures=["entropy", Heatmap(11)]).save(tmp_path / "seen.safetensors")
    measured = Scene(regard.heads.Record.load(tmp_path / "seen.safetensors"))[0]
    torch.testing.assert_close(measured.pooled(5, 3), exact.pooled(5, 3))
    watched(29, measures=["entropy", Heatmap(11)]).save(tmp_path / "pooled.safetensors")
    twice = Scene(regard.heads.Record.load(tmp_path / "pooled.safetensors"))[0].pooled(7, 5)
    torch.testing.assert_close(twice.sum(2), torch.ones(3, 7), atol=1e-5, rtol=0)
    assert measured.drawable
    assert not measured.layer.exact
    bare = Scene(watched(11, keep=None))[0]
    assert not bare.drawable
    with pytest.raises(ValueError, match=r'record: expected one that kept q and k, or measured heatmaps.*keep="qk"'):
        bare.pooled(5, 5)


def test_source_and_target_are_told_by_the_order_of_calls() -> None:
    model = Translator()
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(1, 4, 6), torch.randn(1, 4, 6))
    source, target = ["a", "b", "c", "d"], ["w", "x", "y", "z"]
    scene = Scene(seen, (source, target))
    labels = [(panel.queries.text, panel.keys.text) for panel in scene]
    assert labels == [(source, source), (target, target), (target, source)]
    assert [bool(panel.roles) for panel in scene] == [True, True, False]


def test_each_text_of_a_batch_has_its_own_tokens() -> None:
    seen = watched(5, batch=2)
    scene = Scene(seen, [["a", "b", "c"], ["v", "w", "x", "y", "z"]], item=0)
    assert scene[0].queries.text == ["a", "b", "c", "+1", "+2"]
    second = Scene(seen, [["a", "b", "c"], ["v", "w", "x", "y", "z"]], item=1)
    assert second[0].queries.text == ["v", "w", "x", "y", "z"]
    assert torch.equal(second[0].weights(1), seen[0].weights(1, batch=1))
    with pytest.raises(ValueError, match="item: expected a text from 0 to 1, received 2"):
        Scene(seen, item=2)


def padded_batch(side: str) -> tuple[regard.heads.Record, list[list[str]]]:
    """Two texts, the first of 3 tokens and padded to 5, and their tokens without padding."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(15, num_heads=3)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = False
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(2, 5, 15), mask=regard.masks.Padding(keep=keep if side == "right" else keep.flip(1)))
    return seen, [["a", "b", "."], ["v", "w", "x", "y", "z"]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("with_padding", [True, False])
def test_padding_is_not_part_of_a_text(side: str, with_padding: bool) -> None:
    seen, rows = padded_batch(side)
    if with_padding:
        rows[0] = ["", "", *rows[0]] if side == "left" else [*rows[0], "[PAD]", "[PAD]"]
    inside = slice(2, 5) if side == "left" else slice(0, 3)
    panel = Scene(seen, rows, item=0)[0]
    assert (panel.queries.text, panel.keys.text) == (["a", "b", "."], ["a", "b", "."])
    assert panel.shape == (3, 3)
    exact = seen[0].weights(batch=0)[:, inside, inside]
    torch.testing.assert_close(panel.weights(1), exact[1])
    torch.testing.assert_close(panel.weights(1, slice(1, 3), slice(0, 2)), exact[1, 1:3, 0:2])
    torch.testing.assert_close(panel.pooled(3, 3), exact)
    torch.testing.assert_close(panel.pooled(1, 2)[:, 0], torch.stack([exact[..., :2].sum(2), exact[..., 2]], 2).mean(1))
    keys, strongest = panel.links(2)
    torch.testing.assert_close(strongest, exact.topk(2).values)
    assert torch.equal(keys, exact.topk(2).indices)
    assert Scene(seen, rows, item=1)[0].shape == (5, 5)
    said, _ = packed_layer(seen, rows)
    assert (said["n"], said["m"]) == (3, 3)
    assert said["flow"]["q"]["shape"] == [3, 3, 5]


def packed_layer(seen: regard.heads.Record, rows: list[list[str]]) -> tuple[dict, bytes]:
    made = packed({"text": Scene(seen, rows)}, title="", limit=10**6)
    return made.meta["runs"][0]["layers"][0], made.blobs["0.0"]


def test_the_keys_of_cross_attention_are_the_source_without_its_padding() -> None:
    model = Translator()
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    model.one.register_forward_pre_hook(
        lambda *_: ((_[1]), {"mask": regard.masks.Padding(keep=keep)}), with_kwargs=True
    )
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(2, 4, 6), torch.randn(2, 3, 6))
    source, target = [list("abcd"), ["a", "b", "", ""]], [list("xyz"), list("xyz")]
    labels = [(panel.queries.text, panel.keys.text) for panel in Scene(seen, (source, target), item=1)]
    assert labels == [(["a", "b"], ["a", "b"]), (list("xyz"), list("xyz")), (list("xyz"), ["a", "b"])]


def test_roles_are_those_of_the_record() -> None:
    """With its tokens, of one text or of several: by them punctuation is known."""
    layer = regard.MultiHeadAttention(2, num_heads=2, bias=False)
    with torch.no_grad():  # the second head looks at what is 1 in the second feature, from anywhere
        for weight in layer.parameters():
            weight.zero_()
        layer.q_proj.weight[1, 0], layer.k_proj.weight[1, 1] = 1.0, 9.0
    x = torch.tensor([[[1.0, 0.0]] * 5 + [[1.0, 1.0]] + [[1.0, 0.0]] * 5])
    for batch, tokens in ((1, [*"abcde", ",", *"fghij"]), (2, [[*"abcde", ",", *"fghij"], [*"klmno", ".", *"pqrst"]])):
        with regard.watch(layer, keep="qk") as seen, torch.no_grad():
            layer(x.expand(batch, -1, -1))
        wanted = seen.roles(tokens=tokens)
        assert wanted[seen.layers[0], 1].role == "punctuation"
        assert Scene(seen, tokens)[0].roles == list(wanted)
        seen.tokens = tokens
        assert Scene(seen)[0].roles == list(wanted)


def test_an_error_in_roles_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(5)

    def broken(*_, **__):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("regard.draw.scene.roles", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        Scene(seen)


def test_a_text_that_came_in_pieces() -> None:
    layer = regard.MultiHeadAttention(6, num_heads=2)
    x, cache = torch.randn(1, 5, 6), regard.KVCache()
    with torch.no_grad():
        layer(x[:, :2], mask=Causal(), cache=cache)
        with regard.watch(layer, keep="qk") as late:
            layer(x[:, 2:], mask=Causal(), cache=cache)
    panel = Scene(late, list("abcde"))[0]
    assert (panel.queries.text, panel.keys.text) == (list("cde"), list("abcde"))
    cache = regard.KVCache()
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(x[:, :4], mask=Causal(), cache=cache)
        layer(x[:, 4:], mask=Causal(), cache=cache)
    assert Scene(seen, list("abcdef"))[0].keys.text == list("abcde")  # the last one was written, not read


def test_tokens_may_be_missing_or_kept_in_the_record() -> None:
    seen = watched(3)
    assert Scene(seen)[0].keys.text == ["0", "1", "2"]
    seen.tokens = ["x", "y", "z"]
    assert Scene(seen)[0].keys.text == ["x", "y", "z"]


def test_keys_that_a_layer_adds_have_a_label() -> None:
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True).eval()
    x = torch.randn(1, 3, 6)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(x, x, x)
    panel = Scene(seen, ["a", "b", "c"])[0]
    assert panel.queries.text == ["a", "b", "c"]
    assert panel.keys.text == ["a", "b", "c", "+1", "+2"]


@pytest.mark.parametrize(
    "tokens, error, words",
    [
        (["a", "b"], ValueError, "tokens: expected 3, for the queries of MultiHeadAttention, received 2"),
        ("abc", TypeError, "tokens: expected a list of tokens, received one string"),
        (["a"] * 9, ValueError, r"tokens: expected 3.*pair \(source, target\)"),
    ],
)
def test_wrong_tokens(tokens, error, words) -> None:
    with pytest.raises(error, match=words):
        Scene(watched(3), tokens)


def test_wrong_records() -> None:
    with pytest.raises(TypeError, match=r"record: expected what `regard.watch` gives, received dict"):
        Scene({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="record: expected at least one layer, received an empty one"):
        Scene(regard.heads.Record())
