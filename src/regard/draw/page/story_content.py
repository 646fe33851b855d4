"""The story of a scene as a page carries it, and what changes without its heads (docs/page.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from regard.draw.effects import LONGEST, Effect, Effects, effects, is_causal
from regard.draw.page.numbers import round_to
from regard.draw.scene import Panel, Scene
from regard.draw.story import Card, story
from regard.draw.story.cards import KINDS, named

__all__ = ["effect_json", "effects_json", "story_content"]


def story_content(scene: Scene) -> dict[str, Any]:
    """The story of one text; and, of a text that is not long and whose model is still there, what changes without each
    of its heads."""
    told = story(scene)
    cards = [_card(card, scene[card.layer]) for card in told.cards]
    content: dict[str, Any] = {"story": {"cards": cards, "absent": told.absent}}
    content["causal"] = is_causal(scene.record)
    found = _effects(scene, {(card.layer, card.head) for card in told.cards})
    return content | ({"effects": effects_json(found)} if found is not None else {})


def _card(card: Card, panel: Panel) -> dict[str, Any]:
    tokens = {"query": panel.queries.text, "key": panel.keys.text}
    parts = card.parts()
    return {
        "kind": card.kind,
        "name": KINDS[card.kind],
        "role": card.role,
        "layer": card.layer,
        "head": card.head,
        "sentence": [p if isinstance(p, str) else [p[0], *p[1], named(tokens[p[0]], p[1])] for p in parts],
        "links": [[*link.query, *link.key, round_to(link.weight, 4)] for link in card.links],
    }


def _effects(scene: Scene, heads: Iterable[tuple[int, int]]) -> Effects | None:
    again = scene.record.rerun
    if again is None or max(max(panel.shape) for panel in scene) > LONGEST:
        return None
    return effects(again, scene.record, sorted(heads), scene[0].item)


def effects_json(found: Effects) -> dict[str, Any]:
    """What changes without each of some heads, as the page has it."""
    heads = {f"{layer}.{head}": effect_json(effect) for (layer, head), effect in found.heads.items()}
    return {"kind": found.kind, "intact": effect_json(found.intact), "heads": heads}


def effect_json(effect: Effect) -> dict[str, Any]:
    """The most probable next tokens of one run, and its change."""
    return {"top": [[token, round_to(p, 4)] for token, p in effect.top], "change": round_to(effect.change, 4)}
