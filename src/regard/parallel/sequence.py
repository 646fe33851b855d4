"""A sequence over devices: context parallelism. Each rank has some of the tokens, and attends to all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.errors import bad_type, bad_value
from regard.models.base import TextModel
from regard.parallel.agreement import Method, Sequence, Sharding
from regard.parallel.collectives import Ranks
from regard.parallel.heads import _check_both, _found, _settings

__all__ = ["shard_sequence"]


def shard_sequence(
    module: nn.Module,
    mesh: DeviceMesh,
    method: Method = "ring",
    *,
    balance: bool | None = None,
    sum_gradients: bool = True,
) -> nn.Module:
    """From now on a layer, or every layer of a model, is given one rank's part of the sequence, and attends to all of
    it. In place; the weights stay whole on every rank, and all get those of the first.

    Give it `parallel.shard(x, mesh)`; it returns this rank's part of the output, and `parallel.gather` makes the whole.
    All else that is said of tokens (masks, biases, positions) is said of the whole sequence, as on one process.

    Args:
        module: a `MultiHeadAttention`, an `AttentionBlock`, a model of `regard.models`, or any module with such layers
            that treats tokens one by one but for them.
        mesh: of one dimension.
        method: "ring": keys and values travel from rank to rank; any number of heads. "alltoall": ranks trade tokens
            for heads; the heads must divide by the ranks.
        balance: whether parts are those of a balanced sequence; by default as the part itself says, where it came from
            `parallel.shard` or a sharded layer.
        sum_gradients: sum the gradients of the module's parameters over the ranks, so that each has that of the whole
            sequence. Without, each has that of its tokens: for DDP or FSDP over the same ranks, which do it.

    Returns:
        The module.
    """
    ranks = Ranks.of(mesh)
    layers, _ = _found(module)

    def check() -> None:
        if method not in ("ring", "alltoall"):
            raise bad_value("method", expected='"ring" or "alltoall"', received=repr(method))
        if balance is not None and not isinstance(balance, bool):
            raise bad_type("balance", expected="True, False or None", received=repr(balance))
        for name, layer in layers.items():
            if layer.spread is not None and layer.spread.sequence is not None:
                raise bad_value(name, expected="a layer whose sequence is not spread yet", received="one that is")
            heads = None if layer.spread is None else layer.spread.heads
            _check_both(name, layer, None if heads is None else heads.ranks, Sequence(ranks, method))

    said = {"method": method, "balance": balance, "sum_gradients": sum_gradients}
    ranks.synchronise(module, check, **said, **{"settings of layers": _settings(layers)})
    sequence = Sequence(ranks, method, balance)
    for layer in layers.values():
        if layer.spread is None:
            layer.spread = Sharding()
        layer.spread.sequence = sequence
    for one in module.modules():
        if isinstance(one, TextModel):
            inside = next((layer.spread.heads for layer in layers.values() if layer in set(one.modules())), None)
            one.spread = Sharding(inside, sequence)
    if sum_gradients:
        sums = _Sums(ranks)
        sums(module, (), {})
        module.register_forward_pre_hook(sums, with_kwargs=True, prepend=True)  # others may replace the parameters
    return module


# Which parameters have been seen to, and over which group: modules may share some. Not on the parameter itself, whose
# attributes go along into copies, while hooks do not.
_SUMMED = WeakIdKeyDictionary()


class _Sums:
    """Before each forward pass of the module: every parameter's gradient will be summed over the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for one in module.modules():
            if isinstance(one, FSDPModule):
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
            return self.ranks.summed(gradient.clone())
        local = self.ranks.summed(gradient.to_local().clone())
        spec = gradient._spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
