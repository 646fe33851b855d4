"""`swap` against the `nn.MultiheadAttention` it replaces: every call, inside torch's transformers, and the traps."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import MultiHeadAttention
from regard.layouts import load, swap
from regard.layouts.swap import SplitAttention, SwappedAttention

both = pytest.mark.parametrize("split", [False, True])
B, H, N, M, W = 2, 3, 5, 7, 15


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(seed: int = 0, heads: int = H, width: int = W, **options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(width, heads, dtype=torch.float64, **options)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = drawn(*parameter.shape, seed=seed + number) * 0.4
    return module


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


ATTN: dict[str, Any] = {
    "none": lambda n, m: None,
    "bool": lambda n, m: torch.arange(n)[:, None] < torch.arange(m)[None] - 3,
    "float": lambda n, m: drawn(n, m, seed=1),
    "bool per head": lambda n, m: drawn(B * H, n, m, seed=2) > 1.0,
    "float per head": lambda n, m: drawn(B * H, n, m, seed=3),
    "minus infinity": lambda n, m: drawn(n, m, seed=1).masked_fill(drawn(n, m, seed=9) > 0.7, -torch.inf),
}
PADDING: dict[str, Any] = {
    "none": lambda m: None,
    "bool": lambda m: torch.arange(m)[None] >= torch.tensor([[m], [m - 3]]),
    "float": lambda m: drawn(B, m, seed=4),
}


@both
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("attn, padding", list(itertools.product(ATTN, PADDING)))
@pytest.mark.parametrize("batch_first", [False, True])
def test_masks(split: bool, attn: str, padding: str, batch_first: bool) -> None:
    theirs = made(batch_first=batch_first)
    ours = swap(copy.deepcopy(theirs), split=split)
    query, key, value = (
        (drawn(B, n, W, seed=s) if batch_first else drawn(n, B, W, seed=s)) for n, s in ((N, 1), (M, 2), (M, 3))
    )
    masks = {"attn_mask": ATTN[attn](N, M), "key_padding_mask": PADDING[padding](M)}
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        close(ours(query, key, value, **masks, **options), theirs(query, key, value, **masks, **options))
    masks = {"attn_mask": ATTN[attn](N, N), "key_padding_mask": PADDING[padding](N)}
    other = query.flip(0, 1)
    for q, k, v in ((query, query, query), (query, query, other), (query, other, other), (query, other, query)):
        close(ours(q, k, v, **masks), theirs(q, k, v, **masks))


@both
@pytest.mark.parametrize(
    "options", [{"bias": False}, {"kdim": 7}, {"vdim": 11}, {"kdim": 7, "vdim": 11, "bias": False}]
)
def test_widths_and_biases(split: bool, options: dict[str, Any]) -> None:
    theirs = made(**options)
    ours = swap(copy.deepcopy(theirs), split=split)
    query, key, value = drawn(N, B, W), drawn(M, B, theirs.kdim), drawn(M, B, theirs.vdim)
    close(ours(query, key, value), theirs(query, key, value))


@pytest.mark.parametrize("extra", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")])
@pytest.mark.parametrize("attn, padding", [("none", "none"), ("bool", "bool"), ("float per head", "float")])
def test_extra_keys(extra: tuple[str, ...], attn: str, padding: str) -> None:
    theirs = made(**dict.fromkeys(extra, True))
    ours = swap(copy.deepcopy(theirs))
    query, key = drawn(N, B, W), drawn(M, B, W)
    masks = {"attn_mask": ATTN[attn](N, M), "key_padding_mask": PADDING[padding](M)}
    close(ours(query, key, key, **masks), theirs(query, key, key, **masks))
    causal = torch.ones(N, M, dtype=torch.bool).triu(1)
    ours_out, weights = ours(query, key, key, attn_mask=causal, is_causal=True)
    close((ours_out, weights), theirs(query, key, key, attn_mask=causal, is_causal=True))
    close(ours(query, key, key, attn_mask=causal, is_causal=True, need_weights=False)[0], ours_out)
    with pytest.raises(
        ValueError,
        match=r"swap\(split=True\): expected modules without add_bias_kv and add_zero_attn, "
        r"received model; remedy: swap\(model\)",
    ):
        swap(copy.deepcopy(theirs), split=True)


@both
@pytest.mark.parametrize("average", [False, True])
def test_without_a_batch(split: bool, average: bool) -> None:
    theirs = made(batch_first=True)
    ours = swap(copy.deepcopy(theirs), split=split)
    query, key = drawn(N, W), drawn(M, W)
    options = {"key_padding_mask": drawn(M) > 1, "average_attn_weights": average}
    for mask in (ATTN["bool"](N, M), drawn(H, N, M)):
        if mask.dtype == torch.bool:
            close(ours(query, key, key, attn_mask=mask, **options), theirs(query, key, key, attn_mask=mask, **options))
        else:
            close(ours(query, key, key, attn_mask=mask), theirs(query, key, key, attn_mask=mask))


@both
@pytest.mark.parametrize("n, m", [(N, N), (N, M), (M, N)])
@pytest.mark.parametrize("padding", ["none", "bool"])
def test_causal(split: bool, n: int, m: int, padding: str) -> None:
    theirs = made()
    ours = swap(copy.deepcopy(theirs), split=split)
    query, key = drawn(n, B, W), drawn(m, B, W)
    mask = torch.ones(n, m, dtype=torch.bool).triu(1)
    options = {"attn_mask": mask, "key_padding_mask": PADDING[padding](m), "is_causal": True}
    expected = theirs(query, key, key, **options)
    close(ours(query, key, key, **options), expected)
    close(ours(query, key, key, **options, need_weights=False)[0], expected[0])
    close(ours(query, key, key, **{**options, "attn_mask": None})[0], expected[0])  # the hint says it all


@both
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("attn", ["bool", "float", "bool per head"])
@pytest.mark.parametrize("padding", ["none", "bool"])
def test_a_hint_that_is_wrong(split: bool, attn: str, padding: str) -> None:
    """The mask counts, not the hint beside it; with weights and without."""
    theirs = made()
    ours = swap(copy.deepcopy(theirs), split=split)
    query, key = drawn(N, B, W), drawn(M, B, W)
    options = {"attn_mask": ATTN[attn](N, M), "key_padding_mask": PADDING[padding](M)}
    expected = theirs(query, key, key, **options)
    close(ours(query, key, key, **options, is_causal=True), expected)
    close(ours(query, key, key, **options, is_causal=True, need_weights=False)[0], expected[0])


@both
def test_a_query_that_may_see_nothing(split: bool) -> None:
    theirs = made(batch_first=True)
    ours = swap(copy.deepcopy(theirs), split=split)
    x = drawn(B, N, W).requires_grad_()
    padding = torch.tensor([[True] * N, [False] * N])
    assert theirs(x, x, x, key_padding_mask=padding)[0].isnan().any()  # the trap
    for mask in (padding, torch.zeros(B, N, dtype=torch.float64).masked_fill(padding, -torch.inf)):
        out, weights = ours(x, x, x, key_padding_mask=mask)
        assert weights is not None
        close(out[0], ours.out_proj.bias.expand(N, W))
        assert not weights[0].any()
        close(out[1], theirs(x, x, x)[0][1])
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not gradient[0].any()
        assert gradient.isfinite().all()


@both
def test_dropout_in_training_only_and_weights_before_it(split: bool) -> None:
    ours = swap(made(dropout=0.5, batch_first=True), split=split)
    x = drawn(B, N, W)
    out, weights = ours.eval()(x, x, x)
    torch.manual_seed(0)
    dropped, before = ours.train()(x, x, x)
    assert weights is not None
    assert before is not None
    assert not torch.allclose(dropped, out)
    close(before, weights)
    torch.manual_seed(0)
    close(ours(x, x, x, need_weights=False)[0], dropped)  # the same with and without weights, dropout too


def test_the_same_parameters_and_keys() -> None:
    model = nn.TransformerDecoderLayer(W, H, 7, dtype=torch.float64)
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked: list[str] = []
    model.self_attn.register_forward_hook(lambda *_: hooked.append("self"))
    assert swap(model) is model
    assert list(model.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    old = {name: parameter.detach().clone() for name, parameter in before.items()}
    model(drawn(N, B, W), drawn(M, B, W)).square().sum().backward()
    optimizer.step()
    assert hooked == ["self"]
    assert all(not torch.equal(parameter, old[name]) for name, parameter in model.named_parameters())


@both
def test_a_shared_module_stays_shared(split: bool) -> None:
    shared = made()
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, made(seed=7)])})
    swap(model, split=split)
    other: Any = model["b"]
    assert model["a"] is other[0]
    assert model["a"] is not other[1]
    kind = SplitAttention if split else SwappedAttention
    assert isinstance(model["a"], kind)
    assert isinstance(other[1], kind)


@both
def test_twice_is_harmless(split: bool) -> None:
    model = nn.Sequential(nn.ModuleDict({"a": made()}))
    swap(swap(model, split=split), split=split)
    x = drawn(N, B, W)
    close(model[0]["a"](x, x, x), made()(x, x, x))
    swap(model, split=True)  # from the one to the other
    assert isinstance(model[0]["a"], SplitAttention)
    close(model[0]["a"](x, x, x), made()(x, x, x))
    assert isinstance(swap(model)[0]["a"], SplitAttention)  # what is split stays so


def test_subclasses_are_left_with_a_warning() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            return "mine"

    model = nn.ModuleDict({"mine": Mine(W, H), "plain": made()})
    with pytest.warns(UserWarning, match=r"left subclasses of nn.MultiheadAttention in place: mine \(Mine\)$"):
        swap(model)
    assert model["mine"]() == "mine"
    assert isinstance(model["plain"], SwappedAttention)


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, received list"):
        swap([])  # type: ignore[type-var]


@both
def test_a_frozen_module_stays_frozen(split: bool) -> None:
    module = made(kdim=7)
    module.k_proj_weight.requires_grad_(False)
    module.out_proj.bias.requires_grad_(False)
    swapped = swap(module, split=split)
    frozen = {name for name, parameter in swapped.named_parameters() if not parameter.requires_grad}
    assert frozen == ({"layer.k_proj.weight", "layer.out_proj.bias"} if split else {"k_proj_weight", "out_proj.bias"})


def test_split_holds_a_layer_of_ours() -> None:
    model = nn.TransformerEncoderLayer(W, H, 7, dropout=0.25, dtype=torch.float64).eval()
    before = load(model.self_attn.state_dict(), H)
    swap(model, split=True)
    attention: Any = model.self_attn
    assert type(attention.layer) is MultiHeadAttention
    assert not attention.layer.training
    assert attention.layer.dropout == 0.25
    assert (attention.num_heads, attention.embed_dim) == (H, W)
    torch.testing.assert_close(attention.layer.state_dict(), before.state_dict(), rtol=0, atol=0)
    expected = torch.cat([before.q_proj.weight, before.k_proj.weight, before.v_proj.weight])
    torch.testing.assert_close(attention.in_proj_weight, expected, rtol=0, atol=0)


def encoder(norm_first: bool = False, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(14, 2, 11, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 3, **options).eval()


def counted(model: nn.Module) -> list[str]:
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, SwappedAttention | SplitAttention):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


NAMES = [f"layers.{i}.self_attn" for i in range(3)]


class TestInsideTheEncoder:
    """Even heads, evaluation, no gradient: where torch takes its fast paths."""

    @both
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize("hooked", [False, True])
    @torch.no_grad()
    def test_forward_runs_and_agrees(self, split: bool, padded: bool, norm_first: bool, hooked: bool) -> None:
        theirs = encoder(norm_first, enable_nested_tensor=True)
        ours = swap(copy.deepcopy(theirs), split=split)
        x = drawn(B, N, 14)
        padding = torch.arange(N)[None] >= torch.tensor([[N], [3]]) if padded else None
        expected = theirs(x, src_key_padding_mask=padding)
        calls: list[str] = []
        if hooked:  # a hook is one of the ways by which torch leaves its fast path: so look without one, too
            calls = counted(ours)
        else:
            for name, module in ours.named_modules():
                if isinstance(module, SwappedAttention | SplitAttention):
                    wrapped = module.forward

                    def forward(*args: Any, name: str = name, wrapped: Any = wrapped, **options: Any) -> Any:
                        calls.append(name)
                        return wrapped(*args, **options)

                    module.forward = forward  # type: ignore[method-assign]
        out = ours(x, src_key_padding_mask=padding)
        assert calls == NAMES
        assert not ours.use_nested_tensor
        visible = slice(None) if padding is None else ~padding
        close(out[visible], expected[visible])

    @both
    @torch.no_grad()
    def test_an_encoder_that_was_not_seen_and_nests_its_input(self, split: bool) -> None:
        theirs = encoder(enable_nested_tensor=True)
        ours = copy.deepcopy(theirs)
        for layer in ours.layers:
            swap(layer, split=split)
        assert ours.use_nested_tensor
        calls = counted(ours)
        x, padding = drawn(B, N, 14), torch.arange(N)[None] >= torch.tensor([[N], [3]])
        out = ours(x, src_key_padding_mask=padding)
        assert calls == NAMES
        close(out, theirs(x, src_key_padding_mask=padding))

    @both
    @torch.no_grad()
    def test_an_encoder_built_of_a_swapped_layer(self, split: bool) -> None:
        layer = nn.TransformerEncoderLayer(14, 2, 11, batch_first=True, dtype=torch.float64).eval()
        ours = nn.TransformerEncoder(swap(copy.deepcopy(layer), split=split), 3, enable_nested_tensor=False)
        theirs = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        calls = counted(ours)
        x = drawn(B, N, 14)
        close(ours(x), theirs(x))
        assert calls == NAMES

    @both
    @pytest.mark.parametrize("is_causal", [None, True])
    @torch.no_grad()
    def test_causal(self, split: bool, is_causal: bool | None) -> None:
        theirs = encoder()
        ours = swap(copy.deepcopy(theirs), split=split)
        x, mask = drawn(B, N, 14), nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
        close(ours(x, mask=mask, is_causal=is_causal), theirs(x, mask=mask, is_causal=is_causal))

    @both
    def test_gradients(self, split: bool) -> None:
        theirs = encoder().train()
        for module in theirs.modules():
            if isinstance(module, nn.Dropout | nn.MultiheadAttention):
                module.p = module.dropout = 0.0  # type: ignore[assignment]
        ours = swap(copy.deepcopy(theirs), split=split)
        padding = torch.arange(N)[None] >= torch.tensor([[N], [3]])
        x, y = drawn(B, N, 14).requires_grad_(), drawn(B, N, 14).requires_grad_()
        for model, one in ((theirs, x), (ours, y)):
            model(one, src_key_padding_mask=padding).square().sum().backward()
        close(x.grad, y.grad)
        if not split:
            for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-8, msg=name)


@both
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_a_whole_transformer(split: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": batch_first, "dtype": torch.float64}
    theirs = nn.Transformer(14, 2, 2, 2, 11, **options)
    theirs.encoder.use_nested_tensor = False
    theirs.eval()
    ours = swap(copy.deepcopy(theirs), split=split)
    source, target = drawn(B, M, 14), drawn(B, N, 14)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.zeros(B, M, dtype=torch.float64).masked_fill(
        torch.arange(M) >= torch.tensor([[M], [3]]), -torch.inf
    )
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    calls = counted(ours)
    close(ours(source, target, **masks), theirs(source, target, **masks))
    assert len(calls) == 6


@both
@torch.no_grad()
def test_copies_pickles_and_state_dicts(split: bool) -> None:
    model = swap(encoder(), split=split)
    x, padding = drawn(B, N, 14), torch.arange(N)[None] >= torch.tensor([[N], [3]])
    expected = model(x, src_key_padding_mask=padding)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    fresh = swap(encoder(), split=split)
    for parameter in fresh.parameters():
        parameter.zero_()
    fresh.load_state_dict(model.state_dict())
    others = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False), fresh)
    for other in others:
        calls = counted(other)
        close(other(x, src_key_padding_mask=padding), expected)
        assert calls == NAMES
    if not split:
        plain = encoder()
        plain.load_state_dict(model.state_dict())
        close(plain(x), model(x))


def test_a_swapped_class_can_be_made_and_reset() -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(W, H, kdim=7, add_bias_kv=True)
    torch.manual_seed(0)
    ours = SwappedAttention(W, H, kdim=7, add_bias_kv=True)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.in_proj_bias.data.fill_(1.0)
    old = ours.q_proj_weight.detach().clone()
    ours._reset_parameters()
    assert not ours.in_proj_bias.any()
    assert not torch.equal(ours.q_proj_weight, old)


@both
@pytest.mark.slow
def test_compiled(split: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(14, 2, 11, batch_first=True, dropout=0.0, dtype=torch.float64)
    ours = swap(copy.deepcopy(theirs), split=split)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x, padding = drawn(B, N, 14), torch.arange(N)[None] >= torch.tensor([[N], [3]])
    expected = theirs(x, src_key_padding_mask=padding)
    close(compiled(x, src_key_padding_mask=padding), expected)
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    close(compiled(x, src_mask=mask, is_causal=True), theirs(x, src_mask=mask, is_causal=True))
    with torch.no_grad():
        close(torch.compile(ours.eval(), backend="aot_eager", fullgraph=True)(x), theirs.eval()(x))


@both
def test_autocast(split: bool) -> None:
    theirs = nn.MultiheadAttention(W, H, batch_first=True)
    ours = swap(copy.deepcopy(theirs), split=split)
    x = drawn(B, N, W).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = ours(x, x, x)
        expected, _ = theirs(x, x, x)
    assert weights is not None
    assert (out.dtype, weights.dtype) == (expected.dtype, torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)


def test_calls_that_cannot_be_meant() -> None:
    ours = swap(made())
    with pytest.raises(ValueError, match=r"query, key, value: expected all three with 3 axes, or with 2 axes if there"):
        ours(drawn(N, W), drawn(N, B, W), drawn(N, B, W))
    nested = torch.nested.as_nested_tensor([drawn(3, W), drawn(5, W)])
    with pytest.raises(
        ValueError, match=r"nested query, key, value: expected all three nested, and no key_padding_mask"
    ):
        ours(nested, nested, drawn(2, 5, W))
