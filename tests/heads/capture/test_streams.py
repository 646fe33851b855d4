"""The token ids of a layer are those of the stream that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads.oracle_hands import B, H, Hand, N, W, by_operator, drawn, heads_first
from torch import Tensor, nn

import regard

KINDS = 11


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class Torchs(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


HOW: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: Torchs(W, H, batch_first=True),
    "function": Fused,
    "by hand": lambda: Hand(by_operator),
    "heads first": lambda: Hand(heads_first),
}


class Inner(nn.Module):
    """Self attention, and attention to another text."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.looks, self.across = HOW[how](), nn.MultiheadAttention(W, H, batch_first=True)
        self.norm = nn.LayerNorm(W)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.looks(x)
        if memory is not None:
            x = x + self.across(x, memory, memory)[0]
        return self.norm(x)


class Translator(nn.Module):
    def __init__(self, how: str, shared: bool = False) -> None:
        super().__init__()
        self.source = nn.Embedding(KINDS, W)
        self.target = self.source if shared else nn.Embedding(KINDS, W)
        self.places = nn.Parameter(torch.zeros(N + 2, W))
        self.encoder, self.decoder = nn.ModuleList([Inner(how), Inner(how)]), nn.ModuleList([Inner(how), Inner(how)])

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> Tensor:
        memory = self.source(src) + self.places[: src.shape[1]]
        for layer in self.encoder:
            memory = layer(memory)
        x = 3.0 * self.target(tgt) + self.places[: tgt.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return x


class Shifted(Translator):
    """Reads a target without its last token, which may be as long as the source."""

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> Tensor:
        return super().forward(src, tgt[:, :-1])


class Outer(nn.Module):
    """Is handed a batch, and hands on its parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["src"], tgt=batch["tgt"])


def some(tokens: int, seed: int) -> Tensor:
    return torch.randint(0, KINDS, (B, tokens), generator=torch.Generator().manual_seed(seed))


MAKES: dict[str, tuple[Callable[[str], nn.Module], int]] = {
    "plain": (Translator, 0),
    "one embedding": (lambda how: Translator(how, shared=True), 0),
    "shifted": (Shifted, 1),
    "longer": (Translator, 2),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", MAKES)
def test_a_decoder_has_the_ids_of_its_target(make: str, how: str) -> None:
    kind, more = MAKES[make]
    model, src, tgt = drawn(kind(how)), some(N, 1), some(N + more, 2)
    read = tgt[:, :-1] if make == "shifted" else tgt
    with torch.no_grad(), regard.watch(model) as seen:
        model(src, tgt, src_mask=torch.ones(B, N, dtype=torch.int64))
    _check(seen, src, read, 2)


def _check(seen: Any, src: Tensor, read: Tensor, layers: int) -> None:
    own = [layer for layer in seen if layer.kind == "self"]
    assert len(own) == 2 * layers
    assert seen.unseen == {}
    for number, layer in enumerate(own):
        ids = layer.text.ids
        assert ids is not None, layer.name
        assert torch.equal(ids, src if number < layers else read), layer.name
    for layer in seen:
        if layer.kind == "cross":
            assert layer.text.ids is None


def test_where_several_ids_are_first_met_further_in() -> None:
    model, src, tgt = drawn(Outer(Translator("module"))), some(N, 1), some(N, 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model({"src": src, "tgt": tgt})
    _check(seen, src, tgt, 2)


def test_the_whole_transformer_of_torch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(KINDS, 12), nn.Embedding(KINDS, 12)
            self.inner = nn.Transformer(12, 2, 1, 1, 13, dropout=0.0, batch_first=True)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return self.inner(self.a(src), self.b(tgt))

    model, src, tgt = drawn(Model()), some(N, 1), some(N, 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model(src, tgt)
    _check(seen, src, tgt, 1)


def test_ids_that_cannot_be_followed_are_not_guessed() -> None:
    """Through a function that torch does not tell of, from two inputs of one size: no ids, and no wrong ones."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(KINDS, W), Inner("by hand")

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            x = torch.tensor(self.table(tgt).tolist(), dtype=torch.float64)
            return self.layer(x)

    model = drawn(Model())
    with torch.no_grad(), regard.watch(model) as seen:
        model(some(N, 1), some(N, 2))
    assert seen[0].text.ids is None


def test_one_forward_after_another() -> None:
    model, src, tgt = drawn(Translator("module")), some(N, 1), some(N, 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model(src, tgt)
        model(tgt, src)
    assert torch.equal(seen["encoder.0.looks"].text.ids, tgt)
    assert torch.equal(seen["decoder.0.looks"].text.ids, src)
