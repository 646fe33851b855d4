"""Analysing what heads do: roles, probes with known answers, the syntax of a treebank, the loss without a head."""
