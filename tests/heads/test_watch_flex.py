"""A watch on torch's `flex_attention` and `varlen_attn`: functions of pairs, and texts by their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import hf_models
from heads.flash_on_cpu import flash_attn_varlen_func
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard.heads.capture import large_calls
from regard.heads.capture.flash import from_varlen
from regard.kernels import reference

B, H, G, N, D = 2, 6, 3, 11, 5
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s)flex_attention called without:UserWarning",
    "ignore:.*return_lse is deprecated:FutureWarning",
    "ignore:_compile flag on create_block_mask:DeprecationWarning",
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Who sees whom, and the same as a dense mask (B, H, N, M)

AT = torch.arange(N)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k <= h) & (q >= k)


SAME = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :])[:, None]
BEHIND = AT[:, None] >= AT
MASKS: dict[str, Any] = {
    "none": (None, None, None, torch.ones(N, N, dtype=torch.bool)),
    "causal": (causal, None, None, BEHIND),
    "documents": (documents, B, None, SAME & BEHIND),
    "by head": (by_head, None, H, (AT[:, None] - AT <= torch.arange(H)[:, None, None]) & BEHIND),
}

# What becomes of a score, and the same for all of them (B, H, N, M)


def linear(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - SLOPES[h] * (q - k)


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 3.0 * torch.tanh(score / 3.0)


def windowed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q - k).abs() <= 2 + b, score, -float("inf"))


FAR = (AT[:, None] - AT)[None, None]
SCORES: dict[str, Any] = {
    "none": (None, lambda s: s),
    "linear": (linear, lambda s: s - SLOPES[None, :, None, None] * FAR),
    "capped": (capped, lambda s: 3.0 * torch.tanh(s / 3.0)),
    "windowed": (windowed, lambda s: s.masked_fill(FAR.abs() > 2 + torch.arange(B)[:, None, None, None], -torch.inf)),
}


class Flex(nn.Module):
    def __init__(self, function: Any = flex_attention, groups: int = G, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(7, (H + 2 * groups) * D).double()
        self.out_proj = nn.Linear(H * D, 7).double()
        self.sizes = (H, groups, groups)
        self.function, self.options = function, {"enable_gqa": True, "scale": 0.7, **options}
        self.last: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split(self.sizes, 1)
        self.last = q, k, v
        out = self.function(q, k, v, **self.options)
        out = out[0] if isinstance(out, tuple) else out
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def weights(self, mask: Tensor, scored: Any) -> Tensor:
        q, k, _ = self.last
        s = scored(q @ k.repeat_interleave(H // k.shape[1], 1).mT * 0.7).masked_fill(~mask, -torch.inf)
        return s.softmax(-1).nan_to_num(0.0)


def block_mask(kind: str) -> Any:
    mod, batch, heads, _ = MASKS[kind]
    return None if mod is None else create_block_mask(mod, batch, heads, N, N, device="cpu", BLOCK_SIZE=4)


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_functions_of_pairs(mask: str, score: str) -> None:
    model = Flex(block_mask=block_mask(mask), score_mod=SCORES[score][0])
    x = drawn(B, N, 7, seed=1) * 2
    with regard.watch(model, measures=wanted(), keep="qk") as seen:
        out = model(x)
    right = model.weights(MASKS[mask][3], SCORES[score][1])
    assert seen.layers == ["Flex"]
    close(seen[0].weights(), right, "weights")
    close(seen[0].weights([4, 1], slice(3, 8), slice(2, 9), 1), right[1, [4, 1], 3:8, 2:9], "a part of them")
    agree(seen[0], Oracle(right))
    v = model.last[2].repeat_interleave(2, 1)
    close(model.out_proj((right @ v).transpose(1, 2).flatten(2)), out, "what was seen gives what came out")


@torch.no_grad()
def test_it_is_what_it_is_unwatched() -> None:
    model, x = Flex(block_mask=block_mask("documents"), score_mod=capped), drawn(B, N, 7)
    flag = flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    with regard.watch(model):
        during = model(x)
    assert flag == flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    close(during, model(x), "output", 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"return_lse": True}, {"return_aux": flex_module.AuxRequest(lse=True)}])
def test_compiled_and_with_the_log_sum(options: dict[str, Any]) -> None:
    """As torchtitan has it: a compiled function; and what it gives beside the output."""
    found: list[Any] = []

    def compiled(*args: Any, **given: Any) -> Any:
        found.append(torch.compile(flex_attention)(*args, **given))
        return found[-1]

    model = Flex(compiled, block_mask=block_mask("causal"), **options)
    with regard.watch(model, keep="qk") as seen:
        model(drawn(B, N, 7))
    close(seen[0].weights(), model.weights(BEHIND, lambda s: s), "weights")
    lse = found[0][1] if isinstance(found[0][1], Tensor) else found[0][1].lse
    q, k, _ = model.last
    right = (q @ k.repeat_interleave(2, 1).mT * 0.7).masked_fill(~BEHIND, -torch.inf).logsumexp(-1)
    close(lse, right, "the logarithm of the sum")


@torch.no_grad()
def test_a_large_plane_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled it needs no plane, and neither does a watch: where it is large, strips of it are computed."""
    model, x = Flex(block_mask=block_mask("documents"), score_mod=linear), drawn(B, N, 7)
    right = model(x)
    monkeypatch.setattr(large_calls, "LARGE", 0)
    with regard.watch(model, keep="qk") as seen:
        close(model(x), right, "output")
    close(seen[0].weights(), model.weights(*(MASKS["documents"][3], SCORES["linear"][1])), "weights")


