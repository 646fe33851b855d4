"""Which heads speak for the next token: what each adds to its logit directly, by way of the residual stream alone.

A decoder adds what every head gives to one stream, normalises the stream at the end and multiplies it with the
vocabulary. With the scale of each norm on that way held fixed this is a sum, and each head has its share of it:

    logit = sum over heads of z_h W_h . d + what everything else adds,    d = norm's weight * the target's row / scale

Nothing of this is taken from a model's name. One forward shows what every module was given and what it gave at the
token that is asked about: from these numbers it is found how the layers add to the stream, by which norms and factors,
and where they do not add up exactly the model is refused.

Letters: H heads, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.record.record import LayerRecord
from regard.heads.record.table import PerHead, Table
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating
from regard.models.base import tokenizing

__all__ = ["Attribution", "attribution"]


@dataclass(repr=False)
class Attribution(PerHead):
    """`scores[layer]` (H,) is what each head adds to the logit of `target`; `rest` what everything else adds. Where the
    model caps its logits, `logit` is that before the cap: the model's own is softcap * tanh(logit / softcap)."""

    rest: float
    logit: float
    target: int
    softcap: float | None = None

    def table(self) -> Table:
        """A row for each head, the largest share first."""
        rows = sorted(self.rows(), key=lambda row: -abs(row[2]))
        return Table(({"layer": layer, "head": head, "adds": s} for layer, head, s in rows), self.scores)

    def caption(self) -> str:
        """The logit, and how much of it is not the heads'."""
        capped = "" if self.softcap is None else f" before the cap of {self.softcap:g}"
        said = f"logit {self.logit:.3f} of token {self.target}{capped}"
        return f"{said}, of which {self.rest:.3f} is not the heads'"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table()[:10])}"


def attribution(
    model: nn.Module, text: str | Tensor, target: str | int | None = None, *, tokenizer: Any = None, position: int = -1
) -> Attribution:
    """Each head's direct contribution to the logit of a token.

    Args:
        model: a decoder: regard's, or one of transformers, whose layers add to one stream: as they are (GPT-2, NeoX,
            Llama ...), scaled (Granite), or after a norm (OLMo 2, GLM 4, Gemma 2 and 3). Others are refused.
        text: a text, or token ids (N,) or (1, N).
        target: the token, as a text or a number; by default the likeliest one.
        tokenizer: for texts, where the model has none of its own.
        position: at which token of the text the next one is asked for; at the last by default.
    """
    unembedding = _unembedding(model)
    ids = _ids(model, text, tokenizer)
    if isinstance(position, bool) or not isinstance(position, int) or not -len(ids) <= position < len(ids):
        raise bad_value("position", expected=f"one of {len(ids)} tokens", received=repr(position))
    run = _Run(model, unembedding, len(ids), position)
    with evaluating(model), torch.no_grad(), run, watch(model, measures=[], keep="qkv") as seen:
        out = model(ids[None])
    logits = (out if isinstance(out, Tensor) else out.logits)[0, position].double()
    number = _target(model, target, tokenizer, logits)
    layers = [layer for layer in seen if layer.kind == "self"]
    parts = {layer.name: _parts(layer, position) for layer in layers}  # (H, W) and the bias (W,) of each
    with evaluating(model), torch.no_grad():
        blocks = _blocks(model, run, layers, parts)
        direction, constant, softcap = _end(model, run, blocks[-1].gave, logits, number)
        logit = float(blocks[-1].gave @ direction) + constant
        scores: dict[str, Tensor] = {}
        passed = 1.0  # how much of the stream after a layer is in the last one's
        for block in reversed(blocks):
            for name, (factor, norm) in block.added.items():
                heads = parts[name][0] if norm is None else norm.linear(parts[name][0])
                scores[name] = (heads @ direction * factor * passed).float()
            passed *= block.passes
    scores = {layer.name: scores[layer.name] for layer in layers}
    return Attribution(scores, logit - sum(s.sum().item() for s in scores.values()), logit, number, softcap)


def _parts(layer: LayerRecord, position: int) -> tuple[Tensor, Tensor]:
    """What each head gives at a token, through its slice of the output projection, (H, W), and the bias (W,)."""
    if layer.why_not_projected():
        raise bad_value(
            layer.name,
            expected="an output projection of (W, H * E)",
            received=layer.why_not_projected(),
            remedy="regard.models.load, for a model that it knows",
        )
    assert layer.projection is not None
    weight, bias = layer.projection
    entered = layer.entered[0, :, position].double()  # (H, E)
    heads = torch.einsum("he,whe->hw", entered, weight.double().unflatten(1, tuple(entered.shape)))
    return heads, heads.new_zeros(heads.shape[1]) if bias is None else bias.double()


# What every module was given and what it gave, at one token


