"""Measures against their formulas on dense weights in float64; heads with known answers; memory."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_cases import Case, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import measures, tuning
from regard.kernels import blockwise, reference
from regard.masks import Causal, Padding, Window, conjuncts
from regard.measures import (
    Contribution,
    Crop,
    Divergence,
    Duplicate,
    Heatmap,
    Induction,
    Links,
    Local,
    Near,
    Offsets,
    Pairs,
    Tokens,
    as_measures,
    rollout,
)

pytestmark = pytest.mark.on_device

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def by_the_formula(case: Case, ids: Tensor, out_weight: Tensor, same: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """Every measure from the dense weights, as its definition says."""
    call = case.to(torch.float64).call()
    p = reference.weights(call)[0].detach()  # (B, H, N, M)
    tile = call.whole()
    b, h, n, m = p.shape
    ahead = (tile.k_positions[:, None, :] - tile.q_positions[:, :, None])[:, None]  # (1|B, 1, N, M)
    mass = p.sum(-1)
    seen = mass > 0

    def on(pairs: Tensor) -> Tensor:
        return (p * pairs).sum(-1)

    def over_mass(x: Tensor) -> Tensor:
        return torch.where(seen, x / mass.clamp(min=1e-300), 0.0)

    q_ids = ids[:, m - n :] if n <= m else None
    found = {
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "peak": p.amax(-1),
        "distance": over_mass(on(ahead.abs())),
        "offset": over_mass(on(ahead)),
        "near": torch.stack([on(ahead == d) for d in range(-2, 2)], -1),
        "offsets": torch.stack([on(ahead == d) for d in range(-2, 2)], -1).sum(2) / seen.sum(2).clamp(min=1)[..., None],
        "local": on(ahead.abs() <= 1),
        "previous": on(ahead == -1),
        "itself": on(ahead == 0),
        "next": on(ahead == 1),
        "received": p.sum(2),
        "on_first": on(_first_token(call)[:, None, None]),
        "crop": p[:, :, 1:4, 2:7],
        "pairs": (p.gather(-1, pairs.clamp(min=0)[:, None].expand(-1, h, -1, -1)) * (pairs >= 0)[:, None]).sum(-1),
        "max_logit": reference.scores(call, "biased").detach().amax(-1).where(seen, 0.0),
    }
    rows, cols = min(3, n), min(2, m)
    pool = torch.zeros(b, h, rows, cols, dtype=p.dtype)
    for i in range(n):
        for j in range(m):
            pool[:, :, i * rows // n, j * cols // m] += p[:, :, i, j]
    found["heatmap"] = pool
    v = call.v.repeat_interleave(h // call.v.shape[1], 1)
    parts = out_weight.double().unflatten(1, (h, -1))  # (W, H, E)
    norms = torch.einsum("bhme,whe->bhmw", v, parts).norm(dim=-1)
    found["contribution"], found["contributed"] = (p @ norms[..., None])[..., 0], p.sum(2) * norms
    middle = (p[:, :, None] + p[:, None]) / 2
    entropies = -torch.special.xlogy(p, p).sum(-1)
    mixed = -torch.special.xlogy(middle, middle).sum(-1)
    found["divergence"] = (mixed - (entropies[:, :, None] + entropies[:, None]) / 2).sum(-1)
    kinds = [torch.isin(ids, torch.tensor([1, 3]))[:, None, None], same[:, None, None]]
    if q_ids is not None:
        kinds.append((q_ids[:, :, None] == ids[:, None, :])[:, None])
        before = (tile.k_positions[:, None, :] < tile.q_positions[:, :, None])[:, None]
        copies = (q_ids[:, :, None] == ids[:, None, :])[:, None] & before  # (B, 1, N, M)
        found["duplicate"] = on(copies)
        found["induction"] = on(torch.cat([torch.zeros_like(copies[..., :1]), copies[..., :-1]], -1))
    found["tokens"] = torch.stack([on(kind) for kind in kinds], -1)
    return found


def _first_token(call: Any) -> Tensor:
    """Which key is the first that no `Padding` hides, (1|B, M); key 0 where it hides all."""
    keep = torch.ones(1, call.shape[3], dtype=torch.bool)
    for part in conjuncts(call.mask):
        if isinstance(part, Padding):
            keep = keep & part.block(call.whole())[:, 0, 0]
    return torch.nn.functional.one_hot(keep.int().argmax(1), call.shape[3]).bool()


@SETTINGS
@given(cases(), st.sampled_from(["reference", "blockwise", "auto"]), st.sampled_from([1, 6, 100, 2**19]), st.booleans())
def test_every_measure_is_its_formula(case: Case, kernel: str, strip: int, single: bool) -> None:
    case.options.pop("dropout", None)
    check(case, kernel, strip, torch.float32 if single else torch.float64)


@pytest.mark.of_cpu("torch gives the log-sum-exp on CPUs alone")
@SETTINGS
@given(cases(simple=True), st.sampled_from([6, 2**19]))
def test_every_measure_from_torchs_own_log_sum_exp(case: Case, strip: int) -> None:
    if "fused: no" in regard.explain(case.q, case.k, case.v, **case.options):
        return
    check(case, "fused", strip, torch.float64)


def check(case: Case, kernel: str, strip: int, dtype: torch.dtype) -> None:
    case = case.to(dtype)
    b, h, n, _ = case.q.shape
    m, e = case.k.shape[2], case.v.shape[3]
    generator = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(0, 5, (b, m), generator=generator)
    out_weight = torch.randn(3, h * e, generator=generator)
    same = torch.rand(b, m, generator=generator) < 0.5
    # Some of each query's keys, each once; -1 in the place of the others.
    order = torch.rand(b, n, m, generator=generator).argsort(-1)[..., :3]
    pairs = order.masked_fill(torch.rand(order.shape, generator=generator) < 0.3, -1)
    kinds: dict[str, Any] = {"some": [1, 3], "mask": same}
    wanted = [
        "entropy",
        "peak",
        "distance",
        "offset",
        Offsets(2, 1),
        Near(2, 1),
        Local(1),
        "previous",
        "itself",
        "next",
        "received",
        "on_first",
        Heatmap(3, 2),
        Crop(1, 4, 2, 7),
        Links(3),
        Contribution(out_weight),
        Divergence(),
        Pairs(pairs),
        "max_logit",
    ]
    if n <= m:
        kinds["same"] = "same"
        wanted += [Induction(ids), Duplicate()]
    before = tuning.STRIP
    tuning.STRIP = strip
    try:
        got = regard.measure(
            case.q, case.k, case.v, ids=ids, measures=[*wanted, Tokens(kinds)], kernel=kernel, **case.options
        )
    finally:
        tuning.STRIP = before
    right = by_the_formula(case, ids, out_weight, same, pairs)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-9
    for name, truth in right.items():
        assert got[name].dtype == dtype
        torch.testing.assert_close(
            got[name].double(), truth, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
        )
    p = reference.weights(case.to(torch.float64).call())[0].detach()
    seen = p.sum(-1) > 0
    at_target = p.gather(-1, got.target.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(at_target[seen], right["peak"][seen], rtol=0, atol=tolerance)
    assert (got.target[~seen] == -1).all()
    top = p.topk(min(3, m), -1).values
    torch.testing.assert_close(got.links.weights.double(), top, rtol=0, atol=tolerance)
    at_links = p.gather(-1, got.links.keys.clamp(min=0)) * (got.links.keys >= 0)
    torch.testing.assert_close(at_links, top, rtol=0, atol=tolerance)
    output, lse = reference.forward(case.to(torch.float64).call())
    torch.testing.assert_close(got.output.detach().double(), output.detach(), rtol=tolerance * 10, atol=tolerance * 10)
    torch.testing.assert_close(got.lse.double(), lse.detach(), rtol=tolerance, atol=tolerance)
    assert (got.seen == seen).all()


def test_pairs_in_words() -> None:
    q = torch.randn(2, 3, 5, 7)
    with pytest.raises(TypeError, match=r"Pairs keys: expected integers \(N,\), .*received dtype torch.float32"):
        Pairs(torch.zeros(5))
    with pytest.raises(ValueError, match=r"expected shape \(N,\), .*received shape \(1, 1, 1, 1\)"):
        Pairs(torch.zeros(1, 1, 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected keys of 5 queries, of 1 or 2 texts, received shape \(4, 1\)"):
        regard.measure(q, q, measures=Pairs(torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"expected numbers from -1 to 4, received from 0 to 5"):
        regard.measure(q, q, measures=Pairs(torch.tensor([0, 1, 2, 3, 5])))


@pytest.mark.skipif("native" not in regard.kernels.available(), reason="the native kernel was not compiled here")
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("positions", [False, True], ids=["contiguous", "positions"])
def test_no_measure_of_one_head_needs_a_second_pass(
    padding: str, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the kernel is asked for comes from its own loop; strips are for maps of padded batches alone."""
    b, h, n = 2, 6, 37
    q, k, v = (torch.randn(b, heads, n, 8) for heads in (h, 3, 3))
    shown: list[str] = []
    monkeypatch.setattr(
        blockwise, "replay", lambda call, lse, run: shown.extend(type(x).__name__ for x in run.measures)
    )
    keep = {
        "none": torch.ones(b, n, dtype=torch.bool),
        "left": torch.arange(n) >= torch.tensor([[0], [5]]),
        "right": torch.arange(n) < torch.tensor([[n], [n - 5]]),
    }[padding]
    options: dict[str, Any] = {"mask": Causal() & Padding(keep=keep)}
    if positions:
        options |= {"positions": torch.arange(n) + 3, "key_positions": torch.arange(n) + 3}
    wanted = [*measures.DEFAULT, "local", "previous", "itself", "next", "induction", "duplicate", "links", "max_logit"]
    wanted += [Tokens({"some": [1, 2], "same": "same"}), Pairs(torch.arange(n)), "contribution", "heatmap"]
    ids = torch.randint(0, 5, (b, n))
    weight = torch.randn(5, h * 8)
    regard.measure(q, k, v, measures=[*wanted, Crop(1, 4, 2, 7)], ids=ids, out_weight=weight, **options)
    assert shown == []


