"""Rotary position embedding: closed forms, transformers' frequencies, gradients, every way torch runs it."""

from __future__ import annotations

import copy
import math
import pickle
import shutil

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import tuning
from regard.positions import rotary as module
from regard.positions.rotary import Rotary, rotate
from regard.positions.scalings import DynamicNTK, LinearScaling, Llama3, LongRoPE, Scaling, YaRN

pytestmark = pytest.mark.on_device

B, H, N, D = 2, 3, 5, 14
TRAINED = 64  # of the scalings below
SHORT, LONG = tuple(1 + 0.1 * i for i in range(7)), tuple(1.5 + 0.7 * i for i in range(7))
SCALINGS = {
    "none": None,
    "linear": LinearScaling(3.0),
    "ntk": DynamicNTK(3.0, TRAINED),
    "yarn": YaRN(3.0, TRAINED),
    "longrope": LongRoPE(SHORT, LONG, TRAINED, factor=3.0),
    "llama3": Llama3(3.0, 1.0, 4.0, TRAINED),
}
each_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
each_layout = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Both formulations of the rotation, at sizes that are quick."""
    if request.param == "large":
        monkeypatch.setattr(tuning, "ROTARY_IN_PLACE", 0)
    return request.param


def random(*shape: int, seed: int = 0, **kwargs) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs)


def by_complex_numbers(x: Tensor, angles: Tensor, interleaved: bool, amplitude: float = 1.0) -> Tensor:
    """The definition a second way: a pair is a complex number, turned by multiplication with e^(i angle)."""
    x = x.double()
    rotated = 2 * angles.shape[-1]
    part, rest = x[..., :rotated], x[..., rotated:]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    angles = angles.double() if angles.ndim == 2 else angles.double().unsqueeze(1)
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angles, amplitude), angles)
    pair = (turned.real, turned.imag)
    part = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((part, rest), -1)


# ----------------------------------------------------------------------------------------------------
# The rotation


def test_a_quarter_turn_of_halves(size):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]).view(1, 1, 1, 5)
    y = rotate(x, torch.zeros(1, 2), torch.ones(1, 2))
    assert y.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 9.0]  # pairs (1, 3) and (2, 4); 9 passes through


def test_a_quarter_turn_of_neighbours(size):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]).view(1, 1, 1, 5)
    y = rotate(x, torch.zeros(1, 2), torch.ones(1, 2), interleaved=True)
    assert y.flatten().tolist() == [-2.0, 1.0, -4.0, 3.0, 9.0]  # pairs (1, 2) and (3, 4)


@each_layout
@pytest.mark.parametrize("rotated", [2, 6, D])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_rotation_is_multiplication_by_a_complex_number(size, interleaved, rotated, batched, transposed):
    x = random(B, N, H, D).transpose(1, 2) if transposed else random(B, H, N, D)
    angles = random(*([B] if batched else []), N, rotated // 2, seed=1)
    y = rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
    torch.testing.assert_close(y, by_complex_numbers(x, angles, interleaved).float())
    assert y.shape == x.shape
    assert torch.equal(y[..., rotated:], x[..., rotated:])


def test_large_enough_tensors_take_the_other_formulation_and_agree(monkeypatch):
    x, angles = random(1, 4, 1024, 64), random(1024, 32, seed=1)
    assert x.numel() >= tuning.ROTARY_IN_PLACE
    large = rotate(x, angles.cos(), angles.sin())
    monkeypatch.setattr(module._InPlace, "apply", None)  # not to be called:
    monkeypatch.setattr(tuning, "ROTARY_IN_PLACE", x.numel() + 1)
    torch.testing.assert_close(large, rotate(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(size, dtype):
    x = random(B, H, N, D).to(dtype)
    y = Rotary(D)(x, 1000)
    angles = Rotary(D).angles(torch.arange(1000, 1000 + N))
    assert y.dtype == dtype
    assert torch.equal(y, rotate(x.float(), angles.cos(), angles.sin()).to(dtype))


def test_double_is_double_throughout(size):
    x = random(B, H, N, D, dtype=torch.float64)
    positions = torch.arange(100_000, 100_000 + N)
    exact = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D) * positions[:, None]
    torch.testing.assert_close(Rotary(D)(x, 100_000), by_complex_numbers(x, exact, False), atol=1e-9, rtol=0)


def test_the_input_is_left_alone(size):
    x = random(B, H, N, D)
    before = x.clone()
    rotate(x, torch.zeros(N, 3), torch.ones(N, 3))
    assert torch.equal(x, before)


# ----------------------------------------------------------------------------------------------------
# Positions


@each_scaling
@each_layout
def test_forward_turns_by_the_angles_times_the_attention_factor(size, scaling, interleaved):
    rotary = Rotary(D, interleaved=interleaved, scaling=scaling)
    x = random(B, H, N, D)
    angles = rotary.angles(torch.arange(3, 3 + N))
    expected = by_complex_numbers(x, angles, interleaved, rotary.attention_factor)
    torch.testing.assert_close(rotary(x, 3), expected.float())


def test_position_zero_is_the_identity(size):
    x = random(B, H, 1, D)
    assert torch.equal(Rotary(D)(x, 0), x)
    assert not torch.allclose(Rotary(D)(x, 1), x)


@each_layout
@pytest.mark.parametrize("width", [6, D])
def test_scores_depend_on_the_distance_alone(size, interleaved, width):
    rotary = Rotary(D, width=width, interleaved=interleaved)
    q, k = random(1, 1, 1, D, dtype=torch.float64), random(1, 1, 1, D, seed=1, dtype=torch.float64)

    def score(at: int, distance: int) -> Tensor:
        return (rotary(q, at) * rotary(k, at - distance)).sum()

    torch.testing.assert_close(score(11, 7), score(1013, 7))
    assert not torch.allclose(score(11, 7), score(11, 6))


def test_interleaved_is_halves_with_the_widths_in_another_order(size):
    x = random(B, H, N, D)
    order = torch.arange(D).view(2, D // 2).T.flatten()  # 0, D/2, 1, D/2 + 1 ...
    halves = Rotary(D)(x, 7)
    torch.testing.assert_close(Rotary(D, interleaved=True)(x[..., order], 7), halves[..., order])


@each_scaling
@pytest.mark.parametrize("start", [0, 3, 61, 100, 20_000, -4])
def test_a_start_is_the_positions_from_there(scaling, start):
    rotary = Rotary(D, scaling=scaling)
    x = random(B, H, N, D)
    positions = torch.arange(start, start + N)
    for same in (positions, positions.expand(B, N), positions.int()[None]):
        # DynamicNTK finds its base in float64 from an int, in float32 from a tensor
        torch.testing.assert_close(rotary(x, start), rotary(x, same), atol=1e-7 * max(start, 50), rtol=1e-5)


def test_every_text_of_a_batch_may_have_its_own_positions():
    rotary = Rotary(D)
    x = random(2, H, N, D)
    y = rotary(x, torch.stack((torch.arange(N), torch.arange(N) + 11)))
    torch.testing.assert_close(y[:1], rotary(x[:1], 0))
    torch.testing.assert_close(y[1:], rotary(x[1:], 11))


@each_scaling
def test_no_tokens(scaling):
    rotary = Rotary(D, scaling=scaling)
    x = torch.empty(B, H, 0, D)
    assert rotary(x, 3).shape == x.shape
    assert rotary(x, torch.empty(0, dtype=torch.long)).shape == x.shape


# ----------------------------------------------------------------------------------------------------
# Scalings, against transformers

HEAD, BASE, LIMIT = 48, 5000.0, 128
FACTORS = [1.0 + 0.05 * i for i in range(HEAD // 2)], [1.3 + 0.9 * i for i in range(HEAD // 2)]
PUBLISHED = {
    "linear": (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}),
    "linear-below-1": (LinearScaling(0.7), {"rope_type": "linear", "factor": 0.7}),
    "ntk": (DynamicNTK(2.7, LIMIT), {"rope_type": "dynamic", "factor": 2.7}),
    "ntk-1": (DynamicNTK(1.0, LIMIT), {"rope_type": "dynamic", "factor": 1.0}),
    "yarn": (YaRN(7.0, LIMIT), {"rope_type": "yarn", "factor": 7.0}),
    "yarn-1": (YaRN(1.0, LIMIT), {"rope_type": "yarn", "factor": 1.0}),
    "yarn-betas": (
        YaRN(5.3, LIMIT, beta_fast=13, beta_slow=2),
        {"rope_type": "yarn", "factor": 5.3, "beta_fast": 13, "beta_slow": 2},
    ),
    "yarn-whole": (YaRN(5.3, LIMIT, truncate=False), {"rope_type": "yarn", "factor": 5.3, "truncate": False}),
    "yarn-attention": (
        YaRN(5.3, LIMIT, attention_factor=1.7),
        {"rope_type": "yarn", "factor": 5.3, "attention_factor": 1.7},
    ),
    "yarn-mscale": (
        YaRN(40.0, LIMIT, mscale=0.7, mscale_all_dim=1.3),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "yarn-one-mscale": (YaRN(40.0, LIMIT, mscale=0.7), {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7}),
    "yarn-step": (
        # Both ends of the ramp lie before the first pair.
        YaRN(3.0, 2, beta_fast=32, beta_slow=30),
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 32, "beta_slow": 30, "original_max_position_embeddings": 2},
    ),
    "yarn-long": (
        # The ramp ends beyond the last pair.
        YaRN(3.0, 10**9),
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 10**9},
    ),
    "longrope": (
        LongRoPE(*FACTORS, LIMIT, factor=5.0),
        {"rope_type": "longrope", "factor": 5.0, "short_factor": FACTORS[0], "long_factor": FACTORS[1]},
    ),
    "longrope-1": (
        LongRoPE(*FACTORS, LIMIT, factor=1.0),
        {"rope_type": "longrope", "factor": 1.0, "short_factor": FACTORS[0], "long_factor": FACTORS[1]},
    ),
    "longrope-attention": (
        LongRoPE(*FACTORS, LIMIT, attention_factor=1.9),
        {
            "rope_type": "longrope",
            "factor": 5.0,
            "attention_factor": 1.9,
            "short_factor": FACTORS[0],
            "long_factor": FACTORS[1],
        },
    ),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, LIMIT),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3-other": (
        Llama3(7.3, 1.7, 5.9, LIMIT),
        {"rope_type": "llama3", "factor": 7.3, "low_freq_factor": 1.7, "high_freq_factor": 5.9},
    ),
}


def transformers_config(parameters: dict, head_dim: int = HEAD):
    transformers = pytest.importorskip("transformers", reason="its frequencies are what is compared with")
    parameters = dict(parameters)
    if parameters["rope_type"] in ("yarn", "longrope", "llama3"):
        parameters.setdefault("original_max_position_embeddings", LIMIT)
    return transformers.LlamaConfig(
        hidden_size=3 * head_dim,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_theta": BASE, **parameters},
    )


@pytest.mark.parametrize("length", [None, 1, 100, LIMIT, LIMIT + 1, 1000])
@pytest.mark.parametrize("scaling, parameters", PUBLISHED.values(), ids=PUBLISHED)
def test_frequencies_are_those_of_transformers(scaling, parameters, length):
    config = transformers_config(parameters)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    rotary = Rotary(HEAD, base=BASE, scaling=scaling)
    torch.testing.assert_close(rotary.frequencies(length).cpu(), expected, atol=0, rtol=0)
    assert rotary.attention_factor == attention_factor
    if length is not None:  # the length as a tensor, whose arithmetic is that of float32
        torch.testing.assert_close(rotary.frequencies(torch.tensor(length)).cpu(), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("scaling, parameters", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("width", [12, 36])
def test_frequencies_of_a_part_are_those_of_transformers(scaling, parameters, width):
    if isinstance(scaling, LongRoPE):
        short, long = scaling.short[: width // 2], scaling.long[: width // 2]
        scaling = LongRoPE(short, long, LIMIT, factor=5.0)
        parameters = {**parameters, "short_factor": list(short), "long_factor": list(long)}
    config = transformers_config({**parameters, "partial_rotary_factor": width / HEAD})
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=1000)
    rotary = Rotary(HEAD, base=BASE, width=width, scaling=scaling)
    torch.testing.assert_close(rotary.frequencies(1000).cpu(), expected, atol=0, rtol=0)


@pytest.mark.parametrize("start", [0, 90, 125, 300])
@pytest.mark.parametrize(
    "scaling, parameters", [(None, {"rope_type": "default"}), *PUBLISHED.values()], ids=["none", *PUBLISHED]
)
def test_rotation_is_that_of_transformers(scaling, parameters, start):
    config = transformers_config(parameters)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k = random(2, 3, 7, HEAD), random(2, 3, 7, HEAD, seed=1)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(start, start + 7)[None])
    rotary = Rotary(HEAD, base=BASE, scaling=scaling)
    for x, expected in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(rotary(x, start), expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(rotary(x, torch.arange(start, start + 7)), expected, atol=2e-4, rtol=1e-4)


def test_frequencies_without_scaling():
    expected = [1000.0 ** (-2 * i / 6) for i in range(3)]  # 1, 0.1, 0.01
    torch.testing.assert_close(Rotary(6, base=1000.0).frequencies(), torch.tensor(expected))


@pytest.mark.parametrize("name", ["ntk", "longrope"])
def test_the_length_is_that_of_the_whole_text(name):
    rotary = Rotary(D, scaling=SCALINGS[name])
    x = random(B, H, N, D)
    positions = torch.arange(N)
    long = rotary(x, 0, length=3 * TRAINED)
    assert not torch.allclose(long, rotary(x, 0))
    torch.testing.assert_close(long, rotary(x, positions, length=3 * TRAINED))
    # The first tokens of a long text, read at once:
    whole = torch.cat((x, random(B, H, 3 * TRAINED - N, D, seed=1)), dim=2)
    torch.testing.assert_close(long, rotary(whole)[:, :, :N])


def test_dynamic_ntk_squeezes_the_slowest_pair_as_linear_interpolation_would():
    length, factor = 3 * TRAINED, 2.0
    frequencies = Rotary(D, scaling=DynamicNTK(factor, TRAINED)).frequencies(length)
    plain = Rotary(D).frequencies()
    assert frequencies[0] == plain[0]
    torch.testing.assert_close(frequencies[-1], plain[-1] / (factor * length / TRAINED - (factor - 1)))


def test_a_scaling_of_ones_own():
    class Frozen(Scaling):
        def frequencies(self, periods, *, base, length):
            return torch.zeros_like(periods)

    x = random(B, H, N, D)
    assert torch.equal(Rotary(D, scaling=Frozen())(x, 17), x)


# ----------------------------------------------------------------------------------------------------
# What is kept between calls


@each_scaling
def test_calls_in_any_order_give_what_a_fresh_module_gives(scaling):
    rotary = Rotary(D, scaling=scaling)
    x = random(B, H, N, D)
    for start in (0, 250, 3, 5000, 59, 60, 16_380, 0):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            fresh = Rotary(D, scaling=scaling)
            assert torch.equal(rotary(x.to(dtype), start), fresh(x.to(dtype), start)), (start, dtype)
            length = {"length": start + N + 70}
            assert torch.equal(rotary(x.to(dtype), start, **length), fresh(x.to(dtype), start, **length))


def test_changed_attributes_change_the_result():
    rotary, x = Rotary(D), random(B, H, N, D)
    rotary(x, 3), rotary(x, torch.arange(N))
    rotary.base = 500.0
    assert torch.equal(rotary(x, 3), Rotary(D, base=500.0)(x, 3))
    assert torch.equal(rotary(x, torch.arange(N)), Rotary(D, base=500.0)(x, torch.arange(N)))
    rotary.scaling = LinearScaling(2.0)
    assert torch.equal(rotary(x, 3), Rotary(D, base=500.0, scaling=LinearScaling(2.0))(x, 3))


def test_the_table_doubles_and_ends():
    rotary = Rotary(D)

    def rows() -> list[int]:
        return [len(cos) for cos, _ in rotary._tables.values()]

    rotary(random(1, 1, 1, D), 0)
    assert rows() == [256]
    rotary(random(1, 1, 1, D), 256)
    assert rows() == [512]
    rotary(random(1, 1, 1, D), 1300)
    assert rows() == [1301]
    rotary(random(1, 1, 1, D), tuning.ROTARY_TABLE - 1)
    assert rows() == [tuning.ROTARY_TABLE]
    rotary(random(1, 1, 1, D), 10**12)  # a table of this many rows would not fit anywhere
    assert rows() == [tuning.ROTARY_TABLE]


def test_no_table_is_made_for_one_length_alone():
    rotary = Rotary(D, scaling=DynamicNTK(2.0, TRAINED))
    for start in range(TRAINED, TRAINED + 5):
        rotary(random(1, 1, 1, D), start)
    assert not rotary._tables
    rotary(random(1, 1, 1, D), 0)
    assert len(rotary._tables) == 1


def test_nothing_is_saved_with_the_weights():
    rotary = Rotary(D)
    rotary(random(B, H, N, D))
    assert not rotary.state_dict()
    assert not list(rotary.buffers())


@each_scaling
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_copies_share_nothing(scaling, copied):
    rotary, x = Rotary(D, width=14, interleaved=True, scaling=scaling), random(B, H, N, D)
    expected = rotary(x, 3), rotary(x, torch.arange(N))
    assert rotary._tables
    other = copied(rotary)
    assert not other._tables
    assert not other._frequencies
    assert torch.equal(other(x, 3), expected[0])
    assert torch.equal(other(x, torch.arange(N)), expected[1])
    assert other._tables is not rotary._tables
    assert repr(other) == repr(rotary)


def test_a_pickle_does_not_grow_with_use():
    rotary = Rotary(D)
    before = len(pickle.dumps(rotary))
    rotary(random(1, 1, 1, D), 9000)
    assert len(pickle.dumps(rotary)) == before


@pytest.mark.parametrize("positions", [3, torch.arange(N)], ids=["start", "tensor"])
def test_trains_after_use_in_inference_mode(size, positions):
    rotary = Rotary(D)
    with torch.inference_mode():
        rotary(random(B, H, N, D), positions)
    x = random(B, H, N, D).requires_grad_()
    rotary(x, positions).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps the norm


def test_fake_tensors_neither_leave_nor_meet_what_is_kept():
    from torch._subclasses import FakeTensorMode

    x, positions = random(B, H, N, D), torch.arange(N)
    expected = Rotary(D)(x, 3), Rotary(D)(x, positions)
    rotary = Rotary(D)
    for _ in range(2):  # the first time nothing is kept, the second time real tensors are
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for fake_or_real in (mode.from_tensor(x), x):
                assert rotary(fake_or_real, 3).shape == x.shape
                assert rotary(fake_or_real, torch.arange(N)).shape == x.shape
                assert rotary(fake_or_real, positions).shape == x.shape
        with FakeTensorMode() as mode:  # which refuses to mix
            assert rotary(mode.from_tensor(x), 3).shape == x.shape
            assert rotary(mode.from_tensor(x), torch.arange(N)).shape == x.shape
        assert torch.equal(rotary(x, 3), expected[0])
        assert torch.equal(rotary(x, positions), expected[1])


# ----------------------------------------------------------------------------------------------------
# Gradients


@each_layout
@pytest.mark.parametrize("width", [6, D])
def test_gradients(size, interleaved, width):
    rotary = Rotary(D, width=width, interleaved=interleaved)
    x = random(2, 1, 3, D, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary(x, 5), (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, torch.tensor([[1, 5, 2], [0, 1, 7]])), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rotary(x, 5).pow(3), (x,))


@each_layout
def test_cosine_and_sine_may_be_learned(size, interleaved):
    x = random(2, 2, 3, 7, dtype=torch.float64).requires_grad_()
    angles = random(3, 2, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, angles: rotate(x, angles.cos(), angles.sin(), interleaved=interleaved), (x, angles)
    )


def test_forward_gradient_is_the_rotation_of_the_tangent(size):
    rotary = Rotary(D)
    x, tangent = random(B, H, N, D), random(B, H, N, D, seed=1)
    with forward_ad.dual_level():
        y = rotary(forward_ad.make_dual(x, tangent), 3)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, rotary(tangent, 3))


# ----------------------------------------------------------------------------------------------------
# Every way that torch runs a module


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "scaling, dynamic", [*((scaling, None) for scaling in SCALINGS.values()), (SCALINGS["llama3"], True)]
)
@pytest.mark.slow
def test_compiles_as_one_graph(fresh_compiler, scaling, dynamic):
    rotary = Rotary(D, scaling=scaling)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for start in (3, 4, 62, 80):
        x = random(B, H, N, D).requires_grad_()
        positions = torch.arange(start, start + N)
        torch.testing.assert_close(compiled(x, start), rotary(x, start))
        torch.testing.assert_close(compiled(x, positions), rotary(x, positions))
        torch.testing.assert_close(compiled(x, 0, length=start), rotary(x, 0, length=start))
        compiled(x, start).square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * rotary.attention_factor**2 * x.detach())


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_compiles_with_inductor(fresh_compiler):
    rotary, x = Rotary(D, width=6), random(B, H, N, D)
    torch.testing.assert_close(torch.compile(rotary, fullgraph=True)(x, 3), rotary(x, 3))


def test_compiling_leaves_no_table(fresh_compiler):
    rotary = Rotary(D)
    torch.compile(rotary, fullgraph=True, backend="aot_eager")(random(B, H, N, D), 3)
    assert not rotary._tables
    assert not rotary._frequencies


@each_scaling
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exports_for_any_number_of_tokens(scaling, strict):
    rotary = Rotary(D, scaling=scaling)
    tokens = torch.export.Dim("tokens", min=2, max=TRAINED)
    program = torch.export.export(rotary, (random(B, H, N, D),), dynamic_shapes={"x": {2: tokens}}, strict=strict)
    assert not rotary._tables
    x = random(B, H, 11, D)
    torch.testing.assert_close(program.module()(x), rotary(x))


@each_scaling
def test_exports_with_positions_as_an_input(scaling):
    rotary = Rotary(D, scaling=scaling)
    program = torch.export.export(rotary, (random(B, H, N, D), torch.arange(N)))
    for start in (0, 100):  # on both sides of the trained length: nothing of the example's positions is baked in
        x, positions = random(B, H, N, D), torch.arange(start, start + N)
        torch.testing.assert_close(program.module()(x, positions), rotary(x, positions))


@each_scaling
def test_maps_over_a_further_axis(size, scaling):
    rotary = Rotary(D, scaling=scaling)
    x = random(7, B, H, N, D)
    expected = torch.stack([rotary(one, 3) for one in x])
    torch.testing.assert_close(torch.vmap(lambda x: rotary(x, 3))(x), expected)
    starts = torch.arange(0, 70, 10)
    positions = starts[:, None] + torch.arange(N)
    expected = torch.stack([rotary(one, int(start)) for one, start in zip(x, starts, strict=True)])
    torch.testing.assert_close(torch.vmap(rotary)(x, positions), expected)


def test_functional_gradients_leave_nothing_behind(size):
    rotary, x = Rotary(D), random(B, H, N, D)
    gradient = torch.func.grad(lambda x: rotary(x, 3).square().sum())(x)
    torch.testing.assert_close(gradient, 2 * x)
    hessian = torch.func.hessian(lambda x: rotary(x, 3).square().sum())(x[:1, :1, :1])
    torch.testing.assert_close(hessian.view(D, D), 2 * torch.eye(D))
    assert not rotary._tables
    assert torch.equal(rotary(x, 3), Rotary(D)(x, 3))


def test_on_the_meta_device(size):
    rotary = Rotary(D, scaling=SCALINGS["longrope"])
    x = torch.empty(B, H, N, D, device="meta")
    for positions in (3, torch.arange(N)):
        y = rotary(x, positions)
        assert y.shape == x.shape
        assert y.device.type == "meta"
    real = random(B, H, N, D)
    with torch.device("meta"):
        made = Rotary(D)
    assert torch.equal(made(real, 3), Rotary(D)(real, 3))  # a module made there loses nothing on the way back


def test_under_autocast_the_angles_stay_exact(size):
    rotary, x = Rotary(D), random(B, H, N, D)
    expected = rotary(x, 1001), rotary(x.bfloat16(), 1001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fresh = Rotary(D)
        assert torch.equal(fresh(x, 1001), expected[0])
        assert torch.equal(fresh(x.bfloat16(), 1001), expected[1])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_say(default):
    x = random(B, H, N, D)
    expected = Rotary(D)(x, 1001)
    torch.set_default_dtype(default)
    try:
        y = Rotary(D)(x, 1001)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, expected)


# ----------------------------------------------------------------------------------------------------
# What it says


def test_repr():
    assert repr(Rotary(64)) == "Rotary(64, base=10000)"
    assert repr(Rotary(64, base=5e5, width=32, interleaved=True, scaling=LinearScaling(4.0))) == (
        "Rotary(64, base=500000, width=32, interleaved=True, scaling=LinearScaling(factor=4.0))"
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Rotary(7), r"width: expected an even number.*width=7 for head_dim=7; remedy: .*pass width="),
        (lambda: Rotary(8, width=3), r"width: expected an even number.*received width=3"),
        (lambda: Rotary(8, width=0), r"width: expected an even number.*at least 2, received width=0"),
        (lambda: Rotary(8, width=10), r"width: expected at most head_dim = 8, received 10"),
        (lambda: Rotary(8, base=1.0), r"base: expected a number above 1, received 1\.0"),
        (lambda: Rotary(8, base=math.nan), r"base: expected a number above 1, received nan"),
        (
            lambda: LinearScaling(0.0),
            r"LinearScaling\.factor: expected a positive number, received 0\.0; remedy: factor is",
        ),
        (lambda: DynamicNTK(-2.0, 64), r"DynamicNTK\.factor: expected a positive number, received -2\.0"),
        (lambda: DynamicNTK(2.0, 0), r"DynamicNTK\.trained_length: expected a positive number, received 0"),
        (lambda: YaRN(0, 64), r"YaRN\.factor: expected a positive number, received 0"),
        (lambda: YaRN(2.0, 64, beta_fast=1, beta_slow=32), r"beta_fast: expected more turns than beta_slow = 32"),
        (lambda: Llama3(-1, 1, 4, 64), r"Llama3\.factor: expected a positive number, received -1"),
        (lambda: Llama3(8, 4, 1, 64), r"high_frequency_factor: expected more than low_frequency_factor = 4"),
        (lambda: LongRoPE([1.0, 0.0], [1.0, 2.0], 64, factor=2), r"short: expected R/2 positive factors"),
        (lambda: LongRoPE([1.0], [], 64, factor=2), r"long: expected R/2 positive factors"),
        (lambda: LongRoPE([1.0], [1.0], 64), r"factor: expected factor or attention_factor, received neither"),
        (
            lambda: Rotary(8, scaling=LongRoPE([1.0] * 4, [2.0] * 5, 64, factor=2)),
            r"scaling\.long: expected 4 factors, one per pair of 8 rotated widths, received 5",
        ),
        (
            lambda: Rotary(2, scaling=DynamicNTK(2.0, 64)),
            r"scaling: expected a rotated width of at least 4 for DynamicNTK, received 2",
        ),
    ],
)
def test_refuses_to_be_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_refuses_what_is_no_scaling():
    with pytest.raises(
        TypeError, match=r"scaling: expected LinearScaling, .* received dict; remedy: .*LinearScaling\(4\.0\)"
    ):
        Rotary(8, scaling={"factor": 4.0})


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "shape, positions, words",
    [
        ((B, H, N, D + 1), 0, r"x: expected \(B, H, N, D\) with D = head_dim = 14, received \(2, 3, 5, 15\)"),
        ((B, N, D), 0, r"x: expected .*received \(2, 5, 14\); remedy: .*splits \(B, N, W\) into heads"),
        ((B, H, N, D), torch.arange(N + 1), r"positions: expected shape \(5,\) or \(2, 5\), received shape \(6,\)"),
        ((B, H, N, D), torch.zeros(3, N).long(), r"positions: expected .*received shape \(3, 5\)"),
        ((B, H, N, D), torch.zeros(B, H, N).long(), r"positions: expected .*received shape \(2, 3, 5\)"),
        ((B, H, N, D), torch.tensor(3), r"positions: expected .*received shape \(\); remedy: .*as an int"),
    ],
)
def test_refuses_shapes(shape, positions, words):
    with pytest.raises(ValueError, match=words):
        Rotary(D)(torch.zeros(shape), positions)


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "positions, words",
    [
        (torch.arange(N).float(), r"positions: expected an integer tensor, received dtype torch\.float32; .*long\(\)"),
        (torch.ones(N, dtype=torch.bool), r"positions: expected an integer tensor, received dtype torch\.bool"),
        (3.0, r"positions: expected an int or an integer tensor, received float"),
        (True, r"positions: expected an int or an integer tensor, received bool"),
        ([0, 1, 2, 3, 4], r"positions: expected an int or an integer tensor, received list; remedy: .*torch\.tensor"),
    ],
)
def test_refuses_positions_that_are_no_integers(positions, words):
    with pytest.raises(TypeError, match=words):
        Rotary(D)(torch.zeros(B, H, N, D), positions)


def test_angles_refuses_floats():
    with pytest.raises(TypeError, match="positions: expected an integer tensor"):
        Rotary(D).angles(torch.rand(3))


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "x, cos, sin, words",
    [
        ((N, D), (N, 7), (N, 7), r"x: expected floating point \(B, H, N, D\), received torch\.float32 \(5, 14\)"),
        ((B, H, N, D), (N, 7), (N, 6), r"cos and sin: expected both .*received \(5, 7\) and \(5, 6\)"),
        ((B, H, N, D), (N + 1, 7), (N + 1, 7), r"cos and sin: expected both .*N = 5, B = 2, received \(6, 7\)"),
        ((B, H, N, D), (3, N, 7), (3, N, 7), r"cos and sin: expected both .*received \(3, 5, 7\)"),
        ((B, H, N, D), (N, 14), (N, 14), r"at most 7 columns, .*received 14 columns; remedy: .*not repeated"),
    ],
)
def test_rotate_refuses(x, cos, sin, words):
    with pytest.raises(ValueError, match=words):
        rotate(torch.zeros(x), torch.zeros(cos), torch.zeros(sin))


def test_rotate_refuses_integers():
    with pytest.raises(ValueError, match=r"x: expected floating point .*received torch\.int64"):
        rotate(torch.zeros(B, H, N, D, dtype=torch.long), torch.zeros(N, 7), torch.zeros(N, 7))
