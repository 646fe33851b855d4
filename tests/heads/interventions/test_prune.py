"""`prune` against zeroed heads: a hook that sets their slice of what goes into the output projection to zero."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import regard.onednn
from regard import AttentionBlock, KVCache, MultiHeadAttention, models, swap
from regard.heads import load_pruned, save_pruned
from regard.heads.interventions.prune import prune
from regard.layouts.swap import SplitAttention
from regard.masks import Causal
from regard.models import Decoder, Encoder, ModelConfig
from regard.positions import Alibi, RelativeBias, Rotary

B, N, M, W = 2, 5, 7, 13
GROWS = "ignore:regard.prune. .* kv heads instead of:UserWarning"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def randomised(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Every parameter drawn anew, biases and norms too: none of them may be lost unseen."""
    module.to(dtype)
    for number, (name, parameter) in enumerate(module.named_parameters()):
        noise = 0.3 * drawn(*parameter.shape, seed=number).to(dtype)
        norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.data = 1 + noise if norm else noise
    return module.eval()


@contextmanager
def zeroed(*heads: tuple[nn.Module, int, list[int]]) -> Iterator[None]:
    """Within it, what those heads give to an output projection is zero: (projection, how many heads, which)."""

    def hook(count: int, gone: list[int]) -> Any:
        def zero(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = inputs[0].unflatten(-1, (count, -1)).clone()
            x[..., gone, :] = 0
            return (x.flatten(-2), *inputs[1:])

        return zero

    handles = [out.register_forward_pre_hook(hook(count, gone)) for out, count, gone in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def close(ours: Tensor, wanted: Tensor) -> None:
    """Equal to rounding: 1e-6 of the largest in float32, 1e-12 in float64."""
    error = (ours - wanted).abs().max()
    assert ours.shape == wanted.shape
    assert error <= (1e-6 if wanted.dtype == torch.float32 else 1e-12) * wanted.abs().max(), error


def fresh(model: nn.Module, like: dict[str, Tensor]) -> nn.Module:
    """Another model with those weights and none of its own."""
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    model.load_state_dict(like, strict=True)
    return model.eval()


# ----------------------------------------------------------------------------------------------------
# The layer

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 5, "head_dim": 3},
    "no biases": {"num_heads": 5, "head_dim": 3, "bias": False},
    "biases within": {"num_heads": 5, "head_dim": 3, "bias": True, "out_bias": False},
    "other widths": {"num_heads": 5, "head_dim": 3, "value_head_dim": 2, "query_dim": 11, "key_dim": 17},
    "rotary": {"num_heads": 5, "head_dim": 4, "position_encoding": lambda: Rotary(4)},
    "alibi": {"num_heads": 5, "head_dim": 3, "position_encoding": lambda: Alibi(5)},
    "slopes": {"num_heads": 5, "head_dim": 3, "position_encoding": lambda: Alibi(5, slopes=drawn(5).abs())},
    "relative": {"num_heads": 5, "head_dim": 3, "position_encoding": lambda: RelativeBias(5, num_buckets=7)},
    "norms": {"num_heads": 5, "head_dim": 3, "qk_norm": "rms"},
    "sinks": {"num_heads": 5, "head_dim": 3, "sinks": True, "softcap": 2.0, "scale": 0.7},
    "grouped": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 5, "value_head_dim": 2, "sinks": True},
    "grouped relative": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 3,
        "position_encoding": lambda: RelativeBias(6, num_buckets=7),
    },
    "one kv head": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 3},
}


def layer(kind: str = "plain", dtype: torch.dtype = torch.float64) -> MultiHeadAttention:
    options = dict(LAYERS[kind])
    if "position_encoding" in options:
        options["position_encoding"] = options["position_encoding"]()
    made = randomised(MultiHeadAttention(W, **options), dtype)
    assert isinstance(made, MultiHeadAttention)
    return made


