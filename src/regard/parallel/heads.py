"""Heads over devices: tensor parallelism, by torch's own `parallelize_module`.

    q_proj, k_proj, v_proj   by columns: each rank computes its heads
    out_proj                 by rows: what the ranks' heads give is summed
    gate, up / down          of a feed-forward part: by columns / by rows

The weights become DTensors; names and shapes of the state dict stay. Where there are fewer kv heads than ranks, k_proj
and v_proj stay whole on every rank, each takes the heads that it needs, and gradients are summed.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from regard.errors import bad_type, bad_value
from regard.layer import AttentionBlock, MultiHeadAttention
from regard.models.base import TextModel
from regard.models.blocks import FeedForward
from regard.parallel.agreement import HeadSharding
from regard.parallel.alltoall import heads_of, kv_heads_of
from regard.parallel.collectives import Ranks, digest, fingerprint
from regard.parallel.sharded_layer import ShardedTextModel, install, sharding_of
from regard.parallel.token_layout import SequenceSharding
from regard.positions import MultiAxisRotary, RelativeBias

__all__ = ["shard_heads"]


def shard_heads(module: nn.Module, mesh: DeviceMesh, *, check: bool = True) -> nn.Module:
    """Shard the heads of a layer, or of every layer of a model, over the ranks of a mesh. In place.

    Inputs and outputs are whole on every rank, and the same as on one process, to rounding. All ranks get the weights
    of the first. Caches, masks and biases per head, dropout, `watch` all work.

    Args:
        module: a `MultiHeadAttention`, an `AttentionBlock`, a model of `regard.models`, or any module with such layers
            in it; of the models the feed-forward parts are sharded, too.
        mesh: of one dimension; the heads of each layer (and the width of its feed-forward part) must divide by it.
        check: whether the ranks compare in each call what they were given; without, ranks that disagree may hang until
            the timeout. It costs a gather of a few numbers per layer.

    Returns:
        The module.

    >>> from torch.distributed import init_device_mesh  # within torchrun:
    >>> mesh = init_device_mesh("cpu", (2,))  # doctest: +SKIP
    >>> layer = shard_heads(MultiHeadAttention(16, 4), mesh)  # doctest: +SKIP
    """
    ranks = Ranks.of(mesh)
    layers, parts = layers_of(module)
    ranks.broadcast_module(
        module, lambda: _check(module, layers, parts, ranks), check=check, **{"settings of layers": settings_of(layers)}
    )
    with warnings.catch_warnings():  # that random numbers of DTensors are not supported on CPUs: none are drawn
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)
        _shard(layers, parts, mesh, check)
    for child in module.modules():
        if isinstance(child, AttentionBlock):
            child.dropout.register_forward_pre_hook(_SameNumbers(ranks), with_kwargs=True)
        if isinstance(child, TextModel):
            child.first = ranks.first
            if isinstance(child, ShardedTextModel):
                inside = set(child.modules())
                child.sharding.heads = next(sharding_of(layer).heads for layer in layers.values() if layer in inside)
            elif check:
                child.register_forward_pre_hook(_SameText(ranks), with_kwargs=True)
    return module


def _shard(layers: dict[str, MultiHeadAttention], parts: dict[str, FeedForward], mesh: DeviceMesh, check: bool) -> None:
    ranks = Ranks.of(mesh)
    for layer in layers.values():
        heads = HeadSharding(mesh, layer.num_heads, layer.num_kv_heads, check)
        install(layer, replace(sharding_of(layer), heads=heads))
        parallelize_module(layer, mesh, _plan(layer, ranks), src_data_rank=None)
        layer.register_load_state_dict_pre_hook(_shard_plain)
        if layer.sinks is not None:
            _distribute(layer, "sinks", mesh, Shard(0))
        bias = layer.position_encoding
        if isinstance(bias, RelativeBias) and not isinstance(bias.weight, DTensor):  # (layers may share one)
            _distribute(bias, "weight", mesh, Shard(1))
    for part in parts.values():
        plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {} if part.gate is None else {"gate": ColwiseParallel()}
        parallelize_module(part, mesh, plan, src_data_rank=None)
        part.register_load_state_dict_pre_hook(_shard_plain)
        part.register_forward_pre_hook(partial(_entering, ranks, mesh))
        part.register_forward_hook(partial(_leaving, ranks))


def layers_of(module: nn.Module) -> tuple[dict[str, MultiHeadAttention], dict[str, FeedForward]]:
    """The layers and feed-forward parts of a module, by name."""
    if not isinstance(module, nn.Module):
        raise bad_type("module", expected="a layer or a model", received=type(module).__name__)
    layers = {name or "layer": m for name, m in module.named_modules() if isinstance(m, MultiHeadAttention)}
    if not layers:
        raise bad_value(
            "module",
            expected="a regard.MultiHeadAttention, or a model with some in it",
            received=type(module).__name__,
            remedy="regard.swap(model, split=True) puts them in the place of nn.MultiheadAttention",
        )
    return layers, {name: m for name, m in module.named_modules() if isinstance(m, FeedForward)}


def settings_of(layers: dict[str, MultiHeadAttention]) -> list[tuple[str, str]]:
    """What layers are, besides their weights: the same on every rank."""
    return [(name, layer.extra_repr()) for name, layer in layers.items()]


def check_both(name: str, layer: MultiHeadAttention, heads: Ranks | None, sequence: SequenceSharding | None) -> None:
    """Raise where a layer cannot have its heads, its sequence or both sharded so."""
    for what, present in (
        ("shares_kv", layer.shares_kv),
        ("value_mix", layer.value_mix is not None),
        ("MultiAxisRotary", isinstance(layer.position_encoding, MultiAxisRotary)),
        ("query_scale", layer.query_scale is not None and sequence is not None),
    ):
        if present:
            raise bad_value(
                name, expected=f"a layer without {what}, which cannot be sharded", received=f"one with {what}"
            )
    here = layer.num_heads
    if heads is not None:
        here //= heads.size
        if sequence is not None and sequence.ranks.overlaps(heads.group):
            raise bad_value(
                name,
                expected="heads and sequence over two dimensions of a mesh",
                received=f"{sequence.ranks.name!r} for both",
                remedy='init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))',
            )
    if sequence is not None and sequence.method == "alltoall" and here % sequence.ranks.size:
        size, of = sequence.ranks.size, sequence.ranks.name
        raise bad_value(
            f"{name}: heads",
            expected=f"a multiple of the {size} ranks of {of!r}",
            received=here,
            remedy='method="ring", which takes any number',
        )


def _check(
    module: nn.Module, layers: dict[str, MultiHeadAttention], parts: dict[str, FeedForward], ranks: Ranks
) -> None:
    """Raise before any weight is touched."""
    _check_owners(module, layers, parts)
    for name, layer in layers.items():
        sharding = sharding_of(layer)
        if sharding.heads is not None:
            raise bad_value(name, expected="a layer whose heads are not sharded yet", received="one that is")
        if layer.num_heads % ranks.size:
            raise bad_value(
                f"{name}: heads",
                expected=f"a multiple of the {ranks.size} ranks of {ranks.name!r}",
                received=layer.num_heads,
                remedy="fewer ranks, or parallel.shard_sequence",
            )
        check_both(name, layer, ranks, sharding.sequence)
        for norm in (layer.q_norm, layer.k_norm):
            if getattr(norm, "normalized_shape", (layer.head_dim,)) != (layer.head_dim,):
                raise bad_value(
                    f"{name}: qk_norm",
                    expected="a norm of each head: heads that are sharded have no norm over all of them",
                    received='Norm(over="width")',
                    remedy="parallel.shard_sequence",
                )
        _check_linears(name, _linears(layer))
    for name, part in parts.items():
        linears = {key: linear for key in ("gate", "up", "down") if (linear := getattr(part, key)) is not None}
        _check_linears(name, linears)
        if part.up.out_features % ranks.size:
            raise bad_value(
                f"{name}: inner width",
                expected=f"a multiple of the {ranks.size} ranks of {ranks.name!r}",
                received=part.up.out_features,
                remedy="fewer ranks",
            )


def _linears(layer: MultiHeadAttention) -> dict[str, nn.Module]:
    """The projections of a layer, by name."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj")
    return {name: linear for name in names if (linear := getattr(layer, name)) is not None}


