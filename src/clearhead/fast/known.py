"""Which stacks can be written down as a list of calls, and whether somebody looks into them now."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

from clearhead.attention.attention import Attention
from clearhead.attention.mask import Mask
from clearhead.attention.rotary import Rotary
from clearhead.fast.between import LANES, FastSoftmax, Joint, name_of
from clearhead.fast.linear import FastLinear
from clearhead.layers.block import Block, ParallelBlock, PostNorm, PreNorm, SandwichNorm
from clearhead.layers.ffn import FFN, GatedFFN
from clearhead.layers.stack import Kind, Stack
from clearhead.tap import Tap, taps

LISTENERS = attrgetter("listeners")


class Watch:
    """What of a stack is looked at before each call; its modules as they are now."""

    def __init__(self, stack: Stack) -> None:
        modules = list(stack.modules())
        self._taps = list(taps(stack).values())
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        norms = [m for m in modules if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]
        self._norms = [norm._parameters for norm in norms]
        self._linears = [m for m in modules if isinstance(m, FastLinear)]
        self._quiet: tuple[int, int] | None = None  # when nobody looked, as changes are counted

    def heard(self) -> bool:
        """Whether somebody looks into the blocks. Some hundred taps and tables of hooks are gone
        through only where somebody came to any, anywhere.
        """
        hooks = getattr(RemovableHandle, "next_id", None)  # torch's own count of them
        now = None if hooks is None else (Tap.changes, hooks)
        if now is None or self._quiet != now:
            if any(map(LISTENERS, self._taps)) or any(self._hooks):
                return True
            self._quiet = now
        return bool(module._global_forward_hooks or module._global_forward_pre_hooks)

    def writable(self) -> bool:
        """Whether all weights are as compiled code takes them for, now."""
        return all(linear.here for linear in self._linears) and all(
            _here(weight) for weight in self.norm_weights()
        )

    def norm_weights(self) -> list[Tensor]:
        """Those of all norms."""
        return [p for own in self._norms for p in own.values() if p is not None]


def _here(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()


def known_stack(stack: Stack, masks: tuple[type[Mask], ...]) -> bool:
    """Whether the blocks of a stack that sees by such masks can be written down."""
    return (
        all(_known_kind(kind, masks) for kind in stack.kinds)
        and all(_known_block(block) for block in stack.blocks)
        and len({block.cross_attn is None for block in stack.blocks}) == 1
        and (stack.norm is None or _known_norm(stack.norm))
    )


def _known_kind(kind: Kind, masks: tuple[type[Mask], ...]) -> bool:
    """One that knows no positions but rotary ones."""
    turned = type(kind.rotary) in (Rotary, type(None))
    return type(kind.mask) in masks and turned and kind.bias is None and not kind.distances


def _known_block(block: Any) -> bool:
    if type(block) not in (Block, ParallelBlock):
        return False
    cross, residuals = block.cross_attn, [block.self_residual, block.ffn_residual]
    if cross is not None:
        residuals.append(block.cross_residual)
    parallel = type(block) is ParallelBlock
    placements = (PreNorm,) if parallel else (PreNorm, PostNorm, SandwichNorm)
    return (
        not (parallel and cross is not None)
        and all(type(residual) in placements for residual in residuals)
        and all(_known_norm(norm) for residual in residuals for norm in _norms(residual))
        and _known_attention(block.self_attn)
        and isinstance(getattr(block.self_attn, "joint", None), Joint)
        and (cross is None or (_known_attention(cross) and _packed(cross.q_proj)))
        and _known_ffn(block.ffn)
    )


def _known_attention(attn: Attention) -> bool:
    return (
        type(attn) is Attention
        and type(attn.kernel) is FastSoftmax
        and attn.relative is None
        and attn.head_dim % LANES == 0
        and _packed(attn.out_proj)
        and all(norm is None or _known_norm(norm) for norm in (attn.q_norm, attn.k_norm))
    )


def _known_ffn(ffn: Any) -> bool:
    if type(ffn) is GatedFFN:
        inside = isinstance(ffn.joint, Joint)
    else:
        inside = type(ffn) is FFN and _packed(ffn.in_proj)
    return inside and _packed(ffn.out_proj) and name_of(ffn.activation) is not None


def _known_norm(norm: Any) -> bool:
    whole = isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and norm.weight is not None
    return whole and norm.weight.numel() % LANES == 0 and norm.eps is not None


def _norms(residual: Any) -> list[Any]:
    return [residual.norm, *([residual.norm_out] if type(residual) is SandwichNorm else [])]


def _packed(linear: Any) -> bool:
    return isinstance(linear, FastLinear) and linear.compilable
