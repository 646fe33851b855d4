"""A decoder that is interrupted: its caches are as they were before the call, in all layers, and go on rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import KVCache, MultiHeadAttention, RollingCache
from regard.cache import together, tokens_read
from regard.masks import Causal
from regard.models import Decoder, ModelConfig

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
LAYERS, VOCABULARY = 3, 97
LETTERS = "\t\n" + "".join(map(chr, range(32, 127)))  # each is a token


class Stop(BaseException):
    """No `Exception`, as KeyboardInterrupt is none."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def new_model(positions: str = "rotary", tokenizer: Any = None) -> Decoder:
    config = ModelConfig(
        layers=LAYERS,
        embed_dim=12,
        num_heads=3,
        vocabulary=VOCABULARY,
        inner=17,
        context=41,
        causal=True,
        positions=positions,
    )
    model = Decoder(config, tokenizer).double().eval()
    for parameter in model.parameters():  # large enough that another token is seen in the logits
        nn.init.normal_(parameter)
    return model


def by_letters() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return made


@contextmanager
def interrupted(module: nn.Module, calls: int = 1, when: str = "before") -> Iterator[None]:
    """The call with this number of a module raises, before it begins or after it has ended."""
    left = calls

    def raise_at_last(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stop

    register = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
    handle = register(raise_at_last)
    try:
        yield
    finally:
        handle.remove()


CACHES: dict[str, Callable[[Decoder], Any]] = {
    "KVCache": lambda model: model.new_cache(),
    "fixed size": lambda model: [KVCache(30, limit=30) for _ in model.blocks],
    "RollingCache": lambda model: model.new_cache(window=5, keep_first=2),
    "RollingCache, no first": lambda model: model.new_cache(window=7, keep_first=0),
}
PLACES: dict[str, Callable[[Decoder], tuple[nn.Module, str]]] = {
    "before a layer": lambda model: (model.blocks[1], "before"),
    "after a layer": lambda model: (model.blocks[1], "after"),
    "within a layer": lambda model: (model.blocks[1].attention.out_proj, "before"),
    "after the last layer": lambda model: (model.norm, "after"),
    "at the head": lambda model: (model.head, "before"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("sizes", [[5, 3, 1], [1, 13, 2], [9, 1, 1], [0, 5, 2]], ids=str)
def test_a_call_that_is_interrupted_leaves_the_caches_of_all_layers(kind: str, place: str, sizes: list[int]) -> None:
    """Of three pieces the second is interrupted, then read again."""
    model = new_model()
    pieces = torch.randint(VOCABULARY, (2, sum(sizes))).split(sizes, 1)
    pieces = [piece for piece in pieces if piece.shape[1]]
    expected, cache = CACHES[kind](model), CACHES[kind](model)
    wanted = [model(piece, cache=expected) for piece in pieces]
    for i, piece in enumerate(pieces):
        if i == len(pieces) - 2:
            before = [repr(part) for part in cache]
            module, when = PLACES[place](model)
            with interrupted(module, when=when), pytest.raises(Stop):
                model(piece, cache=cache)
            assert [repr(part) for part in cache] == before
        torch.testing.assert_close(model(piece, cache=cache), wanted[i], **TIGHT)
    assert [tokens_read(part) for part in cache] == [sum(sizes)] * LAYERS


def test_rows_of_different_lengths_survive_an_interrupt() -> None:
    model, ids = new_model(), torch.randint(VOCABULARY, (2, 7))
    lengths = torch.tensor([5, 3])
    logits = []
    for interrupt in (False, True):
        cache = model.new_cache()
        model(ids[:, :5], cache=cache)
        for part in cache:
            part.truncate(lengths)
        if interrupt:
            with interrupted(model.blocks[2]), pytest.raises(Stop):
                model(ids[:, 5:], cache=cache)
        logits.append(model(ids[:, 5:], cache=cache))
    torch.testing.assert_close(*logits, **TIGHT)


@pytest.mark.parametrize("kind", ["KVCache", "RollingCache"])
def test_caches_that_are_out_of_step_are_refused_in_words(kind: str) -> None:
    model, ids = new_model(), torch.randint(VOCABULARY, (1, 8))
    cache = CACHES[kind](model)
    model(ids[:, :5], cache=cache)
    model.blocks[0](torch.randn(1, 3, 12).double(), mask=Causal(), cache=cache[0])  # only one of the layers goes on
    words = r"cache: expected the same tokens in each layer, received \[8, 5, 5\] tokens; remedy: read the text again"
    for call in (lambda: model(ids[:, 5:], cache=cache), lambda: model.hidden(ids[:, 5:], cache=cache)):
        with pytest.raises(ValueError, match=words):
            call()
    if kind == "KVCache":  # as the remedy says
        for part in cache:
            part.truncate(5)
        torch.testing.assert_close(model(ids[:, 5:], cache=cache), model(ids)[:, 5:], **TIGHT)
        cache[1].truncate(torch.tensor([7]))
        with pytest.raises(ValueError, match=r"cache: expected .*in each layer"):
            model(ids[:, 5:], cache=cache)


def test_one_cache_for_all_layers_is_refused() -> None:
    model, ids = new_model(), torch.randint(VOCABULARY, (1, 5))
    with pytest.raises(ValueError, match="cache: expected one of its own for each layer, received one for several"):
        model(ids, cache=[KVCache()] * LAYERS)


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(3, 1)], ids=["KVCache", "RollingCache"])
def test_layers_of_ones_own_are_undone_together(new: Callable[[], Any]) -> None:
    layers = [MultiHeadAttention(12, 3).double() for _ in range(LAYERS)]

    def run(x: Tensor, caches: list[Any]) -> Tensor:
        with together(caches):
            for layer, cache in zip(layers, caches, strict=True):
                x = layer(x, mask=Causal(), cache=cache)
        return x

    x = torch.randn(2, 11, 12).double()
    caches, expected = ([new() for _ in layers] for _ in range(2))
    for piece in x.split([7, 4], 1):
        with interrupted(layers[1]), pytest.raises(Stop):
            run(piece, caches)
        torch.testing.assert_close(run(piece, caches), run(piece, expected), **TIGHT)


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(3, 1)], ids=["KVCache", "RollingCache"])
def test_one_layer_undoes_what_fails_up_to_its_last_projection(new: Callable[[], Any]) -> None:
    layer, x = MultiHeadAttention(12, 3).double(), torch.randn(2, 9, 12).double()
    cache, expected = new(), new()
    for piece in x.split([5, 4], 1):
        with interrupted(layer.out_proj), pytest.raises(Stop):
            layer(piece, mask=Causal(), cache=cache)
        wanted = layer(piece, mask=Causal(), cache=expected)
        torch.testing.assert_close(layer(piece, mask=Causal(), cache=cache), wanted, **TIGHT)


