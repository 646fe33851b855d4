"""Which heads of a model are meant: numbers by layers, or heads one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor

from regard.errors import bad_type, bad_value

__all__ = ["Head", "Heads", "by_layer", "head_numbers", "is_heads", "selected_heads"]


class Head(Protocol):
    """One head, by the name of its layer and its number in it, such as a `Role`."""

    layer: str
    head: int


Heads = Mapping[Any, Iterable[int]] | Iterable[Head]  # numbers by layers, or heads one by one


def head_numbers(what: str, which: object, *, alone: bool = False) -> list[int]:
    """Numbers of heads as a list, from a list, a tensor, a range ...; `alone`: or from one number by itself.

    >>> import torch
    >>> head_numbers("heads", torch.tensor([3, 1]))
    [3, 1]
    """
    given = which.tolist() if isinstance(which, Tensor) else which
    if alone and isinstance(given, Integral) and not isinstance(given, bool):
        given = [given]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise bad_type(what, expected="a list of head numbers", received=repr(given))
    listed = list(given)
    for number in listed:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise bad_type(
                what,
                expected="a list of head numbers",
                received=f"{number!r} among them",
                remedy="mask.nonzero().flatten() has the numbers of a mask" if isinstance(number, bool) else "",
            )
        if number < 0:
            raise bad_value(what, expected="head numbers from 0", received=number)
    twice = [number for number, count in Counter(listed).items() if count > 1]
    if twice:
        raise bad_value(what, expected="each head once", received=f"{twice[0]} more than once")
    return [int(number) for number in listed]


def by_layer(heads: Heads) -> Mapping[str | int, Iterable[int]]:
    """Heads as a mapping from layers to numbers, from such a mapping or from heads one by one.

    >>> from regard.heads import Role
    >>> by_layer([Role("a", 3, "induction"), Role("b", 0, "induction"), Role("a", 1, "induction")])
    {'a': [3, 1], 'b': [0]}
    """
    if isinstance(heads, Mapping):
        return heads  # type: ignore[return-value]
    listed: list[Any] = list(heads) if isinstance(heads, Iterable) else [heads]
    if not listed:
        raise bad_value(
            "heads",
            expected="one head at least",
            received="an empty list",
            remedy="seen.roles() has the roles that there are",
        )
    if not is_heads(listed):
        raise bad_type(
            "heads",
            expected="a mapping from layers to heads, or heads such as seen.roles().of(...) gives",
            received=type(heads).__name__,
            remedy='ablate(model, {"layer name": [0, 3]})',
        )
    numbers: dict[str | int, list[int]] = {}
    for head in listed:
        numbers.setdefault(head.layer, []).append(head.head)
    return numbers


def is_heads(heads: list[Any]) -> bool:
    """Whether these are heads with the names of their layers (see `Head`)."""
    return bool(heads) and all(hasattr(head, "layer") and hasattr(head, "head") for head in heads)


def selected_heads(heads: Heads | None, layers: dict[str, int]) -> list[tuple[str, int]]:
    """(layer, head) of all heads, or of those that were asked for. `layers`: the number of heads of each layer."""
    if heads is None:
        return [(layer, head) for layer, count in layers.items() for head in range(count)]
    names: dict[object, str] = {f"{name}#0": name for name in layers}
    names |= {name: name for name in layers} | dict(enumerate(layers))
    selected: list[tuple[str, int]] = []
    for key, numbers in by_layer(heads).items():
        if key not in names or isinstance(key, bool):
            raise bad_value("heads", expected=f"layers of the model: {', '.join(layers)}", received=repr(key))
        layer, of_layer = names[key], head_numbers(f"heads of {key!r}", numbers, alone=True)
        if any(head >= layers[layer] for head in of_layer):
            raise bad_value(f"heads of {layer}", expected=f"numbers below {layers[layer]}", received=of_layer)
        selected += [(layer, head) for head in of_layer]
    return selected
