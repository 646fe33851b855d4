"""One token through one layer, step by step: every number that the page shows beside the exact one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import Look, Written, stack, write
from browser.test_access import CONTRASTS
from torch import Tensor

import regard
from regard import masks
from regard.draw.page import _script, _style
from regard.heads import LayerRecord
from regard.kernels import reference
from regard.positions import Alibi, Rotary

pytestmark = pytest.mark.slow

PROGRAM = len(_style()) + len(_script())  # bytes of every page
WORDS = ["[CLS]", "the", "cat", "that", "i", "saw", "[SEP]"]
# of each key: what stands in its row
ROWS = "[...document.querySelectorAll('#flow-keys tbody tr[data-key]')].map(r => ({...r.dataset}))"
COLUMN = "[...document.querySelectorAll('#flow-column [data-value]')].map(r => +r.dataset.value)"


def layer_page(folder: Path, name: str, tokens: list[str] = WORDS, mask: Any = None, **options: Any) -> Written:
    """One layer of attention that has read a random text."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(36, num_heads=6, **options)
    for parameter in layer.parameters():
        parameter.data *= 1.5
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, len(tokens), 36), mask=mask)
    return write(folder / f"flow-{name}.html", seen, tokens)


@pytest.fixture(scope="module")
def everything(folder: Path) -> Written:
    """A layer with softcap, bias, mask and sinks, and heads that share keys."""
    options = {"softcap": 3.0, "sinks": True, "position_encoding": Alibi(6), "num_kv_heads": 2}
    return layer_page(folder, "everything", mask=masks.Causal(), **options)


@pytest.fixture(scope="module")
def rotary(folder: Path) -> Written:
    return layer_page(folder, "rotary", mask=masks.Causal(), position_encoding=Rotary(6), out_bias=False)


def exact_steps(layer: LayerRecord) -> dict[str, Tensor]:
    """What each step gives in float64, (H, N, M)."""
    assert layer.text is not None
    call = layer.text.pieces[0].call
    assert call is not None
    q, k = layer.q.double(), layer.k.double()
    call = replace(call, q=q, k=k, v=k)
    steps = {name: reference.scores(call, name)[0] for name in ("scaled", "capped", "biased")}
    return steps | {"product": steps["scaled"] / call.scale, "weights": reference.weights(call)[0][0]}


def check_steps(tab: Look, layer: LayerRecord, head: int, query: int, most: float = 5e-3) -> None:
    """Every number of the row of a query beside the exact one, within the precision that the page states."""
    exact = {name: value[head, query] for name, value in exact_steps(layer).items()}
    rows = tab.ask(ROWS)
    scale = tab.ask("regard.layer.flow.scores.scale")
    assert [int(row["key"]) for row in rows] == list(range(layer.shape[3]))
    for key, row in enumerate(rows):
        step, shown = float(row["step"]), float(row["weight"])
        assert abs(float(row["product"]) - float(exact["product"][key])) <= step
        assert abs(float(row["scaled"]) - float(exact["scaled"][key])) <= step * scale
        assert abs(float(row["capped"]) - float(exact["capped"][key])) <= step * scale + 1e-6
        hidden = bool(exact["biased"][key].isneginf())
        assert row["hidden"] == str(int(hidden))
        if not hidden:
            bias = float(exact["biased"][key] - exact["capped"][key])
            assert float(row["bias"]) == pytest.approx(bias, abs=1e-3)
        weight = float(exact["weights"][key])
        assert abs(shown - weight) <= float(row["weightStep"]) <= most
        assert abs(float(row["stored"]) - weight) <= float(row["storedStep"])
        assert abs(shown - float(row["stored"])) <= float(row["weightStep"]) + float(row["storedStep"])


