"""An attention module as a list of sizes that count heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.module_names import is_conv1d

__all__ = ["AttentionSizes", "HeadKind", "HeadSize"]

HeadKind = Literal["query", "kv"]


class HeadSize(NamedTuple):
    """A size that counts heads: of a parameter along an axis, or a number that a module keeps (axis None).

    It is a sum of runs: all query heads or all kv heads, each of a width. The rows of GPT-2's joint q, k and v are
    (("query", D), ("kv", D), ("kv", D)).
    """

    owner: nn.Module
    name: str
    axis: int | None
    runs: tuple[tuple[HeadKind, int], ...]

    @property
    def actual(self) -> int:
        """The size as it is in the module."""
        value = getattr(self.owner, self.name)
        return value if self.axis is None else value.shape[self.axis]

    def expected(self, counts: Mapping[HeadKind, int]) -> int:
        """The size for these numbers of heads."""
        return sum(counts[kind] * width for kind, width in self.runs)

    def kept_indices(self, counts: Mapping[HeadKind, int], kept: Mapping[HeadKind, list[int]]) -> Tensor:
        """The indices along the axis that belong to the kept heads."""
        indices, start = [], 0
        for kind, width in self.runs:
            indices += [start + head * width + i for head in kept[kind] for i in range(width)]
            start += counts[kind] * width
        return torch.tensor(indices, device="cpu")


@dataclass
class AttentionSizes:
    """An attention module as a list of sizes.

    Attributes:
        name: for messages.
        module: the attention module as it was found in the model.
        projecting: the module that has the projections to heads and the numbers of heads: `module` or a child of it.
        head_dim: D.
        counts: H and G.
        sizes: all that count heads.
        bias_table: the module with a bias per head, `position_encoding` of `projecting`; None if there is none.
    """

    name: str
    module: nn.Module
    projecting: nn.Module
    head_dim: int
    counts: dict[HeadKind, int]
    sizes: list[HeadSize] = field(default_factory=list)
    bias_table: nn.Module | None = None

    def add_rows(self, linear: nn.Module | None, *runs: tuple[HeadKind, int]) -> None:
        """A projection to heads: its outputs count them."""
        axis, _, out = self._weight_layout(linear)
        assert linear is not None
        self.sizes += [HeadSize(linear, "weight", axis, runs), HeadSize(linear, out, None, runs)]
        if linear._parameters["bias"] is not None:
            self.sizes.append(HeadSize(linear, "bias", 0, runs))

    def add_columns(self, linear: nn.Module | None, *runs: tuple[HeadKind, int]) -> None:
        """A projection from heads: its inputs count them."""
        axis, into, _ = self._weight_layout(linear)
        assert linear is not None
        self.sizes += [HeadSize(linear, "weight", 1 - axis, runs), HeadSize(linear, into, None, runs)]

    def add_numbers(self, names: Iterable[str], *runs: tuple[HeadKind, int]) -> None:
        """Numbers that the module keeps, under those of the names that it has."""
        kept = vars(self.projecting)
        self.sizes += [HeadSize(self.projecting, name, None, runs) for name in names if name in kept]

    def add_parameter(self, name: str, axis: int, *runs: tuple[HeadKind, int]) -> None:
        """A parameter of the module itself, if it has it."""
        if self.projecting._parameters.get(name) is not None:
            self.sizes.append(HeadSize(self.projecting, name, axis, runs))

    def _weight_layout(self, linear: nn.Module | None) -> tuple[int, str, str]:
        """The axis of the outputs in the weight of a plain projection, and its names for input and output size."""
        if linear is not None and not linear._buffers and not linear._modules:
            plain = set(linear._parameters) == {"weight", "bias"}
            if plain and isinstance(linear, nn.Linear):
                return 0, "in_features", "out_features"
            if plain and is_conv1d(linear):
                return 1, "nx", "nf"
        raise bad_type(
            self.name,
            expected="projections that are plain nn.Linear",
            received=type(linear).__name__,
            remedy="undo what wraps them: merge adapters, remove parametrisations, prune before quantising",
        )

    def check(self) -> None:
        """Raise if the module has parameters, buffers or sizes that this description does not explain."""
        h, g = self.counts["query"], self.counts["kv"]
        for size in self.sizes:
            self._check_size(size)
        if h % g:
            raise bad_value(self.name, expected="as many query heads for each kv head", received=f"{h} for {g}")
        for path, parameter in self._unexplained_parameters():
            raise bad_value(
                self.name,
                expected="projections, and norms over one head, alone",
                received=f"a parameter {path!r} {tuple(parameter.shape)} beside them, which may be of all heads",
            )
        for name, buffer in self.projecting._buffers.items():
            if buffer is not None and h > 1 and h in buffer.shape:
                raise bad_value(
                    self.name,
                    expected="no buffers with one number per head",
                    received=f"{name!r} {tuple(buffer.shape)}, for {h} heads",
                )

    def _check_size(self, size: HeadSize) -> None:
        value = getattr(size.owner, size.name)
        if size.axis is not None and type(value) is not nn.Parameter:
            raise bad_type(
                self.name,
                expected="weights that are plain parameters",
                received=f"{size.name}: {type(value).__name__}",
                remedy="prune before quantising, sharding or the first call of a lazy module",
            )
        if size.actual != size.expected(self.counts):
            h, g = self.counts["query"], self.counts["kv"]
            path = next(path for path, module in self.module.named_modules() if module is size.owner)
            raise bad_value(
                self.name,
                expected=f"{h} heads of width {self.head_dim} and {g} kv heads, "
                f"so {'.'.join(filter(None, (path, size.name)))} of {size.expected(self.counts)}",
                received=size.actual,
            )

    def _unexplained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that may depend on the number of heads and are not among the sizes."""
        explained = {(id(size.owner), size.name) for size in self.sizes if size.axis is not None}
        projections = {id(size.owner) for size in self.sizes} - {id(self.projecting)}
        for path, module in self.projecting.named_modules(remove_duplicate=False):
            if module is self.bias_table:
                continue
            for name, parameter in module._parameters.items():
                of_projection = id(module) in projections and name == "bias"
                if parameter is None or (id(module), name) in explained or of_projection:
                    continue
                # A norm over one head serves all heads; BERT-like models have LayerNorm after the output projection.
                over_head = "." not in path and "norm" in path and tuple(parameter.shape) == (self.head_dim,)
                if not over_head and path != "LayerNorm":
                    yield f"{path}.{name}" if path else name, parameter
