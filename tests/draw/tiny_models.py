"""Tiny models of transformers to look at."""

from __future__ import annotations

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = ["[PAD]", "[EOS]", "the", "cat", "that", "i", "saw", "ran", "away", ",", "dog"]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=12, n_layer=2, n_head=3, n_positions=17, eos_token_id=None))


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 7))
    }
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=11,
            d_model=8,
            max_position_embeddings=19,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
            **sizes,
        )
    )


def bert() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
    return BertModel(BertConfig(vocab_size=11, max_position_embeddings=17, **sizes)).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_kv": 5, "num_heads": 3, "num_layers": 1, "d_ff": 7}
    return T5ForConditionalGeneration(T5Config(vocab_size=11, decoder_start_token_id=0, **sizes)).eval()
