"""Remove attention heads for good: smaller projections, the same answer as with those heads' outputs set to zero.

Heads lie side by side in the weights. To remove one is to remove its rows and columns::

    q_proj  (H * D, W)   rows          k_proj (G * D, W), v_proj (G * E, W)   rows, once no query head needs them
    out_proj (W, H * E)  columns       sinks, slopes, bias tables             one number, or one column, per head

So an attention module is read as a list of sizes that count heads (`_Sized`): which axis of which parameter, and which
numbers that the module keeps. Whatever reads so can be pruned; to add a kind of attention is to write one reader.

Letters: H query heads, G kv heads, D head width of q and k, E of v, W model width.
"""

from __future__ import annotations

import copy
import difflib
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.ablate import Head, by_layer, head_numbers, is_heads
from regard.layer import MultiHeadAttention
from regard.layouts.swap import SplitAttention, SwappedAttention
from regard.positions import Alibi, RelativeBias, Rotary

__all__ = ["prune"]

Model = TypeVar("Model", bound=nn.Module)
Which = Literal["query", "kv"]


def prune(model: Model, heads: Iterable[int] | Mapping[Any, Iterable[int]] | Iterable[Head]) -> Model:
    """Remove attention heads for good, in place; the model is returned.

    It then computes what it would with the outputs of those heads set to zero before the output projection, with fewer
    parameters and in less time. Everything is checked before anything is changed.

    Args:
        model: an attention module, or any module with some in it. Give the outermost one: what shares weights can be
            seen from there alone. It may hold `regard.MultiHeadAttention`, what `regard.swap` made, or attention of
            Hugging Face transformers with separate projections (BERT, RoBERTa, DistilBERT, ViT, Llama, ...) or GPT-2's.
        heads: numbers of the heads that go, where there is one attention module; else a dict of them, by the name of
            the attention module or by its number among the attention modules, in module order; or heads one by one, as
            `seen.roles().of("first")` gives them.

    Numbers are those of the heads that are there now, so that pruning twice is possible.

    Grouped kv heads: a kv head goes with the last query head that needs it. Groups have to be of one size; where as
    many query heads are left in each of them, that is so. Where not, kv heads are repeated, as few times as is exact:
    of groups of 2 and 4 query heads, the second becomes two groups of 2, with the same keys and values. Where this
    makes more kv heads than there were, there is a warning, for caches grow and time is lost: remove as many heads from
    each group. In training, repeated kv heads learn apart.

    Parameters are new ones: give them to a new optimizer, and begin with new caches. Layers that share a table of
    biases (`RelativeBias`, `Alibi`) keep sharing it where they keep the same heads; else each has its part.

    To load a pruned model, prune a fresh one of the same configuration in the same way, then `load_state_dict`. So with
    Hugging Face too: configurations are left as they are and cannot say what was pruned, so `from_pretrained` does not
    take what `save_pretrained` writes.

    >>> layer = MultiHeadAttention(10, num_heads=5)
    >>> x = torch.randn(2, 7, 10)
    >>> prune(layer, [0, 3])
    MultiHeadAttention(
      10, num_heads=3, head_dim=2
      (q_proj): Linear(in_features=10, out_features=6, bias=True)
      (k_proj): Linear(in_features=10, out_features=6, bias=True)
      (v_proj): Linear(in_features=10, out_features=6, bias=True)
      (out_proj): Linear(in_features=6, out_features=10, bias=True)
    )
    >>> layer(x).shape
    torch.Size([2, 7, 10])
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="an nn.Module", received=type(model).__name__)
    cuts = [_Cut(_read(name, whole), gone) for name, whole, gone in _chosen(model, heads)]
    cuts = [cut for cut in cuts if cut.gone]
    new = _new_parameters(model, cuts)
    for cut in cuts:
        cut.warn_where_kv_heads_grow()

    # From here on nothing can be wrong. Neither will autograd see it, nor are weights born for inference alone.
    with torch.inference_mode(False), torch.no_grad():
        tables: dict[tuple[int, tuple[int, ...]], tuple[nn.Module, nn.Module]] = {}
        for cut in cuts:
            cut.change_numbers()
            cut.change_table(tables)
        while new:  # one by one, so that what is cut is free as soon as it is
            parameter, axis, index, places = new.pop()
            kept = parameter.detach().index_select(axis, index.to(parameter.device))
            kept = nn.Parameter(kept, requires_grad=parameter.requires_grad)
            for owner, name in places:
                setattr(owner, name, kept)
    return model


# ----------------------------------------------------------------------------------------------------
# What was asked for


def _chosen(
    model: nn.Module, heads: Iterable[int] | Mapping[str | int, Iterable[int]] | Iterable[Head]
) -> Iterator[tuple[str, nn.Module, list[int]]]:
    """The name, the attention module and the head numbers of each that was asked for."""
    names = _attention_modules(model)
    wholes = {id(whole): whole for whole in names.values()}  # one for each, in module order
    first = {id(whole): name for name, whole in reversed(names.items())}
    if not wholes:
        raise bad_value(
            "model",
            expected="attention in it, each with its output projection",
            received=type(model).__name__,
            remedy="the module around it, if this is a part of one; regard.layouts.load makes a MultiHeadAttention "
            "of the weights of any other",
        )
    if isinstance(heads, (list, tuple)) and is_heads(list(heads)):
        heads = by_layer(heads)  # type: ignore[arg-type]
    if not isinstance(heads, Mapping):
        if len(wholes) > 1:
            raise bad_type(
                "heads",
                expected=f"a dict, for there are {len(wholes)} attention modules",
                received=type(heads).__name__,
                remedy=f"{{{next(iter(names))!r}: [...]}}, or by number in module order",
            )
        heads = {0: heads}

    asked: dict[int, str | int] = {}
    for key, gone in heads.items():
        if isinstance(key, bool) or not isinstance(key, (str, Integral)):
            raise bad_type("heads", expected="names or numbers of attention modules as keys", received=repr(key))
        if isinstance(key, str):
            if key not in names:
                raise _unknown(key, names)
            whole = names[key]
        else:
            if not 0 <= int(key) < len(wholes):
                raise bad_value(
                    "heads", expected=f"attention modules from 0 to {len(wholes) - 1}, in module order", received=key
                )
            whole = list(wholes.values())[int(key)]
        if id(whole) in asked:
            raise bad_value(
                "heads",
                expected="each attention module once",
                received=f"{asked[id(whole)]!r} and {key!r}, which are the same",
                remedy="one list for both",
            )
        asked[id(whole)] = key
        name = first[id(whole)] or type(whole).__name__
        yield name, whole, head_numbers(name, gone)


def _unknown(key: str, names: dict[str, nn.Module]) -> ValueError:
    """The error for a name that no attention module has, with those that it may have been meant to be."""
    near = difflib.get_close_matches(key, names, n=2)
    some = ", ".join(map(repr, list(names)[:3])) + (", ..." if len(names) > 3 else "")
    return bad_value(
        "heads",
        expected="names of attention modules",
        received=repr(key),
        remedy=f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {some}",
    )


# ----------------------------------------------------------------------------------------------------
# What attention is made of


class _Sized(NamedTuple):
    """A size that counts heads: that of a parameter along an axis, or a number that a module keeps (axis None).

    It is a sum of runs, side by side: all query heads or all kv heads, each so wide. The rows of GPT-2's q, k and v in
    one are (("query", D), ("kv", D), ("kv", D)).
    """

    owner: nn.Module
    name: str
    axis: int | None
    runs: tuple[tuple[Which, int], ...]

    @property
    def now(self) -> int:
        value = getattr(self.owner, self.name)
        return value if self.axis is None else value.shape[self.axis]

    def of(self, counts: Mapping[Which, int]) -> int:
        """The size for so many heads."""
        return sum(counts[which] * width for which, width in self.runs)

    def rows_of(self, counts: Mapping[Which, int], kept: Mapping[Which, list[int]]) -> Tensor:
        """Which rows are those of the kept heads."""
        rows, start = [], 0
        for which, width in self.runs:
            rows += [start + head * width + i for head in kept[which] for i in range(width)]
            start += counts[which] * width
        return torch.tensor(rows, device="cpu")


@dataclass
class _Attention:
    """An attention module as a list of sizes.

    Attributes:
        name: for messages.
        whole: as it was found in the model; `core`: the part of it that keeps the numbers of heads.
        head_dim: D.
        counts: H and G.
        sized: all that counts heads.
        table: the module of biases with one per head, `position_encoding` of `core`; None if there is none.
    """

    name: str
    whole: nn.Module
    core: nn.Module
    head_dim: int
    counts: dict[Which, int]
    sized: list[_Sized] = field(default_factory=list)
    table: nn.Module | None = None

    def add_rows(self, linear: nn.Module | None, *runs: tuple[Which, int]) -> None:
        """A projection to heads: what comes out of it counts them."""
        axis, _, out = self._form(linear)
        assert linear is not None
        self.sized += [_Sized(linear, "weight", axis, runs), _Sized(linear, out, None, runs)]
        if linear._parameters["bias"] is not None:
            self.sized.append(_Sized(linear, "bias", 0, runs))

    def add_columns(self, linear: nn.Module | None, *runs: tuple[Which, int]) -> None:
        """A projection from heads: what goes into it counts them."""
        axis, into, _ = self._form(linear)
        assert linear is not None
        self.sized += [_Sized(linear, "weight", 1 - axis, runs), _Sized(linear, into, None, runs)]

    def add_numbers(self, names: Iterable[str], *runs: tuple[Which, int]) -> None:
        """What the module itself keeps, under those of the names that it has."""
        self.sized += [_Sized(self.core, name, None, runs) for name in names if name in vars(self.core)]

    def add_parameter(self, name: str, axis: int, *runs: tuple[Which, int]) -> None:
        """A parameter of the module itself, where it has it."""
        if self.core._parameters.get(name) is not None:
            self.sized.append(_Sized(self.core, name, axis, runs))

    def _form(self, linear: nn.Module | None) -> tuple[int, str, str]:
        """Where the weight of a plain projection has its outputs, and what it calls the sizes of input and output."""
        if linear is not None and not linear._buffers and not linear._modules:
            names = set(linear._parameters) == {"weight", "bias"}
            if names and isinstance(linear, nn.Linear):
                return 0, "in_features", "out_features"
            if names and _is_conv1d(linear):
                return 1, "nx", "nf"
        raise bad_type(
            self.name,
            expected="projections that are plain nn.Linear",
            received=type(linear).__name__,
            remedy="undo what wraps them: merge adapters, remove parametrisations, prune before quantising",
        )

    def check(self) -> None:
        """Raise where there is something that is not understood."""
        h, g = self.counts["query"], self.counts["kv"]
        for sized in self.sized:
            if sized.axis is not None and type(getattr(sized.owner, sized.name)) is not nn.Parameter:
                raise bad_type(
                    self.name,
                    expected="weights that are plain parameters",
                    received=f"{sized.name}: {type(getattr(sized.owner, sized.name)).__name__}",
                    remedy="prune before quantising, sharding or the first call of a lazy module",
                )
            if sized.now != sized.of(self.counts):
                path = next(path for path, module in self.whole.named_modules() if module is sized.owner)
                raise bad_value(
                    self.name,
                    expected=f"{h} heads of width {self.head_dim} and {g} kv heads, "
                    f"so {'.'.join(filter(None, (path, sized.name)))} of {sized.of(self.counts)}",
                    received=sized.now,
                )
        if h % g:
            raise bad_value(self.name, expected="as many query heads for each kv head", received=f"{h} for {g}")
        for path, parameter in self._others():
            raise bad_value(
                self.name,
                expected="projections, and norms over one head, alone",
                received=f"a parameter {path!r} {tuple(parameter.shape)} beside them, which may be of all heads",
            )
        for name, buffer in self.core._buffers.items():
            if buffer is not None and h > 1 and h in buffer.shape:
                raise bad_value(
                    self.name,
                    expected="no buffers with one number per head",
                    received=f"{name!r} {tuple(buffer.shape)}, for {h} heads",
                )

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of which it is not known that heads can go without a change to them."""
        known = {(id(sized.owner), sized.name) for sized in self.sized if sized.axis is not None}
        projections = {id(sized.owner) for sized in self.sized} - {id(self.core)}
        for path, module in self.core.named_modules(remove_duplicate=False):
            if module is self.table:
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or (id(module), name) in known or (id(module) in projections and name == "bias"):
                    continue
                # A norm over one head serves all heads; BERT's kin have one after the output projection, LayerNorm.
                over_head = "." not in path and "norm" in path and tuple(parameter.shape) == (self.head_dim,)
                if not over_head and path != "LayerNorm":
                    yield f"{path}.{name}" if path else name, parameter


