"""Ring attention: queries stay, keys and values travel from rank to rank, and what each block gives is merged.

    step 0          step 1          step 2
    q0 x kv0        q0 x kv2        q0 x kv1          of P ranks each holds two blocks at a time: the one it works on
    q1 x kv1   ->   q1 x kv0   ->   q1 x kv2          and the one that is on its way
    q2 x kv2        q2 x kv1        q2 x kv0

Attention over all keys is the mean of attention over blocks of keys, weighted by exp(lse of the block): so the blocks'
outputs merge as they come, exactly. The gradient goes the same way round: with the final lse, a block's weights are
exp(scores - lse), and the gradients of a block's keys and values travel one step behind it, gathering what each rank
adds, and then home.

A block goes no further than somebody needs it: under a causal mask the first rank gets nothing, and with a window a
block visits its neighbours. It may set out in both directions, where that is shorter. Where blocks are large there are
several rounds, each with some of the kv heads, so that little memory is on its way.

Letters: B batch, H query heads, G kv heads, n queries here, m keys of a block, D head width of q and k, E of v,
P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard import kernels
from regard.kernels import Call, Kernel, blockwise, fused
from regard.kernels.merging import shares
from regard.kernels.operators import new_output
from regard.parallel.collectives import Ranks
from regard.parallel.global_call import GlobalCall
from regard.parallel.token_layout import Tokens

__all__ = ["Route", "attend", "route"]

RIGHT, LEFT = 1, -1
LARGE = 8 << 20  # bytes of a block: far more than what a message costs besides (on a GPU eight times as many)


class Route(NamedTuple):
    """How far each rank's block travels: so many ranks to the right, and to the left. The same on all ranks."""

    right: tuple[int, ...]
    left: tuple[int, ...]

    def far(self, way: int) -> tuple[int, ...]:
        """Those of one way."""
        return self.right if way == RIGHT else self.left

    @property
    def steps(self) -> int:
        """The longest way."""
        return max((*self.right, *self.left, 0))


def route(needed: list[list[bool]]) -> Route:
    """The shortest way for each block to everybody who needs it; `needed[i][j]`: rank i needs block j.

    >>> route([[True, False, False], [True, True, False], [True, True, True]])  # causal
    Route(right=(2, 1, 0), left=(0, 0, 0))
    >>> near = [[abs(i - j) <= 1 for j in range(4)] for i in range(4)]  # a window on both sides
    >>> route(near)
    Route(right=(1, 1, 1, 0), left=(0, 1, 1, 1))
    """
    size = len(needed)
    right, left = [0] * size, [0] * size
    for j in range(size):
        steps = [s for s in range(1, size) if needed[(j + s) % size][j]]
        # everybody up to some step is reached from the left, the others from the right
        ways = [(max(steps[:cut], default=0), size - min(steps[cut:], default=size)) for cut in range(len(steps) + 1)]
        right[j], left[j] = min(ways, key=lambda way: (sum(way), -way[0]))
    return Route(tuple(right), tuple(left))


class BlockPair(NamedTuple):
    """A run of queries and a run of keys: where they lie in q and in the block, where in the whole, and the call."""

    own: tuple[slice, slice, slice]
    theirs: slice
    rows: slice
    cols: slice
    call: Call