@pytest.mark.parametrize("layer, head, query", [(0, 3, 5), (3, 7, 8), (5, 11, 2)])
def test_steps_of_an_encoder(look: Callable[..., Look], real: Written, layer: int, head: int, query: int) -> None:
    tab = look(real, f"#view=flow&layer={layer}&head={head}&q={query}")
    check_steps(tab, real.seen[layer], head, query)
    said = tab.text(".way")
    assert "1/√32 = 0.1768" in said
    assert "no key is hidden" in said
    assert "Bias" not in said
    assert "Softcap" not in said
    assert "rotat" not in tab.text(".diagram")
    assert tab.page.locator("#flow-keys s").count() == 0


@pytest.mark.parametrize("head, query", [(0, 6), (3, 4), (5, 1)])
def test_steps_with_softcap_bias_mask_and_sinks(
    look: Callable[..., Look], everything: Written, head: int, query: int
) -> None:
    layer = everything.seen[0]
    tab = look(everything, f"#view=flow&head={head}&q={query}")
    check_steps(tab, layer, head, query)
    said = tab.text(".way")
    assert "3 × tanh(sⱼ / 3)" in said
    assert "Bias" in said
    assert f"{6 - query} of 7 keys are hidden" in said if query < 6 else "no key is hidden" in said
    assert layer.text is not None
    sinks = layer.text.pieces[0].call.sinks  # type: ignore[union-attr]
    sink = tab.ask("({...document.getElementById('flow-sink').dataset})")
    assert float(sink["score"]) == pytest.approx(float(sinks[0, head]), rel=1e-6)
    given = sum(float(row["weight"]) for row in tab.ask(ROWS))
    assert float(sink["weight"]) == pytest.approx(1 - given, abs=1e-9)
    assert "3 heads share each k and v" in tab.text(".arrow >> nth=0")


def test_hidden_keys_are_crossed_out(look: Callable[..., Look], rotary: Written) -> None:
    """In a causal model all keys after the query, and no other."""
    tab = look(rotary, "#view=flow&head=2&q=3&k=5")
    check_steps(tab, rotary.seen[0], 2, 3)
    struck = tab.ask(
        "[...document.querySelectorAll('#flow-keys tbody tr')].map(r => r.querySelectorAll('s').length > 0)"
    )
    assert struck == [False] * 4 + [True] * 3
    lines = tab.ask("[...document.querySelectorAll('#flow-keys s')].map(s => getComputedStyle(s).textDecorationLine)")
    assert set(lines) == {"line-through"}
    assert tab.page.get_attribute("#flow-key-5", "aria-label") == "key 5, saw, hidden"
    assert "0, for it is hidden" in tab.text(".way")
    assert "after their rotation by position (rotary)" in tab.text(".arrow >> nth=0")
    assert tab.texts("#flow-keys tfoot td")[2:4] == [tab.texts("#flow-keys tfoot td")[2], "1"]


def test_elements_sum_to_the_product(look: Callable[..., Look], real: Written) -> None:
    layer, head, query, key = real.seen[2], 4, 6, 3
    tab = look(real, f"#view=flow&layer=2&head={head}&q={query}&k={key}")
    rows = tab.ask("[...document.querySelectorAll('#flow-numbers tbody tr')].map(r => ({...r.dataset}))")
    q, k = layer.q[0, head, query], layer.k[0, head, key]
    assert [float(row["q"]) for row in rows] == pytest.approx(q.tolist(), abs=float(q.abs().max()) / 32767)
    assert [float(row["k"]) for row in rows] == pytest.approx(k.tolist(), abs=float(k.abs().max()) / 32767)
    total = 0.0
    for row in rows:
        assert float(row["product"]) == pytest.approx(float(row["q"]) * float(row["k"]), abs=1e-12)
        total += float(row["product"])
        assert float(row["sum"]) == pytest.approx(total, abs=1e-9)
    product = tab.ask(ROWS)[key]
    assert float(product["product"]) == pytest.approx(total, abs=1e-9)
    assert abs(total - float(q.double() @ k.double())) <= float(product["step"])
    assert f"ends at {total:.4g}" in tab.text("#flow-elements")


