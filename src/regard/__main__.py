"""`python -m regard` and the `regard` command; without typer and rich, what to install."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from regard.cli import main as run
    except ImportError as error:
        sys.exit(f"error: {error}")
    run()


if __name__ == "__main__":
    main()
