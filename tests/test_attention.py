"""`attend`, `attention_weights`, `explain`: what is chosen, what is said, and who can watch."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard
from regard import attend, attention_weights, explain
from regard.kernels import available
from regard.kernels.triton.availability import why_not_on
from regard.masks import Causal

pytestmark = pytest.mark.on_device


def test_weights_times_values_is_the_output() -> None:
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    out = attention_weights(q, k, mask=Causal(), softcap=2.0) @ v
    torch.testing.assert_close(attend(q, k, v, mask=Causal(), softcap=2.0), out)


@pytest.mark.of_cpu("the reasons are those of a CPU")
@pytest.mark.usefixtures("without_native")
def test_explain_names_the_kernel_and_why_not_the_others() -> None:
    q = torch.randn(1, 2, 3, 4)
    assert explain(q, q, q).splitlines() == [
        "native: no, REGARD_NATIVE=0 turns it off",
        "fused: chosen",
        f"triton: no, {why_not_on('cpu')}",
        "blockwise: could serve, but fused is faster",
        "reference: could serve, but fused is faster",
    ]
    assert explain(q, q, q, softcap=1.0).splitlines()[1:] == [
        "fused: no, it has no softcap",
        f"triton: no, {why_not_on('cpu')}",
        "blockwise: could serve, but reference is faster",  # so small a plane
        "reference: chosen",
    ]
    q = torch.randn(1, 2, 199, 4)
    assert explain(q, q, q, softcap=1.0, mask=Causal()).splitlines()[3:] == [
        "blockwise: chosen",
        "reference: could serve, but blockwise is faster",
    ]
    assert "fused: could serve, but reference was named" in explain(q, q, q, kernel="reference")


def test_kernels_by_name() -> None:
    assert [name for name in available() if name != "native"] == ["fused", "blockwise", "reference"]
    q = torch.randn(1, 2, 3, 4)
    outs = [attend(q, q, q, kernel=name) for name in available(q.device.type)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    with pytest.raises(
        ValueError,
        match=r"kernel: expected \"auto\" or one of \[.*'fused', 'blockwise', 'reference'\], received 'flash'",
    ):
        attend(q, q, q, kernel="flash")


def test_attend_can_be_seen_by_a_torch_function_mode() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 3, 4)
    with Watch():
        out = attend(q, q, q, mask=Causal())
    assert attend in seen
    torch.testing.assert_close(out, attend(q, q, q, mask=Causal()))


def test_sharing_keys_by_expand_copies_nothing_and_is_right() -> None:
    q, k = torch.randn(3, 2, 5, 4), torch.randn(1, 2, 7, 4)
    shared = k.expand(3, -1, -1, -1)
    for kernel in available(q.device.type):
        torch.testing.assert_close(attend(q, shared, shared, kernel=kernel), attend(q, shared.clone(), shared.clone()))


def test_the_public_names() -> None:
    for name in regard.__all__:
        assert hasattr(regard, name)