def test_a_score_mod_that_learns_is_refused() -> None:
    """Uncompiled, the operator knows no gradient of what a function captured: it would be lost without a word."""

    class Learned(Flex):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)  # of q, k and v there is no gradient on a CPU
            self.bias = nn.Parameter(torch.zeros(H, dtype=torch.float64))
            self.options["score_mod"] = lambda score, b, h, q, k: score + self.bias[h]

    model = Learned()
    x = drawn(B, N, 7)
    with pytest.raises(ValueError, match=r"a score_mod that learns nothing.*reads self\.bias"), regard.watch(model):
        model(x)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(x)
    close(seen[0].weights(), model.weights(MASKS["none"][3], lambda s: s), "weights")


@torch.no_grad()
def test_heads_are_changed() -> None:
    model, x = Flex(block_mask=block_mask("causal")), drawn(B, N, 7)
    with regard.ablate(model, {"Flex": [1, 3]}):
        got = model(x)
    weights = model.weights(BEHIND, lambda s: s)
    weights[:, [1, 3]] = 0.0
    v = model.last[2].repeat_interleave(2, 1)
    close(got, model.out_proj((weights @ v).transpose(1, 2).flatten(2)), "without two heads")


@torch.no_grad()
@pytest.mark.parametrize("family, padded", [("llama", True), ("gemma2", False), ("bert", True)])
def test_flex_attention_of_transformers(family: str, padded: bool) -> None:
    """Softcaps and windows; texts with padding."""
    given = hf_models.inputs(family, padded=padded)
    model = hf_models.model(family, "flex_attention", padded=padded)
    oracles = hf_models.eager(family, hf_models.model(family, "eager", padded=padded), given)
    with regard.watch(model, measures=wanted(), keep="qk") as seen:
        model(**given)
    assert seen.layers == list(oracles)
    for name, oracle in oracles.items():
        rows = hf_models.rows(family, name, given)
        agree(seen[name], Oracle(oracle.weights), rows=rows)
        look = oracle.seeing if rows is None else oracle.seeing & rows[:, None]
        close(seen[name].weights()[look], oracle.p[look], "weights")


# Texts by their lengths

LENGTHS = torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)
MORE = torch.tensor([0, 6, 7, 13, 17], dtype=torch.int32)  # keys, where they are others: 6, 1, 6, 4


