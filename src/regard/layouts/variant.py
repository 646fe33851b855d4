"""`VariantLayout`: the layout of a layer that is no `MultiHeadAttention`, with its own way to a layer and back.

A layout of this kind is known by a key that no other has. What the others have in common (packing, kinds of biases)
does not apply to it: it renames, checks the shapes, and builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.layouts.base import Tensors
from regard.layouts.canonical import assign

__all__ = ["Given", "VariantLayout", "build", "check_shapes"]

Pairs = Literal["halves", "interleaved"]


@dataclass(frozen=True)
class Given:
    """What the caller of `layouts.load` gave beside the tensors."""

    num_heads: int
    pairs: Pairs | None  # the order of rotary pairs in the stored rows, if it is not that of the layout
    options: dict[str, Any]  # of the layer


@dataclass(frozen=True)
class VariantLayout:
    """One way of naming the weights of a layer of another kind.

    Attributes:
        name: its name for `layouts.load(..., layout=name)`.
        origin: the models that use it.
        marker: the key by which it is known.
        kind: the class of the layer.
        keys: our key -> their key.
        optional: our keys that may be absent.
        read: their tensors by our names, and what was given -> the layer.
        write: the layer -> its tensors by our names, in their order.
        ignored: keys of buffers, which are not weights.
        refused: their key, or the beginning of several that ends with a dot -> the feature it stands for.
    """

    name: str
    origin: str
    marker: str
    kind: type[nn.Module]
    keys: Mapping[str, str]
    optional: frozenset[str]
    read: Callable[[Tensors, Given], nn.Module]
    write: Callable[[Any], Tensors]
    ignored: frozenset[str] = frozenset({"rotary_emb.inv_freq"})
    refused: Mapping[str, str] = field(default_factory=dict)

    def load(self, stored: Mapping[str, Tensor], given: Given) -> nn.Module:
        """A layer with a copy of their weights."""
        theirs = {key: tensor for key, tensor in stored.items() if key not in self.ignored}
        for key, tensor in theirs.items():
            for refused, meaning in self.refused.items():
                if key == refused or (refused.endswith(".") and key.startswith(refused)):
                    raise bad_value(
                        f"layout {self.name!r}",
                        expected=f"a plain {self.kind.__name__}",
                        received=f"{key!r}: {meaning}",
                    )
            if key not in self.keys.values():
                raise bad_value(f"layout {self.name!r}", expected="no keys but its own", received=repr(key))
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                received = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise bad_type(
                    key, expected="a floating-point tensor", received=received, remedy="dequantise the weights first"
                )
        for ours, key in self.keys.items():
            if key not in theirs and ours not in self.optional:
                raise bad_value(
                    "state_dict", expected=f"{key!r}, as layout {self.name!r} has it", received=sorted(theirs)[:12]
                )
        return self.read({ours: theirs[key] for ours, key in self.keys.items() if key in theirs}, given)

    def export(self, module: object) -> Tensors:
        """A copy of the layer's weights by their names."""
        if not isinstance(module, self.kind):
            raise bad_type(
                f"export as {self.name!r}",
                expected=f"a {self.kind.__name__}",
                received=type(module).__name__,
                remedy="one of the other layouts.names()" if isinstance(module, nn.Module) else "",
            )
        tensors = self.write(module)
        for ours in tensors:
            if ours not in self.keys:
                raise bad_value(
                    f"export as {self.name!r}",
                    expected=f"weights that have a name in {self.origin}",
                    received=ours,
                    remedy="layer.state_dict() has them by our names",
                )
        return {self.keys[ours]: tensor.detach().clone().contiguous() for ours, tensor in tensors.items()}


def check_shapes(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, str], heads: int) -> None:
    """Raise unless the tensors that are there have these shapes, both by our names."""
    for ours, shape in shapes.items():
        if ours in tensors and tuple(tensors[ours].shape) != shape:
            raise bad_value(
                keys[ours],
                expected=f"shape {shape}, for {heads} heads and the other tensors",
                received=shape_of(tensors[ours]),
                remedy="check num_heads",
            )


def build(kind: type[nn.Module], sizes: Mapping[str, Any], options: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    """A layer of these sizes that holds copies of the tensors. `bias=True` among the sizes: those that are absent are
    left out."""
    for option in sizes.keys() & options.keys():
        raise bad_value(
            option,
            expected="no argument: it is read from the shapes of the tensors",
            received=f"{option}={options[option]!r}",
            remedy=f"leave {option} out",
        )
    with torch.device("meta"):  # no random initialisation, which would be overwritten
        layer = kind(**sizes, **options)
    for name, module in layer.named_children():
        if isinstance(module, nn.Linear) and f"{name}.bias" not in tensors:
            module.bias = None  # type: ignore[assignment]
    assign(layer, tensors)
    return layer
