"""How the layers of a decoder add to the residual stream, found from one forward at one token.

Hooks record the input and output of every module at that token. From these numbers follows how each layer continues the
stream: output = carry * input + what its attention adds (as it is, scaled, or through a norm) + other modules. If the
numbers do not add up exactly, the model is refused.

Letters: H heads, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.record.record import LayerRecord

__all__ = ["BlockSum", "LinearNorm", "TokenTrace", "block_sums", "logit_direction"]


@dataclass
class ModuleCall:
    """One call of a module: when it began and ended, and its input and output (W,) at the token."""

    module: nn.Module
    began: int
    ended: int = -1
    input: Tensor | None = None
    output: Any = None

    def contains(self, other: ModuleCall) -> bool:
        """Whether another call is this one or was made within it."""
        return self.began <= other.began and other.ended <= self.ended


class TokenTrace:
    """Within a `with` block, records the calls of all modules of a model at one token, in the order of their begin."""

    def __init__(self, model: nn.Module, unembedding: nn.Module, tokens: int, position: int) -> None:
        self.model, self.unembedding, self.tokens, self.position = model, unembedding, tokens, position
        self.width: int = unembedding.weight.shape[1]  # type: ignore[union-attr, index, assignment]
        self.calls: list[ModuleCall] = []
        self.logits: Tensor | None = None  # (vocabulary,) the output of the unembedding
        self.rounding = 1e-10  # relative error of one operation, in the dtype of the stream (float64: of several)
        self.open: list[ModuleCall] = []
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
        call = ModuleCall(module, self.clock, input=self._at_token((*args, *kwargs.values())))
        self.calls.append(call)
        self.open.append(call)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.clock += 1
        call = self.open.pop()
        assert call.module is module
        call.ended = self.clock
        if module is self.unembedding and isinstance(output, Tensor):
            self.logits = output.detach().reshape(-1, output.shape[-1])[self.position].double()
        else:
            call.output = self._at_token(output if isinstance(output, (tuple, list)) else (output,))

    def _at_token(self, values: Sequence[Any]) -> Tensor | None:
        """The row (W,) of the token in the first tensor that has W numbers for each token of the text."""
        for x in values:
            fits = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.shape[-1] == self.width
            if fits and x.numel() == self.tokens * self.width:
                self.rounding = max(self.rounding, torch.finfo(x.dtype).eps)
                return x.detach().reshape(self.tokens, self.width)[self.position].to(torch.float64, copy=True)
        return None

    def calls_of(self, module: nn.Module) -> list[ModuleCall]:
        """The calls of one module."""
        return [call for call in self.calls if call.module is module]

    def calls_within(self, outer: ModuleCall) -> list[ModuleCall]:
        """The calls that one call made."""
        return [call for call in self.calls if outer.began < call.began and call.ended < outer.ended]

    def same(self, a: Tensor | None, b: Tensor | None) -> bool:
        """Whether two vectors are equal, up to rounding."""
        return a is not None and b is not None and bool((a - b).norm() <= 4 * self.rounding * a.norm())

    def factor(self, a: Tensor, b: Tensor) -> float | None:
        """The number f with b = f a; None if there is none. Exactly 1 if it is 1 up to rounding."""
        f = float(a @ b / (a @ a).clamp(min=1e-30))
        if not f or not bool((b - f * a).norm() <= 8 * self.rounding * b.norm()):
            return None
        return 1.0 if abs(f - 1) <= 8 * self.rounding else f


@dataclass
class LinearNorm:
    """What a norm did to one token: output = scale * weight * (x, minus its mean if `centred`) + bias. The scale
    depends on x and is held fixed; the rest is linear."""

    weight: Tensor  # (W,)
    bias: Tensor  # (W,)
    centred: bool
    scale: float

    def linear(self, x: Tensor) -> Tensor:
        """The linear part, of (..., W)."""
        return self.scale * self.weight * (x - x.mean(-1, keepdim=True) if self.centred else x)

    def transposed(self, d: Tensor) -> Tensor:
        """e (..., W) with e . x = d . linear(x), of d (..., W)."""
        e = self.scale * self.weight * d
        return e - e.mean(-1, keepdim=True) if self.centred else e

    @staticmethod
    def of(call: ModuleCall, trace: TokenTrace) -> LinearNorm | None:
        """The norm of a call; None if the module is no norm. Its weight and bias are found by calling it with p and -p,
        so that neither their names matter nor whether 1 is added to the weight."""
        if call.input is None or call.output is None:
            return None
        ones = torch.ones_like(call.input)
        signs = ones.clone()
        signs[1::2] = -1
        dtype, device = next((p.dtype, p.device) for p in trace.model.parameters())
        probes = torch.stack([ones, -ones, signs, -signs]).to(device, dtype)[None]
        try:
            out = call.module(probes)
        except (TypeError, RuntimeError, ValueError):
            return None  # it takes more than one tensor
        if not isinstance(out, Tensor) or out.shape != probes.shape:
            return None
        of_ones, of_minus_ones, of_signs, of_minus_signs = out[0].to(ones)
        odd = (of_signs - of_minus_signs) / 2
        centred = bool((of_ones - of_minus_ones).abs().max() < 1e-2 * (of_signs - of_minus_signs).abs().max())
        weight = odd / (signs - signs.mean() if centred else signs)
        norm = LinearNorm(weight, (of_signs + of_minus_signs) / 2, centred, 1.0)
        unscaled = norm.linear(call.input)
        norm.scale = float(unscaled @ (call.output - norm.bias) / (unscaled @ unscaled).clamp(min=1e-30))
        error = (norm.linear(call.input) + norm.bias - call.output).norm()
        return norm if bool(error <= 32 * max(trace.rounding, 1e-7) * call.output.norm()) else None


@dataclass
class BlockSum:
    """How one layer of the model continues the stream: output = carry * input + what was added. `added`: for each
    attention in it a factor, and the norm that its output passes through, if any."""

    output: Tensor
    carry: float
    added: dict[str, tuple[float, LinearNorm | None]]


def block_sums(
    model: nn.Module, trace: TokenTrace, layers: list[LayerRecord], parts: dict[str, tuple[Tensor, Tensor]]
) -> list[BlockSum]:
    """The layers of the model, from the first that has attention to the last. `parts`: what each head of a layer adds,
    (H, W), and the bias (W,) of its output projection."""
    attention_calls = {layer.name: _attention_call(model, trace, layer.name) for layer in layers}
    stacks = [_stack_around(model, trace, layer.name) for layer in layers]
    if any(stack is not stacks[0] for stack in stacks):
        raise bad_value("model", expected="one stack of layers that attend", received="several")
    children = {id(child) for child in stacks[0].children()}
    calls = [call for call in trace.calls if id(call.module) in children]
    first_begin = min(call.began for call in attention_calls.values())
    calls = calls[next(i for i, call in enumerate(calls) if call.ended > first_begin) :]
    sums: list[BlockSum] = []
    for before, call in zip([None, *calls], calls, strict=False):
        if call.input is None or call.output is None:
            raise _no_sum(trace, call, f"has not {trace.width} numbers for each token, as the vocabulary has")
        if before is not None and not trace.same(before.output, call.input):
            raise _no_sum(trace, call, "is not what the layer before it gave")
        inside = {name: attention for name, attention in attention_calls.items() if call.contains(attention)}
        sums.append(_block_sum(trace, call, inside, parts))
    return sums


def _attention_call(model: nn.Module, trace: TokenTrace, layer: str) -> ModuleCall:
    name, _, number = layer.partition("#")
    return trace.calls_of(model.get_submodule(name))[int(number or 0)]


def _stack_around(model: nn.Module, trace: TokenTrace, layer: str) -> nn.Module:
    """The outermost list of modules around a layer whose members were called."""
    names = layer.partition("#")[0].split(".")
    path = [model.get_submodule(".".join(names[:i])) for i in range(len(names) + 1)]
    for module, child in pairwise(path):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and trace.calls_of(child):
            return module
    raise bad_value("model", expected="layers in an nn.ModuleList, one after another", received=layer)


def _no_sum(trace: TokenTrace, call: ModuleCall, how: str) -> ValueError:
    name = next((name for name, module in trace.model.named_modules() if module is call.module), "")
    return bad_value(
        "model",
        expected="layers that add what their heads give to the stream: as it is, scaled, or after a norm",
        received=f"{name} ({type(call.module).__name__}), whose stream {how}",
    )


def _block_sum(
    trace: TokenTrace, call: ModuleCall, attention: dict[str, ModuleCall], parts: dict[str, tuple[Tensor, Tensor]]
) -> BlockSum:
    """Find the sum that a layer computes: the stream, what its attention adds, and up to two other modules."""
    assert call.input is not None and call.output is not None
    options = [_ways_to_add(trace, call, *parts[name]) for name in attention]
    others = _other_outputs(trace, call, attention, [x for ways in options for x, _ in ways])
    for fitted, count in product((False, True), range(3)):
        if fitted and trace.rounding > 1e-5:
            break  # factors found by least squares would not be exact
        best: tuple[Tensor, Tensor, Any] | None = None
        for chosen, more in product(product(*options), combinations(others, count)):
            columns = torch.stack([call.input, *(x for x, _ in chosen), *more], 1)
            factors = _least_squares(columns, call.output) if fitted else columns.new_ones(columns.shape[1])
            if factors is None or bool((factors[: 1 + len(chosen)].abs() < 1e-4).any()):
                continue
            size = columns.norm(dim=0) @ factors.abs() + call.output.norm()
            error = (columns @ factors - call.output).norm() / size
            if best is None or error < best[0]:
                best = error, factors, chosen
        if best is not None and best[0] <= 4 * trace.rounding:
            carry, *rest = best[1].tolist()
            added = {name: (f, norm) for name, f, (_, norm) in zip(attention, rest, best[2], strict=False)}
            return BlockSum(call.output, carry, added)
    raise _no_sum(trace, call, "is no sum of these")


def _ways_to_add(
    trace: TokenTrace, call: ModuleCall, heads: Tensor, bias: Tensor
) -> list[tuple[Tensor, LinearNorm | None]]:
    """What an attention may add to the stream: its output, or the output of a norm that is called with it."""
    output = heads.sum(0) + bias
    ways: list[tuple[Tensor, LinearNorm | None]] = [(output, None)]
    for other in trace.calls_within(call):
        if other.output is not None and trace.same(output, other.input) and not trace.same(output, other.output):
            norm = LinearNorm.of(other, trace)
            ways += [] if norm is None else [(other.output, norm)]
    return ways


def _other_outputs(
    trace: TokenTrace, call: ModuleCall, attention: dict[str, ModuleCall], known: list[Tensor]
) -> list[Tensor]:
    """The outputs, each once, of modules in a layer that neither contain attention nor are inside it."""
    others: list[Tensor] = []
    for other in trace.calls_within(call):
        related = any(other.contains(a) or a.contains(other) for a in attention.values())
        if other.output is None or related or any(trace.same(other.output, x) for x in (*known, *others)):
            continue
        others.append(other.output)
    return others


def _least_squares(columns: Tensor, target: Tensor) -> Tensor | None:
    """The factors of a least-squares fit; None if the columns do not determine them."""
    size = columns.norm(dim=0)
    if bool((size == 0).any()):
        return None
    fit = torch.linalg.lstsq(columns / size, target[:, None], driver="gelsd")
    ambiguous = int(fit.rank) < columns.shape[1] or float(fit.singular_values.min()) < 1e-3
    return None if ambiguous else fit.solution[:, 0] / size


def logit_direction(
    model: nn.Module, trace: TokenTrace, x: Tensor, logits: Tensor, token: int
) -> tuple[Tensor, float, float | None]:
    """d (W,) and c with logit = x . d + c for the stream x at its end, the scale of the last norm held fixed; and the
    softcap of the logits, if they have one."""
    unembedding_calls = trace.calls_of(trace.unembedding)
    if len(unembedding_calls) != 1 or unembedding_calls[0].input is None or trace.logits is None:
        raise bad_value(
            "model", expected="one projection to the vocabulary at the end", received=f"{len(unembedding_calls)}"
        )
    norm, scale = _last_norm(trace, x, unembedding_calls[0].input)
    row = trace.unembedding.weight[token].detach().double()  # type: ignore[union-attr, index]
    bias = getattr(trace.unembedding, "bias", None)
    constant = 0.0 if bias is None else float(bias[token])
    softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    logit_scale = trace.factor(trace.logits, logits) if trace.logits.shape == logits.shape else None
    if logit_scale is not None:
        softcap = None
    elif isinstance(softcap, (int, float)) and trace.same(softcap * torch.tanh(trace.logits / softcap), logits):
        logit_scale = 1.0
    direction = scale * row
    if norm is not None:
        constant += float(norm.bias @ direction)
        direction = norm.transposed(direction)
    logit = (float(x @ direction) + constant) * (logit_scale or 1.0)
    expected = float(trace.logits[token]) * logit_scale if logit_scale is not None else float(logits[token])
    rounding = 64 * max(trace.rounding, 1e-7) * (float(x.abs() @ direction.abs()) + abs(logit))
    if logit_scale is None or abs(logit - expected) > rounding:
        raise bad_value(
            "model",
            expected="logits that are the normalised stream times the vocabulary",
            received=f"{float(logits[token]):.4f} where that is {logit:.4f}",
        )
    return direction * logit_scale, constant * logit_scale, softcap


def _last_norm(trace: TokenTrace, x: Tensor, into_unembedding: Tensor) -> tuple[LinearNorm | None, float]:
    """The norm between the end of the stream and the unembedding (None if there is none), and a factor after it."""
    scale = trace.factor(x, into_unembedding)  # a model without a last norm
    if scale is not None:
        return None, scale
    for call in trace.calls:
        if trace.same(x, call.input) and isinstance(call.output, Tensor):
            scale = trace.factor(call.output, into_unembedding)
            norm = None if scale is None else LinearNorm.of(call, trace)
            if norm is not None and scale is not None:
                return norm, scale
    raise bad_value("model", expected="a last norm between the stream and the vocabulary", received="none that ran")
