"""Linear layers and token tables whose weights are packed, for running and not for training.

Few rows (a step of decoding: one a sequence or beam) are bound by memory, many (a prompt, a batch
of texts) by arithmetic; the compiled product has a form for each. Other types and devices go
through torch's, on weights that are unpacked a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.errors import ClearheadError, require
from clearhead.fast import compile as compiled
from clearhead.fast.formats import (
    BESIDE,
    GROUP,
    STRIP,
    WHOLE,
    Form,
    as_read,
    look_up_rows,
    plain_product,
    scratch_bytes,
    stored_as,
    unpack,
)

BLOCK = 2**23  # weights that are unpacked at a time for many rows
SMALL = 2**16  # multiplications that one thread does sooner than two agree about them
NO_GRADIENTS = (
    "The fast form of a model runs and does not learn: train the model that it was made from."
)


class FastLinear(nn.Module):
    """x W^T + b with packed weights."""

    moves = 0  # how often any of them looked again: who remembers addresses asks for it
    tensors: tuple[Tensor, Tensor, Tensor]
    addresses: tuple[int, ...]
    here: bool
    scales: Tensor | None

    def __init__(
        self, form: Form, in_features: int, weight: Tensor, scales: Tensor, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.form, self.in_features, self.out_features = form, in_features, scales.shape[0]
        if isinstance(weight, nn.Parameter):  # fp32, shared with the model it comes from
            self.weight = weight
        else:
            self.register_buffer("weight", weight)
        self.register_buffer("scales", scales if scales.shape[1] else None)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.bias = bias
        self.compilable = compiled.available() and in_features % GROUP == 0 and scales.shape[0] >= 4
        self.train(False)
        self.refresh()

    def refresh(self) -> None:
        """Look again where the tensors are: needed after they were exchanged or moved."""
        FastLinear.moves += 1
        weight = self.weight.detach()
        kind, device, n = torch.float32, weight.device, self.out_features
        scales = (
            torch.empty(n, 0, dtype=kind, device=device) if self.scales is None else self.scales
        )
        bias = (
            torch.zeros(n, dtype=kind, device=device) if self.bias is None else self.bias.detach()
        )
        # Beside the module's own tables, in which every look-up costs as much as a call.
        self.__dict__["tensors"] = (weight, scales, bias)
        self.__dict__["addresses"] = tuple(tensor.data_ptr() for tensor in self.tensors)
        # The product is given addresses alone: what stands there must be what it takes it for.
        wanted = stored_as(self.form, self.out_features, self.in_features)
        found = {"weight": weight, "scales": scales}
        self.__dict__["here"] = (
            self.compilable
            and bias.dtype == torch.float32
            and bias.shape == (self.out_features,)
            and all((found[n].dtype, tuple(found[n].shape)) == how for n, how in wanted.items())
            and all(t.device.type == "cpu" and t.is_contiguous() for t in self.tensors)
        )

    def forward(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:
        k, n = self.in_features, self.out_features
        rows = x.numel() // k
        if (
            not self.here
            or rows == 0
            or x.dtype != torch.float32
            or x.shape[-1] != k
            or not x.is_cpu
        ):
            return self.many(x)
        if x.requires_grad and torch.is_grad_enabled():
            raise ClearheadError(NO_GRADIENTS)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], n))
        ends = out.data_ptr(), rows, n, k
        threads = 1 if rows * n * k < SMALL else compiled.threads()
        run = compiled.product(self.form).run
        if self.form in WHOLE:
            scratch = x.new_empty(scratch_bytes(rows, k), dtype=torch.uint8)
            run(x.data_ptr(), *self.addresses, *ends, threads, scratch.data_ptr())
        else:
            run(x.data_ptr(), *self.addresses, *ends, threads, 0)
        return out

    def some(self, x: Float[Tensor, "m k"], which: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Some outputs, just as the whole product has them; for who knows that it can be `here`,
        and of fp32 or bf16.
        """
        index = which if len(which) >= STRIP else which.repeat(STRIP)  # a strip at least
        weight, scales, bias = self.tensors
        weight, bias = weight.index_select(0, index), bias.index_select(0, index)
        out = x.new_empty(len(x), len(index))
        given = x.data_ptr(), weight.data_ptr(), scales.data_ptr(), bias.data_ptr(), out.data_ptr()
        threads = 1 if out.numel() * self.in_features < SMALL else compiled.threads()
        compiled.product(self.form).run(*given, len(x), len(index), self.in_features, threads, 0)
        return out[:, : len(which)]

    def many(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:
        """The same through torch's product: for other devices and other types."""
        require(not (x.requires_grad and torch.is_grad_enabled()), NO_GRADIENTS)
        if self.form == "fp32":
            return F.linear(x, self.weight, self.bias)
        x = as_read(x, self.form)
        out = x.new_empty((*x.shape[:-1], self.out_features))
        height = max(BLOCK // self.in_features // BESIDE, 1) * BESIDE
        for first in range(0, self.out_features, height):
            rows = slice(first, first + height)
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            out[..., rows] = F.linear(x, self._unpacked(rows).to(x.dtype), bias)
        return out

    def _unpacked(self, rows: slice) -> Float[Tensor, "n k"]:
        """Some rows of the weights in fp32."""
        weight, scales, _ = self.tensors
        lie = slice(rows.start // BESIDE, rows.stop // BESIDE) if self.form in WHOLE else rows
        return unpack(weight[lie], scales[rows], self.form, self.in_features)

    def plain(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:
        """The slow twin."""
        weight, scales, _ = self.tensors
        return plain_product(x, weight, scales, self.form, self.bias)

    def train(self, mode: bool = True) -> Any:
        require(not mode, NO_GRADIENTS)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self.form != "fp32":  # .to(dtype) is about numbers, and these are codes of numbers
            fn = _keeping_types(fn)
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def __getstate__(self) -> dict[str, Any]:
        own = ("tensors", "addresses")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh()  # a copy has tensors of its own

    def extra_repr(self) -> str:
        """What print(net) says about it."""
        return f"{self.in_features}, {self.out_features}, {self.form}, bias={self.bias is not None}"


class FastEmbedding(nn.Embedding):
    """Vectors of ids, looked up in the packed weights of the head that the table is tied to."""

    head: FastLinear

    def __init__(self, head: FastLinear) -> None:
        nn.Module.__init__(self)  # without a table of its own
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        # The head owns the tensors: kept out of this module's own children.
        self.__dict__["head"] = head

    def forward(self, ids: Int[Tensor, "*b"]) -> Float[Tensor, "*b m"]:
        head = self.head
        weight, scales, _ = head.tensors
        return look_up_rows(weight, scales, head.form, head.in_features, ids)

    def extra_repr(self) -> str:
        """What print(net) says about it."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.head.form}, from the head"


def _keeping_types(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A move to another device without the change of type that may come along."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(fn(tensor.new_empty(0)).device)

    return moved
