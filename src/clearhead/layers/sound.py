"""Sound as tokens: log-mel frames through two convolutions.

The second halves their number.

x = dropout(gelu(conv(gelu(conv(mel)))) + position). Radford et al. 2022 (Whisper), section 2.2.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.dropout import Dropout
from clearhead.attention.positions import Positions
from clearhead.errors import require
from clearhead.tap import Tap


class SoundEmbedding(nn.Module):
    """Log-mel spectrograms [b, mels, frames] to vectors, one for two frames."""

    def __init__(
        self, d_model: int, n_mels: int, position: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.n_mels = n_mels
        self.conv1 = nn.Conv1d(n_mels, d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(d_model, d_model, kernel_size=3, stride=2, padding=1)
        self.position = position
        self.dropout = Dropout(dropout)
        self.out = Tap()

    def place(self, mel: Tensor, at: Positions | None) -> Positions:
        """0, 1, 2, ...: one position for two frames."""
        require(
            mel.dim() == 3 and mel.shape[1] == self.n_mels and mel.is_floating_point(),
            f"Sound comes as log-mel frames of shape [batch, {self.n_mels}, frames]; this is "
            f"{mel.dtype} of shape {tuple(mel.shape)}: make them with "
            "clearhead.media.audio.log_mel(wave).",
        )
        return Positions.span(0, (mel.shape[2] + 1) // 2, mel.device) if at is None else at

    def forward(
        self, mel: Float[Tensor, "b mels frames"], at: Positions, types: None = None
    ) -> Float[Tensor, "b t m"]:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        if self.position is not None:
            x = x + self.position(at).to(x.dtype)
        return self.out(self.dropout(x))
