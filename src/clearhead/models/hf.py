"""What the families share to read and write Hugging Face configs.

A family's file gives `HEADS` ({our head: their architecture}), `from_hf(hf, names)` and
`to_hf(config)`; the words that are the same everywhere are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.models.heads import (
    ClassificationConfig,
    HeadConfig,
    LMConfig,
    MaskedLMConfig,
    PoolingConfig,
    SpanConfig,
    TaggingConfig,
)

# Their word -> ours; of several for the same function the first is the one we write.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
    "relu2": "relu_squared",
}

# Their words for sizes: whole numbers from 1 on.
SIZES = frozenset(
    "vocab_size hidden_size n_embd dim d_model intermediate_size n_inner hidden_dim d_ff "  # noqa: SIM905
    "encoder_ffn_dim num_hidden_layers n_layer n_layers num_layers num_decoder_layers "
    "encoder_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "encoder_attention_heads num_key_value_heads head_dim d_kv max_position_embeddings n_positions "
    "max_source_positions max_target_positions original_max_position_embeddings sliding_window "
    "relative_attention_num_buckets relative_attention_max_distance num_mel_bins "
    "image_size patch_size num_channels projection_dim num_labels".split()
)
EPSILONS = frozenset({"layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"})
PARTS = ("text_config", "vision_config", "rope_parameters", "rope_scaling")
LARGEST = 1 << 24  # beyond all published models, and two of them can still be multiplied

# Their words for rates of dropout; here a model has one (llama a second, for attention weights).
RATES = (
    "dropout dropout_rate hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop "  # noqa: SIM905
    "attention_dropout attention_probs_dropout_prob attn_pdrop activation_dropout "
    "classifier_dropout classif_dropout seq_classif_dropout qa_dropout".split()
)

# How an architecture's name ends -> their class that opens it; other heads are AutoModelFor...
AUTO = {
    "WhisperForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "LMHeadModel": "AutoModelForCausalLM",
}

# Their problem_type -> how many labels are true of a text; they leave it out where it is one.
PROBLEMS: dict[str, Literal["one", "several", "none"]] = {
    "multi_label_classification": "several",
    "regression": "none",
}

Heads = Mapping[str, str]
OUR_LAYOUT = "Save it in our own layout with model.save(folder)."


def hf_value(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of these settings that a Hugging Face config has and that is not null."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def hf_only(config: Mapping[str, Any], **settings: Any) -> None:
    """Refuse a config that sets any of these otherwise: we would compute something else."""
    for name, supported in settings.items():
        value = config.get(name)
        if value is not None and value != supported:
            raise ClearheadError(
                f"Its config says {name} = {value!r}, and only {supported!r} is supported here."
            )


def hf_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is computed from them."""
    for name in sorted(SIZES & config.keys()):
        size = config[name]
        if size is not None and (type(size) is not int or not 1 <= size <= LARGEST):
            raise ClearheadError(
                f"Its config says {name} = {str(size)[:40]}, which must be a whole number from 1 "
                f"to {LARGEST:,}."
            )
    for name in sorted(EPSILONS & config.keys()):
        value = config[name]
        if isinstance(value, (int, float)) and not value >= 0:
            raise ClearheadError(f"Its config says {name} = {value}, which must be 0 or more.")
    for part in PARTS:
        if isinstance(config.get(part), Mapping):
            hf_sizes(config[part])


def hf_rates(config: Mapping[str, Any]) -> dict[str, float]:
    """The rates of dropout that a config says, those of its parts as well."""
    found = {name: config[name] for name in RATES if isinstance(config.get(name), (int, float))}
    for part in PARTS:
        if isinstance(config.get(part), Mapping):
            found |= {f"{part}.{name}": rate for name, rate in hf_rates(config[part]).items()}
    return found


def auto_class(architecture: str) -> str:
    """The class of transformers that opens an architecture by the folder alone."""
    for end, auto in AUTO.items():
        if architecture.endswith(end):
            return auto
    _, found, head = architecture.partition("For")
    return "AutoModel" + found + head


def hf_activation(name: str) -> Any:
    """Our word for an activation function of theirs."""
    if name not in ACTIVATIONS:
        raise ClearheadError(
            f'The activation "{name}" is not known here.{did_you_mean(name, ACTIVATIONS)} '
            f"Known: {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def to_hf_activation(name: str) -> str:
    """Their word for an activation function of ours."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def read_head(hf: Mapping[str, Any], heads: Heads, default: str) -> str:
    """Which of our heads a config's architecture has: a key of `heads` ("none": bare states)."""
    named = hf_value(hf, "architectures", default=[])
    if not named:
        return default
    for ours, theirs in heads.items():
        if theirs == named[0]:
            return ours
    raise ClearheadError(
        f'The architecture "{named[0]}" is not supported.{did_you_mean(named[0], heads.values())} '
        f"Supported for this kind of model: {', '.join(heads.values())}."
    )


def head_of(hf: Mapping[str, Any], heads: Heads, default: str, tied: bool) -> HeadConfig | None:
    """The head that a config's architecture has, in our words."""
    kind, labels = read_head(hf, heads, default), read_labels(hf)
    true = PROBLEMS.get(str(hf.get("problem_type")), "one")
    made: dict[str, HeadConfig | None] = {
        "none": None,
        "lm": LMConfig(tied),
        "masked_lm": MaskedLMConfig(tied),
        "pooling": PoolingConfig(dense=True),
        "classification": ClassificationConfig(labels, true),
        "tagging": TaggingConfig(labels),
        "span": SpanConfig(),
    }
    return made[kind]


def head_keys(head: HeadConfig | None, tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The rows of a key table that belong to this head."""
    return dict(tables.get("none" if head is None else head.kind, {}))


def linear_keys(theirs: str, ours: str) -> dict[str, str]:
    """A weight and its bias."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


def read_labels(hf: Mapping[str, Any]) -> int:
    """How many labels a classifier has (theirs are two where nothing is said)."""
    return hf_value(hf, "num_labels", default=len(hf_value(hf, "id2label", default=(0, 1))))


def write_head(head: HeadConfig | None, heads: Heads, model: str) -> dict[str, Any]:
    """Their words for a head: the architecture, and as many labels as it has."""
    kind = "none" if head is None else head.kind
    if kind not in heads:
        raise ClearheadError(
            f'A {model} with the head "{kind}" has no architecture in transformers. '
            f"It has one for: {', '.join(heads)}. {OUR_LAYOUT}"
        )
    if isinstance(head, PoolingConfig) and head.dense:
        require(
            head.mode in (None, "first") and not head.normalise,
            f"The pooler of transformers' {model} takes the first token and leaves the length as "
            f"it is; this model's differs. {OUR_LAYOUT}",
        )
    said: dict[str, Any] = {"architectures": [heads[kind]]}
    count = getattr(head, "n_labels", None)
    if count is not None:
        said["id2label"] = {str(i): f"LABEL_{i}" for i in range(count)}
        said["label2id"] = {f"LABEL_{i}": i for i in range(count)}
    for problem, true in PROBLEMS.items():
        if true == getattr(head, "true", "one"):
            said["problem_type"] = problem
    return said
