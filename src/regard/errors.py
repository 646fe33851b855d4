"""What the caller got wrong: expected, received, remedy. And others' words, fit to be printed.

Every error that a caller can cause is raised through the two functions here, so that all of them read alike::

    mask: expected a boolean tensor, received dtype torch.int64; remedy: masks.Keep(t != 0) ...

A broken invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "also",
    "bad_type",
    "bad_value",
    "is_panic",
    "missing_extra",
    "no_torchscript",
    "printable",
    "refuse_trace",
    "shape_of",
    "unknown_argument",
]


# Characters that are no text but commands to a terminal, or that move or hide what stands beside them: C0, DEL and C1;
# marks, embeddings, overrides and isolates of direction; ends of lines; what has no width; halves of characters; tags.
_COMMANDS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: object, *, lines: bool = False) -> str:
    """Words that others wrote (names in files, tokens, texts) as they can be printed: what would command a terminal
    stands there as an escape. `lines`: ends of lines and tabs stay.

    >>> printable("a\\x1b[2Jb\\n"), printable("a\\n\\u202eb", lines=True)
    ('a\\\\u001b[2Jb\\\\n', 'a\\n\\\\u202eb')
    """

    def escaped(match: re.Match[str]) -> str:
        c = match[0]
        if lines and c in "\n\t":
            return c
        return _SHORT.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}")

    return _COMMANDS.sub(escaped, str(text))


def _sentence(what: str, expected: str, received: object, remedy: str) -> str:
    sentence = f"{what}: expected {expected}, received {received}" + (f"; remedy: {remedy}" if remedy else "")
    return printable(sentence, lines=True)


def bad_value(what: str, *, expected: str, received: object, remedy: str = "") -> ValueError:
    """A `ValueError` that says expected, received, remedy.

    >>> str(bad_value("num_heads", expected="a divisor of 64", received=5, remedy="pass head_dim"))
    'num_heads: expected a divisor of 64, received 5; remedy: pass head_dim'
    """
    return ValueError(_sentence(what, expected, received, remedy))


def bad_type(what: str, *, expected: str, received: object, remedy: str = "") -> TypeError:
    """A `TypeError` that says expected, received, remedy."""
    return TypeError(_sentence(what, expected, received, remedy))


def missing_extra(package: str, extra: str) -> ImportError:
    """The error for an optional dependency that is not installed, naming the extra that brings it."""
    return ImportError(f"{package} is not installed; it comes with: pip install 'regard[{extra}]'")


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library written in Rust (tokenizers, safetensors), which `except Exception` lets
    through: pyo3 makes it a `BaseException`, of a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


def shape_of(tensor: Tensor) -> str:
    """A shape as a plain tuple, for messages: `(2, 3, 5)`."""
    return str(tuple(tensor.shape))


def also(error: Exception, other: Exception) -> Exception:
    """`error` as an instance of the other's type, too, and with its words: whoever caught the error of a function of
    torch's also catches that of its replacement.

    >>> both = also(bad_value("mask", expected="2 axes", received="1"), AssertionError("expected 2-D"))
    >>> isinstance(both, ValueError), isinstance(both, AssertionError)
    (True, True)
    >>> str(both)
    'mask: expected 2 axes, received 1; torch says: expected 2-D'
    """
    words = f"{error}; torch says: {other}"
    return _made(type(error), type(other), words)


def _made(first: type[Exception], second: type[Exception], words: str) -> Exception:
    return _both(first, second)(words)


@cache
def _both(first: type[Exception], second: type[Exception]) -> type[Exception]:
    def reduce(self: Exception) -> tuple[Any, ...]:  # a class made here is not found by its name
        return _made, (first, second, str(self))

    bases = (first,) if issubclass(first, second) else (second,) if issubclass(second, first) else (first, second)
    return type(first.__name__, bases, {"__reduce__": reduce, "__module__": first.__module__})


def no_torchscript(module: object) -> NoReturn:
    """Raise for `torch.jit.script` of a module."""
    raise bad_type(
        "torch.jit.script",
        expected="modules that TorchScript can compile",
        received=type(module).__name__,
        remedy="torch.compile(model), or torch.export.export(model, args) for use without Python",
    )


def refuse_trace(what: str) -> None:
    """Raise under `torch.jit.trace`: it would not record our kernels, nor what depends on sizes."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise bad_type(
            what,
            expected="plain calls, torch.compile or torch.export",
            received="a call under torch.jit.trace, which does not record our kernels",
            remedy="torch.export.export(model, args); for ONNX torch.onnx.export(model, args, dynamo=True)",
        )


