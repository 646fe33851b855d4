"""Keys and values of earlier tokens, one cache per layer, passed in and updated in place.

`KVCache` grows and keeps everything, as it comes or as int8; `fork` shares its tokens with another.
`RollingCache` is bounded: it keeps the first few tokens and the last `window`.
`HeadCache` does so for some kv heads, and keeps all tokens of the others.
`LatentCache` keeps what latent attention makes its keys and values of.

A layer calls `extend` with new keys and values, and gets all of them back together with their positions (`Slots`), so
that masks and rotary are right. It does so inside `attending`, after which a cache may forget tokens.

Tokens that are held are never written over. So a call that fails, of one layer or of several (`together`), is undone by
going back to the tensors and lengths from before it.

Letters: B batch, G kv heads, N new tokens, M slots after appending, D head width of keys, E head width of values.
"""

from regard.cache.head_cache import HeadCache, StoredHeads, StreamingHeads
from regard.cache.kv_cache import KVCache
from regard.cache.latent_cache import LatentCache
from regard.cache.rolling_cache import RollingCache, tokens_read
from regard.cache.slots import Rotate, Slots, together
from regard.cache.stored import Segment, Stored, quantize

__all__ = [
    "HeadCache",
    "KVCache",
    "LatentCache",
    "RollingCache",
    "Rotate",
    "Segment",
    "Slots",
    "Stored",
    "StoredHeads",
    "StreamingHeads",
    "quantize",
    "together",
    "tokens_read",
]
