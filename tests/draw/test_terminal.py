"""The terminal drawing, read back: every shade against its weight, every line against the width."""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from draw.drawings import EDGES, WORDS, Stack, noise, pixels, places, record, rows_of, shown, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.draw.terminal.screen import CUBE, LEVELS, Screen, rgb
from regard.draw.terminal.views import terminal, terminal_text
from regard.heads import Record
from regard.measures import Heatmap


@pytest.mark.parametrize("ascii, shades", [(False, " ░▒▓█"), (True, " .:*#")])
def test_every_shade_is_that_of_its_weight(ascii: bool, shades: str) -> None:
    weights = noise(1, 3, 5, 5)
    seen = record(noise(1, 3, 5, 5, seed=1), weights)
    for head in range(3):
        drawn = terminal_text(seen, WORDS, layer=1, head=head, width=79, ascii=ascii)
        for i, line in enumerate(rows_of(drawn, WORDS)):
            cells = line.ljust(99)[7:17]  # after the longest word and two spaces
            assert cells == "".join(shades[bisect_right(EDGES, x)] * 2 for x in weights[0, head, i].tolist())
            assert not line[17:].strip()


@pytest.mark.parametrize("edge", EDGES)
def test_a_shade_begins_at_its_edge(edge: float) -> None:
    screen, near = Screen(), torch.tensor([edge - 1e-4, edge, edge + 1e-4])
    below, at, above = screen.levels(near)
    assert (below + 1, at) == (at, above)


