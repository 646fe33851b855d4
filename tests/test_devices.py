"""Nothing but kernels assumes a CPU: caches, masks, positions, measures and watch on `--device`; shapes and errors on
the meta device, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.masks import Causal, Documents, Keep, Padding, Prefix, Window
from regard.positions import Alibi, RelativeBias, Rotary

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
