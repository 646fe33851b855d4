"""Nothing but kernels assumes a CPU: caches, masks, positions, measures and watch on `--device`; shapes and errors on
the meta device, too."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.masks import Blocks, Causal, Chunk, Documents, Keep, Padding, Prefix, Tree, Window
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = pytest.mark.on_device

B, H, G, N, M, D = 2, 6, 2, 5, 7, 8


def inputs(device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(B, heads, rows, D, device=device) for heads, rows in ((H, N), (G, M), (G, M))]


def masks(device: torch.device) -> dict[str, regard.masks.Mask]:
    lengths = torch.tensor([M, 3], device=device)
    keep = torch.ones(N, M, dtype=torch.bool, device=device).tril()
    documents = torch.arange(M, device=device) // 3
    return {
        "causal": Causal(),
        "window": Causal() & Window(3),
        "padding": Padding(lengths=lengths),
        "prefix": Causal() | Prefix(2),
        "documents": Documents(documents),
        "chunk": Causal() & Chunk(3),
        "blocks": Blocks(torch.tensor([[0, -1], [2, 1]], device=device), size=3),
        "tree": Tree(torch.tensor([-1, 0, 0, 1, -1], device=device)),
        "dense": Keep(keep),
        "all": Causal() & Padding(lengths=lengths) & Keep(keep),
    }


@pytest.mark.parametrize("name", masks(torch.device("cpu")))
def test_every_mask_gives_the_answer_of_the_reference(name: str, device: torch.device) -> None:
    q, k, v = inputs(device)
    mask = masks(device)[name]
    out = regard.attend(q, k, v, mask=mask)
    assert out.device.type == device.type
    torch.testing.assert_close(out, regard.attend(q, k, v, mask=mask, kernel="reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"softcap": 3.0}])
def test_shapes(options: dict[str, float], any_device: torch.device) -> None:
    q, k, v = inputs(any_device)
    out = regard.attend(q, k, v, mask=Causal(), bias=[Alibi(H), RelativeBias(H).to(any_device)], **options)
    assert out.shape == (B, H, N, D)
    assert out.device.type == any_device.type


def test_errors(any_device: torch.device) -> None:
    q, k, v = inputs(any_device)
    with pytest.raises(ValueError, match="expected"):
        regard.attend(q, k[:, :, :-1], v)
    with pytest.raises(ValueError, match="kernel: expected"):
        regard.attend(q, k, v, kernel="no such")


def test_gradients_of_biases_and_sinks(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(device))
    bias, sinks = RelativeBias(H).to(device), torch.zeros(H, device=device, requires_grad=True)
    leaves = [q, k, v, sinks, bias.weight]

    def gradients(kernel: str) -> list[torch.Tensor]:
        out = regard.attend(q, k, v, mask=Causal(), bias=bias, sinks=sinks, kernel=kernel)
        return list(torch.autograd.grad(out.square().sum(), leaves))

    for mine, right in zip(gradients("auto"), gradients("reference"), strict=True):
        assert mine.device.type == device.type
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


def test_measures(device: torch.device) -> None:
    q, k, v = inputs(device)
    names = ["entropy", "peak", "distance", "offsets", "received", "on_first", "heatmap", "links", "local"]
    ours, right = (
        regard.measure(q, k, v, mask=Causal(), measures=names, kernel=kernel) for kernel in ("auto", "reference")
    )
    for name in ("entropy", "peak", "distance", "offsets", "received", "on_first", "heatmap", "local"):
        assert ours[name].device.type == device.type
        torch.testing.assert_close(ours[name], right[name], rtol=1e-3, atol=1e-4)


def test_a_layer_with_a_cache_is_the_layer_at_once(device: torch.device) -> None:
    layer = regard.MultiHeadAttention(24, 4, num_kv_heads=2, position_encoding=Rotary(6)).to(device).eval()
    x = torch.randn(B, N, 24, device=device)
    with torch.no_grad():
        whole = layer(x, mask=Causal())
        cache = regard.KVCache()
        parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([3, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made", [regard.KVCache, lambda: regard.RollingCache(4), lambda: regard.KVCache(dtype="int8")])
def test_caches_are_where_the_layer_is(made: Callable[[], regard.KVCache], any_device: torch.device) -> None:
    layer = regard.MultiHeadAttention(24, 4, num_kv_heads=2, position_encoding=Rotary(6)).to(any_device).eval()
    cache = made()
    with torch.no_grad():
        for part in torch.randn(B, N, 24, device=any_device).split([3, 1, 1], 1):
            assert layer(part, mask=Causal(), cache=cache).device.type == any_device.type
    assert cache.keys is not None
    assert cache.keys.device.type == any_device.type


def test_a_fork_in_several_rows(device: torch.device) -> None:
    """Of cross attention, whose cache knows the memory again that it was given."""
    layer = regard.MultiHeadAttention(24, 4).to(device).eval()
    x, memory = (torch.randn(1, count, 24, device=device) for count in (N, M))
    cache = regard.KVCache(once=True)
    with torch.no_grad():
        alone = layer(x, memory, cache=cache)
        together = layer(x.expand(3, -1, -1), memory.expand(3, -1, -1), cache=cache.fork(rows=3))
    torch.testing.assert_close(together, alone.expand(3, -1, -1), rtol=1e-4, atol=1e-5)


def test_lengths_from_another_device_are_taken(device: torch.device) -> None:
    cache = regard.KVCache()
    cache.append(*(torch.randn(2, 1, 5, 3, device=device) for _ in range(2)))
    cache.truncate(torch.tensor([4, 2], device="cpu"))
    assert cache.lengths.tolist() == [4, 2]


def test_parts_are_merged(any_device: torch.device) -> None:
    q, k, v = inputs(any_device)
    parts = [regard.attend(q, k[:, :, keys], v[:, :, keys], return_lse=True) for keys in (slice(0, 3), slice(3, M))]
    out, lse = regard.merge(*zip(*parts, strict=True))
    assert (out.shape, lse.shape) == ((B, H, N, D), (B, H, N))
    assert out.device.type == lse.device.type == any_device.type
    if any_device.type != "meta":
        torch.testing.assert_close(out, regard.attend(q, k, v), rtol=1e-4, atol=1e-5)


def test_latent_and_differential_attention(any_device: torch.device) -> None:
    x = torch.randn(B, N, 24, device=any_device)
    for layer in (
        regard.LatentAttention(24, 2, kv_rank=8, nope_head_dim=6, rope_head_dim=4),
        regard.DifferentialAttention(24, 2),
    ):
        out = layer.to(any_device)(x, mask=Causal())
        assert (out.shape, out.device.type) == (x.shape, any_device.type)


def test_watch_with_a_bias_that_stays_on_the_cpu(device: torch.device) -> None:
    """Its numbers are moved where they are needed; so are those of some heads, looked at later."""
    layer = Attend()
    q = torch.randn(1, 4, N, 8, device=device)
    with torch.no_grad(), regard.watch(layer, keep="qk") as seen:
        layer(q, Alibi(4).to("cpu"))
    right = regard.attention_weights(q, q, bias=Alibi(4).to(device))
    torch.testing.assert_close(seen[0].weights([1, 3]), right[:, [1, 3]], rtol=1e-4, atol=1e-5)


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, bias: Alibi) -> torch.Tensor:
        return regard.attend(q, q, q, bias=bias)


def test_watch(device: torch.device) -> None:
    layer = regard.MultiHeadAttention(24, 4).to(device).eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.randn(1, N, 24, device=device))
    assert seen[0]["entropy"].shape == (1, 4, N)


# Functions of torch that make a tensor. (Those of a file's bytes or an array are on the CPU whatever is asked.)
FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)


def makes_a_tensor_somewhere(node: ast.AST) -> bool:
    """Whether it is `torch.zeros(...)` or the like, and names no device."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
        return False
    of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    return of_torch and not any(keyword.arg in ("device", None) for keyword in node.keywords)


def nameless_factories(node: ast.AST) -> Iterator[int]:
    """The lines of such calls, without those that make a module's parameters: they follow torch's default device."""
    if isinstance(node, ast.FunctionDef) and node.name == "__init__":
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("nn."):
        return
    if makes_a_tensor_somewhere(node):
        yield node.lineno  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from nameless_factories(child)


def test_every_tensor_that_the_library_makes_names_its_device() -> None:
    """Without a name it would be on torch's default device, where neither q nor what is drawn may be."""
    source = Path(regard.__file__).parent
    files = sorted(source.rglob("*.py"))
    assert len(files) > 200
    found = [
        f"{file.relative_to(source)}:{line}"
        for file in files
        for line in nameless_factories(ast.parse(file.read_text()))
    ]
    assert not found, f"expected device=...: {', '.join(found)}"
    assert list(nameless_factories(ast.parse("torch.zeros(3)\ntorch.zeros(3, device=x.device)"))) == [1]