# ----------------------------------------------------------------------------------------------------
# Readers, one for each kind of attention

_QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
_OUT = ("o_proj", "out_proj", "out_lin", "dense")
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_kv_heads", "num_key_value_heads")
_ALL_WIDTHS = ("all_head_size", "split_size", "inner_dim")


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All attention modules by every name that they go by, in module order."""
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        core = _core(module)
        if core is None or name in names:
            continue
        names[name] = module
        for child, inner in module._modules.items():
            if inner is core:
                names[f"{name}.{child}" if name else child] = module
    return names


def _core(module: nn.Module) -> nn.Module | None:
    """The part of an attention module that has the projections to heads; None where it is no attention module."""
    if isinstance(module, SplitAttention):
        return module.layer
    if isinstance(module, (MultiHeadAttention, nn.MultiheadAttention)):
        return module
    children = module._modules
    if "c_attn" in children and "c_proj" in children:
        return module
    if _triple(module) and any(name in children for name in _OUT):
        return module
    output = children.get("output")
    for child in (children.get("self"), children.get("attention")):  # BERT: the output projection is beside it
        if child is not None and _triple(child) and _core(child) is None and output and "dense" in output._modules:
            return child
    return None


def _triple(module: nn.Module) -> tuple[str, str, str] | None:
    return next((names for names in _QKV if all(name in module._modules for name in names)), None)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, whose weight is (in, out)."""
    return all(isinstance(getattr(module, name, None), int) for name in ("nf", "nx"))


