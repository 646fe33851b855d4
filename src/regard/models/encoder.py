"""The encoder: bidirectional attention. BERT and similar models.

Letters: B batch, N tokens, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Mask, Padding, Window
from regard.models.base import TextModel, padded
from regard.models.blocks import Block, Embedding, new_norm
from regard.models.config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Encoder"]

# From this many batches on, packing the weights for oneDNN pays off.
_WORTH_PACKING = 8


class Encoder(TextModel):
    """Token ids to one contextual vector per token.

    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, order="post")
    >>> Encoder(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 6])
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None, name: str = "") -> None:
        super().__init__(config, tokenizer, name)
        self.embedding = Embedding(config)
        encoding = config.position_encoding()
        self.blocks = nn.ModuleList(Block(config, i, encoding) for i in range(config.layers))
        self.norm = None if config.order == "post" else new_norm(config)

    def forward(
        self,
        ids: Tensor,
        *,
        keep: Tensor | None = None,
        token_types: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of the last layer.

        Args:
            ids: (B, N), or (N,) for one text.
            keep: (B, N), True for tokens, False for padding.
            token_types: (B, N), which of two texts a token belongs to; 0 by default.
            states: if given, filled with the input of the first layer and the output of each layer, layers + 1 tensors.

        Returns:
            (B, N, W); values at padding are meaningless.
        """
        text = self._read(ids, keep)
        if token_types is not None:
            token_types = token_types[None] if text.single and isinstance(token_types, Tensor) else token_types
            self._check_types(token_types, text.ids)
        keep = text.keep
        if keep is not None and keep.shape[1] != text.length:
            raise bad_value("keep", expected=f"one flag per token, {shape_of(ids)}", received=shape_of(keep))
        x = self._embed(text, 0 if keep is None else (keep.cumsum(1) - 1).clamp_(min=0), token_types)
        for i, block in enumerate(self.blocks):
            if states is not None:
                states.append(x)
            x = block(x, mask=self._mask(i, keep))
        x = x if self.norm is None else self.norm(x)
        if states is not None:
            states.append(x)
            states[:] = [state[0] for state in states] if text.single else states
        return x[0] if text.single else x

    def _check_types(self, types: Tensor, ids: Tensor) -> None:
        """Raise if token types are not one integer per token, each below the number of learned types."""
        if not isinstance(types, Tensor) or types.dtype not in (torch.int64, torch.int32):
            received = f"dtype {types.dtype}" if isinstance(types, Tensor) else type(types).__name__
            raise bad_type("token_types", expected="an integer tensor", received=received)
        if types.shape != ids.shape:
            raise bad_value("token_types", expected=f"one per token, {shape_of(ids)}", received=shape_of(types))
        count = self.config.token_types
        if count and types.device.type == "cpu" and not torch.compiler.is_compiling() and types.numel():
            low, high = (int(edge) for edge in types.aminmax())
            if low < 0 or high >= count:
                raise bad_value("token_types", expected=f"from 0 to {count - 1}", received=low if low < 0 else high)

    def _mask(self, layer: int, keep: Tensor | None) -> Mask | None:
        """The mask of a layer: no padding, and within the layer's window if it has one."""
        window, padding = self.config.window_of(layer), None if keep is None else Padding(keep=keep)
        if window is None:
            return padding
        near = Window(before=window // 2, after=window // 2)
        return near if padding is None else near & padding

    @torch.inference_mode()
    def embed(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        progress: Callable[[Iterable], Iterable] | None = None,
    ) -> Tensor:
        """One vector per text: the mean over its tokens, or the first token's, as the model was trained; of length 1.

        Args:
            texts: one or several. Texts that are too long for the model are truncated.
            batch_size: texts per batch; texts of similar length are batched together.
            progress: wraps the iterable of batches, such as `rich.progress.track`.

        Returns:
            (B, W); (W,) for one text.
        """
        if isinstance(texts, str):
            return self.embed([texts])[0]
        if not isinstance(texts, Sequence):
            raise bad_type("texts", expected="a text, or a list of texts", received=type(texts).__name__)
        if self.config.not_pooled:
            raise bad_value(
                "embed",
                expected="a model that pools by the mean or the first token",
                received=self.config.not_pooled,
                remedy="pool the states of model(ids) yourself",
            )
        if batch_size < 1:
            raise bad_value("batch_size", expected="at least 1", received=batch_size)
        if not texts:
            return torch.empty(0, self.config.embed_dim, dtype=self.dtype, device=self.device)
        rows = [self._truncated(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        out = torch.empty(len(rows), self.config.embed_dim, dtype=self.dtype, device=self.device)
        copies = self.packed() if len(batches) >= _WORTH_PACKING else nullcontext()
        for chosen in batches if progress is None else progress(batches):
            ids, keep = (x.to(self.device) for x in padded([rows[i] for i in chosen], self.config.pad or 0))
            with copies:
                states = self(ids, keep=None if bool(keep.all()) else keep)
            if self.config.pooling == "cls":
                pooled = states[:, 0]
            else:
                wide = states.to(torch.promote_types(states.dtype, torch.float32))
                pooled = (wide * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
            if self.config.normalised:
                pooled = F.normalize(pooled, dim=-1)
            out[torch.tensor(chosen, device=self.device)] = pooled.to(out.dtype)
        return out

    def _truncated(self, text: str) -> list[int]:
        """The ids of a text, truncated to the length that the model reads, special tokens kept."""
        encoding = self._tokenize(text)
        limit = min((n for n in (self.config.embed_length, self.config.context) if n), default=None)
        if limit is None or len(encoding.ids) <= limit:
            return encoding.ids
        ids, special = encoding.ids, encoding.special_tokens_mask
        spare = len(ids) - limit
        last = max(i for i, flag in enumerate(special) if not flag) + 1  # (the end of the text itself is removed)
        return ids[: last - spare] + ids[last:]
