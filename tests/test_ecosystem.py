"""The layer among the tools that people use on layers: adapters, files, quantisation, hooks, torch.func and others."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from regard import MultiHeadAttention, attend, masks
from regard.positions import Alibi, RelativeBias, Rotary

B, N, W, H, D = 2, 7, 11, 3, 6
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 1, "value_head_dim": 5, "bias": False, "qk_norm": "rms"},
    "rotary": {"position_encoding": lambda: Rotary(D)},
    "alibi": {"position_encoding": lambda: Alibi(H)},
    "relative": {"position_encoding": lambda: RelativeBias(H, num_buckets=8, max_distance=11), "sinks": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": True, "num_kv_heads": 1},  # torch's own attention has neither
}
every_layer = pytest.mark.parametrize("name", OPTIONS)


def layer(name: str = "plain", seed: int = 0, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(seed)
    given = {**OPTIONS[name], **options}
    if "position_encoding" in given:
        given["position_encoding"] = given["position_encoding"]()
    made = MultiHeadAttention(W, H, head_dim=D, **given)
    for parameter in made.parameters():
        if parameter.dim() == 1 or parameter.shape[-1] == H:  # what starts at 0, 1 or near it
            nn.init.normal_(parameter)
    return made


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (B, N)), W, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self, name: str = "plain") -> None:
        super().__init__()
        self.attention = layer(name)
        self.head = nn.Linear(W, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, mask=masks.Causal()))


# ----------------------------------------------------------------------------------------------------
# Adapters


@every_layer
def test_lora_attaches_trains_and_merges(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = Model(name)
    before = model(tokens()).detach()
    config = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS))
    adapted = peft.get_peft_model(model, config)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == set(PROJECTIONS)
    assert all("lora_" in name for name in trained)
    torch.testing.assert_close(adapted(tokens()), before)  # an adapter starts as nothing

    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        loss = adapted(tokens()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    after = adapted(tokens()).detach()
    merged = adapted.merge_and_unload()
    assert all(type(getattr(merged.attention, name)) is nn.Linear for name in PROJECTIONS)
    torch.testing.assert_close(merged(tokens()), after)
    assert (after - before).abs().max() > 1e-2


# ----------------------------------------------------------------------------------------------------
# Files and copies


@every_layer
def test_weights_go_through_safetensors(name: str, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, other = layer(name), layer(name, seed=1)
    assert not torch.equal(one(tokens()), other(tokens()))
    path = tmp_path / "layer.safetensors"
    safetensors.save_file(one.state_dict(), path)  # it refuses tensors that share memory
    assert other.load_state_dict(safetensors.load_file(path)) == ([], [])
    assert torch.equal(one(tokens()), other(tokens()))

    safetensors.save_model(one, str(path))
    again = layer(name, seed=2)
    assert safetensors.load_model(again, str(path)) == (set(), [])
    assert torch.equal(one(tokens()), again(tokens()))


def test_the_names_of_the_weights_are_those_of_the_parts() -> None:
    names = set(layer("relative", qk_norm="rms").state_dict())
    linear = {f"{name}.{part}" for name in PROJECTIONS for part in ("weight", "bias")}
    assert names == linear | {"q_norm.weight", "k_norm.weight", "sinks", "position_encoding.weight"}
    assert set(layer("rotary").state_dict()) == linear
    assert set(layer("alibi").state_dict()) == linear


@every_layer
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_copy_is_equal_and_apart(name: str, used: bool) -> None:
    one = layer(name)
    if used:  # what the first call keeps for later ones must not be in the way
        one(tokens())
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), torch.load(file, weights_only=False)):
        assert torch.equal(other(tokens()), one(tokens()))
        with torch.no_grad():
            other.v_proj.weight.zero_()
        assert not torch.equal(other(tokens()), one(tokens()))


# ----------------------------------------------------------------------------------------------------
# The meta device


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Memory that nobody wrote holds NaN, rather than what happens to lie there."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@every_layer
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_a_layer_made_on_meta_is_whole_once_its_weights_are_loaded(name: str, assign: bool) -> None:
    with torch.device("meta"):
        made = layer(name)
        assert made(torch.empty(B, N, W)).shape == (B, N, W)
    source = layer(name)
    if not assign:
        made = made.to_empty(device="cpu")
    made.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(made(tokens(), mask=masks.Causal()), source(tokens(), mask=masks.Causal()))


# ----------------------------------------------------------------------------------------------------
# Other weights in the projections' place


@every_layer
def test_dynamic_int8_quantisation_of_the_projections(name: str) -> None:
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch was built without a quantised engine")
    one = layer(name).eval()
    quantised = torch.ao.quantization.quantize_dynamic(one, {nn.Linear}, dtype=torch.qint8)
    assert all(type(getattr(quantised, name)) is not nn.Linear for name in PROJECTIONS)
    expected, received = one(tokens()), quantised(tokens())
    error = (received - expected).norm() / expected.norm()
    assert 0 < error < 0.05


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_parametrised_projection_is_the_one_used(name: str) -> None:
    one, other = layer(), layer()
    parametrize.register_parametrization(getattr(one, name), "weight", Doubled())
    assert not torch.allclose(one(tokens()), other(tokens()))
    with torch.no_grad():
        getattr(other, name).weight.mul_(2)
    torch.testing.assert_close(one(tokens()), other(tokens()))
    one(tokens()).sum().backward()
    assert getattr(one, name).parametrizations.weight.original.grad is not None


def test_weight_norm_changes_nothing_but_the_parameters() -> None:
    one = layer()
    before = one(tokens())
    parametrizations.weight_norm(one.q_proj)
    torch.testing.assert_close(one(tokens()), before)
    one(tokens()).square().sum().backward()
    magnitude, direction = (getattr(one.q_proj.parametrizations.weight, f"original{i}") for i in (0, 1))
    assert magnitude.shape == (H * D, 1)
    assert magnitude.grad.abs().sum() > 0
    assert direction.grad.abs().sum() > 0


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_hook_on_a_projection_fires_once_and_can_change_it(name: str) -> None:
    one = layer()
    plain = one(tokens())
    seen: list[tuple[torch.Size, torch.Size]] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append((inputs[0].shape, output.shape))
        return torch.zeros_like(output)

    handle = getattr(one, name).register_forward_hook(hook)
    changed = one(tokens())
    narrow, wide = (B, N, W), (B, N, H * D)
    assert seen == [(wide, narrow) if name == "out_proj" else (narrow, wide)]
    assert not torch.allclose(changed, plain)
    handle.remove()
    assert torch.equal(one(tokens()), plain)


def test_a_backward_hook_on_a_projection_sees_its_gradient() -> None:
    one = layer("softcap and sinks")
    seen: list[Tensor] = []
    one.q_proj.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    one(tokens().requires_grad_()).square().sum().backward()
    (gradient,) = seen
    torch.testing.assert_close(gradient.sum((0, 1)), one.q_proj.bias.grad)


# ----------------------------------------------------------------------------------------------------
# Mixed precision and recomputation


@every_layer
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # the test below is about it
def test_autocast_computes_in_bfloat16_and_keeps_the_weights(name: str) -> None:
    one, other = layer(name), layer(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = one(tokens(), mask=masks.Causal())
    exact = other(tokens(), mask=masks.Causal())
    assert out.dtype is torch.bfloat16
    error = (out.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.02
    out.float().square().sum().backward()
    exact.square().sum().backward()
    for (path, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert a.grad is not None, path
        assert b.grad is not None, path
        assert a.grad.dtype is torch.float32, path
        if path != "k_proj.bias" or name in ("softcap and sinks", "rotary"):  # else it is 0 but for rounding
            assert (a.grad - b.grad).norm() < 0.05 * b.grad.norm(), path


@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_autocast_takes_what_norms_leave_in_float32_as_torch_does(wide: str) -> None:
    """On CUDA autocast computes norms in float32 and matrix products in half, so q and k come wider than v."""
    given = {name: torch.randn(B, H, N, D).to(torch.float32 if name == wide else torch.bfloat16) for name in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = scaled_dot_product_attention(*given.values())
        torch.testing.assert_close(attend(**given), expected, rtol=1.6e-2, atol=4e-3)  # (it rounds weights, too)


def test_normalised_heads_give_no_warning_under_autocast() -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # warnings are errors here
            layer("grouped")(tokens())
    finally:
        torch.set_warn_always(always)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_weights_again(reentrant: bool) -> None:
    one = layer("softcap and sinks", dropout=0.4)
    gradients = []
    for keep in (True, False):
        one.zero_grad()
        x = tokens().requires_grad_()
        torch.manual_seed(5)
        out = one(x) if keep else checkpoint(one, x, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        out.square().sum().backward()
        gradients.append({"x": x.grad, **{name: p.grad.clone() for name, p in one.named_parameters()}})
    torch.testing.assert_close(gradients[1], gradients[0])


# ----------------------------------------------------------------------------------------------------
# torch.func


@every_layer
def test_functional_call_takes_the_weights_it_is_given(name: str) -> None:
    one, other = layer(name), layer(name, seed=1)
    out = functional_call(one, dict(other.named_parameters()), (tokens(),), {"mask": masks.Causal()})
    assert torch.equal(out, other(tokens(), mask=masks.Causal()))
    assert not torch.equal(out, one(tokens(), mask=masks.Causal()))


@every_layer
@pytest.mark.parametrize("inner", [(), (B,)], ids=["without a batch", "with a batch"])
def test_vmap_over_inputs_equals_a_loop(name: str, inner: tuple[int, ...]) -> None:
    one = layer(name)
    x = tokens(5, *inner, N)
    torch.testing.assert_close(vmap(one)(x), torch.stack([one(item) for item in x]))


@every_layer
def test_vmap_over_weights_equals_a_loop(name: str) -> None:
    ensemble = [layer(name, seed=seed) for seed in range(3)]
    parameters, buffers = stack_module_state(ensemble)

    x = tokens()

    def call(weights: dict[str, Tensor], kept: dict[str, Tensor]) -> Tensor:
        return functional_call(ensemble[0], (weights, kept), (x,), {"mask": masks.Causal()})

    expected = torch.stack([one(x, mask=masks.Causal()) for one in ensemble])
    torch.testing.assert_close(vmap(call)(parameters, buffers), expected)


@every_layer
def test_gradients_per_sample_equal_a_loop(name: str) -> None:
    one = layer(name)
    weights = {path: p.detach() for path, p in one.named_parameters()}
    x, lengths = tokens(5, N), torch.tensor([7, 1, 5, 3, 2])

    def loss(weights: dict[str, Tensor], item: Tensor, length: Tensor) -> Tensor:
        mask = masks.Causal() & masks.Padding(lengths=length[None])
        return functional_call(one, weights, (item[None],), {"mask": mask}).square().sum()

    received = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, lengths)
    for i in range(len(x)):
        one.zero_grad()
        one(x[i, None], mask=masks.Causal() & masks.Padding(lengths=lengths[i, None])).square().sum().backward()
        expected = {path: p.grad for path, p in one.named_parameters()}
        torch.testing.assert_close({path: g[i] for path, g in received.items()}, expected, rtol=1e-4, atol=1e-5)
