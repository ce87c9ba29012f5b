"""Bad input: one clear error that says what, why and how to mend it, and nothing is written."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
import tiny
from clearhead.attention.mask import All, Causal, Window
from clearhead.attention.softmax import KernelConfig
from clearhead.attention.spec import (
    ALiBiConfig,
    AttentionConfig,
    Geometry,
    RopeConfig,
    T5BucketsConfig,
)
from clearhead.config import Spec
from clearhead.errors import SYNONYMS, ClearheadError
from clearhead.layers.ffn import PlainFFNConfig
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Net
from clearhead.models.family import FAMILIES, family

# As for a user: the shapes in signatures, checked in tests alone, are not what catches these.
pytestmark = pytest.mark.usefixtures("unchecked")

FFN = PlainFFNConfig(24)


def refused(message: str):
    """Exactly our error (not another ValueError), and this part of its text."""
    return pytest.raises(ClearheadError, match=message)


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_layer": 2},
            r'gpt2 has no setting "n_layer"\. Did you mean "n_layers"\?.*It has: "voc',
        ),
        ({"hidden_size": 2}, r'gpt2 has no setting "hidden_size"\..*"d_model"'),
        ({"position": {"kind": "rope", "thata": 1.0}}, r'position has no setting "thata".*"theta"'),
        ({"position.max_lenn": 3}, r'learned has no setting "max_lenn"\. Did you mean "max_len"\?'),
        ({"n_layers.x": 3}, r'n_layers is 12, which has no setting "x"'),
        ({"position": "rop"}, r'position is of unknown kind "rop"\. Did you mean "rope"\?'),
        ({"position": {"theta": 1.0}}, r'position names no kind.*Known: .*"learned"'),
        ({"position": {"kind": ["rope"]}}, r"position .*kind .*\['rope'\]"),
        ({"norm": "rope"}, r'norm is of unknown kind "rope".*"layer_norm", "rms_norm"'),
        ({"position": {"kind": "learned_2d"}}, r'position lacks "rows", "columns"'),
        ({"position": 3}, r"position must be .*not 3"),
        ({"head": ["lm"]}, r"head must be one of .*not \['lm'\]"),
        ({"n_layers": "two"}, r"n_layers must be a whole number, not 'two'"),
        ({"n_layers": 2.5}, r"n_layers must be a whole number, not 2.5"),
        ({"n_layers": True}, r"n_layers must be a whole number, not True"),
        ({"n_layers": None}, r"n_layers must be a whole number, not None"),
        ({"dropout": "much"}, r"dropout must be a number, not 'much'"),
        ({"head": {"kind": "lm", "tied": 1}}, r"head.tied must be true or false, not 1"),
        ({"activation": "gelo"}, r"activation is 'gelo'. Did you mean \"gelu\"\?"),
        ({"activation": ["gelu"]}, r"activation is \['gelu'\]"),
    ],
)
def test_settings_that_are_none(changes, message):
    with refused(message):
        ch.build("gpt2", device="meta", **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"d_model": 30, "n_heads": 4}, r"30 does not divide by n_heads = 4: .*n_heads = "),
        ("gpt2", {"d_model": 30, "n_heads": 4}, r"n_heads = 3, or d_model = 32\.$"),
        ("gpt2", {"n_heads": 0}, r"n_heads must be 1 or more"),
        ("gpt2", {"n_heads": -2}, r"n_heads must be 1 or more"),
        ("gpt2", {"d_model": 0}, r"d_model .*must be 1 or more"),
        ("gpt2", {"n_layers": 0}, r"n_layers must be 1 or more, not 0"),
        ("gpt2", {"vocab_size": 0}, r"vocab_size must be 1 or more, not 0"),
        ("gpt2", {"d_ff": -1}, r"d_ff must be 1 or more, not -1"),
        ("gpt2", {"max_len": -1}, r"max_len.*-1"),
        ("gpt2", {"n_kv_heads": 5}, r"n_heads = 12 does not divide by n_kv_heads = 5"),
        ("llama", {"n_kv_heads": 0}, r"n_heads = 32 does not divide by n_kv_heads = 0"),
        ("llama", {"d_model": 12, "n_heads": 4}, r"a head of 3 is 3, which must be even"),
        ("llama", {"variant": {"head_dim": -4}}, r"head_dim.*-4"),
        ("llama", {"variant": {"window": 0}}, r"A window of 0 positions sees nothing"),
        ("gpt_neox", {"position": {"kind": "rope", "fraction": 0.0}}, r"0.0 of a head of 64 is 0"),
        ("gpt_neox", {"position": {"kind": "rope", "fraction": 2.0}}, r"2.0 of a head of 64"),
        ("gpt2", {"position": {"kind": "rope", "theta": 0.0}}, r"theta.*0.0"),
        ("gpt2", {"dropout": 1.5}, r"dropout must be in \[0, 1\), not 1.5"),
        ("bert", {"dropout": -0.1}, r"dropout must be in \[0, 1\), not -0.1"),
        ("t5", {"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ("transformer", {"dropout": float("nan")}, r"dropout .*nan"),
        ("bert", {"token_types": -1}, r"token_types.*-1"),
        (
            "bert",
            {"head": {"kind": "tagging", "n_labels": 0}},
            r"n_labels must be 1 or more, not 0",
        ),
        ("t5", {"position": {"kind": "t5_buckets", "buckets": 2}}, r"2 is too few, 4 at least"),
        ("gpt2", {"d_model": 15, "n_heads": 3, "position": "sinusoidal"}, r"a width of 15 is odd"),
        (
            "gpt2",
            {"position": {"kind": "sinusoidal", "width": 4}},
            r"cannot be tied to it: use head",
        ),
        (
            "gpt2",
            {"position": {"kind": "sinusoidal", "width": 768}},
            r"768 leave no room for tokens",
        ),
    ],
)
def test_settings_that_do_not_fit_together(name, changes, message):
    with refused(message):
        ch.build(name, device="meta", **changes)


@pytest.mark.parametrize("name", [3, None, ["gpt2"], {"family": "gpt2"}])
def test_build_takes_a_name_or_settings(name):
    with refused("build takes the name of a model or its settings, not"):
        ch.build(name)


def test_misspelt_family_suggests_the_nearest():
    with refused(r'There is no model "lama"\. Did you mean "llama"\? .*All.*: clearhead presets$'):
        ch.build("lama")


# --- what parts cannot do ---


@dataclasses.dataclass(frozen=True)
class Poor(KernelConfig, kind="poor_test_kernel"):
    """A kernel that can do nothing special."""

    can: ClassVar[frozenset[str]] = frozenset()


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            AttentionConfig(Geometry(16, 4), kernel=Poor(), mask=Causal()),
            'The "poor_test_kernel" kernel cannot do causal attention: choose another kernel',
        ),
        (
            AttentionConfig(Geometry(16, 4), kernel=Poor(), mask=All() & Window(3)),
            "cannot do a window",
        ),
        (
            AttentionConfig(Geometry(16, 4), kernel=Poor(), position=ALiBiConfig()),
            "cannot do a bias on the scores",
        ),
        (AttentionConfig(Geometry(16, 4, 2), kernel=Poor()), "cannot do grouped heads"),
    ],
)
def test_kernel_that_cannot_do_what_the_stack_asks(attention, message):
    with refused(message):
        build_stack(StackConfig(2, (attention,), FFN))


def test_poor_kernel_is_fine_where_nothing_is_asked():
    plain = AttentionConfig(Geometry(16, 4), kernel=Poor(), position=RopeConfig())
    assert len(build_stack(StackConfig(2, (plain,), FFN)).blocks) == 2


def test_kernel_that_cannot_look_across():
    plain = AttentionConfig(Geometry(16, 4), mask=Causal())
    cross = AttentionConfig(Geometry(16, 4), kernel=Poor())
    with refused("cannot do cross-attention"):
        build_stack(StackConfig(2, (plain,), FFN, cross=cross))


@pytest.mark.parametrize("position", [RopeConfig(), ALiBiConfig(), T5BucketsConfig()])
def test_position_in_cross_attention(position):
    plain = AttentionConfig(Geometry(16, 4), mask=Causal())
    cross = AttentionConfig(Geometry(16, 4), position=position)
    with refused(f'"{position.kind}" means nothing between two sequences'):
        build_stack(StackConfig(2, (plain,), FFN, cross=cross))


def test_parallel_block_has_no_post_norm():
    plain = AttentionConfig(Geometry(16, 4))
    with refused('parallel block has no post-norm form.*use placement="pre"'):
        StackConfig(2, (plain,), FFN, placement="post", topology="parallel")


def test_layers_of_different_widths():
    narrow, wide = (AttentionConfig(Geometry(width, 4)) for width in (16, 32))
    with refused("share one residual stream, but d_model differs"):
        StackConfig(2, (narrow, wide), FFN)


def test_dropout_of_cross_attention():
    plain = AttentionConfig(Geometry(16, 4), mask=Causal())
    cross = AttentionConfig(Geometry(16, 4), dropout=1.5)
    with refused(r"dropout must be in \[0, 1\), not 1.5"):
        StackConfig(2, (plain,), FFN, cross=cross)


# --- ids and positions ---


def decoder(**changes: Any) -> ch.Model:
    return ch.build("gpt2", seed=0, **tiny.SIZES | changes)


def seq2seq(**changes: Any) -> ch.Model:
    return ch.build("transformer", seed=0, **tiny.SIZES | changes)


def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_ids_outside_the_vocabulary():
    with refused(r"Token id 23 is outside the vocabulary of 23 \(0 to 22\): was the text encoded"):
        decoder()(torch.tensor([[0, 22, 23]]))
    with refused("Token id -1 is outside the vocabulary of 23"):
        decoder()(torch.tensor([[0, -1]]))


def test_ids_of_source_and_target_have_vocabularies_of_their_own():
    model = seq2seq(target_vocab_size=9)
    assert model(torch.tensor([[22]]), torch.tensor([[8]])).shape == (1, 1, 9)
    with refused("Token id 9 is outside the vocabulary of 9"):
        model(torch.tensor([[22]]), torch.tensor([[9]]))
    with refused("Token id 23 is outside the vocabulary of 23"):
        model(torch.tensor([[23]]), torch.tensor([[8]]))


def test_sequence_longer_than_the_learned_table():
    assert decoder()(zeros(1, 64)).shape == (1, 64, 23)
    with refused(
        "Position 64 is beyond the learned table of 64 positions: shorten .*larger max_len"
    ):
        decoder()(zeros(1, 65))


def test_positions_beyond_the_learned_table():
    with refused("Position 70 is beyond the learned table"):
        decoder()(zeros(1, 2), at=ch.Positions.span(69, 2))


def test_sequence_outside_the_learned_grid():
    model = decoder(position={"kind": "learned_2d", "rows": 2, "columns": 3})
    with refused(r"Position 6 is outside the grid of 6 cells: resize\(rows, columns\)"):
        model(zeros(1, 7))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 5)])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_ids_of_another_rank(name, shape):
    model = ch.build(name, seed=0, **tiny.SIZES)
    with refused(r"whole numbers of shape \[batch, length\]; these are torch.int64 of shape \("):
        model(zeros(*shape))


def test_ids_without_a_batch_say_how_to_add_one():
    with refused(r"write ids.unsqueeze\(0\)"):
        decoder()(zeros(5))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bool, torch.int16, torch.uint8]
)
def test_ids_of_another_type(dtype):
    with refused(rf"whole numbers of shape \[batch, length\]; these are {dtype}"):
        decoder()(zeros(1, 3, dtype=dtype))


def test_small_whole_numbers_are_fine():
    ids = tiny.tokens(2, 5)
    model = decoder()
    model.net.eval()
    assert model(ids.int()).equal(model(ids))


def test_ids_that_are_no_tensor():
    with refused(r"a tensor of whole numbers, not list: torch.tensor\(\[\[...\]\]\)"):
        decoder()([[1, 2]])


def test_no_tokens():
    with refused("no tokens: a sequence needs at least one"):
        decoder()(zeros(2, 0))
    with refused("no tokens: a sequence needs at least one"):
        seq2seq()(zeros(2, 3), zeros(2, 0))
    with refused("no tokens: a sequence needs at least one"):
        decoder()(zeros(2, 0), at=ch.Positions.span(0, 0))


def test_too_many_or_too_few_tensors():
    with refused(r"encoder-decoder takes 2 tensor\(s\).* \(source, target\), not 1"):
        seq2seq()(zeros(1, 3))
    with refused(r"decoder takes 1 tensor\(s\).*, not 2"):
        decoder()(zeros(1, 3), zeros(1, 3))


def test_source_and_target_of_different_batches():
    for rows in ((2, 4), (4, 2), (2, 3)):
        with refused(f"{rows[0]} .*{rows[1]}"):
            seq2seq()(zeros(rows[0], 3), zeros(rows[1], 3))


def test_positions_that_do_not_fit():
    with refused(r"Positions of shape \(1, 4\) do not fit ids of shape \(2, 3\)"):
        decoder()(zeros(2, 3), at=ch.Positions.span(0, 4))
    with refused(r"Positions of shape \(3, 3\) do not fit ids of shape \(2, 3\)"):
        decoder()(zeros(2, 3), at=ch.Positions.ragged([1, 2, 3]))


def test_an_encoder_decoder_has_two_positions():
    with refused("source_at.*target_at"):
        seq2seq()(zeros(1, 3), zeros(1, 3), at=ch.Positions.span(0, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ch.Positions.ragged([]), r"lengths must be 0 or more"),
        (lambda: ch.Positions.ragged([2, -1]), r"lengths must be 0 or more, not \[2, -1\]"),
        (lambda: ch.Positions.ragged([2, 1], start=[0]), r"2 rows were given 1 starts"),
        (lambda: ch.Positions.ragged([5], width=3), r"5 slots does not fit a width of 3"),
        (lambda: ch.Positions.ragged([5, 2], side="middle"), r"side.*middle"),
        (lambda: ch.Positions.of(torch.zeros(1, 2)), r"whole numbers of shape \[batch, length\]"),
        (lambda: ch.Positions.of(zeros(3)), r"whole numbers of shape \[batch, length\]"),
        (lambda: ch.Positions.of(zeros(0, 2)), r"at least one slot"),
        (lambda: ch.Positions.packed([]), r"documents need at least one slot"),
        (lambda: ch.Positions.packed([3, 0]), r"documents need at least one slot"),
    ],
)
def test_positions_that_are_none(make, message):
    with refused(message):
        make()


def test_decode_needs_a_memory():
    with refused(r"decode needs what encode returned: decode\(target, memory\)"):
        seq2seq().net.decode(zeros(1, 3))


def test_cache_of_another_memory():
    net = seq2seq().net
    first, second = net.encode(zeros(1, 3)), net.encode(zeros(1, 3))
    with refused("made for another memory"):
        net.decode(zeros(1, 1), second, cache=net.new_cache(first, 8))


def test_cache_that_is_too_short():
    net = decoder().net
    cache = net.new_cache(1, 4)
    net.decode(zeros(1, 4), cache=cache)
    with refused("The cache holds 4 positions, and position 4 was asked for"):
        net.decode(zeros(1, 1), cache=cache)


def test_cache_that_is_longer_than_the_table_of_positions():
    net = decoder().net
    limit = net.embed.position.max_len
    net.new_cache(1, limit)
    with refused(rf"{limit + 1} positions is longer than .* table of {limit}: .*max_len={limit}"):
        net.new_cache(1, limit + 1)
    grid = tiny.positioned("learned_2d")  # 22 x 3 cells
    grid.new_cache(1, 66)
    with refused("table of 66"):
        grid.new_cache(1, 67)
    tiny.positioned("rope").new_cache(1, 10_000)  # no table, no end
    bart = tiny.tiny("bart")
    with refused("table of 64"):
        bart.new_cache(bart.encode(zeros(1, 3)), 65)


def test_caches_that_are_none():
    net = decoder().net
    with refused("1 row or more, not 0"):
        net.new_cache(0, 4)
    with refused("max_len is 0"):
        net.new_cache(1, 0)
    with refused(r"made for its sources: new_cache\(net.encode\(source\), max_len\)"):
        seq2seq().net.new_cache(2, 4)
    for encoder in (tiny.tiny("bert"), seq2seq().net.encoder):
        with refused("Encoder .* has no cache"):
            encoder.new_cache(2, 4)


def test_rows_of_beams_stay_inside_their_source():
    net = seq2seq().net
    cache = net.new_cache(net.encode(zeros(2, 3)), 8, beams=2)
    before = net.decode(zeros(4, 1), cache=cache)
    for rows in ([2, 0, 1, 3], [0, 1], [0, 1, 2, 3, 2, 3]):
        with refused(r"2 beams .* only among themselves"):
            cache.reorder(torch.tensor(rows))
    for rows in ([0, 1, 2, 4], [-1, 0, 2, 3]):
        with refused(r"There are 4 rows in this cache \(0 to 3\)"):
            cache.reorder(torch.tensor(rows))
    with refused(r"There are 2 sources in this cache"):
        cache.keep(torch.tensor([2]))
    assert (cache.rows, cache.length) == (4, 1)
    assert before.shape[0] == 4


# --- ids, in the bare network ---


@pytest.mark.parametrize("id", [tiny.VOCAB, tiny.VOCAB + 7, -1])
def test_ids_outside_the_vocabulary_are_named_by_the_bare_network(id):
    said = rf"Token id {id} is outside the vocabulary of {tiny.VOCAB} \(0 to {tiny.VOCAB - 1}\)"
    ids = torch.tensor([[1, id, 2]])
    for name in ("gpt2", "bert"):
        with refused(said):
            tiny.tiny(name)(ids)
    with refused(said):
        tiny.tiny("t5")(zeros(1, 3), ids)
    with refused("Segment id 2 is outside"):
        tiny.tiny("bert")(zeros(1, 2), types=torch.tensor([[0, 2]]))


# --- the words of others ---


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"position": "rotary"}, "rope"),
        ({"position": "RoPE"}, "rope"),
        ({"position": "T5-Buckets"}, "t5_buckets"),
        ({"norm": "RMSNorm"}, "rms_norm"),
        ({"activation": "swish"}, "silu"),
        ({"hidden_size": 8}, "d_model"),
        ({"num_hidden_layers": 8}, "n_layers"),
        ({"head": "classifier"}, "classification"),
    ],
)
def test_the_words_of_others_are_understood(changes, meant):
    with refused(rf'Did you mean "{meant}"\?'):
        ch.build("gpt2", device="meta", **changes)


@pytest.mark.parametrize(
    ("name", "meant"), [("BERT", "bert"), ("GPT-2", "gpt2"), ("bert_base", "bert-base")]
)
def test_names_of_models_in_other_letters(name, meant):
    with pytest.raises(ClearheadError, match=rf'Did you mean "{meant}"\?') as error:
        ch.build(name)
    assert len(str(error.value)) < 160  # the nearest, not all


def test_synonyms_are_folded():
    for word, meant in SYNONYMS.items():
        assert {word, *meant} == {
            w.lower().replace("_", "").replace("-", "") for w in (word, *meant)
        }


@pytest.mark.parametrize("none", [None, "none", "None"])
def test_none_is_a_position(none):
    model = ch.build("gpt2", **tiny.SIZES, position=none)
    assert model.config.position is None
    assert model.net.embed.position is None


def test_none_is_no_norm():
    with refused('unknown kind "none"'):
        ch.build("gpt2", device="meta", norm="none")


# --- settings at random ---


def small(name: str) -> dict[str, Any]:
    """A family's settings at a tiny size, as plain data."""
    made = family(name).Config
    names = {field.name for field in dataclasses.fields(made)}
    sizes = {**tiny.SIZES, "n_heads": 2, "dropout": 0.0}
    return made.from_dict({k: v for k, v in sizes.items() if k in names}).to_dict()


