"""What `look` is given, as token ids: texts by any tokenizer, ids, what a tokenizer returned.

Letters: B texts, N tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.models import Decoder
from regard.models.base import Batch, TextModel, padded, tokenizing

__all__ = [
    "OPTIONAL",
    "Encoded",
    "decode",
    "encode",
    "encode_text",
    "is_tokenizer",
    "pad_id",
    "stack_rows",
    "takes",
    "tokens_known",
]

# What tokenizers may return beside the ids: passed on only if the model takes it.
OPTIONAL = {
    *("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"),
    *("overflow_to_sample_mapping", "num_truncated_tokens", "overflowing_tokens"),
}


@dataclass
class Encoded:
    """Token ids (B, N) as "input_ids", and what was given beside them: per token, such as "attention_mask" (0 for
    padding), and other arguments of the model. `several`: a list of texts was given, so lists are returned."""

    inputs: dict[str, Any]
    several: bool

    @property
    def ids(self) -> Tensor:
        return self.inputs["input_ids"]

    def keep(self) -> Tensor:
        """True for tokens, False for padding (B, N)."""
        mask = self.inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == self.ids.shape:
            return mask.bool()
        return torch.ones_like(self.ids, dtype=torch.bool)

    def per_token(self, name: str) -> bool:
        """Whether an input has a number for each token, (B, N)."""
        x = self.inputs[name]
        return isinstance(x, Tensor) and x.shape == self.ids.shape

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each text alone, (1, n), without padding."""

        def row(name: str, x: Any, i: int, keep: Tensor) -> Any:
            if self.per_token(name):
                return x[i : i + 1, keep]
            return x[i : i + 1] if isinstance(x, Tensor) and x.shape[:1] == self.ids.shape[:1] else x

        for i, keep in enumerate(self.keep()):
            yield {name: row(name, x, i, keep) for name, x in self.inputs.items()}

    def to(self, device: torch.device) -> Encoded:
        """The same on a device."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return Encoded(moved, self.several)

    def tokens(self, tokenizer: Any) -> Any:
        """The tokens of each text as strings, "" for padding; a flat list for one text; None without a tokenizer."""
        return None if tokenizer is None else self._hide_padding([_tokens_of(tokenizer, ids) for ids in self.ids])

    def _hide_padding(self, rows: Sequence[Sequence[str]]) -> Any:
        shown = [
            [token if keep else "" for token, keep in zip(row, keeps, strict=False)]
            for row, keeps in zip(rows, self.keep().tolist(), strict=True)
        ]
        return shown if self.several else shown[0]


def encode(model: nn.Module, tokenizer: Any, text: Any) -> Encoded | None:
    """The token ids of what was given, on the model's device; None if it is neither a text nor token ids."""
    text = _as_tensor(text)
    if _is_text(text) or (isinstance(text, (list, tuple)) and text and all(map(_is_text, text))):
        several = not _is_text(text)
        texts: list[Any] = list(text) if several else [text]
        _check_texts(model, tokenizer, texts)
        rows = [encode_text(tokenizer, (one,) if isinstance(one, str) else one) for one in texts]
        encoded = stack_rows(rows, pad_id(model, tokenizer), several)
    elif isinstance(text, Batch):
        encoded = Encoded({"input_ids": text.ids, "attention_mask": text.keep}, several=len(text.ids) > 1)
    elif _is_mapping(text) and "input_ids" in text:
        inputs = {name: _as_tensor(text[name]) for name in text}
        others = {name: _as_batch(x, 0)[0] if _is_ids(x) else x for name, x in inputs.items() if name != "input_ids"}
        encoded = _encode_ids(inputs["input_ids"], pad_id(model, tokenizer), others)
    elif _is_ids(text):
        encoded = _encode_ids(text, pad_id(model, tokenizer), {})
    elif isinstance(text, (list, tuple)) and not text:
        raise bad_value("text", expected="at least one", received="an empty list")
    else:
        return None
    if not encoded.ids.numel():
        raise bad_value("text", expected="at least one token", received=f"ids of shape {shape_of(encoded.ids)}")
    if not (lengths := encoded.keep().sum(1)).all():
        raise bad_value("text", expected="at least one token in each", received=f"lengths {lengths.tolist()}")
    return encoded.to(next(iter(model.parameters()), torch.empty(0, device="cpu")).device)


# What was given


def _is_text(text: Any) -> bool:
    """One text, or a pair of texts."""
    pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
    return isinstance(text, str) or pair


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def _is_ids(value: Any) -> bool:
    """Integers: a tensor (N,) or (B, N), a list, or a list of lists."""
    if isinstance(value, Tensor):
        integers = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
        return integers and value.dim() in (1, 2)
    if not isinstance(value, (list, tuple)) or not value:
        return False
    nested = all(isinstance(row, (list, tuple)) for row in value)
    flat = [number for row in value for number in row] if nested else value
    return all(isinstance(number, int) and not isinstance(number, bool) for number in flat)


def is_tokenizer(value: Any) -> bool:
    """Tokenizers of transformers can be called; those of tokenizers have `encode` and `id_to_token`."""
    return callable(value) or (hasattr(value, "encode") and hasattr(value, "id_to_token"))