def _read(name: str, whole: nn.Module) -> _Attention:
    """An attention module as a list of sizes that count heads, understood as a whole, or an error."""
    core = _core(whole)
    if isinstance(core, MultiHeadAttention):
        attention = _read_layer(name, whole, core)
    elif isinstance(core, SwappedAttention):
        attention = _read_swapped(name, core)
    elif isinstance(core, nn.MultiheadAttention):
        plain = type(core) is nn.MultiheadAttention
        raise bad_type(
            name,
            expected="attention that can have fewer heads than fill its width",
            received=f"{type(core).__name__} of torch" if plain else f"{type(core).__name__}, with code of its own",
            remedy="regard.swap(model), then prune" if plain else "a regard.MultiHeadAttention in its place",
        )
    else:
        assert core is not None
        attention = _read_hugging_face(name, whole, core)
    attention.check()
    return attention


def _read_layer(name: str, whole: nn.Module, layer: MultiHeadAttention) -> _Attention:
    d, e = layer.head_dim, layer.value_head_dim
    counts: dict[Which, int] = {"query": layer.num_heads, "kv": layer.num_kv_heads}
    attention = _Attention(name, whole, layer, d, counts)
    attention.add_rows(layer.q_proj, ("query", d))
    attention.add_rows(layer.k_proj, ("kv", d))
    attention.add_rows(layer.v_proj, ("kv", e))
    attention.add_columns(layer.out_proj, ("query", e))
    attention.add_parameter("sinks", 0, ("query", 1))
    attention.add_numbers(("num_heads",), ("query", 1))
    attention.add_numbers(("num_kv_heads",), ("kv", 1))
    table = layer.position_encoding
    if isinstance(table, (Alibi, RelativeBias)):
        per_head = table.slopes.shape[0] if isinstance(table, Alibi) else table.weight.shape[1]
        if per_head != layer.num_heads:
            raise bad_value(name, expected=f"a position_encoding of {layer.num_heads} heads", received=per_head)
        attention.table = table
    elif table is not None and not isinstance(table, Rotary):
        raise bad_type(
            name, expected="position_encoding: Rotary, Alibi, RelativeBias or None", received=type(table).__name__
        )
    return attention


