"""Sound and images against transformers' own preprocessing, and what is refused."""

import math
import os
from pathlib import Path

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.media.audio import log_mel, mel_filters, read_audio, resample
from clearhead.media.image import ImageProcessor


def tone(hertz: float, rate: int, seconds: float = 1.0) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_is_that_of_transformers(n_mels):
    from transformers import WhisperFeatureExtractor

    wave = torch.randn(50000) * 0.1 + 0.3 * tone(440, 16000, 50000 / 16000)
    theirs = WhisperFeatureExtractor(feature_size=n_mels)(wave.numpy(), sampling_rate=16000)
    reference = torch.tensor(theirs["input_features"][0])
    torch.testing.assert_close(log_mel(wave, n_mels), reference, atol=1e-5, rtol=1e-5)


def test_mel_filters_are_those_of_transformers():
    from transformers.audio_utils import mel_filter_bank

    theirs = mel_filter_bank(201, 80, 0, 8000, 16000, norm="slaney", mel_scale="slaney")
    torch.testing.assert_close(
        mel_filters(80), torch.tensor(theirs.T).float(), atol=1e-8, rtol=1e-6
    )


@pytest.mark.parametrize(("rate", "wanted"), [(8000, 16000), (44100, 16000), (48000, 16000)])
def test_resampling_keeps_a_tone_and_stops_what_cannot_be_kept(rate, wanted):
    out = resample(tone(440, rate), rate, wanted)
    assert len(out) == wanted
    torch.testing.assert_close(out[200:-200], tone(440, wanted)[200:-200], atol=2e-3, rtol=0)
    if rate > wanted:
        assert resample(tone(wanted * 0.75, rate), rate, wanted)[200:-200].abs().max() < 0.01


def test_sound_that_is_none(tmp_path):
    pytest.importorskip("soundfile", reason="the audio extra is not installed")
    with pytest.raises(ClearheadError, match="no sound file"):
        read_audio(tmp_path / "a.wav")
    (tmp_path / "a.wav").write_bytes(b"not sound at all")
    with pytest.raises(ClearheadError, match="cannot be read as sound"):
        read_audio(tmp_path / "a.wav")
    with pytest.raises(ClearheadError, match="one channel"):
        log_mel(torch.zeros(0))


def test_a_recording_is_read_at_the_right_rate():
    pytest.importorskip("soundfile", reason="the audio extra is not installed")
    folder = os.environ.get("CLEARHEAD_DATA")
    if not folder:
        pytest.skip("CLEARHEAD_DATA is not set: no recording to read")
    wave = read_audio(Path(folder) / "jfk" / "jfk.flac")
    assert wave.shape == (176000,)  # 11 seconds
    assert 0.5 < wave.abs().max() <= 1


def picture(width: int, height: int):
    image = pytest.importorskip("PIL.Image", reason="the image extra is not installed")
    data = torch.randint(256, (height, width, 3), dtype=torch.uint8)
    return image.frombytes("RGB", (width, height), data.numpy().tobytes())


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (64, 64)])
def test_a_square_squeezes_and_normalises(size):
    processor = ImageProcessor(size=16, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    image = picture(*size)
    x = processor(image)
    pixels = bytearray(image.resize((16, 16), 2).tobytes())
    small = torch.frombuffer(pixels, dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
    for colour, (mean, std) in enumerate([(0.5, 0.1), (0.4, 0.2), (0.3, 0.3)]):
        torch.testing.assert_close(x[colour], (small[colour] / 255 - mean) / std)


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (64, 64)])
def test_images_are_those_of_transformers(size):
    from transformers.models.clip import image_processing_pil_clip as theirs

    settings = {
        "do_resize": True,
        "size": {"shortest_edge": 24},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 20, "width": 20},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    image = picture(*size)
    reference = theirs.CLIPImageProcessorPil(**settings)(image, return_tensors="pt")["pixel_values"]
    ours = ImageProcessor.from_hf(settings)(image)
    torch.testing.assert_close(ours, reference[0], atol=1e-5, rtol=1e-5)


def test_images_that_are_none(tmp_path):
    pytest.importorskip("PIL", reason="the image extra is not installed")
    processor = ImageProcessor()
    with pytest.raises(ClearheadError, match="no image at"):
        processor(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"\x89PNG but not really")
    with pytest.raises(ClearheadError, match="cannot be read as an image"):
        processor(tmp_path / "a.png")
    with pytest.raises(ClearheadError, match="a path or a Pillow image"):
        processor(17)
