"""One battery over every architecture: numbers like `transformers`, every road in and out.

A row of `architectures.ROWS` gets all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import clearhead as ch
from architectures import ROWS, Case, Row, randomise
from clearhead.cli import main as cli
from clearhead.models.base import EncoderDecoder
from clearhead.models.family import FAMILIES, depth, family
from clearhead.models.hf import auto_class
from clearhead.models.llama import heads as llama_heads
from clearhead.weights.convert import Report, to_ours, to_theirs
from clearhead.weights.hf import MODEL_TYPES

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@dataclass
class Pair:
    """A reference and ours, from one folder; nobody changes either."""

    row: Row
    hf: transformers.PreTrainedModel
    folder: Path

    @cached_property
    def loaded(self) -> tuple[ch.Model, Report]:
        return ch.load(self.folder, head=self.row.head, report=True)

    @property
    def model(self) -> ch.Model:
        return self.loaded[0]

    @property
    def report(self) -> Report:
        return self.loaded[1]

    @cached_property
    def file(self) -> dict[str, Tensor]:
        """Their tensors, as they are on disk."""
        return load_file(self.folder / "model.safetensors")


PAIRS: dict[str, Pair] = {}


@pytest.fixture(params=ROWS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(request.param, tmp_path_factory)


def pair_of(row: Row, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if row.name not in PAIRS:
        hf = randomise(row.make())
        folder = tmp_path_factory.mktemp("hf")
        hf.save_pretrained(folder)
        if row.beside is not None:
            row.beside(folder)
        PAIRS[row.name] = Pair(row, hf, folder)
    return PAIRS[row.name]


@torch.no_grad()
def theirs(hf: transformers.PreTrainedModel, case: Case, row: Row) -> Tensor:
    out = row.read(hf(**case.theirs), case)
    assert out.isfinite().all()
    assert out.std() > 0.01, "an output that is nearly constant proves nothing"
    return out if case.real is None else out[case.real]


@torch.no_grad()
def ours(model: ch.Model, case: Case) -> Tensor:
    out = model(*case.ours, **case.more)
    return out if case.real is None else out[case.real]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE)


def weights(model: ch.Model) -> dict[str, Tensor]:
    return dict(model.net.state_dict())


def assert_same(model: ch.Model, other: ch.Model) -> None:
    """The same settings, and the same weights bit for bit."""
    assert other.config == model.config
    assert weights(other).keys() == weights(model).keys()
    for name, tensor in weights(model).items():
        assert weights(other)[name].dtype == tensor.dtype
        assert weights(other)[name].equal(tensor), name


# --- the table itself ---


def test_the_table_covers_every_model_type_and_every_head(tmp_path_factory):
    made = [pair_of(row, tmp_path_factory).hf for row in ROWS]
    assert {hf.config.model_type for hf in made} == set(MODEL_TYPES)
    wanted = {*llama_heads("Llama").values(), "MarianMTModel", "BertForPreTraining"}
    for name in FAMILIES:
        wanted |= set(getattr(family(name), "HEADS", {}).values())
    assert wanted <= {type(hf).__name__ for hf in made}
    heads = {(p.model.config.kind, _head(p.model)) for p in PAIRS.values()}
    for name in FAMILIES:
        for head in getattr(family(name), "HEADS", {}):
            assert (name, head) in heads or name in ("bart", "whisper", "clip"), (name, head)


def _head(model: ch.Model) -> str:
    head = getattr(model.config, "head", None)
    return "none" if head is None else head.kind


def test_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)


# --- the same numbers ---


def test_whole_batches(pair):
    case = pair.row.feed.whole()
    close(ours(pair.model, case), theirs(pair.hf, case, pair.row))


PADDED = [(row, side, how) for row in ROWS for side, how in row.padding]


@pytest.mark.parametrize(("row", "side", "how"), PADDED, ids=str)
def test_ragged_batches(row, side, how, tmp_path_factory):
    pair = pair_of(row, tmp_path_factory)
    case = row.feed.ragged(side, how, row.empty)
    close(ours(pair.model, case), theirs(pair.hf, case, row))


@pytest.mark.parametrize("row", [row for row in ROWS if row.generates], ids=str)
def test_cached_is_uncached_at_every_step(row, tmp_path_factory):
    pair = pair_of(row, tmp_path_factory)
    net: Any = pair.model.net
    case = pair.row.feed.whole()
    with torch.no_grad():
        expected = net(*case.ours)
        target, length = case.ours[-1], case.ours[-1].shape[1]
        if isinstance(net, EncoderDecoder):
            cache = net.new_cache(net.encode(case.ours[0]), length)
        else:
            cache = net.new_cache(target.shape[0], length)
        steps = [net.decode(target[:, i : i + 1], cache=cache) for i in range(length)]
    for i, step in enumerate(steps):
        close(step[:, 0], expected[:, i])


def test_capture_of_all_patterns_changes_nothing(pair):
    case = pair.row.feed.whole()
    expected = ours(pair.model, case)
    with ch.capture(pair.model.net, "**.pattern") as acts:
        assert ours(pair.model, case).equal(expected)
    layers = sum(name.endswith("attn.q_proj.weight") for name in weights(pair.model))
    assert len(acts) == layers
    for pattern in acts.values():
        close(pattern.sum(dim=-1), torch.ones(pattern.shape[:-1]))


# --- the keys ---


def test_the_key_map_inverts_byte_for_byte(pair):
    config, module = pair.model.config, family(pair.model.config.kind)
    tensors, report, _ = to_ours(pair.file, module.keys(config), depth(config), module.PREFIX)
    back = to_theirs(tensors, module.keys(config), depth(config))
    kept = {_whole(key, pair.file, module): key for key in pair.file if key not in report.dropped}
    assert back.keys() == kept.keys()
    for key, tensor in back.items():
        same_bytes(tensor, pair.file[kept[key]], key)


def _whole(key: str, file: dict[str, Tensor], module: Any) -> str:
    """A body's key with the prefix that it has in a model with a head."""
    bare = not any(name.startswith(module.PREFIX) for name in file)
    return module.PREFIX + key if bare else key


