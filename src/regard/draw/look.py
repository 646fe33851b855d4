"""Look at a text through any model: watch it, name its tokens, draw."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from regard.draw.figure import figure as draw_figure
from regard.draw.page import page
from regard.draw.terminal.views import terminal
from regard.errors import bad_type, bad_value, printable, shape_of
from regard.heads import Record, watch
from regard.heads.watch_all import evaluating, run
from regard.measures import MeasureLike
from regard.models import Decoder, Encoder
from regard.models.base import Batch, TextModel, padded, tokenizing
from regard.models.generation import Rules, tokens

__all__ = ["look", "read"]

# What tokenizers add to the ids, whether a model takes it or not
ADDED = (
    "attention_mask",
    "token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
    "num_truncated_tokens",
    "overflowing_tokens",
)


def look(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    item: int = 0,
    html: str | PathLike[str] | None = None,
    figure: str | PathLike[str] | None = None,
    show: bool | None = None,
    **options: Any,
) -> Record:
    """Run a model on a text and show what every head attends to.

    Args:
        model: a model of transformers, one of regard's, or any other that can be called on what is given as `text`.
        tokenizer: its tokenizer: of transformers, or of tokenizers. Models of regard have their own, so that
            `look(model, text)` is enough.
        text: one of

            - a text, or a pair of texts as a tuple;
            - a list of texts: they are read as one batch, and `item` is drawn, without its padding;
            - token ids: a list, a list of lists, or an integer tensor (N,) or (B, N);
            - what a tokenizer gives (a `BatchEncoding`, a mapping with input_ids), or `encode_batch` of regard's;
            - anything else that the model can be called on: a tensor, or a mapping of named inputs.
        target: of an encoder and decoder, the text that the decoder reads (a list of them for a list of texts);
            without one it generates.
        generate: how many tokens a decoder goes on for; what it wrote is in `.generated` (a list for a list of texts).
        item: which of several texts is drawn.
        html, figure: files to write: the page; a figure (PNG, SVG or PDF).
        show: print the picture in the terminal; by default, unless in a notebook, which shows what is returned.
        options: as for `watch`: `measures`, `layers`; and `progress`, a function that is told how far it is (0 to 1).

    Returns the `Record`, with its `.tokens`: `regard.draw` can draw it in every other way. Of several texts it holds
    all: `seen[layer].weights(batch=1)`, `draw.terminal(seen, item=1)`.

    >>> import regard
    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> seen = regard.look(model, text=torch.randn(1, 3, 16), show=False)
    >>> seen.layers
    ['self_attn']
    """
    seen = read(model, tokenizer, text, target=target, generate=generate, **options)
    if html is not None:
        page(seen, path=html, item=item)
    if figure is not None:
        draw_figure(seen, path=figure, item=item)
    if show or (show is None and not _in_notebook()):
        terminal(seen, item=item)
        written = [seen.generated] if isinstance(seen.generated, str) else seen.generated or []
        for one in written[item : item + 1] if len(written) > 1 else written:
            print(f"\ngenerated: {printable(one, lines=True)}")
    return seen


def read(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Run a model on a text under `watch`, with everything kept that pictures need: a record with its tokens. The
    arguments are those of `look`."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    if isinstance(generate, bool) or not isinstance(generate, int) or generate < 0:
        raise bad_value("generate", expected="a number of tokens from 0", received=repr(generate))
    if text is None and tokenizer is not None and not _is_tokenizer(tokenizer):
        tokenizer, text = None, tokenizer  # look(model, text)
    if text is None or _is_tokenizer(text):
        received = "None" if text is None else f"a {type(text).__name__}"
        raise bad_type(
            "text",
            expected="a text, or what the model is called on",
            received=received,
            remedy="look(model, tokenizer, text)",
        )
    if tokenizer is None and isinstance(model, TextModel):
        tokenizer = model.tokenizer
    with evaluating(model), torch.no_grad():
        source = _source(model, tokenizer, _as_tensor(text))
        told = _Progress(model, progress, generates=bool(generate) or (_translates(model) and target is None))
        prepared = _prepared(model, tokenizer, text, source, target, generate, told)
        with watch(model, measures=measures, layers=layers, keep="qkv") as seen, told.forwards(1):
            run(model, prepared.inputs)
    seen.tokens, seen.generated = prepared.tokens, prepared.generated
    told.done()
    return seen


@dataclass
class Source:
    """Token ids (B, N) as "input_ids", and what is given beside them: what a tokenizer says of each token, such as
    "attention_mask" (0 for padding), and whatever else the model is called on. `several`: whether there is a list of
    texts, and lists are given back."""

    encoded: dict[str, Any]
    several: bool

    @property
    def ids(self) -> Tensor:
        return self.encoded["input_ids"]

    def real(self) -> Tensor:
        """Which positions (B, N) are no padding."""
        mask = self.encoded.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == self.ids.shape:
            return mask.bool()
        return torch.ones_like(self.ids, dtype=torch.bool)

    def of_each_token(self, name: str) -> bool:
        """Whether something given has a number for each token, as the ids have."""
        x = self.encoded[name]
        return isinstance(x, Tensor) and x.shape == self.ids.shape

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each text alone, (1, n), without padding."""
        for i, real in enumerate(self.real()):
            yield {
                name: x[i : i + 1, real]
                if self.of_each_token(name)
                else x[i : i + 1]
                if isinstance(x, Tensor) and x.shape[:1] == self.ids.shape[:1]
                else x
                for name, x in self.encoded.items()
            }

    def to(self, device: torch.device) -> Source:
        """The same on a device."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.encoded.items()}
        return Source(moved, self.several)

    def spelled(self, tokenizer: Any) -> Any:
        """The tokens of each text, "" for padding; of one text alone a list of them."""
        if tokenizer is None:
            return None
        found = [
            [token if real else "" for token, real in zip(_spelled(tokenizer, ids), reals, strict=True)]
            for ids, reals in zip(self.ids, self.real().tolist(), strict=True)
        ]
        return found if self.several else found[0]


@dataclass
class Prepared:
    """What a model is to be run on; its tokens, in words; what it wrote itself. What was written is read again, as one
    text: the weights are the same, and it is faster than to look at one token after another."""

    inputs: Any
    tokens: Any = None
    generated: str | list[str] | None = None


def _source(model: nn.Module, tokenizer: Any, text: Any) -> Source | None:
    """The token ids of what was given, on the model's device; None where it is neither a text nor token ids."""
    device = next(iter(model.parameters()), torch.empty(0)).device
    if _is_text(text) or (isinstance(text, (list, tuple)) and text and all(map(_is_text, text))):
        several = not _is_text(text)
        texts: list[Any] = list(text) if several else [text]
        _check_texts(model, tokenizer, texts)
        rows = [_encoded(tokenizer, (one,) if isinstance(one, str) else one) for one in texts]
        source = _padded(rows, _pad_id(model, tokenizer), several)
    elif isinstance(text, Batch):
        source = Source({"input_ids": text.ids, "attention_mask": text.keep}, several=len(text.ids) > 1)
    elif _is_mapping(text) and "input_ids" in text:
        named = {name: _as_tensor(text[name]) for name in text}
        others = {name: _as_batch(x, 0)[0] if _is_ids(x) else x for name, x in named.items() if name != "input_ids"}
        source = _of_ids(named["input_ids"], _pad_id(model, tokenizer), others)
    elif _is_ids(text):
        source = _of_ids(text, _pad_id(model, tokenizer), {})
    elif isinstance(text, (list, tuple)) and not text:
        raise bad_value("text", expected="at least one", received="an empty list")
    else:
        return None
    if not source.ids.numel():
        raise bad_value("text", expected="at least one token", received=f"ids of shape {shape_of(source.ids)}")
    if not (lengths := source.real().sum(1)).all():
        raise bad_value("text", expected="at least one token in each", received=f"lengths {lengths.tolist()}")
    return source.to(device)


