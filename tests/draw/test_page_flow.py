"""What a page carries of the way from scores to weights and of what heads add: read by docs/page.md, compared with the
exact values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draw.test_page import Layers, Reader, seen_of, signed, weights, whole
from torch import Tensor, nn

import regard
from regard import masks
from regard.cache import KVCache
from regard.draw.page import _script, _style, page, scenes
from regard.draw.page.pack import plan
from regard.heads import Record
from regard.positions import Alibi, Rotary, ScoreMod

PROGRAM = len(_style()) + len(_script())  # bytes of every page


def layer_of(
    tokens: int = 7, mask: Any = None, bias: Any = None, heads: int = 3, width: int = 15, **options: Any
) -> Record:
    """One layer of attention that has read a random text."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(width, num_heads=3, **options)
    for parameter in layer.parameters():
        parameter.data *= 2
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, tokens, width), mask=mask, bias=bias)
    return seen


def visible(scores: dict[str, Any], data: bytes, n: int, m: int) -> Tensor:
    """Which keys each query may see, (H|1, N, M)."""
    if "first" in scores:
        first, count = (whole(data, scores[name])[..., None] for name in ("first", "count"))
        return (torch.arange(m) >= first) & (torch.arange(m) < first + count)
    if "visible" in scores:
        bits = whole(data, scores["visible"]).long()[..., None] >> torch.arange(8)
        return (bits.flatten(2)[..., :m] & 1) == 1
    return torch.ones(1, n, m, dtype=torch.bool)


