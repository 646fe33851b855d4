"""Where a token is: `Rotary` turns queries and keys by it (`MultiAxisRotary` by several numbers), `Alibi` and
`RelativeBias` add to the scores, a `ScoreMod` changes them, `Temperature` scales queries."""

from regard.positions.bias import Alibi, Bias, DenseBias, RelativeBias, Saturated, as_biases
from regard.positions.multi_axis import MultiAxisRotary
from regard.positions.rotary import Rotary, rotate
from regard.positions.scalings import DynamicNTK, LinearScaling, Llama3, LongRoPE, YaRN
from regard.positions.score_mod import ScoreMod
from regard.positions.temperature import Temperature

Linear = LinearScaling  # its name up to 0.1

__all__ = [
    "Alibi",
    "Bias",
    "DenseBias",
    "DynamicNTK",
    "Linear",
    "LinearScaling",
    "Llama3",
    "LongRoPE",
    "MultiAxisRotary",
    "RelativeBias",
    "Rotary",
    "Saturated",
    "ScoreMod",
    "Temperature",
    "YaRN",
    "as_biases",
    "rotate",
]