def same_bytes(got: Tensor, expected: Tensor, key: str) -> None:
    assert got.dtype == expected.dtype, key
    assert got.shape == expected.shape, key
    assert got.contiguous().numpy().tobytes() == expected.numpy().tobytes(), key


def test_the_report_names_every_key_once(pair):
    report, net = pair.report, pair.model.net
    assert set(report.became) | set(report.dropped) == set(pair.file)
    assert not set(report.became) & set(report.dropped)
    assert all(why for why in report.dropped.values())
    assert report.tied == dict(net.ties)
    assert report.drawn == ()
    filled = {name for names in report.became.values() for name in names}
    parameters = dict(net.named_parameters(remove_duplicate=False))
    assert filled | set(report.tied) == set(parameters)
    for alias, original in report.tied.items():
        assert parameters[alias] is parameters[original]


# --- out, and in again ---


def test_export_opens_in_transformers(pair, tmp_path):
    row = pair.row
    ch.export(pair.model, tmp_path / "out", to="hf")
    named = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    assert auto_class(*named) == row.auto
    hf, info = getattr(transformers, row.auto).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(hf).__name__ == (row.exports or type(pair.hf).__name__)
    assert set(info.pop("missing_keys")) == set(row.unfilled)
    assert not any(info.values()), info
    case = row.feed.whole()
    read = row if not row.exports else Row("", row.make, "", row.feed)
    close(theirs(hf.eval(), case, read), ours(pair.model, case))


def test_export_has_the_keys_and_bytes_of_the_original(pair, tmp_path):
    ch.export(pair.model, tmp_path / "out")
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert file.keys() == pair.file.keys() - pair.report.dropped.keys()
    for key, tensor in file.items():
        same_bytes(tensor, pair.file[key], key)


def test_export_comes_back_identical(pair, tmp_path):
    ch.export(pair.model, tmp_path / "out")
    again = ch.load(tmp_path / "out", head=pair.row.head)
    assert_same(pair.model, again)
    assert again.companions.items() >= pair.model.companions.items()


