"""Look at your own model: any of transformers, unmodified, with its tokenizer.

    python examples/own_model.py                                       # MiniLM, from the package that holds it
    python examples/own_model.py path/to/your/model "Some text" --html heads.html

Nothing is fetched: the model is a folder with `config.json`, weights and a tokenizer, as `save_pretrained` writes it.
A model with a decoder goes on with the text for `--generate` tokens, and what it writes is looked at too.
"""

from __future__ import annotations

import argparse

import regard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a folder of transformers; MiniLM's by default")
    parser.add_argument("text", nargs="?", default="The keys to the cabinet are on the table")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="tokens that a decoder goes on for")
    parser.add_argument("--html", default="heads.html", help="the page to write (default: %(default)s)")
    asked = parser.parse_args()

    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    folder = asked.folder or str(regard.models.source("minilm").path)
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM if asked.generate else AutoModel
    model = kind.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    seen = regard.look(model, tokenizer, asked.text, generate=asked.generate, html=asked.html)

    sharpest = sorted(seen.table(), key=lambda row: row["entropy"])[:3]
    print("\nThe sharpest heads:", ", ".join(f"{row['layer']} head {row['head']}" for row in sharpest))
    print(f"The page: {asked.html}")


if __name__ == "__main__":
    main()
