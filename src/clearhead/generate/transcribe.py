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
from clearhead.media.audio import RATE, SECONDS, feature_settings, log_mel

START, PLAIN, END = "<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"


def transcribe(
    net: Any, config: Any, tokenizer: Any, wave: Float[Tensor, " samples"], language: str = "en"
) -> Iterator[str]:
    """The text of each piece of 30 seconds of sound at 16 kHz."""
    prompt = [tokenizer.id(START)]
    if config.multilingual and f"<|{language}|>" in tokenizer:
        prompt += [tokenizer.id(f"<|{language}|>"), tokenizer.id("<|transcribe|>")]
    else:
        require(
            language == "en",
            f'This model has no token for the language "{language}": it knows English.',
        )
    prompt.append(tokenizer.id(PLAIN))
    end = tokenizer.id(END)
    never = frozenset(range(end + 1, config.vocab_size))  # no special token within the text
    step = SECONDS * RATE
    for start in range(0, len(wave), step):
        with torch.inference_mode(), net.at_rest():
            mel = log_mel(wave[start : start + step], config.n_mels)
            memory = net.encode(mel.unsqueeze(0).to(next(net.parameters())))
        sampling = Sampling(config.max_len // 2, stop=frozenset({end}), never=never)
        yield tokenizer.decode(decode_tokens(net, prompt, sampling, config.max_len, memory)).strip()


def speech_files(config: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """What transformers' processor and `generate` read beside the weights, by file name: how sound
    is prepared, and which tokens say what.
    """
    files = {"preprocessor_config.json": feature_settings(config.n_mels, 2 * config.source_len)}
    if tokenizer is None or not all(token in tokenizer for token in (START, PLAIN, END)):
        return files
    end = tokenizer.id(END)
    said: dict[str, Any] = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        "decoder_start_token_id": tokenizer.id(START),
        "no_timestamps_token_id": tokenizer.id(PLAIN),
        "is_multilingual": config.multilingual,
        "max_length": config.max_len,
        "return_timestamps": False,
    }
    if config.multilingual:  # the languages stand between the start and the tasks
        tasks = {name: tokenizer.id(f"<|{name}|>") for name in ("translate", "transcribe")}
        languages = range(tokenizer.id(START) + 1, min(tasks.values()))
        said["lang_to_id"] = {tokenizer.token(id): id for id in languages}
        said["task_to_id"] = tasks
    return files | {"generation_config.json": said}