def _read_swapped(name: str, module: SwappedAttention) -> _Attention:
    d = module.head_dim
    attention = _Attention(name, module, module, d, {"query": module.num_heads, "kv": module.num_heads})
    attention.add_parameter("in_proj_weight", 0, ("query", d), ("kv", d), ("kv", d))
    attention.add_parameter("q_proj_weight", 0, ("query", d))
    attention.add_parameter("k_proj_weight", 0, ("kv", d))
    attention.add_parameter("v_proj_weight", 0, ("kv", d))
    attention.add_parameter("in_proj_bias", 0, ("query", d), ("kv", d), ("kv", d))
    attention.add_parameter("bias_k", 2, ("kv", d))
    attention.add_parameter("bias_v", 2, ("kv", d))
    attention.add_columns(module.out_proj, ("query", d))
    attention.add_numbers(("num_heads",), ("query", 1))
    return attention


def _read_hugging_face(name: str, whole: nn.Module, core: nn.Module) -> _Attention:
    d = vars(core).get("head_dim", vars(core).get("attention_head_size"))
    # Those who have `is_causal` give q, k and v to one of the library's attention functions, of which the configuration
    # has the name, and in which heads know nothing of each other. Others (sparse, hashed, low-rank) are each their own.
    common = "is_causal" in vars(core) and hasattr(vars(core).get("config"), "_attn_implementation")
    if type(d) is not int or d < 1 or not common:
        raise bad_type(
            name,
            expected="attention of transformers that is computed by its common functions (with head_dim and is_causal)",
            received=type(core).__name__,
            remedy="regard.layouts.load makes a MultiHeadAttention of the weights of many others",
        )
    if vars(core).get("is_kv_shared_layer") or vars(core).get("store_full_length_kv"):
        raise bad_value(name, expected="keys and values of its own", received="some that layers share")
    attention = _Attention(name, whole, core, d, {"query": 1, "kv": 1})
    if "c_attn" in core._modules:
        _add_gpt2(attention, d)
    else:
        _add_separate(attention, d)
    attention.add_parameter("sinks", 0, ("query", 1))
    attention.add_numbers(_QUERY_HEADS, ("query", 1))
    attention.add_numbers(_KV_HEADS, ("kv", 1))
    attention.add_numbers(_ALL_WIDTHS, ("query", d))
    h, g = attention.counts["query"], attention.counts["kv"]
    groups = vars(core).get("num_key_value_groups", 1)
    if g * groups != h:
        raise bad_value(name, expected=f"{h} query heads in groups for {g} kv heads", received=f"groups of {groups}")
    return attention


