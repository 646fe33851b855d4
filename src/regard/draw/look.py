"""Look at a text through any model: watch it, name its tokens, draw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from regard.draw.effects import rerun_of
from regard.draw.encoding import (
    OPTIONAL,
    Encoded,
    decode,
    encode,
    encode_text,
    is_tokenizer,
    pad_id,
    stack_rows,
    takes,
    tokens_known,
)
from regard.draw.figure import figure as draw_figure
from regard.draw.images import check_reads_text, encode_image, extended, label_layers
from regard.draw.page import page
from regard.draw.progress import ForwardProgress, part_of
from regard.draw.terminal.views import terminal
from regard.errors import bad_type, bad_value, printable
from regard.heads import Record, watch
from regard.heads.watch_all import evaluating, run
from regard.measures import MeasureLike
from regard.models import Decoder, Encoder
from regard.models.base import TextModel
from regard.models.generation import Rules, tokens

__all__ = ["look", "read"]

READING = 0.6  # of the time for a text and its page is spent on the text, about


def look(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    image: Any = None,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    treebank: str | PathLike[str] | None = None,
    item: int = 0,
    html: str | PathLike[str] | None = None,
    figure: str | PathLike[str] | None = None,
    show: bool | None = None,
    **options: Any,
) -> Record:
    """Run a model on a text and show what every head attends to.

    Args:
        model: a model of transformers, of regard, or any other that can be called on what is given as `text`.
        tokenizer: its tokenizer, of transformers or of tokenizers. Models of regard have their own: `look(model,
            text)` is enough.
        text: one of

            - a text, or a pair of texts as a tuple;
            - a list of texts: they are read as one batch, and `item` is drawn, without its padding;
            - token ids: a list, a list of lists, or an integer tensor (N,) or (B, N);
            - what a tokenizer returns (a `BatchEncoding`, a mapping with input_ids), or `encode_batch` of regard;
            - anything else that the model can be called on: a tensor, or a mapping of named inputs.
        image: an image for a vision transformer (`look(model, processor, image=image)`) or for a vision-language model
            (with a text that has its image token): a PIL image, or an array or tensor (H, W, 3) of bytes or of floats
            from 0 to 1. Its patches are labelled by their place, "r3c5"; `seen.image` says where they are, and
            `draw.image` draws attention over it.
        target: for an encoder-decoder, the text that the decoder reads (a list for a list of texts); without one it
            generates.
        generate: how many tokens a decoder generates; the text is in `.generated` (a list for a list of texts).
        treebank: a CoNLL-U file. If it has the text, the sentences about heads know which words are subject and verb.
        item: which of several texts is drawn.
        html, figure: files to write: the page; a figure (PNG, SVG or PDF).
        show: print the picture in the terminal; by default, unless in a notebook, which shows what is returned.
        options: `measures` and `layers`, as for `watch`; `progress`, a function called with numbers from 0 to 1.

    Returns the `Record` with its `.tokens`, which `regard.draw` can draw in every other way. It holds all texts of a
    list: `seen[layer].weights(batch=1)`, `draw.terminal(seen, item=1)`.

    >>> import regard
    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> seen = regard.look(model, text=torch.randn(1, 3, 16), show=False)
    >>> seen.layers
    ['self_attn']
    """
    progress, reading = options.pop("progress", None), READING if html is not None else 1.0
    part = part_of(progress, 0.0, reading)
    seen = read(model, tokenizer, text, image=image, target=target, generate=generate, progress=part, **options)
    seen.treebank = treebank
    if html is not None:
        page(seen, path=html, item=item, progress=part_of(progress, reading, 1.0))
    if figure is not None:
        draw_figure(seen, path=figure, item=item)
    if show or (show is None and not _in_notebook()):
        _show(seen, item)
    return seen


def _show(seen: Record, item: int) -> None:
    """The picture of a text in the terminal, and what was generated after it."""
    terminal(seen, item=item)
    texts = [seen.generated] if isinstance(seen.generated, str) else seen.generated or []
    for generated in texts[item : item + 1] if len(texts) > 1 else texts:
        print(f"\ngenerated: {printable(generated, lines=True)}")


def read(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    image: Any = None,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Run a model on a text under `watch(keep="qkv")`: a record with its tokens, ready to be drawn. The arguments are
    those of `look`."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    if isinstance(generate, bool) or not isinstance(generate, int) or generate < 0:
        raise bad_value("generate", expected="a number of tokens from 0", received=repr(generate))
    if image is not None:
        return _read_image(model, tokenizer, text, image, target, generate, measures, layers, progress)
    check_reads_text(model, tokenizer if text is None else text)
    if text is None and tokenizer is not None and not is_tokenizer(tokenizer):
        tokenizer, text = None, tokenizer  # look(model, text)
    if text is None or is_tokenizer(text):
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
        encoded = encode(model, tokenizer, text)
        generates = bool(generate) or (_is_encoder_decoder(model) and target is None)
        passes = ForwardProgress(model, progress, generates)
        prepared = _prepare(model, tokenizer, text, encoded, target, generate, passes)
        with watch(model, measures=measures, layers=layers, keep="qkv") as seen, passes.forwards(1):
            output = run(model, prepared.inputs)
        seen.rerun = rerun_of(model, prepared.inputs, output, seen, prepared.keep, _decoder(tokenizer))
    seen.tokens, seen.generated = prepared.tokens, prepared.generated
    passes.done()
    return seen


def _read_image(
    model: nn.Module,
    processor: Any,
    text: Any,
    image: Any,
    target: Any,
    generate: int,
    measures: MeasureLike | Iterable[MeasureLike] | None,
    layers: str | Iterable[str] | Callable[[str], bool] | None,
    progress: Callable[[float], None] | None,
) -> Record:
    """`read` for an image, with a text or without."""
    if target is not None:
        raise bad_value("target", expected="none, with an image", received=type(target).__name__)
    with evaluating(model), torch.no_grad():
        encoded = encode_image(model, processor, text, image)
        if generate and not encoded.has_text:
            raise bad_value("generate", expected="0, for this model reads an image alone", received=str(generate))
        if generate and not hasattr(encoded.tokenizer, "decode"):
            expected = "one with a tokenizer, to generate a text"
            raise bad_type("processor", expected=expected, received=type(processor).__name__)
        passes, generated = ForwardProgress(model, progress, bool(generate)), None
        if generate:
            with passes.forwards(generate):
                written = _generate_transformers(model, encoded.tokenizer, encoded.inputs, generate)
            new = written[0, encoded.inputs["input_ids"].shape[1] :].tolist()
            generated = decode(encoded.tokenizer, [new], several=False)
            encoded = extended(encoded, new[:-1])  # the last token is generated, not read
        with watch(model, measures=measures, layers=layers, keep="qkv") as seen, passes.forwards(1):
            output = run(model, encoded.inputs)
        label_layers(model, encoded, seen)
        decoder = _decoder(encoded.tokenizer if encoded.has_text else None)
        seen.rerun = rerun_of(model, encoded.inputs, output, seen, None, decoder)
    seen.generated = generated
    passes.done()
    return seen


@dataclass
class Prepared:
    """What the model is run on, its tokens, and the text that it generated. Generated text is read again as one text:
    the weights are the same, and it is faster than watching one token after another."""

    inputs: Any
    tokens: Any = None
    generated: str | list[str] | None = None
    keep: Tensor | None = None  # (B, N) True for what is no padding


def _prepare(
    model: nn.Module,
    tokenizer: Any,
    text: Any,
    encoded: Encoded | None,
    target: str | Sequence[str] | None,
    generate: int,
    passes: ForwardProgress,
) -> Prepared:
    """Check what was asked for, generate if it was, and say what the model is run on."""
    if encoded is None:
        if generate or target is not None:
            raise bad_type("text", expected="a text, to generate or to have a target", received=type(text).__name__)
        return Prepared(text)
    encoder_decoder = _is_encoder_decoder(model)
    if target is not None and not encoder_decoder:
        raise bad_value("target", expected="an encoder and decoder", received=type(model).__name__)
    if generate and isinstance(model, Encoder):
        raise bad_value("generate", expected="0, for this model is an encoder", received=str(generate))
    _check_length(model, tokenizer, encoded.ids.shape[1] + (0 if encoder_decoder else generate))
    decoder_given = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & encoded.inputs.keys()
    if encoder_decoder and not (decoder_given and target is None and not generate):
        return _prepare_decoder(model, tokenizer, encoded, target, generate or 20, passes)
    if generate:
        return _prepare_generated(model, tokenizer, encoded, generate, passes)
    words = encoded.tokens(tokenizer) if tokenizer is not None else tokens_known(text, encoded)
    if encoder_decoder and words is not None:
        ids = encoded.inputs.get("decoder_input_ids")
        words = (words, None if ids is None else Encoded({"input_ids": ids}, encoded.several).tokens(tokenizer))
    return Prepared(_arguments(model, encoded), words, keep=encoded.keep())


def _prepare_generated(
    model: nn.Module, tokenizer: Any, encoded: Encoded, count: int, passes: ForwardProgress
) -> Prepared:
    """A decoder is run on the text and what it generates after it, except the last token."""
    generated = _generate(model, tokenizer, encoded, count, passes)
    rows = [[*row["input_ids"][0].tolist(), *new[:-1]] for row, new in zip(encoded.rows(), generated, strict=True)]
    read = _batch(model, tokenizer, rows, encoded)
    read.inputs |= {name: x for name, x in encoded.inputs.items() if not encoded.per_token(name)}
    words, text = read.tokens(tokenizer), decode(tokenizer, generated, encoded.several)
    return Prepared(_arguments(model, read), words, text, read.keep())


def _prepare_decoder(
    model: Any,
    tokenizer: Any,
    encoded: Encoded,
    target: str | Sequence[str] | None,
    count: int,
    passes: ForwardProgress,
) -> Prepared:
    """The decoder of an encoder-decoder reads the target, or what it generates."""
    generated = None
    if target is not None:
        targets = [target] if isinstance(target, str) else list(target)
        if len(targets) != len(encoded.ids):
            raise bad_value("target", expected=f"one for each of {len(encoded.ids)} texts", received=str(len(targets)))
        ids = [encode_text(tokenizer, (text,), is_target=True)["input_ids"][0].tolist() for text in targets]
        rows = [[_start_id(model), *row] for row in ids]
    else:
        new = _generate(model, tokenizer, encoded, count, passes)
        generated = decode(tokenizer, new, encoded.several)
        rows = [row[:-1] for row in new]  # the last token is generated, not read
    read = _batch(model, tokenizer, rows, encoded)
    replaced = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "labels")
    both = {name: x for name, x in encoded.inputs.items() if name not in replaced}
    both |= {f"decoder_{name}": x for name, x in read.inputs.items()}
    words = (encoded.tokens(tokenizer), read.tokens(tokenizer))
    return Prepared(_arguments(model, Encoded(both, encoded.several)), words, generated, read.keep())


def _batch(model: nn.Module, tokenizer: Any, rows: list[list[int]], encoded: Encoded) -> Encoded:
    """Lists of ids as a batch, on the device of others."""
    inputs = [{"input_ids": torch.tensor([row], device="cpu")} for row in rows]
    return stack_rows(inputs, pad_id(model, tokenizer), encoded.several).to(encoded.ids.device)


def _generate(model: Any, tokenizer: Any, encoded: Encoded, count: int, passes: ForwardProgress) -> list[list[int]]:
    """The ids that a model generates after each text, greedily; of an encoder-decoder all ids of the decoder. Texts are
    read one by one: padding on the left would move positions."""
    if tokenizer is None:
        expected = "the model's tokenizer, to generate a text"
        raise bad_type("tokenizer", expected=expected, received="None", remedy="look(model, tokenizer, text)")
    generated = []
    with passes.forwards(count * len(encoded.ids)):
        for row in encoded.rows():
            if isinstance(model, Decoder):
                new: list[int] = []
                for token in islice(tokens(model, row["input_ids"].tolist(), Rules(), model.new_cache(), count), count):
                    new.append(int(token))
                    if new[-1] in model.config.eos:
                        break
            else:
                first = 0 if _is_encoder_decoder(model) else row["input_ids"].shape[1]
                new = _generate_transformers(model, tokenizer, row, count)[0, first:].tolist()
            generated.append(new)
    return generated


def _generate_transformers(model: Any, tokenizer: Any, row: dict[str, Tensor], count: int) -> Tensor:
    """Token ids (1, n) of a text and what a model of transformers generates after it, greedily."""
    if not hasattr(model, "generate"):
        raise bad_value(
            "generate",
            expected="a model that can generate",
            received=type(model).__name__,
            remedy="its class with a language-model head, or generate=0",
        )
    inputs = {name: x for name, x in row.items() if takes(model, name) and not name.startswith("decoder_")}
    pad = pad_id(model, tokenizer)
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=pad)


# Models


def _arguments(model: nn.Module, encoded: Encoded) -> Any:
    """What a model is called on: named tensors, of the optional ones those that it takes; or the ids alone."""
    inputs = encoded.inputs
    if isinstance(model, TextModel):
        renamed = {"input_ids": "ids", "attention_mask": "keep", "token_type_ids": "token_types"}
        named = {renamed.get(name, name): x for name, x in inputs.items()}
        named = {name: x for name, x in named.items() if takes(model, name)}
        if "keep" in named:
            named["keep"] = named["keep"].bool()
        return named
    if not encoded.keep().all() and not takes(model, "attention_mask"):
        raise bad_value(
            "text",
            expected="texts of one length, for this model takes no attention_mask",
            received=f"lengths {encoded.keep().sum(1).tolist()}",
            remedy="one text at a time",
        )
    named = {name: x for name, x in inputs.items() if name not in OPTIONAL or takes(model, name)}
    return named if takes(model, "input_ids") else inputs["input_ids"]


def _is_encoder_decoder(model: Any) -> bool:
    """Whether it is an encoder-decoder of transformers."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _start_id(model: Any) -> int:
    """The id that a decoder reads first."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(model.config, name, None) is not None:
            return getattr(model.config, name)
    raise bad_value("model", expected="decoder_start_token_id in its configuration", received="none")


def _check_length(model: Any, tokenizer: Any, length: int) -> None:
    """Refuse texts beyond the table of learned positions, where a model of transformers would fail with an index out of
    range. Rotary and other computed positions have no such end."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    # (some models keep two more rows)
    if not isinstance(positions, int) or not any(positions <= size <= positions + 2 for size in tables):
        return
    limit = min(positions, getattr(tokenizer, "model_max_length", positions))
    if length > limit:
        expected = f"at most {limit} tokens, what is generated included"
        raise bad_value("text", expected=expected, received=str(length), remedy="a shorter text")


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    """The text of a token id; without a tokenizer its number."""
    return str if tokenizer is None else lambda number: str(decode(tokenizer, [[number]], several=False))


def _in_notebook() -> bool:
    """Whether an IPython kernel runs, which shows what a cell returns."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return running is not None and hasattr(running, "kernel")
