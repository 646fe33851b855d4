"""The layer through `torch.export` and `torch.onnx`: the same outputs at sizes it was not traced with."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from regard import MultiHeadAttention, masks
from regard.positions import Alibi, LongRoPE, RelativeBias, Rotary

W, H, D = 11, 3, 6  # widths of the model and of a head; the heads
TRACED = (3, 7)  # the batch size and the length of the example
OTHERS = [(3, 7), (2, 13), (5, 3)]  # and of the inputs that follow


class Model(nn.Module):
    """A layer with its mask, and padding where lengths are given: what a user exports."""

    def __init__(self, mask: masks.Mask | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MultiHeadAttention(W, H, head_dim=D, **options)
        if self.layer.sinks is not None:
            nn.init.normal_(self.layer.sinks)
        if isinstance(self.layer.position_encoding, RelativeBias):
            nn.init.normal_(self.layer.position_encoding.weight)
        self.mask = mask

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = self.mask
        if lengths is not None:
            padding = masks.Padding(lengths=lengths)
            mask = padding if mask is None else mask & padding
        return self.layer(x, mask=mask)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "grouped": {"num_kv_heads": 1, "value_head_dim": 5, "qk_norm": "rms"},
    "rotary": {"mask": masks.Causal(), "num_kv_heads": 1, "position_encoding": Rotary(D)},
    "alibi": {"mask": masks.Causal(), "position_encoding": Alibi(H)},
    "relative": {"position_encoding": RelativeBias(H, num_buckets=8, max_distance=11)},
    "softcap and sinks": {"mask": masks.Causal() & masks.Window(5), "softcap": 2.0, "sinks": True, "num_kv_heads": 1},
}
PADDED = ("causal", "softcap and sinks")  # with lengths as one more input
ALL = [(name, False) for name in MODELS] + [(name, True) for name in PADDED]
every_model = pytest.mark.parametrize("name, padded", ALL, ids=[f"{n}{' padded' if p else ''}" for n, p in ALL])


def model(name: str, **options: Any) -> Model:
    return Model(**MODELS[name], **options).eval()


def example(batch: int, length: int, padded: bool = False, *, least: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * length)
    x = torch.randn(batch, length, W, generator=generator)
    if not padded:
        return (x,)
    return x, torch.randint(least, length + 1, (batch,), generator=generator)


def dynamic(padded: bool = False) -> tuple[Any, ...]:
    """Batch and length are free."""
    return ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, *([{0: Dim.DYNAMIC}] if padded else []))


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


# ----------------------------------------------------------------------------------------------------
# torch.export


def export(model: nn.Module, inputs: tuple[Tensor, ...], *, strict: bool = False) -> torch.export.ExportedProgram:
    return torch.export.export(model, inputs, dynamic_shapes=dynamic(len(inputs) > 1), strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["plain trace", "strict"])
@every_model
@pytest.mark.slow
def test_an_exported_layer_gives_the_same_at_other_sizes(name: str, padded: bool, strict: bool) -> None:
    layer = model(name)
    program = export(layer, example(*TRACED, padded), strict=strict).module()
    for size in OTHERS:
        inputs = example(*size, padded)
        torch.testing.assert_close(program(*inputs), layer(*inputs))


def test_the_loop_is_one_node_and_survives_a_file() -> None:
    layer = model("softcap and sinks")
    program = export(layer, example(*TRACED))
    assert "regard.blockwise.default" in operators(program)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    torch.testing.assert_close(again(*example(2, 13)), layer(*example(2, 13)))


def test_an_exported_layer_trains() -> None:
    layer = Model(**MODELS["softcap and sinks"])
    program = export(layer, example(*TRACED)).module()
    inputs = example(2, 13)
    layer(*inputs).square().sum().backward()
    program(*inputs).square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for n, g in gradients.items() if n != "layer.k_proj.bias")
    torch.testing.assert_close({name: p.grad for name, p in program.named_parameters()}, gradients)


@pytest.mark.parametrize("strict", [False, True], ids=["plain trace", "strict"])
@pytest.mark.parametrize("name", ["plain", "causal", "rotary"])
def test_torchs_own_attention_is_exported_where_it_serves(name: str, strict: bool) -> None:
    program = export(model(name), example(*TRACED), strict=strict)
    assert "aten.scaled_dot_product_attention.default" in operators(program)


def test_a_long_text_may_follow_a_short_example() -> None:
    layer = model("plain")
    program = export(layer, example(*TRACED, True)).module()
    inputs = example(2, 1031, True)  # above a million pairs, where kernels are chosen with more care
    torch.testing.assert_close(program(*inputs), layer(*inputs))


def test_a_text_shorter_than_the_window_may_follow_a_longer_example() -> None:
    layer = Model(mask=masks.Window(before=5, after=5)).eval()
    program = export(layer, example(3, 17)).module()
    for size in ((2, 3), (2, 19)):
        torch.testing.assert_close(program(*example(*size)), layer(*example(*size)))


def test_a_long_turn_may_follow_a_short_example() -> None:
    rotary = Rotary(D)
    shapes = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},)
    program = torch.export.export(rotary, (torch.randn(2, 1, 7, D),), dynamic_shapes=shapes).module()
    x = torch.randn(3, 1, 16411, D)
    torch.testing.assert_close(program(x), rotary(x))


# ----------------------------------------------------------------------------------------------------
# torch.onnx


def run_in_onnxruntime(
    model: nn.Module, traced: tuple[Tensor, ...], inputs: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    """Export to ONNX with an example, and run the file on other inputs."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript", reason="torch.onnx is built on it")
    with torch.no_grad():
        program = torch.onnx.export(model, traced, dynamo=True, dynamic_shapes=dynamic(len(traced) > 1), verbose=False)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    assert len(names) == len(traced)
    results = []
    for values in inputs:
        (out,) = session.run(None, {name: x.numpy() for name, x in zip(names, values, strict=True)})
        results.append(torch.from_numpy(out))
    return results


