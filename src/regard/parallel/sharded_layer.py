"""The layer and the models with heads or tokens sharded: subclasses that `shard_heads` and `shard_sequence` put in the
place of a module's class. The module stays the same object: parameters, hooks and references to it stay.

Letters: B batch, N tokens of the whole text, n those of one rank, W model width.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from regard.attention import BiasLike
from regard.cache import KVCache, RollingCache, Slots
from regard.layer import MultiHeadAttention
from regard.masks import Mask
from regard.models.base import TextInput, TextModel
from regard.parallel.agreement import LayerInputs, Sharding, no_cache
from regard.parallel.sharded_call import attend_sharded
from regard.parallel.token_layout import Tokens

__all__ = ["ShardedAttention", "ShardedTextModel", "install", "sharding_of"]


class ShardedAttention(MultiHeadAttention):
    """A layer of which other processes have other heads, or other tokens."""

    sharding: Sharding

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: BiasLike | None = None,
        positions: Tensor | None = None,
        cache: KVCache | RollingCache | None = None,
        need_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As the plain layer; a rank with some of the tokens is given these, and masks, biases and positions of the
        whole sequence. Its weights are those of its heads and queries."""
        with self.sharding.refusing():
            self._check_types(query, key, value, cache, unknown)
        if query.dim() == 2:
            options = {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
            return self._unbatched(query, key, value, need_weights=need_weights, **options)
        key = query if key is None else key
        value = key if value is None else value
        dropout = self.dropout if self.training else 0.0
        inputs = LayerInputs(query, key, value, mask, bias, positions, cache, dropout)
        call = self.sharding.agree(inputs, partial(self._check_call, query, key, value, cache))
        with nullcontext() if cache is None else self._filling(cache, query, key, value):
            query, key, value = call.replicate(query, key, value)
            q, k, v = self._project(query, key, value, cache)
            if call.queries is None:
                q, k, v, slots = self._place(q, k, v, positions, cache, self_attention=key is query)
            else:
                assert k is not None and v is not None  # (no cache)
                q = self._rotate(q, *call.positions_of_queries(q.device))
                k = self._rotate(k, *call.key_positions(k.device))
                slots = Slots()
            options = self._options(slots, mask, bias)
            out = attend_sharded(q, k, v, call=call, dropout=dropout, kernel=self.kernel, **options)
            weights = call.weights(q, k, **options) if need_weights else None
            out = call.wait(self._merge(out, query))
        return out if weights is None else (out, weights)


@dataclass(frozen=True)
class TextPart(TextInput):
    """One rank's tokens of a text."""

    tokens: Tokens
    rank: int


class ShardedTextModel(TextModel):
    """A model that is given some tokens of a text; other processes have the others."""

    sharding: Sharding

    def _read(self, ids: Tensor, keep: Tensor | None) -> TextPart:
        """The ranks agree on the text. `keep` may be given for the whole text, or for this rank's tokens."""
        assert self.sharding.sequence is not None
        check = partial(self._check_ids, ids, keep)
        single = isinstance(ids, Tensor) and ids.dim() == 1
        if single:
            ids, keep = ids[None], keep[None] if isinstance(keep, Tensor) else keep
        tokens, keep = self.sharding.agree_on_text(ids, keep, check)
        return TextPart(ids, keep, tokens.total, single, tokens, self.sharding.sequence.ranks.rank)

    def _embed(self, text: TextInput, positions: Tensor | int, token_types: Tensor | None = None) -> Tensor:
        """(B, n, W), from positions of the whole text."""
        assert isinstance(text, TextPart)
        self.embedding.check(positions, text.length)  # a part alone may be short enough
        if isinstance(positions, int):
            positions = text.tokens.numbers(text.rank, text.ids.device) + positions
        else:
            positions = text.tokens.part(positions, text.rank, positions.dim() - 1)
        return self.embedding(text.ids, positions, token_types)

    def _check_cache(self, cache: Any) -> None:
        """Refuse a cache, on all ranks."""
        if cache is not None:
            self.sharding.refuse_text(no_cache())


@functools.cache
def _subclass(sharded: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    return type(f"Sharded{plain.__name__}", (sharded, plain), {"__doc__": sharded.__doc__})


def install(module: nn.Module, sharding: Sharding) -> None:
    """Make a `MultiHeadAttention` or `TextModel` a sharded one, in place."""
    sharded = ShardedAttention if isinstance(module, MultiHeadAttention) else ShardedTextModel
    if not isinstance(module, sharded):
        module.__class__ = _subclass(sharded, type(module))  # type: ignore[assignment]
    module.sharding = sharding  # type: ignore[assignment]


def sharding_of(module: nn.Module) -> Sharding:
    """How a module is sharded; a new, empty `Sharding` where it is not."""
    return module.sharding if isinstance(module, (ShardedAttention, ShardedTextModel)) else Sharding()