@dataclass
class _Step:
    """One call of a module: when it began and ended, and the numbers (W,) of the token that it was given and gave."""

    module: nn.Module
    began: int
    ended: int = -1
    entered: Tensor | None = None
    gave: Any = None


class _Run:
    """Within a `with` block: the calls of all modules of a model, in the order in which they began."""

    def __init__(self, model: nn.Module, unembedding: nn.Module, tokens: int, position: int) -> None:
        self.model, self.unembedding, self.tokens, self.position = model, unembedding, tokens, position
        self.width: int = unembedding.weight.shape[1]  # type: ignore[union-attr, index, assignment]
        self.steps: list[_Step] = []
        self.logits: Tensor | None = None  # (vocabulary,) what the last projection gave
        self.rounding = 1e-10  # of one operation, in the dtype of the stream (in float64 of several)
        self.open: list[_Step] = []
        self.clock = 0
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._end))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.clock += 1
        step = _Step(module, self.clock, entered=self._row((*args, *kwargs.values())))
        self.steps.append(step)
        self.open.append(step)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.clock += 1
        step = self.open.pop()
        assert step.module is module
        step.ended = self.clock
        if module is self.unembedding and isinstance(output, Tensor):
            self.logits = output.detach().reshape(-1, output.shape[-1])[self.position].double()
        else:
            step.gave = self._row(output if isinstance(output, (tuple, list)) else (output,))

    def _row(self, values: Sequence[Any]) -> Tensor | None:
        """The token's numbers (W,) in the first that has W for each token of the text."""
        for x in values:
            known = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.shape[-1] == self.width
            if known and x.numel() == self.tokens * self.width:
                self.rounding = max(self.rounding, torch.finfo(x.dtype).eps)
                return x.detach().reshape(self.tokens, self.width)[self.position].to(torch.float64, copy=True)
        return None

    def calls(self, module: nn.Module) -> list[_Step]:
        """Those of one module."""
        return [step for step in self.steps if step.module is module]

    def within(self, call: _Step) -> list[_Step]:
        """Those that one call made."""
        return [step for step in self.steps if call.began < step.began and step.ended < call.ended]

    def same(self, a: Tensor | None, b: Tensor | None) -> bool:
        """Whether two are one, but for rounding."""
        return a is not None and b is not None and bool((a - b).norm() <= 4 * self.rounding * a.norm())

    def factor(self, a: Tensor, b: Tensor) -> float | None:
        """The number f with b = f a; None where there is none. Exactly 1 where it is, but for rounding."""
        f = float(a @ b / (a @ a).clamp(min=1e-30))
        if not f or not bool((b - f * a).norm() <= 8 * self.rounding * b.norm()):
            return None
        return 1.0 if abs(f - 1) <= 8 * self.rounding else f


# Norms


@dataclass
class _Norm:
    """What a norm did to one token: gave = scale * weight * (x, less its mean where `centred`) + bias. Its scale, which
    depends on x, is held fixed: the rest is linear."""

    weight: Tensor  # (W,)
    bias: Tensor  # (W,)
    centred: bool
    scale: float

    def linear(self, x: Tensor) -> Tensor:
        """The linear part, of (..., W)."""
        return self.scale * self.weight * (x - x.mean(-1, keepdim=True) if self.centred else x)

    def transposed(self, d: Tensor) -> Tensor:
        """e with e . x = d . linear(x)."""
        e = self.scale * self.weight * d
        return e - e.mean() if self.centred else e

    @staticmethod
    def of(step: _Step, run: _Run) -> _Norm | None:
        """Found by probes: from what a norm makes of p and -p its bias and its weight can be told, whatever names they
        have there and whether 1 is added to them. None where the module is no norm."""
        if step.entered is None or step.gave is None:
            return None
        one = torch.ones_like(step.entered)
        signs = one.clone()
        signs[1::2] = -1
        dtype, device = next((p.dtype, p.device) for p in run.model.parameters())
        probes = torch.stack([one, -one, signs, -signs]).to(device, dtype)[None]
        try:
            out = step.module(probes)
        except (TypeError, RuntimeError, ValueError):
            return None  # it asks for more than one tensor
        if not isinstance(out, Tensor) or out.shape != probes.shape:
            return None
        up, down, zig, zag = out[0].to(one)
        odd, centred = (zig - zag) / 2, bool((up - down).abs().max() < 1e-2 * (zig - zag).abs().max())
        norm = _Norm(odd / (signs - signs.mean() if centred else signs), (zig + zag) / 2, centred, 1.0)
        scaled = norm.linear(step.entered)
        scale = float(scaled @ (step.gave - norm.bias) / (scaled @ scaled).clamp(min=1e-30))
        norm = _Norm(norm.weight, norm.bias, centred, scale)
        off = (norm.linear(step.entered) + norm.bias - step.gave).norm()
        return norm if bool(off <= 32 * max(run.rounding, 1e-7) * step.gave.norm()) else None


