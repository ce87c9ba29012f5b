"""Is it the same model? The largest difference of our outputs from those of transformers, on the
same random input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ClearheadError, require
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig
from clearhead.models.heads import PoolingConfig


@torch.inference_mode()
def difference_to_transformers(net: Net, config: FamilyConfig, folder: str) -> float:
    """max |ours - theirs| over the logits (or states) of a random input."""
    try:
        import transformers
    except ImportError as error:
        raise ClearheadError(
            "--check compares with transformers, which is not installed: pip install transformers."
        ) from error
    require(
        not Path(folder).is_file(),
        "--check compares with a Hugging Face folder or hub name; this is a single file.",
    )
    hf = transformers.AutoConfig.from_pretrained(folder)
    names = hf.architectures or []
    require(
        len(names) > 0 and hasattr(transformers, names[0]),
        f"{folder}/config.json names no architecture of transformers, so there is nothing to "
        "compare with.",
    )
    theirs = getattr(transformers, names[0]).from_pretrained(folder, dtype=torch.float32).eval()
    inputs, ours = _inputs(net, config)
    out = theirs(**inputs)
    return float((_first(out, net) - ours).abs().max())


def _inputs(net: Any, config: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Random inputs in their words, and our output for them."""
    dice = torch.Generator().manual_seed(0)

    def ids(length: int) -> torch.Tensor:
        low = min(3, config.vocab_size - 2)
        return torch.randint(max(low, 0), config.vocab_size - 1, (1, length), generator=dice)

    if config.shape == "two-tower":
        words, pixels = ids(9), _pixels(config, dice)
        words[:, -1] = config.vocab_size - 1
        return {"input_ids": words, "pixel_values": pixels}, net(words, pixels)
    if config.shape == "encoder-decoder":
        target = ids(7)
        if hasattr(config, "n_mels"):
            mel = torch.randn(1, config.n_mels, 2 * config.source_len, generator=dice)
            return {"input_features": mel, "decoder_input_ids": target}, net(mel, target)
        source = ids(9)
        return {"input_ids": source, "decoder_input_ids": target}, net(source, target)
    if hasattr(config, "image_size"):
        pixels = _pixels(config, dice)
        return {"pixel_values": pixels}, net(pixels)
    words = ids(min(16, config.max_len))
    if isinstance(getattr(config, "head", None), PoolingConfig) and not config.head.dense:
        return {"input_ids": words}, net.encode(words).x  # the pooling is not part of transformers
    return {"input_ids": words}, net(words)


def _pixels(config: Any, dice: torch.Generator) -> torch.Tensor:
    return torch.randn(1, config.channels, config.image_size, config.image_size, generator=dice)


def _first(out: Any, net: Any) -> torch.Tensor:
    """Of their several outputs the one that ours is."""
    if hasattr(out, "start_logits"):
        return torch.stack((out.start_logits, out.end_logits), dim=-1)
    for name in ("logits", "logits_per_text", "prediction_logits"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    pooled = getattr(net.head, "dense", None) is not None
    return out.pooler_output if pooled else out.last_hidden_state