def test_a_memory_that_was_interrupted_is_read_again() -> None:
    layer, x, memory = (
        MultiHeadAttention(12, 3).double(),
        torch.randn(2, 1, 12).double(),
        torch.randn(2, 7, 12).double(),
    )
    cache = KVCache(once=True)
    with interrupted(layer.out_proj), pytest.raises(Stop):
        layer(x, memory, cache=cache)
    assert not cache.complete
    other = torch.randn(2, 5, 12).double()
    torch.testing.assert_close(layer(x, other, cache=cache), layer(x, other), **TIGHT)


# ----------------------------------------------------------------------------------------------------
# Generation


@pytest.mark.parametrize("kind", ["KVCache", "RollingCache"])
@pytest.mark.parametrize("block, calls, when", [(1, 5, "before"), (2, 4, "after"), (0, 2, "after")])
def test_a_stream_that_is_interrupted_goes_on_with_all_tokens_so_far(
    kind: str, block: int, calls: int, when: str
) -> None:
    model = new_model(tokenizer=by_letters())
    whole = "".join(model.stream("abcd", 11))
    assert len(whole) == 11
    cache = model.new_cache(window=None if kind == "KVCache" else 30)
    pieces: list[str] = []
    with interrupted(model.blocks[block], calls, when), pytest.raises(Stop):
        pieces.extend(model.stream("abcd", 11, cache=cache))
    given = "".join(pieces)
    assert given
    assert [tokens_read(part) for part in cache] == [4 + len(given)] * LAYERS
    rest = "".join(model.stream("x", 5, cache=cache))
    assert rest == "".join(model.stream("abcd" + given + "x", 5))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_generate_that_is_interrupted_leaves_the_cache_as_it_was(kind: str, calls: int) -> None:
    model = new_model(tokenizer=by_letters())
    cache, expected = CACHES[kind](model), CACHES[kind](model)
    for one in (cache, expected):
        model.generate("ab", 3, cache=one)
    with interrupted(model.blocks[1], calls), pytest.raises(Stop):
        model.generate("an even longer text", 3, cache=cache)  # read in several pieces, where a window is short
    assert [tokens_read(part) for part in cache] == [5] * LAYERS
    assert model.generate("cde", 7, cache=cache) == model.generate("cde", 7, cache=expected)