def bias_of(scores: dict[str, Any], data: bytes, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The bias (H|1, N, M), and half of a step."""
    if "values" in scores["bias"]:
        return signed(data, scores["bias"]["values"])
    table, half = signed(data, scores["bias"]["distances"])
    index = torch.arange(m) - torch.arange(n)[:, None] + n - 1
    return table[:, index], half[:, index]


def followed(said: dict[str, Any], data: bytes) -> tuple[Tensor, Tensor]:
    """The weights (H, N, M) that follow from what the page carries, and by how much they may be off: a factor of
    exp(2 e), if scores are off by e."""
    flow, n, m = said["flow"], said["n"], said["m"]
    scores = flow["scores"]
    (q, dq), (k, dk) = (signed(data, flow[name]) for name in ("q", "k"))
    k, dk = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, dk))
    s = q @ k.mT * scores["scale"]
    off = (q.abs() @ dk.mT + dq @ (k.abs() + dk).mT) * scores["scale"]
    if "softcap" in scores:
        s = scores["softcap"] * torch.tanh(s / scores["softcap"])
    if "bias" in scores:
        bias, half = bias_of(scores, data, n, m)
        s, off = s + bias, off + half
    s = s.masked_fill(~visible(scores, data, n, m), float("-inf"))
    if "sinks" in scores:
        sink = torch.tensor(scores["sinks"], dtype=s.dtype)[:, None, None].expand(-1, n, 1)
        s = torch.cat([s, sink], 2)
    found = s.softmax(2)[..., :m]
    return found, found * torch.expm1(2 * off.amax(2, keepdim=True)) + 1e-6


def check_weights(said: dict[str, Any], data: bytes, exact: Tensor, most: float = 0.01) -> None:
    found, off = followed(said, data)
    assert bool(((found - exact.double()).abs() <= off).all())
    assert float(off.max()) < most


DENSE = torch.randn(1, 3, 7, 7, generator=torch.Generator().manual_seed(5))
HOLES = torch.rand(7, 7, generator=torch.Generator().manual_seed(6)) > 0.4
HOLES.fill_diagonal_(True)


class Doubled(ScoreMod):
    """Another temperature for each head."""

    def __init__(self) -> None:
        self.weight = torch.tensor([[0.5, 1.5, 2.0]])

    def block(self, tile: masks.Tile, scores: Tensor) -> Tensor:
        return scores * self.weight[:, :, None, None]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Causal() & masks.Window(3)},
    "holes": {"mask": masks.Keep(HOLES)},
    "softcap": {"softcap": 1.5, "mask": masks.Causal()},
    "sinks": {"sinks": True, "mask": masks.Causal()},
    "alibi": {"position_encoding": Alibi(3), "mask": masks.Causal()},
    "alibi both ways": {"position_encoding": Alibi(3)},
    "dense": {"bias": DENSE},
    "scale": {"scale": 0.31},
    "function of scores": {"bias": Doubled(), "mask": masks.Causal()},
    "everything": {
        "softcap": 2.0,
        "sinks": True,
        "position_encoding": Alibi(3),
        "bias": DENSE,
        "mask": masks.Keep(HOLES),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_weights_follow_from_what_is_carried(name: str) -> None:
    """q, k, scale, softcap, bias, mask and sinks of the page give the weights of the layer."""
    record = layer_of(**CALLS[name])
    said, data = Reader(page(record)).layer(0, 0)
    exact = record[0].weights(batch=0).double()
    check_weights(said, data, exact)
    stored, steps = weights(data, said["map"])
    assert bool(((stored - exact).abs() <= steps).all())
    scores = said["flow"]["scores"]
    assert "missing" not in scores
    assert scores["scale"] == pytest.approx(0.31 if name == "scale" else 5**-0.5)
    assert ("softcap" in scores, "sinks" in scores) == (
        name in ("softcap", "everything"),
        name in ("sinks", "everything"),
    )
    assert bool(((exact > 0) == visible(scores, data, 7, 7)).all())


def test_masks_are_written_as_ranges_or_bits() -> None:
    kinds = {}
    for name in CALLS:
        scores = Reader(page(layer_of(**CALLS[name]))).layer(0, 0)[0]["flow"]["scores"]
        kinds[name] = next((kind for kind in ("first", "visible") if kind in scores), "")
    assert kinds["plain"] == kinds["dense"] == ""  # nothing is hidden
    assert kinds["causal"] == kinds["window"] == "first"
    assert kinds["holes"] == kinds["everything"] == "visible"


def test_a_bias_by_distance_is_a_table() -> None:
    for name in ("alibi", "alibi both ways"):
        said, data = Reader(page(layer_of(**CALLS[name]))).layer(0, 0)
        scores = said["flow"]["scores"]
        assert list(scores["bias"]) == ["distances"]
        assert scores["bias"]["distances"]["shape"] == [3, 13]
        found, half = bias_of(scores, data, 7, 7)
        distance = (torch.arange(7) - torch.arange(7)[:, None]).abs()
        ratio = found[0, 6, 0] / -6
        assert bool(((found[0] + ratio * distance).abs()[visible(scores, data, 7, 7)[0]] <= 2 * half[0].max()).all())
    assert list(Reader(page(layer_of(**CALLS["dense"]))).layer(0, 0)[0]["flow"]["scores"]["bias"]) == ["values"]


def test_a_bias_without_room_is_named() -> None:
    """And the page says so, instead of weights that do not follow."""
    bias = torch.randn(1, 3, 97, 97)
    record = layer_of(97, bias=bias)
    scores = Reader(page(record, limit=PROGRAM + 750_000)).layer(0, 0)[0]["flow"]["scores"]
    assert scores["missing"] == ["bias"]
    assert "bias" not in scores
    assert "missing" not in Reader(page(record)).layer(0, 0)[0]["flow"]["scores"]


def test_rotary_is_said() -> None:
    for record, rotary in ((layer_of(width=18, position_encoding=Rotary(6)), True), (layer_of(), False)):
        assert Reader(page(record)).layer(0, 0)[0]["flow"]["scores"]["rotary"] is rotary


def test_a_text_that_came_in_chunks() -> None:
    """Each chunk sees what came before it and itself up to the query: one causal mask."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(15, num_heads=3)
    cache = KVCache()
    x = torch.randn(1, 7, 15)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        for first, last in ((0, 4), (4, 5), (5, 7)):
            layer(x[:, first:last], mask=masks.Causal(), cache=cache)
    assert seen[0].num_chunks == 3
    said, data = Reader(page(seen)).layer(0, 0)
    scores = said["flow"]["scores"]
    assert bool((visible(scores, data, 7, 7)[0] == torch.ones(7, 7).tril().bool()).all())
    check_weights(said, data, seen[0].weights(batch=0).double())


def test_padding_is_left_out() -> None:
    """One text of a batch, shorter than the other: its own keys alone."""
    model = Layers(1, 3, 15)
    torch.manual_seed(1)
    keep = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model.layers[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, mask=masks.Padding(keep=keep) & masks.Causal())

    padded = Padded()
    with regard.watch(padded, keep="qkv") as seen, torch.no_grad():
        padded(torch.randn(2, 7, 15))
    said, data = Reader(page(seen, [list("abcdefg"), list("vwxyz")], item=1)).layer(0, 0)
    assert (said["n"], said["m"]) == (5, 5)
    exact = seen[0].weights(batch=1).double()[:, :5, :5]
    check_weights(said, data, exact)


def test_heads_and_bias_add_up_to_the_result() -> None:
    record = seen_of(7, heads=3, width=15)
    for number, layer in enumerate(record):
        said, data = Reader(page(record)).layer(0, number)
        flow = said["flow"]
        assert layer.projection is not None
        assert flow["parts"]["first"] == 0
        assert "components" not in flow["parts"]  # all of them
        parts, half = signed(data, flow["parts"]["values"])
        exact = layer.projected()[0].double()
        assert bool(((parts - exact).abs() <= half + 1e-6).all())
        bias, near = signed(data, flow["bias"])
        assert bias.shape == (1, 15)
        assert bool(((bias[0] - layer.projection[1].double()).abs() <= near[0] + 1e-7).all())
        result, off = signed(data, flow["result"])
        assert bool(((parts.sum(0) + bias - result).abs() <= half.sum(0) + near + off + 1e-6).all())
        assert "gated" not in flow


def test_without_a_bias() -> None:
    flow = Reader(page(layer_of(out_bias=False))).layer(0, 0)[0]["flow"]
    assert "bias" not in flow
    assert "parts" in flow


def test_the_largest_components_where_there_is_no_room_for_all() -> None:
    record = seen_of(23, heads=6, width=120, layers=3)
    drawn = list(scenes(record).values())
    room = 1_350_000
    assert 8 <= plan(drawn, room).components < 120
    said, data = Reader(page(record, limit=PROGRAM + room)).layer(0, 1)
    parts = said["flow"]["parts"]
    components = whole(data, parts["components"]).long()
    values, half = signed(data, parts["values"])
    count = components.shape[1]
    assert values.shape == (6, 23 - parts["first"], count)
    added = record[1].projected()[0].double()
    assert record[1].projection is not None
    result = (added.sum(0) + record[1].projection[1])[parts["first"] :]
    smallest = result.abs().gather(1, components).amin(1)
    assert bool((smallest == result.abs().topk(count, dim=1).values[:, -1]).all())
    assert bool((components.diff(dim=1) > 0).all())
    exact = added[:, parts["first"] :].gather(2, components.expand(6, -1, -1))
    assert bool(((values - exact).abs() <= half + 1e-6).all())


def test_scores_come_first_where_vectors_do_not_fit() -> None:
    """q and k of all tokens in 16 bits, the others in 8 or of the last tokens alone."""
    record = seen_of(61, heads=4, width=64, layers=2)
    said, data = Reader(page(record, limit=PROGRAM + 350_000)).layer(0, 1)
    flow = said["flow"]
    assert (flow["q"]["bits"], flow["k"]["bits"], flow["output"]["bits"]) == (16, 16, 8)
    assert flow["q"]["shape"][1] == flow["k"]["shape"][1] == 61
    check_weights(said, data, record[1].weights(batch=0), most=0.1)  # (scores are large)
    assert ("v" in flow) == (flow["first"] == 0)
