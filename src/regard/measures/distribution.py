"""How attention is distributed: how sharply, how far, to which side, onto which keys.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import whole_number
from regard.measures.base import Measure, PerKey, PerQuery, Plane, Reduction, Strip, Sums, keys_near

__all__ = [
    "Distance",
    "Entropy",
    "Itself",
    "Local",
    "MaxLogit",
    "Near",
    "Next",
    "Offset",
    "Offsets",
    "OnFirst",
    "Peak",
    "Previous",
    "Received",
]


class Entropy(PerQuery):
    """-sum_j P_ij ln P_ij in nats, over the keys: 0 where one takes all, ln M where all share (Clark et al. 2019)."""

    gives = {"entropy": "query"}
    shareable = True
    needs_probabilities = True
    needs_logs = True

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return strip.entropies


class Peak(Measure):
    """The largest weight of each query, and which key has it (the first of equals). Its mean over queries is the
    confidence of Voita et al. 2019. A query that sees nothing has the peak 0 and the target -1."""

    gives = {"peak": "query", "target": "choice"}
    query_tensors = 1
    shareable = True

    def begin(self, plane: Plane) -> tuple[Tensor, Tensor]:
        return plane.new(plane.queries), plane.new(plane.queries, dtype=torch.int64).fill_(-1)

    def add(self, state: tuple[Tensor, Tensor], strip: Strip, prepared: Any) -> None:
        peak, column = strip.weights.max(-1)
        state[0][strip.where] = peak
        state[1][strip.where] = strip.numbers[column].masked_fill(strip.mass == 0, -1)

    def end(self, state: tuple[Tensor, Tensor], seen: Tensor) -> dict[str, Tensor]:
        return {"peak": state[0], "target": state[1]}


class MaxLogit(PerQuery):
    """The largest score of each query, after scale, softcap and bias: the log-sum-exp plus the log of its largest
    weight. Scores that grow in training announce that it diverges (Dehghani et al. 2023). 0 for a query that sees
    nothing."""

    gives = {"max_logit": "query"}
    shareable = True
    needs_scores = True

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return strip.weights.amax(-1)

    def with_scores(self, results: dict[str, Any], lse: Tensor) -> dict[str, Any]:
        peak = results["max_logit"]
        return {"max_logit": (lse + peak.log()).masked_fill(peak == 0, 0.0)}


class Offset(PerQuery):
    """Where a query looks on average, relative to itself: sum_j P_ij (j - i) / sum_j P_ij, by positions. Looking at the
    previous token is -1 (Vig & Belinkov 2019, who count i - j)."""

    gives = {"offset": "query"}
    shareable = True
    needs_probabilities = True

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        # Counted from the strip's own first position: small numbers keep the digits.
        origin = strip.q_positions[:, :1]
        mean = strip.times((strip.k_positions - origin)[:, None]) / strip.mass.masked_fill(strip.mass == 0, 1.0)
        return (mean - (strip.q_positions - origin)[:, None]).masked_fill(strip.mass == 0, 0.0)


class Distance(PerQuery):
    """How far a query looks on average: sum_j P_ij |i - j| / sum_j P_ij, by positions (Vig & Belinkov 2019)."""

    gives = {"distance": "query"}
    shareable = True
    needs_probabilities = True

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        # Keys before all the strip's queries, or after all of them, are one matrix product: |i - j| is i - j or j - i.
        columns, ahead = strip.near(0, 0)
        origin = strip.q_positions[:, :1]
        keys = (strip.k_positions - origin).to(strip.weights.dtype)
        sign = torch.ones_like(keys)
        sign[:, : columns.start] = -1.0
        sign[:, columns] = 0.0
        linear = strip.times(torch.stack([sign * keys, sign], -1)[:, None])  # (c, h, n, 2)
        total = linear[..., 0] - (strip.q_positions - origin)[:, None] * linear[..., 1]
        total = total + (strip.weights[..., columns] * ahead.abs()).sum(-1)
        return total / strip.mass.masked_fill(strip.mass == 0, 1.0)


class Offsets(Measure):
    """The mass by relative position, a mean over queries: (B, H, before + 1 + after) for keys `before` before the
    query, ..., itself, ..., `after` after it. Previous, self and next fall out of it (Clark et al. 2019)."""

    gives = {"offsets": "mean"}
    shareable = True

    def __init__(self, before: int = 8, after: int = 8) -> None:
        self.before, self.after = whole_number("before", before, at_least=0), whole_number("after", after, at_least=0)

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(self.before + 1 + self.after)

    def add(self, state: Tensor, strip: Strip, prepared: Any) -> None:
        offsets = torch.arange(-self.before, self.after + 1, device=strip.weights.device)
        state[strip.batch, strip.heads] += strip.at(strip.q_positions[..., None] + offsets).sum(2)

    def reduction(self, plane: Plane, prepared: Any) -> Reduction:
        offsets = torch.arange(-self.before, self.after + 1, device=plane.q_positions.device)
        return Reduction(lists=keys_near(plane, offsets, offsets))

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        padding = plane.padding
        state += (sums.lists if padding is None else sums.lists.masked_fill(padding[:, None, :, None], 0.0)).sum(2)

    def end(self, state: Tensor, seen: Tensor) -> dict[str, Tensor]:
        return {"offsets": state / seen.sum(-1).clamp(min=1)[..., None]}


class Near(Measure):
    """The mass by relative position, for each query: (B, H, N, before + 1 + after). `Offsets` is its mean.

    >>> import regard
    >>> q = k = torch.zeros(1, 1, 3, 5)  # equal weights
    >>> regard.measure(q, k, measures=Near(1, 1)).near[0, 0, 0]  # the first token has none before it
    tensor([0.0000, 0.3333, 0.3333])
    """

    gives = {"near": "query"}
    shareable = True
    untabled = ("near",)

    def __init__(self, before: int = 8, after: int = 8) -> None:
        self.before, self.after = whole_number("before", before, at_least=0), whole_number("after", after, at_least=0)

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(plane.queries, self.before + 1 + self.after)

    def add(self, state: Tensor, strip: Strip, prepared: Any) -> None:
        offsets = torch.arange(-self.before, self.after + 1, device=strip.weights.device)
        state[strip.where] = strip.at(strip.q_positions[..., None] + offsets)

    def reduction(self, plane: Plane, prepared: Any) -> Reduction:
        offsets = torch.arange(-self.before, self.after + 1, device=plane.q_positions.device)
        return Reduction(lists=keys_near(plane, offsets, offsets))

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        state.copy_(sums.lists)


class _OnKeys(PerQuery):
    """A number per query that is the sum of one list of keys."""

    shareable = True

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        state.copy_(sums.lists[..., 0])


class _AtOffset(_OnKeys):
    offset: ClassVar[int]

    def reduction(self, plane: Plane, prepared: Any) -> Reduction:
        return Reduction(lists=keys_near(plane, self.offset, self.offset))

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return strip.at(strip.q_positions[..., None] + self.offset)[..., 0]


class Previous(_AtOffset):
    """The mass on the token before the query's own: P_i,i-1 (Clark et al. 2019)."""

    gives = {"previous": "query"}
    offset = -1


