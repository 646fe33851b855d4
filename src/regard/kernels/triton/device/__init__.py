"""Device code: one file per idea. Importing any of them imports Triton; `launch.py` does, at the first launch.

    visibility.py    which keys a query sees: ranges, documents, a dense mask; blocks that need no mask
    scores.py        from products to scores: scale, softcap, bias; dropout's hash
    forward.py       one block of queries against its keys, online softmax, statistics of rows
    finish.py        from sums over keys to output, log-sum-exp and statistics; joins keys that were split
    backward.py      gradients of queries; of keys and values; of scores, for biases
    key_sums.py      what keys received, and sums over weighted columns, from the log-sum-exp
    selected.py      single weights, from the log-sum-exp: lists of keys, the largest ones, a region

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v. In a block:
ROWS queries, KEYS keys; WIDTH and VALUES are D and E rounded up to powers of two.
"""
