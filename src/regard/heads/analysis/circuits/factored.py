"""Matrices of low rank, kept as two factors: the W x W product is not built.

Letters: W model width, D head width (rank).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import shape_of

__all__ = ["FactoredMatrix", "eigenvalue_score"]


class FactoredMatrix(NamedTuple):
    """The matrix `left @ right`, (..., W, W), of rank D at most: `left` (..., W, D), `right` (..., D, W).

    >>> matrix = FactoredMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> matrix.dense().tolist(), matrix.eigenvalues().real.tolist(), matrix.norm().square().item()
    ([[3.0, 4.0], [6.0, 8.0]], [11.0], 125.0)
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """The product, (..., W, W)."""
        return self.left @ self.right

    def eigenvalues(self, gram: Tensor | None = None) -> Tensor:
        """The D eigenvalues (..., D) that may differ from 0, complex. With `gram` = V^T U (W, W): those of
        U left right V^T, for U and V of any number of rows, such as an embedding and an unembedding."""
        left = self.left if gram is None else gram @ self.left
        return torch.linalg.eigvals(self.right @ left)  # cyclic: A B and B A have the same ones but for zeros

    def norm(self) -> Tensor:
        """The Frobenius norm (...)."""
        return torch.linalg.matrix_norm(triangle(self.left) @ self.right)

    def __repr__(self) -> str:
        return f"FactoredMatrix({shape_of(self.left)} @ {shape_of(self.right)})"


def triangle(x: Tensor) -> Tensor:
    """R (..., D, D) with |x y| = |R y| for every y: the triangular factor of x (..., W, D)."""
    return torch.linalg.qr(x, mode="r").R


def eigenvalue_score(eigenvalues: Tensor) -> Tensor:
    """The sum of eigenvalues over the sum of their moduli, from -1 to 1, of (..., D); 0 if all of them are 0.

    >>> eigenvalue_score(torch.tensor([3 + 4j, 3 - 4j])).item()
    0.6000000238418579
    """
    size = eigenvalues.abs().sum(-1)
    return torch.where(size > 0, eigenvalues.sum(-1).real / size, 0.0)