class Itself(_AtOffset):
    """The mass on the query's own token: P_ii (Clark et al. 2019)."""

    gives = {"itself": "query"}
    offset = 0


class Next(_AtOffset):
    """The mass on the token after the query's own: P_i,i+1 (Clark et al. 2019)."""

    gives = {"next": "query"}
    offset = 1


class Local(_OnKeys):
    """The mass within `width` positions of the query, itself included: sum of P_ij over |i - j| <= width."""

    gives = {"local": "query"}

    def __init__(self, width: int = 3) -> None:
        self.width = whole_number("width", width, at_least=0)

    def reduction(self, plane: Plane, prepared: Any) -> Reduction:
        return Reduction(lists=keys_near(plane, -self.width, self.width))

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        columns, ahead = strip.near(self.width, self.width)
        return (strip.weights[..., columns] * (ahead.abs() <= self.width)).sum(-1)


class Received(PerKey):
    """The mass that each key gets from all queries but padding: sinks and heavy hitters stand out. Divide by the number
    of queries that may see it for the mean of Gu et al. 2024."""

    gives = {"received": "key"}
    shareable = True

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return strip.weights.sum(2)


class OnFirst(PerQuery):
    """The mass on the text's first token (the sink of Xiao et al. 2023, Gu et al. 2024): the first key that is not
    padding."""

    gives = {"on_first": "query"}
    shareable = True

    def reduction(self, plane: Plane, prepared: Any) -> Reduction:
        return Reduction(columns=plane.is_first[:, None, None].to(plane.dtype))

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.columns is not None
        state.copy_(sums.columns[..., 0])

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        if strip.plane.first is not None:
            return strip.times(strip.is_first[:, None])
        here = int(strip.numbers[0]) == 0
        return strip.weights[..., 0] if here else torch.zeros_like(strip.mass)
