"""Peers of throughput.py: models of PyTorch, x-transformers and transformers with given weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from train_step import VOCAB, Contender, Shape, cross_entropy

# --- decoders ---


def make_x_transformers(shape: Shape) -> Contender:
    """A decoder of x-transformers with its fused attention; the rest is as it comes."""
    from x_transformers import Decoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=VOCAB,
        max_seq_len=shape.length,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=shape.width,
            depth=shape.layers,
            heads=shape.heads,
            attn_dim_head=shape.width // shape.heads,
            attn_flash=True,
        ),
    ).train()
    return Contender(net, lambda ids, targets: cross_entropy(net(ids), targets))


class TorchDecoder(nn.Module):
    """A GPT-2 made of nn.TransformerEncoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, shape.width)
        self.wpe = nn.Embedding(shape.length, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        final = nn.LayerNorm(shape.width)
        self.encoder = nn.TransformerEncoder(
            layer, shape.layers, norm=final, enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(shape.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, by the token table."""
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        x = self.encoder(x, mask=self.mask, is_causal=True)
        return x @ self.wte.weight.T


def make_torch_encoder(shape: Shape, weights: dict[str, Tensor]) -> Contender:
    """nn.TransformerEncoder with GPT-2's weights, whose matrices stand [in, out]."""
    names = {
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn.": "self_attn.in_proj_",
        "attn.c_proj": "self_attn.out_proj",
        "mlp.c_fc": "linear1",
        "mlp.c_proj": "linear2",
        "transformer.ln_f": "encoder.norm",
        "transformer.h.": "encoder.layers.",
        "transformer.": "",
    }
    turned = {
        renamed(name, names): w.T if ".c_" in name and w.dim() == 2 else w
        for name, w in weights.items()
        if name != "lm_head.weight"
    }
    net = TorchDecoder(shape).train()
    net.load_state_dict(turned)
    return Contender(net, lambda ids, targets: cross_entropy(net(ids), targets))


def renamed(name: str, table: dict[str, str]) -> str:
    """Each part of a name in other words."""
    for theirs, other in table.items():
        name = name.replace(theirs, other)
    return name


# --- encoder-decoders ---


class TorchTranslator(nn.Module):
    """nn.Transformer with one matrix for both embeddings and the output."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.transformer = nn.Transformer(
            config.d_model,
            config.n_heads,
            config.n_layers,
            config.n_layers,
            config.d_ff,
            dropout=0.0,
            batch_first=True,
        )
        place = torch.arange(config.max_len)[:, None]
        angles = place / 10000 ** (torch.arange(0, config.d_model, 2) / config.d_model)
        sines = torch.cat([angles.sin(), angles.cos()], dim=-1)
        self.register_buffer("sines", sines, persistent=False)
        after = torch.ones(config.max_len, config.max_len, dtype=torch.bool).triu(1)
        self.register_buffer("after", after, persistent=False)

    def forward(self, source: Tensor, target: Tensor, no_source: Tensor, no_target: Tensor) -> Any:
        """Logits; the masks say which slots hold nothing."""
        length = target.shape[1]
        x = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=self.after[:length, :length],
            src_key_padding_mask=no_source,
            tgt_key_padding_mask=no_target,
            memory_key_padding_mask=no_source,
            tgt_is_causal=True,
        )
        return x @ self.tokens.weight.T

    def _embed(self, ids: Tensor) -> Tensor:
        scale = math.sqrt(self.tokens.embedding_dim)
        return self.tokens(ids) * scale + self.sines[: ids.shape[1]]

    @staticmethod
    def filled(config: Any, weights: dict[str, Tensor]) -> TorchTranslator:
        """With Marian's weights; q, k and v are one matrix here, and the two last norms, which
        Marian lacks, change nothing at first: what they get is normalised.
        """
        net = TorchTranslator(config)
        slots = dict(net.named_parameters())
        for name, tensor in weights.items():
            place, part = theirs_to_torch(name)
            target = slots[place].data
            (target if part is None else target.chunk(3)[part]).copy_(tensor)
        return net


def theirs_to_torch(name: str) -> tuple[str, int | None]:
    """Marian's name for a parameter as nn.Transformer's, and which third of it that is."""
    if name == "model.shared.weight":
        return "tokens.weight", None
    norms = ("norm1", "norm2", "norm3") if ".decoder." in name else ("norm1", "", "norm2")
    table = {
        "model.": "transformer.",
        "self_attn_layer_norm": norms[0],
        "encoder_attn_layer_norm": norms[1],
        "final_layer_norm": norms[2],
        "encoder_attn": "multihead_attn",
        "fc1": "linear1",
        "fc2": "linear2",
    }
    name = renamed(name, table)
    for part, which in enumerate("qkv"):
        if f".{which}_proj." in name:
            return name.replace(f".{which}_proj.", ".in_proj_"), part
    return name, None


class Marian(nn.Module):
    """transformers' MarianMTModel."""

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        from transformers import MarianConfig, MarianMTModel

        super().__init__()
        size = {
            f"{side}_{what}": value
            for side in ("encoder", "decoder")
            for what, value in (
                ("layers", config.n_layers),
                ("attention_heads", config.n_heads),
                ("ffn_dim", config.d_ff),
            )
        }
        theirs = MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            max_position_embeddings=config.max_len,
            activation_function="relu",
            scale_embedding=True,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
            **size,
        )
        theirs._attn_implementation = "sdpa"
        self.net = MarianMTModel(theirs)
        left = self.net.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys, f"not used: {left.unexpected_keys}"
        tied = ("embed_tokens.weight", "embed_positions.weight", "lm_head.weight", "logits_bias")
        lacking = [name for name in left.missing_keys if not name.endswith(tied)]
        assert not lacking, f"not filled: {lacking}"

    def forward(self, source: Tensor, target: Tensor, no_source: Tensor, no_target: Tensor) -> Any:
        """Logits; behind its end a target is not asked for, so it needs no mask there."""
        return self.net(
            input_ids=source, attention_mask=(~no_source).long(), decoder_input_ids=target
        ).logits