def test_elements_by_keys_and_pointer(look: Callable[..., Look], real: Written) -> None:
    """The arrow keys go from element to element and stay with the head; the pointer says the same."""
    tab = look(real, "#view=flow&layer=2&head=4&q=6&k=3")
    tab.page.focus("#flow-elements-chart")
    tab.press("ArrowRight", "ArrowRight")
    assert tab.page.get_attribute("#flow-elements-chart", "aria-valuenow") == "2"
    said = tab.page.get_attribute("#flow-elements-chart", "aria-valuetext")
    assert tab.text("#flow-readout") == said
    assert tab.page.input_value("#flow-head") == "4"
    tab.press("End")
    assert tab.page.get_attribute("#flow-elements-chart", "aria-valuenow") == "31"
    box = tab.page.locator("#flow-elements-chart").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] * 2.5 / 32, box["y"] + 20)
    assert tab.text("#flow-readout") == said
    tab.page.focus("#flow-key-8")
    tab.press("Enter")
    assert (tab.hash["k"], tab.ask("document.activeElement.id")) == ("8", "flow-key-8")
    assert tab.page.get_attribute("#flow-key-8", "aria-pressed") == "true"
    assert real.tokens[8] in tab.text("#flow-elements figcaption")


def test_values_give_the_output(look: Callable[..., Look], everything: Written, real: Written) -> None:
    """The sum of weight times v, from the numbers of the page, is the stored output to their precision."""
    for page, hash_, size in (
        (everything, "#view=flow&head=4&q=6", everything.seen[0].output.abs().max()),
        (real, "#view=flow&layer=1&head=2&q=5", real.seen[1].output.abs().max()),
    ):
        tab = look(page, hash_)
        assert tab.ask("+document.getElementById('flow-output').dataset.off") < 1e-3 * float(size)
    norms = tab.ask("[...document.querySelectorAll('#flow-keys tbody td:last-child')].map(c => +c.textContent)")
    layer = real.seen[1]
    exact = layer.weights(2, batch=0)[5] * layer.v[0, 2].norm(dim=-1)
    assert norms == pytest.approx(exact.tolist(), rel=0.06, abs=1e-4)  # (two digits and more are shown)


@pytest.mark.parametrize("rank", [0, 1, 100])
def test_heads_and_bias_are_the_result(look: Callable[..., Look], real: Written, rank: int) -> None:
    """For the component that the result is largest in, which is the default, and for others."""
    layer, query = real.seen[4], 6
    added = layer.projected()[0, :, query].double()
    assert layer.projection is not None
    bias = layer.projection[1].double()
    result = added.sum(0) + bias
    chosen = int(result.abs().argsort(descending=True)[rank])
    tab = look(real, f"#view=flow&layer=4&q={query}" + (f"&component={chosen}" if rank else ""))
    assert tab.page.input_value("#flow-component") == str(chosen)
    *terms, total, stored = tab.ask(COLUMN)
    step = tab.ask("+document.getElementById('flow-column').dataset.step")
    assert step < 1e-3 * float(added.abs().max()) + 1e-3
    assert terms[:-1] == pytest.approx(added[:, chosen].tolist(), abs=step)
    assert terms[-1] == pytest.approx(float(bias[chosen]), abs=step)
    assert total == pytest.approx(sum(terms), abs=1e-9)
    assert abs(total - stored) <= step
    assert stored == pytest.approx(float(result[chosen]), abs=step)
    shown = [float(text) for text in tab.texts("#flow-column tbody td:nth-child(2)")]
    places = len(tab.texts("#flow-column tbody td:nth-child(2)")[0].split(".")[1])
    assert sum(shown) == pytest.approx(float(tab.texts("#flow-column tfoot td:nth-child(2)")[0]), abs=7 * 10**-places)


