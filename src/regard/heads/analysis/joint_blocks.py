"""How much groups of tokens attend to each other: text and image in joint attention, prompt and answer, two texts.

Letters: B batch, H query heads, N tokens, K groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.heads.record.layer_record import LayerRecord
from regard.measures import Tokens

__all__ = ["JointBlocks", "joint_blocks"]


@dataclass(frozen=True)
class JointBlocks:
    """The weights of each head, summed over blocks of queries and keys.

    Attributes:
        names: the groups.
        sums: (B, H, K, K): the sum over all queries of a group (rows) and all keys of a group (columns).
        counts: (B, H, K): how many queries of each group there are, padding left out.
    """

    names: tuple[str, ...]
    sums: Tensor
    counts: Tensor

    @property
    def means(self) -> Tensor:
        """What a query of one group gives to all keys of another, on average: (B, H, K, K). Rows sum to 1."""
        return self.sums / self.counts.clamp(min=1)[..., None]

    def mean(self, queries: str, keys: str) -> Tensor:
        """One block of `means` by the names of its groups, (B, H): `blocks.mean("text", "image")`."""
        for name in (queries, keys):
            if name not in self.names:
                raise bad_value("group", expected=f"one of {', '.join(self.names)}", received=repr(name))
        return self.means[:, :, self.names.index(queries), self.names.index(keys)]


def joint_blocks(layer: LayerRecord, groups: Mapping[str, Tensor] | Tensor) -> JointBlocks:
    """The weights of a layer's heads, summed into blocks: text to text, text to image, image to text, image to image.
    Exact at any length: the N x N weights are not built.

    Args:
        layer: one layer of what `watch(model, keep="qk")` gave, with self attention over the joint sequence.
        groups: boolean masks of tokens by name, (N,) or (B, N), none of which overlap; or one mask, True for the tokens
            of the image: the groups are "text" and "image" then. `ImageGrid.is_image` gives such a mask.

    >>> import regard
    >>> joint = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(joint, keep="qk") as seen, torch.no_grad():
    ...     x = torch.randn(1, 5, 8)  # 2 tokens of text, 3 of an image
    ...     _ = joint(x, x, x, need_weights=False)
    >>> blocks = regard.heads.joint_blocks(seen[0], torch.tensor([False, False, True, True, True]))
    >>> blocks.names, blocks.sums.shape
    (('text', 'image'), torch.Size([1, 2, 2, 2]))
    >>> torch.allclose(blocks.mean("text", "text") + blocks.mean("text", "image"), torch.ones(1, 2).double())
    True
    """
    if not isinstance(layer, LayerRecord):
        expected = "one layer of a record"
        raise bad_type("layer", expected=expected, received=type(layer).__name__, remedy="joint_blocks(seen[0], ...)")
    _, _, n, m = layer.shape
    if layer.kind != "self" or n != m:
        received = f"{layer.kind} attention of {n} queries and {m} keys"
        raise bad_value(layer.name, expected="self attention over one joint sequence", received=received)
    masks = _masks(groups, layer)
    on_keys = layer.measure(Tokens(masks))["tokens"].double()  # (B, H, N, K)
    stacked = torch.stack([mask.to(on_keys.device).expand(layer.batch_size, -1) for mask in masks.values()], 1)
    counted = layer.last_tokens().to(on_keys.device)  # (B, H, N)
    queries = (stacked[:, None] & counted[:, :, None]).double()  # (B, H, K, N)
    return JointBlocks(tuple(masks), queries @ on_keys, queries.sum(-1))


def _masks(groups: Mapping[str, Tensor] | Tensor, layer: LayerRecord) -> dict[str, Tensor]:
    """Masks (1|B, N) by name, none of which overlap."""
    if isinstance(groups, Tensor):
        groups = {"text": groups.logical_not(), "image": groups} if groups.dtype is torch.bool else {"image": groups}
    if not isinstance(groups, Mapping) or not groups:
        expected = "a boolean mask of the image's tokens, or masks by name"
        raise bad_type("groups", expected=expected, received=type(groups).__name__)
    n, batch = layer.num_keys, layer.batch_size
    masks: dict[str, Tensor] = {}
    for name, mask in groups.items():
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            received = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
            raise bad_type(f"groups {name!r}", expected="a boolean mask of tokens", received=received)
        if mask.dim() not in (1, 2) or mask.shape[-1] != n or (mask.dim() == 2 and mask.shape[0] not in (1, batch)):
            raise bad_value(
                f"groups {name!r}", expected=f"shape ({n},) or ({batch}, {n})", received=f"shape {shape_of(mask)}"
            )
        masks[name] = mask.view(-1, n)
    if sum(mask.to("cpu", torch.int64) for mask in masks.values()).max() > 1:  # type: ignore[union-attr]
        raise bad_value("groups", expected="masks that do not overlap", received=", ".join(masks))
    return masks
