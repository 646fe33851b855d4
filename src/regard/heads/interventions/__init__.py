"""Intervening: change or remove heads. Ablation, importance, attribution, pruning."""
