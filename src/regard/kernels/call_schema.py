"""A `Call` in pieces: operators take tensors and numbers only, so it is taken apart into lists of them and a `plan`
that says how to put it together again. Whatever names its parts in `fields` (masks, biases, dropout) goes through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.kernels.call import Call
from regard.kernels.dropout import Dropout
from regard.masks import Mask
from regard.positions import Bias

__all__ = ["Flat", "flatten", "unflatten"]


class Flat(NamedTuple):
    """A `Call` in pieces. `biases` are the biases' weights and `rest` the tensors that have no gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    biases: list[Tensor]
    rest: list[Tensor]
    ints: list[int]
    floats: list[float]
    plan: str


def flatten(call: Call) -> Flat:
    """Take a call apart."""
    rest: list[Tensor] = []
    ints: list[int] = []
    floats: list[float] = []
    plan: list[str] = []

    def visit(value: Any) -> None:
        if value is None:
            plan.append("None")
        elif isinstance(value, Tensor):
            plan.append("tensor")
            rest.append(value)
        elif isinstance(value, float):
            plan.append("float")
            floats.append(value)
        elif isinstance(value, (int, torch.SymInt)):
            plan.append("int")
            ints.append(int(value) if isinstance(value, bool) else value)  # pyright: ignore[reportArgumentType]
        elif isinstance(value, Bias):
            _check_fields(value)
            plan.append(type(value).__name__)
            biases.append(value.weight)
            for field in value.fields[1:]:
                visit(getattr(value, field))
        elif isinstance(value, (Mask, Dropout)):
            _check_fields(value)
            plan.append(type(value).__name__)
            for field in value.fields:
                visit(getattr(value, field))
        else:
            raise bad_type(
                "a mask's or a bias's field",
                expected="a tensor, a number, None or another mask",
                received=type(value).__name__,
            )

    biases: list[Tensor] = []
    visit(len(call.biases))
    for bias in call.biases:
        visit(bias)
    for value in (call.scale, call.q_start, call.softcap, call.mask, call.positions, call.key_positions, call.dropout):
        visit(value)
    return Flat(call.q, call.k, call.v, call.sinks, biases, rest, ints, floats, " ".join(plan))


def _check_fields(value: Mask | Bias | Dropout) -> None:
    """What is not named in `fields` would be lost on the way."""
    lost = sorted(set(vars(value)) - set(value.fields))
    if lost:
        raise bad_value(
            type(value).__name__,
            expected="every attribute named in `fields`, for it is taken apart where torch compiles or transforms",
            received=f"others: {', '.join(lost)}",
            remedy=f"fields = {(*value.fields, *lost)}",
        )


def unflatten(flat: Flat) -> Call:
    """Put a call together again."""
    tokens = iter(flat.plan.split(" "))
    tensors, ints, floats = iter(flat.rest), iter(flat.ints), iter(flat.floats)
    weights = iter(flat.biases)

    def build() -> Any:
        token = next(tokens)
        if token in Bias.kinds:
            kind = Bias.kinds[token]
            return _assemble(kind, (next(weights), *(build() for _ in kind.fields[1:])))
        if token in Mask.kinds:
            kind = Mask.kinds[token]
            return _assemble(kind, tuple(build() for _ in kind.fields))
        if token == "Dropout":
            return Dropout(*(build() for _ in Dropout.fields))
        return {"None": lambda: None, "tensor": tensors.__next__, "int": ints.__next__, "float": floats.__next__}[
            token
        ]()

    biases = tuple(build() for _ in range(build()))
    scale, q_start, softcap, mask, positions, key_positions, dropout = (build() for _ in range(7))
    return Call(
        flat.q, flat.k, flat.v, scale, q_start, softcap, mask, biases, positions, key_positions, flat.sinks, dropout
    )


def _assemble(kind: type, parts: tuple[Any, ...]) -> Any:
    """An object from its parts, without its constructor's checks: they were made when the caller built it."""
    thing = object.__new__(kind)
    for field, value in zip(kind.fields, parts, strict=True):
        setattr(thing, field, value)
    return thing
