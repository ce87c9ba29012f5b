"""What each kind of module costs in one call: attention, feed-forward, norms, products.

    matrix product   [n, i] x [i, o]        2 n i o   forward,  twice that backward
    attention        q k^T and pattern v    4 b h t s d         (t queries, s keys, heads of d)

FLOPs are those of matrix products, a multiplication and an addition counting as two; norms,
softmax and activations are left out, and masked scores are counted like the others (half of a
causal t x t is never used). PyTorch's `FlopCounterMode` counts the same.

What is kept for the backward pass follows from what each formula needs again: a product keeps its
input, a norm its input and statistics, the fused kernel q, k, v, its output and one number a row,
and the unfused one the pattern too. Korthikanti et al. 2022, section 4.1, for mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from clearhead.attention.additive import AdditiveAttention
from clearhead.attention.attention import Attention
from clearhead.attention.relative import Shaw, TransformerXL
from clearhead.attention.softmax import Softmax
from clearhead.layers.ffn import ACTIVATIONS, FFN, GatedFFN

Component = Literal[
    "embedding",
    "attention projections",
    "attention scores",
    "cross-attention",
    "ffn",
    "recurrence",
    "norms",
    "positions",
    "head",
    "other",
]

# How many tensors of its input's size an activation keeps, the result not counted (whoever takes
# the result keeps it).
KEPT = {
    ACTIVATIONS[name]: count
    for name, count in {
        "relu": 0,
        "gelu": 1,
        "gelu_tanh": 1,
        "silu": 1,
        "quick_gelu": 2,
        "relu_squared": 1,
    }.items()
}


# How many vectors a step of a recurrent cell keeps, its input not counted; an LSTM's, which oneDNN
# computes on a CPU, were measured.
CARRIED = {nn.RNN: 1, nn.GRU: 7, nn.LSTM: 16}


@dataclass(frozen=True)
class Part:
    """What one module costs."""

    path: str
    """The module's name in the network."""
    component: Component
    """What it belongs to."""
    layer: str = ""
    """The name of its block; empty outside the blocks."""
    parameters: int = 0
    """Its own parameters; one that is tied counts at its first place."""
    forward: int = 0
    """FLOPs of a forward pass."""
    backward: int = 0
    """FLOPs of a backward pass, what a fused kernel computes again not counted."""
    kept: int = 0
    """Numbers kept for the backward pass where the attention kernel is fused."""
    written: int = 0
    """The same where it is not, and the pattern is written down."""
    pattern: int = 0
    """Numbers in its attention matrices, b h t s, whether they are written down or not."""


@dataclass(frozen=True)
class Call:
    """The size of one call, as one tower of the network sees it."""

    batch: int
    """Rows."""
    length: int
    """Tokens a row."""
    source: int = 0
    """Tokens a row of the source that cross-attention looks at."""

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return self.batch * self.length


@dataclass(frozen=True)
class Place:
    """Where the walk stands."""

    path: str
    """The module's name in the network."""
    component: Component
    """What it belongs to."""
    layer: str = ""
    """The name of its block."""

    def at(self, name: str, component: Component | None = None) -> Place:
        """A module inside this one."""
        path = f"{self.path}.{name}" if self.path and name else self.path or name
        return Place(path, component or self.component, self.layer)

    def part(self, forward: int = 0, kept: int = 0) -> Part:
        """What stands here, with twice the products in the backward pass."""
        return Part(
            self.path,
            self.component,
            self.layer,
            forward=forward,
            backward=2 * forward,
            kept=kept,
            written=kept,
        )


def count_plain(module: nn.Module, place: Place, tokens: int) -> Iterator[Part]:
    """Any module made of linear maps, tables, norms and dropout, all of it on every token."""
    for name, leaf in module.named_modules():
        here = place.at(name)
        if isinstance(leaf, nn.Linear):
            yield _linear(leaf, here, tokens)
        elif isinstance(leaf, nn.LayerNorm | nn.RMSNorm):
            yield here.part(kept=_norm(leaf, tokens))
        elif isinstance(leaf, nn.Embedding):
            yield here.part()
        elif isinstance(leaf, nn.Dropout) and leaf.p:
            # What was dropped, as numbers: so on a CPU; a GPU keeps a byte each.
            yield here.part(kept=tokens * width_of(module))


def width_of(module: nn.Module) -> int:
    """The width of the stream at a module's dropout: that of its norm, table or linear map."""
    for leaf in module.modules():
        if isinstance(leaf, nn.LayerNorm | nn.RMSNorm):
            return leaf.normalized_shape[0]
        if isinstance(leaf, nn.Embedding):
            return leaf.embedding_dim
        if isinstance(leaf, nn.Linear):
            return leaf.in_features
    return 0


def _linear(linear: nn.Linear, place: Place, tokens: int, keeps: bool = True) -> Part:
    """`keeps`: False where another part keeps the same input."""
    forward = 2 * tokens * linear.in_features * linear.out_features
    return place.part(forward, tokens * linear.in_features if keeps else 0)


