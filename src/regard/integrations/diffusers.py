"""Models of diffusers on regard's kernels.

    import regard.integrations.diffusers
    pipe.transformer.set_attention_backend("regard")                # Flux, Qwen-Image, Wan, ... or, for a while:
    with diffusers.attention_backend("regard"): ...                 # or DIFFUSERS_ATTN_BACKEND=regard, see below

    regard.integrations.diffusers.use(pipe.transformer)             # any model, those above and older ones

The import registers an attention backend (`attention`) with diffusers. Models of diffusers are of two kinds: those
whose attention goes through its registry of backends, and older ones (the UNet, SD3, PixArt, CogVideoX, ...) whose
attention processors call `F.scaled_dot_product_attention` themselves. On these `set_attention_backend` has no effect
and says nothing, with any backend. `use` serves both kinds, and changes nothing but the model that it is given
(`set_attention_backend` sets the backend of the whole process, too). `release` undoes it.

With `DIFFUSERS_ATTN_BACKEND=regard` in the environment, import this module before any model of diffusers: their import
looks the name up.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.integrations import diffusers_registry
from regard.integrations.sdpa import RedirectSdpa, scaled_dot_product_attention

__all__ = ["Processor", "attention", "release", "unregister", "use"]

NAME = "regard"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers calls: attention of one layer.

    Args:
        query: (B, N, H, D); key: (B, M, G, D); value: (B, M, G, E).
        attn_mask: (B, M), (N, M) or (1|B, 1|H, 1|N, M): boolean (True = may attend), or added to the scores.
        dropout_p, scale: as `dropout` and `scale` of `regard.attend`.
        is_causal: query i sees keys 0 to i; not with `attn_mask`.
        enable_gqa: nothing changes with it: G may always be a divisor of H.
        return_lse: also give the log-sum-exp of the scores.
        others: what only other backends know. What is not None is refused.

    Returns:
        (B, N, H, E), and the log-sum-exp (B, N, H) if asked.

    A mask of two axes that could be both is (B, M), as in diffusers' own "native".
    """
    _refuse(_parallel_config, others)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(attn_mask, Tensor) and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    elif attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise bad_type(
            _WHERE,
            expected="attn_mask as a tensor",
            received=type(attn_mask).__name__,
            remedy='set_attention_backend("flex") for block masks',
        )
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, return_lse=return_lse)
    if return_lse:
        return out[0].transpose(1, 2), out[1].transpose(1, 2)
    return out.transpose(1, 2)


_WHERE = f'attention backend "{NAME}"'


def _refuse(parallel: Any, others: dict[str, Any]) -> None:
    if parallel is not None and getattr(parallel, "context_parallel_config", parallel) is not None:
        raise bad_value(
            _WHERE,
            expected="all tokens in one process",
            received="context parallelism",
            remedy='model.set_attention_backend("native")',
        )
    for name, x in others.items():
        if x is not None:
            raise bad_value(
                _WHERE,
                expected="arguments of attention that it knows",
                received=f"{name}={type(x).__name__}",
                remedy='model.set_attention_backend("native")',
            )


class Processor:
    """An attention processor of diffusers that calls `F.scaled_dot_product_attention`, on regard's kernels.

        unet.set_attn_processor(Processor(AttnProcessor2_0()))

    It takes the arguments of the other, and does all that it does. `processor` is the other.
    """

    processor: Any

    def __new__(cls, processor: Any) -> Processor:
        return object.__new__(_with_parameters_of(type(processor)))

    def __init__(self, processor: Any) -> None:
        if isinstance(processor, nn.Module):
            raise bad_type(
                "processor",
                expected="one without weights of its own",
                received=type(processor).__name__,
                remedy="`with regard.integrations.sdpa.RedirectSdpa(): ...` around the call of the model",
            )
        if not _calls(processor, _SDPA):
            raise bad_type(
                "processor",
                expected="one that calls scaled_dot_product_attention",
                received=processor.__name__ if isinstance(processor, type) else type(processor).__name__,
                remedy="Processor(AttnProcessor2_0())",
            )
        self.processor = processor

    def __reduce__(self) -> Any:  # (the class of an instance is not found by its name)
        return Processor, (self.processor,)

    def __repr__(self) -> str:
        return f"Processor({self.processor!r})"


