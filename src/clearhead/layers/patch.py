"""Images as tokens: each p x p patch is one vector, a CLS token stands before them.

x = dropout(norm([cls, patch_1 W, patch_2 W, ...] + position)); the projection of patches is a
convolution with stride p. Dosovitskiy et al. 2021, section 3.1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.dropout import Dropout
from clearhead.attention.positions import Positions
from clearhead.errors import require
from clearhead.tap import Tap


class PatchEmbedding(nn.Module):
    """Pixels [b, channels, height, width] to vectors."""

    def __init__(
        self,
        d_model: int,
        image_size: int,
        patch_size: int,
        *,
        channels: int = 3,
        bias: bool = True,
        position: nn.Module | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            patch_size >= 1 and image_size % patch_size == 0,
            f"An image of {image_size} pixels does not divide into patches of {patch_size}.",
        )
        self.image_size, self.channels = image_size, channels
        self.side = image_size // patch_size
        self.cls = nn.Parameter(torch.zeros(d_model))
        self.proj = nn.Conv2d(channels, d_model, patch_size, patch_size, bias=bias)
        self.position, self.norm = position, norm
        self.dropout = Dropout(dropout)
        self.out = Tap()

    def place(self, pixels: Tensor, at: Positions | None) -> Positions:
        """CLS at 0, patches from 1 on, row by row."""
        wanted = (self.channels, self.image_size, self.image_size)
        require(
            pixels.dim() == 4 and tuple(pixels.shape[1:]) == wanted and pixels.is_floating_point(),
            f"Images are floating-point numbers of shape [batch, {', '.join(map(str, wanted))}]; "
            f"these are {pixels.dtype} of shape {tuple(pixels.shape)}: resize and normalise them "
            "first.",
        )
        return Positions.span(0, self.side**2 + 1, pixels.device) if at is None else at

    def forward(
        self, pixels: Float[Tensor, "b c height width"], at: Positions, types: None = None
    ) -> Float[Tensor, "b t m"]:
        patches = self.proj(pixels).flatten(2).transpose(1, 2)  # [b, patches, m]
        x = torch.cat((self.cls.expand(patches.shape[0], 1, -1), patches), dim=1)
        if self.position is not None:
            x = x + self.position(at).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.dropout(x))
