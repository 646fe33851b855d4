"""`prune`: decide which heads stay, check everything, then edit parameters and numbers in place."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.head_choice import Head
from regard.heads.interventions.prune.readers import read_attention
from regard.heads.interventions.prune.selection import selected
from regard.heads.interventions.prune.sizes import AttentionSizes, HeadKind
from regard.positions import Alibi, RelativeBias

__all__ = ["prune"]

Model = TypeVar("Model", bound=nn.Module)


def prune(model: Model, heads: Iterable[int] | Mapping[Any, Iterable[int]] | Iterable[Head]) -> Model:
    """Remove attention heads for good, in place; the model is returned.

    It then computes what it would with the outputs of those heads set to zero before the output projection, with fewer
    parameters and in less time. Everything is checked before anything is changed.

    Args:
        model: an attention module, or any module with some in it. Pass the outermost one: shared weights are found only
            from there. It may hold `regard.MultiHeadAttention`, modules made by `regard.swap`, or attention of Hugging
            Face transformers with separate projections (BERT, RoBERTa, DistilBERT, ViT, Llama, ...) or GPT-2's.
        heads: numbers of the heads to remove, if there is one attention module; else a dict of them, by the name of the
            attention module or by its number in module order; or heads one by one, as `seen.roles().of("first")` gives
            them. Numbers are those of the heads that are there now, so pruning twice works.

    Grouped kv heads: a kv head is removed with the last query head that needs it. Groups must be of one size; if
    different numbers of query heads are left in them, kv heads are repeated, as few times as is exact: of groups of 2
    and 4 query heads, the second becomes two groups of 2 with the same keys and values. A warning tells if this makes
    more kv heads than before, for caches grow and time is lost. In training, repeated kv heads learn separately.

    Parameters are replaced: use a new optimizer, and new caches. Layers that share a bias table (`RelativeBias`,
    `Alibi`) keep sharing it if they keep the same heads; else each gets its part. To load a pruned model, prune a fresh
    one of the same configuration in the same way, then `load_state_dict`: configurations are left as they are, so
    `from_pretrained` does not take what `save_pretrained` writes.

    >>> from regard import MultiHeadAttention
    >>> layer = prune(MultiHeadAttention(10, num_heads=5), [0, 3])
    >>> layer.num_heads, layer.q_proj, layer(torch.randn(2, 7, 10)).shape
    (3, Linear(in_features=10, out_features=6, bias=True), torch.Size([2, 7, 10]))
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    cuts = [_Cut(read_attention(name, module), removed) for name, module, removed in selected(model, heads)]
    cuts = [cut for cut in cuts if cut.removed]
    edits = _parameter_edits(model, cuts)
    for cut in cuts:
        cut.warn_if_kv_heads_grow()
    _apply(cuts, edits)
    return model