@pytest.mark.parametrize("colorterm", ["truecolor", ""])
def test_every_colour_is_that_of_its_weight(colorterm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", colorterm)
    weights, visible = noise(1, 2, 5, 5), torch.ones(5, 5, dtype=torch.bool).tril()
    exact = torch.where(visible, weights, 0)
    exact = exact / exact.sum(-1, keepdim=True)
    drawn = terminal_text(record(weights, visible=visible), WORDS, layer=0, head=1, width=79, colour=True)
    for i, line in enumerate(rows_of(drawn, WORDS)):
        row = pixels(line)[7:27]  # four columns each, with the percentage
        for j, x in enumerate(exact[0, 1, i].tolist()):
            cell = row[4 * j : 4 * j + 4]
            colours = {back for _, _, back in cell}
            level = round(x**0.5 * 64), round(x**0.5 * 10)
            expected = f"2;{';'.join(map(str, rgb(level[0])))}" if colorterm else f"5;{CUBE[level[1]]}"
            assert colours == ({expected} if j <= i else set() if len(cell) == 0 else {""})
            number = "".join(c for c, _, _ in cell).strip()
            assert number == (f"{100 * x:.0f}" if x >= 0.005 else "")


@pytest.mark.parametrize("heads", [1, 7])
def test_half_blocks_hold_two_rows(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    weights, visible = noise(1, heads, 7, 7), torch.ones(7, 7, dtype=torch.bool).tril()
    exact = torch.where(visible, weights, 0)
    exact = exact / exact.sum(-1, keepdim=True)
    lines = terminal_text(record(weights, visible=visible), width=97, colour=True).splitlines()
    first = next(i for i, line in enumerate(lines) if shown(line).startswith("0 "))
    drawn = torch.full((heads, 8, 7), -1.0)
    for y, line in enumerate(lines[first : first + 4]):
        row = pixels(line)
        for head in range(heads):
            for x, (c, fore, back) in enumerate(row[2 + 8 * head : 9 + 8 * head]):
                above, below = {"▀": (fore, back), "▄": (back, fore), " ": (back, back)}[c]
                for half, colour in enumerate((above, below)):
                    drawn[head, 2 * y + half, x] = _level(colour)
    expected = torch.where(visible, (exact.sqrt() * 64).round(), -1)[0]
    assert torch.equal(drawn[:, :7], expected)
    assert (drawn[:, 7] == -1).all()  # half a line between two layers


def _level(colour: str) -> int:
    if not colour:
        return -1
    return next(level for level in range(LEVELS) if f"2;{';'.join(map(str, rgb(level)))}" == colour)


_SIZES = {n: record(noise(1, 3, n, n), noise(1, 2, n, n, seed=1)) for n in (1, 2, 7, 31)}
_PIECE = st.one_of(
    st.text(max_size=7),
    st.sampled_from(
        ["猫", "👨‍👩‍👧", "שלום", "\x1b[31m", "\x9b2J", "e\u0301", "\u202e", "नि", "🇩🇪", "x" * 99, "", "\n", "[SEP]"]
    ),
)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([*_SIZES]), st.integers(20, 130), st.booleans(), st.booleans())
def test_no_line_is_wider_than_the_terminal(data: Any, n: int, width: int, colour: bool, ascii: bool) -> None:
    tokens = data.draw(st.lists(_PIECE, min_size=n, max_size=n))
    layer, head = data.draw(st.sampled_from([(None, None), (0, None), (1, None), (0, 1), (-1, -1)]))
    drawn = terminal_text(_SIZES[n], tokens, layer=layer, head=head, width=width, colour=colour, ascii=ascii)
    for line in drawn.split("\n"):
        assert wide(shown(line)) <= width
        assert all(c.isprintable() for c in shown(line))
    assert colour or "\x1b" not in drawn
    assert not ascii or shown(drawn).isascii()


def test_maps_begin_at_one_column_whatever_the_labels() -> None:
    tokens = ["cat", "猫", "שלום", "e\u0301te\u0301", "👨‍👩‍👧", "x" * 10_000, "\x1b[31m"]
    drawn = terminal_text(record(places(7, [0] * 7)), tokens, layer=0, head=0)
    starts = {wide(line[: line.index("██")]) for line in drawn.splitlines() if "██" in line and "0.65" not in line}
    assert len(starts) == 1
    assert drawn.count("\n") < 50


def test_letters_too_wide_for_their_column_give_way_to_numbers() -> None:
    weights = places(13, [*range(12, -1, -1)])
    drawn = terminal_text(record(weights), ["猫"] * 13, layer=0, head=0, width=30)
    assert "Columns are numbered." in " ".join(drawn.split())
    assert f"\n{' ' * 17}111\n{' ' * 7}0123456789012\n" in drawn
    lines = [line for line in drawn.splitlines() if line.endswith("█") and "猫" in line]
    assert lines == [f"{i:>2} 猫  {' ' * (12 - i)}█" for i in range(13)]
    assert "numbered" not in terminal_text(record(weights), ["猫"] * 13, layer=0, head=0, width=50)


# The three views


def test_the_whole_model() -> None:
    n, rest = 11, noise(1, 4, 11, 11, sharp=0)
    heads = [
        places(n, [max(i - 1, 0) for i in range(n)]),
        places(n, [min(i + 1, n - 1) for i in range(n)]),
        places(n, [0] * n),
    ]
    seen = record(torch.cat([rest, heads[0]], 1), torch.cat([heads[1], heads[2], rest[:, :3]], 1))
    tokens = ["[CLS]", *"abcdefghi", "[SEP]"]
    drawn = terminal_text(seen, tokens, width=97)
    assert drawn.startswith("2 layers x 5 heads, 11 tokens\n[CLS] a b c d e f g h i [SEP]\n")
    table = [line.split() for line in drawn.splitlines() if re.match(r" *\d+\.\d ", line)]
    assert [row[:2] for row in table] == [["0.4", "previous"], ["1.0", "next"], ["0.0", "broad"], ["1.1", "resting"]]
    assert [float(row[2]) for row in table[:2]] == pytest.approx([1, 1], abs=0.005)
    assert (
        "What the heads do:\nHead 0.4 attends to the token before (1.00 of what it does beside resting, uniform"
        in drawn
    )
    assert "(0 have none)" in drawn
    titles = re.findall(r"layer \d head \d", drawn)
    assert titles == ["layer 0 head 4", "layer 1 head 0", "layer 0 head 0", "layer 1 head 1"]
    small = drawn[drawn.index("Every head") :].split("\n\n")[:2]
    assert [line[:1] for block in small for line in block.splitlines() if line[:1].isdigit()] == ["0", "1"]
    assert re.search(r"^ +0 +1 +2 +3 +4$", drawn, re.M)


def test_the_small_maps_are_of_the_right_heads() -> None:
    """Each head looks at one key: its column alone is dark."""
    n, layers, heads = 7, 3, 5
    weights = [
        torch.cat([places(n, [(3 * layer + head) % n] * n) for head in range(heads)], 1) for layer in range(layers)
    ]
    lines = terminal_text(record(*weights), width=80).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("0 "))
    for layer in range(layers):
        for row in range(4):
            line = lines[first + 5 * layer + row].ljust(80)
            for head in range(heads):
                start = 2 + 8 * head
                assert line[start : start + 7] == "".join(" █"[x == (3 * layer + head) % n] for x in range(n))


