"""Is it the same model? The largest difference of our outputs from those of transformers, on the
same random input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError, require
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig, family
from clearhead.models.heads import ClassificationConfig, PoolingConfig
from clearhead.weights.folder import CONFIG
from clearhead.weights.hf import MODEL_TYPES, opened_as


@dataclass(frozen=True)
class Difference:
    """How far two models are apart."""

    of: str
    """What was compared: logits, similarities, vectors or states."""
    largest: float
    """The largest difference of two numbers."""


@torch.inference_mode()
def difference_to_transformers(net: Net, config: FamilyConfig, folder: str) -> Difference:
    """max |ours - theirs| over the outputs for a random input; for two texts, the second of them
    shorter, so that padding is compared as well.
    """
    try:
        import transformers
    except ImportError as error:
        raise ClearheadError(
            "--check compares with transformers, which is not installed: pip install transformers."
        ) from error
    path = Path(folder).expanduser()
    require(
        not path.exists() or (path / CONFIG).is_file(),
        f"--check compares with a Hugging Face folder or hub name; {folder} is a single file"
        f"{' in a folder' if path.is_dir() else ''}, which transformers does not open.",
    )
    with _quiet(transformers.utils.logging):
        theirs = _opened(transformers, config, str(path if path.exists() else folder))
    inputs, ours = _inputs(net, config)
    of, expected = _first(theirs(**inputs), net)
    if config.shape != "encoder-decoder" and ours.dim() == 3 and "attention_mask" in inputs:
        filled = inputs["attention_mask"].bool()  # what stands in empty slots is nobody's business
        expected, ours = expected[filled], ours[filled]
    return Difference(of, largest_difference(ours, expected))


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs|; what cannot be compared number by number is refused."""
    require(
        ours.shape == theirs.shape,
        f"Our output is {tuple(ours.shape)} and that of transformers {tuple(theirs.shape)}: it is "
        "not the same model.",
    )
    largest = float((theirs - ours).abs().max())
    require(
        math.isfinite(largest), "The outputs are not numbers: the weights are damaged, or overflow."
    )
    return largest


def _opened(transformers: Any, config: FamilyConfig, folder: str) -> Any:
    """Their model, of the architecture that the folder names."""
    try:
        hf = transformers.AutoConfig.from_pretrained(folder)
        name = opened_as(hf.to_dict(), family(config.kind))
        require(
            name is not None and hf.model_type in MODEL_TYPES,
            f"{folder}/{CONFIG} names no architecture of transformers, so there is nothing to "
            "compare with.",
        )
        kind = getattr(transformers, str(name))
        return kind.from_pretrained(folder, dtype=torch.float32).eval()
    except ClearheadError:
        raise
    except (OSError, ValueError, AttributeError, KeyError, RuntimeError, ImportError) as error:
        raise ClearheadError(
            f"transformers does not open {folder}, so there is nothing to compare with "
            f"({' '.join(str(error).split())[:200]})."
        ) from error


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Without transformers' progress bars and warnings, then as it was."""
    bars, level = log.is_progress_bar_enabled(), log.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of variables that have the last word about bars
        log.disable_progress_bar()
        log.set_verbosity_error()
        try:
            yield
        finally:
            log.set_verbosity(level)
            if bars:
                log.enable_progress_bar()


def _inputs(net: Any, config: Any) -> tuple[dict[str, Any], Tensor]:
    """Random inputs in their words, and our output for them."""
    dice = torch.Generator().manual_seed(0)

    def ids(length: int, rows: int = 1) -> Tensor:
        low = min(3, config.vocab_size - 2)
        return torch.randint(max(low, 0), config.vocab_size - 1, (rows, length), generator=dice)

    def ragged(length: int, rows: int = 2) -> tuple[dict[str, Tensor], Positions]:
        at = Positions.ragged([length, max(length // 2, 1)][:rows])
        mask = at.filled().expand(rows, length).long()
        return {"input_ids": ids(length, rows), "attention_mask": mask}, at

    if config.shape == "two-tower":
        words, pixels = ids(9), _pixels(config, dice)
        words[:, -1] = config.vocab_size - 1
        return {"input_ids": words, "pixel_values": pixels}, net(words, pixels)
    if config.shape == "encoder-decoder":
        if hasattr(config, "n_mels"):
            target = ids(7)
            mel = torch.randn(1, config.n_mels, 2 * config.source_len, generator=dice)
            return {"input_features": mel, "decoder_input_ids": target}, net(mel, target)
        source, at = ragged(9)
        target = ids(7, 2)
        out = net(source["input_ids"], target, source_at=at)
        return source | {"decoder_input_ids": target}, out
    if hasattr(config, "image_size"):
        pixels = _pixels(config, dice)
        return {"pixel_values": pixels}, net(pixels)
    head = getattr(config, "head", None)
    # Their classifiers of decoders take several rows only where a token for padding is named.
    one = config.shape == "decoder" and isinstance(head, ClassificationConfig)
    given, at = ragged(min(16, config.max_len), 1 if one else 2)
    if isinstance(head, PoolingConfig) and not head.dense:  # transformers has no part for it
        return given, net.encode(given["input_ids"], at).x
    return given, net(given["input_ids"], at)


def _pixels(config: Any, dice: torch.Generator) -> Tensor:
    return torch.randn(1, config.channels, config.image_size, config.image_size, generator=dice)


def _first(out: Any, net: Any) -> tuple[str, Tensor]:
    """Of their several outputs the one that ours is, and what it is."""
    if hasattr(out, "start_logits"):
        return "logits", torch.stack((out.start_logits, out.end_logits), dim=-1)
    for name, of in {
        "logits": "logits",
        "prediction_logits": "logits",
        "logits_per_text": "similarities",
    }.items():
        if getattr(out, name, None) is not None:
            return of, getattr(out, name)
    if getattr(net.head, "dense", None) is not None:
        return "vectors", out.pooler_output
    return "states", out.last_hidden_state