def test_a_component_is_chosen(look: Callable[..., Look], real: Written) -> None:
    """By number, or by one of the buttons; where the page has not all, the nearest that it has."""
    tab = look(real, "#view=flow&layer=4&q=6")
    count = len(tab.ask("[...regard.layer.flow.parts.components.codes]")) // 17
    assert f"carries the {count} largest of 384" in tab.text(".component")
    second = tab.page.locator(".component button").nth(1)
    number = second.get_attribute("id").removeprefix("flow-component-")
    tab.do(second.click)
    assert tab.page.input_value("#flow-component") == tab.hash["component"] == number
    assert tab.ask("document.activeElement.id") == f"flow-component-{number}"
    carried = tab.ask("count => [...regard.layer.flow.parts.components.codes].slice(6 * count, 7 * count)", count)
    other = next(i for i in range(384) if i not in carried)
    tab.page.fill("#flow-component", str(other))
    tab.press("Enter")
    assert min(abs(i - other) for i in carried) == abs(int(tab.hash["component"]) - other) > 0


def test_norms_are_explained(look: Callable[..., Look], real: Written, rotary: Written) -> None:
    """The norm of the sum of the heads, of the bias, and of the result: each stands beside its name."""
    layer, query = real.seen[1], 5
    tab = look(real, f"#view=flow&layer=1&q={query}")
    heads = layer.projected()[0, :, query].sum(0)
    bias = layer.projection[1]  # type: ignore[index]
    rows = tab.ask("[...document.querySelectorAll('#flow-total tbody tr')].map(r => [r.dataset.name, +r.dataset.norm])")
    exact = [("sum of the heads", heads), ("bias of the output projection", bias), ("result", heads + bias)]
    assert [name for name, _ in rows] == [name for name, _ in exact]
    assert [norm for _, norm in rows] == pytest.approx([float(x.norm()) for _, x in exact], rel=1e-3)
    assert f"their sum has the norm {float(heads.norm()):.4g}" in tab.text("#cancel")
    tab.click("#flow-total tr[data-name=result] .strip")
    assert int(tab.hash["component"]) == int(tab.page.input_value("#flow-component"))
    tab = look(rotary, "#view=flow&q=3")
    assert tab.texts("#flow-total tbody th") == ["= result"]
    assert "has no bias" in tab.text(".diagram")


def test_what_is_added_to_the_residual_stream(look: Callable[..., Look], real: Written) -> None:
    layer, query = real.seen[2], 7
    tab = look(real, f"#view=flow&layer=2&q={query}")
    x = layer.input[0, query]
    result = layer.projected()[0, :, query].sum(0) + layer.projection[1]  # type: ignore[index]
    said = {
        name: float(value) for name, value in tab.ask("({...document.getElementById('flow-residual').dataset})").items()
    }
    assert said["input"] == pytest.approx(float(x.norm()), rel=1e-3)
    assert said["result"] == pytest.approx(float(result.norm()), rel=1e-3)
    assert said["cosine"] == pytest.approx(float(torch.nn.functional.cosine_similarity(x, result, dim=0)), abs=1e-3)
    assert said["sum"] == pytest.approx(float((x + result).norm()), rel=1e-3)


def test_shapes_stand_at_every_arrow(look: Callable[..., Look], real: Written, everything: Written) -> None:
    tab = look(real, "#view=flow&layer=1")
    arrows = tab.texts(".arrow")
    assert "q = x W_q: (17, 384) → (12, 17, 32)" in arrows[0]
    assert "(17, 384) → (12, 17, 32)" in arrows[0].splitlines()[1]
    assert arrows[1] == "↓ concatenation: (12, 17, 32) → (17, 384)"
    assert arrows[2] == "↓ output projection W_o: (17, 384) · (384, 384) + bias (384) → (17, 384)"
    assert "(17, 32) · (32, 17) → (17, 17); · (17, 32) → (17, 32)" in tab.text(".stage >> nth=1")
    tab = look(everything, "#view=flow")
    assert "k = y W_k of every token y: y (7, 36) → (2, 7, 6)" in tab.text(".arrow >> nth=0")


