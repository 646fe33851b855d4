"""What is read from the code of transformers' classes: which compute attention by its interface alone."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.heads.capture.forward_code import forward_code

modeling = pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")


def written(forward: str, **names: Any) -> type[nn.Module]:
    """A class with this forward, as a module of transformers would have it."""
    space = {"__name__": "transformers.models.written.modeling_written", "torch": torch, "nn": nn, "F": F, **names}
    space["ALL_ATTENTION_FUNCTIONS"] = modeling.ALL_ATTENTION_FUNCTIONS
    code = "class Written(nn.Module):\n" + textwrap.indent(textwrap.dedent(forward), "    ")
    exec("def eager(module, q): return q.softmax(-1)\n" + code, space)
    kind: Any = space["Written"]
    return kind


CLOSED = {
    "projections": "def forward(self, x): return self.dense(x).view(2, 3).transpose(0, 1) + x",
    "functions of torch": "def forward(self, x): return torch.cat([F.gelu(x), nn.functional.silu(x)], dim=-1)",
    "a method": "def forward(self, x): return self.half(x)\ndef half(self, x): return x / 2",
    "an attribute by its name": "def forward(self, x): return x * getattr(self.config, 'factor', 1.0)",
    "the interface": """
        def forward(self, x):
            function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
            return function(self, x)
    """,
}
OPEN = {
    "a softmax": "def forward(self, x): return self.dense(x).softmax(-1)",
    "a softmax of F": "def forward(self, x): return F.softmax(x, dim=-1)",
    "torch's attention": "def forward(self, x): return F.scaled_dot_product_attention(x, x, x)",
    "a softmax in a method": "def forward(self, x): return self.mix(x)\ndef mix(self, x): return torch.softmax(x, -1)",
    "a softmax in a lambda": "def forward(self, x): return (lambda y: y.softmax(-1))(x)",
    "a softmax in a property": "def forward(self, x): return self.w\n@property\ndef w(self): return self.x.softmax(-1)",
    "a softmax in a default method": "def forward(self, x): return eager(self, x)",
    "a name that is put together": "def forward(self, x, name): return getattr(x, name)(-1)",
    "a default in place of a name": "def forward(self, x, name): return getattr(x, name, 'shape')(-1)",
    "an import": "def forward(self, x):\n    from torch import softmax as f\n    return f(x, -1)",
    "an operator": "def forward(self, x): return torch.ops.aten._thing(x)",
    "code": "def forward(self, x): return eval('x')",
    "the function of the interface, called otherwise": """
        def forward(self, x):
            function = eager
            if self.config.other:
                function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
            return function(self, x)
    """,
}


@pytest.mark.parametrize("which", CLOSED)
def test_code_that_computes_no_attention(which: str) -> None:
    code = forward_code(written(CLOSED[which]))
    assert code is not None
    assert code.closed
    assert code.asks == (which == "the interface")


@pytest.mark.parametrize("which", OPEN)
def test_code_that_may_compute_attention(which: str) -> None:
    code = forward_code(written(OPEN[which]))
    assert code is not None
    assert not code.closed


def test_functions_of_others_are_not_read() -> None:
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x

    code = forward_code(written("def forward(self, x): return mine(x)", mine=mine))
    assert code is not None
    assert not code.closed
    for other in (object(), nn.Linear, torch.autograd.Function):
        code = forward_code(written("def forward(self, x): return other(x)", other=other))
        assert code is not None
        assert not code.closed


def test_classes_of_others_are_not_read() -> None:
    assert forward_code(nn.Linear) is None
    kind = written(CLOSED["projections"])
    kind.__module__ = "my_models"
    assert forward_code(kind) is None


def test_a_name_that_stands_for_something_else_later() -> None:
    kind = written(CLOSED["a method"])
    before = forward_code(kind)
    assert before is not None
    assert before.closed
    assert before.is_valid()
    kind.half = lambda self, x: x.softmax(-1)  # type: ignore[attr-defined]
    after = forward_code(kind)
    assert after is not None
    assert not after.closed

    kind = written("def forward(self, x): return f(x)", f=F.gelu)
    before = forward_code(kind)
    assert before is not None
    assert before.closed
    kind.forward.__globals__["f"] = F.softmax
    after = forward_code(kind)
    assert after is not None
    assert not after.closed
