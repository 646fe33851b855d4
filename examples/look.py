"""What every head of a real model attends to in a sentence.

    python examples/look.py
    python examples/look.py "time flies like an arrow and fruit flies like a banana" --html flies.html

The model is all-MiniLM-L6-v2, a trained BERT encoder of 6 layers with 12 heads each. The maps are drawn in the
terminal; `--html` also writes a page, a single file in which every head can be opened and compared.
"""

from __future__ import annotations

import argparse

import regard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentence", nargs="?", default="The cat that I saw yesterday ran away")
    parser.add_argument("--html", help="write the page to this file")
    options = parser.parse_args()

    model = regard.models.load("minilm")
    seen = regard.look(model, text=options.sentence, html=options.html)

    print("\nHeads that look at the token before in this sentence, and where they rest:")
    for role in seen.roles(tokens=seen.tokens, atlas=False).of("previous"):
        print(f"  {role.layer} head {role.head}: {role.describe()}")


if __name__ == "__main__":
    main()
