"""Looking at a model that is spread over processes: one record on every rank, equal to that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import regard
from distributed import together
from regard import measures, models, parallel
from regard.heads import Record
from regard.models.config import ModelConfig

TOKENS = 19
MEASURES = [*measures.DEFAULT, "heatmap", "links", "contribution", "induction", "duplicate", "divergence"]


def new_model(kind: str) -> models.Decoder | models.Encoder:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "layers": 2,
        "embed_dim": 24,
        "num_heads": 12,
        "vocabulary": 31,
        "inner": 24,
        "context": 64,
    }
    if kind == "decoder":
        config = ModelConfig(**sizes, causal=True, num_kv_heads=3, positions="rotary")
        return models.Decoder(config).double().eval()
    return models.Encoder(ModelConfig(**sizes, order="post", positions="learned")).double().eval()


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts, the second padded; half of each is said twice, so that induction has something to find."""
    ids = torch.randint(0, 31, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    ids[:, 9:18] = ids[:, :9]
    keep = torch.ones(2, TOKENS, dtype=torch.bool)
    keep[1, 14:] = False
    return ids, keep


def apart(ours: Record, theirs: Record) -> float:
    """The largest difference of any number in two records, which must have the same shape throughout."""
    assert ours.layers == theirs.layers
    worst = 0.0
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.uniform is not None
        assert right.uniform is not None
        pairs = [(mine.values, right.values), (mine.uniform.values, right.uniform.values)]
        if right.exact:
            pairs.append(({"weights": mine.weights()}, {"weights": right.weights()}))
        if right.keeps_values:
            names = ("q", "k", "v", "output", "input")
            pairs.append(tuple({name: getattr(one, name) for name in names} for one in (mine, right)))
            pairs.append(({"": mine.projected()}, {"": right.projected()}))
        for some, others in pairs:
            assert some.keys() == others.keys()
            for name in some:
                for a, b in zip(tree_leaves(some[name]), tree_leaves(others[name]), strict=True):
                    assert a.shape == b.shape, (name, a.shape, b.shape)
                    worst = max(worst, float((a.double() - b.double()).abs().max()))
    return worst


def spread(model: Any, how: str, size: int, ids: torch.Tensor) -> torch.Tensor:
    """Spread a model; gives the ids that this rank gets."""
    *both, method, balance = how.split()
    if both:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("heads", "sequence"))
        parallel.shard_heads(model, mesh["heads"])
        mesh = mesh["sequence"]
    else:
        mesh = init_device_mesh("cpu", (size,))
    if method == "heads":
        parallel.shard_heads(model, mesh)
        return ids
    sequence = parallel.SequenceSharding(mesh, method, balance=balance == "balanced")  # type: ignore[arg-type]
    parallel.shard_sequence(model, sequence)
    return sequence.shard(ids)


def each(rank: int, size: int) -> dict[str, float]:
    """How far apart the records are, for every way to spread a model."""
    ways = {
        2: ["heads -", "ring balanced", "alltoall plain"],
        3: ["heads -", "ring plain", "alltoall balanced"],
        4: ["heads -", "ring plain", "both ring balanced", "both alltoall plain"],
    }[size]
    found = {}
    ids, keep = text()
    for kind in ("decoder", "encoder"):
        for how in ways:
            alone, model = new_model(kind), new_model(kind)
            part = spread(model, how, size, ids)
            for what, options in (("default", {}), ("everything", {"measures": MEASURES, "keep": "qkv"})):
                with torch.no_grad():
                    with regard.watch(alone, **options) as right:
                        alone(ids, keep=keep)
                    with regard.watch(model, **options) as seen:
                        model(part, keep=keep)
                    found[f"{kind}, {how}, {what}"] = apart(seen, right)
                    if options:
                        continue
                    with regard.watch(alone, **options) as right, regard.watch(model, **options) as seen:
                        for _ in range(2):  # two texts: means per head
                            alone(ids)
                            model(part)
                    found[f"{kind}, {how}, {what}, two texts"] = apart(seen, right)
    return found


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_the_record_is_that_of_one_process(size: int) -> None:
    for rank, found in enumerate(together.run(each, size, size)):
        wrong = {name: error for name, error in found.items() if not error < 1e-11}
        assert not wrong, (rank, wrong)


def decode(rank: int, size: int) -> tuple[float, list[str]]:
    """Token after token with a cache, heads spread; then heads that are to be changed."""
    ids, _ = text()
    alone, model = new_model("decoder"), new_model("decoder")
    spread(model, "heads -", size, ids)
    records = []
    for one in (alone, model):
        cache = one.new_cache()
        with torch.no_grad(), regard.watch(one, keep="qk") as seen:
            one(ids[:, :7], cache=cache)
            for i in range(7, TOKENS):
                one(ids[:, i : i + 1], cache=cache)
        records.append(seen)
    words = []
    try:
        with regard.ablate(model, {seen.layers[0]: [0]}):
            model(ids)
    except ValueError as error:
        words.append(str(error))
    return apart(records[1], records[0]), words


@pytest.mark.slow
def test_decoding_with_a_cache_is_one_text_and_heads_are_not_changed() -> None:
    for error, words in together.run(decode, 2, 2):
        assert error < 1e-11
        assert words[0].startswith("heads: expected a model on one process, where heads are changed")
