"""Shared by the tests of heads: every measure by its plain formula, from dense weights in float64.

An `Oracle` holds the weights P (B, H, N, M) of one attention; a row may be all 0, where its query sees no key. The
last query stands at the last key unless positions (N,) are given. Keys that no token sees are padding, and in self
attention the queries of their own. `agree` compares what a watch says with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard import measures

BEFORE, AFTER, NEAR, ROWS, COLS, LINKS = 3, 2, 2, 3, 2, 3  # the arguments of measures that have some
CROP = (1, 4, 0, 3)
WORDS = {"odd": range(1, 97, 2), "few": (5, 7, 11, 13, 17, 19, 23, 29)}  # ids of Tokens


@dataclass(frozen=True)
class Oracle:
    weights: Tensor  # P (B, H, N, M)
    positions: Tensor | None = None  # (N,)
    ids: Tensor | None = None  # (B, M), the ids of the keys (in self attention without a cache: of the queries)
    values: Tensor | None = None  # (B, H, M, E), one per query head
    out: Tensor | None = None  # (W, H * E), the weight of the output projection; none: as it is
    real: Tensor | None = None  # (B, M), the keys that are no padding; none: those that some query sees

    @property
    def p(self) -> Tensor:
        return self.weights.double()

    @property
    def at(self) -> Tensor:
        """Where the queries stand, (N,)."""
        n, m = self.p.shape[-2:]
        return torch.arange(m - n, m) if self.positions is None else self.positions

    @property
    def ahead(self) -> Tensor:
        """Key minus query, (N, M): the previous token is -1."""
        return torch.arange(self.p.shape[-1])[None, :] - self.at[:, None]

    @property
    def mass(self) -> Tensor:
        return self.p.sum(-1)  # (B, H, N)

    @property
    def seeing(self) -> Tensor:
        return self.mass > 0  # (B, H, N)

    @property
    def real_keys(self) -> Tensor:
        """The keys that are no padding, (B, M)."""
        return (self.p > 0).any(2).any(1) if self.real is None else self.real

    def text(self, item: int, rows: Tensor) -> Tensor:
        """The map (H, n, m) of one text without padding, where `rows` (B, N) are the queries that are tokens."""
        return self.p[item][:, rows[item]][:, :, self.real_keys[item]]

    def blind(self, hidden: Tensor) -> Oracle:
        """The same where the queries `hidden` (B, N) see no key."""
        return replace(self, weights=self.weights.masked_fill(hidden[:, None, :, None], 0.0))

    def where(self, chosen: Tensor) -> Tensor:
        """Mass on the chosen keys: (N, M) or (B, 1, N, M) -> (B, H, N)."""
        return (self.p * chosen).sum(-1)

    def over_mass(self, total: Tensor) -> Tensor:
        return torch.where(self.seeing, total / self.mass.clamp(min=1e-300), 0.0)

    # one number per query, (B, H, N)

    def entropy(self) -> Tensor:
        return -torch.special.xlogy(self.p, self.p).sum(-1)

    def peak(self) -> Tensor:
        return self.p.amax(-1)

    def distance(self) -> Tensor:
        return self.over_mass((self.p * self.ahead.abs()).sum(-1))

    def offset(self) -> Tensor:
        return self.over_mass((self.p * self.ahead).sum(-1))

    def local(self) -> Tensor:
        return self.where(self.ahead.abs() <= NEAR)

    def on_first(self) -> Tensor:
        first = self.real_keys.int().argmax(1)  # (B,)
        return torch.stack([p[..., key] for p, key in zip(self.p, first, strict=True)])

    def previous(self) -> Tensor:
        return self.where(self.ahead == -1)

    def itself(self) -> Tensor:
        return self.where(self.ahead == 0)

    def next(self) -> Tensor:
        return self.where(self.ahead == 1)

    def earlier_same(self) -> Tensor:
        """(B, 1, N, M): key j stands before query i, and their ids are the same."""
        assert self.ids is not None
        queries = self.ids[:, self.at]  # (B, N)
        tokens = self.ids.masked_fill(~self.real_keys, -1)  # padding is a copy of nothing
        return ((queries[:, :, None] == tokens[:, None, :]) & (self.ahead < 0))[:, None]

    def duplicate(self) -> Tensor:
        return self.where(self.earlier_same())

    def induction(self) -> Tensor:
        after = torch.zeros_like(self.earlier_same())
        after[..., 1:] = self.earlier_same()[..., :-1]  # the key after it
        return self.where(after)

    def norms(self) -> Tensor:
        """|v_j W_h|: (B, H, M)."""
        assert self.values is not None
        v = self.values.double()
        if self.out is None:
            return v.norm(dim=-1)
        return torch.einsum("bhme,whe->bhmw", v, self.out.double().unflatten(1, (v.shape[1], -1))).norm(dim=-1)

    def contribution(self) -> Tensor:
        return torch.einsum("bhnm,bhm->bhn", self.p, self.norms())

    # other shapes

    def received(self) -> Tensor:
        return self.p.sum(-2)  # (B, H, M)

    def contributed(self) -> Tensor:
        return self.received() * self.norms()  # (B, H, M)

    def offsets(self) -> Tensor:
        at = torch.stack([self.where(self.ahead == o) for o in range(-BEFORE, AFTER + 1)], -1)  # (B, H, N, offsets)
        return at.sum(-2) / self.seeing.sum(-1, keepdim=True).clamp(min=1)

    def heatmap(self, rows: Tensor) -> Tensor:
        texts = [self.text(item, rows) for item in range(len(self.p))]
        size = min(ROWS, max(p.shape[1] for p in texts)), min(COLS, max(p.shape[2] for p in texts))
        out = self.p.new_zeros(*self.p.shape[:2], *size)
        for item, p in enumerate(texts):
            n, m = p.shape[1:]
            for i in range(n):
                for j in range(m):
                    out[item, :, i * min(ROWS, n) // n, j * min(COLS, m) // m] += p[:, i, j]
        return out

    def crop(self, rows: Tensor) -> Tensor:
        texts = [self.text(item, rows)[:, CROP[0] : CROP[1], CROP[2] : CROP[3]] for item in range(len(self.p))]
        n, m = (max(p.shape[axis] for p in texts) for axis in (1, 2))
        return torch.stack([torch.nn.functional.pad(p, (0, m - p.shape[2], 0, n - p.shape[1])) for p in texts])

    def tokens(self) -> Tensor:
        assert self.ids is not None
        chosen = [torch.isin(self.ids, torch.tensor(list(words))) for words in WORDS.values()]  # (B, M) each
        return torch.stack([self.where(c[:, None, None, :]) for c in chosen], -1)  # (B, H, N, K)

    def divergence(self) -> Tensor:
        p, q = self.p[:, :, None], self.p[:, None]  # (B, H, 1, N, M) and (B, 1, H, N, M)
        middle = (p + q) / 2
        each = [torch.special.xlogy(x, x) - torch.special.xlogy(x, middle) for x in (p, q)]
        rows = sum(each).sum(-1) / 2  # (B, H, H, N)
        return rows.sum(-1)  # (B, H, H): summed over queries


PER_QUERY = ("entropy", "peak", "distance", "offset", "local", "on_first", "previous", "itself", "next")
PER_HEAD = ("received", "offsets", "heatmap", "crop", "divergence")
BY_IDS = ("induction", "duplicate", "tokens")
BY_VALUES = ("contribution", "contributed")
# Of cross attention: what does not ask where the queries stand among the keys.
OF_CROSS = ("entropy", "peak", "on_first", "received", "heatmap", "crop", "divergence", "links", "target")

_MADE: dict[str, Callable[[], Any]] = {
    "offsets": lambda: measures.Offsets(BEFORE, AFTER),
    "local": lambda: measures.Local(NEAR),
    "heatmap": lambda: measures.Heatmap(ROWS, COLS),
    "crop": lambda: measures.Crop(*CROP),
    "links": lambda: measures.Links(LINKS),
    "tokens": lambda: measures.Tokens({name: list(words) for name, words in WORDS.items()}),
    "induction": lambda: measures.Induction(),
    "duplicate": lambda: measures.Duplicate(),
    "divergence": lambda: measures.Divergence(),
}


def wanted(*, ids: bool = False, out: Tensor | str | None = None, without: Sequence[str] = ()) -> list[Any]:
    """All measures, as `watch` takes them: strings where there is nothing to set.

    `ids`: also those which ask what the tokens are. `out`: also `contribution`, by this weight or the layer's "own".
    """
    names = [*PER_QUERY, *PER_HEAD, "links", *(BY_IDS if ids else ())]
    made = [_MADE[name]() if name in _MADE else name for name in names if name not in without]
    if out is not None:
        made.append("contribution" if isinstance(out, str) else measures.Contribution(out))
    return made


def agree(
    layer: Any,
    oracle: Oracle,
    *,
    kind: str | None = "self",
    rows: Tensor | None = None,
    counted: Tensor | None = None,
    without: Sequence[str] = (),
    atol: float = 1e-5,
) -> None:
    """Every measure of one layer of a watch is the oracle's. `rows` (B, N) are the queries to look at; all by default.

    Of cross attention, and where `kind` is None, only what does not ask where the queries stand among the keys.
    What is summed over queries is summed over those that are no padding, `counted` (B, N): by default `rows`, and
    without these, in self attention, those whose own key is seen.
    """
    b, h, n, m = oracle.weights.shape
    if counted is None:
        counted = rows if rows is not None or kind != "self" or n > m else oracle.real_keys[:, m - n :]
    counted = torch.ones(b, n, dtype=torch.bool) if counted is None else counted
    oracle = replace(oracle, real=oracle.blind(~counted).real_keys)
    rows = torch.ones(b, n, dtype=torch.bool) if rows is None else rows
    look = (rows[:, None, :] & oracle.seeing).expand(b, h, n)
    names = [*PER_QUERY, *(BY_IDS if oracle.ids is not None else ())]
    names += ["contribution"] if oracle.values is not None else []
    assert kind is None or layer.kind == kind
    if kind != "self":
        without = [*without, *({*PER_QUERY, *PER_HEAD, *BY_IDS} - set(OF_CROSS))]
    for name in names:
        if name in without:
            continue
        got, right = getattr(layer, name), getattr(oracle, name)()
        assert got.shape == right.shape, f"{name}: {tuple(got.shape)}, not {tuple(right.shape)}"
        # (an offset is a sum of distances with signs: its rounding error is of their size)
        apart = float(oracle.distance()[look].max()) if name in ("distance", "offset") and look.any() else 0.0
        close(got[look], right[look], name, atol * (1 + apart))
        assert not got[~oracle.seeing].any(), f"{name}: rows that see no key are 0"

    of_tokens = oracle.blind(~counted)
    for name in [*PER_HEAD, *(["contributed"] if oracle.values is not None else [])]:
        if name in without:
            continue
        got = getattr(layer, name)
        right = getattr(of_tokens, name)(*([counted] if name in ("heatmap", "crop") else []))
        assert got.shape == right.shape, f"{name}: {tuple(got.shape)}, not {tuple(right.shape)}"
        close(got, right, name, atol * n)

    if "target" not in without:
        assert layer.target.dtype == torch.int64
        at_target = oracle.p.gather(-1, layer.target.clamp(min=0)[..., None])[..., 0]
        close(at_target[look], oracle.peak()[look], "target", atol)
    if "links" not in without:
        keys, weights = layer.links
        k = min(LINKS, m)
        assert keys.dtype == torch.int64
        assert keys.shape == weights.shape == (b, h, n, k)
        close(weights[look], oracle.p.topk(k, -1).values[look], "links.weights", atol)
        linked = weights > 0
        named = keys.masked_fill(~linked, -1).sort(-1).values
        assert not ((named.diff(dim=-1) == 0) & (named[..., 1:] >= 0)).any(), "links: a key is named twice"
        there = oracle.p.gather(-1, keys.clamp(min=0))
        close((there * linked)[look], (weights * linked)[look], "links.keys", atol)


def close(got: Tensor, right: Tensor, what: str, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        got.detach().double(), right.detach().double(), atol=atol, rtol=atol, msg=lambda m: f"{what}: {m}"
    )


def means(oracles: Sequence[Oracle], name: str) -> Tensor:
    """Over several forwards: the mean of a measure per query, over every query that sees a key, (H,)."""
    values = [getattr(o, name)().movedim(1, 0).flatten(1) for o in oracles]
    seeing = [o.seeing.movedim(1, 0).flatten(1).double() for o in oracles]
    total = sum((v * s).sum(1) for v, s in zip(values, seeing, strict=True))
    return total / sum(s.sum(1) for s in seeing)
