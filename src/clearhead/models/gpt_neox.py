"""GPT-NeoX: a decoder whose attention and feed-forward read the stream side by side (Black et al.
2022).

Quirks: only a quarter of each head is rotated; queries, keys and values are stored head by head in
one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.mask import Causal
from clearhead.attention.spec import AttentionConfig, AttentionPosition, Geometry, RopeConfig
from clearhead.errors import ClearheadError
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.position import AddedPosition
from clearhead.layers.stack import StackConfig, Topology
from clearhead.models.base import Decoder
from clearhead.models.family import FamilyConfig, Shape, decoder, split_position
from clearhead.models.heads import HeadConfig, HeadStyle, LMConfig
from clearhead.models.hf import (
    OUR_LAYOUT,
    head_keys,
    head_of,
    hf_activation,
    hf_only,
    hf_value,
    linear_keys,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, FusedByHead, Table


@dataclass(frozen=True)
class Config(FamilyConfig, kind="gpt_neox"):
    """A GPT-NeoX; the defaults are those of Pythia 160M."""

    shape: ClassVar[Shape] = "decoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 50304
    """How many tokens there are."""
    d_model: int = 768
    """Width of the residual stream."""
    n_layers: int = 12
    """How many blocks."""
    n_heads: int = 12
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    max_len: int = 2048
    """How many positions the model was made for."""
    dropout: float = 0.0
    """On embeddings, sublayers and attention weights."""
    position: AddedPosition | AttentionPosition | None = RopeConfig(fraction=0.25)
    """How positions enter."""
    topology: Topology = "parallel"
    """Attention and feed-forward side by side, or one after the other."""
    norm: LayerNormConfig = LayerNormConfig()
    """The normalisation."""
    activation: Activation = "gelu"
    """The bend of the feed-forward."""
    head: HeadConfig | None = LMConfig(tied=False)
    """What the last states are turned into."""

    def to_embed(self) -> EmbedConfig:
        """Tokens, without positions unless one is added."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(self.vocab_size, self.d_model, added, dropout=self.dropout)

    def to_stack(self) -> StackConfig:
        """The blocks."""
        _, inside = split_position(self.position, self.max_len)
        geometry = Geometry(self.d_model, self.n_heads)
        return StackConfig(
            self.n_layers,
            (AttentionConfig(geometry, mask=Causal(), position=inside, dropout=self.dropout),),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            self.norm,
            topology=self.topology,
            dropout=self.dropout,
        )

    def network(self) -> Decoder:
        style = HeadStyle(self.d_model, self.vocab_size, "last", bias=False, dropout=self.dropout)
        return decoder(self.to_embed(), self.to_stack(), self.head, style)


PREFIX = "gpt_neox."
HEADS = {
    "lm": "GPTNeoXForCausalLM",
    "none": "GPTNeoXModel",
    "classification": "GPTNeoXForSequenceClassification",
    "tagging": "GPTNeoXForTokenClassification",
    "span": "GPTNeoXForQuestionAnswering",
}
HEAD_KEYS = {
    "lm": {"embed_out.weight": "head.proj.weight"},
    "classification": {"score.weight": "head.proj.weight"},
    "tagging": linear_keys("classifier", "head.proj"),
    "span": linear_keys("qa_outputs", "head.proj"),
}
BLOCK = "stack.blocks.{i}."
LAYER = "gpt_neox.layers.{i}."


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {
        "gpt_neox.embed_in.weight": "embed.tokens.weight",
        LAYER + "attention.bias": Dropped("the causal mask, which is a formula here"),
        LAYER + "attention.masked_bias": Dropped("a constant of the causal mask"),
        LAYER + "attention.rotary_emb.inv_freq": Dropped("rotary angles, which are computed here"),
    }
    names = {
        LAYER + "input_layernorm": BLOCK + "self_residual.norm",
        LAYER + "post_attention_layernorm": BLOCK + "ffn_residual.norm",
        LAYER + "attention.dense": BLOCK + "self_attn.out_proj",
        LAYER + "mlp.dense_h_to_4h": BLOCK + "ffn.in_proj",
        LAYER + "mlp.dense_4h_to_h": BLOCK + "ffn.out_proj",
        "gpt_neox.final_layer_norm": "stack.norm",
    }
    for kind in ("weight", "bias"):
        table |= {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in names.items()}
        fused = FusedByHead(BLOCK + "self_attn.{}_proj." + kind, config.n_heads)
        table[LAYER + f"attention.query_key_value.{kind}"] = fused
    return table | head_keys(config.head, HEAD_KEYS)


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    rope = hf_value(hf, "rope_parameters", "rope_scaling", default={})
    hf_only({"rope_type": hf_value(rope, "rope_type", "type")}, rope_type="default")
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        d_ff=hf["intermediate_size"],
        max_len=hf["max_position_embeddings"],
        dropout=hf_value(hf, "hidden_dropout", default=0.0),
        position=RopeConfig(
            float(
                hf_value(
                    hf, "rotary_emb_base", default=hf_value(rope, "rope_theta", default=10000.0)
                )
            ),
            hf_value(
                hf, "rotary_pct", default=hf_value(rope, "partial_rotary_factor", default=0.25)
            ),
        ),
        topology="parallel" if hf_value(hf, "use_parallel_residual", default=True) else "sequence",
        norm=LayerNormConfig(hf_value(hf, "layer_norm_eps", default=1e-5)),
        activation=hf_activation(hf_value(hf, "hidden_act", default="gelu")),
        head=head_of(hf, HEADS, "lm", hf_value(hf, "tie_word_embeddings", default=False)),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    rope = config.position
    if not isinstance(rope, RopeConfig) or rope.scaling is not None:
        raise ClearheadError(
            "Hugging Face's GPT-NeoX has plain rotary positions; this model differs. " + OUR_LAYOUT
        )
    return write_head(config.head, HEADS, "GPT-NeoX") | {
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "max_position_embeddings": config.max_len,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.fraction,
        },
        "use_parallel_residual": config.topology == "parallel",
        "layer_norm_eps": config.norm.eps,
        "hidden_act": to_hf_activation(config.activation),
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