def inputs(module: MultiHeadAttention) -> tuple[Tensor, ...]:
    dtype = module.q_proj.weight.dtype
    x = drawn(B, N, module.query_dim).to(dtype)
    return (x,) if module.query_dim == module.key_dim else (x, drawn(B, M, module.key_dim).to(dtype))


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gone", [[0], [4], [1, 3], [3, 0, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_is_as_with_zeroed_heads(kind: str, gone: list[int], dtype: torch.dtype) -> None:
    module = layer(kind, dtype)
    x, heads, size = inputs(module), module.num_heads, sum(p.numel() for p in module.parameters())
    with zeroed((module.out_proj, heads, gone)):
        wanted = module(*x)
        weights = module(*x, need_weights=True)[1]
    assert prune(module, gone) is module
    close(module(*x), wanted)
    kept = [head for head in range(heads) if head not in gone]
    close(module(*x, need_weights=True)[1], weights[:, kept])
    assert module.num_heads == len(kept)
    assert module.q_proj.out_features == module.q_proj.weight.shape[0] == len(kept) * module.head_dim
    assert module.out_proj.in_features == module.out_proj.weight.shape[1] == len(kept) * module.value_head_dim
    if module.num_kv_heads <= LAYERS[kind].get("num_kv_heads", heads):
        assert sum(p.numel() for p in module.parameters()) < size


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("h, g", [(2, 1), (2, 2), (4, 2), (5, 1), (6, 2), (6, 3)])
def test_every_way_to_prune_grouped_heads(h: int, g: int) -> None:
    module = randomised(MultiHeadAttention(W, h, num_kv_heads=g, head_dim=3, value_head_dim=2))
    x = drawn(B, N, W)
    for count in range(1, h):
        for gone in itertools.combinations(range(h), count):
            with zeroed((module.out_proj, h, list(gone))):
                wanted = module(x)
            pruned = prune(copy.deepcopy(module), gone)
            close(pruned(x), wanted)
            left = [sum(head not in gone for head in range(i, i + h // g)) for i in range(0, h, h // g)]
            assert pruned.num_heads == sum(left)
            assert pruned.num_kv_heads == sum(left) // math.gcd(*left)  # no fewer would be exact
            assert pruned.k_proj.out_features == pruned.k_proj.weight.shape[0] == pruned.num_kv_heads * 3
            assert pruned.v_proj.out_features == pruned.v_proj.weight.shape[0] == pruned.num_kv_heads * 2


def test_kv_heads_go_with_the_last_that_needs_them() -> None:
    module = layer("grouped")
    rows = module.k_proj.weight.detach().unflatten(0, (3, 5))
    prune(module, [0, 2, 4])
    assert module.num_kv_heads == 3
    assert torch.equal(module.k_proj.weight.unflatten(0, (3, 5)), rows)
    prune(module, [1])
    assert module.num_kv_heads == 2
    assert torch.equal(module.k_proj.weight.unflatten(0, (2, 5)), rows[[0, 2]])


def test_kv_heads_that_grow_are_told_of() -> None:
    module = layer("grouped")
    with pytest.warns(UserWarning, match=r"regard.prune: MultiHeadAttention: 5 kv heads instead of 3, .* each"):
        prune(module, [0])
    assert (module.num_heads, module.num_kv_heads) == (5, 5)


def test_a_warning_that_is_an_error_changes_nothing() -> None:
    module = layer("grouped")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UserWarning):
        prune(module, [0])
    same_state(module, before)


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("kind", LAYERS)
def test_twice_is_as_once(kind: str) -> None:
    once, twice = layer(kind), layer(kind)
    prune(once, [0, 1, 2, 3])
    prune(prune(twice, [0, 1]), [0, 1])  # of those left, the first are 2 and 3
    if kind == "grouped relative":  # two of what were three copies of a kv head stay two
        assert (once.num_kv_heads, twice.num_kv_heads) == (1, 2)
    else:
        same_state(twice, once.state_dict())
    close(twice(*inputs(twice)), once(*inputs(once)))


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("kind", LAYERS)
def test_saved_and_loaded(kind: str) -> None:
    module = prune(layer(kind), [1, 4])
    wanted = module(*inputs(module))
    close(fresh(prune(layer(kind), [1, 4]), module.state_dict())(*inputs(module)), wanted)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        close(other(*inputs(module)), wanted)
        assert other.num_heads == module.num_heads


@pytest.mark.parametrize("kind", ["plain", "relative", "sinks", "grouped"])
def test_gradients_are_those_of_the_rows_that_stay(kind: str) -> None:
    whole, gone = layer(kind), [0, 1]
    pruned = prune(copy.deepcopy(whole), gone)
    with zeroed((whole.out_proj, whole.num_heads, gone)):
        whole(*inputs(whole)).square().sum().backward()
    pruned(*inputs(pruned)).square().sum().backward()
    d, e = whole.head_dim, whole.value_head_dim
    close(pruned.q_proj.weight.grad, whole.q_proj.weight.grad[2 * d :])
    close(pruned.out_proj.weight.grad, whole.out_proj.weight.grad[:, 2 * e :])
    close(pruned.out_proj.bias.grad, whole.out_proj.bias.grad)
    lost = 1 if kind == "grouped" else 2
    close(pruned.k_proj.weight.grad, whole.k_proj.weight.grad[lost * d :])
    close(pruned.v_proj.bias.grad, whole.v_proj.bias.grad[lost * e :])
    if whole.sinks is not None:
        close(pruned.sinks.grad, whole.sinks.grad[2:])
    if isinstance(whole.position_encoding, RelativeBias):
        close(pruned.position_encoding.weight.grad, whole.position_encoding.weight.grad[:, 2:])


def test_what_is_not_heads_stays() -> None:
    module = layer("relative").train()
    module.q_proj.weight.requires_grad_(False)
    module.position_encoding.requires_grad_(False)
    linears, called = [module.q_proj, module.out_proj], []
    module.q_proj.register_forward_hook(lambda *_: called.append(1))
    module.bfloat16()
    with torch.inference_mode():
        prune(module, [2])
    assert linears == [module.q_proj, module.out_proj]
    assert all(type(p) is nn.Parameter and p.dtype == torch.bfloat16 for p in module.parameters())
    assert not any(p.is_inference() for p in module.parameters())
    assert {name for name, p in module.named_parameters() if not p.requires_grad} == {
        "q_proj.weight",
        "position_encoding.weight",
    }
    assert module.training
    assert module.position_encoding.training
    module(drawn(B, N, W).bfloat16()).sum().backward()
    assert called == [1]
    on_meta = prune(MultiHeadAttention(W, 5, head_dim=3).to("meta"), [0])
    assert on_meta.q_proj.weight.is_meta
    assert on_meta.q_proj.weight.shape == (12, W)


def test_slopes_stay_exact_when_moved() -> None:
    module = prune(layer("alibi"), [0, 2]).bfloat16()
    assert module.position_encoding.slopes.tolist() == [Alibi(5).slopes.tolist()[head] for head in (1, 3, 4)]


def test_no_heads_to_remove_changes_nothing() -> None:
    module = layer()
    weight = module.q_proj.weight
    assert prune(module, []).q_proj.weight is weight
    assert prune(module, {}).q_proj.weight is weight
    assert prune(module, {0: ()}).q_proj.weight is weight


def test_numbers_in_any_form() -> None:
    wanted = prune(layer(), [1, 3]).state_dict()
    for gone in ((1, 3), {3, 1}, range(1, 4, 2), torch.tensor([3, 1]), iter([1, 3])):
        same_state(prune(layer(), gone), wanted)
    same_state(prune(layer(), {0: [1, 3]}), wanted)
    same_state(prune(layer(), {"": [1, 3]}), wanted)


def test_block() -> None:
    block = randomised(AttentionBlock(MultiHeadAttention(W, 5, head_dim=3)))
    with zeroed((block.layer.out_proj, 5, [1])):
        wanted = block(drawn(B, N, W))
    close(prune(block, [1])(drawn(B, N, W)), wanted)


def test_caches_made_afterwards() -> None:
    module = prune(layer("grouped"), [0, 1])
    x = drawn(B, N, W)
    with torch.no_grad():
        whole, cache = module(x, mask=Causal()), KVCache()
        parts = [module(x[:, i : i + 1], mask=Causal(), cache=cache) for i in range(N)]
        close(torch.cat(parts, 1), whole)
        before = KVCache()
        layer("grouped")(x, cache=before)
        with pytest.raises(ValueError, match=r"cached keys: expected batch, heads and width \(2, 3, 5\)"):
            module(x, cache=before)


# ----------------------------------------------------------------------------------------------------
# Modules made by swap


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options, split",
    [
        ({}, False),
        ({}, True),
        ({"bias": False}, False),
        ({"kdim": 7, "vdim": 11}, False),
        ({"kdim": 7, "vdim": 11}, True),
        ({"add_bias_kv": True, "add_zero_attn": True}, False),
    ],
)
def test_swapped(options: dict[str, Any], split: bool, dtype: torch.dtype) -> None:
    module = swap(randomised(nn.MultiheadAttention(15, 5, batch_first=True, **options), dtype), split=split)
    widths = (15, options.get("kdim", 15), options.get("vdim", 15))
    q, k, v = (drawn(B, n, width, seed=width).to(dtype) for n, width in zip((N, M, M), widths, strict=True))
    hidden = torch.arange(M) >= torch.tensor([[M], [M - 3]])
    with zeroed((module.out_proj, 5, [0, 3])):
        wanted, weights = module(q, k, v, key_padding_mask=hidden, average_attn_weights=False)
    prune(module, [0, 3])
    ours = module(q, k, v, key_padding_mask=hidden, average_attn_weights=False)
    close(ours[0], wanted)
    close(ours[1], weights[:, [1, 2, 4]])
    assert module.num_heads == 3
    again = swap(nn.MultiheadAttention(15, 5, batch_first=True, dtype=dtype, **options), split=split)
    close(fresh(prune(again, [0, 3]), module.state_dict())(q, k, v, key_padding_mask=hidden)[0], wanted)
    close(pickle.loads(pickle.dumps(module))(q, k, v, key_padding_mask=hidden)[0], wanted)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("split", [False, True])
def test_inside_torchs_transformer(split: bool) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(15, 5, 7, batch_first=True), 2)
    swap(randomised(model), split=split)
    x, first, second = drawn(B, N, 15), model.layers[0].self_attn, model.layers[1].self_attn
    with torch.no_grad():
        with zeroed((first.out_proj, 5, [4]), (second.out_proj, 5, [0, 1])):
            wanted = model(x)
        prune(model, {"layers.0.self_attn": [4], 1: [0, 1]})
        close(model(x), wanted)
        if not split:  # and split afterwards
            close(swap(model, split=True)(x), wanted)
            assert isinstance(model.layers[0].self_attn, SplitAttention)