VALID = {name: small(name) for name in FAMILIES}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(-2, 2),
    st.sampled_from(["", "rope", "lm", "gpt2", "x", float("nan"), float("inf")]),
    st.builds(list),
    st.builds(dict),
    st.sampled_from([[1], [[]], {"kind": []}, {"kind": None}, {"kind": "rope"}, {"kind": "alibi"}]),
    st.sampled_from([{"kind": "learned", "max_len": -1}, {"kind": {}}, {"x": 1}, {"kind": 3}]),
)


JUNK = JUNK.map(copy.deepcopy)  # the samples are changed below


def tables(data: dict[str, Any]) -> list[dict[str, Any]]:
    """This dict and all below it."""
    return [data, *(t for value in data.values() if isinstance(value, dict) for t in tables(value))]


@st.composite
def mutated(draw) -> tuple[str, dict[str, Any]]:
    """A valid config with one to three things changed: a key renamed, dropped or added, a value."""
    name = draw(st.sampled_from(sorted(VALID)))
    data = json.loads(json.dumps(VALID[name]))
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from(tables(data)))
        if not table:
            continue
        key = draw(st.sampled_from(sorted(table)))
        match draw(st.sampled_from(["rename", "drop", "add", "value", "value"])):
            case "rename":
                table[draw(st.sampled_from([key[:-1], key + "s", key.upper(), "", "kind"]))] = (
                    table.pop(key)
                )
            case "drop":
                del table[key]
            case "add":
                table[draw(st.text(max_size=8))] = draw(JUNK)
            case "value":
                table[key] = draw(JUNK)
    return name, data


@pytest.mark.parametrize("name", VALID)
def test_settings_that_are_mutated_below_are_valid(name):
    with torch.device("meta"):
        assert isinstance(family(name).Config.from_dict(VALID[name]).build(), Net)


@settings(max_examples=300)
@given(mutated())
def test_random_settings_are_refused_or_valid(case):
    """Nothing but our error, or settings that survive JSON and build a network."""
    name, data = case
    try:
        config = family(name).Config.from_dict(data)
        with torch.device("meta"):
            net = config.build()
    except ClearheadError:
        return
    assert isinstance(net, Net)
    assert isinstance(config, Spec)
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert type(config).from_dict(json.loads(text)) == config


@settings(max_examples=200)
@given(st.recursive(JUNK, lambda inner: st.dictionaries(st.text(max_size=6), inner), max_leaves=6))
def test_anything_at_all_as_settings(data):
    for name in FAMILIES:
        try:
            config = family(name).Config.from_dict(data)
        except ClearheadError:
            continue
        assert data == {} or set(data) <= set(config.to_dict())


def test_a_prompt_that_is_no_text():
    with refused("generate takes a text or a list of texts, not 5"):
        decoder().generate(5)
