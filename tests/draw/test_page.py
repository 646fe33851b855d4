"""The file itself: what it holds, read by docs/page.md and nothing else; and what it must not hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.draw.page import as_json, document, notebook, page, scenes
from regard.draw.page.numbers import codes, decoded, step
from regard.draw.page.pack import packed, plan
from regard.heads import Record


class Reader(HTMLParser):
    """A page as docs/page.md describes it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.program = self.style = ""
        self.policy: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: str | None = None
        self.feed(html)
        self.meta: dict[str, Any] = json.loads(self.scripts["regard-meta"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "script":
            self.inside = found.get("id") or "program"
        elif tag == "style":
            self.inside = "style"
        elif tag == "meta" and found.get("http-equiv") == "Content-Security-Policy":
            self.policy = {part.split()[0]: part for part in (found["content"] or "").split("; ")}

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "program":
            self.program += data
        elif self.inside == "style":
            self.style += data
        elif self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def layer(self, run: int, number: int) -> tuple[dict[str, Any], bytes]:
        said = self.meta["runs"][run]["layers"][number]
        blob = self.scripts.get(f"blob-{said['blob']}") if "blob" in said else None
        return said, zlib.decompress(base64.b64decode(blob)) if blob else b""


def whole(data: bytes, piece: dict[str, Any]) -> Tensor:
    """Low bytes of all numbers, then the next bytes of all."""
    count, size = math.prod(piece["shape"]), piece["bits"] // 8
    parts = torch.tensor(memoryview(data)[piece["at"] : piece["at"] + size * count]).view(size, count)
    return sum(part.double() * 256**place for place, part in enumerate(parts)).view(piece["shape"])


def weights(data: bytes, piece: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Values, and how far the next code is away."""
    levels = 2 ** piece["bits"] - 1
    code = whole(data, piece)
    scale = torch.tensor(piece["scale"], dtype=torch.float64).view(-1, *[1] * (code.dim() - 1))
    return scale * (code / levels) ** 2, scale * (2 * code + 1) / levels**2


def signed(data: bytes, piece: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Values, and half of a step."""
    half = 2 ** (piece["bits"] - 1) - 1
    code = whole(data, piece)
    rows = math.prod(piece["shape"][:-1])
    scale = torch.tensor(struct.unpack_from(f"<{rows}f", data, piece["scales"]), dtype=torch.float64)
    scale = scale.view(*piece["shape"][:-1], 1)
    return scale * (code - half) / half, (0.51 * scale / half).expand(code.shape)


class Layers(nn.Module):
    def __init__(self, count: int, heads: int, width: int, kv_heads: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            regard.MultiHeadAttention(width, num_heads=heads, num_kv_heads=kv_heads or heads) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def seen_of(
    tokens: int, heads: int = 3, width: int = 15, layers: int = 2, keep: Any = "qkv", kv_heads: int | None = None
) -> Record:
    model = Layers(layers, heads, width, kv_heads)
    for parameter in model.parameters():
        parameter.data *= 2
    with regard.watch(model, keep=keep) as seen, torch.no_grad():
        model(torch.randn(1, tokens, width))
    return seen


@pytest.fixture(scope="module")
def short() -> Record:
    return seen_of(7)


@pytest.fixture(scope="module")
def grouped() -> Record:
    return seen_of(5, heads=6, width=42, kv_heads=2)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_value_is_within_a_step(bits: int) -> None:
    torch.manual_seed(bits)
    values = torch.cat([torch.rand(3, 500) ** 9, torch.tensor([[0.0, 1.0], [1e-30, 1e-3], [0.5, 0.25]])], 1)
    values = values / torch.tensor([[1.0], [7.0], [1e-20]])
    code, scale = codes(values, bits)
    assert int(code.min()) == 0
    assert int(code.max()) == 2**bits - 1
    off = (decoded(code, scale, bits).double() - values.double()).abs()
    assert bool((off <= step(code, scale, bits).double() * 1.0001).all())
    assert bool((decoded(code, scale, bits).amax(1) == values.amax(1)).all())  # the largest is exact
    small = values[0] < 1e-4  # and small ones have more of the codes: a linear code would round these to nothing
    assert float(step(code, scale, bits)[0][small].max()) < 2.1 * (1e-4**0.5) / (2**bits - 1)


def test_nothing_but_zeros() -> None:
    code, scale = codes(torch.zeros(2, 3, 3), 8)
    assert int(code.max()) == 0
    assert bool((decoded(code, scale, 8) == 0).all())


def test_every_weight_is_in_the_file(short: Record) -> None:
    read = Reader(page(short, list("abcdefg")))
    assert read.meta["version"] == 1
    for number, layer in enumerate(short):
        said, data = read.layer(0, number)
        assert (said["name"], said["kind"], said["heads"], said["n"], said["m"]) == (layer.name, "self", 3, 7, 7)
        assert said["map"]["bits"] == 16
        found, steps = weights(data, said["map"])
        assert bool(((found - layer.weights(batch=0).double()).abs() <= steps).all())
        assert float(steps.max()) < 4e-5
        assert "crops" not in said
        for name in ("entropy", "peak", "distance"):
            assert said["measures"][name] == pytest.approx(layer.per_head(name).tolist(), rel=1e-5)
        assert said["baseline"]["entropy"] == pytest.approx(math.log(7), rel=1e-5)
        mass = torch.tensor(said["offsets"]["mass"])
        assert mass[:, said["offsets"]["before"]].tolist() == pytest.approx(said["measures"]["itself"], rel=1e-4)
    text = read.meta["runs"][0]["texts"]
    assert text == [{"tokens": list("abcdefg"), "special": [], "word": list(range(7))}]


def test_vectors_are_in_the_file(grouped: Record) -> None:
    """q, k, v, output, input, result; norms and cosines of what each head adds; heads that share k and v."""
    read = Reader(page(grouped, list("abcde")))
    for number, layer in enumerate(grouped):
        said, data = read.layer(0, number)
        flow = said["flow"]
        assert {name: flow[name] for name in ("head_dim", "value_dim", "kv_heads", "width", "first")} == {
            "head_dim": 7,
            "value_dim": 7,
            "kv_heads": 2,
            "width": 42,
            "first": 0,
        }
        added = layer.projected()[0]
        assert layer.projection is not None
        bias = 0 if layer.projection[1] is None else layer.projection[1]
        exact = {
            "q": layer.q[0],
            "k": layer.k[0],
            "v": layer.v[0],
            "output": layer.output[0],
            "input": layer.input[0],
            "result": added.sum(0) + bias,
            "cosines": torch.nn.functional.cosine_similarity(added, added.sum(0), dim=-1),
        }
        for name, value in exact.items():
            found, half = signed(data, flow[name])
            assert bool(((found - value.double()).abs() <= half + 1e-6).all()), name
        norms, steps = weights(data, flow["norms"])
        assert bool(((norms - added.norm(dim=-1).double()).abs() <= steps + 1e-6).all())


@pytest.fixture(scope="module")
def long() -> Record:
    return seen_of(331, heads=2, width=10, layers=1)


def test_a_pooled_map_with_crops_and_links(long: Record) -> None:
    read = Reader(page(long, limit=400_000))
    said, data = read.layer(0, 0)
    exact = long[0].weights(batch=0).double()
    _, rows, cols = said["map"]["shape"]
    assert rows == cols < 331
    assert rows & (rows - 1) == 0  # a power of two
    cells, steps = weights(data, said["map"])
    to = torch.arange(331) * rows // 331
    sums = torch.zeros(2, rows, cols, dtype=torch.float64)
    for q in range(331):
        sums[:, to[q]].index_add_(1, to, exact[:, q])
    means = sums / torch.bincount(to)[:, None]
    assert bool(((cells - means).abs() <= steps).all())
    assert {crop["head"] for crop in said["crops"]} == {0, 1}
    for crop in said["crops"]:
        part, near = weights(data, crop)
        r, c = crop["row"], crop["col"]
        wanted = exact[crop["head"], r : r + 64, c : c + 64]
        assert part[0].shape == wanted.shape == (64, 64)
        assert bool(((part[0] - wanted).abs() <= near[0]).all())
    places = [(crop["head"], crop["row"], crop["col"]) for crop in said["crops"]]
    for i, (head, r, c) in enumerate(places):  # none is there twice, in part
        apart = [abs(r - r2) >= 32 or abs(c - c2) >= 32 for h2, r2, c2 in places[:i] if h2 == head]
        assert all(apart)
    keys = whole(data, said["links"]["keys"]).long()
    strong, near = weights(data, said["links"]["weights"])
    count = keys.shape[2]
    assert count >= 1
    top = exact.topk(count, dim=2)
    assert bool((keys[:, :, 0] == top.indices[:, :, 0]).all())
    assert bool(((strong - top.values).abs() <= near).all())


@pytest.mark.parametrize("keep, has", [(None, []), ("qk", ["map"]), ("qkv", ["flow", "map"])])
def test_what_was_not_kept_is_not_there(keep: Any, has: list[str]) -> None:
    read = Reader(page(seen_of(5, keep=keep)))
    said, data = read.layer(0, 1)
    assert sorted(name for name in ("map", "flow") if name in said) == has
    assert bool(data) == bool(has)
    assert len(said["measures"]["entropy"]) == 3


def test_the_policy(short: Record) -> None:
    """No script but this one, no style but this one, and nothing from anywhere."""
    html = page(short)
    read = Reader(html)

    def known(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert read.policy["default-src"] == "default-src 'none'"
    assert read.policy["script-src"] == f"script-src {known(read.program)}"
    assert read.policy["style-src"] == f"style-src {known(read.style)}"
    assert "connect-src" not in read.policy
    assert "unsafe" not in " ".join(read.policy.values())
    for tag, attributes in read.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset")], tag
        assert attributes.get("href") in (None, "#main", "data:,")
    assert set(re.findall(r"https?://[\w./-]*", html)) == {"http://www.w3.org/2000/svg"}


def test_a_served_page_may_ask_its_own_server(short: Record) -> None:
    made = document(packed(scenes(short), title="x", limit=10**6), live={"models": []})
    assert Reader(made).policy["connect-src"] == "connect-src 'self'"
    assert Reader(made).meta["live"] == {"models": []}


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "-->",
    "]]>",
    "\u2028\u2029",
    "a\nb",
    "\0",
    "\ud800",
    "&amp;",
    "\\",
]


def test_tokens_cannot_end_the_description() -> None:
    html = page(seen_of(len(HOSTILE)), HOSTILE, title="</title><script>alert(2)</script>")
    read = Reader(html)
    tokens = read.meta["runs"][0]["texts"][0]["tokens"]
    assert tokens[0] == HOSTILE[0]
    assert tokens[5:8] == ["a⏎b", "␀", "\\ud800"]
    assert tokens[8:] == ["&amp;", "\\"]
    assert [tag for tag, _ in read.tags].count("script") == 4  # the description, two layers, the program
    assert read.meta["title"] == "</title><script>alert(2)</script>"
    html.encode("utf-8")


def test_json_within_a_script() -> None:
    value = {"a": "</script>&\u2028\ud800", "b": [1.5, None]}
    made = as_json(value)
    assert not set("<>&\u2028\u2029") & set(made)
    assert json.loads(made)["b"] == [1.5, None]
    made.encode("utf-8")
    with pytest.raises(ValueError, match="JSON"):
        as_json(math.nan)


def test_titles(short: Record) -> None:
    assert Reader(page(short)).meta["title"] == "2 layers, 7 tokens"
    words = ["[CLS]", "the", "un", "##seen", "cat", "ran", "[SEP]"]
    assert Reader(page(short, words)).meta["title"] == "the unseen cat ran"
    assert Reader(page(short, words, title="Mine & yours")).meta["title"] == "Mine & yours"
    assert "<title>Mine &amp; yours</title>" in page(short, words, title="Mine & yours")
    many = seen_of(20)
    assert Reader(page(many, [f"w{i}" for i in range(20)])).meta["title"].endswith("w11 …")


def test_runs_by_name(short: Record, tmp_path: Path) -> None:
    other = seen_of(5)
    both = {"a": short, "b": other}
    tokens = {"a": list("abcdefg"), "b": list("vwxyz")}
    read = Reader(page(both, tokens, tmp_path / "both.html").read_text(encoding="utf-8"))
    assert [run["name"] for run in read.meta["runs"]] == ["a", "b"]
    assert [run["texts"][0]["tokens"] for run in read.meta["runs"]] == [list("abcdefg"), list("vwxyz")]
    for run, record in enumerate((short, other)):
        said, data = read.layer(run, 1)
        found, steps = weights(data, said["map"])
        assert bool(((found - record[1].weights(batch=0).double()).abs() <= steps).all())


def test_a_file_is_written_and_its_path_is_given_back(short: Record, tmp_path: Path) -> None:
    html = page(short, list("abcdefg"))
    assert html.startswith("<!doctype html>")
    for path in (tmp_path / "a.html", str(tmp_path / "b.html")):
        assert page(short, list("abcdefg"), path=path) == Path(path)
        assert Path(path).read_text(encoding="utf-8") == html


def test_one_text_of_a_batch() -> None:
    model = Layers(1, 3, 15)
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(torch.randn(2, 5, 15))
    said, data = (read := Reader(page(seen, [list("abcde"), list("vwxyz")], item=1))).layer(0, 0)
    found, steps = weights(data, said["map"])
    assert bool(((found - seen[0].weights(batch=1).double()).abs() <= steps).all())
    assert read.meta["runs"][0]["texts"][0]["tokens"] == list("vwxyz")
    output, half = signed(data, said["flow"]["output"])
    assert bool(((output - seen[0].output[1].double()).abs() <= half + 1e-6).all())


def test_more_precision_where_there_is_room(short: Record, long: Record) -> None:
    def planned(record: Record, limit: int) -> tuple[int, bool]:
        found = plan(list(scenes(record).values()), limit)
        return found.bits, found.cells is None

    assert planned(short, 15_000_000) == (16, True)
    assert planned(long, 15_000_000) == (16, True)
    assert planned(long, 1_000_000) == (8, True)  # 2 heads of 331 x 331 weights
    assert planned(long, 250_000) == (8, False)
    sizes = [len(page(long, limit=limit)) for limit in (400_000, 1_000_000, 5_000_000)]
    assert sizes == sorted(sizes)


def test_the_default_limit_holds_what_it_says() -> None:
    """12 x 6 heads at 4,096 tokens, counted without any compression: what is planned stays below 15 MB."""
    record = seen_of(64, heads=12, width=24, layers=6)
    drawn = list(scenes(record).values())
    for panel in drawn[0]:  # (the same, as if it had been longer)
        long_text = type(panel.queries).numbers(4096)
        panel.queries = panel.keys = long_text
    found = plan(drawn, 15_000_000)
    heads = 72
    cells = found.cells
    assert cells is not None
    crops = getattr(found, "crops", 3) * 64 * 64 * heads
    assert found.linked is None  # each query has its links
    links = found.links * 4096 * heads * 3
    added = 2 * getattr(found, "added", 4096) * heads * found.vector_bits // 8
    vectors = found.vectors * 6 * (4 * 24 + 2 * 24) * found.vector_bits // 8
    described = 72 * 500 + 4096 * 30 + 300_000  # heads, tokens, the program
    assert (cells**2 * heads + crops + links + added + vectors) * 4 / 3 + described < 15_000_000
    assert cells >= 256
    assert found.links >= 3


@pytest.mark.parametrize(
    "layers, heads, tokens, width", [(6, 12, 300, 24), (1, 1, 1000, 4), (2, 4, 400, 64), (2, 3, 701, 12)]
)
def test_the_limit_is_kept(layers: int, heads: int, tokens: int, width: int) -> None:
    """Whatever a page is made of; heads that look everywhere leave nothing to compress."""
    model = Layers(layers, heads, width)
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(torch.randn(1, tokens, width))
    for limit in (400_000, 1_000_000):
        assert len(page(seen, limit=limit).encode()) <= limit


def test_what_each_head_adds_is_there_for_the_last_tokens() -> None:
    record = seen_of(700, heads=12, width=24, layers=6)
    said, data = Reader(page(record, limit=400_000)).layer(0, 5)
    first = said["flow"]["added"]
    assert 0 < first < 700
    norms, steps = weights(data, said["flow"]["norms"])
    exact = record[5].projected()[0].norm(dim=-1).double()[:, first:]
    assert norms.shape == exact.shape
    assert bool(((norms - exact).abs() <= steps + 1e-6).all())


def test_a_text_too_long_for_a_link_of_each_query_has_some() -> None:
    """The strongest of each head. (So it is with 270 heads and 4,826 tokens in 15 MB.)"""
    record = seen_of(701, heads=6, width=12, layers=3)
    html = page(record, limit=400_000)
    assert len(html.encode()) <= 400_000
    read = Reader(html)
    for number, layer in enumerate(record):
        said, data = read.layer(0, number)
        links, exact = said["links"], layer.weights(batch=0).double()
        queries, keys = whole(data, links["queries"]).long(), whole(data, links["keys"]).long()
        strong, near = weights(data, links["weights"])
        heads, count = queries.shape
        assert heads == 6
        assert 100 < count < 701
        assert keys.shape == strong.shape == (6, count, 1)
        assert bool((queries.diff(dim=1) > 0).all())
        largest = exact.amax(2)  # of each query, (H, N)
        for head in range(heads):
            rest = torch.ones(701, dtype=torch.bool).index_fill_(0, queries[head], False)
            assert largest[head, rest].max() <= largest[head, queries[head]].min() + 2e-3  # (scores are large)
            found = exact[head, queries[head]].gather(1, keys[head])[:, 0]
            torch.testing.assert_close(found, largest[head, queries[head]], atol=2e-3, rtol=0)
            assert bool(((strong[head, :, 0] - largest[head, queries[head]]).abs() <= near[head, :, 0] + 2e-3).all())


def test_progress_rises_to_1_and_says_so_at_the_end(short: Record) -> None:
    heard: list[float] = []
    page({"a": short, "b": seen_of(5, layers=3)}, progress=heard.append)
    roles = [1 / 8, 1 / 4, 1 / 4 + 1 / 12, 1 / 4 + 2 / 12, 1 / 2]
    maps = [1 / 2 + share / 2 for share in roles]
    assert heard == pytest.approx([*roles, *maps, 1.0])  # (these two have other layers, and are not compared)


def test_what_is_no_number_is_said_to_be_none() -> None:
    """Not nothing: a mean of 0 would be believed."""
    layer = regard.MultiHeadAttention(8, num_heads=2)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(torch.full((1, 3, 8), math.nan))
    said, _ = Reader(page(seen, list("abc"))).layer(0, 0)
    assert said["measures"]["entropy"] == [None, None]
    assert said["map"]["scale"] == [None, None]


def test_half_a_letter_in_a_title(short: Record, tmp_path: Path) -> None:
    page(short, path=tmp_path / "half.html", title="a\ud800b")
    assert Reader((tmp_path / "half.html").read_text(encoding="utf-8")).meta["title"].startswith("a")


def test_long_tokens_are_cut(short: Record) -> None:
    tokens = Reader(page(short, ["x" * 10_000] * 7)).meta["runs"][0]["texts"][0]["tokens"]
    assert tokens[0] == "x" * 399 + "…"


def test_errors(short: Record) -> None:
    with pytest.raises(ValueError, match=r"limit: expected at least 350000 bytes, received 1000"):
        page(short, limit=1000)
    with pytest.raises(TypeError, match=r"seen: expected a record, or a mapping of names to records, received list"):
        page([short])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seen: expected a record, or a mapping of names to records, received dict"):
        page({})
    with pytest.raises(ValueError, match=r"tokens: expected those of a, received b"):
        page({"a": short}, {"b": list("abcdefg")})
    with pytest.raises(ValueError, match=r"tokens: expected 7, for the queries of layers\.0, received 2"):
        page(short, ["a", "b"])
    with pytest.raises(ValueError, match=r"item: expected a text from 0 to 0, received 1"):
        page(short, item=1)
    with pytest.raises(TypeError, match=r"tokens: expected a list of tokens, received one string"):
        page(short, "abcdefg")


def test_a_notebook_shows_a_frame(short: Record) -> None:
    shown = notebook(short)
    assert re.fullmatch(r'<iframe srcdoc="[^"<>]*" [^<>]*sandbox="allow-scripts[^"]*"[^<>]*></iframe>', shown)
    assert "allow-same-origin" not in shown
