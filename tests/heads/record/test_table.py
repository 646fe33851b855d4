"""Tables of heads as a notebook and a console show them."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import regard
from regard.heads import Attribution, Importance, Role, Roles, Table
from regard.heads.record.table import MOST_ROWS

pytestmark = pytest.mark.on_device


class Cells(HTMLParser):
    """The rows of an HTML table, and every tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.text = ""
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data
        else:
            self.text += data


SCORES = {"enc.a": torch.tensor([0.5, -2.0]), "dec.b": torch.tensor([1.0])}


def test_a_record() -> None:
    """Each layer's number, by which `seen[0]` and `ablate` know it, stands beside its name."""
    encoder = torch.nn.Sequential(*(regard.MultiHeadAttention(6, num_heads=3) for _ in range(2)))
    with torch.no_grad(), regard.watch(encoder, measures=["entropy", "peak"]) as seen:
        encoder(torch.randn(1, 5, 6))
    found = Cells(seen.table()._repr_html_())
    assert found.rows[0] == ["number", "layer", "head", "entropy", "peak"]
    assert [row[:3] for row in found.rows[1:]] == [[str(i), str(i), str(h)] for i in range(2) for h in range(3)]
    assert found.rows[2][3] == f"{seen[0].entropy[0, 1].mean():.3f}"
    assert repr(seen.table()) == str(seen.table())


def test_attribution_and_importance() -> None:
    said = Cells(Attribution(SCORES, rest=3.25, logit=2.75, target=7)._repr_html_())
    assert said.text == "logit 2.750 of token 7, of which 3.250 is not the heads'"
    assert said.rows == [
        ["number", "layer", "head", "adds"],
        ["0", "enc.a", "1", "-2.000"],
        ["1", "dec.b", "0", "1.000"],
        ["0", "enc.a", "0", "0.500"],
    ]
    found = Importance(SCORES, examples=3)
    assert Cells(found._repr_html_()).rows[1] == ["1", "dec.b", "0", "1.000"]
    assert repr(found) == str(found)
    assert repr(found).splitlines()[0].split() == ["layer", "head", "importance"]


def test_roles() -> None:
    roles = Roles([Role("b", 1, "previous", 0.7, 0.1, 0.5, ["local"]), Role("b", 2, None)])
    roles.layers = ["a", "b"]
    found = Cells(roles._repr_html_())
    assert found.text == "1 of 2 heads have a role, 1 one beside resting and looking everywhere"
    assert found.rows[1] == ["1", "b", "1", "previous", "0.700", "0.100", "0.500", "", "1.000", "local"]
    assert repr(roles) == str(roles)
    assert isinstance(roles, list)
    assert (
        Cells(Roles()._repr_html_()).text
        == "0 of 0 heads have a role, 0 one beside resting and looking everywhere(no rows)"
    )


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b <b>"])
def test_everything_is_escaped(hostile: str) -> None:
    for shown in (Table([{"layer": hostile, hostile: hostile}], [hostile]), Importance({hostile: torch.ones(1)}, 1)):
        found = Cells(shown._repr_html_())
        assert set(found.tags) <= {"div", "p", "table", "tr", "th", "td"}
        assert found.rows[1][1] == hostile


def test_without_layers_there_are_no_numbers() -> None:
    rows = [{"layer": "a", "score": None}, {"layer": "b", "kind": "cross"}]
    assert Cells(Table(rows)._repr_html_()).rows == [["layer", "score", "kind"], ["a", "", ""], ["b", "", "cross"]]
    assert list(Table(rows)) == rows
    assert Table(rows) == rows


def test_a_long_table_is_cut() -> None:
    found = Cells(Table({"head": i} for i in range(MOST_ROWS + 7))._repr_html_())
    assert len(found.rows) == MOST_ROWS + 1
    assert found.text == "and 7 rows more"
