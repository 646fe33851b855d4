"""What is wrong is told on every rank, in words, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import regard
from distributed import together
from distributed.compare import TOKENS, WIDTH, layer, normal, shaken
from distributed.variants import Own
from regard import KVCache, parallel
from regard.masks import Causal, Padding, Window
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.parallel import alltoall, ring

SIZE = 3
WAYS = ("ring", "alltoall", "heads")
Spread = Callable[[nn.Module], nn.Module]


def said(action: Callable[[], Any]) -> str:
    """The error of an action, in its words; "" where there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def spread(module: nn.Module, mesh: DeviceMesh, way: str, **options: Any) -> nn.Module:
    """Over a mesh, in one of three ways."""
    if way == "heads":
        return parallel.shard_heads(module, mesh)
    return parallel.shard_sequence(module, mesh, way, **options)  # type: ignore[arg-type]


def refusals(rank: int) -> dict[str, str]:
    """What each case says. After each of them the ranks go on together."""
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("ranks",))
    plane = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("ranks", "others"))
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("pair",))
    told: dict[str, str] = {}
    for way in WAYS:
        told[f"{way}: two dimensions"] = said(lambda: spread(layer(), plane, way))  # noqa: B023
        told[f"{way}: not a mesh"] = said(lambda: spread(layer(), dist.group.WORLD, way))  # type: ignore[arg-type]  # noqa: B023
        told[f"{way}: not in it"] = said(lambda: spread(layer(), pair, way))  # noqa: B023
        told[f"{way}: no layers"] = said(lambda: spread(nn.Linear(3, 3), mesh, way))  # noqa: B023
        told[f"{way}: twice"] = said(lambda: spread(spread(layer(), mesh, way), mesh, way))  # noqa: B023
        for name, action in _calls(rank, mesh, way).items():
            told[f"{way}: {name}"] = said(action)
    for way in ("heads", "alltoall"):
        told[f"{way}: heads that do not divide"] = _untouched(mesh, way)
    told |= {name: said(action) for name, action in _of_modules(rank, mesh).items()}
    told["heads: inner width that does not divide"] = _untouched_model(mesh)
    told |= {name: said(action) for name, action in _of_sequences(rank, mesh).items()}
    return told


def _calls(rank: int, mesh: DeviceMesh, way: str) -> dict[str, Callable[[], Any]]:
    """Calls of a layer in which rank 1 does something else."""
    odd = rank == 1

    def call(
        x: Tensor | None = None,
        key: Tensor | None = None,
        *,
        dtype: Any = torch.float64,
        dropout: float = 0.0,
        grad: bool = True,
        kernel: str = "auto",
        softcap: float | None = None,
        **options: Any,
    ) -> Any:
        module = layer(dropout=dropout, kernel=kernel, softcap=softcap).to(dtype).train()
        module = spread(module, mesh, way)
        x = normal(2, 7, WIDTH).to(dtype) if x is None else x
        with torch.set_grad_enabled(grad):
            return module(x, key, **options)

    return {
        "batch": lambda: call(normal(3 if odd else 2, 7, WIDTH)),
        "parameters": lambda: call(dtype=torch.float32 if odd else torch.float64),
        "dtype": lambda: call(normal(2, 7, WIDTH).to(torch.float32 if odd else torch.float64)),
        "mask": lambda: call(mask=Window(3) if odd else Causal()),
        "no mask": lambda: call(mask=None if odd else Causal()),
        "lengths": lambda: call(mask=Padding(lengths=torch.tensor([3, 5 + odd]))),
        "bias": lambda: call(bias=None if odd or (way != "heads" and rank == 2) else torch.zeros(7, 7)),
        "dropout": lambda: call(dropout=0.2 if odd else 0.1),
        "cross": lambda: call(key=normal(2, 7, WIDTH, seed=1) if odd else None),
        "gradient": lambda: call(grad=not odd),
        "width": lambda: call(normal(2, 7, WIDTH + odd)),
        "mask of numbers": lambda: call(mask=torch.ones(7, 7) if odd else torch.ones(7, 7) > 0),
        "mask of numbers everywhere": lambda: call(mask=torch.ones(7, 7)),
        "not a tensor": lambda: call([[1.0]] if odd else None),  # type: ignore[arg-type]
        "not a cache": lambda: call(cache={} if odd else None),
        "positions of one": lambda: call(positions=torch.arange(7.0) if odd else torch.arange(7)),
        "positions of all": lambda: call(positions=list(range(7))),
        "one position": lambda: call(positions=torch.tensor(3)),
        "kernel": lambda: [said(lambda: call(kernel="fused", softcap=2.0)), call()][0],
        "fine": lambda: call(),
    }


