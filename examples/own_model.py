"""What the heads of your own model attend to: any model of transformers, unmodified, with its tokenizer.

    python examples/own_model.py                                       # MiniLM, from its package
    python examples/own_model.py path/to/your/model "Some text" --html heads.html

Nothing is downloaded: the model is a folder with `config.json`, weights and tokenizer, as `save_pretrained` writes it.
With `--generate` a decoder continues the text, and the new tokens are shown too.
"""

from __future__ import annotations

import argparse

import regard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a folder of a model of transformers (default: MiniLM)")
    parser.add_argument("text", nargs="?", default="The keys to the cabinet are on the table")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="tokens to generate with a decoder")
    parser.add_argument("--html", default="heads.html", help="the page to write (default: %(default)s)")
    options = parser.parse_args()

    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    folder = options.folder or str(regard.models.source("minilm").path)
    config = AutoConfig.from_pretrained(folder)
    if config.is_encoder_decoder:
        model_class = AutoModelForSeq2SeqLM
    else:
        model_class = AutoModelForCausalLM if options.generate else AutoModel
    model = model_class.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    seen = regard.look(model, tokenizer, options.text, generate=options.generate, html=options.html)

    sharpest = sorted(seen.table(), key=lambda row: row["entropy"])[:3]
    print("\nThe sharpest heads:", ", ".join(f"{row['layer']} head {row['head']}" for row in sharpest))
    print(f"The page: {options.html}")


if __name__ == "__main__":
    main()