def heads_that(*scores: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose scores, at scale 1, are the given ones (N, M): one head each."""
    keys = torch.eye(scores[0].shape[1], dtype=torch.float64)
    return torch.stack(list(scores))[None].double(), keys[None, None].expand(1, len(scores), -1, -1)


def test_heads_with_known_answers() -> None:
    n, text = 13, torch.tensor([4, 7, 9, 4, 7, 9, 4, 7, 9, 4, 7, 9, 4])  # three tokens, over and over
    far = -1e4
    previous, first, uniform, induction = (torch.full((n, n), far) for _ in range(4))
    previous[range(1, n), range(n - 1)] = 0.0
    previous[0, 0] = 0.0
    first[:, 0] = 0.0
    uniform[:] = 0.0
    for i in range(n):
        after = [j + 1 for j in range(i) if text[j] == text[i]]
        induction[i, after or [0]] = 0.0
    q, k = heads_that(previous, first, uniform, induction)
    found = regard.measure(
        q,
        k,
        mask=Causal(),
        scale=1.0,
        ids=text,
        measures=[
            "entropy",
            "peak",
            "distance",
            "offset",
            Offsets(2, 2),
            "received",
            "on_first",
            "previous",
            "induction",
            "duplicate",
            Heatmap(1),
            Divergence(),
            Local(0),
        ],
    )
    sees = torch.arange(1, n + 1).double()  # keys that query i sees
    torch.testing.assert_close(found.entropy[0], torch.stack([0 * sees, 0 * sees, sees.log(), found.entropy[0, 3]]))
    torch.testing.assert_close(found.peak[0, 2], 1 / sees)
    torch.testing.assert_close(found.distance[0, :3], torch.stack([(sees > 1).double(), sees - 1, (sees - 1) / 2]))
    torch.testing.assert_close(found.offset[0], -found.distance[0])  # causal: all keys are behind
    assert found.offsets[0, 0].tolist() == pytest.approx([0, (n - 1) / n, 1 / n, 0, 0])
    assert found.received[0, 1].tolist() == pytest.approx([n] + [0] * (n - 1))
    assert found.on_first[0, 1].tolist() == [1.0] * n
    assert found.previous[0, 0].tolist() == [0.0] + [1.0] * (n - 1)
    assert found.induction[0, 3].tolist() == pytest.approx([0.0] * 3 + [1.0] * (n - 3))
    # a query at i = 3, 4, ... of the uniform head sees i + 1 keys, i // 3 of which follow a copy
    assert found.induction[0, 2].tolist() == pytest.approx([(i // 3) / (i + 1) for i in range(n)])
    assert found.duplicate[0, 2].tolist() == pytest.approx([(i // 3) / (i + 1) for i in range(n)])
    assert found.counts["induction"][0, 0].tolist() == [False] * 3 + [True] * (n - 3)
    assert found.heatmap.flatten().tolist() == pytest.approx([n] * 4)
    # previous and first agree at the first two queries only; elsewhere they share nothing: ln 2 each
    assert found.divergence[0, 0, 1].item() == pytest.approx((n - 2) * math.log(2))
    assert found.local[0, 2].tolist() == pytest.approx((1 / sees).tolist())


def test_norm_weighted_attention_sees_values_that_are_zero() -> None:
    q, k = heads_that(torch.zeros(2, 2))
    v = torch.tensor([[[[0.0, 0.0], [3.0, 4.0]]]], dtype=torch.float64)
    found = regard.measure(q, k, v, scale=1.0, measures=Contribution(2 * torch.eye(2)))
    assert found.contribution[0, 0].tolist() == [5.0, 5.0]  # half of |2 (3, 4)| = 10
    assert found.contributed[0, 0].tolist() == [0.0, 10.0]


def test_rollout_by_hand() -> None:
    a = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    mixed = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(rollout([a, a]), mixed @ mixed)
    torch.testing.assert_close(rollout([a[None], a[None]]), (mixed @ mixed)[None])
    with pytest.raises(ValueError, match=r"maps: expected \(B, H, N, N\)"):
        rollout([torch.zeros(1, 2, 3)])


def test_the_output_has_its_gradient_and_the_measures_none() -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3))
    found = regard.measure(q, k, v, mask=Causal())
    assert not found.entropy.requires_grad
    found.output.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(found.output, regard.attend(q, k, v, mask=Causal()))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_hidden_does_not_reach_the_measures(broken: float) -> None:
    q, k, v = (torch.randn(1, 2, 300, 5) for _ in range(3))
    k[:, :, 200:], v[:, :, 200:] = broken, broken
    mask = Padding(lengths=torch.tensor([200]))
    found = regard.measure(q, k, v, mask=mask)
    clean = regard.measure(q, k[:, :, :200], v[:, :, :200], positions=torch.arange(300))
    for name in ("entropy", "peak", "distance", "offset", "offsets", "on_first"):
        near = 3e-4 if name in ("distance", "offset") else 1e-5  # (positions up to 300, in float32)
        torch.testing.assert_close(found[name], clean[name], rtol=1e-5, atol=near)
    torch.testing.assert_close(found.output, clean.output)


def test_a_measure_of_ones_own() -> None:
    class Confident(measures.PerQuery):
        gives = {"confident": "query"}

        def of(self, strip: measures.Strip, prepared: Any) -> Tensor:
            return (strip.weights.amax(-1) > 0.5).to(strip.weights.dtype)

    q, k = heads_that(torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]))
    assert regard.measure(q, k, scale=1.0, measures=Confident()).confident.tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: as_measures("entropies"), r"measures: expected names among .*'entropy'.*, received 'entropies'"),
        (lambda: as_measures([3]), "measures: expected names or objects of regard.measures, received int"),
        (lambda: as_measures([Links(2), Links(3)]), "measures: expected one of a kind, received links twice"),
        (lambda: as_measures(Crop), "measure Crop: expected an object made with its arguments"),
        (lambda: Heatmap(0), "rows: expected at least 1, received 0"),
        (lambda: Links(True), "k: expected an integer, received bool True"),
        (lambda: Crop(3, 3, 0, 1), "Crop rows: expected a first before the last, received 3 and 3"),
        (lambda: Tokens({}), "Tokens kinds: expected a mapping"),
        (lambda: Tokens({"a": "other"}), "Tokens 'a': expected token ids, a boolean mask of keys, or 'same'"),
        (lambda: Tokens({"a": [0.5]}), "Tokens 'a': expected token ids"),
        (lambda: one("induction"), r"Induction: expected token ids, received none; remedy: Induction\(ids\)"),
        (
            lambda: one(Tokens({"a": [1]})),
            r"Tokens: expected token ids, received none; remedy: measure\(..., ids=...\)",
        ),
        (
            lambda: one(Induction(torch.zeros(3, dtype=torch.int64))),
            r"Induction ids: expected shape \(5,\) or \(1, 5\)",
        ),
        (lambda: Induction(torch.zeros(3)), "Induction ids: expected integer token ids"),
        (lambda: one("contribution"), "contribution: expected the output projection's weight"),
        (lambda: one(Contribution(torch.zeros(3, 4))), "contribution: expected values, received v=None"),
        (lambda: one("entropy", kernel="fastest"), 'kernel: expected "auto" or one of'),
    ],
)
def test_errors_in_words(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def one(what: Any, **options: Any) -> Any:
    q = torch.zeros(1, 1, 5, 3)
    return regard.measure(q, q, measures=what, **options)


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(AttributeError, match="'peak' was not measured; there are entropy"):
        _ = one("entropy").peak


def test_nothing_to_see() -> None:
    q, k = torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 0, 5)
    found = regard.measure(q, k, k)
    assert found.entropy.tolist() == [[[0.0] * 3] * 2]
    assert found.received.shape == (1, 2, 0)
    assert not found.seen.any()
    assert regard.measure(k, q, q).entropy.shape == (1, 2, 0)


MEMORY = """
import torch, regard
from regard import masks, measures as m
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 2**20
n, heads, groups = {n}, 12, {groups}
q = torch.randn(1, heads, n, 64) * 2
k, v = (torch.randn(1, groups, n, 64) for _ in range(2))
ids = torch.randint(0, 1000, (n,))
everything = ["entropy", "peak", "distance", "offset", "offsets", m.Local(8), "received", "on_first", "previous",
              "next", "itself", m.Heatmap(64), m.Crop(100, 228, 100, 228), m.Links(8),
              m.Tokens({{"few": [1, 2, 3], "same": "same"}}),
              "induction", "duplicate", m.Contribution(torch.randn(768, heads * 64)), *{more}]
before = peak()
found = regard.measure(q, k, v, mask={mask}, ids=ids, measures=everything)
assert found.output.shape == q.shape
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "n, groups, mask, more, limit",
    [
        pytest.param(32768, 4, "masks.Causal() & masks.Window(100)", [], 0.4, marks=pytest.mark.slow),
        (3001, 4, "masks.Causal()", [], 0.15),
        (1009, 12, "None", ["divergence"], 0.15),
    ],
    ids=["window", "causal", "pairs of heads"],
)
@pytest.mark.system
def test_memory_of_every_measure_at_once(n: int, groups: int, mask: str, more: list[str], limit: float) -> None:
    """One layer of 12 heads, in GB; dense weights would take 51 GB at 32,768 tokens, and 0.43 GB at 3,001."""
    script = MEMORY.format(n=n, groups=groups, mask=mask, more=more)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < limit