# From heads to the end of the stream


@dataclass
class _Block:
    """How one layer of the model goes on with the stream: gave = passes * entered + what was added. `added`: for each
    attention in it a factor, and the norm that its output goes through, if it does."""

    gave: Tensor
    passes: float
    added: dict[str, tuple[float, _Norm | None]]


def _blocks(
    model: nn.Module, run: _Run, layers: list[LayerRecord], parts: dict[str, tuple[Tensor, Tensor]]
) -> list[_Block]:
    """The layers of the model, from the first that attends to the last one."""
    calls: dict[str, _Step] = {}
    stacks: list[nn.Module] = []
    for layer in layers:
        name, _, number = layer.name.partition("#")
        calls[layer.name] = run.calls(model.get_submodule(name))[int(number or 0)]
        path = [model.get_submodule(".".join(name.split(".")[:i])) for i in range(name.count(".") + 2)]
        several = (nn.ModuleList, nn.Sequential)
        lists = [m for m, child in pairwise(path) if isinstance(m, several) and run.calls(child)]
        if not lists:
            raise bad_value("model", expected="layers in an nn.ModuleList, one after another", received=layer.name)
        stacks.append(lists[0])
    if any(stack is not stacks[0] for stack in stacks):
        raise bad_value("model", expected="one stack of layers that attend", received="several")
    children = {id(child) for child in stacks[0].children()}
    steps = [step for step in run.steps if id(step.module) in children]
    first = next(i for i, step in enumerate(steps) if step.ended > min(call.began for call in calls.values()))
    found: list[_Block] = []
    for before, step in zip([None, *steps[first:]], steps[first:], strict=False):
        if step.entered is None or step.gave is None:
            raise _no_sum(run, step, f"has not {run.width} numbers for each token, as the vocabulary has")
        if before is not None and not run.same(before.gave, step.entered):
            raise _no_sum(run, step, "is not what the layer before it gave")
        own = {name: call for name, call in calls.items() if step.began <= call.began and call.ended <= step.ended}
        found.append(_block(run, step, own, parts))
    return found


def _no_sum(run: _Run, step: _Step, how: str) -> ValueError:
    name = next((name for name, module in run.model.named_modules() if module is step.module), "")
    ways = "as it is, scaled, or after a norm"
    return bad_value(
        "model",
        expected=f"layers that add what their heads give to the stream: {ways}",
        received=f"{name} ({type(step.module).__name__}), whose stream {how}",
    )


def _block(run: _Run, step: _Step, calls: dict[str, _Step], parts: dict[str, tuple[Tensor, Tensor]]) -> _Block:
    """Find out how a layer goes on: the sum of the stream, of what its heads gave, and of one or two other modules."""
    assert step.entered is not None and step.gave is not None
    inside = run.within(step)
    # what each attention adds, and what a norm that is given it makes of it
    options: list[list[tuple[Tensor, _Norm | None]]] = []
    for name in calls:
        heads, bias = parts[name]
        whole = heads.sum(0) + bias
        ways: list[tuple[Tensor, _Norm | None]] = [(whole, None)]
        for other in inside:
            if other.gave is not None and run.same(whole, other.entered) and not run.same(whole, other.gave):
                norm = _Norm.of(other, run)
                ways += [] if norm is None else [(other.gave, norm)]
        options.append(ways)
    known = [x for ways in options for x, _ in ways]
    others: list[Tensor] = []
    for other in inside:
        around = any(other.began <= call.began and call.ended <= other.ended for call in calls.values())
        below = any(call.began < other.began and other.ended < call.ended for call in calls.values())
        if other.gave is None or around or below or any(run.same(other.gave, x) for x in (*known, *others)):
            continue
        others.append(other.gave)
    for free, count in product((False, True), range(3)):
        if free and run.rounding > 1e-5:
            break  # factors that are found by least squares would not be exact
        best: tuple[Tensor, Tensor, Any] | None = None
        for chosen, more in product(product(*options), combinations(others, count)):
            columns = torch.stack([step.entered, *(x for x, _ in chosen), *more], 1)
            factors = _factors(columns, step.gave) if free else columns.new_ones(columns.shape[1])
            if factors is None or bool((factors[: 1 + len(chosen)].abs() < 1e-4).any()):
                continue
            off = (columns @ factors - step.gave).norm() / (columns.norm(dim=0) @ factors.abs() + step.gave.norm())
            if best is None or off < best[0]:
                best = off, factors, chosen
        if best is not None and best[0] <= 4 * run.rounding:
            passes, *rest = best[1].tolist()
            added = {name: (f, norm) for name, f, (_, norm) in zip(calls, rest, best[2], strict=False)}
            return _Block(step.gave, passes, added)
    raise _no_sum(run, step, "is no sum of these")


