"""Heads in a terminal: maps, a sentence with links, tables."""

from regard.draw.terminal.views import terminal, terminal_text

__all__ = ["terminal", "terminal_text"]