# Arguments as others name them (nn.MultiheadAttention, scaled_dot_product_attention, transformers): what to write here.
# A dict says it by where it was given: to the constructor "MultiHeadAttention", to the "layer" that is called, to a
# "function" such as attend.
_IN_THE_CALL = "it belongs to the call: layer(x, {}=...)"
_IN_THE_CONSTRUCTOR = "it belongs to the constructor: MultiHeadAttention(..., {}=...)"
_NOT_EXPANDED = "leave it out: k and v may have fewer heads than q"
_MASK = (
    "mask=masks.Hide({0}) for a boolean one in which True hides (as of nn.MultiheadAttention), mask={0} for one in "
    "which True may attend (as of scaled_dot_product_attention), bias={0} for floats that are added"
)
INSTEAD: dict[str, str | dict[str, str]] = {
    "attn_mask": _MASK,
    "src_mask": _MASK,
    "tgt_mask": _MASK,
    "key_padding_mask": "mask=masks.Padding(keep=~key_padding_mask), for True hides there",
    "src_key_padding_mask": "mask=masks.Padding(keep=~src_key_padding_mask), for True hides there",
    "padding_mask": "mask=masks.Padding(keep=...), True for real tokens",
    "attention_mask": "mask=masks.Padding(keep=attention_mask.bool()) for a tokenizer's, (B, M)",
    "is_causal": "mask=masks.Causal()",
    "causal": "mask=masks.Causal()",
    "batch_first": "leave it out: inputs are (B, N, W); x.transpose(0, 1) for others",
    "need_weights": {
        "MultiHeadAttention": _IN_THE_CALL,
        "function": "regard.attention_weights(q, k, ...) gives the weights",
    },
    "average_attn_weights": "leave it out: weights are of each head, (B, H, N, M); weights.mean(1) is their average",
    "output_attentions": {"layer": "need_weights=True", "function": "regard.attention_weights(q, k, ...)"},
    "kdim": "key_dim=",
    "vdim": "value_dim=",
    "add_bias_kv": "none here; regard.swap(nn.MultiheadAttention(..., add_bias_kv=True)) keeps it",
    "add_zero_attn": {
        "MultiHeadAttention": "sinks=True, a learned logit in the denominator, which begins at the 0 of add_zero_attn",
        "function": "sinks=torch.zeros(H)",
    },
    "dropout_p": {"function": "dropout=", "layer": _IN_THE_CONSTRUCTOR.format("dropout")},
    "attn_dropout": "dropout=",
    "enable_gqa": {"function": _NOT_EXPANDED, "layer": _NOT_EXPANDED, "MultiHeadAttention": "num_kv_heads="},
    "device": "MultiHeadAttention(...).to(device)",
    "dtype": "MultiHeadAttention(...).to(dtype)",
    "num_key_value_heads": "num_kv_heads=",
    "num_attention_heads": "num_heads=",
    "hidden_size": "embed_dim=",
    "qkv_bias": "bias=",
    "position_ids": "positions=",
    "past_key_value": "cache=regard.KVCache()",
    "past_key_values": "cache=regard.KVCache()",
    "use_cache": "cache=regard.KVCache()",
    "attn_bias": "bias=",
    "window": "mask=masks.Window(size)",
    "window_size": "mask=masks.Window(size)",
    "sliding_window": "mask=masks.Window(size)",
    "static_k": "regard.attend(q, k, v), which takes heads",
    "static_v": "regard.attend(q, k, v), which takes heads",
}
_OF_THE_CALL = ("mask", "bias", "positions", "cache", "value_residual", "share", "source", "need_weights")
_OF_THE_CONSTRUCTOR = ("dropout", "scale", "softcap", "sinks", "kernel", "position_encoding", "qk_norm", "num_kv_heads")
_OF_THE_CONSTRUCTOR += ("v_norm", "gate", "query_scale", "value_mix", "shares_kv")


def unknown_argument(place: str, function: Callable[..., Any], unknown: Mapping[str, Any]) -> TypeError:
    """The error for keyword arguments that there are not, saying what to write instead; `place` is as in `INSTEAD`.

    >>> from regard import attend
    >>> str(unknown_argument("function", attend, {"is_causal": True}))
    'attend: expected arguments of its own, received is_causal=; remedy: mask=masks.Causal()'
    """
    name = next(iter(unknown))
    instead = INSTEAD.get(name, "")
    remedy = instead.get(place, "") if isinstance(instead, dict) else instead
    if not remedy and place == "MultiHeadAttention" and name in _OF_THE_CALL:
        remedy = _IN_THE_CALL
    if not remedy and place == "layer" and name in _OF_THE_CONSTRUCTOR:
        remedy = _IN_THE_CONSTRUCTOR
    if not remedy:
        known = [known for known in inspect.signature(function).parameters if known not in ("self", "unknown")]
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"the nearest is {near[0]}=" if near else f"there are {', '.join(known)}"
    what = {"layer": "the call of MultiHeadAttention", "function": function.__name__}.get(place, place)
    return bad_type(what, expected="arguments of its own", received=f"{name}=", remedy=remedy.format(name))