def _add_gpt2(attention: _Attention, d: int) -> None:
    """q, k and v in one; in cross attention k and v, and q beside them."""
    children = attention.core._modules
    across, joint, out = children.get("q_attn"), children["c_attn"], children["c_proj"]
    for linear in (joint, out):
        if linear is None or not _is_conv1d(linear):  # others of the same name have their heads in another order
            raise bad_type(
                attention.name, expected="c_attn and c_proj as GPT-2 has them, Conv1D", received=type(linear).__name__
            )
    count = max(1, getattr(out, "nx", 0) // d)
    attention.counts = {"query": count, "kv": count}
    if across is None:
        attention.add_rows(joint, ("query", d), ("kv", d), ("kv", d))
    else:
        attention.add_rows(across, ("query", d))
        attention.add_rows(joint, ("kv", d), ("kv", d))
    attention.add_columns(out, ("query", d))


def _add_separate(attention: _Attention, d: int) -> None:
    """q, k and v by themselves; the output projection with them, or beside them as `output.dense`."""
    children = attention.core._modules
    names = _triple(attention.core)
    assert names is not None
    q, k, v = (children[name] for name in names)
    out = next((children[name] for name in _OUT if name in children), None)
    if out is None:
        output = attention.whole._modules["output"]
        out = None if output is None else output._modules["dense"]
    g = max(1, getattr(k, "out_features", 0) // d)
    e = getattr(v, "out_features", 0) // g
    attention.counts = {"query": max(1, getattr(q, "out_features", 0) // d), "kv": g}
    attention.add_rows(q, ("query", d))
    attention.add_rows(k, ("kv", d))
    attention.add_rows(v, ("kv", e))
    attention.add_columns(out, ("query", e))


# ----------------------------------------------------------------------------------------------------
# What is cut


class _Cut:
    """One attention module and what stays of it."""

    def __init__(self, attention: _Attention, gone: list[int]) -> None:
        h, g = attention.counts["query"], attention.counts["kv"]
        for number in gone:
            if not 0 <= number < h:
                raise bad_value(
                    attention.name,
                    expected=f"head numbers from 0 to {h - 1}",
                    received=number,
                    remedy="numbers are those of the heads that are there now",
                )
        if len(gone) == h:
            raise bad_value(
                attention.name,
                expected="at least one head to stay",
                received=f"all {h}",
                remedy="leave one, or take the attention out of the model",
            )
        self.attention, self.gone = attention, gone
        queries = [head for head in range(h) if head not in set(gone)]
        self.kept: dict[Which, list[int]] = {"query": queries, "kv": _kv_heads(queries, h // g)}
        self.counts: dict[Which, int] = {which: len(kept) for which, kept in self.kept.items()}

    def warn_where_kv_heads_grow(self) -> None:
        before, after = self.attention.counts["kv"], self.counts["kv"]
        if after > before:
            warnings.warn(
                f"regard.prune: {self.attention.name}: {after} kv heads in the place of {before}, for the query heads "
                "that are left are not as many in each group; remove as many from each",
                stacklevel=3,
            )

    def change_numbers(self) -> None:
        """Set what modules keep in numbers."""
        for sized in self.attention.sized:
            if sized.axis is None:
                setattr(sized.owner, sized.name, sized.of(self.counts))
        core = self.attention.core
        if "num_key_value_groups" in vars(core):
            core.num_key_value_groups = self.counts["query"] // self.counts["kv"]  # type: ignore[assignment]

    def change_table(self, made: dict[tuple[int, tuple[int, ...]], tuple[nn.Module, nn.Module]]) -> None:
        """A smaller table of biases in the place of the old one, which others may have: the same for the same heads.

        `made` keeps the old ones as well as the new, lest an id be given out again.
        """
        table, queries = self.attention.table, self.kept["query"]
        if table is None:
            return
        key = (id(table), tuple(queries))
        if key not in made:
            made[key] = table, _table_of(table, queries)
        self.attention.core.position_encoding = made[key][1]


def _kv_heads(queries: list[int], group: int) -> list[int]:
    """The kv heads that the query heads left need, in order, each as often as makes groups of one size.

    A group may serve query heads of one kv head alone, so its size divides how many are left of each.

    >>> _kv_heads([0, 1, 2, 3], 2), _kv_heads([0, 2], 2), _kv_heads([2, 3], 2)
    ([0, 1], [0, 1], [1])
    >>> _kv_heads([0, 1, 4, 5, 6, 7], 4), _kv_heads([0, 1, 2, 4], 4)
    ([0, 1, 1], [0, 0, 0, 1])
    """
    left = Counter(head // group for head in queries)
    size = math.gcd(*left.values())
    return [kv for kv, count in left.items() for _ in range(count // size)]


def _table_of(table: nn.Module, queries: list[int]) -> nn.Module:
    """A copy of a module of biases with those heads alone."""
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


Places = list[tuple[nn.Module, str]]


def _new_parameters(model: nn.Module, cuts: list[_Cut]) -> list[tuple[nn.Parameter, int, Tensor, Places]]:
    """Each parameter that is cut: along which axis, what stays, and where it is. One that is in several places stays
    one; where they do not agree, that is an error."""
    found: dict[int, tuple[nn.Parameter, int, Tensor, Places]] = {}
    by: dict[int, set[int]] = {}  # which attention modules cut it
    for cut in cuts:
        for sized in cut.attention.sized:
            if sized.axis is None:
                continue
            parameter = getattr(sized.owner, sized.name)
            index = sized.rows_of(cut.attention.counts, cut.kept)
            _, axis, other, places = found.setdefault(id(parameter), (parameter, sized.axis, index, []))
            if axis != sized.axis or not torch.equal(index, other):
                raise _shared(cut.attention.name, sized.name)
            places.append((sized.owner, sized.name))
            by.setdefault(id(parameter), set()).add(id(cut.attention.whole))

    above: dict[str, set[int]] = {}  # the modules on the way to each
    for path, module in model.named_modules(remove_duplicate=False):
        above[path] = {id(module)} | (above[path.rpartition(".")[0]] if path else set())
        for name, parameter in module._parameters.items():
            if id(parameter) in by and not by[id(parameter)] & above[path]:
                raise _shared(f"{path}.{name}" if path else name, name)
    return list(found.values())


def _shared(where: str, name: str) -> ValueError:
    return bad_value(
        where,
        expected="the same heads to go wherever a weight is shared",
        received=f"{name}, which is used elsewhere too",
        remedy="prune the same heads there, or give each a copy of its own",
    )
