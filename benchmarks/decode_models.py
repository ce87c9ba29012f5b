"""The models of decode.py, with random weights, and the work that is asked of them.

Every vocabulary is of made-up words, each of which is one token in every engine, so that texts and
ids say the same. Weights are drawn so large that what follows depends on all that was read and
the best token is clear; rows of tokens that are no words (bytes, the end) are zero, so none of
these is ever chosen and every text has its full length.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import clearhead as ch
from clearhead.models import bart
from clearhead.text.tokenizer import Tokenizer

GAIN = 1.25  # of a matrix: its weights have the standard deviation GAIN / sqrt(d_model)
END, PAD, UNKNOWN = "<|endoftext|>", "<pad>", "<unk>"
# With post-norm, attention to everything makes all states alike: sharper and weaker, it does not.
SHARP = {"q_proj.weight": 4.0, "k_proj.weight": 4.0, "attn.out_proj.weight": 0.4}
TINY: dict[str, Any] = {"n_layers": 2, "d_model": 64, "n_heads": 2, "vocab_size": 1000}


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work."""

    run: Callable[[], Any]
    """Does all of it once."""
    read: Callable[[Any], Any]
    """What came out, as the ids that were written, or as vectors."""
    held: float | Callable[[], float] = 0.0
    """Bytes of weights that a step reads, as it is in the end; 0: not counted."""


@dataclass
class Work:
    """A model, what it is given, and where the files of others are written."""

    model: ch.Model
    """Ours."""
    rows: list[list[int]]
    """Prompts, sources or sentences."""
    new: int
    """Tokens that are to follow each; 0: it is only read."""
    threads: int
    """For everybody."""
    folder: Path
    """For files."""
    nanogpt: Path | None = None
    """A checkout of it."""

    @cached_property
    def texts(self) -> list[str]:
        """The rows as texts."""
        tokenizer = self.tokenizer
        texts = [tokenizer.decode(row) for row in self.rows]
        assert tokenizer.encode_batch(texts) == self.rows, "a word is not one token"
        return texts

    @property
    def tokenizer(self) -> Tokenizer:
        """Its vocabulary."""
        assert self.model.tokenizer is not None
        return self.model.tokenizer

    @property
    def weights(self) -> int:
        """How many there are."""
        return sum(parameter.numel() for parameter in self.model.net.parameters())

    @cached_property
    def hf(self) -> Path:
        """A folder for transformers."""
        if not (self.folder / "hf").exists():
            ch.export(self.model, self.folder / "hf")
        return self.folder / "hf"

    @cached_property
    def ct2(self) -> Path:
        """A folder for CTranslate2, in fp32."""
        if (self.folder / "ct2").exists():
            return self.folder / "ct2"
        from ctranslate2.converters import TransformersConverter

        class Converter(TransformersConverter):
            """Its own, for a transformers that no longer names the kind of positions."""

            def load_model(self, model_class: Any, path: str, **more: Any) -> Any:
                net = super().load_model(model_class, path, **more)
                if not hasattr(net.config, "position_embedding_type"):
                    net.config.position_embedding_type = "absolute"
                return net

        quiet_transformers()
        Converter(str(self.hf)).convert(str(self.folder / "ct2"))
        return self.folder / "ct2"

    def gguf(self, kind: str) -> Path:
        """A file for llama.cpp."""
        path = self.folder / f"{kind}.gguf"
        ch.export(self.model, path, to="gguf", dtype=kind)
        return path

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Texts that were written, as ids."""
        return self.tokenizer.encode_batch(texts)


def quiet_transformers() -> Any:
    """transformers, without its progress bars and advice."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


# --- the models ---


def make_decoder(tiny: bool) -> ch.Model:
    """GPT-2 124M."""
    model = ch.build("gpt2", seed=0, **(TINY if tiny else {}))
    roles = {"bos": END, "eos": END, "unk": END}
    return prepared(model, (), (END,), roles, "embed.tokens.weight")


def make_translator(tiny: bool) -> ch.Model:
    """Marian, in the base shape of Vaswani et al. (2017)."""
    size: dict[str, Any] = {"n_layers": 6, "d_model": 512, "n_heads": 8, "vocab_size": 32000}
    size = TINY if tiny else size
    size = size | {
        "position": bart.MARIAN,
        "embed_norm": False,
        "scaled": True,
        "activation": "relu",
    }
    model = ch.build("bart", seed=0, max_len=256, dropout=0.0, **size)
    roles = {"eos": "</s>", "unk": UNKNOWN, "pad": PAD}
    # CTranslate2 takes the last token for Marian's padding, from whose zeros a target starts.
    return prepared(model, ("</s>", UNKNOWN), (PAD,), roles, "encoder.embed.tokens.weight", SHARP)


def make_encoder(tiny: bool) -> ch.Model:
    """MiniLM: the mean of the last states, of length 1."""
    size: dict[str, Any] = {"n_layers": 6, "d_model": 384, "n_heads": 12, "vocab_size": 30522}
    head = {"kind": "pooling", "mode": "mean", "normalise": True}
    model = ch.build("bert", seed=0, dropout=0.0, head=head, **(TINY if tiny else size))
    return prepared(model, (PAD, UNKNOWN), (), {"pad": PAD, "unk": UNKNOWN}, "embed.tokens.weight")


def prepared(
    model: ch.Model,
    first: Sequence[str],
    last: Sequence[str],
    roles: dict[str, str],
    table: str,
    factors: Mapping[str, float] | None = None,
) -> ch.Model:
    """The model with its words, and with weights that make clear what follows; `factors` are of
    those whose names end so.
    """
    size = model.config.vocab_size
    model.tokenizer = make_tokenizer(size, first, last, roles)
    dice, parameters = torch.Generator().manual_seed(0), dict(model.net.named_parameters())
    std = GAIN / math.sqrt(parameters[table].shape[1])
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.dim() == 2:
                factor = next((x for end, x in (factors or {}).items() if name.endswith(end)), 1.0)
                parameter.normal_(0.0, std * factor, generator=dice)
        words = word_ids(model)
        parameters[table][: words.start] = 0.0
        parameters[table][words.stop :] = 0.0
    model.net.eval()
    return model


def make_tokenizer(
    size: int, first: Sequence[str], last: Sequence[str], roles: dict[str, str]
) -> Tokenizer:
    """Special tokens, the bytes, and words of up to three letters with a blank before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = size - len(first) - len(alphabet) - len(last)
    stems, words, merges = ["Ġ"], list[str](), list[tuple[str, str]]()
    while len(words) < room:
        pairs = [(stem, letter) for stem in stems for letter in string.ascii_letters]
        pairs = pairs[: room - len(words)]
        stems = [stem + letter for stem, letter in pairs]
        merges += pairs
        words += stems
    tokens = [*first, *alphabet, *words, *last]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*first, *last])
    return Tokenizer(backend, roles)


def word_ids(model: ch.Model) -> range:
    """The ids of the words."""
    assert model.tokenizer is not None
    special = model.tokenizer.special_ids
    before = next(i for i in range(model.config.vocab_size) if i not in special) + 256
    return range(before, model.config.vocab_size - sum(i >= before for i in special))


def draw_rows(model: ch.Model, lengths: Sequence[int]) -> list[list[int]]:
    """Random words."""
    dice, words = random.Random(1), word_ids(model)
    return [[dice.choice(words) for _ in range(length)] for length in lengths]
