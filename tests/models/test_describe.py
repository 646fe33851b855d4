"""A model in words and numbers: what `describe` says is what the model has."""

from __future__ import annotations

from regard import heads
from regard.models import Decoder, Encoder, ModelConfig


def lines_of(model: Encoder | Decoder) -> dict[str, str]:
    """The lines of name and value that `describe` begins with."""
    said = model.describe(7).split("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in said}


def decoder() -> Decoder:
    return Decoder(
        ModelConfig(
            kind="decoder",
            layers=5,
            embed_dim=30,
            head_dim=14,
            num_heads=6,
            num_kv_heads=3,
            vocabulary=17,
            inner=11,
            context=13,
            positions="rotary",
        )
    )


def test_heads_of_all_layers_and_their_cache():
    said = lines_of(decoder())
    assert said["layers"] == "5, each with 6 heads of width 14, 3 kv heads"
    assert said["cache"].startswith(f"{5 * 3 * 2 * 14 * 4:,} bytes per token")
    encoder = Encoder(ModelConfig(layers=3, embed_dim=21, num_heads=7, vocabulary=17, inner=11, context=13))
    assert lines_of(encoder)["layers"] == "3, each with 7 heads of width 3"


def test_a_pruned_model_tells_the_heads_that_it_has():
    model = heads.prune(decoder(), {1: [0, 2, 4], 2: [1, 3, 5], 4: [4, 5]})
    said = lines_of(model)
    assert said["layers"] == (
        "5, with heads of width 14: 6 (3 kv) in layer 0, 3 in layers 1-2, 6 (3 kv) in layer 3, 4 (2 kv) in layer 4"
    )
    assert said["cache"].startswith(f"{(4 * 3 + 2) * 2 * 14 * 4:,} bytes per token")
    assert "Layer 0 of 5, 7 tokens:" in model.describe(7)


def test_a_model_that_is_pruned_alike_in_all_layers():
    model = heads.prune(decoder(), {layer: [0, 1] for layer in range(5)})
    assert lines_of(model)["layers"] == "5, each with 4 heads of width 14, 2 kv heads"
    assert "One layer of 5, 7 tokens:" in model.describe(7)
    assert "(1, 4, 7, 14)" in model.describe(7)  # and so does the walk


def test_names_of_a_file_do_not_command_the_terminal():
    model = decoder()
    model.name, model.unused = "\x1b]0;owned\x07", ("pooler\x1b[2J.weight", "\u202edaeh.bias")
    said = model.describe(7)
    assert all(line.isprintable() for line in said.splitlines())
    assert "pooler\\u001b[2J, \\u202edaeh" in said
