"""Where a watch computes the attention in one pass with what it measures, and where the model's own function must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard
from regard.heads.capture.model_tree import tree_of
from regard.masks import Causal, Padding, Window

B, N, W, H = 2, 11, 24, 3


class Sdpa(nn.Module):
    """Attention by `F.scaled_dot_product_attention`, with any of its options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(W, 3 * W), nn.Linear(W, W), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """Attention by `nn.MultiheadAttention`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(W, H, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **({"need_weights": False} | self.options))[0]


class Own(nn.Module):
    """Attention by regard's layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = regard.MultiHeadAttention(W, H, kernel=options.pop("kernel", "auto")), options

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, **self.options)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each attention that was seen, whether the watch computed it."""
    calls: list[bool] = []
    see = regard.watch.see

    def noted(self: Any, attention: Any) -> Tensor | None:
        calls.append(attention.to_compute)
        return see(self, attention)

    monkeypatch.setattr(regard.watch, "see", noted)
    return calls


def draw(seed: int = 0) -> Tensor:
    return torch.randn(B, N, W, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, regard.heads.Record]:
    """The output unwatched, watched, and the record."""
    model.eval()
    with torch.no_grad():
        before = model(x)
        with regard.watch(model, **options) as seen:
            during = model(x)
    return before, during, seen


LEFT = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
LEFT[1, ..., :3] = False  # the first three queries of the second text see nothing
MASKED = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), float("-inf"))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sdpa": Sdpa,
    "sdpa, causal": lambda: Sdpa(is_causal=True),
    "sdpa, added": lambda: Sdpa(attn_mask=MASKED, scale=0.3),
    "torch": Torch,
    "torch, causal": lambda: Torch(attn_mask=MASKED, is_causal=True),
    "torch, padding": lambda: Torch(key_padding_mask=torch.arange(N).expand(B, N) >= torch.tensor([[N], [N - 3]])),
    "regard": Own,
    "regard, masked": lambda: Own(mask=Causal() & Window(4)),
    "regard, padding": lambda: Own(mask=Padding(lengths=torch.tensor([N, 0]))),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_equal_to_rounding_and_records_agree(name: str, computed: list[bool]) -> None:
    model = MODELS[name]()
    before, during, seen = run(model, draw())
    assert computed == [True]
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-5)
    again, exact, right = run(model, draw(), exact=True)
    assert computed == [True, False]
    assert torch.equal(exact, again)
    for what in ("entropy", "peak", "distance", "offset", "offsets", "received", "on_first"):
        torch.testing.assert_close(seen[0].last()[what], right[0].last()[what], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: Sdpa(attn_mask=LEFT), lambda: Torch(key_padding_mask=LEFT[:, 0, 3] == 0)])
def test_queries_that_see_nothing_get_what_the_models_function_gives(
    make: Callable[[], nn.Module], computed: list[bool]
) -> None:
    """Bit for bit, NaN included: the function itself gives the output, and what was measured stays."""
    model = make()
    if isinstance(model, Torch):
        model.options["key_padding_mask"] = torch.ones(B, N, dtype=torch.bool)
    before, during, seen = run(model, draw())
    assert computed == [True]
    assert torch.equal(during.nan_to_num(7.0), before.nan_to_num(7.0))
    assert not seen[0].last_seen().all()


@pytest.mark.parametrize("make", [Sdpa, Torch, Own])
def test_gradients_are_the_models_own(make: Callable[[], nn.Module], computed: list[bool]) -> None:
    model, x = make().eval(), draw().requires_grad_()
    with regard.watch(model):
        during = model(x)
    during.square().sum().backward()
    grad, x.grad = x.grad, None
    before = model(x)
    before.square().sum().backward()
    assert computed == [False]
    assert torch.equal(during, before)
    assert torch.equal(grad, x.grad)


def test_dropout_and_weights_are_the_models_own(computed: list[bool]) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), regard.watch(model := Sdpa(dropout_p=0.5)):
        model(draw())
    weights = Torch(need_weights=True).eval()
    with torch.no_grad(), regard.watch(weights):
        weights(draw())
    named = Own(kernel="reference").eval()
    with torch.no_grad(), regard.watch(named):
        named(draw())
    assert computed == [False, False, False]


def test_a_mode_around_the_watch_sees_the_function(computed: list[bool]) -> None:
    class Functions(TorchFunctionMode):
        called: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(func)
            return func(*args, **(kwargs or {}))

    model = Sdpa().eval()
    with torch.no_grad(), Functions() as mode, regard.watch(model):
        model(draw())
    assert computed == [False]
    assert F.scaled_dot_product_attention in mode.called


def test_one_watch_in_another_sees_the_same(computed: list[bool]) -> None:
    model = Sdpa().eval()
    with torch.no_grad(), regard.watch(model) as outer, regard.watch(model) as inner:
        model(draw())
    assert computed == [False, False]
    assert torch.equal(outer[0].entropy, inner[0].entropy)


def test_layers_that_were_not_asked_for_run_as_they_are() -> None:
    model = nn.Sequential(Sdpa(), Sdpa()).eval()
    before, during, seen = run(model, draw(), layers="1")
    assert seen.layers == ["1"]
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_refused_in_torchs_words() -> None:
    model = Sdpa(attn_mask=torch.ones(5, 5, dtype=torch.bool)).eval()
    with pytest.raises(RuntimeError) as unwatched, torch.no_grad():
        model(draw())
    with pytest.raises(RuntimeError) as watched, torch.no_grad(), regard.watch(model):
        model(draw())
    assert str(watched.value) == str(unwatched.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    before, during, _ = run(Sdpa().to(dtype), draw().to(dtype))
    assert during.dtype == dtype
    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(during, before, rtol=tolerance, atol=tolerance)


def test_under_autocast(computed: list[bool]) -> None:
    model = Sdpa().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(draw())
        with regard.watch(model):
            during = model(draw())
    assert computed == [True]
    assert during.dtype == before.dtype
    torch.testing.assert_close(during, before, rtol=3e-2, atol=3e-2)


class Ids(nn.Module):
    """Two layers with masks of their own after an embedding."""

    def __init__(self, *masks: Any) -> None:
        super().__init__()
        self.embedding, self.masks = nn.Embedding(7, W), masks
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in masks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = x + layer(x, mask=mask)
        return x


def test_layers_with_other_masks_share_nothing_that_differs() -> None:
    """Padding, positions and baselines are computed once for layers that agree, and only for those."""
    padding = Padding(lengths=torch.tensor([N, N - 4]))
    masks = [Causal(), Causal(), Causal() & padding, Window(3), None, padding]
    model, ids = Ids(*masks).eval(), torch.randint(0, 7, (B, N), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(ids)
    for number, mask in enumerate(masks):
        layer = seen[number]
        found = regard.measure(
            *(x.detach() for x in (layer.text.pieces[0].call.q, layer.text.keys[0])),
            measures=["entropy", "induction", "duplicate"],
            ids=ids,
            mask=mask,
        )
        torch.testing.assert_close(layer.entropy, found.entropy)
        real = (
            torch.ones(B, N, dtype=torch.bool)
            if mask not in (masks[2], padding)
            else padding.lengths[:, None] > torch.arange(N)
        )
        for what in ("induction", "duplicate"):
            torch.testing.assert_close(layer.last()[what].mT[real], found[what].mT[real])
        visible = (torch.ones(1, 1, N, N).bool() if mask is None else mask.dense(N)).expand(B, 1, N, N)
        entropy = visible.sum(-1).clamp(min=1).double().log()
        torch.testing.assert_close(layer.uniform.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


def test_ids_that_are_written_over_between_calls() -> None:
    """The second call has other tokens in the same memory; the first one's baseline is asked for after that."""
    model, ids = Ids(Causal()).eval(), torch.zeros(1, N, dtype=torch.int64)
    with torch.no_grad(), regard.watch(model) as first:
        model(ids)
    with torch.no_grad(), regard.watch(model) as second:
        ids.copy_(torch.arange(N) % 7)
        model(ids)
    copies = torch.arange(N)  # all tokens before a query are like its own
    torch.testing.assert_close(first[0].uniform.duplicate[0, 0], copies / (copies + 1.0))
    torch.testing.assert_close(second[0].uniform.duplicate[0, 0], (torch.arange(N) >= 7) / (copies + 1.0))


def test_closed_modules_are_regards_own() -> None:
    own, torchs = regard.MultiHeadAttention(W, H), Sdpa()
    replaced = regard.MultiHeadAttention(W, H)
    replaced.forward = lambda *_: None  # type: ignore[method-assign]
    with_a_guest = regard.AttentionBlock(regard.MultiHeadAttention(W, H))
    with_a_guest.layer.q_proj = nn.Sequential(torchs)  # type: ignore[assignment]
    model = nn.ModuleList([own, torchs, replaced, with_a_guest])
    assert tree_of(model).closed == {id(own)}


def test_the_mode_is_on_again_after_an_error_in_a_closed_module() -> None:
    model = nn.Sequential(regard.MultiHeadAttention(W, H), Sdpa()).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        with pytest.raises(ValueError, match="query"):
            model(torch.randn(B, N, W + 1))
        model(draw())
    assert seen.layers == ["0", "1"]
    assert torch._C._len_torch_function_stack() == 0
