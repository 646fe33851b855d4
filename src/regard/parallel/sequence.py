"""A sequence over devices: context parallelism. Each rank has some of the tokens, and attends to all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.errors import bad_type, bad_value
from regard.layer import MultiHeadAttention
from regard.models.base import TextModel
from regard.parallel.agreement import Sharding
from regard.parallel.collectives import Ranks
from regard.parallel.heads import check_both, layers_of, settings_of
from regard.parallel.sharded_layer import install, sharding_of
from regard.parallel.token_layout import Method, SequenceSharding
from regard.variants import DifferentialAttention, LatentAttention

__all__ = ["refuse_other_attention", "shard_sequence"]


def shard_sequence(
    module: nn.Module,
    sequence: SequenceSharding | DeviceMesh,
    method: Method = "ring",
    *,
    balance: bool = False,
    sum_gradients: bool = True,
) -> nn.Module:
    """From now on a layer, or every layer of a model, is given one rank's part of the sequence, and attends to all of
    it. In place; the weights stay whole on every rank, and all get those of the first.

    Give it `sequence.shard(x)`; it returns this rank's part of the output, and `sequence.gather` makes the whole.
    Masks, biases and positions are those of the whole sequence, as on one process.

    Args:
        module: a `MultiHeadAttention`, an `AttentionBlock`, a model of `regard.models`, or any module with such layers
            that treats tokens one by one but for them.
        sequence: a `SequenceSharding`; or its mesh, of one dimension, with the method and balance beside it.
        method, balance: of the `SequenceSharding`, where a mesh is given. Parts must be balanced as this says: a tensor
            does not tell.
        sum_gradients: sum the gradients of the module's parameters over the ranks, so that each has that of the whole
            sequence. Without, each has that of its tokens: for DDP or FSDP over the same ranks, which do it.

    Returns:
        The module.
    """
    if isinstance(sequence, SequenceSharding) and (method != "ring" or balance is not False):
        raise bad_value(
            "method, balance",
            expected="none beside a SequenceSharding, which has its own",
            received=f"method={method!r}, balance={balance!r}",
            remedy="SequenceSharding(mesh, method, balance)",
        )
    given = sequence if isinstance(sequence, SequenceSharding) else None
    ranks = Ranks.of(sequence) if given is None else given.ranks  # type: ignore[arg-type]
    layers, _ = layers_of(module)
    refuse_other_attention(module)
    settings = (
        {"method": method, "balance": balance} if given is None else {"method": given.method, "balance": given.balance}
    )

    def sharding() -> SequenceSharding:
        return SequenceSharding(sequence, method, balance) if given is None else given  # type: ignore[arg-type]

    def check() -> None:
        own = sharding()
        for name, layer in layers.items():
            before = sharding_of(layer)
            if before.sequence is not None:
                raise bad_value(name, expected="a layer whose sequence is not sharded yet", received="one that is")
            check_both(name, layer, None if before.heads is None else before.heads.ranks, own)

    settings |= {"sum_gradients": sum_gradients, "settings of layers": settings_of(layers)}
    ranks.broadcast_module(module, check, **settings)
    _install(module, layers, sharding())
    if sum_gradients:
        sums = _Sums(ranks)
        sums(module, (), {})
        module.register_forward_pre_hook(sums, with_kwargs=True, prepend=True)  # others may replace the parameters
    return module


def refuse_other_attention(module: nn.Module) -> None:
    """Raise for attention of regard that would attend to the tokens of its own rank alone."""
    for name, part in module.named_modules():
        if isinstance(part, (LatentAttention, DifferentialAttention)):
            raise bad_value(
                name or "module",
                expected="MultiHeadAttention, which attends to the tokens of all ranks",
                received=type(part).__name__,
                remedy="shard_heads, which leaves it whole on every rank",
            )


def _install(module: nn.Module, layers: dict[str, MultiHeadAttention], sequence: SequenceSharding) -> None:
    """The layers, and the models around them, become sharded ones."""
    for layer in layers.values():
        install(layer, replace(sharding_of(layer), sequence=sequence))
    for model in module.modules():
        if isinstance(model, TextModel):
            inside = set(model.modules())
            heads = next((sharding_of(layer).heads for layer in layers.values() if layer in inside), None)
            install(model, Sharding(heads, sequence))


# Which parameters have been seen to, and over which group: modules may share some. Not on the parameter itself, whose
# attributes go along into copies, while hooks do not.
_SUMMED = WeakIdKeyDictionary()


class _Sums:
    """Before each forward pass of the module: every parameter's gradient will be summed over the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                raise bad_value(
                    "shard_sequence",
                    expected="sum_gradients=False under FSDP, which sums them itself",
                    received="sum_gradients=True",
                    remedy="fully_shard over a mesh that has the sequence's ranks in it",
                )
        for parameter in module.parameters():
            if parameter.requires_grad and _SUMMED.get(parameter) is not self.ranks.group:
                parameter.register_hook(self._sum)
                _SUMMED[parameter] = self.ranks.group

    def _sum(self, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:
            raise bad_type(
                "gradient",
                expected="a dense one",
                received="a sparse one",
                remedy="nn.Embedding(sparse=False), or sum_gradients=False",
            )
        if not isinstance(gradient, DTensor):
            return self.ranks.all_reduce(gradient.clone())
        local = self.ranks.all_reduce(gradient.to_local().clone())
        spec = gradient._spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
