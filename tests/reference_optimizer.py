"""Muon and the Adam of tables, a second time: float64, one matrix and one row at a time, from the papers' formulas.

Each class holds the state of one parameter; `step` changes it in place. It shares no line with train.py, and a branch
that changes the optimizer is not asked to agree with it: delete test_reference_optimizer.py there.
"""

import math

import torch
from torch import Tensor

# Polar express (https://arxiv.org/abs/2505.16932): a s + b s^3 + c s^5, five times, takes singular values to about 1
QUINTICS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


class SparseAdam:
    """Adam without momentum and with one second moment per row; only rows that the step's batches look up move.

    The n-th update of a row has the rate lr / (1 + n / half_lr), n from 0.
    """

    def __init__(self, p: Tensor):
        self.p, self.v, self.updates = p, {}, {}

    def step(self, lookups: list[tuple[int, Tensor]], lr: float, beta2: float, half_lr: float) -> None:
        """lookups: row and gradient of each look-up; those of one row add up before they are squared."""
        grads: dict[int, Tensor] = {}
        for row, grad in lookups:
            grads[row] = grads.get(row, 0) + grad
        for row, grad in grads.items():
            square = grad.square().mean()
            self.v[row] = beta2 * self.v.get(row, square) + (1 - beta2) * square  # the first one counts in full
            n = self.updates.get(row, 0)
            self.p[row] -= lr / (1 + n / half_lr) * grad / (self.v[row].sqrt() + 1e-10)
            self.updates[row] = n + 1


class Muon:
    """Muon (https://kellerjordan.github.io/posts/muon) with cautious weight decay.

    p (R, C). Where one side is a multiple of the other, the squares along the longer side are orthogonalized each by
    itself, else the whole matrix; the norm of the update is lr sqrt(R) in all.
    """

    def __init__(self, p: Tensor):
        self.p, self.momentum = p, torch.zeros_like(p)

    def step(self, grad: Tensor, lr: float, decay: float, momentum: float) -> None:
        self.momentum += (1 - momentum) * (grad - self.momentum)
        nesterov = momentum * self.momentum + (1 - momentum) * grad
        wide = self.p.size(0) < self.p.size(1)
        p, nesterov = (self.p.T, nesterov.T) if wide else (self.p, nesterov)  # p is a view
        long, short = p.shape
        parts = long // short if long % short == 0 else 1
        rate = lr * math.sqrt(self.p.size(0) / (parts * short))  # an orthogonalized part has the norm sqrt(short)
        for rows in torch.arange(long).chunk(parts):
            update = orthogonalized(nesterov[rows])
            cautious = p[rows] * (update * p[rows] >= 0)  # decay only what the update shrinks anyway
            p[rows] -= rate * update + lr * decay * cautious


def orthogonalized(x: Tensor) -> Tensor:
    """U f(S) V^T of x = U S V^T, scaled down beforehand by 1.02 of its norm."""
    left, singular, right = torch.linalg.svd(x / (1.02 * x.norm() + 1e-7), full_matrices=False)
    for a, b, c in QUINTICS:
        singular = a * singular + b * singular**3 + c * singular**5
    return left * singular @ right