def test_our_own_folder_comes_back_identical(pair, tmp_path):
    pair.model.save(tmp_path / "own")
    again, report = ch.load(tmp_path / "own", report=True)
    assert_same(pair.model, again)
    assert report == Report()
    case = pair.row.feed.whole()
    assert ours(again, case).equal(ours(pair.model, case))


# --- other files with the same weights ---


def test_shards_give_the_same_weights(pair, tmp_path):
    pair.hf.save_pretrained(tmp_path, max_shard_size="15KB")
    if pair.row.beside is not None:
        pair.row.beside(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists()
    again, report = ch.load(tmp_path, head=pair.row.head, report=True)
    assert_same(pair.model, again)
    assert report == pair.report


def test_a_bin_file_gives_the_same_weights(pair, tmp_path):
    copy(pair.folder, tmp_path)
    torch.save(pair.file, tmp_path / "pytorch_model.bin")
    again, report = ch.load(tmp_path, head=pair.row.head, report=True)
    assert_same(pair.model, again)
    assert report == pair.report


def test_half_precision_files_are_read_as_fp32(pair, tmp_path):
    copy(pair.folder, tmp_path)
    torch.save({name: t.half() for name, t in pair.file.items()}, tmp_path / "pytorch_model.bin")
    again = ch.load(tmp_path, head=pair.row.head)
    for name, tensor in weights(pair.model).items():
        assert weights(again)[name].equal(tensor.half().float()), name


OLD_KEYS = {
    "gpt2 lm": {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": None},
    "gpt2 none": {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)},
    "llama lm": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "neox lm": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": None,
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(4),
    },
    "bert masked_lm": {"bert.embeddings.position_ids": torch.arange(64)[None]},
    "roberta masked_lm": {"roberta.embeddings.position_ids": torch.arange(66)[None]},
    "distilbert none": {"embeddings.position_ids": torch.arange(64)[None]},
    "t5 v1.0": {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(8, 4)
    },
    "bart": {"model.encoder.version": torch.tensor([3.0]), "model.decoder.version": None},
    "marian": {"model.encoder.embed_positions.weight": torch.ones(64, 32)},
    "clip": {
        "text_model.embeddings.position_ids": torch.arange(64)[None],
        "vision_model.embeddings.position_ids": torch.arange(17)[None],
    },
}


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in OLD_KEYS], ids=str)
def test_what_older_files_have_besides_is_dropped_with_a_reason(row, tmp_path_factory, tmp_path):
    pair = pair_of(row, tmp_path_factory)
    old = {key: torch.tensor(0.0) if t is None else t for key, t in OLD_KEYS[row.name].items()}
    copy(pair.folder, tmp_path)
    torch.save(pair.file | old, tmp_path / "pytorch_model.bin")
    again, report = ch.load(tmp_path, head=row.head, report=True)
    assert_same(pair.model, again)
    assert report.dropped.keys() - pair.report.dropped.keys() == old.keys()


def copy(source: Path, target: Path) -> None:
    """Everything but the weights."""
    for path in source.rglob("*.json"):
        new = target / path.relative_to(source)
        new.parent.mkdir(exist_ok=True)
        new.write_text(path.read_text())


# --- the command ---


COMPARED = {"bert none": "states", "bert pooling": "vectors", "clip": "similarities"}


@pytest.mark.parametrize("row", [row for row in ROWS if row.check], ids=str)
def test_import_checks_itself_against_transformers(row, tmp_path_factory, tmp_path, capsys):
    pair = pair_of(row, tmp_path_factory)
    words = ["import", str(pair.folder), str(tmp_path / "out"), "--check", "--json"]
    assert cli.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert 0 <= said["max_difference"] < 1e-4
    assert said["compared"] == COMPARED.get(row.name, "logits")
    assert {key: tuple(names) for key, names in said["became"].items()} == pair.report.became
    assert said["dropped"] == pair.report.dropped
    assert said["tied"] == pair.report.tied
    assert_same(pair.model, ch.load(tmp_path / "out"))
