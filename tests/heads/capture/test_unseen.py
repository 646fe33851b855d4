"""The record names the layers that computed attention which a watch could not read, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads.oracle_hands import B, Hand, N, W, by_operator, drawn, made, noise
from torch import Tensor, nn

import regard
from regard.heads import Record


def test_layers_not_seen_are_named_by_record_terminal_and_file(tmp_path: Path) -> None:
    model = made(Hand(by_operator))
    watching = regard.watch(model, keep="qk")
    with torch.no_grad(), watching as seen:
        model(noise(B, N, W))
        assert repr(seen) == "Record of 1 layers"
        watching.not_seen("head", "its weights are written by hand")
        watching.not_seen("head", "another reason")
    assert seen.unseen == {"head": "its weights are written by hand"}
    assert repr(seen) == "Record of 1 layers; not seen: head"
    assert "Not seen: head." in regard.draw.terminal_text(seen)
    seen.save(tmp_path / "record")
    assert Record.load(tmp_path / "record").unseen == seen.unseen


def test_many_layers_not_seen_are_counted() -> None:
    seen = Record()
    seen.unseen = {f"layer.{i}": "why" for i in range(7)}
    assert repr(seen).endswith("not seen: layer.0, layer.1, layer.2, layer.3, layer.4 and 2 more")


def test_layers_that_were_not_asked_for_are_not_named() -> None:
    model = made(Hand(by_operator))
    watching = regard.watch(model, layers=["layer"])
    with torch.no_grad(), watching as seen:
        model(noise(B, N, W))
        watching.not_seen("head", "why")
    assert seen.unseen == {}


def test_a_watch_that_saw_nothing_gives_the_reasons() -> None:
    model = made(Hand(by_operator))
    watching = regard.watch(model)
    with pytest.raises(ValueError, match=r"saw none: layer: in a language of its own"), watching:
        watching.not_seen("layer", "in a language of its own")


def test_an_ablation_of_a_layer_that_could_not_be_read_says_why() -> None:
    model = made(Hand(by_operator))
    ablating = regard.ablate(model, {"head": [0]})
    ablating.not_seen("head", "in a language of its own")
    with pytest.raises(ValueError, match=r"received 'head' \(in a language of its own\)"), torch.no_grad(), ablating:
        model(noise(B, N, W))


class Windows(nn.Module):
    """As Swin: the first layer looks within windows, which it folds into the batch; the second at everything."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = drawn(Hand(by_operator)), drawn(Hand(by_operator))

    def forward(self, x: Tensor) -> Tensor:
        x = self.near(x.unflatten(1, (-1, 5)).flatten(0, 1)).view_as(x)
        return self.far(x)


def test_layers_that_differ_in_the_number_of_texts_say_so() -> None:
    model = Windows()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(noise(B, 15, W))
    words = f"ayers had from {B} to {3 * B} texts in a batch"
    assert repr(seen).endswith(f"; l{words}")
    assert f"L{words}" in regard.draw.terminal_text(seen, width=200)
    near = regard.heads.Record()
    near.by_name = {"near": seen["near"], "again": seen["near"]}
    assert near.texts_differ() == ""


def test_rollout_through_layers_that_differ_is_refused() -> None:
    model = Windows()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(noise(B, 5, W))
        model.near(noise(3 * B, 5, W))
    assert repr(seen).endswith(f"layers had from {B} to {3 * B} texts in a batch and from 1 to 2 batches")
    with pytest.raises(ValueError, match=f"expected the same texts in all layers, received layers had from {B} to"):
        seen.rollout()
