"""Replace every `nn.MultiheadAttention` of a model by ours: same parameters, same calls, same results."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.attention import attend, attention_weights
from regard.errors import bad_type, bad_value, no_torchscript, shape_of
from regard.layouts.convert import load
from regard.layouts.torch_mha_call import batch_first, mask_options, operands, project, with_torch_errors

__all__ = ["SplitAttention", "SwappedAttention", "swap"]

Model = TypeVar("Model", bound=nn.Module)


def swap(model: Model, split: bool = False) -> Model:
    """Replace every `nn.MultiheadAttention` in a model, in place; the model is returned.

    Calls and results are the same as before, except that:

    - a query that may see nothing gives 0 before the output projection, never NaN;
    - returned weights are those before dropout;
    - `forward` and hooks run inside `nn.TransformerEncoder` in eval mode too (its fast path would bypass them);
    - `is_causal=True` is a hint that `attn_mask` is the causal mask; if it is not, the mask counts, with and without
      weights (torch trusts the hint or not, depending on `need_weights`). It also works without a mask;
    - errors that torch raises too have its type, with both messages;
    - nested tensors work with gradients and in cross attention; TorchScript is refused.

    Args:
        model: any module; if it is an `nn.MultiheadAttention` itself, its replacement is returned. Pass the outermost
            module, so that `nn.TransformerEncoder` stops nesting its inputs.
        split: False keeps the same parameters and state dict keys, so that optimizers and checkpoints go on working;
            True makes a `MultiHeadAttention` with separate `q_proj`, `k_proj`, `v_proj` (as `layer`), for LoRA and the
            like. Its parameters are new: they need a new optimizer, and hooks have to be registered again.

    Subclasses of `nn.MultiheadAttention` have their own code: they are kept, with a warning.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(10, 2, 7, batch_first=True), 3)
    >>> x = torch.randn(2, 5, 10)
    >>> before = model.eval()(x)
    >>> torch.allclose(swap(model)(x), before, atol=1e-5)
    True
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    plain = {name: module for name, module in modules.items() if type(module) in _REPLACEABLE}
    others = [f"{name or 'model'} ({type(modules[name]).__name__})" for name in modules if name not in plain]
    if others:
        message = f"regard.swap left subclasses of nn.MultiheadAttention in place: {', '.join(others)}"
        warnings.warn(message, stacklevel=2)
    if split:
        model = cast(Model, _split(model, plain))
    else:
        for module in plain.values():
            module.__class__ = SwappedAttention  # the same object keeps its parameters, hooks and sharing
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, (SwappedAttention, SplitAttention)) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False
    return model


def _split(model: nn.Module, modules: dict[str, nn.MultiheadAttention]) -> nn.Module:
    """Replace these modules by `SplitAttention`."""
    extra = [name or "model" for name, module in modules.items() if module.bias_k is not None or module.add_zero_attn]
    if extra:
        raise bad_value(
            "swap(split=True)",
            expected="modules without add_bias_kv and add_zero_attn",
            received=", ".join(extra),
            remedy="swap(model), which keeps their extra keys",
        )
    new = {id(module): SplitAttention(module) for module in modules.values()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # (named_children lists a shared child once only)
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return new.get(id(model), model)


class SwappedAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` that computes with `regard.attend`; made by `swap`."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` do not bypass `forward`."""
        return False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, same: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = same  # written by `__init__` and old checkpoints, not used

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for key in (self.bias_k, self.bias_v):
            if key is not None:
                nn.init.xavier_normal_(key)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`: output, and weights (before dropout) if `need_weights`."""

        def compute(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
            packed = self.in_proj_weight
            _check_widths(query=(query, self.embed_dim), key=(key, self.kdim), value=(value, self.vdim))
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed
            q, k, v = project(query, key, value, cast(Any, weight), self.in_proj_bias)
            q, k, v, options = operands(
                q,
                k,
                v,
                self.num_heads,
                bias_k=self.bias_k,
                bias_v=self.bias_v,
                add_zero_attn=self.add_zero_attn,
                key_padding_mask=padding,
                attn_mask=attn_mask,
                is_causal=is_causal,
            )
            out = attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)
            out = self.out_proj(out.transpose(1, 2).flatten(2))
            return out, attention_weights(q, k, **options) if need_weights else None

        with with_torch_errors(
            self,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            need_weights=need_weights,
            separate=(self.q_proj_weight, self.k_proj_weight, self.v_proj_weight),
        ):
            return batch_first(
                compute, query, key, value, key_padding_mask, already=self.batch_first, average=average_attn_weights
            )

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`."""
        no_torchscript(self)


class SplitAttention(nn.Module):
    """A `MultiHeadAttention` (`layer`) with the call of `nn.MultiheadAttention`; made by `swap(split=True)`."""

    _qkv_same_embed_dim = False  # so that `nn.TransformerEncoderLayer` does not bypass `forward`

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = load(module.state_dict(), module.num_heads, layout="torch", dropout=module.dropout)
        self.batch_first = module.batch_first
        trained = {key: parameter.requires_grad for key, parameter in module.named_parameters()}
        for key, parameter in self.layer.named_parameters():
            stem, part = key.split(".")
            names = (key, f"{stem}_{part}", f"in_proj_{part}")  # out_proj; separate weights; packed weights
            parameter.requires_grad_(next(trained[name] for name in names if name in trained))
        self.train(module.training)

    @property
    def num_heads(self) -> int:
        return self.layer.num_heads

    @property
    def embed_dim(self) -> int:
        return self.layer.embed_dim

    @property
    def out_proj(self) -> nn.Module:
        return self.layer.out_proj

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The packed weight, computed on each access."""
        return self._packed("weight")

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The packed bias, computed on each access."""
        return self._packed("bias")

    def _packed(self, attribute: str) -> Tensor | None:
        tensors = [getattr(linear, attribute) for linear in (self.layer.q_proj, self.layer.k_proj, self.layer.v_proj)]
        return None if any(t is None or t.shape[1:] != tensors[0].shape[1:] for t in tensors) else torch.cat(tensors)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`: output, and weights (before dropout) if `need_weights`."""

        def compute(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
            (batch, n), m = query.shape[:2], key.shape[1]
            options = mask_options(
                (batch, self.num_heads, n, m), key_padding_mask=padding, attn_mask=attn_mask, is_causal=is_causal
            )
            # Causal from the top left: the first query is at the first key, which is the layer's default if n = m.
            top_left = options["positions"] is not None and n != m
            options["positions"] = torch.arange(n, device=query.device) if top_left else None
            result = self.layer(query, key, value, **options, need_weights=need_weights)
            return result if need_weights else (result, None)

        layer = self.layer
        with with_torch_errors(
            self,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            need_weights=need_weights,
            separate=(layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight),
        ):
            return batch_first(
                compute, query, key, value, key_padding_mask, already=self.batch_first, average=average_attn_weights
            )

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`."""
        no_torchscript(self)


def _check_widths(**inputs: tuple[Tensor, int]) -> None:
    """Raise if an input does not have its width."""
    for what, (x, width) in inputs.items():
        if x.shape[-1] != width:
            raise bad_value(what, expected=f"width {width}, that of the module", received=shape_of(x))


_REPLACEABLE = (nn.MultiheadAttention, SwappedAttention)
