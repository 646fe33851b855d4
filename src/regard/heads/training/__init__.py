"""Heads while a model is trained: `monitor.py` samples them, `health.py` says what looks wrong, `qk_clip.py` keeps
scores small."""
