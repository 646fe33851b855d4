"""Everything the signature offers, on any device, forward and backward, in O(N) memory: torch alone, strip by strip.

A *strip* is a few query rows against all the keys that they may see. Its scores are computed, exponentiated, used and
forgotten; only the output and the log-sum-exp of each row stay. The backward pass computes them again from these:

            keys the strip may see                     forward          s = q k^T,  p = exp(s - lse),  out = p v
        ┌──────────────┬──────┐                        backward         dp = dout v^T,  ds = p (dp - rowsum(dout out))
   rows │ visible      │partly│ hidden: never computed                  dq = ds k,  dk += ds^T q,  dv += p^T dout
        └──────────────┴──────┘

Exponentials are taken in base 2 (log2 e is folded into the scale of q), for exp2 costs a CPU a third of exp.

Letters: B batch, H query heads, G kv heads, R = H / G query heads per kv head, N queries, M keys, D head width of q
and k, E head width of v; in a chunk of c batch items and g kv heads, n rows and m keys of one strip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import tuning
from regard.kernels import operators
from regard.kernels.call import Call
from regard.kernels.reference import weigh_visible
from regard.kernels.strips import StripPlan, keys_seen, plan_strips, rows_per_strip, sides
from regard.masks import Tile
from regard.masks.base import of_batch
from regard.measures import MeasureRun, Strip
from regard.positions import Bias, ScoreMod
from regard.tracing import traced

__all__ = ["backward", "forward", "forward_measured", "name", "output", "why_not"]

name = "blockwise"

LOG2_E = math.log2(math.e)


def why_not(call: Call) -> str | None:
    """It serves every call."""
    return None


def worth(call: Call) -> bool:
    """Not for the smallest planes, where the formula in full is quicker; always for compilers: it is one node."""
    batch, heads, n, m = call.shape
    if traced(call.q):
        return True  # one node for compilers, whatever the size
    few = (
        n <= tuning.FORMULA_QUERIES
        and call.mask is None
        and not call.biases
        and batch * heads * n * m <= 64 * tuning.SMALL
    )
    return batch * heads * n * m > tuning.SMALL and not few


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and log-sum-exp (B, H, N)."""
    return differentiable_forward(call)


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]:
    """The wanted gradients of `call.learned()`, where out and lse may be of more keys than the call has."""
    return _Loops().backward(call, out, lse, d_out, torch.zeros_like(lse), wanted, 0, 0)


def output(call: Call) -> Tensor:
    """(B, H, N, E)"""
    return differentiable_forward(call)[0]


def forward_measured(call: Call, measuring: MeasureRun, *, output: bool = True) -> tuple[Tensor | None, Tensor]:
    """The same while every strip's weights are shown to some measures, in one pass; without gradient."""
    out, lse = _forward(call, 0, 0, measuring, output)
    return (out if output else None), lse


def replay(call: Call, lse: Tensor, measuring: MeasureRun) -> None:
    """Show the weights exp(score - lse) to some measures, where the log-sum-exp is known already."""
    for chunk in _chunks(call, 0, 0, together=measuring.wants_all_heads):
        for strip in chunk.strips:
            if not strip.runs:
                continue
            base = chunk.by_group(lse[chunk.batch, chunk.heads, strip.rows][..., None]).mul(LOG2_E)
            base.masked_fill_(base.isneginf(), float("inf"))
            p, _ = chunk.scores(strip, chunk.queries(strip))
            p.sub_(base).exp2_()
            mass = p.sum(-1, keepdim=True)
            if call.sinks is None:
                mass = (mass > 0).to(p.dtype)
            measuring.add(chunk.shown(strip, measuring, p, mass))