def test_names_of_a_split_module() -> None:
    model = nn.ModuleDict({"a": swap(nn.MultiheadAttention(15, 5), split=True)})
    prune(model, {"a": [0]})
    prune(model, {"a.layer": [0]})
    assert model["a"].num_heads == 3


# ----------------------------------------------------------------------------------------------------
# Models of ours

_ENCODER: dict[str, Any] = {"layers": 3, "embed_dim": 15, "num_heads": 5, "vocabulary": 97, "inner": 7, "context": 43}
_DECODER: dict[str, Any] = {
    **_ENCODER,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 4,
    "positions": "rotary",
    "kind": "decoder",
    "causal": True,
    "norm": "rms",
    "gated": True,
}


def ids(batch: int = B, tokens: int = N) -> Tensor:
    return torch.randint(0, 97, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def test_a_pruned_model_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "small.safetensors"
    model = randomised(Encoder(ModelConfig(**_ENCODER)))
    gone = {0: torch.tensor([1]), "blocks.2.attention": range(2)}
    prune(model, gone)
    save_pruned(model, gone, file)
    read = load_pruned(file, Encoder(ModelConfig(**_ENCODER)).double().eval())
    close(read(ids()), model(ids()))
    save_file({"x": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"small.*: expected a file that `save_pruned` wrote, received another safete"):
        load_pruned(file)


def pruned_file(path: Path, about: Any) -> Path:
    save_file({"x": torch.zeros(3)}, path, metadata={"regard.pruned": json.dumps(about)})
    return path


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "folder", "file.gguf", "", "minilm\x00"])
def test_a_file_does_not_choose_what_else_is_opened(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was opened"))
    file = pruned_file(tmp_path / "small", {"model": name, "heads": []})
    with pytest.raises(
        ValueError, match=r"small: model: expected one of minilm, smollm2, received .*remedy: say which"
    ):
        load_pruned(file)


def test_the_model_of_a_pruned_file_may_be_named(tmp_path: Path, monkeypatch: Any) -> None:
    """By the caller, as `models.load` takes it; the file's own name counts for nothing then."""
    model, gone, named = randomised(Encoder(ModelConfig(**_ENCODER))), {0: [1]}, []
    prune(model, gone)
    save_pruned(model, gone, tmp_path / "small")
    whole = lambda name: named.append(name) or Encoder(ModelConfig(**_ENCODER)).double().eval()  # noqa: E731
    monkeypatch.setattr(models, "load", whole)
    close(load_pruned(tmp_path / "small", tmp_path / "whole")(ids()), model(ids()))
    assert named == [tmp_path / "whole"]


@pytest.mark.parametrize(
    "about, words",
    [
        ([], "regard.pruned: expected an object"),
        ({"model": "minilm"}, "heads: expected a list, received None"),
        ({"heads": []}, "model: expected a string, received None"),
        ({"model": 3, "heads": []}, "model: expected a string"),
        ({"model": "minilm", "heads": [[0]]}, r"heads\[0\]: expected a list of 2, received one of 1"),
        ({"model": "minilm", "heads": [[0, 5]]}, "heads: expected a list, received 5"),
        ({"model": "minilm", "heads": [[0, [-1]]]}, r"heads\[0\]: expected an integer from 0 on"),
        ({"model": "minilm", "heads": [[0, [1.0]]]}, r"heads\[0\]: expected an integer from 0 on"),
        ({"model": "minilm", "heads": [[None, [1]]]}, r"heads: expected an integer from "),
        ({"model": "minilm", "heads": [[10**9, [1]]]}, r"heads: expected an integer from "),
        ({"model": "minilm", "heads": [[0, [1]], [0, [2]]]}, "heads: expected each layer once"),
    ],
)
def test_a_pruned_file_that_is_damaged(about: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"small: {words}"):
        load_pruned(pruned_file(tmp_path / "small", about), Encoder(ModelConfig(**_ENCODER)))


def test_a_pruned_file_with_weights_of_another_model(tmp_path: Path) -> None:
    file = pruned_file(tmp_path / "small", {"model": "minilm", "heads": [[0, [1]]]})
    with pytest.raises(
        ValueError, match=r"small: expected the weights of .* without those heads, received one that is"
    ):
        load_pruned(file, Encoder(ModelConfig(**_ENCODER)))
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"small: expected a file that `save_pruned` wrote, received one that is dama"):
        load_pruned(file, Encoder(ModelConfig(**_ENCODER)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_encoder(dtype: torch.dtype) -> None:
    config = ModelConfig(**_ENCODER, order="post")
    model = randomised(Encoder(config), dtype)
    with zeroed((model.blocks[0].attention.out_proj, 5, [1]), (model.blocks[2].attention.out_proj, 5, [0, 2])):
        wanted = model(ids())
    plan = {"blocks.0.attention": [1], 2: [0, 2]}
    close(prune(model, plan)(ids()), wanted)
    close(fresh(prune(Encoder(config).to(dtype), plan), model.state_dict())(ids()), wanted)


def test_a_shared_table_of_biases() -> None:
    """T5's kin: one table for all layers. Who keeps the same heads still shares one; no other layer is changed."""
    config = ModelConfig(**_ENCODER, positions="relative")
    model = randomised(Encoder(config))
    attention = [block.attention for block in model.blocks]
    assert isinstance(attention[0].position_encoding, RelativeBias)
    table = attention[0].position_encoding
    outs = [part.out_proj for part in attention]
    with zeroed((outs[0], 5, [1]), (outs[1], 5, [1])):
        wanted = model(ids())
    close(prune(model, {0: [1], 1: [1]})(ids()), wanted)
    assert attention[0].position_encoding is attention[1].position_encoding
    assert attention[2].position_encoding is table
    close(fresh(prune(Encoder(config).double(), {0: [1], 1: [1]}), model.state_dict())(ids()), wanted)
    prune(model, {0: [0]})
    assert attention[0].position_encoding.weight.shape[1] == 3
    assert attention[1].position_encoding.weight.shape[1] == 4


def test_decoder_with_caches() -> None:
    model = randomised(Decoder(ModelConfig(**_DECODER)))
    with torch.no_grad():
        with zeroed(
            (model.blocks[0].attention.out_proj, 6, [0, 1]), (model.blocks[1].attention.out_proj, 6, [0, 3, 5])
        ):
            wanted = model(ids())
        prune(model, {"blocks.0.attention": [0, 1], 1: [0, 3, 5]})
        close(model(ids()), wanted)
        for window in (None, N):
            cache = model.new_cache(window)
            close(torch.cat([model(ids()[:, i : i + 1], cache=cache) for i in range(N)], 1), wanted)
    assert [block.attention.num_kv_heads for block in model.blocks] == [2, 3, 3]


@pytest.mark.skipif(not regard.onednn.dtypes(), reason="oneDNN, which packs weights, is not there")
def test_packed_copies_are_not_those_of_before() -> None:
    model = randomised(Decoder(ModelConfig(**_DECODER)), torch.float32)
    x = ids(1, 1)
    with torch.no_grad():
        copies = model.packed()
        with copies:
            whole = model(x)
            with zeroed((model.blocks[0].attention.out_proj, 6, [0, 1])):
                wanted = model(x)
            assert (wanted - whole).abs().max() > 1e-3
            prune(model, {0: [0, 1]})
            close(model(x), wanted)
        with copies:
            close(model(x), wanted)
        with model.packed():
            close(model(x), wanted)


# ----------------------------------------------------------------------------------------------------
# Hugging Face transformers

_BERT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 15,
    "num_attention_heads": 5,
    "intermediate_size": 7,
    "vocab_size": 97,
    "max_position_embeddings": 43,
}
_LLAMA: dict[str, Any] = {**_BERT, "hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
_BART: dict[str, Any] = {
    "vocab_size": 97,
    "max_position_embeddings": 43,
    "d_model": 15,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 7,
    "decoder_ffn_dim": 7,
}
_GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 15, "n_head": 5, "n_inner": 7, "vocab_size": 97, "n_positions": 43}
SPECIAL: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}

