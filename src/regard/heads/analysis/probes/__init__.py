"""Probes with known answers: each runs a model on texts made for it and gives every head a score, beside a baseline.

    induction          repeated random tokens                      Olsson et al. 2022
    retrieval          a needle in a haystack                      Wu et al. 2024
    streaming          attention limited to sinks and a window     Xiao et al. 2024 (DuoAttention)
    successor          ordered lists: Monday -> Tuesday            Gould et al. 2023
    copy_suppression   writing against the attended token          McDougall et al. 2023
    alignment          monotonic cross-attention

`induction` gives a `Record`; the others a `ProbeResult`: `scores[layer]` (H,), `baseline`, `spread`, `.table()`.
"""

from regard.heads.analysis.probes.alignment import Alignment, alignment
from regard.heads.analysis.probes.copy_suppression import CopySuppression, copy_suppression
from regard.heads.analysis.probes.induction import induction, repeated
from regard.heads.analysis.probes.result import ProbeResult
from regard.heads.analysis.probes.retrieval import Retrieval, retrieval
from regard.heads.analysis.probes.streaming import Streaming, streaming
from regard.heads.analysis.probes.successor import Successor, successor

__all__ = [
    "Alignment",
    "CopySuppression",
    "ProbeResult",
    "Retrieval",
    "Streaming",
    "Successor",
    "alignment",
    "copy_suppression",
    "induction",
    "repeated",
    "retrieval",
    "streaming",
    "successor",
]