def test_it_opens_on_something_to_see(look: Callable[..., Look], real: Written) -> None:
    """The head of the app, opened, at the query of its strongest link outside its resting place, with that key."""
    tab = look(real, "#view=flow")
    layer, head = tab.ask("[regard.layer.index, regard.head]")
    assert tab.ask("regard.run.best") == [layer, head]
    assert tab.page.input_value("#flow-head") == str(head)
    assert tab.page.get_attribute(f"#open-{head}", "aria-expanded") == "true"
    for layer, head in ((0, 2), (3, 9)):
        tab.do(lambda layer=layer, head=head: tab.ask("at => regard.state.set(at)", {"layer": layer, "head": head}))
        aside = tab.ask("head => [...(regard.layer.aside(head) || [])]", head)
        weights = real.weights(layer, head).clone()
        weights[:, aside] = 0
        weights[[0, -1]] = 0  # special tokens
        query = int(tab.page.input_value("#flow-token"))
        key = tab.ask("+document.querySelector('#flow-keys tr.chosen').dataset.key")
        assert float(weights[query, key]) == pytest.approx(float(weights.max()), abs=1e-4)  # (within a step)
    assert "head" in tab.hash


def test_steps_can_be_hidden(look: Callable[..., Look], real: Written) -> None:
    """By the button of the stage or of the head's row; the address knows, and the head stays."""
    tab = look(real, "#view=flow&layer=2&head=3")
    assert tab.page.locator("#flow-steps").count() == 1
    tab.click("#flow-toggle")
    assert tab.page.locator("#flow-steps").count() == 0
    assert (tab.hash["steps"], tab.hash["head"]) == ("0", "3")
    tab.click("#open-3")
    assert tab.page.locator("#flow-steps").count() == 1
    assert "steps" not in tab.hash
    tab.click("#open-3")
    assert tab.page.locator("#flow-steps").count() == 0
    tab.click("#open-8")
    assert tab.page.locator("#flow-steps").count() == 1
    assert tab.text(".stage >> nth=1").startswith("2 Head 8, step by step")
    tab.do(lambda: tab.page.select_option("#flow-head", "5"))
    assert tab.hash["head"] == "5"
    tab = look(real, "#view=flow&layer=2&head=3&steps=0")
    assert tab.page.locator("#flow-steps").count() == 0


def test_a_long_text_says_what_is_missing(look: Callable[..., Look], long: Written) -> None:
    tab = look(long, "#view=flow&layer=1&head=1&q=700")
    assert "The steps need q and k of every token" in tab.text(".opened")
    assert tab.page.locator(".strongest li").count() > 0
    assert "in the page for shorter texts" in tab.text(".diagram")
    tab.do(lambda: tab.ask("regard.state.set({q: 3})"))
    assert "Vectors are here for tokens" in tab.text(".note >> nth=0")


def test_a_bias_that_is_not_there(look: Callable[..., Look], folder: Path) -> None:
    torch.manual_seed(3)
    layer = regard.MultiHeadAttention(12, num_heads=3)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 97, 12), bias=torch.randn(1, 3, 97, 97))
    tab = look(write(folder / "no-bias.html", seen, limit=PROGRAM + 750_000), "#view=flow&head=1&q=40")
    assert tab.ask("regard.layer.flow.scores.missing") == ["bias"]
    assert "no room for" in tab.text(".way")
    rows = tab.ask(ROWS)
    exact = seen[0].weights(1, batch=0)[40]
    assert [float(row["stored"]) for row in rows] == pytest.approx(exact.tolist(), abs=1e-4)
    assert tab.text("#flow-keys thead").strip().split("\t")[-2:] == ["stored", "norm of w v"]


def test_rough_numbers_are_said_to_be_rough(look: Callable[..., Look], folder: Path) -> None:
    """Where scores are so large that a step of q and k matters, the precision is stated, and holds."""
    torch.manual_seed(1)
    layer = regard.MultiHeadAttention(12, num_heads=3)
    for parameter in layer.parameters():
        parameter.data *= 15
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 7, 12))
    tab = look(write(folder / "rough.html", seen, WORDS), "#view=flow&head=2&q=5")
    exact = exact_steps(seen[0])["weights"][2, 5]
    for row, weight in zip(tab.ask(ROWS), exact.tolist(), strict=True):
        assert abs(float(row["weight"]) - weight) <= float(row["weightStep"])
    assert "With vectors in 16 bits, scores of this size are rough" in tab.text(".opened")


