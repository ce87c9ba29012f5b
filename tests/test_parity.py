"""Parity with `transformers`: the same file gives the same numbers and gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import reference
from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError
from clearhead.weights.convert import to_ours, to_theirs
from clearhead.weights.folder import load_model, save_model
from clearhead.weights.hf import load_hf
from reference import check, edit_config, pair, tokens

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, a longer ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 100.0,
        "original_max_position_embeddings": 64,
    },
    "yarn, not rounded": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 100.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "yarn, two magnitudes": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, its own factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.7,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
}

DECODERS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": reference.gpt2,
    "gpt2, wide ffn, relu": lambda: reference.gpt2(n_inner=40, activation_function="relu"),
    "gpt2, untied": lambda: reference.gpt2(tie_word_embeddings=False),
    "mistral, window 4": reference.mistral,
    "mistral, no window": lambda: reference.mistral(sliding_window=None),
    "qwen2": reference.qwen2,
    "qwen2, tied": lambda: reference.qwen2(tie_word_embeddings=True),
    "qwen2, window 4": lambda: reference.qwen2(
        use_sliding_window=True, sliding_window=4, max_window_layers=0
    ),
    "qwen2, window in no layer": lambda: reference.qwen2(
        use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "qwen2, window not used": lambda: reference.qwen2(use_sliding_window=False, sliding_window=4),
    "qwen3": reference.qwen3,
    "qwen3, tied": lambda: reference.qwen3(tie_word_embeddings=True),
    "llama, no groups": lambda: reference.llama(num_key_value_heads=4),
    "llama, one key head": lambda: reference.llama(num_key_value_heads=1),
    "llama, tied": lambda: reference.llama(tie_word_embeddings=True),
    "neox, parallel": reference.neox,
    "neox, in sequence": lambda: reference.neox(use_parallel_residual=False),
    "neox, half rotary": lambda: reference.neox(rotary_pct=0.5),
    "neox, whole rotary": lambda: reference.neox(rotary_pct=1.0, rotary_emb_base=500),
} | {f"llama, rope {name}": lambda rope=rope: reference.llama(rope) for name, rope in ROPES.items()}

SEQ2SEQ: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "t5 v1.0": reference.t5,
    "t5 v1.1, tied": lambda: reference.t5(feed_forward_proj="gated-gelu"),
    "t5 v1.1, untied": lambda: reference.t5(
        untied=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "t5, gated silu": lambda: reference.t5(feed_forward_proj="gated-silu"),
}

POOLER = {"kind": "pooling", "mode": "first", "dense": True}


# --- whole batches ---


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name, tmp_path):
    p = pair(DECODERS[name](), tmp_path)
    ids = tokens(2, 23)  # longer than a window of 4 and than the 16 positions before a scaling
    check(p, p.hf(ids).logits, p.net(ids))


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder(name, tmp_path):
    p = pair(SEQ2SEQ[name](), tmp_path)
    source, target = tokens(2, 23), tokens(2, 19)  # beyond the last bucket of distances
    theirs = p.hf(input_ids=source, decoder_input_ids=target).logits
    check(p, theirs, p.net(source, target))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"hidden_act": "relu"}])
def test_bert_masked_lm(changes, tmp_path):
    hf = reference.bert(**changes)
    if not changes.get("tie_word_embeddings", True):
        hf.cls.predictions.bias = hf.cls.predictions.decoder.bias  # theirs keeps one that is unused
    p = pair(hf, tmp_path)
    ids, types = tokens(), torch.randint(0, 2, (2, 11))
    check(p, p.hf(ids, token_type_ids=types).logits, p.net(ids, types=types))


def test_bert_states(tmp_path):
    hf = transformers.BertModel(transformers.BertConfig(**reference.SIZES), add_pooling_layer=False)
    p = pair(hf, tmp_path, head=None)
    ids, types = tokens(), torch.randint(0, 2, (2, 11))
    states = p.hf(ids, token_type_ids=types).last_hidden_state
    check(p, states, p.net(ids, types=types))


def test_bert_pooler(tmp_path):
    p = pair(reference.bert(transformers.BertModel), tmp_path, head=POOLER)
    ids, types = tokens(4), torch.randint(0, 2, (4, 11))
    check(p, p.hf(ids, token_type_ids=types).pooler_output, p.net(ids, types=types))


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (transformers.BertForSequenceClassification, {"kind": "classification", "n_labels": 3}),
        (transformers.BertForTokenClassification, {"kind": "tagging", "n_labels": 3}),
    ],
)
def test_bert_labels(kind, head, tmp_path):
    p = pair(reference.bert(kind, num_labels=3), tmp_path, head=head)
    ids, types = tokens(), torch.randint(0, 2, (2, 11))
    check(p, p.hf(ids, token_type_ids=types).logits, p.net(ids, types=types))


def test_bert_span(tmp_path):
    p = pair(reference.bert(transformers.BertForQuestionAnswering), tmp_path, head="span")
    ids, types = tokens(), torch.randint(0, 2, (2, 11))
    theirs = p.hf(ids, token_type_ids=types)
    both = torch.stack((theirs.start_logits, theirs.end_logits), dim=2)
    check(p, both, p.net(ids, types=types))


def test_bert_without_types_is_segment_0(tmp_path):
    p = pair(reference.bert(), tmp_path)
    ids = tokens()
    check(p, p.hf(ids).logits, p.net(ids))


def test_body_without_its_prefix_is_recognised(tmp_path):
    config = reference.gpt2().config
    p = pair(transformers.GPT2Model(config), tmp_path, head=None)
    assert "wte.weight" in p.file
    ids = tokens()
    check(p, p.hf(ids).last_hidden_state, p.net(ids))


# --- padded batches ---

LENGTHS = (5, 11, 1, 8)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Positions]:
    """ids, real slots, their positions, our positions; what stands in empty slots is any token."""
    at = Positions.ragged(LENGTHS, side=side)
    real = at.filled()
    return tokens(len(LENGTHS), max(LENGTHS)), real, at.pos.clamp(min=0), at


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama, rope default", "llama, rope yarn", "mistral, window 4", "neox, parallel"],
)
def test_padded_decoder(name, side, tmp_path):
    p = pair(DECODERS[name](), tmp_path)
    ids, real, places, at = padded(side)
    theirs = p.hf(ids, attention_mask=real.long(), position_ids=places).logits
    check(p, theirs, p.net(ids, at), real)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_bert(side, tmp_path):
    p = pair(reference.bert(), tmp_path)
    ids, real, places, at = padded(side)
    theirs = p.hf(ids, attention_mask=real.long(), position_ids=places).logits
    check(p, theirs, p.net(ids, at), real)


@pytest.mark.parametrize("name", ["t5 v1.0", "t5 v1.1, untied"])
def test_padded_t5_source(name, tmp_path):
    p = pair(SEQ2SEQ[name](), tmp_path)
    ids, real, _, at = padded("right")
    target = tokens(len(LENGTHS), 7)
    theirs = p.hf(input_ids=ids, attention_mask=real.long(), decoder_input_ids=target).logits
    check(p, theirs, p.net(ids, target, at))


def test_padded_t5_target(tmp_path):
    p = pair(reference.t5(), tmp_path)
    ids, real, _, at = padded("right")
    source = tokens(len(LENGTHS), 7)
    theirs = p.hf(
        input_ids=source, decoder_input_ids=ids, decoder_attention_mask=real.long()
    ).logits
    check(p, theirs, p.net(source, ids, None, at), real)


# --- the key tables ---

FILES: dict[str, tuple[Callable[[], transformers.PreTrainedModel], dict[str, Any]]] = {
    **{name: (make, {}) for name, make in (DECODERS | SEQ2SEQ).items()},
    "bert, masked lm": (reference.bert, {}),
}


@pytest.mark.parametrize("name", FILES)
def test_key_table_inverts_byte_for_byte(name, tmp_path):
    make, changes = FILES[name]
    p = pair(make(), tmp_path, **changes)
    file = p.file
    assert set(p.report.became) | set(p.report.dropped) == set(file)
    back = p.theirs(p.ours(file))
    assert set(back) == set(file) - set(p.report.dropped)
    for key, tensor in back.items():
        assert tensor.dtype == file[key].dtype
        assert tensor.shape == file[key].shape
        assert tensor.contiguous().numpy().tobytes() == file[key].numpy().tobytes(), key


@pytest.mark.parametrize("name", ["gpt2", "neox, parallel", "t5 v1.0", "bert, masked lm"])
def test_ours_goes_to_theirs_and_comes_back(name, tmp_path):
    """From the network itself: no parameter is without a name over there."""
    make, changes = FILES[name]
    p = pair(make(), tmp_path, **changes)
    ours = {key: value.detach() for key, value in p.net.named_parameters()}
    back = p.ours(p.theirs(ours))
    assert set(back) == set(ours)
    assert all(back[key].equal(value) for key, value in ours.items())


def test_old_files_with_masks_and_angles_are_read(tmp_path):
    """What older versions stored beside the weights is dropped, and the report says why."""
    p = pair(reference.gpt2(), tmp_path)
    old = p.file | {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).tril(),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    ours, report, _ = to_ours(old, p.table, p.layers, "transformer.")
    assert set(report.dropped) == {"transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"}
    assert "causal mask" in report.dropped["transformer.h.0.attn.bias"]
    assert set(to_theirs(ours, p.table, p.layers)) == set(p.file)


def test_loaded_model_survives_our_own_folder(tmp_path):
    """Theirs -> ours -> our file -> ours: rotary tables and ties included."""
    p = pair(reference.llama(ROPES["llama3"], tie_word_embeddings=True), tmp_path / "hf")
    save_model(p.net, p.config, tmp_path / "own")
    net, config = load_model(tmp_path / "own")
    ids = tokens()
    assert config == p.config
    assert net(ids).equal(p.net(ids))


# --- what cannot be read is refused, not guessed ---


def test_dynamic_rope_is_refused(tmp_path):
    hf = reference.llama({"rope_type": "dynamic", "factor": 2.0})
    hf.save_pretrained(tmp_path)
    with pytest.raises(ClearheadError, match='rotary scaling "dynamic" is not known') as error:
        load_hf(tmp_path)
    assert "linear, yarn, llama3" in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reference.gpt2(scale_attn_weights=False), "scale_attn_weights = False"),
        (
            lambda: reference.gpt2(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx = True",
        ),
        (lambda: reference.bert(is_decoder=True), "is_decoder = True"),
        (
            lambda: reference.neox(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
            ),
            "rope_type = 'linear'",
        ),
        (
            lambda: reference.qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "some layers have a window and others see everything",
        ),
        (lambda: reference.neox(attention_bias=False), "missing: .*q_proj.bias"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(make, message, tmp_path):
    """A setting that we have no form of must never be passed over: the output would be another."""
    make().save_pretrained(tmp_path)
    with pytest.raises(ClearheadError, match=message):
        load_hf(tmp_path)


def test_unknown_model_type_suggests_the_nearest(tmp_path):
    reference.gpt2().save_pretrained(tmp_path)
    edit_config(tmp_path, model_type="gpt-2")
    with pytest.raises(ClearheadError, match=r'holds a "gpt-2".*Did you mean "gpt2"'):
        load_hf(tmp_path)


def test_unknown_activation_is_refused(tmp_path):
    reference.gpt2().save_pretrained(tmp_path)
    edit_config(tmp_path, activation_function="gelu_newest")
    with pytest.raises(ClearheadError, match=r'activation "gelu_newest".*Did you mean "gelu_new"'):
        load_hf(tmp_path)
    assert json.loads(Path(tmp_path, "config.json").read_text())["model_type"] == "gpt2"
