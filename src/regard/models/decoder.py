"""The decoder: causal attention and logits of the next token. GPT-2, GPT-NeoX, Llama and similar models.

Letters: B batch, N new tokens, M tokens so far (cached and new), W model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.cache import KVCache, RollingCache, together, tokens_read
from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Causal, Mask, Padding, Window
from regard.models import generation
from regard.models.base import TextModel
from regard.models.blocks import Block, Embedding, new_norm
from regard.models.config import ModelConfig
from regard.projections import project

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Cache", "Decoder"]

Cache = Sequence[KVCache] | Sequence[RollingCache]


class Decoder(TextModel):
    """Token ids to logits of the next token, at every token.

    >>> import torch
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> Decoder(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None, name: str = "") -> None:
        super().__init__(config, tokenizer, name)
        self.embedding = Embedding(config)
        encoding = config.position_encoding()
        self.blocks = nn.ModuleList(Block(config, i, encoding) for i in range(config.layers))
        self.norm = new_norm(config)
        self.head = nn.Linear(config.embed_dim, config.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """If the config says so, make the head's weight and the token embedding one tensor."""
        if self.config.tied:
            self.head.weight = self.embedding.tokens.weight

    def forward(
        self, ids: Tensor, *, keep: Tensor | None = None, cache: Cache | None = None, head: bool = True
    ) -> Tensor:
        """Logits of the next token, at every token.

        Args:
            ids: (B, N), or (N,) for one text.
            keep: (B, M), True for tokens, False for padding (left or right); with a cache M = cached + N.
            cache: from `new_cache()`, updated in place; `ids` continue what it holds. A call that fails or is
                interrupted leaves it unchanged in all layers.
            head: False returns the hidden states, (B, N, W), as `hidden` does.

        Returns:
            (B, N, V); values at padding are meaningless.
        """
        self._check_cache(cache)
        with nullcontext() if cache is None else together(cache):
            states = self.hidden(ids, keep=keep, cache=cache)
            return project(self.head, states) if head else states

    def hidden(
        self, ids: Tensor, *, keep: Tensor | None = None, cache: Cache | None = None, states: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states after the final norm, (B, N, W), from which `model.head` computes the logits.

        `states`, if given, is filled with the input of the first layer and the output of each layer, layers + 1
        tensors; the last one is after the final norm.
        """
        self._check_cache(cache)
        text = self._read(ids, keep)
        keep = text.keep
        held = self._held(cache, keep, text.length)
        x = self._embed(text, self._positions(text.length, keep, held))
        slots = self._slots(text.length, keep, held)
        with nullcontext() if cache is None else together(cache):
            for i, block in enumerate(self.blocks):
                if states is not None:
                    states.append(x)
                x = block(x, mask=self._mask(i, keep), positions=slots, cache=None if cache is None else cache[i])
            x = self.norm(x)
        if states is not None:
            states.append(x)
            states[:] = [state[0] for state in states] if text.single else states
        return x[0] if text.single else x

    def new_cache(
        self, window: int | None = None, *, keep_first: int = 4, capacity: int = 0, dtype: str | None = None
    ) -> Cache:
        """A new cache for one text or batch, a list with one cache per layer.

        Args:
            window: how many tokens to keep besides the first `keep_first`, in a `RollingCache`, with which a text may
                be endless. By default a `KVCache`, which keeps all.
            capacity: tokens to allocate memory for; a `KVCache` grows beyond that.
            dtype: "int8" stores keys and values in about half the bytes of bfloat16 (`KVCache`).
        """
        if window is None:
            return [KVCache(capacity, dtype=dtype) for _ in self.blocks]
        if self.embedding.places is not None:
            raise bad_value(
                "window",
                expected="None: this model has learned positions, and a text cannot continue past the last one",
                received=window,
            )
        if dtype is not None:
            raise bad_value(
                "dtype",
                expected="None with a window: a RollingCache rotates its keys anew in each call",
                received=repr(dtype),
            )
        return [RollingCache(window, keep_first) for _ in self.blocks]

    def generate(
        self,
        text: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        cache: Cache | None = None,
    ) -> str | list[str]:
        """Continue a text, or several texts of any lengths in one batch.

        Args:
            text: the prompt, or a list of prompts.
            max_new_tokens: the maximum number of new tokens.
            temperature: 0 takes the most likely token; 1 samples from the model's distribution; higher is more random.
            top_k: sample from the k most likely tokens only.
            top_p: sample from the most likely tokens that together have this probability only.
            seed: of the sampling.
            stop: end before any of these strings (generation also ends at the model's end token).
            cache: from `new_cache()`: the text continues what it holds, and the new text is added to it. After an
                interrupt it is unchanged.

        Returns:
            The new text, without the prompt.
        """
        rules = generation.Rules(temperature, top_k, top_p, seed)
        if isinstance(text, str):
            pieces = generation.stream(self, text, max_new_tokens, rules, stop, cache)
            with together(cache or ()):
                return "".join(pieces)
        return generation.generate_batch(self, text, max_new_tokens, rules, stop, cache)

    def stream(
        self,
        text: str,
        max_new_tokens: int | None = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        cache: Cache | None = None,
    ) -> Iterator[str]:
        """As `generate` for one text, as an iterator of pieces of text. With `max_new_tokens=None` it goes on until the
        model ends the text, which may be never with a rolling cache. If it is closed or interrupted, a given cache
        holds all tokens so far (or is unchanged, if the prompt was not read completely)."""
        rules = generation.Rules(temperature, top_k, top_p, seed)
        return generation.stream(self, text, max_new_tokens, rules, stop, cache)

    def _mask(self, layer: int, keep: Tensor | None) -> Mask:
        """The mask of a layer: causal, within its window, without padding. Positions are slots, so padding on the left
        does not change distances between tokens."""
        window = self.config.window_of(layer)
        mask = Causal() if window is None else Window(window)
        return mask if keep is None else mask & Padding(keep=keep)

    def _positions(self, new: int, keep: Tensor | None, held: Tensor | int) -> Tensor | int:
        """The learned positions of the new tokens, (B, N), or that of the first one."""
        if self.embedding.places is None:
            return 0
        if keep is not None:
            return (keep.cumsum(1) - 1).clamp_(min=0)[:, -new:]
        if isinstance(held, int):
            return held
        return held[:, None] + torch.arange(new, device=held.device)

    def _slots(self, new: int, keep: Tensor | None, held: Tensor | int) -> Tensor | None:
        """The positions of the new tokens, (B, N), if there is padding between them and the cached ones (a batch padded
        on the right that is continued); None if they follow each other."""
        if keep is None or self.embedding.places is not None or isinstance(held, Tensor) or not held:
            return None
        slots = torch.arange(keep.shape[1], device=keep.device)
        places = keep.int().argmax(1)[:, None] + keep.cumsum(1) - 1  # from each row's first token on
        if not torch.compiler.is_compiling() and bool(((places == slots) | ~keep).all()):
            return None
        return places.clamp_(min=0)[:, -new:]

    def _check_cache(self, cache: Cache | None) -> None:
        """Raise if it is not one cache per layer, all with the same tokens."""
        if cache is None:
            return
        if not isinstance(cache, Sequence) or not all(isinstance(part, (KVCache, RollingCache)) for part in cache):
            raise bad_type(
                "cache",
                expected="one KVCache or RollingCache per layer",
                received=type(cache).__name__,
                remedy="model.new_cache()",
            )
        if len(cache) != len(self.blocks):
            raise bad_value(
                "cache", expected=f"one per layer, {len(self.blocks)}", received=len(cache), remedy="model.new_cache()"
            )
        if len({id(part) for part in cache}) < len(cache):
            raise bad_value(
                "cache",
                expected="one of its own for each layer",
                received="one for several layers",
                remedy="model.new_cache()",
            )
        read = [tokens_read(part) for part in cache]
        if len(set(read)) > 1:
            least = (
                ""
                if any(isinstance(part, RollingCache) for part in cache)
                else (f", or for part in cache: part.truncate({min(read)}), and read what comes after once more")
            )
            raise bad_value(
                "cache",
                expected="the same tokens in each layer",
                received=f"{read} tokens",
                remedy=f"read the text again with model.new_cache(){least}",
            )
        if not torch.compiler.is_compiling() and not _same_lengths(cache):
            raise bad_value(
                "cache",
                expected="rows of the same lengths in each layer",
                received="others",
                remedy="truncate each layer's with the same lengths",
            )

    def _held(self, cache: Cache | None, keep: Tensor | None, new: int) -> Tensor | int:
        """How many tokens the cache holds; (B,) if rows differ. Raises if `keep` does not cover all of them."""
        if cache is None:
            held = 0
        elif keep is not None and isinstance(cache[0], RollingCache):
            raise bad_value(
                "keep",
                expected="None: a RollingCache forgets, so there is no flag for each key",
                received="a tensor",
                remedy="rows of one length, or a KVCache",
            )
        else:
            held = len(cache[0])
            lengths = cache[0].lengths if isinstance(cache[0], KVCache) and cache[0].ragged else None
            if lengths is not None and keep is None:
                return lengths
        if keep is not None and keep.shape[1] != held + new:
            raise bad_value(
                "keep", expected=f"one flag per token, {held} cached and {new} new", received=shape_of(keep)
            )
        return held


def _same_lengths(cache: Cache) -> bool:
    """Whether the rows have the same lengths in each layer."""
    lengths = [part.lengths for part in cache if isinstance(part, KVCache) and part.ragged]
    rows = [each for each in lengths if each is not None]
    return not rows or (len(rows) == len(cache) and all(torch.equal(rows[0], each) for each in rows))
