"""The table of architectures that can be loaded, with every head.

For each a tiny random model of `transformers`, its inputs, and how its output and ours are
compared.

`test_battery.py` runs everything it knows over every row: a new family gets all of it for its rows
here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor

from clearhead.attention.positions import Positions

tf.utils.logging.disable_progress_bar()

VOCAB, LABELS = 99, 3
LENGTHS = (5, 11, 1, 8)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Side = Literal["left", "right"]
How = Literal["given", "counted", "own"]
# Where the empty slots are, and who says at which positions the others stand:
#   given     theirs is told ours (position_ids)
#   counted   theirs counts the empty slots too, and ours is told so
#   own       both find the same by themselves
Padding = tuple[Side, How]
BOTH: tuple[Padding, ...] = (
    ("right", "given"),
    ("left", "given"),
    ("right", "counted"),
    ("left", "counted"),
)
RIGHT: tuple[Padding, ...] = (("right", "given"), ("right", "counted"))
OWN: tuple[Padding, ...] = (("right", "own"), ("left", "own"))


@dataclass(frozen=True)
class Case:
    """One call of both."""

    theirs: dict[str, Tensor]
    """By name."""
    ours: tuple[Tensor, ...]
    """The same inputs, in order."""
    more: dict[str, Any] = field(default_factory=dict)
    """Where they stand, in our words."""
    real: Tensor | None = None
    """Which slots of the output hold a token; None: all of them."""


# --- what goes in ---


def words(rows: int, length: int) -> Tensor:
    return torch.randint(5, VOCAB - 9, (rows, length))


def places(side: Side, how: How) -> tuple[Tensor, Positions]:
    """Which slots are filled, and where these stand in our words."""
    at = Positions.ragged(LENGTHS, side)
    if how == "counted":
        index = torch.arange(max(LENGTHS)).expand(len(LENGTHS), -1)
        return at.filled(), Positions.of(index.where(at.filled(), torch.tensor(-1)))
    return at.filled(), at


class Text:
    """Ids, and segments where the model has them."""

    def __init__(self, types: bool = False, pooled: bool = False) -> None:
        self.types, self.pooled = types, pooled

    def _with_types(self, theirs: dict[str, Tensor], more: dict[str, Any]) -> None:
        if self.types:
            theirs["token_type_ids"] = torch.randint(0, 2, theirs["input_ids"].shape)
            more["types"] = theirs["token_type_ids"]

    def whole(self) -> Case:
        ids = words(2, 23)  # beyond a window of 4 and the 16 positions before a scaling
        theirs, more = {"input_ids": ids}, {}
        self._with_types(theirs, more)
        return Case(theirs, (ids,), more)

    def ragged(self, side: Side, how: How, empty: int | None) -> Case:
        real, at = places(side, how)
        ids = words(*real.shape)
        ids = ids if empty is None else ids.where(real, torch.tensor(empty))
        theirs, more = {"input_ids": ids, "attention_mask": real.long()}, {"at": at}
        if how == "given":
            theirs["position_ids"] = at.pos.clamp(min=0)
        self._with_types(theirs, more)
        return Case(theirs, (ids,), more, None if self.pooled else real)


class SourceAndTarget:
    """Ids of two texts, both ragged."""

    def whole(self) -> Case:
        source, target = words(2, 23), words(2, 19)  # beyond the last bucket of distances
        return Case({"input_ids": source, "decoder_input_ids": target}, (source, target))

    def ragged(self, side: Side, how: How, empty: int | None) -> Case:
        real, at = places(side, how)
        source, target = words(*real.shape), words(*real.shape)
        # Each row's source is as long as another row's target.
        theirs = {
            "input_ids": source,
            "attention_mask": real.flip(0).long(),
            "decoder_input_ids": target,
            "decoder_attention_mask": real.long(),
        }
        more = {"source_at": Positions.of(at.pos.flip(0)), "target_at": at}
        return Case(theirs, (source, target), more, real)


class Pixels:
    """Images; they have no padding."""

    def whole(self) -> Case:
        pixels = torch.randn(2, 3, 16, 16)
        return Case({"pixel_values": pixels}, (pixels,))


class TextAndPixels:
    """A text that ends with the end token, and images."""

    def whole(self) -> Case:
        ids, pixels = words(2, 11), torch.randn(3, 3, 16, 16)
        ids[:, -1] = VOCAB - 1
        return Case({"input_ids": ids, "pixel_values": pixels}, (ids, pixels))

    def ragged(self, side: Side, how: How, empty: int | None) -> Case:
        real, at = places(side, how)
        ids, pixels = words(*real.shape), torch.randn(3, 3, 16, 16)
        ids[torch.arange(len(LENGTHS)), at.pos.argmax(dim=1)] = VOCAB - 1
        theirs = {"input_ids": ids, "pixel_values": pixels, "attention_mask": real.long()}
        if how == "given":
            theirs["position_ids"] = at.pos.clamp(min=0)
        return Case(theirs, (ids, pixels), {"at": at})


class SoundAndTarget:
    """Frames, always as many, and a text, which may be ragged."""

    def whole(self) -> Case:
        mel, target = torch.randn(2, 8, 20), words(2, 19)
        return Case({"input_features": mel, "decoder_input_ids": target}, (mel, target))

    def ragged(self, side: Side, how: How, empty: int | None) -> Case:
        real, at = places(side, how)
        mel, target = torch.randn(len(LENGTHS), 8, 20), words(*real.shape)
        theirs = {
            "input_features": mel,
            "decoder_input_ids": target,
            "decoder_attention_mask": real.long(),
        }
        if how == "given":
            theirs["decoder_position_ids"] = at.pos.clamp(min=0)
        return Case(theirs, (mel, target), {"target_at": at}, real)


# --- what comes out ---


def logits(out: Any, case: Case) -> Tensor:
    return out.logits


def states(out: Any, case: Case) -> Tensor:
    return out.last_hidden_state


def pooler(out: Any, case: Case) -> Tensor:
    return out.pooler_output


def masked(out: Any, case: Case) -> Tensor:
    return out.prediction_logits


def span(out: Any, case: Case) -> Tensor:
    return torch.stack((out.start_logits, out.end_logits), dim=-1)


def similarity(out: Any, case: Case) -> Tensor:
    return out.logits_per_text


def sentence(out: Any, case: Case) -> Tensor:
    """What sentence-transformers does: the mean of the filled slots, of length 1."""
    x = out.last_hidden_state
    mask = case.theirs.get("attention_mask", torch.ones(x.shape[:2])).unsqueeze(2)
    return F.normalize((x * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


# --- the rows ---

POOLER = {"kind": "pooling", "mode": "first", "dense": True}
SENTENCE = {"kind": "pooling", "mode": "mean", "normalise": True}
SEQ2SEQ_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
POOLER_KEYS = frozenset({"pooler.dense.weight", "pooler.dense.bias"})


@dataclass(frozen=True)
class Row:
    """An architecture with one head."""

    name: str
    """What the tests call it."""
    make: Callable[[], tf.PreTrainedModel]
    """Their model, with weights as they draw them."""
    auto: str
    """Their class that opens what we export."""
    feed: Any
    """The inputs: `whole()`, and `ragged(side, how, empty)` where there is padding."""
    read: Callable[[Any, Case], Tensor] = logits
    """The tensor of their outputs that ours is."""
    head: Any = None
    """The head that we ask for; None: the file's own."""
    padding: tuple[Padding, ...] = ()
    """The ragged batches that mean something to both."""
    empty: int | None = None
    """What must stand in empty slots, where theirs finds them by their id; None: any token."""
    unfilled: frozenset[str] = frozenset()
    """Parameters of theirs that our export does not have, because our model has no such head."""
    exports: str = ""
    """Their architecture after the export, if it is another one."""
    beside: Callable[[Path], None] | None = None
    """Writes what belongs beside the weights."""
    check: bool = False
    """Whether `clearhead import --check` is tried as well."""

    @property
    def generates(self) -> bool:
        """Whether it makes one token after the other."""
        return self.auto in ("AutoModelForCausalLM", *SEQ2SEQ_CLASSES)

    def __str__(self) -> str:
        return self.name