def assert_the_same_in_onnx(model: nn.Module, traced: tuple[Tensor, ...], inputs: Sequence[tuple[Tensor, ...]]) -> None:
    for values, out in zip(inputs, run_in_onnxruntime(model, traced, inputs), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(out, model(*values), rtol=1e-4, atol=1e-5)


@every_model
@pytest.mark.slow
def test_the_onnx_file_gives_the_same(name: str, padded: bool) -> None:
    assert_the_same_in_onnx(model(name), example(*TRACED, padded), [example(*size, padded) for size in OTHERS])


@pytest.mark.slow
def test_the_reference_exports_whatever_the_layer_does() -> None:
    layer = model("softcap and sinks", kernel="reference")
    assert_the_same_in_onnx(layer, example(*TRACED, True), [example(*size, True) for size in OTHERS])


@pytest.mark.slow
def test_a_program_that_was_exported_first_becomes_an_onnx_file() -> None:
    runtime = pytest.importorskip("onnxruntime")
    layer = model("softcap and sinks")
    with torch.no_grad():
        made = torch.onnx.export(export(layer, example(*TRACED)), dynamo=True, verbose=False)
    assert made is not None
    session = runtime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (x,) = example(2, 13)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), layer(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.slow
def test_a_row_that_may_see_nothing_is_zero_in_onnx(kernel: str) -> None:
    layer = Model(kernel=kernel, bias=False).eval()
    (x,) = example(2, 13)
    inputs = x, torch.tensor([5, 0])
    (out,) = run_in_onnxruntime(layer, example(*TRACED, True), [inputs])
    assert out[0].abs().min() > 0
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.slow
def test_a_window_wider_than_the_example_still_hides_in_onnx() -> None:
    layer = Model(mask=masks.Window(before=5, after=5)).eval()
    assert_the_same_in_onnx(layer, example(3, 5), [example(3, 5), example(2, 17)])


def test_a_rotary_that_depends_on_the_length_still_does_in_onnx() -> None:
    scaling = LongRoPE((1.0, 1.5, 2.0), (2.0, 3.0, 5.0), 8, factor=3.0)  # other frequencies from 8 tokens on
    layer = Model(mask=masks.Causal(), position_encoding=Rotary(D, scaling=scaling)).eval()
    assert_the_same_in_onnx(layer, example(3, 5), [example(3, 5), example(2, 17)])
