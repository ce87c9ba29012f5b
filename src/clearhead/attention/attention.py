"""Multi-head attention: project, split into heads, attend, join, project.

    head_i = kernel(x W_Q^i, s W_K^i, s W_V^i),  out = concat(head_1 ... head_h) W_O

Vaswani et al. 2017, section 3.2.2; grouped and multi-query heads: Ainslie et al. 2023.
Self-attention has s = x; in cross-attention s is the source. Positions enter here by rotation (the
view has the angles) or by a relative bias (the layer has the vectors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.cache import KV, CrossKV, State
from clearhead.attention.positions import Positions
from clearhead.attention.rotary import Rotary, Rotary2D
from clearhead.attention.softmax import Kernel, Softmax
from clearhead.attention.view import View
from clearhead.errors import require
from clearhead.tap import Tap


class Attention(nn.Module):
    """One attention sublayer, for self- and cross-attention."""

    kernel: Kernel
    rotary: Rotary | Rotary2D | None
    joint: Callable[[Tensor], Sequence[Tensor]] | None = None
    """x -> its queries, keys and values in one product, in the run-time form."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_source: int | None = None,
        biases: tuple[bool, bool, bool, bool] = (True, True, True, True),
        kernel: Kernel | None = None,
        norms: tuple[nn.Module, nn.Module] | None = None,
        rotary: Rotary | Rotary2D | None = None,
        relative: nn.Module | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        require(
            head_dim is not None or d_model % n_heads == 0,
            f"d_model = {d_model} does not divide by n_heads = {n_heads}: change one, or give "
            "head_dim.",
        )
        require(
            n_kv_heads >= 1 and n_heads % n_kv_heads == 0,
            f"n_heads = {n_heads} does not divide by n_kv_heads = {n_kv_heads}: each key/value "
            "head serves the same number of query heads.",
        )
        head_dim = head_dim or d_model // n_heads
        d_source = d_model if d_source is None else d_source
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=biases[0])
        self.k_proj = nn.Linear(d_source, n_kv_heads * head_dim, bias=biases[1])
        self.v_proj = nn.Linear(d_source, n_kv_heads * head_dim, bias=biases[2])
        self.out_proj = nn.Linear(n_heads * head_dim, d_model, bias=biases[3])
        self.kernel = Softmax(head_dim**-0.5) if kernel is None else kernel
        self.q_norm: nn.Module | None = norms[0] if norms else None
        self.k_norm: nn.Module | None = norms[1] if norms else None
        # The stack owns the rotary tables of all its layers: kept out of this module's own
        # children.
        self.__dict__["rotary"] = rotary
        self.relative = relative
        self.q, self.k, self.v, self.pattern, self.z = Tap(), Tap(), Tap(), Tap(), Tap()

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        view: View | None = None,
        state: State | None = None,
        source: Float[Tensor, "s k ms"] | None = None,
    ) -> Float[Tensor, "b t m"]:
        """Without a view everybody sees everybody; `state` remembers keys and values."""
        if view is None:
            view = self._open_view(x, source)
        k = v = None
        if self.joint is not None and source is None:
            q, k, v = self.joint(x)
        else:
            q = self.q_proj(x)
        q = self._heads(q, self.n_heads)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.rotary is not None and view.rotary is not None:
            q = self.rotary.rotate(q, view.rotary)
        q = self.q(q)
        k, v = self.keys_values(x if source is None else source, view, state, k, v)
        return self.out_proj(self._attend(q, k, v, view))

    def keys_values(
        self,
        source: Tensor,
        view: View,
        state: State | None,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of this call, or all that the state has with them; `k` and `v` are
        the source's projections where they are known.
        """
        if isinstance(state, CrossKV) and state.k is not None:
            return state.k, state.v  # type: ignore[return-value]
        k = self._heads(self.k_proj(source) if k is None else k, self.n_kv_heads)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotary is not None and view.rotary is not None:
            k = self.rotary.rotate(k, view.rotary)
        k = self.k(k)
        v = self.v(self._heads(self.v_proj(source) if v is None else v, self.n_kv_heads))
        if isinstance(state, KV):
            return state.update(k, v)
        if isinstance(state, CrossKV):
            state.k, state.v = k, v
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Float[Tensor, "b t hd"]:
        """The kernel between the heads, with the beams of one source folded into its query axis."""
        rows, _, t, _ = q.shape
        beams = rows // k.shape[0]
        if beams > 1:
            q = q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)  # [s, h, beams * t, d]
        bias = None if self.relative is None else self.relative(q, k, view)
        if self.pattern.listeners:
            # Beside the fused call, which alone makes the output unless a listener changed the
            # weights.
            drawn = self.kernel.pattern(q, k, view, bias)
            seen = self.pattern(drawn)
            z = self.kernel(q, k, v, view, bias) if seen is drawn else self.kernel.attend(seen, v)
        else:
            z = self.kernel(q, k, v, view, bias)
        if beams > 1:
            z = z.unflatten(2, (beams, t)).transpose(1, 2).flatten(0, 1)
        return self.z(z).transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor, n: int) -> Float[Tensor, "b n t d"]:
        return x.unflatten(2, (n, self.head_dim)).transpose(1, 2)

    def _open_view(self, x: Tensor, source: Tensor | None) -> View:
        q = Positions.span(0, x.shape[1], x.device)
        require(
            self.rotary is None or source is None,
            "Rotary positions mean nothing between two sequences: cross-attention takes none.",
        )
        if self.rotary is not None:
            return replace(View.of(None, q), rotary=self.rotary.tables(q, x.dtype))
        return View.of(
            None, q, None if source is None else Positions.span(0, source.shape[1], x.device)
        )
