"""The same weights as others name and pack them, one file per layout, both directions; and `swap`, which puts ours
where an `nn.MultiheadAttention` was."""

from regard.layouts.convert import export, load, load_block, names
from regard.layouts.rotary_pairs import rotary_pairs
from regard.layouts.swap import swap

__all__ = ["export", "load", "load_block", "names", "rotary_pairs", "swap"]
