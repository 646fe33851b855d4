"""What tests of drawings share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from regard.heads import Record


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLORTERM", "TERM", "COLUMNS", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    from draw.tiny_models import WORDS
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(plain: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]")


@pytest.fixture(scope="module")
def small() -> Record:
    """Two layers of three heads, seven tokens; head 1 of layer 0 looks at the token before."""
    from draw.figures import random_weights, record, shifted

    first = torch.cat([random_weights(1, 1, 7, 7), shifted(7), random_weights(1, 1, 7, 7, seed=1)], 1)
    seen = record(first, random_weights(1, 3, 7, 7, seed=2))
    seen.tokens = ["[CLS]", "the", "cat", "that", "I", "saw", "[SEP]"]
    return seen
