"""Muon: momentum whose matrix is made orthogonal before it is applied (Jordan et al. 2024).

    M <- mu M + G;   U = G + mu M (Nesterov);   W <- W - lr sqrt(max(1, rows / cols)) orth(U)

orth(U) has the singular vectors of U and singular values near 1. Five Newton-Schulz steps of a
quintic that is steep at 0 bring them there without a decomposition:

    X <- a X + (b A + c A^2) X,  A = X X^T

Differs from torch.optim.Muon: it works in the parameters' own type (bfloat16 crawls on most CPUs),
and matrices of one shape go through the products together, which is several times faster for small
models, or one by one in compiled code where that is quicker. Only for matrices inside the network;
embeddings, heads, norms and biases take Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from clearhead.fast.products import fit_lines, lines, product
from clearhead.training.sharded import shared_like, whole

LEAST = 2**15  # numbers of a matrix; smaller ones go through the products together
A, B, C = 3.4445, -4.7750, 2.0315  # chosen for slope at 0; singular values end in about 0.7 to 1.2


def orthogonal(
    x: Float[Tensor, "n r c"], steps: int = 5, compiled: bool = False
) -> Float[Tensor, "n r c"]:
    """A batch of matrices with all singular values near 1; their own singular vectors stay."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # the largest is now below 1
    tall = x.shape[1] > x.shape[2]
    if tall:  # the product X X^T is cheaper from the short side
        x = x.mT
    if compiled and fit_lines(x[0]) and x[0].numel() >= LEAST:
        x = torch.stack([_orthogonal_one(matrix, steps) for matrix in x.contiguous()])
    else:
        for _ in range(steps):
            a = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def _orthogonal_one(x: Float[Tensor, "r c"], steps: int) -> Float[Tensor, "r c"]:
    """The same iteration for one matrix, in compiled code."""
    for _ in range(steps):
        a = product(x, x)
        inner = torch.add(B * a, product(a, a), alpha=C)  # a is symmetric
        x = torch.add(lines(inner, x), x, alpha=A)
    return x


class Muon(Optimizer):
    """Muon for the matrices it is given."""

    compiled = False  # also of a copy, which has nothing but what torch knows of optimisers

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        compiled: bool = False,
    ) -> None:
        self.compiled = compiled
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                self._update(group, parameters, max(1.0, shape[0] / shape[1]) ** 0.5)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], stretch: float) -> None:
        """Step all matrices of one shape together."""
        mu, lr = group["momentum"], group["lr"]
        momenta = [self._momentum(parameter) for parameter in parameters]
        grads: Any = [parameter.grad for parameter in parameters]
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, grads)
        ahead = torch._foreach_add(grads, momenta, alpha=mu)  # Nesterov: where it is going
        # A matrix that is shared out among processes is turned as a whole, in each of them.
        stacked = torch.stack([whole(matrix) for matrix in ahead])
        whole_ones = orthogonal(stacked, compiled=self.compiled).unbind(0)
        turned = [shared_like(t, p) for t, p in zip(whole_ones, parameters, strict=True)]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, turned, alpha=-lr * stretch)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]
