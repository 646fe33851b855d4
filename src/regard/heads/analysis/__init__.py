"""Analysing: what heads do. Roles, probes with known answers, syntax of a treebank, the loss without a head."""
