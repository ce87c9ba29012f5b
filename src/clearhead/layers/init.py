"""Initialisation, all of it: how a new network's weights are drawn.

xavier  W ~ U(-a, a), a = sqrt(6 / (in + out))       Glorot and Bengio 2010
he      W ~ N(0, 2 / in)                             He et al. 2015
gpt2    W ~ N(0, 0.02^2), those that write into the stream divided by sqrt(number of writers)
t5      W ~ N(0, 1 / in), queries also divided by sqrt(head_dim); embeddings N(0, 1)

Recurrent cells, whatever the style: each gate's matrix on the state is orthogonal (Saxe et al.
2014), each on the input as xavier, and an LSTM's forget gate begins open, with a bias of 1
(Jozefowicz et al. 2015).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from clearhead.attention.attention import Attention
from clearhead.attention.relative import TransformerXL
from clearhead.layers.block import Block
from clearhead.layers.stack import Stack

Init = Literal["xavier", "he", "gpt2", "t5"]


@torch.no_grad()
def initialise(net: nn.Module, style: Init, generator: torch.Generator | None = None) -> None:
    """Draw all weights anew, in the order of the modules; norms are 1, biases 0."""
    writers = _writers(net)
    # Embeddings last: the matrix of a tied head is an embedding, and is not drawn as a projection.
    for module in sorted(net.modules(), key=lambda module: isinstance(module, nn.Embedding)):
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            _linear(module, style, writers.get(module, 1), generator)
        elif isinstance(module, nn.RNNBase):
            _recurrent(module, generator)
        elif isinstance(module, nn.Embedding):
            std = {"xavier": module.embedding_dim**-0.5, "he": module.embedding_dim**-0.5}.get(
                style, 0.02
            )
            module.weight.normal_(0.0, 1.0 if style == "t5" else std, generator=generator)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.reset_parameters()
        elif isinstance(module, TransformerXL):
            module.u.zero_()
            module.v.zero_()
    if style == "t5":
        _shrink_t5(net)


def _shrink_t5(net: nn.Module) -> None:
    """Queries take over the scale that T5's scores lack; biases on the scores start small."""
    for module in net.modules():
        if isinstance(module, Attention):
            module.q_proj.weight.mul_(module.head_dim**-0.5)
        elif isinstance(module, Stack):
            width = module.blocks[0].self_attn.q_proj.in_features
            for kind in module.kinds:
                for table in kind.bias.parameters() if kind.bias is not None else ():
                    table.mul_(width**-0.5)


def _linear(
    linear: nn.Linear | nn.Conv1d | nn.Conv2d,
    style: Init,
    writers: int,
    generator: torch.Generator | None,
) -> None:
    # How many numbers each output is made of, and each input goes into.
    fan_in = linear.weight[0].numel()
    fan_out = linear.weight[:, 0].numel()
    if style == "xavier":
        bound = math.sqrt(6 / (fan_in + fan_out))
        linear.weight.uniform_(-bound, bound, generator=generator)
    else:
        std = {"he": math.sqrt(2 / fan_in), "gpt2": 0.02 / math.sqrt(writers), "t5": fan_in**-0.5}[
            style
        ]
        linear.weight.normal_(0.0, std, generator=generator)
    if linear.bias is not None:
        linear.bias.zero_()


def _recurrent(cell: nn.RNNBase, generator: torch.Generator | None) -> None:
    for name, weight in cell.named_parameters():
        gates = weight.split(cell.hidden_size)
        for gate in gates:
            if name.startswith("weight_ih"):
                nn.init.xavier_uniform_(gate, generator=generator)
            elif name.startswith("weight_hh"):
                nn.init.orthogonal_(gate, generator=generator)
            else:
                gate.zero_()
        if isinstance(cell, nn.LSTM) and name.startswith("bias_ih"):
            gates[1].fill_(1.0)  # input, forget, cell, output


def _writers(net: nn.Module) -> dict[nn.Module, int]:
    """The projections that write into a residual stream.

    Each with how many of them write into the same.
    """
    found: dict[nn.Module, int] = {}
    for stack in net.modules():
        if isinstance(stack, Stack):
            outs: list[Any] = [
                part.out_proj
                for block in stack.blocks
                if isinstance(block, Block)
                for part in (block.self_attn, block.cross_attn, block.ffn)
                if part is not None
            ]
            found |= dict.fromkeys(outs, len(outs))
    return found
