"""What a look gives: what `read` gives, and exact crops."""

from __future__ import annotations

import base64
import zlib

import pytest
import torch
from serve.serving import LONG, WORDS, live, served, tiny, values

import regard
from regard import models
from regard.draw.look import read
from regard.draw.page.numbers import step
from regard.serve.requests import Limits, LookRequest
from regard.serve.results import run_look, tensor_bytes


def test_a_look_gives_what_reading_gives(client):
    text = "the cat ran away over the hill"
    page = client.page(client.look(text))
    seen = read(tiny(), None, text)
    (run,) = page["meta"]["runs"]
    assert run["texts"][0]["tokens"] == text.split()
    assert (page["meta"]["title"], page["meta"]["model"], page["meta"]["generated"]) == (text, "tiny", None)
    for number_, layer in enumerate(run["layers"]):
        piece, data = layer["map"], zlib.decompress(base64.b64decode(page["blobs"][layer["blob"]]))
        torch.testing.assert_close(values(piece, data), seen[number_].weights(batch=0), atol=2e-5, rtol=1e-3)


def test_what_is_generated_is_part_of_the_answer(client):
    page = client.page(client.look("the cat ran", generate=5))
    written = read(tiny(), None, "the cat ran", generate=5).generated
    assert written is not None
    assert written.strip() == tiny().generate("the cat ran", 5).strip()
    assert page["meta"]["generated"] == written
    assert page["meta"]["title"] == f"the cat ran → {written.strip()}"
    assert len(page["meta"]["runs"][0]["texts"][0]["tokens"]) == 3 + 5 - 1  # the last is written, not read


def test_a_crop_is_exact(client):
    job = client.look(LONG, generate=3)
    page = client.page(job)
    n = page["meta"]["runs"][0]["layers"][1]["n"]
    assert page["meta"]["runs"][0]["layers"][1]["map"]["shape"][1] < n  # pooled
    seen = read(tiny(), None, LONG, generate=3)
    for layer, head, r, c in [(0, 0, (0, 7), (0, 5)), (1, 2, (100, 222), (3, 205)), (1, 1, (n - 1, n), (n - 1, n))]:
        rows, cols = f"{r[0]}-{r[1]}", f"{c[0]}-{c[1]}"
        crop = client.ask("GET", f"/api/jobs/{job}/crop?layer={layer}&head={head}&rows={rows}&cols={cols}").json
        exact = seen[layer].weights(head, slice(*r), slice(*c), batch=0)
        assert (crop["head"], crop["row"], crop["col"], crop["bits"]) == (head, r[0], c[0], 16)
        assert crop["shape"] == [1, *exact.shape]
        found = values(crop, base64.b64decode(crop["data"]))[0]
        code = (found / crop["scale"][0]).sqrt() * 65535
        assert (found - exact).abs().le(step(code[None], torch.tensor(crop["scale"]), 16)[0] + 1e-12).all()
    assert exact.item() > 0


def test_a_text_of_more_tokens_than_the_model_reads_fails_and_says_so(client):
    now = client.until(client.look(" ".join(WORDS * 3), "small"))
    assert now["state"] == "failed"
    many = 3 * len(WORDS)
    assert (
        now["message"]
        == f"text: expected at most 31 tokens, as many as small reads, received {many}; remedy: a shorter text"
    )


def test_a_server_may_read_less_than_its_models():
    with served({"tiny": tiny()}, tokens=10) as client:
        said = client.until(client.look("the cat ran", generate=8))["message"]
        assert said == (
            "text: expected at most 10 tokens, as many as this server reads, received 3 and 8 to generate; "
            "remedy: a shorter text, or `regard serve --tokens` with a larger number"
        )
        assert client.until(client.look("the cat", generate=8))["state"] == "done"


def test_what_a_result_holds_is_counted_and_what_no_crop_needs_is_let_go_of():
    model, told = tiny(), []
    result = run_look(model, None, LookRequest(LONG, "tiny"), Limits(), lambda share, said: told.append((share, said)))
    assert result.scene is not None
    layers, heads, n, width = 2, 3, 220, 4
    q_and_k = 2 * layers * heads * n * width * 4
    measured = 30 * layers * heads * n * 4  # less than thirty numbers for each query
    assert q_and_k < result.size - len(result.page) < q_and_k + measured
    assert tensor_bytes(result.scene.record) == result.size - len(result.page)
    assert not any(layer.keeps_values or layer.projection for layer in result.scene.record)
    assert told == sorted(told, key=lambda one: one[0])
    assert {said for _, said in told} == {"reading", "drawing"}


@pytest.mark.skipif(models.EMBEDDED["minilm"].installed() is None, reason=models.EMBEDDED["minilm"].install)
def test_a_real_model_is_served():
    with served(["minilm"]) as client:
        meta = live(client.ask("GET", "/").data)
        assert client.until(meta["live"]["job"], seconds=60)["state"] == "done"
        job = client.look("The cat that I saw yesterday ran away. " * 3, "minilm")
        page = client.page(job)
        assert page["meta"]["runs"][0]["texts"][0]["tokens"][:3] == ["[CLS]", "the", "cat"]
        crop = client.ask("GET", f"/api/jobs/{job}/crop?layer=5&head=11&rows=1-9&cols=0-27").json
        seen = read(models.load("minilm"), None, "The cat that I saw yesterday ran away. " * 3)
        exact = seen[5].weights(11, slice(1, 9), slice(0, 27), batch=0)
        torch.testing.assert_close(values(crop, base64.b64decode(crop["data"]))[0], exact, atol=1e-5, rtol=1e-3)
        words = client.until(client.look("the cat ran away " * 200, "minilm"))["message"]
        assert words == (
            "text: expected at most 512 tokens, as many as minilm reads, received 802; remedy: a shorter text"
        )


def test_what_changes_without_any_head_is_computed_on_request(client):
    job = client.look("the cat ran over a hill")
    assert client.until(job)["state"] == "done"
    told = client.ask("GET", f"/api/jobs/{job}/page").json["meta"]["runs"][0]["effects"]
    answer = client.ask("POST", f"/api/jobs/{job}/without", {"layer": 1, "head": 2})
    assert answer.status == 202
    assert client.until(answer.json["job"])["state"] == "done"
    found = client.ask("GET", f"/api/jobs/{answer.json['job']}/page").json
    assert set(found["heads"]) == {"1.2"}
    assert (found["kind"], found["intact"]) == (told["kind"], told["intact"])
    assert found["heads"]["1.2"]["change"] > 0
    model = tiny()
    with torch.no_grad(), regard.ablate(model, {"blocks.1.attention": [2]}):
        without = model(model.encode("the cat ran over a hill"))[0, -1].softmax(-1)
    assert found["heads"]["1.2"]["top"][0][1] == pytest.approx(without.max().item(), rel=1e-3)


@pytest.mark.parametrize(
    "body, words",
    [
        ({"layer": 2, "head": 0}, "layer: expected a number from 0 to 1, received 2"),
        ({"layer": 0, "head": 3}, "head: expected a number from 0 to 2, received 3"),
        ({"layer": 0, "head": True}, "head: expected a number from 0 to 2, received True"),
        ({"layer": 0}, "body: expected an object with layer and head"),
    ],
)
def test_heads_that_are_not_there(client, body, words):
    job = client.look("the cat ran")
    assert client.until(job)["state"] == "done"
    answer = client.ask("POST", f"/api/jobs/{job}/without", body)
    assert answer.status == 422
    assert words in answer.json["error"]