class _Cut:
    """One attention module, and the heads of it that stay."""

    def __init__(self, attention: AttentionSizes, removed: list[int]) -> None:
        h, g = attention.counts["query"], attention.counts["kv"]
        for number in removed:
            if not 0 <= number < h:
                raise bad_value(
                    attention.name,
                    expected=f"head numbers from 0 to {h - 1}",
                    received=number,
                    remedy="numbers are those of the heads that are there now",
                )
        if len(removed) == h:
            raise bad_value(
                attention.name,
                expected="at least one head to stay",
                received=f"all {h}",
                remedy="leave one, or take the attention out of the model",
            )
        self.attention, self.removed = attention, removed
        queries = [head for head in range(h) if head not in set(removed)]
        self.kept: dict[HeadKind, list[int]] = {"query": queries, "kv": _kept_kv_heads(queries, h // g)}
        self.counts: dict[HeadKind, int] = {kind: len(kept) for kind, kept in self.kept.items()}

    def warn_if_kv_heads_grow(self) -> None:
        before, after = self.attention.counts["kv"], self.counts["kv"]
        if after > before:
            warnings.warn(
                f"regard.prune: {self.attention.name}: {after} kv heads instead of {before}, because different numbers "
                "of query heads are left in the groups; remove as many from each group",
                stacklevel=3,
            )

    def set_numbers(self) -> None:
        """Set the numbers that the module keeps."""
        for size in self.attention.sizes:
            if size.axis is None:
                setattr(size.owner, size.name, size.expected(self.counts))
        projecting = self.attention.projecting
        if "num_key_value_groups" in vars(projecting):
            projecting.num_key_value_groups = self.counts["query"] // self.counts["kv"]  # type: ignore[assignment]

    def set_bias_table(self, tables: dict[tuple[int, tuple[int, ...]], tuple[nn.Module, nn.Module]]) -> None:
        """Replace the bias table by a smaller one; modules that shared a table and keep the same heads share the new.

        `tables` keeps the old tables as well as the new ones, so that no id is reused meanwhile.
        """
        table, queries = self.attention.bias_table, self.kept["query"]
        if table is None:
            return
        key = (id(table), tuple(queries))
        if key not in tables:
            tables[key] = table, _smaller_bias_table(table, queries)
        self.attention.projecting.position_encoding = tables[key][1]


def _kept_kv_heads(queries: list[int], group: int) -> list[int]:
    """The kv heads that the remaining query heads need, in order, each as often as makes groups of one size.

    A group serves query heads of one kv head, so its size divides the number of query heads left for each.

    >>> _kept_kv_heads([0, 1, 2, 3], 2), _kept_kv_heads([0, 2], 2), _kept_kv_heads([2, 3], 2)
    ([0, 1], [0, 1], [1])
    >>> _kept_kv_heads([0, 1, 4, 5, 6, 7], 4), _kept_kv_heads([0, 1, 2, 4], 4)
    ([0, 1, 1], [0, 0, 0, 1])
    """
    left = Counter(head // group for head in queries)
    size = math.gcd(*left.values())
    return [kv for kv, count in left.items() for _ in range(count // size)]


def _smaller_bias_table(table: nn.Module, queries: list[int]) -> nn.Module:
    """A copy of a module of biases with these heads alone."""
    new = copy.deepcopy(table)
    if isinstance(new, Alibi):
        learned = new.slopes.requires_grad
        new.slopes = new.slopes.detach()[queries].requires_grad_(learned)
        if new._exact is not None:
            new._exact = [new._exact[head] for head in queries]
    else:
        assert isinstance(new, RelativeBias)
        new.weight = nn.Parameter(new.weight.detach()[:, queries], requires_grad=new.weight.requires_grad)
    return new


class _ParameterEdit(NamedTuple):
    """A parameter to be cut: the axis, the indices that stay, and all (module, name) that hold it."""

    parameter: nn.Parameter
    axis: int
    indices: Tensor
    holders: list[tuple[nn.Module, str]]


def _parameter_edits(model: nn.Module, cuts: list[_Cut]) -> list[_ParameterEdit]:
    """Each parameter to be cut, once; raises if modules that share one do not agree on how to cut it."""
    edits: dict[int, _ParameterEdit] = {}
    cut_by: dict[int, set[int]] = {}  # parameter id -> ids of the attention modules that cut it
    for cut in cuts:
        for size in cut.attention.sizes:
            if size.axis is None:
                continue
            parameter = getattr(size.owner, size.name)
            indices = size.kept_indices(cut.attention.counts, cut.kept)
            edit = edits.setdefault(id(parameter), _ParameterEdit(parameter, size.axis, indices, []))
            if edit.axis != size.axis or not torch.equal(indices, edit.indices):
                raise _shared_weight(cut.attention.name, size.name)
            edit.holders.append((size.owner, size.name))
            cut_by.setdefault(id(parameter), set()).add(id(cut.attention.module))

    ancestors: dict[str, set[int]] = {}  # path -> ids of the module there and of those around it
    for path, module in model.named_modules(remove_duplicate=False):
        ancestors[path] = {id(module)} | (ancestors[path.rpartition(".")[0]] if path else set())
        for name, parameter in module._parameters.items():
            if id(parameter) in cut_by and not cut_by[id(parameter)] & ancestors[path]:
                raise _shared_weight(f"{path}.{name}" if path else name, name)
    return list(edits.values())


def _apply(cuts: list[_Cut], edits: list[_ParameterEdit]) -> None:
    """All checks passed. Edit in place, outside autograd and inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        tables: dict[tuple[int, tuple[int, ...]], tuple[nn.Module, nn.Module]] = {}
        for cut in cuts:
            cut.set_numbers()
            cut.set_bias_table(tables)
        while edits:  # one by one, so that the memory of each old parameter is freed at once
            parameter, axis, indices, holders = edits.pop()
            kept = parameter.detach().index_select(axis, indices.to(parameter.device))
            kept = nn.Parameter(kept, requires_grad=parameter.requires_grad)
            for owner, name in holders:
                setattr(owner, name, kept)


def _shared_weight(where: str, name: str) -> ValueError:
    return bad_value(
        where,
        expected="the same heads to go wherever a weight is shared",
        received=f"{name}, which is used elsewhere too",
        remedy="prune the same heads there, or give each a copy of its own",
    )
