"""Who may see whom. A mask is a small object that answers for any block of (query, key) pairs, so that no kernel
ever needs the whole N x M matrix, and masks compose with `&`, `|` and `~`.

    Causal() & Window(128) & Documents(ids)        Causal() | Prefix(16)        ~Padding(lengths=n)

`Causal`, `Window`, `Prefix` and `Chunk` compare *positions* (where a token stands); `Padding`, `Documents`, `Blocks`,
`Tree`, `Keep` and `Hide` index *slots* (where it lies in the tensor). The two differ with caches, packed sequences and
padding on the left.

A new mask is one class: `fields` names what it is made of, `check` refuses wrong sizes, `block` answers for a tile.
Optional: `survey` says which tiles are wholly hidden or wholly visible, so that kernels can skip them, and `part` gives
the mask of one tile, so that a part of the plane can be computed alone.

Letters: B batch, H query heads, N queries, M keys; n, m the sides of one tile; R, C the number of tiles down, across.
"""

from regard.masks.algebra import And, Not, Or, conjuncts
from regard.masks.base import Mask
from regard.masks.blocks import Blocks
from regard.masks.causal import Causal, Prefix, Window
from regard.masks.chunk import Chunk
from regard.masks.dense import Hide, Keep, as_mask
from regard.masks.padding import Documents, Padding
from regard.masks.tiles import Grid, Survey, Tile
from regard.masks.tree import Tree

__all__ = [
    "And",
    "Blocks",
    "Causal",
    "Chunk",
    "Documents",
    "Grid",
    "Hide",
    "Keep",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "Survey",
    "Tile",
    "Tree",
    "Window",
    "as_mask",
    "conjuncts",
]