def _prepared(
    model: nn.Module,
    tokenizer: Any,
    text: Any,
    source: Source | None,
    target: str | Sequence[str] | None,
    generate: int,
    told: _Progress,
) -> Prepared:
    """What the model is to be run on."""
    translates = _translates(model)
    if source is None:
        if generate or target is not None:
            raise bad_type("text", expected="a text, to generate or to have a target", received=type(text).__name__)
        return Prepared(text)
    if target is not None and not translates:
        raise bad_value("target", expected="an encoder and decoder", received=type(model).__name__)
    if generate and isinstance(model, Encoder):
        raise bad_value("generate", expected="0, for this model is an encoder", received=str(generate))
    _check_length(model, tokenizer, source.ids.shape[1] + (0 if translates else generate))
    given = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & source.encoded.keys()
    if translates and not (given and target is None and not generate):
        return _translated(model, tokenizer, source, target, generate or 20, told)
    if not generate:
        words = source.spelled(tokenizer) if tokenizer is not None else _own_tokens(text, source)
        if translates and words is not None:
            ids = source.encoded.get("decoder_input_ids")
            words = (words, None if ids is None else Source({"input_ids": ids}, source.several).spelled(tokenizer))
        return Prepared(_inputs(model, source), words)
    written = _written_after(model, tokenizer, source, generate, told)
    rows = [[*ids["input_ids"][0].tolist(), *new[:-1]] for ids, new in zip(source.rows(), written, strict=True)]
    read = _padded([{"input_ids": torch.tensor([row])} for row in rows], _pad_id(model, tokenizer), source.several)
    read = read.to(source.ids.device)
    read.encoded |= {name: x for name, x in source.encoded.items() if not source.of_each_token(name)}
    return Prepared(_inputs(model, read), read.spelled(tokenizer), _decoded(tokenizer, written, source.several))


