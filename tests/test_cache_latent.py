"""`LatentCache`: what it holds, and the words in which it refuses. With the layer: `tests/variants`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import LatentCache
from regard.cache import together

pytestmark = pytest.mark.on_device


def token(n: int = 1, batch: int = 2, rank: int = 5, rope: int = 3, start: float = 0.0) -> tuple[Tensor, Tensor]:
    latents = torch.arange(start, start + n)[None, :, None].expand(batch, n, rank)
    return latents, -latents[..., :1].expand(batch, n, rope)


def test_latents_and_rotary_keys_stand_side_by_side() -> None:
    cache = LatentCache()
    assert (len(cache), cache.tokens, cache.latents, cache.lengths, cache.bytes_per_token, cache.nbytes) == (
        0,
        None,
        None,
        None,
        0,
        0,
    )
    for i in range(7):
        tokens = cache.append(*token(start=float(i)))
    assert tokens.shape == (2, 1, 7, 8)
    assert tokens[0, 0, :, 0].tolist() == list(range(7))
    assert tokens[1, 0, :, 5].tolist() == [-float(i) for i in range(7)]
    assert cache.latents.shape == (2, 1, 7, 5)
    assert cache.rotary_keys.shape == (2, 1, 7, 3)
    assert cache.latents.data_ptr() == tokens.data_ptr()
    assert cache.bytes_per_token == 8 * 4
    assert cache.nbytes == 2 * 8 * 8 * 4  # room for 8
    assert repr(cache) == "LatentCache(7 tokens, batch 2, 32 bytes per token)"


def test_truncate_reorder_clear() -> None:
    cache = LatentCache(capacity=4)
    cache.append(*token(4))
    cache.truncate(3)
    assert len(cache) == 3
    cache.truncate(torch.tensor([3, 1]))
    assert cache.ragged
    assert cache.lengths.tolist() == [3, 1]
    cache.append(*token(1, start=9.0))
    assert cache.latents[1, 0, 1, 0] == 9
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.lengths.tolist() == [2, 2, 4]
    cache.clear()
    assert len(cache) == 0
    cache.append(*token(2, batch=1, rank=7))  # of other sizes
    assert cache.latents.shape == (1, 1, 2, 7)


def test_calls_of_several_layers_that_fail_are_undone() -> None:
    caches = [LatentCache(), LatentCache()]
    for cache in caches:
        cache.append(*token(2))

    def fail() -> None:
        with together(caches):
            caches[0].append(*token(3, start=5.0))
            caches[1].clear()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [len(cache) for cache in caches] == [2, 2]
    assert caches[1].latents[0, 0, :, 0].tolist() == [0.0, 1.0]


def test_copies_hold_the_same_and_belong_to_nobody() -> None:
    cache, owner = LatentCache(), torch.nn.Identity()
    cache.append(*token(2))
    cache.set_source(owner)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.check_source(torch.nn.Identity())
        assert torch.equal(other.tokens, cache.tokens)
        other.append(*token())
    assert len(cache) == 2


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "options, tensors, words",
    [
        (
            {},
            (torch.ones(2, 1, 5), torch.ones(2, 2, 3)),
            r"cache: expected latents \(B, N, R\) and rotary keys \(B, N, P\)",
        ),
        ({}, (torch.ones(2, 1, 7), torch.ones(2, 1, 1)), r"cache: expected latents of rank 5, received rank 7"),
        ({}, (torch.ones(2, 1, 5), torch.ones(2, 1, 7)), r"cached keys: expected batch, heads and width \(2, 1, 8\)"),
        ({}, (torch.ones(3, 1, 5), torch.ones(3, 1, 3)), r"cached keys: expected batch, heads and width"),
        (
            {"limit": 3},
            token(2),
            r"cache: expected at most 3 tokens, received 2 held and 2 new; remedy: a larger limit",
        ),
    ],
)
def test_refusals(options: dict[str, Any], tensors: tuple[Tensor, Tensor], words: str) -> None:
    cache = LatentCache(**options)
    cache.append(*token(2))
    with pytest.raises(ValueError, match=words):
        cache.append(*tensors)
    assert len(cache) == 2


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"LatentCache: expected a capacity of at least 0 and a limit not below it"):
        LatentCache(3, limit=2)
    cache, owner = LatentCache(), torch.nn.Identity()
    cache.append(*token(2))
    cache.set_source(owner)
    with pytest.raises(ValueError, match=r"cache: expected one for each layer.*remedy: \[LatentCache\(\) for"):
        cache.check_source(torch.nn.Identity())
    with pytest.raises(ValueError, match=r"truncate: expected a length from 0 to 2, received 3"):
        cache.truncate(3)
    with pytest.raises(TypeError, match=r"cached keys: expected torch.float32"):
        cache.append(*(x.double() for x in token()))
