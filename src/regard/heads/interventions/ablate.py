"""Run a model without some of its heads, without edges between tokens, or with parts of another run in their place.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.capture import huggingface
from regard.heads.capture.observed import ObservedCall
from regard.heads.interventions.changes import Changes, TokenNumbers, refuse_checkpoints
from regard.heads.interventions.head_choice import Heads, by_layer, head_numbers
from regard.heads.interventions.patch_source import (
    keys_of_source,
    output_of_source,
    queries_of_source,
    rows_of_source,
    weights_of_source,
)
from regard.heads.interventions.recompute import check_inputs, with_other_inputs, with_other_weights, without_edges
from regard.heads.interventions.token_choice import Edges, TokenChoice, Tokens
from regard.heads.record.record import Record
from regard.heads.record.sequences import padding

__all__ = ["WHAT", "ablate"]

Mode = Literal["zero", "mean", "patch", "hide"]
What = Literal["output", "q", "k", "v", "pattern"]
WHAT = ("output", "q", "k", "v", "pattern")


class ablate(Changes):
    """Change some heads of a model within a `with` block: their outputs, or what they are computed from. Afterwards the
    model is as before.

    Args:
        model: any model that `watch` can see.
        heads: for each layer, by name or by number in call order, the heads to change; or heads one by one, as
            `seen.roles().of("induction")` gives them.
        mode: "zero": their outputs become 0. "mean": the mean of their outputs over all queries that are no padding, of
            `source` if there is one, else of what the model has read so far: of the same call, and if it continues from
            a cache, of the calls before it. "patch": what they have in `source`. "hide": some keys are masked for some
            queries, so that the other weights of these heads grow to a sum of 1; a query with no key left gets 0.
        source: a record of another run, watched with keep="qkv".
        what: for mode="patch", what is taken from the source: "output", the heads' outputs; "q", "k" or "v" (after
            rotary and norms), from which the heads are computed again with the rest of this run; "pattern", their
            weights, which are multiplied into the values of this run. Query heads that share a kv head have it each for
            themselves: only those in `heads` get other keys.
        queries: the tokens at which heads are changed: a number, a slice, a list or a boolean tensor; None for all.
            Tokens are counted from 0 in the sequence, with what a cache holds; negative numbers count from the last
            token so far.
        keys: the tokens that are hidden, or whose k or v is patched; as `queries`.
        edges: for mode="hide", a list of pairs (queries, keys) instead of these two: `[(7, 3), (slice(5, 9), 0)]`.

    Gradients flow through what is left. The weights that `nn.MultiheadAttention` returns are those of the model. Of
    attention written by hand weights alone are known: those that are 0 in its precision stay 0 if others are hidden.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2, out_bias=False)
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(layer, {0: [0, 1]}):
    ...     layer(x).abs().max()
    tensor(0., grad_fn=<MaxBackward1>)
    >>> with ablate(layer, {0: [0, 1]}, mode="hide", queries=4, keys=slice(1, None)), torch.no_grad():
    ...     last = layer(x)[0, 4]  # it sees the first token alone
    >>> torch.allclose(last, layer(x[:, :1])[0, 0], atol=1e-5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Heads,
        mode: Mode = "zero",
        source: Record | None = None,
        *,
        what: What = "output",
        queries: Tokens = None,
        keys: Tokens = None,
        edges: Any = None,
    ) -> None:
        super().__init__(model)
        heads = by_layer(heads)
        _check_mode(mode, source, what)
        _check_tokens(mode, what, queries, keys, edges)
        if not all(isinstance(layer, (str, int)) and not isinstance(layer, bool) for layer in heads):
            raise bad_type("heads", expected="layers by name or by number", received=repr(list(heads)))
        self.heads = {layer: head_numbers(f"heads of {layer!r}", which, alone=True) for layer, which in heads.items()}
        self.mode, self.source, self.what = mode, source, what
        self.queries, self.keys = TokenChoice.of("queries", queries), TokenChoice.of("keys", keys)
        self.edges = Edges(((self.queries, self.keys),)) if edges is None else Edges.of(edges)
        self.tracker.strict = mode in ("patch", "hide")  # where tokens are counted
        self.met: set[str | int] = set()  # keys of `heads` whose layer was called
        self.read = (0, 0)  # the most queries and keys that a sequence of a changed layer had
        # by layer: the sum of the outputs (H, E) of its sequence so far, and the number of queries
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums_before: tuple[int, dict[str, tuple[Tensor, Tensor]]] = (-1, {})  # an outermost call, and them before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        missed = [layer for layer in self.heads if layer not in self.met]
        if error is None and missed:
            ran = ", ".join(self.order) or "none ran in the block"
            reasons = [f"{layer!r} ({self.unseen[layer]})" if layer in self.unseen else repr(layer) for layer in missed]
            raise bad_value("heads", expected=f"layers of the model: {ran}", received=", ".join(reasons))
        if error is None and self.read != (0, 0):
            self.edges.check_reached(*self.read)

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        heads = self._heads_of(attention)
        self.changed = (attention.module, heads) if heads else None
        if not heads:
            return output
        refuse_checkpoints(attention.layer)
        count = output.shape[1]
        if max(heads) >= count:
            raise bad_value(f"heads of {attention.layer}", expected=f"numbers below {count}", received=heads)
        tokens = self.tokens
        assert tokens is not None
        self.read = max(self.read[0], tokens.totals[0]), max(self.read[1], tokens.totals[1])
        rows = self.queries.among(tokens.queries, tokens.totals[0])
        if self.mode == "hide" or self.what != "output":
            self._refuse_others(attention, heads)
            with torch._C.DisableTorchFunction():
                other, rows = self._recomputed(attention, output, heads, tokens, rows)
        elif self.mode == "patch":
            assert self.source is not None
            of_source = output_of_source(self.source, attention.layer, output)
            other = rows_of_source(attention.layer, "outputs", of_source, output, tokens.first_row)
        elif self.mode == "zero":
            other = torch.zeros_like(output)
        else:
            mean = self._mean_so_far if self.source is None else self._mean_of_source
            other = mean(attention, output)[None, :, None].to(output.dtype).expand_as(output)
        return _replace(output, heads, rows, other)

    def _recomputed(
        self, attention: ObservedCall, output: Tensor, heads: list[int], tokens: TokenNumbers, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The outputs (B, H, N, E) of the heads after a change of what they are computed from, and the rows (N,) that
        are to be replaced by them."""
        if self.mode == "hide":
            hidden = self.edges.hidden(tokens.queries, tokens.keys, tokens.totals)
            if not hidden:
                return output, torch.zeros_like(rows)
            return without_edges(attention, output, heads, hidden), torch.stack([x for x, _ in hidden]).any(0)
        source = self.source
        assert source is not None
        if self.what == "pattern":
            weights = weights_of_source(source, attention, heads, tokens)
            return with_other_weights(attention, output, heads, weights, rows), rows
        check_inputs(attention, self.what)
        if self.what == "q":
            of_source = queries_of_source(source, attention, tokens)
            return with_other_inputs(attention, output, heads, "q", of_source, rows), rows
        which: Literal["k", "v"] = "k" if self.what == "k" else "v"
        chosen = self.keys.among(tokens.keys, tokens.totals[1]) & (tokens.keys < tokens.totals[1])
        if not bool(chosen.any()):
            return output, torch.zeros_like(rows)
        of_source = keys_of_source(source, attention, which, tokens, chosen)
        return with_other_inputs(attention, output, heads, which, of_source, chosen), torch.ones_like(rows)

    def _refuse_others(self, attention: ObservedCall, heads: list[int]) -> None:
        """Raise if a block around this one changed the same heads: computed again, they would forget it."""
        for other in huggingface.observers():  # the innermost last
            if other is self:
                return
            module, others = other.changed if isinstance(other, Changes) and other.changed else (None, ())
            if module is attention.module and set(others) & set(heads):
                raise bad_value(
                    f"heads of {attention.layer}",
                    expected="heads that no block around this one changes, to compute them again",
                    received=sorted(set(others) & set(heads)),
                    remedy="one block for each head; edges=[...] for several cuts",
                )

    def _mean_so_far(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The mean (H, E) over the queries of this call, and over earlier ones of the sequence that it continues."""
        if self.sums_before[0] != attention.forward:
            self.sums_before = attention.forward, dict(self.sums)
        total, count = _sum_over_queries(output, padding(attention))
        if self.goes_on and attention.layer in self.sums:
            total_before, count_before = self.sums[attention.layer]
            total, count = total + total_before, count + count_before
        self.sums[attention.layer] = total.detach(), count
        if int(count) == 1:
            raise bad_value(
                f"mean of {attention.layer}",
                expected="two tokens at least, for the mean of one is itself",
                received="one",
                remedy="source=a record of another text, or a longer prompt",
            )
        return total / count.clamp(min=1)

    def _mean_of_source(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The mean (H, E) over the queries of the source."""
        assert self.source is not None
        of_source = output_of_source(self.source, attention.layer, output)
        padding = self.source[attention.layer].last_padding()
        total, count = _sum_over_queries(of_source, None if padding is None else padding.to(output.device))
        return total / count.clamp(min=1)

    def _failed(self) -> None:
        super()._failed()
        if self.sums_before[0] == self.frames.forwards:
            self.sums = self.sums_before[1]

    def _heads_of(self, attention: ObservedCall) -> list[int]:
        """The heads of a layer that are to be changed."""
        heads: set[int] = set()
        for key in (attention.layer, f"{attention.layer}#0", self.order.index(attention.layer)):
            if key in self.heads:
                self.met.add(key)
                heads.update(self.heads[key])
        return sorted(heads)


def _check_mode(mode: object, source: object, what: object) -> None:
    if mode not in ("zero", "mean", "patch", "hide"):
        raise bad_value("mode", expected='"zero", "mean", "patch" or "hide"', received=repr(mode))
    if mode == "patch" and source is None:
        raise bad_value(
            "source",
            expected='a record of another run for mode="patch"',
            received="none",
            remedy='watch(model, keep="qkv")',
        )
    if source is not None and not isinstance(source, Record):
        raise bad_type("source", expected="a record that `watch` gave", received=type(source).__name__)
    if source is not None and mode in ("zero", "hide"):
        raise bad_value(
            "source", expected=f'none for mode="{mode}"', received="a record", remedy='mode="mean" or mode="patch"'
        )
    if what not in WHAT:
        raise bad_value("what", expected=", ".join(map(repr, WHAT)), received=repr(what))
    if what != "output" and mode != "patch":
        raise bad_value("what", expected=f'"output" for mode="{mode}"', received=repr(what), remedy='mode="patch"')


def _check_tokens(mode: str, what: str, queries: Tokens, keys: Tokens, edges: object) -> None:
    """Raise if tokens are given that a mode would ignore."""
    if edges is not None and (mode != "hide" or queries is not None or keys is not None):
        other = f'mode="{mode}"' if mode != "hide" else "queries or keys, too"
        raise bad_value("edges", expected='edges alone, for mode="hide"', received=other)
    if keys is not None and mode != "hide" and what not in ("k", "v"):
        received = f'mode="{mode}", what="{what}"'
        raise bad_value("keys", expected='mode="hide", or what="k" or "v"', received=received, remedy="queries=")
    if queries is not None and what in ("k", "v"):
        expected = f'none for what="{what}", which all queries see'
        raise bad_value("queries", expected=expected, received=repr(queries), remedy="keys=")


def _replace(output: Tensor, heads: list[int], rows: Tensor, other: Tensor) -> Tensor:
    """The output (B, H, N, E) with some heads taken from `other`, at some rows (N,). Its strides are the output's, as
    a model may `view` it: `where` takes them from its first operand with more than one axis."""
    others = torch.ones(output.shape[1], dtype=torch.bool, device=output.device)
    others[heads] = False
    return torch.where(~rows[:, None], output, torch.where(others[:, None, None], output, other))


def _sum_over_queries(output: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum (H, E) of the outputs (B, H, N, E) over queries that are not `padding` (B, 1, N), and their number."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    if padding is None:
        return wide.sum((0, 2)), torch.tensor(output.shape[0] * output.shape[2], device=output.device)
    real = ~padding.expand(output.shape[0], 1, output.shape[2])
    return torch.where(real[..., None], wide, 0.0).sum((0, 2)), real.sum()
