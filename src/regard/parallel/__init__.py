"""More than one device: heads over them (tensor parallelism), or the sequence (context parallelism), or both.

    shard_heads(layer_or_model, mesh)              whole tokens in and out; each rank computes some heads
    SequenceSharding(mesh, method, balance)        how a sequence is split: "ring" or "alltoall"
      .shard(x), .gather(y)                        a rank's part of a sequence; the whole again
    shard_sequence(layer_or_model, sequence)       each rank has some tokens, and attends to all

On `torch.distributed` and its own tools; `docs/scaling.md` says which when, and what it costs.
"""

from regard.parallel.clip import clip_grad_norm_
from regard.parallel.collectives import Traffic, counting
from regard.parallel.heads import shard_heads
from regard.parallel.sequence import shard_sequence
from regard.parallel.token_layout import SequenceSharding, Tokens, gather, shard
from regard.parallel.watching import PartialCall as _registered  # noqa: F401  (importing it registers it with `watch`)

__all__ = [
    "SequenceSharding",
    "Tokens",
    "Traffic",
    "clip_grad_norm_",
    "counting",
    "gather",
    "shard",
    "shard_heads",
    "shard_sequence",
]