def _of_modules(rank: int, mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    """What cannot be spread, and what is not the same on rank 1."""
    odd = rank == 1
    heads, sequence = parallel.shard_heads, parallel.shard_sequence

    def two(shared: str) -> nn.ModuleList:
        first, second = layer(), layer()
        if shared == "weight":
            second.q_proj.weight = first.q_proj.weight
        else:
            second.q_proj = first.q_proj
        return nn.ModuleList([first, second])

    def frozen() -> nn.Module:
        module = layer()
        module.q_proj.requires_grad_(not odd)
        return module

    def cut() -> nn.Module:
        fully_shard(module := layer(), mesh=mesh)
        return module

    return {
        "module: backwards": lambda: heads(layer(), DeviceMesh("cpu", [2, 1, 0], mesh_dim_names=("ranks",))),
        "module: heads and sequence over the same": lambda: sequence(heads(layer(), mesh), mesh),
        "module: sequence and heads over the same": lambda: heads(sequence(layer(), mesh), mesh),
        "module: cut by FSDP": lambda: sequence(cut(), mesh, sum_gradients=False),
        "module: a shared weight": lambda: heads(two("weight"), mesh),
        "module: a shared projection": lambda: heads(two("module"), mesh),
        "module: swapped": lambda: heads(regard.swap(nn.TransformerEncoderLayer(24, 12, 31, batch_first=True)), mesh),
        "module: method": lambda: sequence(layer(), mesh, "alltoall" if odd else "ring"),
        "module: sums": lambda: sequence(layer(), mesh, sum_gradients=odd),
        "module: frozen": lambda: sequence(frozen(), mesh),
        "module: heads": lambda: sequence(layer(num_heads=24 if odd else 12, head_dim=2, num_kv_heads=1), mesh),
        "module: softcap": lambda: heads(layer(softcap=2.0 if odd else None), mesh),
        "module: one does not divide": lambda: heads(layer(num_heads=7 if odd else 12, head_dim=6), mesh),
    }


def _untouched(mesh: DeviceMesh, way: str) -> str:
    """Where heads do not divide, no weight is touched, not even those of a layer before."""
    module = nn.ModuleDict({"first": layer(), "second": layer(num_heads=7)})
    before = {name: x.clone() for name, x in module.state_dict().items()}
    words = said(lambda: spread(module, mesh, way))
    for name, parameter in module.named_parameters():
        assert not isinstance(parameter, DTensor), name
        assert torch.equal(parameter, before[name]), name
    assert module["first"](normal(2, 7, WIDTH)).shape == (2, 7, WIDTH)
    return words


def _untouched_model(mesh: DeviceMesh) -> str:
    model = Decoder(ModelConfig(layers=1, embed_dim=24, num_heads=12, vocabulary=5, inner=31, context=7, causal=True))
    words = said(lambda: parallel.shard_heads(model, mesh))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return words


def _of_sequences(rank: int, mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    odd = rank == 1
    x = normal(2, TOKENS, WIDTH)

    def new(**options: Any) -> nn.Module:
        return parallel.shard_sequence(layer(), mesh, **options)

    def part(balance: bool = False) -> Tensor:
        return parallel.SequenceSharding(mesh, balance=balance).shard(x)

    def by_fsdp() -> None:
        fully_shard(module := new(), mesh=mesh)
        module(part())

    def ids(model: nn.Module, **options: Any) -> Any:
        return parallel.shard_sequence(model, mesh)(
            parallel.shard(torch.ones(2, 7, dtype=torch.int64), mesh), **options
        )

    config = ModelConfig(layers=1, embed_dim=24, num_heads=12, vocabulary=5, inner=31, context=7, causal=True)

    def by_heads(token: int) -> Any:
        return parallel.shard_heads(Decoder(even), mesh)(torch.full((1, 3), token))

    even = ModelConfig(layers=1, embed_dim=24, num_heads=12, vocabulary=5, inner=30, context=7, causal=True)
    return {
        "gather: balanced on one": lambda: parallel.SequenceSharding(mesh, balance=odd).gather(part(odd)),
        "gather: shape": lambda: parallel.gather(part()[:, :, : WIDTH - odd], mesh),
        "gather: not a tensor": lambda: parallel.gather(part().tolist() if odd else part(), mesh),
        "gather: sharded otherwise": lambda: parallel.SequenceSharding(mesh, balance=True).gather(part(False)),
        "shard: no axis": lambda: parallel.shard(torch.tensor(1.0), mesh),
        "shard: balance in one call": lambda: parallel.shard(x, mesh, balance=True),
        "shard: balance": lambda: parallel.shard(x, mesh, "yes"),  # type: ignore[arg-type]
        "sequence: method": lambda: parallel.SequenceSharding(mesh, "rings"),  # type: ignore[arg-type]
        "sequence: method and balance beside it": lambda: parallel.shard_sequence(
            layer(), parallel.SequenceSharding(mesh), balance=True
        ),
        "layer: balanced on one": lambda: new(balance=odd),
        "layer: keys sharded otherwise": lambda: new(balance=True)(part(True), part(False)),
        "layer: sharded otherwise": lambda: new(balance=True)(part(False)),
        "layer: not as balanced parts are": lambda: new(balance=True)(part()[:, : 3 + rank].clone()),
        "own module: sharded otherwise": lambda: parallel.shard_sequence(shaken(Own()), mesh, balance=True)(part()),
        "layer: cache": lambda: new()(part(), mask=Causal(), cache=KVCache()),
        "layer: positions": lambda: new()(part(), positions=torch.arange(TOKENS - 1)),
        "layer: method": lambda: new(method="rings"),
        "layer: balance": lambda: new(balance="yes"),
        "layer: FSDP": by_fsdp,
        "model: too long": lambda: parallel.shard_sequence(Decoder(config), mesh)(
            parallel.shard(torch.ones(2, 8, dtype=torch.int64), mesh)
        ),
        "model: heads, one id": lambda: parallel.shard_heads(Decoder(even), mesh)(torch.full((1, 3), 9 if odd else 1)),
        "model: heads, other ids": lambda: parallel.shard_heads(Decoder(even), mesh)(
            torch.full((1, 3), 2 if odd else 1)
        ),
        "model: ids sharded otherwise": lambda: parallel.shard_sequence(Decoder(config), mesh, balance=True)(
            parallel.shard(torch.ones(2, 5, dtype=torch.int64), mesh)
        ),
        "model: keep sharded otherwise": lambda: parallel.shard_sequence(Decoder(config), mesh, balance=True)(
            parallel.SequenceSharding(mesh, balance=True).shard(torch.ones(2, 5, dtype=torch.int64)),
            keep=parallel.shard(torch.ones(2, 5) > 0, mesh),
        ),
        "layer: positions sharded otherwise": lambda: new()(
            part(), positions=parallel.SequenceSharding(mesh, balance=True).shard(torch.arange(TOKENS))
        ),
        "model: cache": lambda: ids(model := Decoder(config), cache=model.new_cache()),
        "model: keep": lambda: ids(Decoder(config), keep=torch.ones(2, 6 if odd else 7) > 0),
    }


ONE, OTHERS = "rank 1", "all others"
DISAGREE = r"^ValueError: attention: expected the same {} on every rank of 'ranks', received .* on rank 0, .* on rank 1"
TOLD = r"^ValueError: {}: expected all ranks to go on, received rank 1 of 'ranks' raised "
SETTINGS = (
    r"^ValueError: module: expected the same {} on every rank of 'ranks', received one on rank 0, another on rank 1"
)
WORDS: dict[str, str | dict[str, str]] = {
    "two dimensions": r"^ValueError: mesh: expected one dimension, received 2: \('ranks', 'others'\).*name one of them",
    "not a mesh": r"^TypeError: mesh: expected a torch DeviceMesh, received .*init_device_mesh",
    "no layers": r"^ValueError: module: expected a regard.MultiHeadAttention, or a model with some in it.*Linear",
    "twice": r"^ValueError: layer: expected .* whose (heads are|sequence is) not sharded yet, received one that is",
    "batch": DISAGREE.format("batch"),
    "parameters": r"^ValueError: module: expected the same names, shapes and dtypes of parameters on every rank",
    "dtype": {
        ONE: r"^TypeError: query: expected torch.float64, as the layer's weights, received torch.float32",
        OTHERS: TOLD.format("attention") + r"TypeError: query",
    },
    "mask": DISAGREE.format("mask and bias.*"),
    "no mask": DISAGREE.format("mask and bias.*"),
    "lengths": DISAGREE.format("mask and bias.*"),
    "bias": DISAGREE.format("mask and bias.*"),
    "dropout": SETTINGS.format("settings of layers"),
    "cross": DISAGREE.format("self attention"),
    "gradient": DISAGREE.format("gradient"),
    "width": {
        ONE: rf"^ValueError: query: expected shape \(B, length, {WIDTH}\).*received \(2, 7, {WIDTH + 1}\)",
        OTHERS: TOLD.format("attention") + r"ValueError: query",
    },
    "mask of numbers": DISAGREE.format("mask and bias.*"),
    "mask of numbers everywhere": r"^TypeError: mask: expected a boolean",
    "heads that do not divide": r"^ValueError: second: heads: expected a multiple of the 3 ranks of 'ranks', .* 7",
    "inner width that does not divide": r"^ValueError: blocks.0.mlp: inner width: expected a multiple of the 3 ranks",
    "gather: balanced on one": r"^ValueError: gather: expected the same balance on every rank of 'ranks'",
    "gather: shape": r"^ValueError: gather: expected the same shape on every rank of 'ranks'",
    "gather: not a tensor": {
        ONE: r"^TypeError: y: expected a tensor, received list",
        OTHERS: TOLD.format("gather") + r"TypeError: y: expected",
    },
    "shard: no axis": r"^ValueError: x: expected \(B, N, ...\) or \(N,\)",
    "gather: sharded otherwise": r"^ValueError: balance: expected parts as .*\(9, 10, 10\), received \(10, 10, 9\)",
    "shard: balance in one call": r"^ValueError: balance: expected a SequenceSharding, .*, received balance=True",
    "shard: balance": r"^TypeError: balance: expected True or False, received 'yes'",
    "sequence: method": r"""^ValueError: method: expected "ring" or "alltoall", received 'rings'""",
    "sequence: method and balance beside it": r"^ValueError: method, balance: expected none beside a SequenceSharding",
    "layer: balanced on one": SETTINGS.format("balance"),
    "layer: keys sharded otherwise": r"^ValueError: balance: expected parts as .*, received \(10, 10, 9\)",
    "layer: sharded otherwise": r"^ValueError: balance: expected parts as .*\(9, 10, 10\), received \(10, 10, 9\)",
    "own module: sharded otherwise": r"^ValueError: balance: expected parts as .*, received \(10, 10, 9\)",
    "layer: not as balanced parts are": r"^ValueError: balance: expected parts as .*\(4, 4, 4\), received \(3, 4, 5\)",
    "layer: cache": r"^ValueError: cache: expected none where the sequence is sharded over ranks.*shard_heads",
    "layer: positions": r"^ValueError: positions: expected those of all 29 tokens, or .* \(10, 10, 9\), received .*28",
    "layer: method": r"""^ValueError: method: expected "ring" or "alltoall", received 'rings'""",
    "layer: balance": r"^TypeError: balance: expected True or False, received 'yes'",
    "layer: FSDP": r"^ValueError: shard_sequence: expected sum_gradients=False under FSDP.*received sum_gradients=True",
    "model: cache": r"^ValueError: cache: expected none where the sequence is sharded over ranks.*shard_heads",
    "model: keep": r"^ValueError: keep: expected one flag for each of all 7 tokens.* \(3, 2, 2\), received .*7, 6, 7",
    "not a tensor": {
        ONE: r"^TypeError: query: expected a tensor, received list",
        OTHERS: TOLD.format("attention") + r"TypeError: query",
    },
    "not a cache": {
        ONE: r"^TypeError: cache: expected a KVCache or a RollingCache, received dict",
        OTHERS: TOLD.format("attention") + r"TypeError: cache",
    },
    "positions of one": {
        ONE: r"^TypeError: positions: expected an integer tensor \(N,\) or \(B, N\), received torch.float32",
        OTHERS: TOLD.format("attention") + r"TypeError: pos",
    },
    "positions of all": r"^TypeError: positions: expected an integer tensor \(N,\) or \(B, N\), received list",
    "one position": r"^TypeError: positions: expected an integer tensor \(N,\) or \(B, N\), received \(\)",
    "kernel": "^$",
    "module: backwards": r"^ValueError: mesh: expected ranks in ascending order, received \[2, 1, 0\]",
    "module: heads and sequence over the same": "^ValueError: layer: expected heads and sequence over two dimensions",
    "module: sequence and heads over the same": "^ValueError: layer: expected heads and sequence over two dimensions",
    "module: cut by FSDP": r"^ValueError: q_proj.weight: expected a parameter that is whole on every.*fully_shard last",
    "module: a shared weight": r"^ValueError: 0.q_proj: expected weights of one layer alone, received weights that",
    "module: a shared projection": r"^ValueError: 0.q_proj: expected weights of one layer alone, received weights that",
    "module: swapped": r"^ValueError: module: expected a regard.MultiHeadAttention.*remedy: regard.swap\(model, split",
    "module: method": SETTINGS.format("method"),
    "module: sums": SETTINGS.format("sum_gradients"),
    "module: frozen": SETTINGS.format("parameters that get a gradient"),
    "module: heads": r"^ValueError: module: expected the same ",
    "module: softcap": SETTINGS.format("settings of layers"),
    "module: one does not divide": {
        ONE: r"^ValueError: layer: heads: expected a multiple of the 3 ranks of 'ranks', received 7",
        OTHERS: TOLD.format("module") + r"ValueError: layer",
    },
    "model: too long": r"^ValueError: ids: expected at most 7 tokens, the number of learned positions, received 8",
    "model: heads, one id": {
        ONE: r"^ValueError: ids: expected from 0 to 4, the vocabulary, received 9",
        OTHERS: TOLD.format("model") + r"ValueError: ids",
    },
    "model: heads, other ids": r"^ValueError: model: expected the same tokens on every rank of 'ranks', received one",
    "model: ids sharded otherwise": r"^ValueError: balance: expected parts as .*\(1, 2, 2\), received \(2, 2, 1\)",
    "model: keep sharded otherwise": r"^ValueError: keep: expected one flag .*\(1, 2, 2\), .* \(2, 2, 1\)",
    "layer: positions sharded otherwise": r"^ValueError: positions: expected those of all 29 .*, received .*9, 10, 10",
    "fine": "^$",
}


def test_every_rank_says_what_is_wrong() -> None:
    start = time.monotonic()
    results = together.run(refusals, SIZE, timeout=120.0)
    assert time.monotonic() - start < 120.0  # nobody waited for the others until the end
    wrong = []
    for rank, told in enumerate(results):
        assert len(told) > 60
        for case, words in told.items():
            if case.endswith("not in it"):
                expected = "^$" if rank < 2 else r"^ValueError: mesh: expected one that this process is part of.*rank 2"
            else:
                name = case if case in WORDS else case.partition(": ")[2]
                either = WORDS[name]
                expected = either if isinstance(either, str) else either[ONE if rank == 1 else OTHERS]
            if not re.search(expected, words, re.DOTALL):
                wrong.append(f"rank {rank}, {case}: expected {expected!r}, said {words[:300]!r}")
    assert not wrong, "\n".join(wrong)


# Heads and sequence


def in_both(rank: int) -> list[str]:
    """What one wrong rank of four means to all."""
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    odd, sequence = rank == 1, plane["sequence"]
    config = ModelConfig(layers=1, embed_dim=24, num_heads=12, vocabulary=5, inner=30, context=13, causal=True)

    def both(module: nn.Module) -> nn.Module:
        return parallel.shard_sequence(parallel.shard_heads(module, plane["heads"]), sequence)

    x, ids = normal(2, 12, WIDTH), torch.ones(2, 12, dtype=torch.int64)
    return [
        said(lambda: both(layer())(parallel.shard(x, sequence), mask=Window(3) if odd else Causal())),
        said(lambda: both(Decoder(config))(parallel.shard(ids + 9 * odd, sequence))),
        said(lambda: both(layer())(parallel.shard(x[:, :1], sequence))),
        said(lambda: both(layer())(parallel.shard(x, sequence))),
    ]


def test_all_ranks_of_a_plane_hear_of_an_error() -> None:
    start = time.monotonic()
    for mask, ids, short, fine in together.run(in_both, 4, timeout=90.0):
        assert "expected the same mask and bias" in mask
        assert "ids: expected from 0 to 4, the vocabulary, received 10" in ids
        assert "expected a text and a token at least on every rank, where heads are sharded" in short
        assert fine == ""
    assert time.monotonic() - start < 90.0


# A rank that dies

TIMEOUT = 10.0


def dying(rank: int, method: str, when: str, how: str) -> None:
    """Rank 1 dies in the middle of an attention; each of the others must find out in time."""
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("sequence",))
    x = normal(2, TOKENS, WIDTH)
    if method == "heads":
        module = parallel.shard_heads(layer(), mesh)
    else:
        module = parallel.shard_sequence(layer(), mesh, method)  # type: ignore[arg-type]
        x = parallel.shard(x, mesh)
    x.requires_grad_()
    module(x).sum().backward()  # all is well

    def die(*_: Any) -> None:
        if how == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        if method == "alltoall":
            alltoall.to_tokens = die  # type: ignore[assignment]
        elif method == "heads":
            of = module.out_proj if when == "forward" else module.q_proj
            of.register_forward_pre_hook(die) if when == "forward" else of.register_full_backward_hook(die)
        elif when == "forward":
            ring._merge = die
        else:
            ring._add_gradients = die
    start = time.monotonic()
    try:
        module(x, mask=Causal() | ~Causal()).sum().backward()
    except ConnectionError:
        late = time.monotonic() - start - TIMEOUT
        assert late < 5.0, f"it took {late:.1f} s longer than the timeout"
        raise


@pytest.mark.parametrize(
    "method, when, how",
    [
        ("ring", "forward", "exit"),
        ("ring", "backward", "kill"),
        ("alltoall", "forward", "kill"),
        ("heads", "forward", "kill"),
        ("heads", "backward", "exit"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_on_all_others(method: str, when: str, how: str) -> None:
    start = time.monotonic()
    with pytest.raises(together.Failed) as caught:
        together.run(dying, SIZE, method, when, how, timeout=TIMEOUT)
    assert time.monotonic() - start < 60.0  # starting included
    words = caught.value.errors
    assert set(words) == {0, 1, 2}
    for rank in (0, 2):
        expected = r"^ConnectionError: (send|receive|exchange|gather|sum): expected an answer from the other ranks of "
        expected += rf"'sequence', received none by rank {rank} of 3 \(sequence\): .*remedy: look for the first error"
        assert re.search(expected, words[rank]), words[rank]
    assert words[1] == "it died without a word"
