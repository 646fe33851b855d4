r"""Which heads follow grammar: how often the word that a head attends to most is the one that a treebank links it to.

    a CoNLL-U file ─ treebank.py ─> sentences ─ questions.py ─> questions    "which word is the head of this subject?"
    a model ─ watch ─> weights between tokens ─ scores.py ─> weights between words ─> correct answers of each head
    these counts, and those of baselines that need no head ─ report.py ─> `Syntax`

`texts.py` tokenizes sentences and maps tokens to words; `run.py` has `syntax`, which does all of it; `coreference.py`
asks about mentions alone.

After Clark et al. 2019, "What Does BERT Look At? An Analysis of BERT's Attention": weights between words are summed
over the tokens of the word attended to and averaged over the tokens of the word that attends; a head's answer is the
word with the largest weight, special tokens and the word itself excluded. Differences from the paper: the first token
is excluded too, special or not, because heads of decoders use it as a sink; the head for a relation is chosen on one
half of the sentences and its accuracy is measured on the other half (the best of hundreds of heads, chosen where it is
scored, is partly luck); and the direction from a head word to its dependent is also read along a row of the weights
(there: along a column).

Letters: N tokens, n words, C heads of all layers, Q questions.

>>> import pathlib, tempfile
>>> from regard.models import load
>>> folder = tempfile.TemporaryDirectory()
>>> path = pathlib.Path(folder.name, "birds.conllu")
>>> lines = "1 Birds _ NOUN _ _ 3 nsubj _ _", "2 often _ ADV _ _ 3 advmod _ _", "3 sing _ VERB _ _ 0 root _ _"
>>> _ = path.write_text("\n\n".join(["\n".join(lines).replace(" ", "\t")] * 101))
>>> result = syntax(load("minilm"), path)
>>> {row.relation: (row.direction, row.accuracy, row.baseline, row.n) for row in result.rows if row.offset == 2}
{'nsubj': ('to head', 1.0, 1.0, 50)}
>>> folder.cleanup()
"""

from regard.heads.analysis.syntax.coreference import coreference
from regard.heads.analysis.syntax.report import Role, Row, Syntax
from regard.heads.analysis.syntax.run import syntax

__all__ = ["Role", "Row", "Syntax", "coreference", "syntax"]
