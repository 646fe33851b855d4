"""Real models on the layer: an encoder and a decoder, loaded from real weights.

`load("minilm")` and `load("smollm2")` are embedded models, which install as packages; `load(path)` takes any folder or
GGUF file of the families in `FAMILIES`.
"""

from regard.models.base import Batch
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.families import FAMILIES
from regard.models.loading import blank, load, source
from regard.models.packaged import EMBEDDED, Embedded

__all__ = ["EMBEDDED", "FAMILIES", "Batch", "Decoder", "Embedded", "Encoder", "ModelConfig", "blank", "load", "source"]
