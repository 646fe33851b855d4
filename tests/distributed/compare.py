"""One attention on one process and the same on several: how far outputs and gradients are apart, by name.

Letters: B batch, H query heads, N tokens, n those of one rank, M keys, W model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from regard import MultiHeadAttention, parallel

SEED = 97  # torch's, on one process and on the first rank: the others have another one
WIDTH, HEADS, HEAD, TOKENS, BATCH = 23, 12, 6, 29, 2  # 12 heads divide by 2, 3 and 4 ranks
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}

Found = dict[str, Tensor]  # "output", "weights", "gradient of ..."


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(embed_dim: int = WIDTH, num_heads: int = HEADS, **options: Any) -> MultiHeadAttention:
    """A layer whose every parameter matters: none is 0 or 1."""
    made = MultiHeadAttention(embed_dim, num_heads, **{"head_dim": HEAD, **copy.deepcopy(options)})
    return shaken(made)  # type: ignore[return-value]


def shaken(module: nn.Module) -> nn.Module:
    """A module in float64 with random parameters, the same each time."""
    random = torch.Generator().manual_seed(11)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.3)
    return module


@dataclass(frozen=True, eq=False)
class Case:
    """What is computed: a module, its inputs, what it is told."""

    module: Callable[[], nn.Module] = layer
    options: dict[str, Any] = field(default_factory=dict)  # mask, positions, need_weights...
    batch: int | None = BATCH  # None: no such axis
    tokens: int = TOKENS
    keys: int | None = None  # of cross attention
    train: bool = False
    dtype: torch.dtype = torch.float64
    numbers: torch.dtype = torch.float64  # one that can hold all numbers of inputs and parameters
    gradients: bool = True
    autocast: bool = False

    def inputs(self) -> dict[str, Tensor]:
        """The query, and the key where there is one: (B, N, W) or (N, W)."""
        batch = () if self.batch is None else (self.batch,)
        made = {"x": normal(*batch, self.tokens, WIDTH, seed=1)}
        if self.keys is not None:
            made["key"] = normal(*batch, self.keys, WIDTH, seed=2)
        return {name: x.to(self.numbers).to(self.dtype).requires_grad_(self.gradients) for name, x in made.items()}

    def direction(self) -> Tensor:
        """What the output is multiplied by to make a loss."""
        batch = () if self.batch is None else (self.batch,)
        return normal(*batch, self.tokens, WIDTH, seed=3).to(self.numbers).to(self.dtype)

    def new(self) -> nn.Module:
        """The module, fresh."""
        module = self.module().to(self.numbers).to(self.dtype).train(self.train)
        return module.requires_grad_(self.gradients)

    def around(self) -> Any:
        """Where a forward pass happens."""
        if self.autocast:
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext() if self.gradients else torch.inference_mode()

    @property
    def axis(self) -> int:
        """That of tokens."""
        return 0 if self.batch is None else 1


@cache
def alone(case: Case) -> Found:
    """On one process. Once for all ways to spread it."""
    module, inputs = case.new(), case.inputs()
    torch.manual_seed(SEED)
    with case.around():
        out = module(*inputs.values(), **case.options)
    out, weights = out if isinstance(out, tuple) else (out, None)
    if case.gradients:
        (out * case.direction()).sum().backward()
    return found(out, weights, module, inputs)


def found(out: Tensor, weights: Tensor | None, module: nn.Module, inputs: dict[str, Tensor]) -> Found:
    """All that is compared."""
    made = {"output": out} if weights is None else {"output": out, "weights": weights}
    for name, parameter in (*inputs.items(), *module.named_parameters()):
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            made[f"gradient of {name}"] = gradient
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in made.items()}


def in_parts(
    case: Case,
    mesh: DeviceMesh,
    method: str,
    *,
    balance: bool = False,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Found:
    """With the sequence over ranks: given whole, cut by `shard`, put together by `gather`. `change`: the options of
    this rank's call."""
    module, inputs = case.new(), case.inputs()
    sequence = parallel.SequenceSharding(mesh, method, balance)  # type: ignore[arg-type]
    parallel.shard_sequence(module, sequence)
    torch.manual_seed(SEED + mesh.get_local_rank())
    with case.around():
        parts = [sequence.shard(x, dim=case.axis) for x in inputs.values()]
        out = module(*parts, **change(case.options))
        out, weights = out if isinstance(out, tuple) else (out, None)
        whole = sequence.gather(out, dim=case.axis)
    if case.gradients:
        (whole * case.direction()).sum().backward()
    assert out.shape[case.axis] < case.tokens or case.tokens == 1
    return found(whole, weights, module, inputs)


