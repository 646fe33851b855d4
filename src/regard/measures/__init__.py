"""What can be asked of attention weights: reductions over blocks of them, each a small class.

A kernel hands out the weights strip by strip: a `Strip` is a few query rows against all the keys that they may see,
with weights exp(score - lse), exact and already normalised. A measure takes from each strip what it wants, and the
strip is forgotten; so memory is O(N) at any length. A new measure is a subclass of one of three:

    PerQuery   a number per query:   `of(strip, prepared) -> (c, h, n)`     entropy, peak, distance, ...
    PerKey     a number per key:     `of(strip, prepared) -> (c, h, m)`     received
    Measure    anything else:        `begin`, `add`, `end`                  offsets, heatmap, links, ...

where `prepare(plane)` may compute once what all strips need.

    class Confident(PerQuery):
        gives = {"confident": "query"}

        def of(self, strip, prepared):
            return (strip.weights.amax(-1) > 0.9).to(strip.weights.dtype)

A measure that is made of sums over keys may say so in `reduction`: over lists of keys, some for each query
(`KeyLists`), or over columns, each key with a factor. Kernels that can compute such sums in their own loop hand them to
`take`, and no strip is shown; `Pairs` is the plainest one.

A row that may see nothing has 0 everywhere and does not count in a mean. With sinks rows sum below 1.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from regard.measures.base import KeyLists, Measure, PerKey, PerQuery, Plane, Reduction, Strip, Sums
from regard.measures.contribution import Contribution, Divergence, rollout
from regard.measures.distribution import (
    Distance,
    Entropy,
    Itself,
    Local,
    MaxLogit,
    Near,
    Next,
    Offset,
    Offsets,
    OnFirst,
    Peak,
    Previous,
    Received,
)
from regard.measures.maps import Crop, Heatmap, Links, TopLinks
from regard.measures.pairs import Pairs, PairSets
from regard.measures.run import DEFAULT, MeasureLike, Measurements, MeasureRun, as_measures
from regard.measures.tokens import Duplicate, Induction, Tokens

__all__ = [
    "DEFAULT",
    "Contribution",
    "Crop",
    "Distance",
    "Divergence",
    "Duplicate",
    "Entropy",
    "Heatmap",
    "Induction",
    "Itself",
    "KeyLists",
    "Links",
    "Local",
    "MaxLogit",
    "Measure",
    "MeasureLike",
    "MeasureRun",
    "Measurements",
    "Near",
    "Next",
    "Offset",
    "Offsets",
    "OnFirst",
    "PairSets",
    "Pairs",
    "Peak",
    "PerKey",
    "PerQuery",
    "Plane",
    "Previous",
    "Received",
    "Reduction",
    "Strip",
    "Sums",
    "Tokens",
    "TopLinks",
    "as_measures",
    "rollout",
]