def _as_tensor(value: Any) -> Any:
    """A numpy array as a tensor; anything else as it is."""
    return torch.as_tensor(value) if hasattr(value, "__array__") and not isinstance(value, Tensor) else value


def _as_batch(values: Any, pad: int) -> tuple[Tensor, Tensor]:
    """Integers of one or several texts as a tensor (B, N), padded; and which are no padding, (B, N)."""
    if isinstance(values, Tensor):
        ids = values if values.dim() > 1 else values[None]
        return ids, torch.ones_like(ids, dtype=torch.bool)
    return padded(values if isinstance(values[0], (list, tuple)) else [values], pad)


def _encode_ids(ids: Any, pad: int, others: dict[str, Any]) -> Encoded:
    """Token ids, with what was given beside them."""
    if not _is_ids(ids):
        raise bad_type(
            "input_ids",
            expected="token ids: integers (N,) or (B, N)",
            received=f"{ids!r:.60}",
            remedy='tokenizer(text, return_tensors="pt")',
        )
    batch, keep = _as_batch(ids, pad)
    mask = {} if keep.all() or "attention_mask" in others else {"attention_mask": keep.long()}
    return Encoded({"input_ids": batch, **mask, **others}, several=len(batch) > 1)


def _check_texts(model: nn.Module, tokenizer: Any, texts: Sequence[Any]) -> None:
    if tokenizer is None and isinstance(model, TextModel):
        model.tokenize("")  # raises, and says what is missing
    if tokenizer is None:
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        example = f"AutoTokenizer.from_pretrained({name!r})" if name else "tokenizer"
        raise bad_type(
            "tokenizer",
            expected="the model's tokenizer, for a text was given",
            received="None",
            remedy=f"look(model, {example}, text)",
        )
    for text in texts:
        parts = [text] if isinstance(text, str) else text
        if not any(part.strip() for part in parts):
            raise bad_value("text", expected="at least one word", received=repr(parts[0]))
        if len(parts) > 1 and isinstance(model, Decoder):
            raise bad_type("text", expected="one text, for this model is a decoder", received="a pair")


# Tokenizers


def encode_text(tokenizer: Any, parts: tuple[str, ...], is_target: bool = False) -> dict[str, Tensor]:
    """What a tokenizer returns for a text or a pair, as named tensors (1, n)."""
    if callable(tokenizer):  # of transformers, or like it
        options: dict[str, Any] = {"text_target" if is_target else "text": parts[0], "return_tensors": "pt"}
        with tokenizing("".join(parts)):
            encoding: Any = tokenizer(**options, **({"text_pair": parts[1]} if parts[1:] else {}))
        return dict(encoding)
    if is_tokenizer(tokenizer):  # of tokenizers
        with tokenizing("".join(parts)):
            encoding = tokenizer.encode(*parts)
        types = {"token_type_ids": torch.tensor([encoding.type_ids], device="cpu")} if parts[1:] else {}
        return {"input_ids": torch.tensor([encoding.ids], dtype=torch.int64, device="cpu"), **types}
    raise bad_type("tokenizer", expected="one of transformers or of tokenizers", received=type(tokenizer).__name__)


def stack_rows(rows: list[dict[str, Tensor]], pad: int, several: bool) -> Encoded:
    """Texts (1, n) as one batch, padded on the right, where padding moves no position."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    longest = max(row["input_ids"].shape[1] for row in rows)
    lengths = {row["input_ids"].shape[1] for row in rows}
    if len(lengths) > 1 and "attention_mask" not in names:
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
        names.append("attention_mask")

    def stacked(name: str) -> Tensor:
        value = pad if name == "input_ids" else 0
        return torch.cat([F.pad(row[name], (0, longest - row[name].shape[1]), value=value) for row in rows])

    return Encoded({name: stacked(name) for name in names}, several)


def pad_id(model: Any, tokenizer: Any) -> int:
    """The id of padding. It is masked, but some models count positions by it."""
    config = getattr(model, "config", None)
    candidates = (
        getattr(tokenizer, "pad_token_id", None),
        getattr(config, "pad_token_id", None),
        getattr(config, "pad", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    return next((x for x in candidates if isinstance(x, int)), 0)


def _tokens_of(tokenizer: Any, ids: Tensor) -> list[str]:
    """Token ids as strings of the vocabulary."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(ids.tolist())]
    return [str(tokenizer.id_to_token(i)) for i in ids.tolist()]


def tokens_known(text: Any, encoded: Encoded) -> Any:
    """The tokens that a `BatchEncoding` of a fast tokenizer knows; None for anything else."""
    if not getattr(text, "is_fast", False):
        return None
    return encoded._hide_padding([text.tokens(i) for i in range(len(encoded.ids))])


def decode(tokenizer: Any, rows: list[list[int]], several: bool) -> str | list[str]:
    """Generated ids as text."""
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    return texts if several else texts[0]


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument of this name; with **kwargs, only the two that all models know."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (takes_any and name in ("input_ids", "attention_mask"))
