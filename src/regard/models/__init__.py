"""An encoder and a decoder built of the attention layer, with trained weights.

`load("minilm")` and `load("smollm2")` load models that install as Python packages; `load(path)` loads a folder or GGUF
file of one of the `FAMILIES`.
"""

from regard.models.base import Batch
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.families import FAMILIES
from regard.models.loading import blank, load, source
from regard.models.packaged import EMBEDDED, Embedded

__all__ = ["EMBEDDED", "FAMILIES", "Batch", "Decoder", "Embedded", "Encoder", "ModelConfig", "blank", "load", "source"]