def _norm(norm: nn.Module, tokens: int) -> int:
    width = width_of(norm)
    # LayerNorm: input, mean, deviation; RMSNorm: input, root mean square.
    return tokens * (width + 2 if isinstance(norm, nn.LayerNorm) else width + 1)


def count_attention(
    attn: Attention, place: Place, call: Call, keys: int, learned_bias: bool
) -> Iterator[Part]:
    """Projections, scores and weighted sum; in cross-attention `keys` is the source's length."""
    b, t, h, g, d = call.batch, call.length, attn.n_heads, attn.n_kv_heads, attn.head_dim
    cross = place.component == "cross-attention"
    yield _linear(attn.q_proj, place.at("q_proj"), b * t)
    yield _linear(attn.k_proj, place.at("k_proj"), b * keys, keeps=False)
    yield _linear(attn.v_proj, place.at("v_proj"), b * keys, keeps=False)
    for name, norm, rows in (("q_norm", attn.q_norm, t * h), ("k_norm", attn.k_norm, keys * g)):
        if norm is not None:
            yield place.at(name, "norms").part(kept=_norm(norm, b * rows))
    if attn.relative is not None:
        yield _relative(attn.relative, place.at("relative", "positions"), call, h, d)
    patterns = b * h * t * keys
    # The dropout of weights keeps what was dropped, and what was left of the pattern.
    copies = 3 if getattr(attn.kernel, "dropout", 0.0) else 1
    written = b * d * h * 2 * (t + keys) + copies * patterns
    fused = b * d * 2 * (t * h + keys * g) + b * h * t
    never = learned_bias or attn.relative is not None or not isinstance(attn.kernel, Softmax)
    kernel = place.at("kernel", place.component if cross else "attention scores")
    part = kernel.part(forward=4 * patterns * d, kept=written if never else fused)
    yield replace(part, written=written, pattern=patterns)
    yield _linear(attn.out_proj, place.at("out_proj"), b * t, keeps=False)


def count_additive(attn: AdditiveAttention, place: Place, call: Call) -> Iterator[Part]:
    """Additive attention to the source: a hidden vector for each pair of a query and a key."""
    b, t, s = call.batch, call.length, call.source
    pairs = b * t * s
    yield _linear(attn.q_proj, place.at("q_proj"), b * t)
    yield _linear(attn.k_proj, place.at("k_proj"), b * s)
    yield _linear(attn.score, place.at("score"), pairs)  # what tanh keeps is this one's input
    part = place.part(forward=2 * pairs * attn.k_proj.in_features, kept=pairs)
    yield replace(part, pattern=pairs)


def count_cell(cell: nn.RNNBase, place: Place, call: Call, from_zero: bool) -> Part:
    """A recurrent cell, step by step; a start from zeros needs no gradient."""
    weights = [p for name, p in cell.named_parameters() if name.startswith("weight")]
    onto_state = sum(p.numel() for p in weights[1::2])
    both = 2 if cell.bidirectional else 1
    kept = call.tokens * (CARRIED[type(cell)] * cell.hidden_size * both + both * cell.input_size)
    part = place.part(2 * call.tokens * sum(p.numel() for p in weights), kept)
    return replace(part, backward=part.backward - from_zero * 2 * call.batch * onto_state)


def _relative(relative: nn.Module, place: Place, call: Call, h: int, d: int) -> Part:
    """The positions that a layer owns and multiplies with its queries."""
    b, t = call.batch, call.length
    if isinstance(relative, Shaw):
        distances = relative.table.num_embeddings
        return place.part(2 * b * h * t * d * distances, kept=b * h * t * distances)
    if isinstance(relative, TransformerXL):
        distances = 2 * t - 1
        projected = 2 * distances * relative.d_model * h * d
        pairs = 2 * b * h * d * (t * distances + t)  # with each distance, and u with each key
        kept = b * h * t * (distances + d) + distances * (relative.d_model + h * d)
        # The sinusoids need no gradient, so the projection has one product backward, not two.
        return replace(place.part(projected + pairs, kept), backward=projected + 2 * pairs)
    return place.part()


def count_ffn(ffn: nn.Module, place: Place, tokens: int) -> Iterator[Part]:
    """Widen, bend, narrow."""
    if not isinstance(ffn, FFN | GatedFFN):
        yield from count_plain(ffn, place, tokens)
        return
    between = KEPT.get(ffn.activation, 1)
    if isinstance(ffn, GatedFFN):
        between += 2  # the product of gate and value keeps both
        yield _linear(ffn.gate_proj, place.at("gate_proj"), tokens, keeps=False)
    yield _linear(ffn.in_proj, place.at("in_proj"), tokens)
    yield place.part(kept=between * tokens * ffn.in_proj.out_features)
    yield _linear(ffn.out_proj, place.at("out_proj"), tokens)


def count_convolution(conv: nn.Conv1d | nn.Conv2d, place: Place, outputs: int, data: bool) -> Part:
    """A product with all numbers under the kernel for each output; `data` need no gradient."""
    forward = 2 * outputs * conv.weight.numel()
    inputs = outputs * math.prod(conv.stride) * conv.in_channels
    return replace(place.part(forward, inputs), backward=forward if data else 2 * forward)