def _check_owners(module: nn.Module, layers: dict[str, MultiHeadAttention], parts: dict[str, FeedForward]) -> None:
    """Raise where a weight to be sharded belongs to two modules: it would be sharded twice, or no longer be shared."""
    linears = [linear for layer in layers.values() for linear in _linears(layer).values()]
    linears += [linear for part in parts.values() for linear in (part.gate, part.up, part.down) if linear is not None]
    owners: dict[Tensor, set[nn.Module]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(child)
    for name, child in module.named_modules():
        if child in linears and (
            linears.count(child) > 1 or any(len(owners[x]) > 1 for x in child.parameters(recurse=False))
        ):
            raise bad_value(
                name,
                expected="weights of one layer alone",
                received="weights that several layers share",
                remedy="parallel.shard_sequence, or share the whole layer",
            )


def _check_linears(owner: str, linears: dict[str, nn.Module]) -> None:
    for name, linear in linears.items():
        if not isinstance(linear, nn.Linear) or not isinstance(linear.weight, Tensor):
            raise bad_type(
                f"{owner}.{name}",
                expected="an nn.Linear, which torch can shard",
                received=type(linear).__name__,
                remedy="parallel.shard_sequence, which leaves the weights as they are",
            )
        if isinstance(linear.weight, DTensor):
            raise bad_value(
                f"{owner}.{name}",
                expected="a weight that is whole",
                received="a DTensor",
                remedy="shard_heads first, then fully_shard",
            )


def _plan(layer: MultiHeadAttention, ranks: Ranks) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"q_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    heads, groups, size = layer.num_heads, layer.num_kv_heads, ranks.size
    own = heads_of(heads, size)[ranks.rank]
    for name, width in (("k_proj", layer.head_dim), ("v_proj", layer.value_head_dim)):
        plan[name] = ColwiseParallel() if groups % size == 0 else _SomeHeads(kv_heads_of(own, heads, groups), width)
    if layer.gate_proj is not None:
        plan["gate_proj"] = ColwiseParallel()
    for name in ("q_norm", "k_norm", "v_norm"):
        if (norm := getattr(layer, name)) is not None and any(True for _ in norm.parameters()):
            plan[name] = _OnHeads()
    return plan


def _distribute(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """A parameter as a DTensor. Every rank has the same: nothing needs to be sent."""
    before = owner._parameters[name]
    assert before is not None
    sharded = distribute_tensor(before.detach(), mesh, [placement], src_data_rank=None)
    owner.register_parameter(name, nn.Parameter(sharded, requires_grad=before.requires_grad))


def _shard_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: tensors that are whole, as of one process, become DTensors like the module's."""
    for name, own in module.named_parameters():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != own.shape:
            continue
        if isinstance(own, DTensor) and own.device_mesh.ndim == 1:  # (what FSDP cut, too, is for torch's checkpoints)
            placed = distribute_tensor(given.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
            state[prefix + name] = placed


def _entering(ranks: Ranks, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The input of several projections as one replicated DTensor: its gradients are summed over the ranks once."""
    return (ranks.replicate(inputs[0], mesh), *inputs[1:])


def _leaving(ranks: Ranks, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    """The sum over the ranks, as soon as it is there: an error of the network shows here."""
    return ranks.wait(out)


class _SomeHeads(ParallelStyle):
    """A projection to fewer kv heads than ranks: whole everywhere; each rank takes the heads that it needs."""

    def __init__(self, heads: list[int], width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                _distribute(module, name, device_mesh, Replicate())

        def leave(_: nn.Module, __: Any, output: DTensor) -> Tensor:
            # what this rank does with it is a part of what is done with it: gradients are summed
            local = output.to_local(grad_placements=[Partial()]).unflatten(-1, (-1, self.width))
            return local[..., self.heads, :].flatten(-2)

        module.register_forward_pre_hook(partial(_entering, Ranks.of(device_mesh), device_mesh))
        module.register_forward_hook(leave)
        return module


class _OnHeads(ParallelStyle):
    """A norm of each head: the weight is one for all heads, so its gradient is summed over the ranks'."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                _distribute(module, name, device_mesh, Replicate())

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> Any:  # (B, N, heads, D)
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(2)], run_check=False), *inputs[1:])

        def leave(_: nn.Module, __: Any, output: DTensor) -> Tensor:
            return output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class _SameNumbers:
    """Before dropout of what is whole on every rank: the random numbers are the first rank's, on all."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and module.p and self.ranks.device.type == "cpu":
            torch.set_rng_state(self.ranks.all_gather(torch.get_rng_state())[0])


class _SameText:
    """Before each call of a model whose heads are sharded: every rank has the same tokens, and none refuses them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: TextModel, args: Any, kwargs: Any) -> None:
        if isinstance(module, ShardedTextModel):  # it compares its part of a text itself
            return
        keep = kwargs.get("keep")

        def facts() -> dict[str, int]:
            ids = args[0] if args else kwargs.get("ids")
            module._check_ids(ids, keep)
            return {
                "shape of ids": digest(tuple(ids.shape)),
                "tokens": digest(fingerprint(ids)),
                "keep": 0 if keep is None else digest(tuple(keep.shape), fingerprint(keep)),
            }

        self.ranks.agree("model", ("shape of ids", "tokens", "keep"), facts)
