"""Ways to compute the same thing. `reference` says what is right; the others are faster or smaller.

`run.py` is the only way in. To add a kernel: one file with the names that `call.py` lists, and a line in `KERNELS`
there (and in `MEASURING`, if it shows its weights).
"""

from regard.kernels import reference
from regard.kernels.call import Call, Kernel
from regard.kernels.run import KERNELS, Observer, available, choose, explain, observed_by

__all__ = ["KERNELS", "Call", "Kernel", "Observer", "available", "choose", "explain", "observed_by", "reference"]
