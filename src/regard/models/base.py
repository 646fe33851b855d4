"""The base class of encoders and decoders: tokenizing, decoding, and checks of inputs.

Letters: B texts, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, is_panic, shape_of
from regard.models.blocks import Embedding, read_together
from regard.models.config import ModelConfig
from regard.onednn import packed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Batch", "TextInput", "TextModel", "padded", "tokenizing"]


@contextmanager
def tokenizing(text: str) -> Iterator[None]:
    """Turn a panic of the tokenizer (its regular expression gives up) into a `ValueError`."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise bad_value(
            "text",
            expected="one that the tokenizer can cut",
            received=f"one of {len(text)} characters at which it gives up ({error})",
            remedy="shorter parts of it",
        ) from error


class Batch(NamedTuple):
    """Texts of different lengths in one tensor: `ids` (B, N), and `keep` (B, N), True for tokens, False for padding."""

    ids: Tensor
    keep: Tensor

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each text, (B,)."""
        return self.keep.sum(1)


def padded(rows: Sequence[Sequence[int]], value: int = 0, side: Literal["right", "left"] = "right") -> Batch:
    """Lists of ids as one tensor, the shorter ones padded with `value` on one side.

    >>> padded([[5, 6, 7], [8]], side="left").ids.tolist()
    [[5, 6, 7], [0, 0, 8]]
    """
    if side not in ("right", "left"):
        raise bad_value("pad", expected='"right" or "left"', received=repr(side))
    if not rows:
        raise bad_value("texts", expected="at least one", received="none")
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), value, dtype=torch.int64, device="cpu")
    keep = torch.zeros(len(rows), longest, dtype=torch.bool, device="cpu")
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, where] = torch.tensor(row, dtype=torch.int64, device="cpu")
        keep[i, where] = True
    return Batch(ids, keep)


@dataclass(frozen=True)
class TextInput:
    """The text of one call of a model."""

    ids: Tensor  # (B, N)
    keep: Tensor | None  # (B, N), True for tokens, False for padding; with a cache (B, cached + N)
    length: int  # N
    single: bool  # whether the ids were given as (N,)


class TextModel(nn.Module):
    """A model with its tokenizer.

    Attributes:
        config: its `ModelConfig`.
        tokenizer: a `tokenizers.Tokenizer`, or None if the weights came without one.
        name: the name it was loaded by.
        unused: names of stored tensors that are not part of this model (a pooler, a classifier).
    """

    blocks: nn.ModuleList
    embedding: Embedding

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None, name: str = "") -> None:
        super().__init__()
        self.config, self.tokenizer, self.name = config, tokenizer, name
        self.unused: tuple[str, ...] = ()
        self.first: Callable[[int], int] | None = (
            None  # of sharded models: broadcasts a number of the first process to all
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def encode(self, text: str) -> Tensor:
        """The token ids of a text, (1, N), special tokens included."""
        return torch.tensor([self._tokenize(text).ids], dtype=torch.int64, device=self.device)

    def encode_batch(self, texts: Sequence[str], pad: Literal["right", "left"] = "right") -> Batch:
        """The token ids of several texts, padded to one length: `model(batch.ids, keep=batch.keep)`."""
        if isinstance(texts, str):
            raise bad_type("texts", expected="a list of texts", received="one text", remedy="encode(text)")
        batch = padded([self._tokenize(text).ids for text in texts], self.config.pad or 0, pad)
        return Batch(batch.ids.to(self.device), batch.keep.to(self.device))

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as the vocabulary spells them, special tokens included."""
        return self._tokenize(text).tokens

    def decode(self, ids: Tensor | Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids (N,) or (1, N)."""
        if isinstance(ids, Tensor):
            if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
                raise bad_type("ids", expected="integers", received=f"dtype {ids.dtype}")
            if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
                raise bad_value("ids", expected="one text, (N,) or (1, N)", received=shape_of(ids))
            ids = ids.flatten().tolist()
        elif not isinstance(ids, Iterable):
            raise bad_type("ids", expected="token ids, (N,) or (1, N)", received=type(ids).__name__)
        ids = list(ids)
        try:
            return self._need_tokenizer().decode(ids, skip_special_tokens=skip_special)
        except OverflowError:
            low, high = min(ids), max(ids)
            raise bad_value("ids", expected="token ids, from 0 on", received=low if low < 0 else high) from None
        except TypeError as error:
            raise bad_type("ids", expected="integers", received=str(error).splitlines()[0]) from error

    def packed(self) -> AbstractContextManager[None]:
        """Within it, products with few rows (short texts, one token at a time) are faster on CPUs where oneDNN computes
        them: the weights are there a second time, in its own order. `generate` and `stream` do so by themselves. Where
        that gains nothing (`onednn.packs`: most CPUs in float32, those without products of bfloat16) nothing is copied.

        The copies are made at once and live as long as what is returned, which may be entered many times. Make another
        after weights were changed through `.data`. See `regard.onednn.packed`.
        """
        groups = [group for module in self.modules() for group in read_together(module)]
        within = {linear for group in groups for linear in group}
        return packed([*groups, *(module for module in self.modules() if module not in within)])

    def describe(self, tokens: int = 128) -> str:
        """The main facts about the model, and the steps of its first layer for a text of `tokens` tokens."""
        from regard.models.describe import describe  # (it imports this module)

        return describe(self, tokens)

    def _tokenize(self, text: str):
        if not isinstance(text, str):
            raise bad_type("text", expected="a string", received=type(text).__name__)
        with tokenizing(text):
            return self._need_tokenizer().encode(text)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_value(
                "tokenizer",
                expected="one beside the weights (tokenizer.json)",
                received="none",
                remedy="pass token ids, or set model.tokenizer to a tokenizers.Tokenizer",
            )
        return self.tokenizer

    def _read(self, ids: Tensor, keep: Tensor | None) -> TextInput:
        """The ids and flags, checked, with a batch axis."""
        self._check_ids(ids, keep)
        single = ids.dim() == 1
        if single:
            ids, keep = ids[None], None if keep is None else keep[None]
        return TextInput(ids, keep, ids.shape[1], single)

    def _embed(self, text: TextInput, positions: Tensor | int, token_types: Tensor | None = None) -> Tensor:
        """(B, N, W): token, position and type embeddings."""
        return self.embedding(text.ids, positions, token_types)

    def _check_ids(self, ids: Tensor, keep: Tensor | None) -> None:
        """Raise if ids are not (N,) or (B, N) within the vocabulary, or `keep` is not boolean with as many rows."""
        if not isinstance(ids, Tensor):
            raise bad_type(
                "ids",
                expected="an integer tensor (N,) or (B, N)",
                received=type(ids).__name__,
                remedy="model.encode(text), or torch.tensor([ids])",
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise bad_type("ids", expected="an integer tensor (N,) or (B, N)", received=f"dtype {ids.dtype}")
        if ids.dim() not in (1, 2) or not ids.shape[-1]:
            raise bad_value("ids", expected="(N,) or (B, N) with at least one token", received=shape_of(ids))
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
            low, high = (int(edge) for edge in ids.aminmax())
            if low < 0 or high >= self.config.vocabulary:
                raise bad_value(
                    "ids",
                    expected=f"from 0 to {self.config.vocabulary - 1}, the vocabulary",
                    received=low if low < 0 else high,
                )
        if keep is not None:
            if not isinstance(keep, Tensor) or keep.dtype is not torch.bool:
                received = f"dtype {keep.dtype}" if isinstance(keep, Tensor) else type(keep).__name__
                raise bad_type(
                    "keep",
                    expected="a boolean tensor, True where there is a token",
                    received=received,
                    remedy="attention_mask.bool()",
                )
            if keep.dim() != ids.dim() or keep.shape[:-1] != ids.shape[:-1]:
                raise bad_value("keep", expected=f"one flag per token of ids {shape_of(ids)}", received=shape_of(keep))

    def extra_repr(self) -> str:
        """Name and sizes, for `repr`."""
        return f"{self.name or self.config.family}: {self.config.layers} layers x {self.config.num_heads} heads"
