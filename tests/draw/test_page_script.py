"""The sources of the page's script: what they must not contain, and roles as in figures."""

from __future__ import annotations

import re
from importlib.resources import files

from regard.draw.figure.legends import CLASS, OFFSET, RELATION, SIGNS
from regard.draw.page import SCRIPTS
from regard.heads import ROLES
from regard.heads.analysis.syntax.report import ROLES as RELATIONS
from regard.heads.record.table import NAMED_OFFSETS
from regard.measures.run import DEFAULT, NAMED


def test_the_page_and_figures_agree_on_roles() -> None:
    script = (files("regard.draw.page") / "app" / "colour.js").read_text(encoding="utf-8")
    table = script.split("const ROLES = {")[1].split("};")[0]
    found = re.findall(r'"?([\w -]+)"?: \["(#\w+)", "(.)"\]', table)
    assert {role.strip(): (sign, colour) for role, colour, sign in found} == SIGNS
    assert set(SIGNS) <= {rule.name for rule in ROLES}
    for name, (sign, colour) in (("OFFSET", OFFSET), ("CLASS", CLASS), ("RELATION", RELATION)):
        assert f'const {name} = ["{colour}", "{sign}"]' in script


def test_every_role_and_measure_is_explained() -> None:
    script = (files("regard.draw.page") / "app" / "glossary.js").read_text(encoding="utf-8")

    def words(name: str) -> dict[str, str]:
        table = script.split(f"const {name} = {{")[1].split("\n};")[0]
        return dict(re.findall(r'^  "?([\w -]+?)"?:\s+"(.+)",$', table, re.MULTILINE))

    roles, measures = words("ROLE_WORDS"), words("MEASURE_WORDS")
    offsets = {rule.name for rule in ROLES if rule.name.startswith("offset ")}  # by a rule of their own
    named = {rule.name for rule in ROLES} | {role for role in RELATIONS.values() if " and " not in role}
    assert named - offsets - set(roles) == set()
    assert set(DEFAULT) | set(NAMED_OFFSETS) | {"induction", "duplicate"} <= set(measures)
    assert set(NAMED) - set(measures) == set()
    assert all(text.endswith(".") and len(text.split()) > 2 for text in (*roles.values(), *measures.values()))


def test_the_program_makes_no_html_of_strings() -> None:
    """Every text by textContent; no style attribute, which the policy forbids."""
    app = files("regard.draw.page") / "app"
    sources = {file.name: file.read_text(encoding="utf-8") for file in app.iterdir()}
    assert sorted(sources) == sorted(f"{name}.js" for name in SCRIPTS)
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
        r"|createContextualFragment|setAttribute\(\"style\"|\bstyle: [\"`]|localStorage|sessionStorage|indexedDB"
        r"|XMLHttpRequest|WebSocket|sendBeacon"
    )
    for name, source in sources.items():
        assert not re.findall(banned, source), name
        assert ("fetch(" in source) == (name == "live.js"), name
        assert "</script" not in source.lower(), name


def test_no_literal_spans_lines() -> None:
    """Lines are stripped when they are put into the page: that would change a template literal of several lines."""
    for name in SCRIPTS:
        source = (files("regard.draw.page") / "app" / f"{name}.js").read_text(encoding="utf-8")
        assert [line for line in source.splitlines() if line.count("`") % 2 or line.endswith("\\")] == [], name
        assert "/*" not in source, name


def test_no_name_is_declared_twice_in_the_scope_of_all_scripts() -> None:
    """All scripts are one scope: a name that is declared twice would be a syntax error, and an empty page."""
    names: list[str] = []
    for name in SCRIPTS:
        script = (files("regard.draw.page") / "app" / f"{name}.js").read_text(encoding="utf-8")
        names += re.findall(r"^(?:async )?(?:const|let|class|function) (\w+)", script, re.MULTILINE)
    assert [name for name in names if names.count(name) > 1] == []


def test_styles_of_one_file_are_not_meant_by_another() -> None:
    """A class that two style files name without saying of which view would style both."""
    found: dict[str, set[str]] = {}
    for name in ("story", "words", "flow", "compare"):
        style = (files("regard.draw.page") / f"{name}.css").read_text(encoding="utf-8")
        for selector in re.findall(r"^(\.[\w-]+) \{", style, re.MULTILINE):
            found.setdefault(selector, set()).add(name)
    assert {selector: where for selector, where in found.items() if len(where) > 1} == {}
