"""Look at a text through any model: watch it, name its tokens, draw."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from regard.draw.figure import figure as draw_figure
from regard.draw.page import page
from regard.draw.terminal import terminal
from regard.errors import bad_type, bad_value
from regard.heads import Record, watch
from regard.heads.corpus import evaluating, run
from regard.measures import MeasureLike
from regard.models import Decoder
from regard.models.generation import Rules, tokens
from regard.models.text import tokenizing

__all__ = ["look", "read"]


def look(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    target: str | None = None,
    generate: int = 0,
    html: str | PathLike[str] | None = None,
    figure: str | PathLike[str] | None = None,
    show: bool | None = None,
    **options: Any,
) -> Record:
    """Run a model on a text and show what every head attends to.

    Args:
        model: a model of transformers, one of regard's, or any other that can be called on what is given as `text`.
        tokenizer: its tokenizer: of transformers, or of tokenizers. Models of regard have their own; give None.
        text: a text, a pair of texts, or what the model is called on: a tensor, or a mapping of named inputs.
        target: of an encoder and decoder, the text that the decoder reads; without one it generates.
        generate: how many tokens a decoder goes on for; what it wrote is in `.generated`.
        html, figure: files to write: the page; a figure (PNG, SVG or PDF).
        show: print the picture in the terminal; by default, unless in a notebook, which shows what is returned.
        options: as for `watch`: `measures`, `layers`; and `progress`, a function that is told how far it is (0 to 1).

    Returns the `Record`, with its `.tokens`: `regard.draw` can draw it in every other way.

    >>> import regard
    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> seen = regard.look(model, text=torch.randn(1, 3, 16), show=False)
    >>> seen.layers
    ['self_attn']
    """
    seen = read(model, tokenizer, text, target=target, generate=generate, **options)
    if html is not None:
        page(seen, path=html)
    if figure is not None:
        draw_figure(seen, path=figure)
    if show or (show is None and not _in_notebook()):
        terminal(seen)
        if seen.generated:
            print(f"\ngenerated: {seen.generated}")
    return seen


def read(
    model: nn.Module,
    tokenizer: Any = None,
    text: Any = None,
    *,
    target: str | None = None,
    generate: int = 0,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Run a model on a text under `watch`, with everything kept that pictures need: a record with its tokens."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    if isinstance(generate, bool) or not isinstance(generate, int) or generate < 0:
        raise bad_value("generate", expected="a number of tokens from 0", received=repr(generate))
    if text is None:
        raise bad_type("text", expected="a text, or what the model is called on", received="None",
                       remedy="look(model, tokenizer, text)")  # fmt: skip
    with evaluating(model), torch.no_grad(), _told(model, 1 + generate, progress):
        said = Said(text)
        if not (isinstance(text, str) or _is_pair(text)):
            if generate or target is not None:
                raise bad_type("text", expected="a text, to generate or to have a target", received=type(text).__name__)
        else:
            _check_words(*([text] if isinstance(text, str) else text))
            if tokenizer is not None:
                said = _theirs(model, tokenizer, text, target, generate)
            elif hasattr(model, "encode") and hasattr(model, "tokenize"):
                said = _ours(model, text, target, generate)
            else:
                raise bad_type("tokenizer", expected="the model's tokenizer, for a text was given", received="None",
                               remedy="look(model, tokenizer, text)")  # fmt: skip
        with watch(model, measures=measures, layers=layers, keep="qkv") as seen:
            run(model, said.inputs)
    seen.tokens, seen.generated = said.tokens, said.generated
    return seen


@dataclass
class Said:
    """What a model is to be run on; its tokens, in words; what it wrote itself. What was written is read again, as one
    text: the weights are the same, and it is faster than to look at one token after another."""

    inputs: Any
    tokens: Any = None
    generated: str | None = None


def _is_pair(text: Any) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(one, str) for one in text)


def _ours(model: Any, text: Any, target: str | None, generate: int) -> Said:
    """For a model of regard's, which has its own tokenizer."""
    if not isinstance(text, str):
        raise bad_type("text", expected="one text", received="a pair")
    if target is not None:
        raise bad_value("target", expected="an encoder and decoder", received=type(model).__name__)
    ids = model.encode(text)
    new: list[int] = []
    if generate:
        if not isinstance(model, Decoder):
            raise bad_value("generate", expected="0, for this model is an encoder", received=str(generate))
        for token in islice(tokens(model, ids.tolist(), Rules(), model.new_cache(), generate), generate):
            new.append(int(token))
            if new[-1] in model.config.eos:
                break
    read = [*ids[0].tolist(), *new[:-1]]  # the last token is written, not read
    inputs = torch.tensor([read], device=ids.device)
    return Said(inputs, _spelled(model.tokenizer, inputs[0]), model.decode(new) if new else None)


