"""`attend` and `attention_weights` against the test cases of ONNX's Attention operator (opsets 23 to 25)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import masks

from .onnx_cases import collect

pytest.importorskip("onnx", reason="the cases come from the onnx package")

# Named here, so that a case that disappears or appears is noticed. Each begins with "test_attention_".
NAMES = [
    "23_boolmask_fullymasked_row_nan_robustness",
    "23_fullymasked_qk_matmul_output_mode3_zero",
    "24_fullymasked_qk_matmul_output_mode3_zero",
    "24_qk_matmul_output_mode3_softmax_precision",
    "3d",
    "3d_attn_mask",
    "3d_causal",
    "3d_causal_bf16",
    "3d_diff_heads_sizes",
    "3d_diff_heads_sizes_attn_mask",
    "3d_diff_heads_sizes_causal",
    "3d_diff_heads_sizes_scaled",
    "3d_diff_heads_sizes_softcap",
    "3d_diff_heads_with_past_and_present",
    "3d_gqa",
    "3d_gqa_attn_mask",
    "3d_gqa_causal",
    "3d_gqa_scaled",
    "3d_gqa_softcap",
    "3d_gqa_with_past_and_present",
    "3d_local_window",
    "3d_scaled",
    "3d_softcap",
    "3d_transpose_verification",
    "3d_with_past_and_present",
    "3d_with_past_and_present_qk_matmul",
    "3d_with_past_and_present_qk_matmul_bias",
    "3d_with_past_and_present_qk_matmul_softcap",
    "3d_with_past_and_present_qk_matmul_softmax",
    "4d",
    "4d_attn_mask",
    "4d_attn_mask_3d",
    "4d_attn_mask_3d_causal",
    "4d_attn_mask_4d",
    "4d_attn_mask_4d_causal",
    "4d_attn_mask_bool",
    "4d_attn_mask_bool_4d",
    "4d_attn_mask_causal_bf16",
    "4d_causal",
    "4d_causal_bf16",
    "4d_causal_fp16",
    "4d_causal_nonpad_attn_mask_composition",
    "4d_causal_nonpad_batch_prefill",
    "4d_causal_nonpad_continued_prefill",
    "4d_causal_nonpad_negative_offset_structural_empty",
    "4d_causal_padded_kv_bf16",
    "4d_causal_with_past_and_present",
    "4d_diff_heads_mask4d_padded_kv",
    "4d_diff_heads_sizes",
    "4d_diff_heads_sizes_attn_mask",
    "4d_diff_heads_sizes_causal",
    "4d_diff_heads_sizes_scaled",
    "4d_diff_heads_sizes_softcap",
    "4d_diff_heads_with_past_and_present",
    "4d_diff_heads_with_past_and_present_mask3d",
    "4d_diff_heads_with_past_and_present_mask4d",
    "4d_fp16",
    "4d_gqa",
    "4d_gqa_attn_mask",
    "4d_gqa_causal",
    "4d_gqa_causal_nonpad_decode",
    "4d_gqa_causal_nonpad_decode_fp16",
    "4d_gqa_scaled",
    "4d_gqa_softcap",
    "4d_gqa_with_past_and_present",
    "4d_gqa_with_past_and_present_fp16",
    "4d_padded_kv_bf16",
    "4d_scaled",
    "4d_softcap",
    "4d_softcap_neginf_mask",
    "4d_softcap_neginf_mask_poison",
    "4d_with_past_and_present",
    "4d_with_past_and_present_qk_matmul",
    "4d_with_past_and_present_qk_matmul_bias",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "4d_with_qk_matmul",
    "4d_with_qk_matmul_bias",
    "4d_with_qk_matmul_softcap",
    "4d_with_qk_matmul_softmax",
    "bidirectional_window",
    "causal_boolmask_nan_robustness",
    "local_window",
    "local_window_default",
    "local_window_ext_cache_float16_mask",
    "local_window_ext_cache_rank2_mask",
    "local_window_ext_cache_rank3_head_mask",
    "local_window_ext_cache_rank4_batch_mask",
    "local_window_gqa_rank4_mask",
    "local_window_rank1_boolean_mask",
    "local_window_with_past",
]

# Cases that do not hold, and why: at most two, and none for its values.
EXCEPTIONS: dict[str, str] = {}

STAGES = {0: "scaled", 1: "capped", 2: "biased", 3: "weights"}  # of `qk_matmul_output_mode`
DOUBLE = 11  # of onnx.TensorProto.DataType, which `softmax_precision` names


def onnx_attention(attributes: dict[str, Any], inputs: dict[str, Tensor], kernel: str) -> dict[str, Tensor]:
    """ONNX's operator in this library's words: its outputs by name, all four of them."""
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    packed = q.dim() == 3  # (B, N, H * D)
    if packed:
        q = _split(q, attributes["q_num_heads"])
        k, v = (_split(x, attributes["kv_num_heads"]) for x in (k, v))
    first: Tensor | int = 0  # where the first query stands: without a cache, at the first key
    if "past_key" in inputs:
        first = inputs["past_key"].shape[2]
        k = torch.cat([inputs["past_key"], k], dim=2)
        v = torch.cat([inputs["past_value"], v], dim=2)
    present = {"present_key": k, "present_value": v}
    n, m = q.shape[2], k.shape[2]

    visible: list[masks.Mask] = []
    bias = None
    if "attn_mask" in inputs:
        given = inputs["attn_mask"]
        boolean = given.dtype is torch.bool
        given = F.pad(given, (0, m - given.shape[-1]), value=False if boolean else float("-inf"))
        given = given[(None,) * (4 - given.dim())]  # it broadcasts from the right: three axes are (H, N, M)
        if boolean:
            visible.append(masks.Keep(given))
        else:
            bias = given
    if "nonpad_kv_seqlen" in inputs:
        lengths = inputs["nonpad_kv_seqlen"]
        visible.append(masks.Padding(lengths=lengths))
        first = lengths[:, None] - n + torch.arange(n)  # (B, N): the last query stands at the last key that is real
    if attributes.get("is_causal"):
        visible.append(masks.Causal())
    before, after = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if before >= 0 or after >= 0:
        before, after = (size if size >= 0 else n + m for size in (before, after))  # -1: unbounded
        visible.append(masks.Window(before=before, after=after))

    mask = None
    for part in visible:
        mask = part if mask is None else mask & part
    options = {
        "mask": mask,
        "bias": bias,
        "positions": first,
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap"),
    }
    dtype = q.dtype
    if attributes.get("softmax_precision") == DOUBLE:  # float32 is what softmax has in any case
        q, k, v = q.double(), k.double(), v.double()
        kernel = "auto" if kernel in ("native", "triton") else kernel  # they have no float64, and say so
    y = regard.attend(q, k, v, kernel=kernel, **options).to(dtype)
    stage = STAGES[attributes.get("qk_matmul_output_mode", 0)]
    scores = regard.attention_weights(q, k, stage=stage, **options).to(dtype)
    return {"Y": y.transpose(1, 2).flatten(2) if packed else y, "qk_matmul_output": scores, **present}


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def test_the_names_are_all_there_are() -> None:
    assert sorted(collect("Attention")) == [f"test_attention_{name}" for name in NAMES]
    assert len(NAMES) == 93


def test_exceptions_are_few_and_are_cases() -> None:
    assert len(EXCEPTIONS) <= 2
    assert EXCEPTIONS.keys() <= set(NAMES)


@pytest.mark.parametrize("kernel", [name for name in regard.kernels.available() if name != "fused"] + ["auto"])
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, kernel: str) -> None:
    if name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    case = collect("Attention")[f"test_attention_{name}"]
    received = onnx_attention(case.attributes, case.inputs, kernel)
    if kernel in ("auto", "triton"):
        # torch's own kernel rounds the weights to float16, as ONNX does, but the other way here and there: the two
        # stand on either side of the exact answer. The test below holds it to that one.
        case.check(received, two_roundings=(torch.bfloat16, torch.float16))
    else:
        case.check(received)


@pytest.mark.parametrize("kernel, roundings", [("reference", 1), ("blockwise", 1), ("auto", 2)])
@pytest.mark.usefixtures("without_native")
def test_half_precision_is_near_the_exact_answer(kernel: str, roundings: int) -> None:
    halves = [c for c in collect("Attention").values() if c.inputs["Q"].dtype in (torch.float16, torch.bfloat16)]
    assert len(halves) == 11
    for case in halves:
        doubles = {name: x.double() if x.is_floating_point() else x for name, x in case.inputs.items()}
        exact = onnx_attention(case.attributes, doubles, "reference")["Y"]
        y = onnx_attention(case.attributes, case.inputs, kernel)["Y"]
        half_unit = torch.finfo(y.dtype).eps / 2  # what rounding the exact answer would cost
        torch.testing.assert_close(y.double(), exact, rtol=1.001 * roundings * half_unit, atol=1e-9)
