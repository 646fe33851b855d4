"""Circuits from weights alone, by Elhage et al. 2021: what each head copies, matches and writes, and which heads read
what others wrote. No text is run. (`logit_lens` reads a record.)

    factored.py      matrices of low rank as two factors
    weights.py       q, k, v and output by head, norms and embeddings; norms folded in
    reading.py       these of regard's models and of transformers'
    scores.py        W_OV, W_QK; copying and matching scores
    composition.py   Q-, K- and V-composition between heads
    top_tokens.py    the tokens that a head writes
"""

from regard.heads.analysis.circuits.composition import Baseline, Composition, composition
from regard.heads.analysis.circuits.factored import FactoredMatrix
from regard.heads.analysis.circuits.reading import read
from regard.heads.analysis.circuits.scores import Copying, Matching, copying, matching, ov, qk
from regard.heads.analysis.circuits.top_tokens import TokenLogit, TopTokens, logit_lens, writes
from regard.heads.analysis.circuits.weights import LayerWeights, ModelWeights

__all__ = [
    "Baseline",
    "Composition",
    "Copying",
    "FactoredMatrix",
    "LayerWeights",
    "Matching",
    "ModelWeights",
    "TokenLogit",
    "TopTokens",
    "composition",
    "copying",
    "logit_lens",
    "matching",
    "ov",
    "qk",
    "read",
    "writes",
]