@cache
def _thirty_layers() -> Record:
    return record(*[noise(1, 9, 13, 13)] * 30)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_thirty_layers_are_compact(width: int, colour: bool) -> None:
    seen = _thirty_layers()
    drawn = shown(terminal_text(seen, width=width, colour=colour))
    below = drawn[drawn.index("across.") :]
    grid = re.split("What the heads do|The clearest|layer [0-9]+ head", below)[0].rstrip().splitlines()[1:]
    headers = [line.split() for line in grid if re.fullmatch(r"[ \d]+", line)]
    blocks = headers[0].count("0")  # of layers, side by side
    assert [int(head) for line in headers for head in line[: len(line) // blocks]] == [*range(9)]
    layers = [int(found[1]) for line in grid if (found := re.match(r" ?(\d+) ", line)) and line.split() not in headers]
    assert layers == [*range(30 // blocks)] * len(headers)
    assert len(grid) <= 64 or width < 80


@pytest.mark.parametrize("colour", [True, False])
def test_many_heads_on_one_token(colour: bool) -> None:
    drawn = shown(terminal_text(record(torch.ones(1, 113, 1, 1)), width=23, colour=colour))
    assert max(map(wide, drawn.split("\n"))) <= 23
    numbers = re.findall(r"\d+", " ".join(re.findall(r"^  [\d ]+$", drawn, re.M)))
    assert numbers[:113] == [str(i) for i in range(113)]


def test_one_layer_with_all_its_heads() -> None:
    seen = record(noise(1, 2, 5, 5), noise(1, 7, 5, 5, seed=1))
    drawn = terminal_text(seen, WORDS, layer="layers.1", width=80)
    assert drawn.startswith("layer 1, 7 heads: layers.1\nself attention, 5 tokens\n")
    assert re.findall(r"layer 1 head (\d)", drawn) == [*"0123456"]
    rows = [line.split() for line in drawn.splitlines()[-7:]]
    assert [row[0] for row in rows] == [*"0123456"]
    header = drawn.splitlines()[-8].split()
    entropy = -(seen[1].weights() * seen[1].weights().log()).sum(-1).mean((0, 2))
    numbers = [float(line[-len(header) + header.index("entropy")]) for line in rows]
    assert numbers == pytest.approx(entropy.tolist(), abs=0.006)
    assert terminal_text(seen, WORDS, layer=-1, width=80) == drawn == terminal_text(seen, WORDS, layer=1, width=80)


def links(drawn: str) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in drawn.splitlines() if "->" in line]


def test_the_strongest_links_in_words() -> None:
    tokens = ["[CLS]", "it", "was", "it", "[SEP]"]
    weights = torch.full((1, 1, 5, 5), 0.01)
    for (i, j), x in {(1, 2): 0.62, (2, 3): 0.31, (3, 3): 0.93, (0, 4): 0.96, (1, 0): 0.35, (2, 0): 0.66}.items():
        weights[0, 0, i, j] = x
    weights[0, 0, 4, 0] = 0.9
    weights = weights / weights.sum(-1, keepdim=True)
    seen = record(weights, measures=["entropy"])
    w = weights[0, 0]
    assert links(terminal_text(seen, tokens, layer=0, head=0)) == [
        f"it (3) -> it (3) {w[3, 3]:.2f}",
        f"it (1) -> was {w[1, 2]:.2f}",
        f"was -> it (3) {w[2, 3]:.2f}",
        f"[CLS] -> [SEP] {w[0, 4]:.2f}",
        f"[SEP] -> [CLS] {w[4, 0]:.2f}",
        f"was -> [CLS] {w[2, 0]:.2f}",
        f"it (1) -> [CLS] {w[1, 0]:.2f}",
    ]


def test_at_most_ten_links_and_the_strongest_of_a_long_text() -> None:
    n = 523  # more than are looked at at once
    weights = torch.full((1, 1, n, n), 1e-6)
    chosen = {(521 - 40 * i, 7 + 11 * i): 0.9 - 0.03 * i for i in range(13)}
    for (i, j), x in chosen.items():
        weights[0, 0, i, j] = x
    rest = [i for i in range(n) if i not in {i for i, _ in chosen}]
    weights[0, 0, rest] = 1 / n
    found = links(terminal_text(record(weights, measures=["entropy"]), layer=0, head=0))
    assert [one.rsplit(" ", 1)[0] for one in found] == [f"{i} -> {j}" for i, j in chosen][:10]


def test_a_sink_comes_after_the_words() -> None:
    weights = torch.full((1, 1, 7, 7), 0.01)
    weights[..., 0], weights[0, 0, 5, 3] = 0.5, 0.2
    found = links(terminal_text(record(weights / weights.sum(-1, keepdim=True)), layer=0, head=0))
    assert found[0].startswith("5 -> 3 ")
    assert all("-> 0 " in one for one in found[1:])


def test_faint_links_are_shown_where_there_are_no_others() -> None:
    found = links(terminal_text(record(torch.full((1, 1, 53, 53), 1 / 53)), layer=0, head=0))
    assert len(found) == 10
    assert all(one.endswith("0.02") for one in found)


# Long texts, other shapes, other records


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("head", [None, 0])
def test_a_long_text_is_pooled_and_says_so(head: int | None, colour: bool) -> None:
    n = 331
    seen = record(places(n, [0] * n))
    drawn = shown(terminal_text(seen, [f"w{i}" for i in range(n)], layer=0, head=head, width=83, colour=colour))
    assert "Pooled, 331 x 331 tokens to" in " ".join(drawn.split("\n"))
    ranges = [tuple(map(int, found)) for found in re.findall(r"^ *(\d+)-(\d+)  ", drawn, re.M)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n - 1
    assert all(b[0] == a[1] + 1 for a, b in pairwise(ranges))
    if not colour:
        rows = [line for line in drawn.splitlines() if re.match(r" *\d+-\d+  ", line)]
        assert {line[9:].rstrip() for line in rows} == {"█"}  # all look at the first


def test_pooled_columns_are_sums() -> None:
    """Equal weights on 331 keys: every one of c columns has 1 / c of the weight, whatever the rows."""
    drawn = terminal_text(record(torch.full((1, 1, 331, 331), 1 / 331)), layer=0, head=0, width=27)
    rows = [line[9:] for line in drawn.splitlines() if re.match(r" *\d+-\d+  ", line)]
    assert set(rows) == {"░" * 18}  # 1 / 18 is over 0.05


def test_cross_attention_and_a_pair_of_texts() -> None:
    weights = torch.zeros(1, 2, 3, 11)
    weights[0, :, [0, 1, 2], [10, 5, 0]] = 1
    seen = record(weights)
    source, target = [f"s{i}" for i in range(11)], ["x", "y", "z"]
    seen[0].kind = "cross"  # (three queries on eleven keys may as well be the end of a text)
    drawn = terminal_text(seen, (source, target), layer=0, head=1, width=60)
    assert "cross attention, 3 x 11 tokens" in drawn
    assert rows_of(drawn, target) == ["x" + " " * 22 + "██", "y" + " " * 12 + "██", "z" + " " * 2 + "██"]
    assert links(drawn) == ["x -> s10 1.00", "y -> s5 1.00", "z -> s0 1.00"]
    assert "cross" in terminal_text(seen, (source, target), width=60).splitlines()[0]


def test_one_item_of_a_batch() -> None:
    weights = torch.cat([places(5, [0] * 5), places(5, [4, 3, 2, 1, 0]), places(5, [2] * 5)])
    seen = record(weights)
    for item, keys in enumerate(([0] * 5, [4, 3, 2, 1, 0], [2] * 5)):
        texts = [[f"{c}{word}" for word in WORDS] for c in "abc"]
        drawn = terminal_text(seen, texts, item=item, layer=0, head=0, width=60)
        rows = rows_of(drawn, texts[item])
        assert [line.index("█") - 8 for line in rows] == [2 * key for key in keys]
        assert f"Text {item} of 3 in the batch." in drawn


def test_several_texts_one_after_another() -> None:
    model = Stack(1)
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model((noise(1, 2, 5, 5),))
        model((noise(1, 2, 7, 7),))
    drawn = terminal_text(seen)
    assert "1 layer x 2 heads, 7 tokens" in drawn
    assert "The last of 2 batches." in drawn


def test_without_tokens_they_are_numbered() -> None:
    drawn = terminal_text(record(places(3, [1, 1, 1])), layer=0, head=0)
    assert "\n   0 1 2\n0    ██\n1    ██\n2    ██\n" in drawn
    named = record(places(3, [1, 1, 1]))
    named.tokens = ["a", "b", "c"]
    assert "\n   a b c\na    ██\nb    ██\nc    ██\n" in terminal_text(named, layer=0, head=0)


def test_a_record_from_a_file_has_its_heatmap(tmp_path: Path) -> None:
    n = 61
    for name, cells in (("exact", 61), ("pooled", 13)):
        record(places(n, [n - 1] * n), measures=["entropy", Heatmap(cells)]).save(tmp_path / name)
        seen = Record.load(tmp_path / name)
        drawn = terminal_text(seen, layer=0, head=0, width=80)
        rows = [line[7:].rstrip() for line in drawn.splitlines() if re.match(r" *\d+(-\d+)?  +█", line)]
        assert len(rows) == cells
        assert {row.strip() for row in rows} == {"█"}
        assert ("keep=" in drawn) == (name == "pooled")
        assert bool(links(drawn)) == (name == "exact")
        assert "Every head" in terminal_text(seen)


def test_a_pooled_heatmap_is_pooled_once_more(tmp_path: Path) -> None:
    n, stored, cells = 131, 37, 24
    record(places(n, [0] * n), measures=["entropy", Heatmap(stored)]).save(tmp_path / "record")
    drawn = terminal_text(Record.load(tmp_path / "record"), layer=0, head=0, width=30)
    of_cell: dict[int, list[int]] = {}
    for i in range(n):
        of_cell.setdefault(i * stored // n * cells // stored, []).append(i)
    ranges = re.findall(r"^ *(\d+)-(\d+)  ", drawn, re.M)
    assert ranges == [(str(of_cell[cell][0]), str(of_cell[cell][-1])) for cell in range(cells)]


def test_a_layer_that_looks_across() -> None:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(14, num_heads=2)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(torch.randn(1, 3, 14), torch.randn(1, 11, 14))
    drawn = terminal_text(seen, ([*"abcdefghijk"], [*"xyz"]), width=60)
    assert drawn.startswith("1 layer (1 of them cross) x 2 heads, 3 x 11 tokens\na b c d e f g h i j k\nx y z\n")
    assert drawn.count("x  ") == 1  # both maps stand beside the same tokens


# What the caller got wrong


@pytest.mark.parametrize(
    "options, error, words",
    [
        (
            {"layer": 2},
            ValueError,
            "layer: expected a number from 0 to 1, or one of the names, received 2; remedy: "
            "seen.layers: layers.0, layers.1",
        ),
        ({"layer": -3}, ValueError, "layer: expected a number from 0 to 1, .* received -3"),
        ({"layer": "layer.9"}, ValueError, "layer: expected a number .* received 'layer.9'"),
        ({"layer": 1.0}, TypeError, r"layer: expected a name or a number, received 1\.0"),
        ({"layer": True}, TypeError, "layer: expected a name or a number, received True"),
        ({"layer": 0, "head": 3}, ValueError, r"head: expected a number from 0 to 2, of layers\.0, received 3"),
        ({"layer": 0, "head": -4}, ValueError, r"head: expected a number from 0 to 2, of layers\.0, received -4"),
        ({"layer": 0, "head": "0"}, TypeError, "head: expected a number, received '0'"),
        ({"head": 1}, ValueError, "head: expected a layer with it, received head=1 alone; remedy: layer=0"),
        ({"width": 19}, ValueError, "width: expected at least 20 columns, received 19"),
        ({"width": 80.0}, TypeError, r"width: expected a number of columns, received 80\.0"),
        ({"item": 1}, ValueError, "item: expected a text from 0 to 0, received 1"),
    ],
)
def test_what_the_caller_got_wrong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    seen = record(*[noise(1, 3, 5, 5)] * 2)
    with pytest.raises(error, match=words):
        terminal_text(seen, WORDS, **options)
    with pytest.raises(error, match=words):
        terminal(seen, WORDS, file=io.StringIO(), **options)


def test_a_colour_that_is_none() -> None:
    with pytest.raises(TypeError, match="colour: expected True, False or None, received 'red'"):
        terminal(record(noise(1, 3, 5, 5)), colour="red", file=io.StringIO())  # type: ignore[arg-type]


def test_a_record_without_maps() -> None:
    with pytest.raises(ValueError, match=r'record: expected one that kept q and k.*remedy: watch\(model, keep="qk"\)'):
        terminal_text(record(noise(1, 3, 5, 5), keep=None))
