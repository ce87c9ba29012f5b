"""Speech to text with Whisper: 30 seconds at a time, greedily, without time stamps.

Radford et al. 2022, section 2.3: the prompt is <|startoftranscript|>, in multilingual models the
language and the task, then <|notimestamps|>. Differs from the paper: pieces are cut every 30
seconds, not where a sentence ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.media.audio import RATE, SECONDS, log_mel


def transcribe(
    net: Any, config: Any, tokenizer: Any, wave: Float[Tensor, " samples"], language: str = "en"
) -> Iterator[str]:
    """The text of each piece of 30 seconds of sound at 16 kHz."""
    prompt = [tokenizer.id("<|startoftranscript|>")]
    if f"<|{language}|>" in tokenizer and config.vocab_size != 51864:  # that one is English only
        prompt += [tokenizer.id(f"<|{language}|>"), tokenizer.id("<|transcribe|>")]
    else:
        require(
            language == "en",
            f'This model has no token for the language "{language}": it knows English.',
        )
    prompt.append(tokenizer.id("<|notimestamps|>"))
    end = tokenizer.id("<|endoftext|>")
    never = frozenset(range(end + 1, config.vocab_size))  # no special token within the text
    step = SECONDS * RATE
    for start in range(0, len(wave), step):
        with torch.inference_mode(), net.at_rest():
            mel = log_mel(wave[start : start + step], config.n_mels)
            memory = net.encode(mel.unsqueeze(0).to(next(net.parameters())))
        sampling = Sampling(config.max_len // 2, stop=frozenset({end}), never=never)
        yield tokenizer.decode(decode_tokens(net, prompt, sampling, config.max_len, memory)).strip()