def randomise(hf: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Every weight away from where it was made: no norm is 1, no bias 0. Sines stay sines."""
    kind = hf.config.model_type
    # T5's scores are not scaled down: smaller weights keep rounding errors small.
    size = 0.1 if kind == "t5" else 0.2
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if kind != "marian" or "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * size)
        for name, buffer in hf.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
    return hf.eval()


def _gpt2(kind: type, **more: Any) -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return kind(tf.GPT2Config(**sizes | TOKENS | {"num_labels": LABELS} | more))


def _llama(kind: type, rope: dict[str, Any] | None = None, **more: Any) -> tf.PreTrainedModel:
    if rope is not None:
        more["rope_parameters"] = {"rope_theta": 10000.0} | rope
    sizes = SIZES | TOKENS | {"num_key_value_heads": 2, "num_labels": LABELS}
    return kind(kind.config_class(**sizes | more))


def _neox(kind: type, **more: Any) -> tf.PreTrainedModel:
    return kind(tf.GPTNeoXConfig(**SIZES | TOKENS | {"num_labels": LABELS} | more))


def _bert(kind: type, **more: Any) -> tf.PreTrainedModel:
    return kind(kind.config_class(**SIZES | {"num_labels": LABELS} | more))


def _distilbert(kind: type, **more: Any) -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    sizes |= {"max_position_embeddings": 64, "num_labels": LABELS}
    return kind(tf.DistilBertConfig(**sizes | more))


def _t5(untied: bool = False, **more: Any) -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4}
    sizes |= {"num_layers": 2, "num_decoder_layers": 3, "decoder_start_token_id": 0}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    sizes |= {"initializer_factor": 0.2}
    hf = tf.T5ForConditionalGeneration(tf.T5Config(**sizes | more))
    if untied:  # their config cannot say it any more; the published files still are
        hf.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32) * 0.2)
    return hf


SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def _bart() -> tf.PreTrainedModel:
    return tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64))


def _marian() -> tf.PreTrainedModel:
    more = {"max_position_embeddings": 64, "decoder_vocab_size": VOCAB, "scale_embedding": True}
    return tf.MarianMTModel(tf.MarianConfig(**SEQ2SEQ, **more, activation_function="swish"))


def _whisper() -> tf.PreTrainedModel:
    sizes = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40}
    sizes |= {"decoder_start_token_id": 3}
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**sizes))


VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}


def _vit(kind: type) -> tf.PreTrainedModel:
    return kind(tf.ViTConfig(**VISION, num_labels=LABELS))


def _clip() -> tf.PreTrainedModel:
    text = SIZES | {"eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 2, "pad_token_id": 0}
    config = tf.CLIPConfig(
        text_config=text, vision_config=VISION | {"num_hidden_layers": 3}, projection_dim=24
    )
    return tf.CLIPModel(config)


def sentence_files(folder: Path) -> None:
    """What sentence-transformers writes beside a body."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    modes = {"cls_token": False, "mean_tokens": True, "max_tokens": False}
    pooling = {"word_embedding_dimension": 32} | {f"pooling_mode_{k}": v for k, v in modes.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
    }.items():
        (folder / name).write_text(json.dumps(content))


ROPES: Mapping[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


AUTO = {
    "lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "none": "AutoModel",
    "pooling": "AutoModel",
    "classification": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
READ = {"none": states, "pooling": pooler, "span": span}
POOLED = ("classification", "pooling")


def _causal(name: str, kind: str, make: Callable[[], Any], **more: Any) -> Row:
    """A decoder: the last token, found by what is not padding, speaks for the text."""
    pooled = kind in POOLED
    more = {"padding": BOTH, "empty": 0 if pooled else None} | more
    more = {"read": READ.get(kind, logits)} | more
    return Row(f"{name} {kind}", make, AUTO[kind], Text(pooled=pooled), **more)


def _both_ways(name: str, kind: str, make: Callable[[], Any], types: bool, **more: Any) -> Row:
    """An encoder: theirs takes slot 0 for the whole text, so that must be filled."""
    pooled = kind in POOLED
    more = {"padding": RIGHT if pooled else BOTH, "read": READ.get(kind, logits)} | more
    return Row(f"{name} {kind}", make, AUTO[kind], Text(types, pooled), **more)


def _labels(kind: str) -> dict[str, int]:
    """A span has a start and an end and nothing else."""
    return {"num_labels": 2} if kind == "span" else {}


def _bert_row(kind: str, model: type, name: str = "bert", **more: Any) -> Row:
    return _both_ways(name, kind, lambda: _bert(model, **_labels(kind)), True, **more)


def _roberta_row(kind: str, model: type, name: str = "roberta", empty: int = 1, **more: Any) -> Row:
    # Theirs finds empty slots by their id, does not count them, and starts behind that id.
    padding = OWN[:1] if kind in POOLED else OWN
    tokens = {"type_vocab_size": 1, "pad_token_id": empty, "max_position_embeddings": 66}
    tokens |= _labels(kind)
    more = {"padding": padding, "empty": empty} | more
    return _both_ways(name, kind, lambda: _bert(model, **tokens), False, **more)


def _distilbert_row(kind: str, model: type, name: str = "distilbert", **more: Any) -> Row:
    return _both_ways(name, kind, lambda: _distilbert(model, **_labels(kind)), False, **more)


ROWS = [
    # decoders
    _causal("gpt2", "lm", lambda: _gpt2(tf.GPT2LMHeadModel), check=True),
    _causal("gpt2 untied", "lm", lambda: _gpt2(tf.GPT2LMHeadModel, tie_word_embeddings=False)),
    _causal("gpt2", "none", lambda: _gpt2(tf.GPT2Model)),
    _causal("gpt2", "classification", lambda: _gpt2(tf.GPT2ForSequenceClassification), check=True),
    _causal("gpt2", "tagging", lambda: _gpt2(tf.GPT2ForTokenClassification)),
    _causal("gpt2", "span", lambda: _gpt2(tf.GPT2ForQuestionAnswering)),
    _causal("llama", "lm", lambda: _llama(tf.LlamaForCausalLM)),
    _causal("llama tied", "lm", lambda: _llama(tf.LlamaForCausalLM, tie_word_embeddings=True)),
    _causal("llama", "none", lambda: _llama(tf.LlamaModel)),
    _causal("llama", "classification", lambda: _llama(tf.LlamaForSequenceClassification)),
    _causal("llama", "tagging", lambda: _llama(tf.LlamaForTokenClassification)),
    *[
        _causal(f"llama rope {name}", "lm", lambda rope=rope: _llama(tf.LlamaForCausalLM, rope))
        for name, rope in ROPES.items()
    ],
    _causal("mistral", "lm", lambda: _llama(tf.MistralForCausalLM, sliding_window=4)),
    _causal("qwen2", "lm", lambda: _llama(tf.Qwen2ForCausalLM)),
    _causal(
        "qwen3",
        "lm",
        lambda: _llama(tf.Qwen3ForCausalLM, head_dim=16, tie_word_embeddings=True),
        check=True,
    ),
    _causal(
        "llama biased",
        "lm",
        lambda: _llama(tf.LlamaForCausalLM, attention_bias=True, mlp_bias=True),
        check=True,
    ),
    _causal("qwen3 biased", "lm", lambda: _llama(tf.Qwen3ForCausalLM, attention_bias=True)),
    _causal("neox", "lm", lambda: _neox(tf.GPTNeoXForCausalLM)),
    _causal(
        "neox sequential",
        "lm",
        lambda: _neox(tf.GPTNeoXForCausalLM, use_parallel_residual=False, rotary_pct=0.5),
    ),
    _causal("neox", "none", lambda: _neox(tf.GPTNeoXModel)),
    _causal("neox", "classification", lambda: _neox(tf.GPTNeoXForSequenceClassification)),
    _causal("neox", "tagging", lambda: _neox(tf.GPTNeoXForTokenClassification)),
    _causal("neox", "span", lambda: _neox(tf.GPTNeoXForQuestionAnswering)),
    # encoders
    _bert_row("none", tf.BertModel, unfilled=POOLER_KEYS, check=True),
    _bert_row("pooling", tf.BertModel, head=POOLER),
    _bert_row("masked_lm", tf.BertForMaskedLM),
    _bert_row(
        "masked_lm",
        tf.BertForPreTraining,
        name="bert pretraining",
        read=masked,
        exports="BertForMaskedLM",
    ),
    _bert_row("classification", tf.BertForSequenceClassification),
    _bert_row("tagging", tf.BertForTokenClassification),
    _bert_row("span", tf.BertForQuestionAnswering, check=True),
    _bert_row(
        "pooling",
        tf.BertModel,
        name="sentence-transformers",
        read=sentence,
        padding=BOTH,
        unfilled=POOLER_KEYS,
        beside=sentence_files,
    ),
    _roberta_row("none", tf.RobertaModel, unfilled=POOLER_KEYS),
    _roberta_row("pooling", tf.RobertaModel, head=POOLER),
    _roberta_row("masked_lm", tf.RobertaForMaskedLM, check=True),
    _roberta_row("masked_lm", tf.RobertaForMaskedLM, "roberta padded with 0", empty=0),
    _roberta_row("classification", tf.RobertaForSequenceClassification),
    _roberta_row("tagging", tf.RobertaForTokenClassification),
    _roberta_row("span", tf.RobertaForQuestionAnswering),
    _distilbert_row("none", tf.DistilBertModel),
    _distilbert_row("masked_lm", tf.DistilBertForMaskedLM),
    _distilbert_row("classification", tf.DistilBertForSequenceClassification),
    _distilbert_row("tagging", tf.DistilBertForTokenClassification),
    _distilbert_row("span", tf.DistilBertForQuestionAnswering),
    _distilbert_row(
        "pooling",
        tf.DistilBertModel,
        "sentence-transformers distilbert",
        read=sentence,
        padding=BOTH,
        beside=sentence_files,
    ),
    # images
    Row(
        "vit classification",
        lambda: _vit(tf.ViTForImageClassification),
        "AutoModelForImageClassification",
        Pixels(),
        check=True,
    ),
    Row("vit none", lambda: _vit(tf.ViTModel), "AutoModel", Pixels(), states, unfilled=POOLER_KEYS),
    Row("vit pooling", lambda: _vit(tf.ViTModel), "AutoModel", Pixels(), pooler, head=POOLER),
    # encoder-decoders
    Row("t5 v1.0", _t5, "AutoModelForSeq2SeqLM", SourceAndTarget(), padding=OWN, check=True),
    Row(
        "t5 v1.1",
        lambda: _t5(untied=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "AutoModelForSeq2SeqLM",
        SourceAndTarget(),
        padding=OWN,
    ),
    Row(
        "marian",
        _marian,
        "AutoModelForSeq2SeqLM",
        SourceAndTarget(),
        padding=(("right", "own"), ("left", "counted")),
        check=True,
    ),
    Row(
        "bart",
        _bart,
        "AutoModelForSeq2SeqLM",
        SourceAndTarget(),
        padding=(("right", "own"), ("left", "counted")),
    ),
    Row(
        "whisper", _whisper, "AutoModelForSpeechSeq2Seq", SoundAndTarget(), padding=BOTH, check=True
    ),
    # two towers
    Row("clip", _clip, "AutoModel", TextAndPixels(), similarity, padding=BOTH, check=True),
]
