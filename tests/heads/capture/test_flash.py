"""A watch on flash attention of transformers, which is told lengths, not planes: what is seen is what it computes.

The functions are transformers' own, the kernels below them plain PyTorch (`flash_on_cpu.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from heads import hf_models
from heads.flash_on_cpu import Flash, flash_on_cpu
from heads.hf_models import SPECIAL
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor, nn
from transformers.masking_utils import flash_attention_mask, sdpa_mask

import regard

FAMILIES = ["llama", "mistral", "gemma2", "qwen3", "gpt_oss", "bert", "gpt_neox"]
SIDES = {
    "full": (),
    "left": ((0, 0), (3, 13)),
    "right": ((0, 7), (0, 0)),
    "both": ((2, 9), (1, 12)),
}  # which tokens of 13 are real; (0, 0) stands for all


def padded(side: str, batch: int = 2, tokens: int = 13) -> dict[str, Tensor]:
    ids = hf_models.some_ids(batch, tokens)
    mask = torch.ones_like(ids)
    for row, (first, last) in enumerate(SIDES[side][:batch]):
        if last:
            mask[row] = 0
            mask[row, first:last] = 1
    ids[mask == 0] = SPECIAL["pad_token_id"]
    return {"input_ids": ids} if side == "full" else {"input_ids": ids, "attention_mask": mask}


def stitched(pieces: list[Tensor]) -> Tensor:
    """The weights (B, H, n, m) of pieces of a text, with the keys of the whole: (B, H, N, M)."""
    total = sum(piece.shape[2] for piece in pieces)
    seen, rows = 0, []
    for piece in pieces:
        seen += piece.shape[2]
        rows.append(nn.functional.pad(piece, (seen - piece.shape[3], total - seen)))
    return torch.cat(rows, 2)


def compare(model: nn.Module, seen: Any, flash: Flash, atol: float = 1e-6) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    computed: dict[str, list[Tensor]] = {}
    for module, weights in flash.weights:
        computed.setdefault(names[id(module)], []).append(weights)
    assert seen.layers == list(computed)
    for name, pieces in computed.items():
        right = stitched(pieces) if seen[name].kind == "self" else torch.cat(pieces, 2)
        assert seen[name].weights().shape == right.shape
        close(seen[name].weights(), right, name, atol)


def run(model: Any, given: dict[str, Any], **options: Any) -> Any:
    with torch.no_grad():
        return model(**given, **options)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass(family: str, side: str) -> None:
    """Windows, softcaps, sinks, both directions; texts padded on the left, on the right, on both sides."""
    model = hf_models.model(family)
    for batch in (1, 2):
        given = padded(side, batch)
        with flash_on_cpu(model) as flash:
            before = run(model, given)[0]
            flash.weights.clear()
            with regard.watch(model, measures=wanted(), keep="qk") as seen:
                during = run(model, given)[0]
        assert torch.equal(during, before)
        compare(model, seen, flash)
    for name, (_, weights) in zip(seen.layers, flash.weights, strict=True):
        agree(seen[name], Oracle(weights))


@pytest.mark.parametrize(
    "family, side", [("llama", "full"), ("llama", "left"), ("mistral", "left"), ("gemma2", "left"), ("gpt_oss", "full")]
)
def test_a_prompt_in_pieces_and_tokens(family: str, side: str) -> None:
    """The last query stands at the last key, also where there are fewer queries than keys."""
    model, given = hf_models.model(family), padded(side, tokens=13)
    with flash_on_cpu(model) as flash, regard.watch(model, keep="qk") as seen:
        cache, read = None, 0
        for piece in given["input_ids"].split([5, 3, 1, 4], dim=1):
            read += piece.shape[1]
            own = {"attention_mask": given["attention_mask"][:, :read]} if side != "full" else {}
            cache = run(model, {"input_ids": piece}, past_key_values=cache, use_cache=True, **own).past_key_values
    compare(model, seen, flash)
    assert seen[0].weights().shape[2:] == (13, 13)


@pytest.mark.parametrize("family, cache", [("mistral", "dynamic"), ("llama", "static")])
def test_generation(family: str, cache: str) -> None:
    model, given = hf_models.model(family), padded("left")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    with flash_on_cpu(model) as flash:
        right = model.generate(**given, **options)
        flash.weights.clear()
        with regard.watch(model, keep="qk") as seen:
            assert torch.equal(model.generate(**given, **options), right)
    read = 13 + 4
    assert seen[0].weights().shape[2:] == (read, read)
    names = {id(module): name for name, module in model.named_modules()}
    for name in seen.layers:
        at = 0
        for weights in [w for module, w in flash.weights if names[id(module)] == name]:
            own = seen[name].weights(rows=slice(at, at + weights.shape[2]))
            at += weights.shape[2]
            first = max(0, at - weights.shape[3])
            close(own[..., first:at], weights[..., : at - first], name, 1e-6)
            assert not own[..., at:].any()
            assert not own[..., :first].any()


@pytest.mark.parametrize(
    "family, by", [("llama", "positions"), ("mistral", "positions"), ("gemma2", "lengths"), ("bert", "lengths")]
)
def test_packed_texts(family: str, by: str) -> None:
    """Texts in one row: positions that begin again, or the places where they begin (BERT's positions do not reach its
    attention)."""
    model, ids = hf_models.model(family), hf_models.some_ids(1, 13)
    given: dict[str, Any] = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]}
    if by == "lengths":
        starts = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
        given |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7}
    with flash_on_cpu(model) as flash, regard.watch(model, keep="qk") as seen:
        run(model, given | ({} if family == "bert" else {"use_cache": False}))
    compare(model, seen, flash)
    assert not seen[0].weights()[..., 6:, :6].any(), "no text sees another"


def test_texts_of_several_rows_by_lengths() -> None:
    """All rows in one: a text may not go on in the next row, for what is seen is laid out by rows."""
    model, ids = hf_models.model("llama"), hf_models.some_ids(2, 13)
    starts = torch.tensor([0, 5, 13, 20, 26], dtype=torch.int32)
    lengths = {"max_length_q": 8, "max_length_k": 8}
    with flash_on_cpu(model) as flash:
        with regard.watch(model, keep="qk") as seen:
            run(model, {"input_ids": ids}, cu_seq_lens_q=starts, cu_seq_lens_k=starts, **lengths, use_cache=False)
        compare(model, seen, flash)
        across = torch.tensor([0, 5, 17, 26], dtype=torch.int32)
        with pytest.raises(ValueError, match="texts that lie in one row"), regard.watch(model):
            run(model, {"input_ids": ids}, cu_seq_lens_q=across, cu_seq_lens_k=across, **lengths, use_cache=False)


def test_holes_in_a_mask() -> None:
    """What is no token is cut out: a window counts the tokens that are left."""
    model, given = hf_models.model("mistral"), padded("full")
    mask = [[1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]]
    given["attention_mask"] = torch.tensor(mask)
    with flash_on_cpu(model) as flash, regard.watch(model, keep="qk") as seen:
        run(model, given)
    compare(model, seen, flash)


def test_a_window_to_both_sides() -> None:
    sizes = (
        hf_models._BERT
        | {"hidden_size": 36}
        | {"local_attention": 4, "global_attn_every_n_layers": 2, "num_hidden_layers": 3}
    )
    torch.manual_seed(0)
    model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, **SPECIAL)).double().eval()
    with flash_on_cpu(model) as flash, regard.watch(model, keep="qk") as seen:
        run(model, padded("right"))
    compare(model, seen, flash)


@pytest.mark.parametrize("source", [5, 13], ids=["longer", "shorter"])
def test_cross_attention(source: int) -> None:
    """More queries than keys, and fewer, of a source without padding."""
    model = hf_models.model("bart")
    given = {"input_ids": hf_models.some_ids(2, source), "decoder_input_ids": hf_models.some_ids(2, 7, seed=3)}
    with flash_on_cpu(model) as flash, regard.watch(model, keep="qk") as seen:
        run(model, given, use_cache=False)
    compare(model, seen, flash)


def test_masks_are_told_by_what_they_are() -> None:
    """By the function that makes them, not by its name: one of somebody's own, wrapped; and none at all."""

    def own(*args: Any, **options: Any) -> Any:
        return flash_attention_mask(*args, **options)

    for masks in (own, functools.partial(flash_attention_mask), None):
        model = hf_models.model("mistral")
        with flash_on_cpu(model, masks=masks) as flash, regard.watch(model, keep="qk") as seen:
            cache = run(model, {"input_ids": hf_models.some_ids(1, 7)}, use_cache=True).past_key_values
            run(model, {"input_ids": hf_models.some_ids(1, 5, seed=3)}, past_key_values=cache)
        compare(model, seen, flash)