def _translated(
    model: Any, tokenizer: Any, source: Source, target: str | Sequence[str] | None, count: int, told: _Progress
) -> Prepared:
    """For an encoder and decoder: the decoder reads the target, or what it writes itself."""
    generated = None
    if target is not None:
        targets = [target] if isinstance(target, str) else list(target)
        if len(targets) != len(source.ids):
            raise bad_value("target", expected=f"one for each of {len(source.ids)} texts", received=str(len(targets)))
        ids = [_encoded(tokenizer, (one,), is_target=True)["input_ids"][0].tolist() for one in targets]
        rows = [[_start(model), *row] for row in ids]
    else:
        written = _written_after(model, tokenizer, source, count, told)
        generated = _decoded(tokenizer, written, source.several)
        rows = [row[:-1] for row in written]  # the last token is written, not read
    read = _padded([{"input_ids": torch.tensor([row])} for row in rows], _pad_id(model, tokenizer), source.several)
    more = {f"decoder_{name}": x for name, x in read.to(source.ids.device).encoded.items()}
    dropped = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "labels")
    both = {name: x for name, x in source.encoded.items() if name not in dropped} | more
    return Prepared(
        _inputs(model, Source(both, source.several)), (source.spelled(tokenizer), read.spelled(tokenizer)), generated
    )


def _written_after(model: Any, tokenizer: Any, source: Source, count: int, told: _Progress) -> list[list[int]]:
    """The ids that a model writes after each text, the likeliest each time; of an encoder and decoder all that the
    decoder reads. Text after text: padding would move positions, and a model reads none."""
    if tokenizer is None:
        raise bad_type(
            "tokenizer",
            expected="the model's tokenizer, to generate a text",
            received="None",
            remedy="look(model, tokenizer, text)",
        )
    found = []
    with told.forwards(count * len(source.ids)):
        for row in source.rows():
            if isinstance(model, Decoder):
                new: list[int] = []
                for token in islice(tokens(model, row["input_ids"].tolist(), Rules(), model.new_cache(), count), count):
                    new.append(int(token))
                    if new[-1] in model.config.eos:
                        break
                found.append(new)
            else:
                first = 0 if _translates(model) else row["input_ids"].shape[1]
                found.append(_written(model, tokenizer, row, count)[0, first:].tolist())
    return found


def _inputs(model: nn.Module, source: Source) -> Any:
    """What a model is called on: named tensors, of what tokenizers add those that it takes; or the ids alone."""
    encoded = source.encoded
    if isinstance(model, TextModel):
        renamed = {"input_ids": "ids", "attention_mask": "keep", "token_type_ids": "token_types"}
        named = {renamed.get(name, name): x for name, x in encoded.items()}
        named = {name: x for name, x in named.items() if _takes(model, name)}
        if "keep" in named:
            named["keep"] = named["keep"].bool()
        return named
    if not source.real().all() and not _takes(model, "attention_mask"):
        raise bad_value(
            "text",
            expected="texts of one length, for this model takes no attention_mask",
            received=f"lengths {source.real().sum(1).tolist()}",
            remedy="one text at a time",
        )
    named = {name: x for name, x in encoded.items() if name not in ADDED or _takes(model, name)}
    return named if _takes(model, "input_ids") else encoded["input_ids"]


# What is a text, what are token ids, what is a tokenizer


def _is_text(text: Any) -> bool:
    """One text, or a pair of them."""
    pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
    return isinstance(text, str) or pair


def _is_mapping(thing: Any) -> bool:
    return isinstance(thing, Mapping) or (hasattr(thing, "keys") and hasattr(thing, "__getitem__"))


