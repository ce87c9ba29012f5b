"""Sound: reading a file, and the log-mel spectrogram that Whisper takes.

    power = |STFT(wave)|^2, mel = filters @ power, log_mel = (max(log10(mel), peak - 8) + 4) / 4

Frames of 25 ms every 10 ms at 16 kHz; triangular filters, equally spaced on Slaney's mel scale.
Radford et al. 2022, section 2.2.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError, require

RATE, WINDOW, HOP = 16000, 400, 160
SECONDS = 30


def read_audio(path: str | Path, rate: int = RATE) -> Float[Tensor, " samples"]:
    """A sound file as one channel of numbers in [-1, 1] at the rate asked for (extra: audio)."""
    path = Path(path)
    require(path.is_file(), f"There is no sound file at {path}: check the path.")
    try:
        import soundfile
    except ImportError as error:
        raise ClearheadError(
            "Reading sound files needs the package soundfile: pip install 'clearhead[audio]'."
        ) from error
    try:
        samples, own_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise ClearheadError(
            f"{path} cannot be read as sound ({error}): give a WAV, FLAC or OGG file."
        ) from error
    require(len(samples) > 0, f"{path} holds no sound: it has no samples.")
    return resample(torch.from_numpy(samples.mean(axis=1)), own_rate, rate)


def resample(
    wave: Float[Tensor, " samples"], rate: int, wanted: int
) -> Float[Tensor, " resampled"]:
    """The same sound at another rate: a windowed sinc that lets nothing above half the lower rate
    through.
    """
    if rate == wanted:
        return wave
    step = math.gcd(rate, wanted)
    up, down = wanted // step, rate // step
    # Each of the `up` phases is one short filter; a strided convolution applies them all.
    width = 6
    cutoff = min(up, down) * 0.99 / max(up, down) if down > up else 0.99
    reach = math.ceil(width / cutoff)
    taps = torch.arange(-reach, reach + down, dtype=torch.float64)
    shift = taps.unsqueeze(0) - torch.arange(up, dtype=torch.float64).unsqueeze(1) * down / up
    window = torch.cos(math.pi * (shift * cutoff / width).clamp(-1, 1) / 2) ** 2
    kernel = (torch.sinc(shift * cutoff) * window * cutoff).float().unsqueeze(1)
    padded = F.pad(wave.view(1, 1, -1), (reach, reach + down))
    phases = F.conv1d(padded, kernel, stride=down)[0]  # [up, frames]
    return phases.T.flatten()[: math.ceil(len(wave) * up / down)]


def log_mel(
    wave: Float[Tensor, " samples"], n_mels: int = 80, seconds: int | None = SECONDS
) -> Float[Tensor, "mels frames"]:
    """The log-mel spectrogram of sound at 16 kHz, filled up or cut to so many seconds."""
    require(
        wave.dim() == 1 and wave.is_floating_point() and len(wave) > 0,
        f"A wave is one channel of floating-point samples, not {wave.dtype} {tuple(wave.shape)}.",
    )
    wave = wave.float()
    if seconds is not None:
        wave = F.pad(wave[: seconds * RATE], (0, max(seconds * RATE - len(wave), 0)))
    window = torch.hann_window(WINDOW, device=wave.device)
    spectrum = torch.stft(wave, WINDOW, HOP, window=window, return_complex=True)
    power = spectrum[:, :-1].abs().square()
    mel = (mel_filters(n_mels).to(wave) @ power).clamp(min=1e-10).log10()
    return (torch.maximum(mel, mel.max() - 8.0) + 4.0) / 4.0


def feature_settings(n_mels: int, frames: int) -> dict[str, Any]:
    """`log_mel` in the words of transformers' feature extractor: its preprocessor_config.json."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": n_mels,
        "sampling_rate": RATE,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "chunk_length": math.ceil(frames * HOP / RATE),
        "n_samples": frames * HOP,
        "nb_max_frames": frames,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def mel_filters(n_mels: int, rate: int = RATE, window: int = WINDOW) -> Float[Tensor, "mels bins"]:
    """Triangles over the frequencies, each of area 1: linear below 1 kHz, logarithmic above
    (Slaney).
    """
    bins = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    edges = _mel_to_hertz(
        torch.linspace(0, _hertz_to_mel(rate / 2), n_mels + 2, dtype=torch.float64)
    )
    ramps = edges.unsqueeze(1) - bins.unsqueeze(0)
    widths = edges.diff()
    rising, falling = -ramps[:-2] / widths[:-1].unsqueeze(1), ramps[2:] / widths[1:].unsqueeze(1)
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2 / (edges[2:] - edges[:-2])).unsqueeze(1)).float()


_LINEAR, _BREAK = 200 / 3, 1000.0
_STEP = math.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _BREAK:
        return hertz / _LINEAR
    return _BREAK / _LINEAR + math.log(hertz / _BREAK) / _STEP


def _mel_to_hertz(mel: Tensor) -> Tensor:
    linear = mel * _LINEAR
    return torch.where(
        mel < _BREAK / _LINEAR, linear, _BREAK * torch.exp(_STEP * (mel - _BREAK / _LINEAR))
    )