def _theirs(model: Any, tokenizer: Any, text: Any, target: str | None, generate: int) -> Said:
    """For any other model with a tokenizer of transformers, or of tokenizers."""
    encoded = _encoded(tokenizer, (text,) if isinstance(text, str) else text)
    device = next(iter(model.parameters()), torch.empty(0)).device
    inputs: Any = {name: x.to(device) for name, x in encoded.items() if _takes(model, name)}
    ids = encoded["input_ids"].to(device)
    _check_length(model, tokenizer, ids.shape[1] + generate)
    source = _spelled(tokenizer, ids[0])
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return _translated(model, tokenizer, inputs, source, target, generate or 20)
    if target is not None:
        raise bad_value("target", expected="an encoder and decoder", received=type(model).__name__)
    if not generate:
        return Said(inputs if "input_ids" in inputs else ids, source)
    whole = _written(model, tokenizer, inputs, generate)
    read = whole[:, :-1]  # the last token is written, not read
    others = {name: x for name, x in inputs.items() if x.shape != ids.shape}  # (not what is said of each token)
    written = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    return Said({**others, "input_ids": read}, _spelled(tokenizer, read[0]), written)


def _translated(model: Any, tokenizer: Any, inputs: Any, source: list[str], target: str | None, count: int) -> Said:
    """For an encoder and decoder: the decoder reads the target, or what it writes itself."""
    generated = None
    if target is not None:
        ids = [_start(model), *_encoded(tokenizer, (target,), is_target=True)["input_ids"][0].tolist()]
        read = torch.tensor([ids], device=next(iter(inputs.values())).device)
    else:
        whole = _written(model, tokenizer, inputs, count)
        generated = tokenizer.decode(whole[0], skip_special_tokens=True)
        read = whole[:, :-1]
    return Said({**inputs, "decoder_input_ids": read}, (source, _spelled(tokenizer, read[0])), generated)


def _encoded(tokenizer: Any, parts: tuple[str, ...], is_target: bool = False) -> dict[str, Tensor]:
    """What a tokenizer makes of a text, as named tensors."""
    if callable(tokenizer):  # of transformers, or like it
        options: dict[str, Any] = {"text_target" if is_target else "text": parts[0], "return_tensors": "pt"}
        with tokenizing("".join(parts)):
            made: Any = tokenizer(**options, **({"text_pair": parts[1]} if parts[1:] else {}))
        return dict(made)
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "id_to_token"):  # of tokenizers
        with tokenizing("".join(parts)):
            return {"input_ids": torch.tensor([tokenizer.encode(*parts).ids])}
    raise bad_type("tokenizer", expected="one of transformers or of tokenizers", received=type(tokenizer).__name__)


def _spelled(tokenizer: Any, ids: Tensor) -> list[str]:
    """Token ids as the tokenizer spells them."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(ids.tolist())]
    return [str(tokenizer.id_to_token(i)) for i in ids.tolist()]


def _written(model: Any, tokenizer: Any, inputs: dict[str, Tensor], count: int) -> Tensor:
    """Token ids (1, n) of a text and what a model of transformers writes after it, the likeliest each time."""
    if not hasattr(model, "generate"):
        raise bad_value("generate", expected="a model that can generate", received=type(model).__name__,
                        remedy="its class with a language-model head, or generate=0")  # fmt: skip
    pad = next((x for x in (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None))
                if x is not None), 0)  # fmt: skip
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


def _check_words(*parts: str) -> None:
    if not any(part.strip() for part in parts):
        raise bad_value("text", expected="at least one word", received=repr(parts[0]))


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
        raise bad_value("text", expected=f"at most {limit} tokens, what is generated included", received=str(length),
                        remedy="a shorter text")  # fmt: skip


@contextmanager
def _told(model: nn.Module, forwards: int, progress: Callable[[float], None] | None) -> Iterator[None]:
    """Within it, `progress` hears how far a model is, by its modules that are done. It may raise, to stop."""
    if progress is None:
        yield
        return
    modules = list(model.modules())
    done, total = 0, max(len(modules) * forwards, 1)

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        progress(min(done / total, 1.0))

    handles = [
        module.register_forward_hook(count) for module in modules if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_notebook() -> bool:
    """Whether what a cell returns is shown: a kernel of IPython is running."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return running is not None and hasattr(running, "kernel")