@dataclass
class _Chunk:
    """Some batch items and kv heads, with their keys (c * g, M, D) and values (c * g, M, E) ready to multiply."""

    call: Call
    batch: slice
    groups: slice
    heads: slice
    keys: Tensor
    values: Tensor
    strips: list[StripPlan]
    careful: bool  # keys or values hold NaN or inf: what is hidden must not leak through 0 * NaN

    @property
    def count(self) -> int:
        return self.keys.shape[0]

    def by_group(self, x: Tensor) -> Tensor:
        """(c, g * R, n, X) -> (c * g, R * n, X)"""
        return x.reshape(self.count, x.shape[:3].numel() // self.count, x.shape[-1])

    def by_head(self, x: Tensor) -> Tensor:
        """(c * g, R * n, X) -> (c, g * R, n, X)"""
        items, heads = self.batch.stop - self.batch.start, self.heads.stop - self.heads.start
        return x.view(items, heads, x.shape[:2].numel() // (items * heads), x.shape[-1])

    def queries(self, strip: StripPlan) -> Tensor:
        """The strip's queries, scaled: (c * g, R * n, D)."""
        call = self.call
        factor = call.scale * LOG2_E if call.softcap is None else call.scale / call.softcap
        q = call.q[self.batch, self.heads, strip.rows].to(call.dtype)
        return self.by_group(q * factor)

    def scores(
        self, strip: StripPlan, q: Tensor, unchanged: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores in base 2 with bias and mask, (c * g, R * n, m); and tanh of the softcap, which backward needs, as it
        needs the scores that functions of them were given: these are appended to `unchanged`."""
        call = self.call
        s = torch.bmm(q, _select(self.keys, strip.runs).mT)
        capped = None
        if call.softcap is not None:
            capped = s.tanh_()
            s = capped * (call.softcap * LOG2_E)
        view = self.by_head(s)
        for bias in call.biases:
            if bias.changes_scores:
                before = view / LOG2_E
                for columns, cols in strip.places():
                    changed = bias.apply_to(before[..., columns], self.tile(strip, cols), self.heads)
                    torch.mul(changed, LOG2_E, out=view[..., columns])
                if unchanged is not None:
                    unchanged.append(before)
            else:
                view.add_(self.bias(bias, strip), alpha=LOG2_E)
        for columns, cols in strip.partly:
            visible = self.block(strip, cols)
            if self.careful or call.changes_scores:  # (a function may give NaN for hidden pairs)
                view[..., columns].masked_fill_(~visible, float("-inf"))
                if self.careful and capped is not None:
                    self.by_head(capped)[..., columns].masked_fill_(~visible, 0.0)
            else:  # log(1) = 0, log(0) = -inf: adding is many times faster than masked_fill on a CPU
                view[..., columns].add_(visible.to(s.dtype).log2_())
        return s, capped

    def bias(self, bias: Bias, strip: StripPlan) -> Tensor:
        """A bias's block, broadcastable to (c, g * R, n, m)."""
        blocks = [bias.evaluate(self.tile(strip, cols), self.heads) for cols in strip.runs]
        same = len(blocks) == 1 or (bias.is_dense and bias.weight.shape[3] == 1)
        return (blocks[0] if same else torch.cat(blocks, -1)).to(self.call.dtype)

    def tile(self, strip: StripPlan, cols: slice) -> Tile:
        """The strip's rows against some keys."""
        return self.call.tile(self.batch, strip.rows, cols)

    def kept(self, strip: StripPlan) -> Tensor:
        """Dropout's 1 and 0: (c * g, R * n, m)."""
        assert self.call.dropout is not None
        cols = strip.runs[0] if len(strip.runs) == 1 else torch.cat([_numbers(run, self.keys) for run in strip.runs])
        kept = self.call.dropout.block(self.batch, self.heads, strip.rows, cols, self.call.dtype)
        return kept.expand(self.batch.stop - self.batch.start, -1, -1, -1).reshape(self.count, -1, strip.width)

    def sinks(self, strip: StripPlan) -> Tensor:
        """The sinks in base 2, one per row: (c * g, R * n, 1)."""
        assert self.call.sinks is not None
        sinks = of_batch(self.call.sinks, self.batch)[:, self.heads, None, None].to(self.call.dtype) * LOG2_E
        c, rows = self.batch.stop - self.batch.start, strip.rows.stop - strip.rows.start
        return self.by_group(sinks.expand(c, -1, rows, 1))

    def shown(
        self,
        strip: StripPlan,
        measuring: MeasureRun,
        p: Tensor,
        mass: Tensor,
        logs: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Strip:
        """A strip as measures want it: weights (c, g * R, n, m)."""
        return Strip(
            measuring.plane,
            self.batch,
            self.heads,
            strip.rows,
            strip.runs,
            self.by_head(p),
            self.by_head(mass)[..., 0],
            None if logs is None else self.by_head(logs),
            None if total is None else self.by_head(total)[..., 0],
        )

    def weigh(self, p: Tensor, strip: StripPlan) -> Tensor:
        """p v, (c * g, R * n, E). What is hidden does not count, not even a NaN."""
        values = _select(self.values, strip.runs)
        return weigh_visible(p, values, self.visible(strip), torch.bmm) if self.careful else torch.bmm(p, values)

    def visible(self, strip: StripPlan) -> Tensor:
        """Which pairs of the strip are, (c * g, R * n, m)."""
        items, rows = self.batch.stop - self.batch.start, strip.rows.stop - strip.rows.start
        shape = (items, self.heads.stop - self.heads.start, rows, strip.width)
        visible = torch.ones(shape, dtype=torch.bool, device=self.keys.device)
        for columns, cols in strip.partly:
            visible[..., columns] = self.block(strip, cols)
        return self.by_group(visible)

    def block(self, strip: StripPlan, cols: slice) -> Tensor:
        """The mask's block of the strip's rows and some keys, of the chunk's heads."""
        assert self.call.mask is not None
        visible = self.call.mask.block(self.tile(strip, cols))
        return visible[:, self.heads] if visible.shape[1] > 1 else visible


def _forward(
    call: Call, height: int, width: int, measuring: MeasureRun | None = None, output: bool = True
) -> tuple[Tensor, Tensor]:
    out, lse = operators.new_output(call.q, call.v if output else call.v[..., :0])
    lowest = torch.finfo(call.dtype).min
    lowest_log = -200.0 if call.dtype is torch.float32 else -1100.0
    kept = 1.0 if call.dropout is None else call.dropout.kept
    for chunk in _chunks(call, height, width, together=measuring is not None and measuring.wants_all_heads):
        for strip in chunk.strips:
            where = (chunk.batch, chunk.heads, strip.rows)
            if not strip.runs:
                out[where] = 0.0
                lse[where] = float("-inf") if call.sinks is None else chunk.by_head(chunk.sinks(strip))[..., 0] / LOG2_E
                continue
            p, _ = chunk.scores(strip, chunk.queries(strip))
            # An empty row's maximum is -inf; the lowest number in its place keeps -inf - -inf from becoming NaN.
            top = p.amax(-1, keepdim=True).clamp_(min=lowest)
            sink = None if call.sinks is None else chunk.sinks(strip)
            top = top if sink is None else torch.maximum(top, sink)
            logs = None
            p.sub_(top)
            if measuring is not None and measuring.wants_logs:
                logs = p.clamp_(
                    min=lowest_log
                ).clone()  # 2 ** lowest_log is 0: what is hidden stays so, and 0 * logs is 0
            p.exp2_()
            total = on_keys = p.sum(-1, keepdim=True)
            if sink is not None:
                total = total + (sink - top).exp2_()
            lse[where] = chunk.by_head(top + total.log2())[..., 0] / LOG2_E
            total = total.masked_fill(total == 0, 1.0)  # an empty row: 0 / 1, not 0 / 0
            if measuring is not None:
                p.div_(total)
                measuring.add(chunk.shown(strip, measuring, p, on_keys / total, logs, total))
                total = torch.ones_like(total)
            if not output:
                continue
            if call.dropout is not None:
                p.mul_(chunk.kept(strip))
            out[where] = chunk.by_head(chunk.weigh(p, strip).mul_(kept / total))
    return out, lse


def _backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, wanted: list[bool], height: int, width: int
) -> list[Tensor]:
    grads = _Gradients(call, wanted)
    for chunk in _chunks(call, height, width):
        dk_sum, dv_sum = (
            None if grad is None else torch.zeros_like(x)
            for grad, x in ((grads.k, chunk.keys), (grads.v, chunk.values))
        )
        for strip in chunk.strips:
            where = (chunk.batch, chunk.heads, strip.rows)
            g = d_out[where].to(call.dtype)
            # rowsum(p * dp) without p: it is rowsum(out * dout), dropout or not
            delta = (out[where].to(call.dtype) * g).sum(-1, keepdim=True) - d_lse[where][..., None]
            g = g if call.dropout is None else g * call.dropout.kept
            rows_lse = lse[where][..., None]
            grads.add_sinks(chunk, rows_lse, delta)
            if strip.runs:
                _strip_backward(chunk, strip, g, delta, rows_lse, grads, dk_sum, dv_sum)
            elif grads.q is not None:
                grads.q[where] = 0.0
        for into, total in ((grads.k, dk_sum), (grads.v, dv_sum)):
            if into is not None and total is not None:
                of_chunk = into[chunk.batch, chunk.groups]
                of_chunk.copy_(total.view(of_chunk.shape))
    return grads.wanted()


class _Gradients:
    """Memory for the wanted gradients of `call.learned()`; None for the others."""

    def __init__(self, call: Call, wanted: list[bool]) -> None:
        self.call = call
        others = wanted[3:]
        want_sinks = others.pop(0) if call.sinks is not None else False
        new = torch.empty_like if call.q.shape[:3].numel() else torch.zeros_like  # without a chunk nothing is written
        self.q, self.k, self.v = (
            new(x) if want else None for x, want in zip((call.q, call.k, call.v), wanted, strict=False)
        )
        self.sinks = torch.zeros_like(call.sinks, dtype=call.dtype) if want_sinks and call.sinks is not None else None
        self.biases = [
            torch.zeros_like(bias.weight, dtype=call.dtype) if want else None
            for bias, want in zip(call.biases, others, strict=True)
        ]

    def add_sinks(self, chunk: _Chunk, rows_lse: Tensor, delta: Tensor) -> None:
        """What some rows give to the sinks: their weight is exp(sink - lse)."""
        if self.sinks is not None and self.call.sinks is not None:
            sinks = of_batch(self.call.sinks, chunk.batch)[:, chunk.heads, None, None].to(self.call.dtype)
            given = -((sinks - rows_lse).exp_() * delta).sum((2, 3))  # (c, h)
            into = of_batch(self.sinks, chunk.batch)[:, chunk.heads]
            into.add_(given if into.shape[0] == given.shape[0] else given.sum(0, keepdim=True))

    def wanted(self) -> list[Tensor]:
        """All that were wanted, in the dtypes of what they belong to."""
        sums = [(self.sinks, self.call.sinks)]
        sums += [(grad, bias.weight) for grad, bias in zip(self.biases, self.call.biases, strict=True)]
        rest = [torch.empty_like(like).copy_(grad) for grad, like in sums if grad is not None and like is not None]
        return [x for x in (self.q, self.k, self.v) if x is not None] + rest


def _strip_backward(
    chunk: _Chunk,
    strip: StripPlan,
    g: Tensor,
    delta: Tensor,
    rows_lse: Tensor,
    grads: _Gradients,
    dk_sum: Tensor | None,
    dv_sum: Tensor | None,
) -> None:
    """Add what one strip gives: p again from the log-sum-exp, then dp, ds, and the gradients of all that made it."""
    call = chunk.call
    g, delta = chunk.by_group(g), chunk.by_group(delta)
    base = chunk.by_group(rows_lse).mul(LOG2_E)
    base.masked_fill_(base.isneginf(), float("inf"))  # an empty row: exp2(-inf - inf) = 0
    q = chunk.queries(strip)
    unchanged: list[Tensor] = []
    p, capped = chunk.scores(strip, q, unchanged)
    p.sub_(base).exp2_()
    values, keys = _select(chunk.values, strip.runs), _select(chunk.keys, strip.runs)
    hidden = ~chunk.visible(strip) if chunk.careful or unchanged else None
    if hidden is not None and chunk.careful:
        values, keys = (x.masked_fill(~x.isfinite(), 0.0) for x in (values, keys))
        p.masked_fill_(hidden, 0.0)
    ds = torch.bmm(g, values.mT)
    if call.dropout is not None:
        dropped = chunk.kept(strip).mul_(p)
        ds.mul_(dropped).addcmul_(p, delta, value=-1)
    else:
        dropped = p
        ds.sub_(delta).mul_(p)
    if hidden is not None:
        ds.masked_fill_(hidden, 0.0)
    if dv_sum is not None:
        _add_product(dv_sum, strip.runs, dropped, g, 1.0)
    for bias, into in zip(reversed(call.biases), reversed(grads.biases), strict=True):
        if isinstance(bias, ScoreMod):
            ds = _through(chunk, strip, bias, unchanged.pop(), ds, into)
            ds = ds if hidden is None else ds.masked_fill_(hidden, 0.0)
        elif into is not None:
            _add_bias_gradient(chunk, strip, bias, chunk.by_head(ds), into)
    if capped is not None:
        ds.mul_(capped.square_().neg_().add_(1.0))
    if dk_sum is not None:  # q carries scale * log2(e) or scale / softcap: take the surplus out again
        _add_product(dk_sum, strip.runs, ds, q, 1 / LOG2_E if call.softcap is None else call.softcap)
    if grads.q is not None:
        grads.q[chunk.batch, chunk.heads, strip.rows] = chunk.by_head(torch.bmm(ds, keys).mul_(call.scale))


def _chunks(call: Call, height: int, width: int, *, together: bool = False) -> Iterator[_Chunk]:
    """Cut a call into chunks of batch items and kv heads (or all of these `together`), and each into strips of at most
    about `tuning.STRIP` scores."""
    batch, heads, queries, keys = call.shape
    groups = call.k.shape[1]
    if not (batch and heads and queries):
        return
    shared = heads // groups
    seen = keys_seen(call)
    row_scores = shared * max(seen, 1)  # of one kv head
    most_rows, tile_keys = sides(call)
    rows = height or min(rows_per_strip(row_scores, groups), queries if seen == keys else most_rows)
    g = min(groups, max(1, tuning.STRIP // (row_scores * min(rows, queries))))
    if call.mask is not None and call.mask.grain() is not None and not call.mask.shared_by_heads():
        g = 1  # each kv head has strips of its own
    if together:
        g, rows = groups, min(rows, max(1, 4 * tuning.STRIP // (row_scores * groups)))
    whole_items = g == groups and rows >= queries
    c = min(batch, max(1, tuning.STRIP // (row_scores * g * min(rows, queries)))) if whole_items else 1
    strips_of = plan_strips(call, rows, width or min(tile_keys, max(keys, 1)))
    careful = call.mask is not None and not call.keys_are_finite
    for b in range(0, batch, c):
        items = slice(b, min(b + c, batch))
        for h in range(0, groups, g):
            kv_heads = slice(h, min(h + g, groups))
            q_heads = slice(kv_heads.start * shared, kv_heads.stop * shared)
            k, v = (x[items, kv_heads].to(call.dtype).flatten(0, 1) for x in (call.k, call.v))
            yield _Chunk(call, items, kv_heads, q_heads, k, v, strips_of(items, q_heads), careful)


def _select(x: Tensor, runs: list[slice]) -> Tensor:
    """The rows (c * g, m, X) of some runs of keys: a view where there is one run."""
    return x[:, runs[0]] if len(runs) == 1 else torch.cat([x[:, run] for run in runs], dim=1)


def _add_product(into: Tensor, runs: list[slice], weights: Tensor, rows: Tensor, alpha: float) -> None:
    """into[keys of the runs] += alpha * weights^T rows"""
    at = 0
    for run in runs:
        size = run.stop - run.start
        into[:, run].baddbmm_(weights[:, :, at : at + size].mT, rows, alpha=alpha)
        at += size


def _add_bias_gradient(chunk: _Chunk, strip: StripPlan, bias: Bias, gradient: Tensor, into: Tensor) -> None:
    """Add the gradient (c, g * R, n, m) of a strip to that of a bias, summed over the axes on which it is broadcast."""
    at = 0
    for cols in strip.runs:
        size = cols.stop - cols.start
        bias.add_gradient(gradient[..., at : at + size], chunk.tile(strip, cols), into, chunk.heads)
        at += size


def _through(
    chunk: _Chunk, strip: StripPlan, bias: ScoreMod, unchanged: Tensor, ds: Tensor, into: Tensor | None
) -> Tensor:
    """From the gradient (c * g, R * n, m) of changed scores that of the `unchanged` (c, g * R, n, m)."""
    gradient = torch.empty_like(unchanged)
    for columns, cols in strip.places():
        parts = unchanged[..., columns], chunk.by_head(ds)[..., columns]
        gradient[..., columns] = bias.gradients(*parts, chunk.tile(strip, cols), into, chunk.heads)
    return chunk.by_group(gradient)


def _numbers(run: slice, like: Tensor) -> Tensor:
    return torch.arange(run.start, run.stop, device=like.device)


class _Loops:
    forward = staticmethod(_forward)
    backward = staticmethod(_backward)


differentiable_forward = operators.register(name, _Loops())
