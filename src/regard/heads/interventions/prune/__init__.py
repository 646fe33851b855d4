"""Remove attention heads for good: smaller projections, the same result as with the outputs of those heads set to zero.

In the weights, heads lie side by side. To remove a head is to remove its rows and columns::

    q_proj  (H * D, W)   rows          k_proj (G * D, W), v_proj (G * E, W)   rows, once no query head needs them
    out_proj (W, H * E)  columns       sinks, slopes, bias tables             one number, or one column, per head

`selection.py` finds the attention modules of a model and the heads that were asked for. `readers.py` describes each
kind of attention as a list of sizes that count heads (`sizes.py`): which axis of which parameter, and which numbers of
the module. `edit.py` removes heads from whatever is described so. `io.py` saves and loads a pruned model. To support
another kind of attention, write a reader for it.

Letters: H query heads, G kv heads, D head width of q and k, E head width of v, W model width.
"""

from regard.heads.interventions.prune.edit import prune
from regard.heads.interventions.prune.io import load_pruned, save_pruned

__all__ = ["load_pruned", "prune", "save_pruned"]