@functools.cache
def _with_parameters_of(kind: type) -> type[Processor]:
    """A `Processor` that is called with the parameters of another class: diffusers reads their names, and does not pass
    on what is not among them."""

    @functools.wraps(kind.__call__)
    def call(self: Processor, *args: Any, **kwargs: Any) -> Any:
        with RedirectSdpa():
            return self.processor(*args, **kwargs)

    return type("Processor", (Processor,), {"__call__": call, "__module__": __name__, "__doc__": Processor.__doc__})


_SDPA = frozenset({"scaled_dot_product_attention", "dispatch_attention_fn"})


def _calls(processor: Any, names: frozenset[str]) -> bool:
    """Whether a method of the processor's class names one of these functions."""
    if isinstance(processor, type):
        return False
    methods = [inspect.unwrap(x) for kind in type(processor).__mro__ for x in vars(kind).values() if callable(x)]
    return any(isinstance(x, types.FunctionType) and names & {*x.__code__.co_names} for x in methods)


def use(model: nn.Module) -> list[str]:
    """Compute the attention of a model of diffusers by regard: through the registry, or by a `Processor` around the
    processor of each layer that calls torch's function itself.

    Args:
        model: such as `pipe.transformer`, `pipe.unet`, `pipe.vae`.

    Returns:
        The names of its layers that regard computes now. Layers whose attention is of another kind stay as they are:
        linear attention, attention written by hand (`AttnProcessor`), processors with weights of their own
        (IP-Adapter).
    """
    used = []
    for name, layer in _layers(model):
        processor = layer.processor
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = _MEMBER
        elif isinstance(processor, nn.Module) or not (isinstance(processor, Processor) or _calls(processor, _SDPA)):
            continue
        elif not isinstance(processor, Processor):
            layer.set_processor(Processor(processor))
        used.append(name)
    if not used:
        kinds = sorted({type(layer.processor).__name__ for _, layer in _layers(model)})
        raise bad_value(
            "model",
            expected="a model of diffusers with attention that calls scaled_dot_product_attention or its registry",
            received=f"{type(model).__name__} with {', '.join(kinds) if kinds else 'no attention processors'}",
            remedy="model.set_attn_processor(AttnProcessor2_0()) before, or "
            "`with regard.integrations.sdpa.RedirectSdpa(): ...` around its call",
        )
    return used


def release(model: nn.Module) -> list[str]:
    """Undo `use`, and `set_attention_backend("regard")` for this model. Returns the names of the layers that it was
    undone for; each has the processor that it had, and the backend that diffusers takes by default."""
    released = []
    for name, layer in _layers(model):
        processor = layer.processor
        if isinstance(processor, Processor):
            layer.set_processor(processor.processor)
        elif getattr(processor, "_attention_backend", None) in (NAME, _MEMBER):
            processor._attention_backend = None
        else:
            continue
        released.append(name)
    return released


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules with an attention processor, by name."""
    if not isinstance(model, nn.Module):
        raise bad_type(
            "model",
            expected="a torch.nn.Module",
            received=type(model).__name__,
            remedy="of a pipeline, pipe.transformer or pipe.unet",
        )
    return [
        (name, module)
        for name, module in model.named_modules()
        if getattr(module, "processor", None) is not None and hasattr(module, "set_processor")
    ]


def unregister() -> None:
    """Take the backend back from diffusers, as if this module had not been imported. Models that have it set have to be
    told another before."""
    diffusers_registry.unregister(_registry, NAME)


_registry, _wanted = diffusers_registry.load_registry(NAME)
_MEMBER = diffusers_registry.register(_registry, NAME, attention)
if _wanted:
    _registry._AttentionBackendRegistry.set_active_backend(_MEMBER)
