"""Numbers tuned to machines, each with how it was found; none of them changes an answer. Read as `tuning.NAME`.

Times are of two cores (AMD Zen 4). `benchmarks/kernels.py` and `benchmarks/layer.py` time them again. "No record" says
that no measurement is written down: such a number is free to be moved by whoever times it.
"""

from __future__ import annotations

# Any kernel
DENSE_LIMIT = 2**24  # elements of an N x M plane that may be built in full: 64 MB in float32, a limit on memory

# fused: torch's own attention computes what a mask hides, too
SURVEY_FROM = 2**20  # pairs from which the mask is asked how much it hides; smaller planes are done sooner. No record
MOSTLY_HIDDEN = 0.5  # visible share below which it is left to a kernel that skips what is hidden. No record

# A few queries that see everything, as in decoding: two plain products in float32 took 0.1 to 0.9 of the time of
# torch's CPU kernel, which goes through the keys once per query head and reads float16, and bfloat16 of a single
# query, number by number: 2.7 against 1.0 ms in bfloat16, 7.0 against 0.8 ms in float16 (1 query, 4,096 keys, 9 heads,
# 3 kv heads, width 64).
FORMULA_QUERIES = 32  # at most so many queries
FORMULA_QUERIES_FLOAT32 = 8  # in float32 fewer, and only with grouped heads
FORMULA_KEYS_FLOAT32 = 2**18  # numbers in the keys from which that holds in float32
FORMULA_QUERIES_BFLOAT16 = 2  # from the third query on torch's kernel is quick in bfloat16
FORMULA_KEYS = 2**25  # numbers in the keys that are made float32 at once: 128 MB, a limit on memory

# native, on CPUs with AMX tiles, which torch's kernel uses and ours does only where REGARD_ISA=amx asks for it
AMX_QUERIES = 16  # up to so many it is memory that counts, and not products. By reasoning: no machine here has AMX

# blockwise: strips of a few rows against all keys
STRIP = 2**19  # scores computed at a time: more do not stay in the caches, fewer make too many steps
TILE = 128  # keys per tile of the survey that finds what is hidden. No record
MANY_ROWS = 256  # with so many rows matrix products run at full speed
FEW_ROWS = 64  # with fewer they crawl
BLOCK_SIDE = 32  # rows and keys of a tile at least, where a mask is made of smaller blocks. No record
SMALL = 2**16  # scores up to which the formula in full is quicker: it launches fewer operators

# rotary
ROTARY_IN_PLACE = 2**17  # numbers from which a rotation waits for memory: one new tensor instead of five pays
ROTARY_FEW = 2**13  # numbers up to which the count of operations is what it costs
ROTARY_TABLE = 2**14  # positions in a table of cosines: 4 MB at width 64; later ones are computed each time