def dense_varlen(q: Tensor, k: Tensor, starts: Tensor, key_starts: Tensor, window: tuple[int, int]) -> Tensor:
    """The weights (H, N, M): each text alone, from the bottom right."""
    weights = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=q.dtype)
    for i in range(len(starts) - 1):
        own, keys = slice(*starts[i : i + 2].tolist()), slice(*key_starts[i : i + 2].tolist())
        n, m = own.stop - own.start, keys.stop - keys.start
        s = torch.einsum("nhd,mhd->hnm", q[own], k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)) * 0.7
        ahead = torch.arange(m)[None] - (torch.arange(n)[:, None] + m - n)
        hidden = (ahead > window[1] if window[1] >= 0 else ahead > m) | (
            ahead < -window[0] if window[0] >= 0 else False
        )
        weights[:, own, keys] = s.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2), (3, -1)])
@pytest.mark.parametrize("keys", [LENGTHS, MORE], ids=["the same", "more keys"])
def test_arguments_of_varlen_attn(window: tuple[int, int], keys: Tensor) -> None:
    q, k = drawn(11, H, D), drawn(int(keys[-1]), G, D, seed=3)
    call = from_varlen(q, k, k, LENGTHS, keys, 5, 6, window == (-1, 0), 0.7, list(window), True)
    assert call.shape == (1, H, 11, int(keys[-1]))
    close(reference.weights(call)[0][0], dense_varlen(q, k, LENGTHS, keys, window), "weights")


def test_varlen_attn_with_less_than_is_there() -> None:
    """`seqused_k`: of each text's keys only the first so many are filled."""
    q, k = drawn(4, H, D), drawn(17, G, D, seed=3)
    starts, used = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([5, 1, 3, 4])
    call = from_varlen(q, k, k, starts, MORE, 1, 6, True, 0.7, [-1, 0], True, used)
    weights = reference.weights(call)[0][0]
    for text, (first, count) in enumerate(zip(MORE.tolist(), used.tolist(), strict=False)):
        s = torch.einsum("hd,mhd->hm", q[text], k[first : first + count].repeat_interleave(2, 1)) * 0.7
        close(weights[:, text, first : first + count], s.softmax(-1), "weights")
        assert weights[:, text].sum(-1).sub(1).abs().max() < 1e-9


def test_pages_of_varlen_attn_are_refused() -> None:
    q = drawn(4, H, D)
    with pytest.raises(ValueError, match="paged cache"):
        from_varlen(q, q, q, LENGTHS, LENGTHS, 5, 5, block_table=torch.zeros(4, 2, dtype=torch.int32))


class Varlen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(7, (H + 2 * G) * D).double()
        self.out_proj = nn.Linear(H * D, 7).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).split((H, G, G), 1)
        self.last = q, k
        out: Any = varlen.varlen_attn(q, k, v, LENGTHS, LENGTHS, 5, 5, scale=0.7, window_size=(2, 0), enable_gqa=True)
        return self.out_proj(out.flatten(1))


@torch.no_grad()
def test_varlen_attn_in_a_model() -> None:
    """It has no kernel for CPUs: one of the test's own stands in its place."""

    def on_cpu(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool,
        scale: float,
        window_size: list[int],
        *_: Any,
    ) -> Any:
        out = flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, is_causal, (window_size[0], window_size[1])
        )
        return out, query.new_empty(0), torch.zeros(2, dtype=torch.uint64)

    varlen._varlen_attn.register_kernel("cpu")(on_cpu)
    model, x = Varlen(), drawn(11, 7)
    with varlen._varlen_attn.set_kernel_enabled("cpu"):
        before = model(x)
        with regard.watch(model, keep="qk") as seen:
            assert torch.equal(model(x), before)
        with regard.ablate(model, {"Varlen": [0, 5]}):
            assert not torch.allclose(model(x), before)
    varlen._varlen_attn.set_kernel_enabled("cpu", enabled=False).__enter__()  # as it was, for others
    close(seen[0].weights()[0], dense_varlen(*model.last, LENGTHS, LENGTHS, (2, 0)), "weights")


@torch.no_grad()
def test_an_operator_that_is_not_known_is_named() -> None:
    class Direct(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    model = Direct()
    said = r"Direct: it calls .*flash_attention_for_cpu.*, which shows nothing"
    with pytest.raises(ValueError, match=said), regard.watch(model):
        model(torch.randn(2, 5, 14))
