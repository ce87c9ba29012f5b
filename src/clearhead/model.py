"""The model that users hold: a network, its settings, its tokeniser, its companions."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError, require
from clearhead.fast.form import Quick, check_form, count_weights, make_fast
from clearhead.fast.formats import Form
from clearhead.fast.rounding import draw_text
from clearhead.generate.answer import Answer, answer_question
from clearhead.generate.batch import encode_sources
from clearhead.generate.beam import Beam
from clearhead.generate.fill import fill_masks
from clearhead.generate.labels import classify_texts, tag_sentences
from clearhead.generate.options import Options, read_options
from clearhead.generate.prefix import Prefixes
from clearhead.generate.score import score_tokens
from clearhead.generate.settings import FILE
from clearhead.generate.transcribe import transcribe
from clearhead.generate.translate import translate_texts
from clearhead.generate.vectors import embed_texts
from clearhead.generate.write import Piece, Written, whole, write_texts
from clearhead.layers.embed import check_ids
from clearhead.layers.sound import SoundEmbedding
from clearhead.measure.hardware import read_memory
from clearhead.media.audio import read_audio
from clearhead.media.image import ImageProcessor
from clearhead.models.base import EncoderDecoder, Net
from clearhead.models.family import FamilyConfig
from clearhead.models.heads import LMHead
from clearhead.text.tokenizer import Tokenizer
from clearhead.weights.folder import LABELS, save_model

INPUTS = {"encoder-decoder": " (source, target)", "two-tower": " (ids, pixels)"}


class Model:
    """A network with its settings. `model(ids)` checks its input; `model.net` is the bare module.

    `companions` are JSON files that came along and go along (generation_config.json,
    preprocessor_config.json), by name.
    """

    def __init__(
        self,
        net: Net,
        config: FamilyConfig,
        tokenizer: Tokenizer | None = None,
        companions: Mapping[str, Any] | None = None,
    ) -> None:
        self.net, self.config, self.tokenizer = net, config, tokenizer
        self.companions = dict(companions or {})
        self._quick = Quick()
        self.prefixes = Prefixes()  # what was read with remember=True

    def __call__(self, *ids: Tensor, at: Positions | None = None, **more: Any) -> Tensor:
        """The network's output: `model(ids)`, or `model(source, target)` for an encoder-decoder."""
        wanted = 2 if self.config.shape in ("encoder-decoder", "two-tower") else 1
        require(
            len(ids) == wanted,
            f"This {self.config.shape} takes {wanted} tensor(s)"
            f"{INPUTS.get(self.config.shape, '')}, not {len(ids)}.",
        )
        for tensor in ids:
            require(
                isinstance(tensor, Tensor),
                f"Ids are a tensor of whole numbers, not {type(tensor).__name__}: "
                "torch.tensor([[...]]).",
            )
        for tensor, size in zip(ids, self._vocabularies(wanted), strict=True):
            check_ids(tensor, size)
        require(
            at is None or isinstance(at, Positions),
            "at says where the tokens stand: ch.Positions.ragged([9, 5]), say.",
        )
        known = {"types", "source_at", "target_at"}
        require(
            set(more) <= known,
            f"A model takes no {sorted(set(more) - known)}. Padding is said with positions: "
            "at=ch.Positions.ragged(lengths).",
        )
        if more.get("types") is not None:
            check_ids(more["types"], getattr(self.config, "token_types", 0) or 1, "Segment")
        require(
            at is None or not isinstance(self.net, EncoderDecoder),
            "An encoder-decoder takes source_at and target_at, not at.",
        )
        if at is not None:
            more["at"] = at
        return self.net(*ids, **more)

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's labels, if they are known."""
        return self.companions.get(LABELS, [])

    def _vocabularies(self, count: int) -> list[int]:
        """The vocabulary of each input."""
        target = getattr(self.config, "target_vocab_size", None) or self.config.vocab_size
        return [self.config.vocab_size, target][:count]

    def fast(self, form: Form = "int8") -> Model:
        """The same model in a form for running, and not for training.

        On a CPU its linear layers' weights are kept as fp32 (shared with this model), bf16, int8 or
        int4; `generate`, `translate` and `transcribe` take the fp32 form of a large model by
        themselves. On a GPU weights stay as they are, and torch compiles the blocks.
        """
        check_form(self.net, form)
        self.net.retie()
        text, on_cpu = None, all(p.device.type == "cpu" for p in self.net.parameters())
        if (
            form == "int4"
            and on_cpu
            and self.config.shape == "decoder"
            and isinstance(self.net.head, LMHead)
        ):
            text = draw_text(self._quick(self.net), self.config.max_len, self.config.vocab_size)
        net = make_fast(self.net, form, text)
        return Model(net, self.config, self.tokenizer, self.companions)

    # -- text

    def generate(self, prompt: str | Sequence[str], **settings: Any) -> Any:
        """The text that follows a prompt, or those of many; for an encoder-decoder, what it makes
        of the source. A list of prompts gives a list; n=3 gives three texts a prompt; details=True
        gives `Written` (text, ids, log-probabilities, why it ended, seconds).

        Settings: max_new_tokens, temperature (0: the best token each time), top_k, top_p, min_p,
        typical, seed, stop, and the rules of docs/generating.md.
        """
        require(
            isinstance(prompt, (str, Sequence)),
            f"generate takes a text or a list of texts, not {prompt!r}.",
        )
        many = [prompt] if isinstance(prompt, str) else list(prompt)
        options, ids, sources = self._request(many, settings)
        texts = [_result(each, options) for each in whole(self._write(ids, options, sources))]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """The same piece by piece, as soon as it is known; never half a character. Whoever stops
        iterating stops the work; the generator returns `Written`.
        """
        require(isinstance(prompt, str), "stream writes one text: generate takes many prompts.")
        options, ids, sources = self._request([prompt], settings)
        return self._stream(ids, options, sources)

    def chat(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> Any:
        """The answer to a conversation: [{"role": "user", "content": "..."}], with the settings of
        `generate`.
        """
        tokenizer = self._tokenizer()
        self._check_writes()
        require(
            not isinstance(self.net, EncoderDecoder),
            f"A {self.config.kind} is an encoder-decoder and holds no conversations: use generate.",
        )
        ids = tokenizer.encode(tokenizer.chat(messages), special=False)
        check_ids(torch.tensor(ids), self.config.vocab_size)
        options = self._options(settings)
        found = whole(self._write([ids], options))[0]
        alone = [tokenizer.decode(one.ids).startswith(" ") for one in found]
        found = [
            one if blank else replace(one, text=one.text.removeprefix(" "))
            for one, blank in zip(found, alone, strict=True)  # an answer is a text of its own
        ]
        return _result(found, options)

    def fill(self, text: str | Sequence[str], best: int = 5) -> Any:
        """The likeliest tokens behind each [MASK] of a text (an encoder with a masked_lm head): a
        list of `Candidate`, the best first; of several masks a list of these; of many texts a list
        of all that.
        """
        self._check_head("masked_lm", "Filling masks")
        many = [text] if isinstance(text, str) else list(text)
        masks = fill_masks(self._quick(self.net), self._tokenizer(), many, self._text_len(), best)
        found = [each[0] if len(each) == 1 else each for each in masks]
        return found[0] if isinstance(text, str) else found

    def translate(
        self,
        texts: str | Sequence[str],
        beams: int | None = None,
        length_penalty: float | None = None,
        max_new_tokens: int | None = None,
        batch_tokens: int = 4096,
        **others: Any,
    ) -> str | list[str]:
        """What an encoder-decoder makes of a text, or of many, in batches sorted by length.

        beams: how many translations are followed at once, 1 being greedy. It and length_penalty
        are, unless given, what the model came with, else 1. batch_tokens: how many source tokens
        are worked on at once, each beam counted. What else `generate` has is refused by name.
        """
        require(
            isinstance(texts, Iterable),
            f"translate takes a text or a list of texts, not {texts!r:.60}.",
        )
        require(
            not others,
            f"translate has no setting {', '.join(others)}: it has beams, length_penalty, "
            "max_new_tokens and batch_tokens. generate takes sources too, and has all the others.",
        )
        many = [texts] if isinstance(texts, str) else list(texts)
        tokenizer = self._tokenizer()
        require(
            isinstance(self.net, EncoderDecoder),
            f"Translating takes an encoder-decoder; this is a {self.config.kind}, a model of the "
            f"shape {self.config.shape}.",
        )
        self._check_writes()
        limit = self.config.max_len if max_new_tokens is None else max_new_tokens
        if beams is None:
            beams = self._generation("num_beams") or 1
        settings: dict[str, Any] = {"max_new_tokens": limit, "beams": beams}
        if length_penalty is not None:
            settings["length_penalty"] = length_penalty
        options, start = self._options(settings), self._start_ids()
        assert isinstance(options.way, Beam)
        found = translate_texts(
            self._quick(self.net),
            tokenizer,
            many,
            replace(options.way, rules=options.sampling_for(start).rules),
            start,
            self.config.max_len,
            batch_tokens,
            capped=max_new_tokens is None,
        )
        return found[0] if isinstance(texts, str) else found

    def embed(self, texts: str | Sequence[str]) -> Float[Tensor, "n m"]:
        """One vector a text (a model with a pooling head)."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        own = '{"kind": "pooling", "mode": "mean", "normalise": true}'
        self._check_head("pooling", "Embedding texts", own)
        return embed_texts(self._quick(self.net), self._tokenizer(), texts, self._text_len())

    def score(self, text: str, source: str | None = None) -> Float[Tensor, " n"]:
        """The log-probability of each token of a text but the first, given those before it; for an
        encoder-decoder of every token, given the source.
        """
        tokenizer = self._tokenizer()
        self._check_writes()
        if not isinstance(self.net, EncoderDecoder):
            require(source is None, "Only an encoder-decoder has a source: score(text).")
            return score_tokens(self.net, tokenizer.encode(text), self.config.max_len)
        require(source is not None, "An encoder-decoder scores a text for a source: source=...")
        memory = encode_sources(self.net, [tokenizer.encode(str(source))])
        ids = [*self._start_ids()[:1], *tokenizer.target.encode(text)]
        return score_tokens(self.net, ids, self.config.max_len, memory)

    def classify(
        self, texts: str | tuple[str, str] | Sequence[str | tuple[str, str]]
    ) -> dict[str, float] | list[dict[str, float]]:
        """Label -> probability of a text, the likeliest first, or a list of these for a list of
        texts; a pair of texts is a tuple.
        """
        self._check_head("classification", "Classifying")
        many = [texts] if isinstance(texts, (str, tuple)) else list(texts)
        length = self._text_len()
        true = self.config.head.true  # type: ignore[attr-defined]
        found = classify_texts(
            self._quick(self.net), self._tokenizer(), many, self.labels, length, true
        )
        return found[0] if isinstance(texts, (str, tuple)) else found

    def tag(self, text: str | Sequence[str]) -> list[tuple[str, str]]:
        """Every word of a sentence with its label; words stand apart by blanks, or in a list."""
        self._check_head("tagging", "Tagging")
        words = text.split() if isinstance(text, str) else list(text)
        require(len(words) > 0, "There are no words to tag.")
        tokenizer, length = self._tokenizer(), self._text_len()
        (tags,) = tag_sentences(self._quick(self.net), tokenizer, [words], self.labels, length)
        return list(zip(words, tags, strict=True))

    def answer(self, question: str, context: str) -> Answer:
        """The piece of the context that answers a question: its text, place and probability."""
        self._check_head("span", "Answering questions")
        return answer_question(
            self._quick(self.net), self._tokenizer(), question, context, self._text_len()
        )

    def see(self, *images: Any) -> Float[Tensor, "n c h w"]:
        """Pictures (paths, or what Pillow opened) as the numbers that this model takes."""
        said = self.companions.get("preprocessor_config.json", {"size": self._image_size()})
        return torch.stack([ImageProcessor.from_hf(said)(image) for image in images])

    def _image_size(self) -> int:
        size = getattr(self.config, "image_size", None)
        require(size is not None, f"A {self.config.kind} does not look at images.")
        return int(size)  # type: ignore[arg-type]

    def transcribe(self, sound: str | Path | Tensor, language: str = "en") -> str:
        """What is said in a sound file, or in samples at 16 kHz (Whisper)."""
        require(
            isinstance(self.net, EncoderDecoder)
            and isinstance(self.net.encoder.embed, SoundEmbedding),
            f"Transcribing takes a model that listens (Whisper), and this is a {self.config.kind}.",
        )
        wave = sound if isinstance(sound, Tensor) else read_audio(sound)
        net = self._quick(self.net)
        return " ".join(transcribe(net, self.config, self._tokenizer(), wave, language))

    def _check_head(self, kind: str, what: str, own: str = "") -> None:
        """Refuse what takes another head, and say how the model gets it."""
        head = getattr(self.config, "head", None)
        require(
            head is not None and head.kind == kind,
            f"{what} takes a model with a {kind} head, and this {self.config.kind} has "
            f"{'none' if head is None else f'a head of another kind, {head.kind}'}: train one "
            f"(clearhead train RECIPE --from MODEL), or in Python ch.load(folder, head="
            f"{own or repr(kind)}).",
        )

    def _check_writes(self) -> None:
        """Refuse to write text with a model that was not made for it."""
        require(
            self.config.shape in ("decoder", "encoder-decoder"),
            f"A {self.config.kind} is an encoder and cannot generate text: use a decoder or an "
            "encoder-decoder.",
        )
        require(
            isinstance(self.net.head, LMHead),
            "This model has no language-model head, so it cannot generate text.",
        )

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ClearheadError(
                "This model has no tokenizer, so it takes ids and not text: model(ids), or set "
                "model.tokenizer."
            )
        return self.tokenizer

    def _text_len(self) -> int:
        own = self._tokenizer().max_len
        return self.config.max_len if own is None else min(own, self.config.max_len)

    def _generation(self, key: str) -> Any:
        """A setting that came with the model for generation."""
        return self.companions.get(FILE, {}).get(key)

    def _options(self, settings: Mapping[str, Any]) -> Options:
        """What a call says, and what came with the model."""
        said, size = self.companions.get(FILE, {}), self._vocabularies(2)[1]
        options = read_options(settings, said, self._tokenizer().target, size)
        if isinstance(options.way, Beam):
            self._check_room(options.way.width, size)
        return options

    def _check_room(self, beams: int, size: int) -> None:
        """Refuse a search whose logits alone, kept twice in a step, are more than the memory."""
        need, free = 2 * 4 * beams * size, read_memory().available
        on_cpu = next(self.net.parameters()).device.type == "cpu"
        require(
            not on_cpu or free is None or need <= free,
            f"beams is {beams}, and a step of that search takes {need / 1e9:.0f} GB for its logits "
            f"alone; {(free or 0) / 1e9:.0f} GB are free. Search with fewer: 4, say.",
        )

    def _request(
        self, prompts: Sequence[str], settings: Mapping[str, Any]
    ) -> tuple[Options, list[list[int]], list[list[int]] | None]:
        """The settings, the ids that texts begin with, and an encoder-decoder's sources."""
        tokenizer = self._tokenizer()
        self._check_writes()
        options = self._options(settings)
        require(len(prompts) > 0, "There are no prompts: give at least one.")
        for prompt in prompts:
            require(isinstance(prompt, str), f"A prompt is text, not {prompt!r:.60}.")
        ids = tokenizer.encode_batch(prompts)
        if isinstance(self.net, EncoderDecoder):
            require(all(ids), "A source is empty: give it at least one token.")
        else:
            ids = [given or self._empty_prompt() for given in ids]
        for given in ids:
            check_ids(torch.tensor(given), self.config.vocab_size)
        if not isinstance(self.net, EncoderDecoder):
            return options, ids, None
        return options, [self._start_ids()] * len(ids), ids

    def _empty_prompt(self) -> list[int]:
        """Where a text begins when nothing is given: behind the begin token, or behind the end of
        another text.
        """
        tokenizer = self._tokenizer()
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        require(
            begin is not None,
            "The prompt is empty, and this tokeniser has no token that begins a text: give at "
            "least one token to start from.",
        )
        return [int(begin)]  # type: ignore[arg-type]

    def _write(
        self, ids: list[list[int]], options: Options, sources: list[list[int]] | None = None
    ) -> Generator[Piece, None, list[list[Written]]]:
        kept = self.prefixes if options.remember else None
        target, most = self._tokenizer().target, self.config.max_len
        return write_texts(self._quick(self.net), target, ids, options, most, sources, kept)

    def _stream(
        self, ids: list[list[int]], options: Options, sources: list[list[int]] | None
    ) -> Generator[str, None, Written]:
        require(options.n == 1, "stream writes one text: n is for generate.")
        pieces = self._write(ids, options, sources)
        while True:
            try:
                yield next(pieces)[1]
            except StopIteration as end:
                return end.value[0][0]

    def _start_ids(self) -> list[int]:
        """What an encoder-decoder's target starts with: never the begin token alone."""
        start = self._generation("decoder_start_token_id")
        if start is None:
            start = self._tokenizer().pad_id
        require(
            start is not None,
            "It is not known which token this model's targets start with: set "
            'model.companions["generation_config.json"]["decoder_start_token_id"].',
        )
        first = self._generation("forced_bos_token_id")
        return [int(start)] if first is None else [int(start), int(first)]

    # -- files

    def save(self, folder: str | Path) -> None:
        """Write the model's folder, whole or not at all."""
        save_model(self.net, self.config, folder, self.write_companions)

    def write_companions(self, folder: Path) -> None:
        """Write the tokeniser and the settings that belong to the model into a folder."""
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        for name, content in self.companions.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")

    def __repr__(self) -> str:
        count = count_weights(self.net)
        return f"Model({self.config.kind}, {self.config.shape}, {count:,} parameters)"


def _result(found: Sequence[Written], options: Options) -> Any:
    """What was asked of one prompt's texts."""
    results = list(found) if options.details else [one.text for one in found]
    return results[0] if options.n == 1 else results
