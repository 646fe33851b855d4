"""Blocks of joint attention: text and image in one sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.heads import joint_blocks

TEXT, PATCHES = 5, 7
IS_IMAGE = torch.arange(TEXT + PATCHES) >= TEXT


class JointAttention(nn.Module):
    """Two streams with projections of their own and one softmax over both, as in diffusion transformers."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.of_text, self.of_image = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        both = torch.cat([self.of_text(text), self.of_image(image)], 1) * 2
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in both.chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v)


def summed(weights: Tensor, masks: list[Tensor]) -> Tensor:
    """(B, H, K, K) by the dense weights."""
    rows = [torch.stack([weights[:, :, a][..., b].sum((2, 3)) for b in masks], -1) for a in masks]
    return torch.stack(rows, 2)


def test_the_four_blocks_of_two_streams() -> None:
    model = JointAttention()
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(2, TEXT, 12), torch.randn(2, PATCHES, 12))
    blocks = joint_blocks(seen[0], IS_IMAGE)
    assert blocks.names == ("text", "image")
    weights = seen[0].weights().double()
    torch.testing.assert_close(blocks.sums, summed(weights, [~IS_IMAGE, IS_IMAGE]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(blocks.means.sum(-1), torch.ones(2, 3, 2).double(), atol=1e-5, rtol=0)
    expected = weights[:, :, :TEXT, TEXT:].sum(-1).mean(-1)
    torch.testing.assert_close(blocks.mean("text", "image"), expected, atol=1e-5, rtol=1e-5)


def test_groups_by_name_for_each_item_of_a_batch() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(3, 11, 8), torch.zeros(3, 11, dtype=torch.bool)
    padding[1, 9:] = True
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(x, x, x, key_padding_mask=padding, need_weights=False)
    number = torch.stack([torch.arange(11) // 4, torch.arange(11) // 5, torch.arange(11) % 3])
    groups = {name: number == i for i, name in enumerate(("a", "b", "c"))}
    blocks = joint_blocks(seen[0], groups)
    weights = seen[0].weights().double()
    members = torch.stack(list(groups.values()), 1).double()  # (B, K, N)
    queries = members * (~padding)[:, None]
    expected = torch.einsum("bkn,bhnm,blm->bhkl", queries, weights, members)
    torch.testing.assert_close(blocks.sums, expected, atol=1e-5, rtol=1e-5)
    assert blocks.counts[:, 0].tolist() == queries.sum(-1).tolist()


def test_the_patches_of_a_grid() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(*[torch.randn(1, 11, 8)] * 3, need_weights=False)
    grid = regard.draw.ImageGrid(2, 3, first=3)
    blocks = joint_blocks(seen[0], grid.is_image(11))
    assert blocks.counts[0].tolist() == [[5, 6], [5, 6]]


@pytest.mark.parametrize(
    "groups, error, words",
    [
        (IS_IMAGE.long(), TypeError, "groups 'image': expected a boolean mask of tokens, received torch.int64"),
        (IS_IMAGE[1:], ValueError, r"groups 'text': expected shape \(12,\) or \(2, 12\), received shape \(11,\)"),
        ({}, TypeError, "groups: expected a boolean mask of the image's tokens, or masks by name, received dict"),
        ({"a": IS_IMAGE, "b": IS_IMAGE}, ValueError, "groups: expected masks that do not overlap, received a, b"),
    ],
)
def test_groups_that_cannot_be(groups, error, words) -> None:
    model = JointAttention()
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(2, TEXT, 12), torch.randn(2, PATCHES, 12))
    with pytest.raises(error, match=words):
        joint_blocks(seen[0], groups)
    with pytest.raises(TypeError, match="layer: expected one layer of a record, received Record"):
        joint_blocks(seen, IS_IMAGE)
    with pytest.raises(ValueError, match="group: expected one of text, image, received 'sound'"):
        joint_blocks(seen[0], IS_IMAGE).mean("sound", "text")


def test_cross_attention_is_no_joint_sequence() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(torch.randn(1, 3, 8), *[torch.randn(1, 5, 8)] * 2, need_weights=False)
    with pytest.raises(ValueError, match="expected self attention over one joint sequence, received cross attention"):
        joint_blocks(seen[0], IS_IMAGE)
