"""A name of our own among the attention backends of diffusers.

diffusers has a registry of functions that compute attention, and an enumeration of their names. The registry takes new
functions; the enumeration was not made to take new names, and everything that a user can call looks a name up in it. So
`register` adds a member to it, as Python itself makes one, and checks that it is found in every way that diffusers
looks for it; else it is removed again, as `unregister` does.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["load_registry", "register", "unregister"]

_MODULE = "diffusers.models.attention_dispatch"


def load_registry(name: str) -> tuple[Any, bool]:
    """The module of diffusers that has the registry, and whether the environment asks for our backend
    (`DIFFUSERS_ATTN_BACKEND`): a name that the registry does not know while it is being imported, and refuses."""
    try:
        constants: Any = importlib.import_module("diffusers.utils.constants")
        wanted = getattr(constants, "DIFFUSERS_ATTN_BACKEND", None)
        if wanted != name:
            return importlib.import_module(_MODULE), False
        constants.DIFFUSERS_ATTN_BACKEND = "native"
        try:
            return importlib.import_module(_MODULE), True
        finally:
            constants.DIFFUSERS_ATTN_BACKEND = wanted
    except ImportError as error:
        raise ImportError(
            "regard.integrations.diffusers: expected diffusers 0.42 or newer, whose attention others may compute, "
            f"received: {error}; remedy: pip install 'regard[diffusers]'"
        ) from error


def register(module: Any, name: str, function: Callable[..., Any]) -> Any:
    """Add a backend to the registry in `module`. Returns the member of the enumeration for it."""
    _check_layout(module)
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    if name in names._value2member_map_:  # (registered before: only the function may be another)
        member = names._value2member_map_[name]
    else:
        member = _add_member(names, name)
    try:
        registry.register(member)(function)
        # diffusers drops arguments that a backend does not name. Ours gets them all, and refuses what it does not know.
        registry._supported_arg_names[member] = _AllNames(inspect.signature(function).parameters)
        found = {x.value: x for x in names.__members__.values()}.get(name)
        if not (found is names(name) is member and registry._backends.get(name) is function):
            raise _unknown_layout("a backend that is found by its name", "one that is not")
    except BaseException:
        unregister(module, name)
        raise
    return member


def unregister(module: Any, name: str) -> None:
    """Remove a backend that `register` added. Where it was the active one, "native" is active again."""
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    member = names._value2member_map_.get(name)
    if member is None:
        return
    if registry._active_backend is member:
        registry.set_active_backend(names("native"))
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member, None)
    del names._member_map_[member.name], names._value2member_map_[name]
    names._member_names_.remove(member.name)
    delattr(names, member.name)


class _AllNames(set[str]):
    """Names of arguments: those of a function; and it contains every other."""

    def __contains__(self, name: object) -> bool:
        return True


def _add_member(names: Any, value: str) -> Any:
    """A new member of an enumeration of strings: with the attributes, and in the tables, that `enum` gives a member."""
    key = value.upper()
    member = str.__new__(names, value)
    member._name_, member._value_ = key, value
    member.__objclass__, member._sort_order_ = names, len(names._member_names_)
    setattr(names, key, member)  # (before it is in the table of members, which may not be set)
    names._member_map_[key] = names._value2member_map_[value] = member
    names._member_names_.append(key)
    return member


def _check_layout(module: Any) -> None:
    """Refuse a diffusers that is made otherwise than those we know."""
    names = getattr(module, "AttentionBackendName", None)
    if not (isinstance(names, enum.EnumMeta) and issubclass(names, str) and "native" in _values(names)):
        raise _unknown_layout("names of backends as an enumeration of strings, AttentionBackendName", repr(names))
    registry = getattr(module, "_AttentionBackendRegistry", None)
    tables = [getattr(registry, table, None) for table in ("_backends", "_constraints", "_supported_arg_names")]
    functions = [getattr(registry, method, None) for method in ("register", "set_active_backend")]
    if not (all(isinstance(table, dict) for table in tables) and all(map(callable, functions))):
        raise _unknown_layout("a registry of functions by these names, _AttentionBackendRegistry", repr(registry))
    taken = set(inspect.signature(tables[0][names("native")]).parameters)  # type: ignore[index]
    if missing := {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"} - taken:
        raise _unknown_layout("functions of query, key, value, ...", f"one without {', '.join(sorted(missing))}")


def _values(names: Iterable[Any]) -> set[Any]:
    return {member.value for member in names}


def _unknown_layout(expected: str, received: str) -> ImportError:
    try:
        version = importlib.metadata.version("diffusers")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return ImportError(
        f"regard.integrations.diffusers: expected a diffusers that has {expected}, as 0.42 has it; received "
        f"diffusers {version} with {received}; remedy: pip install 'diffusers~=0.42.0', or "
        "`with regard.integrations.sdpa.RedirectSdpa(): ...` around any model"
    )