# The model, its sizes, the first two attention modules, their output projections within them, how many heads.
MODELS: dict[str, tuple[str, dict[str, Any], str, str, int]] = {
    "Bert": ("BertModel", _BERT, "encoder.layer.{}.attention", "output.dense", 5),
    "BertDecoder": ("BertModel", {**_BERT, "is_decoder": True}, "encoder.layer.{}.attention", "output.dense", 5),
    "Roberta": ("RobertaModel", _BERT, "encoder.layer.{}.attention", "output.dense", 5),
    "DistilBert": (
        "DistilBertModel",
        {"n_layers": 2, "dim": 15, "n_heads": 5, "hidden_dim": 7, "vocab_size": 97, "max_position_embeddings": 43},
        "transformer.layer.{}.attention",
        "out_lin",
        5,
    ),
    "ViT": ("ViTModel", {**_BERT, "image_size": 15, "patch_size": 5}, "layers.{}.attention", "o_proj", 5),
    "GPT2": ("GPT2Model", _GPT2, "h.{}.attn", "c_proj", 5),
    "Llama": ("LlamaModel", _LLAMA, "layers.{}.self_attn", "o_proj", 6),
    "Qwen3": ("Qwen3Model", _LLAMA, "layers.{}.self_attn", "o_proj", 6),
}