def _is_ids(thing: Any) -> bool:
    """Whole numbers: a tensor (N,) or (B, N), a list, or a list of lists."""
    if isinstance(thing, Tensor):
        whole = not (thing.is_floating_point() or thing.is_complex() or thing.dtype is torch.bool)
        return whole and thing.dim() in (1, 2)
    if not isinstance(thing, (list, tuple)) or not thing:
        return False
    flat = [one for row in thing for one in row] if all(isinstance(row, (list, tuple)) for row in thing) else thing
    return all(isinstance(one, int) and not isinstance(one, bool) for one in flat)


def _is_tokenizer(thing: Any) -> bool:
    """One of transformers, or like it, can be called; one of tokenizers has both of these."""
    return callable(thing) or (hasattr(thing, "encode") and hasattr(thing, "id_to_token"))


def _as_tensor(thing: Any) -> Any:
    """An array of numpy as a tensor; all else as it is."""
    return torch.as_tensor(thing) if hasattr(thing, "__array__") and not isinstance(thing, Tensor) else thing


def _as_batch(values: Any, pad: int) -> tuple[Tensor, Tensor]:
    """Whole numbers of one text, or of several, as a tensor (B, N), the shorter lists filled up; and which of them
    were there, (B, N)."""
    if isinstance(values, Tensor):
        ids = values if values.dim() > 1 else values[None]
        return ids, torch.ones_like(ids, dtype=torch.bool)
    return padded(values if isinstance(values[0], (list, tuple)) else [values], pad)


def _of_ids(ids: Any, pad: int, others: dict[str, Any]) -> Source:
    """Token ids, with what is given beside them."""
    if not _is_ids(ids):
        raise bad_type(
            "input_ids",
            expected="token ids: integers (N,) or (B, N)",
            received=f"{ids!r:.60}",
            remedy='tokenizer(text, return_tensors="pt")',
        )
    found, real = _as_batch(ids, pad)
    mask = {} if real.all() or "attention_mask" in others else {"attention_mask": real.long()}
    return Source({"input_ids": found, **mask, **others}, several=len(found) > 1)


def _check_texts(model: nn.Module, tokenizer: Any, texts: Sequence[Any]) -> None:
    if tokenizer is None and isinstance(model, TextModel):
        model.tokenize("")  # says what is missing
    if tokenizer is None:
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        own = f"AutoTokenizer.from_pretrained({name!r})" if name else "tokenizer"
        raise bad_type(
            "tokenizer",
            expected="the model's tokenizer, for a text was given",
            received="None",
            remedy=f"look(model, {own}, text)",
        )
    for one in texts:
        parts = [one] if isinstance(one, str) else one
        if not any(part.strip() for part in parts):
            raise bad_value("text", expected="at least one word", received=repr(parts[0]))
        if len(parts) > 1 and isinstance(model, Decoder):
            raise bad_type("text", expected="one text, for this model is a decoder", received="a pair")


# Tokenizers


def _encoded(tokenizer: Any, parts: tuple[str, ...], is_target: bool = False) -> dict[str, Tensor]:
    """What a tokenizer makes of a text, as named tensors."""
    if callable(tokenizer):  # of transformers, or like it
        options: dict[str, Any] = {"text_target" if is_target else "text": parts[0], "return_tensors": "pt"}
        with tokenizing("".join(parts)):
            made: Any = tokenizer(**options, **({"text_pair": parts[1]} if parts[1:] else {}))
        return dict(made)
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "id_to_token"):  # of tokenizers
        with tokenizing("".join(parts)):
            found = tokenizer.encode(*parts)
        types = {"token_type_ids": torch.tensor([found.type_ids])} if parts[1:] else {}
        return {"input_ids": torch.tensor([found.ids], dtype=torch.int64), **types}
    raise bad_type("tokenizer", expected="one of transformers or of tokenizers", received=type(tokenizer).__name__)