def test_what_a_kernel_leaves_out_is_not_seen() -> None:
    """Some kernels know no sinks: transformers leaves them out without a word."""
    model, flash = hf_models.model("gpt_oss"), Flash()

    def without_sinks(*args: Any, s_aux: Any = None, **options: Any) -> Any:
        return flash(*args, **options)

    with flash_on_cpu(model, without_sinks), regard.watch(model, keep="qk") as seen:
        run(model, padded("left"))
    compare(model, seen, flash)
    close(seen[0].weights().sum(-1)[1, :, -1], torch.ones(6), "no sink")


def test_what_is_not_understood_is_said() -> None:
    """A function that does something else with its tensors: no record of what it might have been."""

    def backwards(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k.flip(-1), v, enable_gqa=True).transpose(1, 2), None

    model = hf_models.model("llama")
    watch = regard.watch(model)
    with flash_on_cpu(model, backwards, sdpa_mask):
        with pytest.raises(ValueError, match=r"'lengths_on_cpu' computed other than what its"), watch:
            run(model, padded("full"))
        assert list(watch.unseen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_paged_caches_are_refused() -> None:
    model = hf_models.model("llama")
    with flash_on_cpu(model), pytest.raises(ValueError, match="paged cache"), regard.watch(model):
        run(model, padded("full"), block_table=torch.zeros(2, 3, dtype=torch.int32))


def test_heads_are_changed() -> None:
    """`ablate` acts in the same place."""
    model, given = hf_models.model("llama"), padded("left")
    right = run(hf_models.model("llama"), given).logits
    with flash_on_cpu(model), regard.ablate(model, {0: [1, 4], 1: [0]}):
        got = run(model, given).logits
    assert not torch.allclose(got[1, -1], right[1, -1], atol=1e-3)
    plain = hf_models.model("llama")
    with regard.ablate(plain, {0: [1, 4], 1: [0]}):
        right = run(plain, given).logits
    close(got[0], right[0], "logits")
    close(got[1, 3:], right[1, 3:], "logits")