def theirs(kind: str, sizes: dict[str, Any], implementation: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    """A tiny random model of transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers, whose models these are, is not installed")
    made = getattr(transformers, kind)
    config = made.config_class(**sizes, **SPECIAL)
    config._attn_implementation = implementation
    return randomised(made(config), dtype)


def result(model: Any, **options: Any) -> Tensor:
    if model.main_input_name == "pixel_values":
        return model(drawn(B, 3, 15, 15).to(model.dtype))[0]
    return model(ids() % 90 + 4, **options)[0]  # without the special tokens


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_transformers(kind: str, implementation: str, dtype: torch.dtype) -> None:
    name, sizes, path, out, heads = MODELS[kind]
    model = theirs(name, sizes, implementation, dtype)
    plan = {path.format(0): [0, 1], path.format(1): [2, 4, 3]}
    outs = [model.get_submodule(f"{path.format(i)}.{out}") for i in (0, 1)]
    with torch.no_grad():
        whole = result(model)
        with zeroed((outs[0], heads, [0, 1]), (outs[1], heads, [2, 4, 3])):
            wanted = result(model)
        assert (whole - wanted).abs().max() > 1e-3
        assert prune(model, plan) is model
        close(result(model), wanted)
        again = fresh(prune(theirs(name, sizes, implementation, dtype), {0: [0, 1], 1: [2, 3, 4]}), model.state_dict())
        close(result(again), wanted)
        close(result(copy.deepcopy(model)), wanted)
        for linear in model.modules():
            if isinstance(linear, nn.Linear):
                assert linear.weight.shape == (linear.out_features, linear.in_features)


def test_numbers_that_transformers_keep() -> None:
    bert = prune(theirs("BertModel", _BERT), {"encoder.layer.0.attention.self": [0, 1]})
    inner = bert.encoder.layer[0].attention.self
    assert (inner.num_attention_heads, inner.all_head_size, inner.attention_head_size) == (3, 9, 3)
    gpt2 = prune(theirs("GPT2Model", _GPT2), {1: [0, 1]}).h[1].attn
    assert (gpt2.num_heads, gpt2.split_size, gpt2.head_dim, gpt2.c_attn.nf, gpt2.c_proj.nx) == (3, 9, 3, 27, 9)
    llama = prune(theirs("LlamaModel", _LLAMA), {0: [0, 1], 1: [0, 2, 4]})
    assert [part.self_attn.num_key_value_groups for part in llama.layers] == [2, 1]
    assert [part.self_attn.k_proj.out_features for part in llama.layers] == [8, 12]


@pytest.mark.filterwarnings(GROWS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_uneven_groups_of_llama(implementation: str) -> None:
    for gone in ([0], [1, 2, 3], [0, 5], [0, 1, 2], [5, 3, 2]):
        model = theirs("LlamaModel", _LLAMA, implementation)
        with torch.no_grad():
            with zeroed((model.layers[1].self_attn.o_proj, 6, gone)):
                wanted = result(model)
            close(result(prune(model, {1: gone})), wanted)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_generation_with_a_cache(kind: str, implementation: str) -> None:
    name, sizes, path, _, _ = MODELS[kind]
    head = name.replace("Model", "LMHeadModel" if kind == "GPT2" else "ForCausalLM")
    model = theirs(head, sizes, implementation)
    prune(model, {0: [0, 1], f"{model.base_model_prefix}.{path.format(1)}": [4]} if kind == "GPT2" else {0: [0, 1]})
    start = ids(1, 3) % 90 + 4
    tokens = {
        use_cache: model.generate(
            start, max_new_tokens=7, do_sample=False, use_cache=use_cache, attention_mask=torch.ones_like(start)
        ).tolist()
        for use_cache in (True, False)
    }
    assert tokens[True] == tokens[False]
    with torch.no_grad():
        cached = model(start, use_cache=True).past_key_values
        assert cached.layers[0].keys.shape[1] == (3 if kind == "GPT2" else 2)


def test_cross_attention() -> None:
    model = theirs("GPT2Model", {**_GPT2, "n_layer": 1, "add_cross_attention": True})
    beside = {"encoder_hidden_states": drawn(B, M, 15)}
    block = model.h[0]
    with torch.no_grad():
        with zeroed((block.attn.c_proj, 5, [1]), (block.crossattention.c_proj, 5, [0, 4])):
            wanted = result(model, **beside)
        prune(model, {"h.0.attn": [1], "h.0.crossattention": [0, 4]})
        close(result(model, **beside), wanted)
    model = theirs("BartModel", _BART)
    first = model.decoder.layers[0]
    with torch.no_grad():
        with zeroed((first.encoder_attn.out_proj, 5, [3]), (model.encoder.layers[0].self_attn.out_proj, 5, [0, 1])):
            wanted = result(model)
        prune(model, {"decoder.layers.0.encoder_attn": [3], "encoder.layers.0.self_attn": [0, 1]})
        close(result(model), wanted)
        assert first.encoder_attn.num_heads == 4


def test_sinks_of_transformers() -> None:
    sizes = {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 3}
    sizes |= {"hidden_size": 24, "intermediate_size": 8}  # its experts want rows of 16 bytes, and float32
    model = theirs("GptOssModel", sizes, dtype=torch.float32)
    attention = model.layers[0].self_attn
    with torch.no_grad():
        with zeroed((attention.o_proj, 6, [2, 3])):
            wanted = result(model)
        close(result(prune(model, {0: [2, 3]})), wanted)
    assert attention.sinks.shape == (4,)


def test_one_module_for_all_layers() -> None:
    model = theirs("AlbertModel", {**_BERT, "embedding_size": 11})
    attention = model.encoder.albert_layer_groups[0].albert_layers[0].attention
    with torch.no_grad():
        with zeroed((attention.dense, 5, [2])):
            wanted = result(model)
        close(result(prune(model, {0: [2]})), wanted)


def test_one_attention_within_a_layer_of_transformers() -> None:
    model = theirs("BertModel", _BERT)
    prune(model.encoder.layer[0], [0])
    prune(model.encoder.layer[1].attention, [0])
    assert [part.attention.self.num_attention_heads for part in model.encoder.layer] == [4, 4]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms over all heads": (
        "Olmo2Model",
        _LLAMA,
        r"layers.0.self_attn: expected projections, and norms over one "
        r"head, alone, received a parameter 'q_norm.weight' \(24,\)",
    ),
    "parameters beside": ("DiffLlamaModel", {**_LLAMA, "num_key_value_heads": 2}, "received a parameter 'lambda_q1'"),
    "another way to attend": (
        "NystromformerModel",
        {**_BERT, "segment_means_seq_len": 42, "num_landmarks": 7},
        "expected attention of transformers that is computed by its common functions "
        r"\(with head_dim and is_causal\), received NystromformerSelfAttention; "
        "remedy: regard.layouts.load",
    ),
    "another order": ("GPTBigCodeModel", _GPT2, "expected c_attn and c_proj as GPT-2 has them, Conv1D, received"),
    "shared keys": (
        "Gemma3nTextModel",
        {
            **_LLAMA,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 3,
            "laurel_rank": 2,
            "altup_num_inputs": 2,
            "layer_types": ["full_attention"] * 2,
        },
        "expected keys and values of its own, received some that layers share",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused(what: str) -> None:
    name, sizes, words = REFUSED[what]
    model = theirs(name, sizes)
    unchanged(model, {0: [0]}, ValueError if "received a" in words or "layers share" in words else TypeError, words)


# ----------------------------------------------------------------------------------------------------
# Weights in several places


def two(**options: Any) -> nn.ModuleList:
    made = nn.ModuleList(MultiHeadAttention(W, 5, head_dim=3, **options) for _ in range(2))
    assert isinstance(randomised(made), nn.ModuleList)
    return made


SHARED = "expected the same heads to go wherever a weight is shared, received weight, which is used elsewhere too"


@pytest.mark.parametrize("share", ["parameter", "module"])
def test_shared_weights(share: str) -> None:
    model = two()
    if share == "module":
        model[1].q_proj = model[0].q_proj
    else:
        model[1].q_proj.weight = model[0].q_proj.weight
    x = drawn(B, N, W)
    where = "1.q_proj.weight: "
    unchanged(model, {0: [1]}, ValueError, f"{where}{SHARED}; remedy: prune the same heads there, or give each a copy")
    unchanged(model, {0: [1], 1: [2]}, ValueError, SHARED)
    with zeroed((model[0].out_proj, 5, [1]), (model[1].out_proj, 5, [1])):
        wanted = [part(x) for part in model]
    prune(model, {0: [1], 1: [1]})
    for part, out in zip(model, wanted, strict=True):
        close(part(x), out)
    assert model[0].q_proj.weight is model[1].q_proj.weight


def test_a_weight_that_other_modules_use() -> None:
    model = two()
    model.append(nn.Linear(W, 15))
    model[2].weight = model[0].k_proj.weight
    unchanged(model, {0: [1]}, ValueError, f"2.weight: {SHARED}")


def test_keys_that_are_the_queries() -> None:
    module = layer()
    module.k_proj = module.q_proj
    with zeroed((module.out_proj, 5, [1])):
        wanted = module(drawn(B, N, W))
    close(prune(module, [1])(drawn(B, N, W)), wanted)
    assert module.k_proj is module.q_proj


def test_one_module_by_two_names() -> None:
    one = layer()
    model = nn.ModuleDict({"a": one, "b": one})
    words = "heads: expected each attention module once, received 'a' and 'b', which are the same; remedy: one list"
    unchanged(model, {"a": [0], "b": [1]}, ValueError, words)
    prune(model, {"b": [0]})
    assert one.num_heads == 4
    prune(model, [0])
    assert one.num_heads == 3


# ----------------------------------------------------------------------------------------------------
# Errors


def same_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    ours = module.state_dict()
    assert ours.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(ours[name], tensor), name


def unchanged(model: nn.Module, heads: Any, kind: type[Exception], words: str) -> None:
    """`prune` raises with these words, and nothing has changed: not a parameter, not a number."""
    before, parameters = repr(model), dict(model.named_parameters(remove_duplicate=False))
    numbers = [dict(vars(module)) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=words):
        prune(model, heads)
    assert repr(model) == before
    assert all(parameters[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    assert numbers == [dict(vars(module)) for module in model.modules()]
    same_state(model, state)


NUMBERS: list[tuple[Any, type[Exception], str]] = [
    ([5], ValueError, "expected head numbers from 0 to 4, received 5; remedy: numbers are those of the heads that are"),
    ([-1], ValueError, "expected head numbers from 0, received -1"),
    ([1, 2, 1], ValueError, "expected each head once, received 1 more than once"),
    ([0, 1, 2, 3, 4], ValueError, "expected at least one head to stay, received all 5; remedy: leave one, or take the"),
    ([True, False], TypeError, "expected a list of head numbers, received True among them; remedy: mask.nonzero"),
    ([1.0], TypeError, "expected a list of head numbers, received 1.0 among them"),
    (["1"], TypeError, "expected a list of head numbers, received '1' among them"),
    (3, TypeError, "expected a list of head numbers, received 3"),
    ("01", TypeError, "expected a list of head numbers, received '01'"),
    (None, TypeError, "expected a list of head numbers, received None"),
    (torch.tensor(3), TypeError, "expected a list of head numbers, received 3"),
    (torch.tensor([True, False]), TypeError, "expected a list of head numbers, received True among them"),
]


@pytest.mark.parametrize("gone, kind, words", NUMBERS)
def test_numbers_that_are_no_heads(gone: Any, kind: type[Exception], words: str) -> None:
    unchanged(layer(), gone, kind, f"^MultiHeadAttention: {words}")
    unchanged(two(), {0: [1], 1: gone}, kind, f"^1: {words}")  # the first is as it was, too


def test_keys_that_are_no_modules() -> None:
    model = randomised(Encoder(ModelConfig(**_ENCODER)))
    some = {0: [1]}
    words = (
        "heads: expected names of attention modules, received 'blocks.1.attentoin'; remedy: did you mean 'blocks.1.att"
    )
    unchanged(model, {**some, "blocks.1.attentoin": [0]}, ValueError, words)
    words = "received 'xyz'; remedy: there are 'blocks.0.attention', 'blocks.1.attention', 'blocks.2.attention'$"
    unchanged(model, {**some, "xyz": [0]}, ValueError, words)
    unchanged(model, {**some, "blocks.1": [0]}, ValueError, "received 'blocks.1'; remedy: did you mean")
    words = "heads: expected attention modules from 0 to 2, in module order, received {}"
    unchanged(model, {**some, 3: [0]}, ValueError, words.format(3))
    unchanged(model, {**some, -1: [0]}, ValueError, words.format(-1))
    words = "heads: expected names or numbers of attention modules as keys, received {}"
    unchanged(model, {**some, True: [0]}, TypeError, words.format(True))
    unchanged(model, {**some, 1.0: [0]}, TypeError, words.format(1.0))
    words = "expected each attention module once, received 0 and 'blocks.0.attention', which are the same"
    unchanged(model, {**some, "blocks.0.attention": [0]}, ValueError, words)
    words = "heads: expected a dict, for there are 3 attention modules, received list; remedy: {'blocks.0.attention': "
    unchanged(model, [0], TypeError, words)


def test_models_without_attention() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, received dict"):
        prune({}, [0])  # type: ignore[type-var]
    words = (
        "model: expected attention in it, each with its output projection, received Linear; remedy: the module around"
    )
    unchanged(nn.Linear(2, 3), [0], ValueError, words)
    unchanged(theirs("BertModel", _BERT).encoder.layer[0].attention.self, [0], ValueError, "received BertSelfAttention")


def test_attention_of_torch() -> None:
    words = "expected attention that can have fewer heads than fill its width, received MultiheadAttention of torch; "
    unchanged(nn.MultiheadAttention(15, 5), [0], TypeError, words + r"remedy: regard.swap\(model\), then prune")

    class Own(nn.MultiheadAttention):
        pass

    unchanged(Own(15, 5), [0], TypeError, "received Own, with code of its own; remedy: a regard.MultiHeadAttention in")


def test_layers_that_are_not_plain() -> None:
    words = (
        "^MultiHeadAttention: expected projections that are plain nn.Linear, received {}; remedy: undo what wraps them"
    )
    module = layer()
    module.q_proj = nn.Sequential(module.q_proj)  # type: ignore[assignment]
    unchanged(module, [0], TypeError, words.format("Sequential"))
    module = layer()
    nn.utils.parametrizations.weight_norm(module.v_proj)
    with pytest.raises(TypeError, match=words.format("ParametrizedLinear")):
        prune(module, [0])
    module = layer()
    module.gate = nn.Parameter(drawn(5))
    words = r"received a parameter 'gate' \(5,\) beside them, which may be of all heads"
    unchanged(module, [0], ValueError, words)
    module = layer()
    module.register_buffer("mean", drawn(5))
    unchanged(
        module, [0], ValueError, r"expected no buffers with one number per head, received 'mean' \(5,\), for 5 heads"
    )
    module = layer()
    module.num_heads = 3  # a shard of them, say
    unchanged(module, [0], ValueError, "expected 3 heads of width 3 and 5 kv heads, so q_proj.weight of 9, received 15")
    module = layer()
    module.q_proj.weight = nn.UninitializedParameter()
    with pytest.raises(TypeError, match="expected weights that are plain parameters, received weight: Uninitialized"):
        prune(module, [0])
    module = layer()
    module.position_encoding = nn.Identity()
    unchanged(
        module, [0], TypeError, "expected position_encoding: Rotary, Alibi, RelativeBias or None, received Identity"
    )
    module = layer()
    module.position_encoding = Alibi(3)
    unchanged(module, [0], ValueError, "expected a position_encoding of 5 heads, received 3")


def test_adapters_are_to_be_merged_first() -> None:
    peft = pytest.importorskip("peft", reason="peft, which makes adapters, is not installed")
    model = peft.get_peft_model(two(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"expected projections that are plain nn.Linear, .* merge adapters"):
        prune(model, {0: [0]})
    assert prune(model.merge_and_unload(), {0: [0]})[0].num_heads == 4


def test_groups_that_transformers_do_not_tell() -> None:
    model = theirs("LlamaModel", _LLAMA)
    model.layers[0].self_attn.num_key_value_groups = 3
    words = "layers.0.self_attn: expected 6 query heads in groups for 3 kv heads, received groups of 3"
    unchanged(model, {0: [0, 1]}, ValueError, words)