def _padded(rows: list[dict[str, Tensor]], pad: int, several: bool) -> Source:
    """Texts (1, n) as one batch, the shorter ones filled up on the right, which moves no position."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    longest = max(row["input_ids"].shape[1] for row in rows)
    lengths = {row["input_ids"].shape[1] for row in rows}
    if len(lengths) > 1 and "attention_mask" not in names:
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
        names.append("attention_mask")
    fill = torch.nn.functional.pad
    return Source(
        {
            name: torch.cat(
                [
                    fill(row[name], (0, longest - row[name].shape[1]), value=pad if name == "input_ids" else 0)
                    for row in rows
                ]
            )
            for name in names
        },
        several,
    )


def _pad_id(model: Any, tokenizer: Any) -> int:
    """What padding is filled up with: it is hidden, but some models count positions by it."""
    config = getattr(model, "config", None)
    known = (
        getattr(tokenizer, "pad_token_id", None),
        getattr(config, "pad_token_id", None),
        getattr(config, "pad", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    return next((x for x in known if isinstance(x, int)), 0)


def _spelled(tokenizer: Any, ids: Tensor) -> list[str]:
    """Token ids as the tokenizer spells them."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(ids.tolist())]
    return [str(tokenizer.id_to_token(i)) for i in ids.tolist()]


def _own_tokens(text: Any, source: Source) -> Any:
    """The tokens that a `BatchEncoding` of a fast tokenizer knows itself."""
    if not getattr(text, "is_fast", False):
        return None
    found = [
        [token if real else "" for token, real in zip(text.tokens(i), reals, strict=False)]
        for i, reals in enumerate(source.real().tolist())
    ]
    return found if source.several else found[0]


def _decoded(tokenizer: Any, rows: list[list[int]], several: bool) -> str | list[str]:
    """What was written, as text."""
    found = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    return found if several else found[0]


# Models


def _translates(model: Any) -> bool:
    """Whether it is an encoder and decoder of transformers."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _written(model: Any, tokenizer: Any, row: dict[str, Tensor], count: int) -> Tensor:
    """Token ids (1, n) of a text and what a model of transformers writes after it, the likeliest each time."""
    if not hasattr(model, "generate"):
        raise bad_value(
            "generate",
            expected="a model that can generate",
            received=type(model).__name__,
            remedy="its class with a language-model head, or generate=0",
        )
    inputs = {name: x for name, x in row.items() if _takes(model, name) and not name.startswith("decoder_")}
    pad = _pad_id(model, tokenizer)
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=pad)


def _takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument of this name; of one that takes any, whether it is sure to know it."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return name in parameters or (takes_any and name in ("input_ids", "attention_mask"))


def _start(model: Any) -> int:
    """What a decoder reads first."""
    config = model.config
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise bad_value("model", expected="decoder_start_token_id in its configuration", received="none")


def _check_length(model: Any, tokenizer: Any, length: int) -> None:
    """Learned positions end somewhere, and a model of transformers would stop there with an index out of range. Others,
    such as rotary ones, go on."""
    config = getattr(model, "config", None)
    said = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not isinstance(said, int) or not any(said <= size <= said + 2 for size in tables):  # (some keep two rows aside)
        return
    limit = min(said, getattr(tokenizer, "model_max_length", said))
    if length > limit:
        raise bad_value(
            "text",
            expected=f"at most {limit} tokens, what is generated included",
            received=str(length),
            remedy="a shorter text",
        )


class _Progress:
    """Tells how far reading is, from 0 to 1, by the modules that are done; what hears it may raise, to stop. A model
    that writes first has half of the way for that: what it then reads is about as much. 1 is said at the end alone."""

    def __init__(self, model: nn.Module, progress: Callable[[float], None] | None, generates: bool) -> None:
        self.model, self.tell = model, progress
        self.phases, self.over, self.last = 1 + generates, 0, 0.0

    @contextmanager
    def forwards(self, count: int) -> Iterator[None]:
        """One phase: within it the model runs so many times, at most."""
        if self.tell is None:
            yield
            return
        modules = [one for one in self.model.modules() if not isinstance(one, torch.jit.ScriptModule)]
        within, runs, most = 0, 0, float(max(len(modules), 1))

        def done(module: nn.Module, *_: Any) -> None:
            nonlocal within, runs, most
            within += 1
            if module is self.model:
                within, runs, most = 0, runs + 1, float(within)  # (some modules run twice, some never)
            share = (runs + min(within / most, 1.0)) / count
            self._say((self.over + min(share, 0.99)) / self.phases)

        handles = [module.register_forward_hook(done) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.over += 1

    def _say(self, share: float) -> None:
        if share > self.last and self.tell is not None:
            self.last = share
            self.tell(share)

    def done(self) -> None:
        """Everything is read."""
        self._say(1.0)


def _in_notebook() -> bool:
    """Whether what a cell returns is shown: a kernel of IPython is running."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return running is not None and hasattr(running, "kernel")