def test_a_window_costs_what_it_shows() -> None:
    """Strips of hidden keys are skipped, and what is far from the start is still measured right."""
    q, k = torch.randn(1, 2, 4500, 4), torch.randn(1, 1, 4500, 4)
    mask = Causal() & Window(40)
    found = regard.measure(q, k, mask=mask, measures=["distance", "entropy", "target", "on_first", Links(2)])
    late = slice(4400, 4500)
    p = regard.attention_weights(q[:, :, late].double(), k[:, :, 4300:].double(), mask=mask)
    ahead = torch.arange(200)[None] - torch.arange(100, 200)[:, None]
    torch.testing.assert_close(found.distance[:, :, late].double(), (p * ahead.abs()).sum(-1), rtol=1e-5, atol=1e-5)
    assert (found.target[:, :, late] == p.argmax(-1) + 4300).all()
    assert not found.on_first[:, :, 40:].any()


@pytest.mark.parametrize("measure", [regard.measures.Induction, regard.measures.Duplicate])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 13, 29])
def test_lists_of_copies_in_a_text_are_those_of_any_positions(measure: type[Any], n: int) -> None:
    ids = torch.randint(0, max(2, n // 3), (3, n), generator=torch.Generator().manual_seed(n))
    places = torch.arange(n)[None]

    def lists(in_order: bool) -> list[list[int]]:
        plane = regard.measures.Plane(3, 1, n, n, places, places, torch.float32, ids=ids, key_ids=ids, text_ids=ids)
        assert plane.in_order
        plane.shared["in order"] = in_order
        found = measure().reduction(plane, measure().prepare(plane)).lists
        pairs = zip(found.begin.flatten(1).tolist(), found.end.flatten(1).tolist(), found.keys.tolist(), strict=True)
        return [keys[a:b] for begin, end, keys in pairs for a, b in zip(begin, end, strict=True)]

    assert lists(True) == lists(False)
