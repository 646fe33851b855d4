"""Heads: look at them while any model runs (`watch`), and act on them."""

from regard.heads.record import Layer, Record
from regard.heads.watch import watch

__all__ = ["Layer", "Record", "watch"]