@dataclass(frozen=True)
class Plan:
    """One ring: whose turn it is, and when. A round of it is a plan with fewer kv heads."""

    whole: GlobalCall
    ranks: Ranks
    kernel: str
    route: Route
    some: list[list[bool]]  # of each run of queries and of keys, whether some pair is visible
    every: list[list[bool]]
    groups: slice  # the kv heads

    @staticmethod
    def of(whole: GlobalCall, ranks: Ranks, kernel: str) -> Plan:
        some, every = whole.survey()
        rows, cols = _owners(whole.queries), _owners(whole.keys)
        needed = [[False] * ranks.size for _ in range(ranks.size)]
        for a, i in enumerate(rows):
            for b, j in enumerate(cols):
                needed[i][j] |= some[a][b]
        return Plan(whole, ranks, kernel, route(needed), some, every, slice(0, whole.call.k.shape[1]))

    @property
    def heads(self) -> slice:
        """Of the queries."""
        share = self.whole.call.q.shape[1] // max(self.whole.call.k.shape[1], 1)
        return slice(self.groups.start * share, self.groups.stop * share)

    def rounds(self) -> list[Plan]:
        """The same for some kv heads at a time, as many as make no large block on any rank."""
        (batch, groups, _, d), e = self.whole.call.k.shape, self.whole.call.v.shape[3]
        bytes_of_head = batch * max(self.whole.keys.lengths) * (d + e) * self.whole.call.k.element_size()
        some = max(1, LARGE * (1 if self.ranks.device.type == "cpu" else 8) // max(bytes_of_head, 1))
        if some >= groups or not self.route.steps:
            return [self]
        return [replace(self, groups=slice(first, min(first + some, groups))) for first in range(0, groups, some)]

    def visitor(self, step: int, way: int) -> int | None:
        """Whose block is here after so many steps that way; None where none comes so far."""
        owner = (self.ranks.rank - way * step) % self.ranks.size
        return owner if self.route.far(way)[owner] >= step else None

    def block_pairs(self, q: Tensor, block: Tensor, owner: int) -> Iterator[BlockPair]:
        """What is to be computed of a rank's block: the runs of queries here and of its keys that see each other."""
        k, v = self.unpack(block, owner)
        seen_by_all = replace(self.whole, call=replace(self.whole.call, mask=None))
        for a, rows, own in _places(self.whole.queries, self.ranks.rank):
            for b, cols, theirs in _places(self.whole.keys, owner):
                if self.some[a][b]:
                    whole = seen_by_all if self.every[a][b] else self.whole
                    here = slice(None), self.heads, own
                    call = whole.part(q[here], k[:, :, theirs], v[:, :, theirs], self.heads, rows, cols)
                    yield BlockPair(here, theirs, rows, cols, replace(call, sinks=None))

    def unpack(self, block: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """A block as keys (B, G, m, D) and values (B, G, m, E)."""
        (batch, _, _, d), e = self.whole.call.k.shape, self.whole.call.v.shape[3]
        groups, m = self.groups.stop - self.groups.start, self.whole.keys.lengths[owner]
        size = batch * groups * m
        return block[: size * d].view(batch, groups, m, d), block[size * d :].view(batch, groups, m, e)

    def new_block(self, owner: int, dtype: torch.dtype) -> Tensor:
        """Memory for a rank's block."""
        (batch, _, _, d), e = self.whole.call.k.shape, self.whole.call.v.shape[3]
        size = batch * (self.groups.stop - self.groups.start) * self.whole.keys.lengths[owner] * (d + e)
        return torch.empty(size, dtype=dtype, device=self.whole.call.q.device)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """This rank's keys and values as one message."""
        block = self.new_block(self.ranks.rank, k.dtype)
        for part, x in zip(self.unpack(block, self.ranks.rank), (k, v), strict=True):
            part.copy_(x[:, self.groups])
        return block

    def circulate(self, own: Tensor) -> Iterator[list[tuple[int, int, Tensor]]]:
        """Step after step the blocks that are here: (owner, way, block). While a caller works on them, the next ones
        are on their way."""
        here: dict[int, Tensor] = {RIGHT: own, LEFT: own}
        for step in range(self.route.steps + 1):
            coming: dict[int, Tensor] = {}
            sends, receives = [], []
            for way in (RIGHT, LEFT):
                mine = self.visitor(step, way)
                if mine is not None and self.route.far(way)[mine] > step:
                    sends.append(((self.ranks.rank + way) % self.ranks.size, here[way]))
                owner = self.visitor(step + 1, way)
                if owner is not None:
                    coming[way] = self.new_block(owner, own.dtype)
                    receives.append(((self.ranks.rank - way) % self.ranks.size, coming[way]))
            wait = self.ranks.post(sends, receives)
            if step == 0:
                yield [(self.ranks.rank, RIGHT, own)]
            else:
                visitors = [(self.visitor(step, way), way) for way in (RIGHT, LEFT)]
                yield [(owner, way, here[way]) for owner, way in visitors if owner is not None]
            wait()
            here = coming


def _owners(tokens: Tokens) -> list[int]:
    """The rank of each run, of all ranks in order."""
    return [rank for rank, runs in enumerate(tokens.runs) for _ in runs]


def _places(tokens: Tokens, rank: int) -> list[tuple[int, slice, slice]]:
    """The runs of a rank: its number among all, where it is in the whole, where in the rank's part."""
    number, at, places = sum(len(runs) for runs in tokens.runs[:rank]), 0, []
    for i, run in enumerate(tokens.runs[rank]):
        size = run.stop - run.start
        places.append((number + i, run, slice(at, at + size)))
        at += size
    return places


def choose(kernel: str, call: Call) -> Kernel:
    """The kernel of a block: one that gives the log-sum-exp."""
    chosen = kernels.choose(kernel, call)
    return blockwise if kernel == "auto" and chosen is fused and call.q.device.type != "cpu" else chosen


class _Ring(torch.autograd.Function):
    """(B, H, n, E) from q (B, H, n, D), k (B, G, m, D), v (B, G, m, E), and sinks and biases of the whole."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        call = plan.whole.call.with_learned([*plan.whole.call.learned()[:3], *others])
        plan = replace(plan, whole=replace(plan.whole, call=call))
        owns = [part.pack(k, v) for part in plan.rounds()]
        out, lse = _forward(plan, q, owns)
        ctx.plan = plan
        ctx.save_for_backward(q, out, lse, *owns, *others)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse, *others = ctx.saved_tensors
        owns = [others.pop(0) for _ in ctx.plan.rounds()]
        call = ctx.plan.whole.call
        call = call.with_learned([*call.learned()[:3], *others])
        plan = replace(ctx.plan, whole=replace(ctx.plan.whole, call=call))
        with torch.no_grad():
            gradients = _backward(plan, q, owns, out, lse, grads[0], list(ctx.needs_input_grad[1:]))
        return None, *gradients


def _forward(plan: Plan, q: Tensor, owns: list[Tensor]) -> tuple[Tensor, Tensor]:
    call, dtype = plan.whole.call, plan.whole.call.dtype
    out, lse = new_output(q, call.v)
    lse.fill_(float("-inf"))
    total = out.zero_() if out.dtype is dtype else torch.zeros_like(out, dtype=dtype)
    for part, own in zip(plan.rounds(), owns, strict=True):
        for blocks in part.circulate(own):
            for owner, _, block in blocks:
                for pair in part.block_pairs(q, block, owner):
                    _merge(total[pair.own], lse[pair.own], *choose(plan.kernel, pair.call).forward(pair.call))
    if call.sinks is not None:  # once, where all keys have been seen
        (of_keys, _), lse = shares([lse, call.sinks[:, :, None].to(dtype).expand_as(lse)])
        total.mul_(of_keys[..., None])
    return (total if total is out else out.copy_(total)), lse


def _merge(total: Tensor, lse: Tensor, out: Tensor, more: Tensor) -> None:
    """Into the output and log-sum-exp of the keys so far, those of more keys."""
    (old, new), both = shares([lse, more])
    lse.copy_(both)
    total.mul_(old[..., None]).add_(out * new[..., None])


def _backward(
    plan: Plan, q: Tensor, owns: list[Tensor], out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]
) -> list[Tensor | None]:
    call, dtype = plan.whole.call, plan.whole.call.dtype
    weights = [bias.weight for bias in call.biases]
    of_biases = wanted[len(wanted) - len(weights) :]
    d_biases = [torch.zeros_like(w, dtype=dtype) if want else None for w, want in zip(weights, of_biases, strict=True)]
    given = _Backward(q, out, lse, d_out, torch.zeros_like(q, dtype=dtype), d_biases)
    rounds = zip(plan.rounds(), owns, strict=True)
    d_kv = [part.unpack(_backward_round(part, own, given), plan.ranks.rank) for part, own in rounds]
    d_k, d_v = d_kv[0] if len(d_kv) == 1 else (torch.cat([pair[i] for pair in d_kv], 1) for i in range(2))
    gradients: list[Tensor | None] = [x.to(q.dtype) for x in (given.d_q, d_k, d_v)]
    if call.sinks is not None:
        delta = (out.to(dtype) * d_out.to(dtype)).sum(-1)
        weight = (call.sinks[:, :, None].to(dtype) - lse).exp_()
        gradients.append(-(weight * delta).sum(-1).sum_to_size(call.sinks.shape).to(call.sinks.dtype))
    gradients += [None if d is None else d.to(w.dtype) for d, w in zip(d_biases, weights, strict=True)]
    return [grad if want else None for grad, want in zip(gradients, wanted, strict=True)]


class _Backward(NamedTuple):
    """What stays on a rank in the backward pass; the gradients of queries and biases are added up in it."""

    q: Tensor
    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_q: Tensor
    d_biases: list[Tensor | None]


def _backward_round(plan: Plan, own: Tensor, given: _Backward) -> Tensor:
    """The gradient of this rank's own block; those of its queries and of the biases are added to what is given."""
    in_flight, returned = _InFlight({}, lambda: None), list[Tensor]()
    for step, blocks in enumerate(plan.circulate(own)):
        if step == 0:
            continue  # this rank's own block comes last, while the gradients that others gave it are on their way home
        added: dict[int, Tensor] = {}
        while blocks:
            owner, way, block = blocks.pop()
            into = partial(_gradient_of, plan, owner, in_flight, way, added)
            _add_gradients(plan, block, owner, given, into)
            into()  # (also where nothing was added)
            del block  # (memory is held no longer than it must be)
        in_flight.wait()
        in_flight = _pass_on(plan, step, added, returned)
    into = partial(_gradient_of_own, plan, in_flight, returned)
    _add_gradients(plan, own, plan.ranks.rank, given, into)
    return into()


class _InFlight(NamedTuple):
    """What earlier ranks added to the gradients of the blocks that come next, by their way; and what waits for it."""

    blocks: dict[int, Tensor]
    wait: Callable[[], None]


def _gradient_of(plan: Plan, owner: int, in_flight: _InFlight, way: int, added: dict[int, Tensor]) -> Tensor:
    """Where the gradient of a visiting block is summed up: what comes behind the block, or a new one. It is asked for
    as late as can be, so that it may be on its way while the first of it is computed here."""
    if way not in added:
        in_flight.wait()
        came = in_flight.blocks.pop(way, None)
        added[way] = plan.new_block(owner, plan.whole.call.dtype).zero_() if came is None else came
    return added[way]


def _gradient_of_own(plan: Plan, in_flight: _InFlight, returned: list[Tensor]) -> Tensor:
    """The same of this rank's own block: what the others gave it."""
    in_flight.wait()
    if not returned:
        returned.append(plan.new_block(plan.ranks.rank, plan.whole.call.dtype).zero_())
    while len(returned) > 1:
        returned[0].add_(returned.pop())
    return returned[0]


def _add_gradients(plan: Plan, block: Tensor, owner: int, given: _Backward, into: Callable[[], Tensor]) -> None:
    """What a block of keys gives to the gradients of the queries here, of the block and of the biases."""
    wanted = [True, True, True, *(d is not None for d in given.d_biases)]
    for own, theirs, rows, cols, call in plan.block_pairs(given.q, block, owner):
        results = given.out[own], given.lse[own], given.d_out[own]
        gradients = choose(plan.kernel, call).backward(call, *results, wanted)
        given.d_q[own].add_(gradients.pop(0))
        for d in plan.unpack(into(), owner):
            d[:, :, theirs].add_(gradients.pop(0))
        for bias, d in zip(plan.whole.call.biases, given.d_biases, strict=True):
            if d is not None:
                d[bias.where(plan.heads, rows, cols)].add_(gradients.pop(0))


def _pass_on(plan: Plan, step: int, added: dict[int, Tensor], returned: list[Tensor]) -> _InFlight:
    """After a step: the gradients of the blocks that were here follow them, or go home where nobody further needs
    them. All ranks do so at once; gives what comes from the neighbours."""
    ranks, size, dtype = plan.ranks, plan.ranks.size, plan.whole.call.dtype
    in_flight: dict[int, Tensor] = {}
    sends, receives = [], []
    for way in (RIGHT, LEFT):
        far = plan.route.far(way)
        owner = plan.visitor(step, way)
        if owner is not None:
            goes_on = far[owner] > step
            sends.append(((ranks.rank + way) % size if goes_on else owner, added[way]))
        coming = plan.visitor(step + 1, way)
        if coming is not None:
            in_flight[way] = plan.new_block(coming, dtype)
            receives.append(((ranks.rank - way) % size, in_flight[way]))
        if far[ranks.rank] == step:
            home = plan.new_block(ranks.rank, dtype)
            receives.append(((ranks.rank + way * step) % size, home))
            returned.append(home)
    return _InFlight(in_flight, ranks.post(sends, receives, channel=1))


def attend(whole: GlobalCall, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """(B, H, n, E): this rank's queries against the keys of all."""
    if kernel != "auto":
        kernels.choose(kernel, whole.call)  # where it cannot serve, all ranks say so before anything travels
    others = whole.call.learned()[3:]
    return _Ring.apply(Plan.of(whole, ranks, kernel), q, k, v, *others)  # type: ignore[return-value]
