"""What is known of an attention module by its names."""

from __future__ import annotations

import pytest
from torch import nn

import regard
from regard.heads.module_names import applies_rotary
from regard.positions import Alibi, Rotary


def test_rotary_of_our_layer() -> None:
    assert applies_rotary(regard.MultiHeadAttention(12, num_heads=2, position_encoding=Rotary(6)))
    assert not applies_rotary(regard.MultiHeadAttention(12, num_heads=2, position_encoding=Alibi(2)))
    assert not applies_rotary(regard.MultiHeadAttention(12, num_heads=2))
    assert not applies_rotary(nn.MultiheadAttention(12, 2))


def test_rotary_by_a_part() -> None:
    module = nn.Module()
    module.properties = 3  # (not "rope")
    assert not applies_rotary(module)
    module.rotary_emb = nn.Identity()
    assert applies_rotary(module)


@pytest.mark.slow
def test_rotary_of_transformers() -> None:
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    llama = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=11, **sizes))
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=11, **sizes))
    assert applies_rotary(llama.layers[0].self_attn)
    assert not applies_rotary(bert.encoder.layer[0].attention.self)