def by_heads(case: Case, mesh: DeviceMesh) -> Found:
    """With the heads over ranks."""
    module, inputs = parallel.shard_heads(case.new(), mesh), case.inputs()
    torch.manual_seed(SEED + mesh.get_local_rank())
    with case.around():
        out = module(*inputs.values(), **copied(case.options))
    out, weights = out if isinstance(out, tuple) else (out, None)
    if case.gradients:
        (out * case.direction()).sum().backward()
    return found(out, weights, module, inputs)


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """Options of one call, with leaves of its own."""
    return {name: leaf(x) if isinstance(x, Tensor) and x.requires_grad else x for name, x in options.items()}


def leaf(x: Tensor) -> Tensor:
    """A copy that has a gradient of its own."""
    return x.detach().clone().requires_grad_()


def apart(ours: Found, right: Found) -> dict[str, float]:
    """How far each is from what it should be, over the size of that, or 1 where it is smaller."""
    assert list(ours) == list(right), f"{list(ours)}, {list(right)}"
    return {name: _apart(ours[name], right[name], _size(right, name)) for name in right}


def _apart(ours: Tensor, right: Tensor, size: float) -> float:
    assert ours.shape == right.shape, f"{ours.shape}, {right.shape}"
    error = (ours.double() - right.double()).abs().max().item() / size if right.numel() else 0.0
    return math.inf if math.isnan(error) else error


def _size(right: Found, name: str) -> float:
    """What an error is measured by. What makes up the gradient of the keys' bias cancels, often to 0: there it is the
    size of that of their weight."""
    x = right[name.replace("k_proj.bias", "k_proj.weight")]
    return max(x.abs().max().item(), 1.0) if x.numel() else 1.0


Table = dict[str, dict[str, float] | str]  # of each case how far things are apart over what is allowed, or an error


def table(cases: Iterable[tuple[str, Callable[[], dict[str, float]]]]) -> Table:
    """Run one case after the other. A rank that raised goes on, for most errors are raised by all."""
    told: Table = {}
    for name, case in cases:
        try:
            told[name] = case()
        except ConnectionError as error:  # the ranks are not together any more
            return {**told, name: f"{type(error).__name__}: {error}"}
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def within(limit: float, errors: dict[str, float]) -> dict[str, float]:
    """Errors over what is allowed."""
    return {name: error / limit for name, error in errors.items()}


def no_worse(ours: Found, single: Found, right: Found, times: float = 2.0) -> dict[str, float]:
    """Of each, its error over `times` that of one process in the same dtype (and 4 roundings)."""
    theirs, mine = apart(single, right), apart(ours, right)
    rounding = 4 * torch.finfo(single["output"].dtype).eps
    return {name: mine[name] / (times * theirs[name] + rounding) for name in right}


def report(results: list[Table], least: int) -> None:
    """Fail with the names of all cases that are wrong on some rank. There must be `least` of them at least."""
    assert len(results[0]) >= least, f"only {len(results[0])} cases: {list(results[0])[-1:]}"
    wrong = [f"rank {rank}: {line}" for rank, result in enumerate(results) for line in _wrong(result)]
    assert not wrong, f"{len(wrong)} of {len(results) * len(results[0])}:\n" + "\n".join(wrong)


def _wrong(result: Table) -> Iterator[str]:
    for case, told in result.items():
        if isinstance(told, str):
            yield f"{case}: {told}"
        else:
            off = {name: error for name, error in told.items() if not error <= 1.0}
            if off:
                yield f"{case}: " + ", ".join(f"{name} {error:.3g} of what is allowed" for name, error in off.items())
