"""Convert attention weights from and to the names and packing of other libraries, one file per layout; and `swap`,
which replaces `nn.MultiheadAttention`."""

from regard.layouts.convert import export, load, load_block, names
from regard.layouts.rotary_pairs import rotary_pairs
from regard.layouts.swap import swap

__all__ = ["export", "load", "load_block", "names", "rotary_pairs", "swap"]
