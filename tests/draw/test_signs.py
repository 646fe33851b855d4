"""Roles have the same colour and sign on the page and in figures."""

from __future__ import annotations

import re
from importlib.resources import files

from regard.draw.figure.legends import SIGNS
from regard.heads import ROLES


def test_the_page_and_figures_agree_on_roles() -> None:
    script = (files("regard.draw.page") / "app" / "colour.js").read_text(encoding="utf-8")
    table = script.split("const ROLES = {")[1].split("};")[0]
    found = re.findall(r'"?([\w-]+)"?: \["(#\w+)", "(.)"\]', table)
    assert {role: (sign, colour) for role, colour, sign in found} == SIGNS
    assert set(SIGNS) == {rule.name for rule in ROLES}