def test_cross_attention(look: Callable[..., Look], folder: Path) -> None:
    """Keys of another text, of another length; no mask."""
    torch.manual_seed(2)
    layer = regard.MultiHeadAttention(36, num_heads=6)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 5, 36), torch.randn(1, 11, 36))
    page = write(folder / "cross.html", seen, ([f"s{i}" for i in range(11)], [f"t{i}" for i in range(5)]))
    tab = look(page, "#view=flow&head=3&q=2&k=9")
    check_steps(tab, seen[0], 3, 2)
    assert "“t2” and “s9”" in tab.text("#flow-elements")
    assert "k = y W_k of every token y of the other text: y → (6, 11, 6)" in tab.text(".arrow >> nth=0")


def test_an_unknown_projection(look: Callable[..., Look], folder: Path) -> None:
    """The steps are there; what each head adds is not, and the page says why."""

    class Bare(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (3, 4)).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return mixed.transpose(1, 2).flatten(2)

    model = Bare()
    torch.manual_seed(4)
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(torch.randn(1, 7, 12))
    tab = look(write(folder / "bare.html", seen, WORDS), "#view=flow&head=1&q=4")
    check_steps(tab, seen[0], 1, 4)
    assert "not known by its name" in tab.text(".note >> nth=0")
    assert tab.page.locator("#flow-total, #flow-column, #flow-residual").count() == 0
    assert "W_o: (7, 12) · (12, W) → (7, W)" in tab.text(".arrow >> nth=2")


def test_q_and_k_without_the_other_vectors(look: Callable[..., Look], folder: Path) -> None:
    """Where the page has room for the scores of all tokens, but not for all values, the steps end before these."""
    seen = stack(2, 4, 61, 64)
    page = write(folder / "scores.html", seen, [f"t{i}" for i in range(61)], limit=PROGRAM + 330_000)
    tab = look(page, "#view=flow&layer=1&head=2&q=50")
    assert tab.ask("[regard.layer.flow.q.bits, regard.layer.flow.k.shape[1], 'v' in regard.layer.flow]") == [
        16,
        61,
        False,
    ]
    check_steps(tab, seen[1], 2, 50, most=1)
    assert "has no v" in tab.text(".way")
    assert "norm of w v" not in tab.text("#flow-keys thead")
    assert tab.page.locator("#flow-output").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_and_can_be_read(look: Callable[..., Look], everything: Written, theme: str, width: int) -> None:
    """With all columns, hidden keys and a sink, on narrow and wide screens."""
    tab = look(everything, f"#view=flow&head=1&q=3&k=2&theme={theme}", width=width, height=844)
    assert tab.overflow() <= 0
    tab.click("#flow-elements summary")
    assert tab.overflow() <= 0
    cut = tab.ask(
        "[...document.querySelectorAll('main button, main select, main input, main svg, main canvas')].filter(e => !e.closest('.keys-table') && e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert cut == 0
    hidden = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#flow-numbers').parentElement)"
    assert tab.ask(hidden) <= 0
    found = tab.ask(CONTRASTS)
    assert len(found) > 100
    assert [one for one in found if one[0] < 4.5] == []


def test_names_for_a_screen_reader(look: Callable[..., Look], everything: Written) -> None:
    tab = look(everything, "#view=flow&head=1&q=3")
    assert tab.ask("document.querySelectorAll('table th:not([scope])').length") == 0
    captions = tab.texts("caption")
    assert any("key by key" in caption for caption in captions)
    assert any("Component" in caption for caption in captions)
    unnamed = tab.ask(
        "[...document.querySelectorAll('main [role=img], main [role=slider], main [role=region]')].filter(e => !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
