"""Which attention modules a model has, and which of their heads are to be removed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from torch import nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.head_choice import Head, by_layer, head_numbers, is_heads
from regard.heads.module_names import OUTPUT_PROJECTIONS, separate_projections
from regard.layer import MultiHeadAttention
from regard.layouts.swap import SplitAttention

__all__ = ["attention_modules", "projecting_module", "selected"]


def selected(
    model: nn.Module, heads: Iterable[int] | Mapping[Any, Iterable[int]] | Iterable[Head]
) -> Iterator[tuple[str, nn.Module, list[int]]]:
    """The name, the attention module and the head numbers of each attention module that was asked for."""
    by_name = attention_modules(model)
    modules = list({id(module): module for module in by_name.values()}.values())  # each once, in module order
    first_name = {id(module): name for name, module in reversed(by_name.items())}
    if not modules:
        raise bad_value(
            "model",
            expected="attention in it, each with its output projection",
            received=type(model).__name__,
            remedy="the module around it, if this is a part of one; regard.layouts.load makes a MultiHeadAttention "
            "of the weights of any other",
        )
    asked: dict[int, str | int] = {}
    for key, numbers in _by_module(heads, len(modules), next(iter(by_name))).items():
        module = _module(key, by_name, modules)
        if id(module) in asked:
            raise bad_value(
                "heads",
                expected="each attention module once",
                received=f"{asked[id(module)]!r} and {key!r}, which are the same",
                remedy="one list for both",
            )
        asked[id(module)] = key
        name = first_name[id(module)] or type(module).__name__
        yield name, module, head_numbers(name, numbers)


def _by_module(heads: Any, count: int, first_name: str) -> Mapping[Any, Any]:
    """Head numbers by the name or number of an attention module; a list of numbers if there is one module only."""
    if isinstance(heads, (list, tuple)) and is_heads(list(heads)):
        return by_layer(heads)  # type: ignore[arg-type]
    if isinstance(heads, Mapping):
        return heads
    if count > 1:
        raise bad_type(
            "heads",
            expected=f"a dict, for there are {count} attention modules",
            received=type(heads).__name__,
            remedy=f"{{{first_name!r}: [...]}}, or by number in module order",
        )
    return {0: heads}


def _module(key: object, by_name: dict[str, nn.Module], modules: list[nn.Module]) -> nn.Module:
    """The attention module that a name or a number stands for."""
    if isinstance(key, bool) or not isinstance(key, (str, Integral)):
        raise bad_type("heads", expected="names or numbers of attention modules as keys", received=repr(key))
    if isinstance(key, str):
        if key not in by_name:
            raise _unknown_name(key, by_name)
        return by_name[key]
    if not 0 <= int(key) < len(modules):
        raise bad_value(
            "heads", expected=f"attention modules from 0 to {len(modules) - 1}, in module order", received=key
        )
    return modules[int(key)]


def _unknown_name(key: str, by_name: dict[str, nn.Module]) -> ValueError:
    """The error for a name that no attention module has, with the closest names."""
    close = difflib.get_close_matches(key, by_name, n=2)
    some = ", ".join(map(repr, list(by_name)[:3])) + (", ..." if len(by_name) > 3 else "")
    return bad_value(
        "heads",
        expected="names of attention modules",
        received=repr(key),
        remedy=f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {some}",
    )


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All attention modules by each of their names, in module order."""
    by_name: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        projecting = projecting_module(module)
        if projecting is None or name in by_name:
            continue
        by_name[name] = module
        for child_name, child in module._modules.items():
            if child is projecting:
                by_name[f"{name}.{child_name}" if name else child_name] = module
    return by_name


def projecting_module(module: nn.Module) -> nn.Module | None:
    """The module that has the projections to heads: an attention module itself, or a child of it (BERT). None if it is
    no attention module."""
    if isinstance(module, SplitAttention):
        return module.layer
    if isinstance(module, (MultiHeadAttention, nn.MultiheadAttention)):
        return module
    children = module._modules
    if "c_attn" in children and "c_proj" in children:
        return module
    if separate_projections(module) and any(name in children for name in OUTPUT_PROJECTIONS):
        return module
    output = children.get("output")  # BERT: the output projection is beside the child
    for child in (children.get("self"), children.get("attention")):
        if child is None or not separate_projections(child) or projecting_module(child) is not None:
            continue
        if output and "dense" in output._modules:
            return child
    return None
