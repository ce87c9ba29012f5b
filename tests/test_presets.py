"""Presets: the published models are there, have their published sizes, and cost nothing."""

from __future__ import annotations

import functools
import json

import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.models.family import FAMILIES, family
from clearhead.models.presets import PRESETS, resolve

# Every row of the lectures' size table: name -> (parameters, layers, width, heads, inner width).
TABLE = {
    "transformer-base": (65e6, 6, 512, 8, 2048),
    "transformer-big": (213e6, 6, 1024, 16, 4096),
    "bert-base": (110e6, 12, 768, 12, 3072),
    "bert-large": (340e6, 24, 1024, 16, 4096),
    "roberta-large": (355e6, 24, 1024, 16, 4096),
    "gpt2": (124e6, 12, 768, 12, 3072),
    "gpt2-medium": (355e6, 24, 1024, 16, 4096),
    "gpt2-large": (774e6, 36, 1280, 20, 5120),
    "gpt2-xl": (1.558e9, 48, 1600, 25, 6400),
    "megatron-lm": (8.3e9, 72, 3072, None, 12288),
    "turing-nlg": (17e9, 78, 4256, None, 17024),
    "gpt3": (175e9, 96, 12288, 96, 49152),
    "gopher": (280e9, 80, 16384, 128, 65536),
}

# The others, with what their authors state.
OTHERS = {
    "roberta-base": 125e6,
    "minilm-l6": 22.7e6,
    "llama2-7b": 6.738e9,
    "llama3-8b": 8.03e9,
    "mistral-7b": 7.242e9,
    "smollm2-135m": 135e6,
    "stories15m": 15e6,
    "t5-small": 60e6,
    "t5-base": 220e6,
    "flan-t5-small": 77e6,
    "flan-t5-base": 250e6,
    "distilbert": 66e6,
    "bart-base": 139e6,
    "bart-large": 406e6,
    "vit-base": 86.6e6,
    "clip-vit-base-32": 151e6,
    "whisper-base": 74e6,
    "pythia-160m": 162.3e6,
}
UNSTATED = {"opus-mt", "whisper-tiny"}  # sizes without a published count to hold them against

# To the last digit, as the published files have them.
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "t5-small": 60_506_624,
    "flan-t5-base": 247_577_856,
}


def count(net) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@functools.cache
def meta(name: str):
    return ch.build(name, device="meta").net


def test_the_presets_are_these():
    """A preset that is added gets its published number here; none goes by accident."""
    assert set(ch.presets()) == {*TABLE, *OTHERS, *UNSTATED}


@pytest.mark.parametrize("name", {**TABLE, **OTHERS})
def test_counted_parameters_are_the_published_ones(name):
    published = TABLE[name][0] if name in TABLE else OTHERS[name]
    assert count(meta(name)) == pytest.approx(published, rel=0.03)
    assert ch.presets()[name].published == published


@pytest.mark.parametrize("name", EXACT)
def test_counted_parameters_to_the_last_one(name):
    assert count(meta(name)) == EXACT[name]


@pytest.mark.parametrize("name", TABLE)
def test_sizes_are_those_of_the_lectures(name):
    _, layers, width, heads, inner = TABLE[name]
    net = meta(name)
    stacks = [m for path, m in net.named_modules() if path.rpartition(".")[2] == "stack"]
    assert stacks
    for stack in stacks:
        assert len(stack.blocks) == layers
        block = stack.blocks[0]
        assert block.self_attn.q_proj.in_features == width
        assert block.ffn.in_proj.out_features == inner
        if heads is not None:
            assert block.self_attn.n_heads == heads


@pytest.mark.parametrize("name", {**TABLE, **OTHERS})
def test_nothing_is_allocated(name):
    """The largest would be 1.1 TB."""
    tensors = [*meta(name).parameters(), *meta(name).buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("name", [*PRESETS, *FAMILIES])
def test_settings_survive_json(name):
    config = resolve(name)
    text = json.dumps(config.to_dict(), allow_nan=False)
    back = family(config.kind).Config.from_dict(json.loads(text))
    assert back == config
    assert hash(back) == hash(config)
    assert json.dumps(back.to_dict()) == text


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "t5-small", "gopher", "mistral-7b"])
def test_stacks_survive_json(name):
    """What a family makes of its settings is plain data too: masks, positions, kernels."""
    config = resolve(name)
    stacks = (
        [config.to_stack(side) for side in (False, True)] if "t5" in name else [config.to_stack()]
    )
    for stack in stacks:
        text = json.dumps(stack.to_dict(), allow_nan=False)
        assert type(stack).from_dict(json.loads(text)) == stack


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_it_comes_from(name):
    preset = PRESETS[name]
    assert preset.family in FAMILIES
    assert any(year in preset.source for year in map(str, range(2017, 2027)))


def test_a_preset_can_be_changed():
    net = ch.build("gpt2-xl", device="meta", n_layers=2, **{"position.max_len": 32}).net
    assert len(net.stack.blocks) == 2
    assert net.embed.position.table.weight.shape == (32, 1600)
    assert resolve("gpt2-xl").n_layers == 48


def test_misspelt_preset_suggests_the_nearest():
    with pytest.raises(ClearheadError, match=r'no model "gpt2-medum".*Did you mean "gpt2-medium"'):
        ch.build("gpt2-medum")


def test_the_returned_table_is_a_copy():
    ch.presets().clear()
    assert "gpt2" in ch.presets()


def test_the_gopher_of_the_paper_has_relative_positions():
    block = meta("gopher").stack.blocks[0]
    assert block.self_attn.relative is not None
    assert isinstance(block.self_residual.norm, torch.nn.RMSNorm)