def _factors(columns: Tensor, whole: Tensor) -> Tensor | None:
    """Least squares; None where the columns do not tell the factors apart."""
    size = columns.norm(dim=0)
    if bool((size == 0).any()):
        return None
    found = torch.linalg.lstsq(columns / size, whole[:, None], driver="gelsd")
    alike = int(found.rank) < columns.shape[1] or float(found.singular_values.min()) < 1e-3
    return None if alike else found.solution[:, 0] / size


# From the stream to a logit


def _end(model: nn.Module, run: _Run, x: Tensor, logits: Tensor, number: int) -> tuple[Tensor, float, float | None]:
    """d (W,) and c with logit = x . d + c for the stream x at its end, the scale of the last norm held fixed; and the
    softcap of the logits, if they have one."""
    last = run.calls(run.unembedding)
    if len(last) != 1 or last[0].entered is None or run.logits is None:
        raise bad_value("model", expected="one projection to the vocabulary at the end", received=f"{len(last)}")
    entered = last[0].entered
    norm, scaled = None, run.factor(x, entered)  # (a model without a last norm)
    for step in run.steps:
        if scaled is None and run.same(x, step.entered) and isinstance(step.gave, Tensor):
            scaled = run.factor(step.gave, entered)
            norm = None if scaled is None else _Norm.of(step, run)
            scaled = None if norm is None else scaled
    if scaled is None:
        raise bad_value("model", expected="a last norm between the stream and the vocabulary", received="none that ran")
    row = run.unembedding.weight[number].detach().double()  # type: ignore[union-attr, index]
    bias = getattr(run.unembedding, "bias", None)
    constant = 0.0 if bias is None else float(bias[number])
    softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    times = run.factor(run.logits, logits) if run.logits.shape == logits.shape else None
    if times is not None:
        softcap = None
    elif isinstance(softcap, (int, float)) and run.same(softcap * torch.tanh(run.logits / softcap), logits):
        times = 1.0
    direction = scaled * row
    if norm is not None:
        constant += float(norm.bias @ direction)
        direction = norm.transposed(direction)
    logit = (float(x @ direction) + constant) * (times or 1.0)
    wanted = float(run.logits[number]) * times if times is not None else float(logits[number])
    rounding = 64 * max(run.rounding, 1e-7) * (float(x.abs() @ direction.abs()) + abs(logit))
    if times is None or abs(logit - wanted) > rounding:
        raise bad_value(
            "model",
            expected="logits that are the normalised stream times the vocabulary",
            received=f"{float(logits[number]):.4f} where that is {logit:.4f}",
        )
    return direction * times, constant * times, softcap


def _unembedding(model: nn.Module) -> nn.Module:
    """The projection to the vocabulary."""
    get = getattr(model, "get_output_embeddings", None)
    unembedding = getattr(model, "head", None) if get is None else get()
    weight = getattr(unembedding, "weight", None)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or both:
        raise bad_value(
            "model",
            expected="a decoder with a last norm and a projection to the vocabulary",
            received=type(model).__name__,
            remedy="a language model, such as models.load('smollm2')",
        )
    assert isinstance(unembedding, nn.Module)
    return unembedding


def _ids(model: nn.Module, text: object, tokenizer: Any) -> Tensor:
    if isinstance(text, Tensor):
        ids = text[0] if text.dim() == 2 and text.shape[0] == 1 else text
        if ids.dim() != 1 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            raise bad_value(
                "text",
                expected="token ids (N,) or (1, N), one at least",
                received=f"{text.dtype} of shape {tuple(text.shape)}",
            )
        return ids
    if not isinstance(text, str):
        raise bad_type("text", expected="a text or token ids", received=type(text).__name__)
    ids = _encoded(model, text, tokenizer)
    if not ids:
        raise bad_value("text", expected="one token at least", received=repr(text))
    return torch.tensor(ids, device=next(model.parameters()).device)


def _encoded(model: nn.Module, text: str, tokenizer: Any, special: bool = True) -> list[int]:
    """The ids of a text; `special`: with the tokens that a tokenizer puts around it."""
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise bad_value("tokenizer", expected="one, for the model has none of its own", received="none")
    with tokenizing(text):
        encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(getattr(encoded, "ids", encoded))


def _target(model: nn.Module, target: str | int | None, tokenizer: Any, logits: Tensor) -> int:
    if target is None:
        return int(logits.argmax())
    if isinstance(target, str):
        ids = _encoded(model, target, tokenizer, special=False)
        if len(ids) != 1:
            raise bad_value(
                "target",
                expected="one token",
                received=f"{target!r}, which is {len(ids)}: {ids}",
                remedy="a token's number, or a text with its leading space",
            )
        return ids[0]
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < logits.numel():
        raise bad_value("target", expected=f"a token below {logits.numel()}", received=repr(target))
    return target
