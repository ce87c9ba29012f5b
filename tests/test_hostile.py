"""Broken and hostile folders: a clear error, in bounded time and memory, nothing run.

Each entry damages a good folder in one way. GGUF files and the inside of pickles have tests of
their own (`test_gguf_hostile.py`, `test_pickles.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead as ch
from architectures import ROWS, randomise
from clearhead.errors import ClearheadError

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("unchecked")]

Damage = Callable[[Path], Any]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_GROWTH = 80 << 10  # KiB: no folder here holds more than 200 KB


@dataclass(frozen=True)
class Hostile:
    """A good folder, what is done to it, and what must be said."""

    name: str
    row: str
    damage: Damage
    message: str

    def __str__(self) -> str:
        return self.name


HOSTILE: list[Hostile] = []


def hostile(message: str, row: str = "gpt2 lm", name: str = "") -> Callable[[Damage], Damage]:
    """Put a damage on the list, with what the error must say."""

    def add(damage: Damage) -> Damage:
        HOSTILE.append(Hostile(name or damage.__name__, row, damage, message))
        return damage

    return add


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a row of the table, whole; nobody writes there."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            row = next(row for row in ROWS if row.name == name)
            made[name] = tmp_path_factory.mktemp("good")
            randomise(row.make()).save_pretrained(made[name])
            if row.beside is not None:
                row.beside(made[name])
        return made[name]

    return of


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_hostile_folder(case, good, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(good(case.row), folder)
    case.damage(folder)
    monkeypatch.chdir(tmp_path)
    before = fresh_peak()
    with pytest.raises(ClearheadError, match=case.message) as error:
        ch.load(folder)
    if before is not None:
        grown = peak() - before
        assert grown < MOST_GROWTH, f"{grown >> 10} MB for a folder of a few kilobytes"
    assert len(str(error.value)) < 3000
    assert not list(tmp_path.glob("**/ran*")), "something in the folder was run"


def peak() -> int:
    """The most memory that this process had since `fresh_peak`, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def fresh_peak() -> int | None:
    """Forget the highest use of memory so far, and what it is now; None where nobody counts."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        # What other tests freed goes back to the system, or it would serve a load for nothing.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return peak()
    except (OSError, StopIteration):
        return None


@pytest.mark.skipif(fresh_peak() is None, reason="only Linux forgets its highest use of memory")
def test_the_bound_on_memory_can_fail():
    before = fresh_peak()
    torch.ones(2 * MOST_GROWTH, 256).sum()  # KiB of floats, gone at once
    assert peak() - before > MOST_GROWTH


def test_there_are_enough_of_them():
    assert len({case.name for case in HOSTILE}) == len(HOSTILE) >= 40


# --- tools ---


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a folder's weights, and the numbers behind it."""
    data = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def put(folder: Path, header: Any, numbers: bytes) -> None:
    """Write weights with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors in the file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors = change(tensors) or tensors
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def shard(folder: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Cut the weights into three files with an index; returns its map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {}
    for part in range(3):
        name = f"model-{part + 1}-of-3{suffix}"
        some = dict(list(tensors.items())[part::3])
        where |= dict.fromkeys(some, name)
        if suffix == ".bin":
            torch.save(some, folder / name)
        else:
            save_file(some, folder / name)
    index(folder, where, "pytorch_model.bin.index.json" if suffix == ".bin" else INDEX)
    return where


def index(folder: Path, where: Any, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))


class Runs:
    """Makes a file when it is unpickled carelessly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


# --- safetensors files ---

NOT_WHOLE = "not a whole safetensors file"

for left, where in {
    0: "nothing left",
    7: "in the length",
    8: "behind the length",
    40: "in the header",
    -1: "one byte short",
    -4000: "in the numbers",
}.items():

    @hostile(NOT_WHOLE, name=f"truncated {where}")
    def _(folder, left=left):
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:left])


@hostile(NOT_WHOLE)
def truncated_behind_the_header(folder):
    put(folder, header_of(folder)[0], b"")


@hostile(NOT_WHOLE)
def one_byte_too_many(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"x")


for length in (2**63 - 1, 2**64 - 1, 10**9):

    @hostile(NOT_WHOLE, name=f"header of {length} bytes")
    def _(folder, length=length):
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + b'{"a": 1}')


@hostile(NOT_WHOLE)
def header_of_a_gigabyte_in_a_file_with_holes(folder):
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30) + b"{")
        file.truncate((1 << 30) + 8)


for content in (b"[1, 2]", b'"text"', b"{oops}", b"\xff\xfe{}", b"{" * 5000, b'{"a": 7}'):

    @hostile(NOT_WHOLE, name=f"header that is no table of tensors {content[:8]!r}")
    def _(folder, content=content):
        put(folder, content, b"")


def _tensor(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        header, numbers = header_of(folder)
        header["transformer.ln_f.weight"] |= changes
        put(folder, header, numbers)

    return damage


for name, changes in {
    "of an unknown dtype": {"dtype": "F31"},
    "of no dtype": {"dtype": 7},
    "of another size than its numbers": {"shape": [33]},
    "of a negative shape": {"shape": [-32]},
    "of a shape beyond all numbers": {"shape": [2**62, 2**62]},
    "of a shape that is none": {"shape": "32"},
    "that overlaps another": {"data_offsets": [0, 128]},
    "out of range": {"data_offsets": [10**9, 10**9 + 128]},
    "that ends before it begins": {"data_offsets": [128, 0]},
    "of fractions of bytes": {"data_offsets": [0.5, 128.5]},
}.items():
    hostile(NOT_WHOLE, name=f"tensor {name}")(_tensor(**changes))


@hostile(NOT_WHOLE)
def hole_between_tensors(folder):
    header, numbers = header_of(folder)
    put(
        folder,
        header | {"more": {"dtype": "F32", "shape": [1], "data_offsets": [10**6, 10**6 + 4]}},
        numbers,
    )


@hostile(NOT_WHOLE)
def web_page_in_place_of_weights(folder):
    (folder / WEIGHTS).write_text("<!doctype html><title>Log in</title>" * 20)


@hostile(NOT_WHOLE)
def pointer_of_git_lfs_in_place_of_weights(folder):
    (folder / WEIGHTS).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


@hostile(NOT_WHOLE)
def pickle_in_place_of_safetensors(folder):
    torch.save({"a": Runs(folder / "ran")}, folder / WEIGHTS)


@hostile("missing: the folder is not complete")
def directory_in_place_of_weights(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


@hostile("missing: the folder is not complete")
def pipe_in_place_of_weights(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


@hostile(r"has no weights: looked for model.safetensors, .*pytorch_model.bin")
def no_weights(folder):
    (folder / WEIGHTS).unlink()


for kind in (torch.int64, torch.int8, torch.bool):

    @hostile(r"not floating-point numbers", name=f"numbers of {kind}")
    def _(folder, kind=kind):
        change_weights(folder, lambda ts: {name: t.to(kind) for name, t in ts.items()})


# --- shards ---


@hostile("lacks these of its 3 shards: model-2-of-3.safetensors, model-3-of-3.safetensors")
def missing_shards(folder):
    shard(folder)
    for part in (2, 3):
        (folder / f"model-{part}-of-3.safetensors").unlink()


for named in ("../../../../etc/passwd", "/etc/passwd", "part/model.safetensors", "..", ".", ""):

    @hostile("names the file .* not in the folder: refused", name=f"index that names {named!r}")
    def _(folder, named=named):
        where = shard(folder)
        index(folder, where | {next(iter(where)): named})


@hostile("lacks these of its 4 shards|cannot be read")
def index_that_names_a_file_longer_than_names_can_be(folder):
    where = shard(folder)
    index(folder, where | {next(iter(where)): "m" * 5000})


@hostile("lacks these of its 4 shards|cannot be read")
def index_that_names_a_file_with_a_zero_byte(folder):
    where = shard(folder)
    index(folder, where | {next(iter(where)): "model\0.safetensors"})


@hostile(r"does not agree with the shards: transformer.*is in model-\d-of-3")
def index_that_lies_about_the_shard_of_a_key(folder):
    where = shard(folder)
    index(
        folder,
        where
        | {
            "transformer.wte.weight": "model-3-of-3.safetensors",
            "transformer.wpe.weight": "model-1-of-3.safetensors",
        },
    )


@hostile("does not agree with the shards: more.weight is in none")
def index_with_a_key_that_is_nowhere(folder):
    index(folder, shard(folder) | {"more.weight": "model-1-of-3.safetensors"})


@hostile(r"does not agree with the shards: .* is in model-\d-of-3.safetensors")
def index_that_leaves_keys_out(folder):
    where = shard(folder)
    index(folder, dict(list(where.items())[:9]))


@hostile("does not agree with the shards: transformer.wte.weight is in model-")
def key_in_two_shards(folder):
    where = shard(folder)
    other = next(name for name in set(where.values()) if name != where["transformer.wte.weight"])
    tensors = load_file(folder / other) | {"transformer.wte.weight": torch.zeros(99, 32)}
    save_file(tensors, folder / other)


@hostile("torch's two file formats|not a whole torch file")
def index_that_names_the_settings_as_weights(folder):
    where = shard(folder)
    index(folder, where | {next(iter(where)): "config.json"})


@hostile(NOT_WHOLE)
def truncated_shard(folder):
    shard(folder)
    path = folder / "model-2-of-3.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


for content in (
    "[]",
    "7",
    "{}",
    '{"weight_map": {}}',
    '{"weight_map": []}',
    '{"weight_map": {"a": 1}}',
):

    @hostile('has no "weight_map" from keys to files', name=f"index that is {content}")
    def _(folder, content=content):
        shard(folder)
        (folder / INDEX).write_text(content)


for name, content in {
    "truncated": b'{"weight_map": {"a"',
    "binary": bytes(range(256)),
    "nested": b'{"a":' * 100_000,
}.items():

    @hostile("cannot be read as JSON", name=f"index that is {name}")
    def _(folder, content=content):
        shard(folder)
        (folder / INDEX).write_bytes(content)


# --- links ---


def moved_out(folder: Path, name: str) -> None:
    """A file goes out of the folder, and a link to it stays."""
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    target = outside / Path(name).name
    shutil.move(folder / name, target)
    (folder / name).symlink_to(target)


LEADS_OUT = "a link that leads out of the folder"


@hostile(LEADS_OUT)
def link_to_weights_elsewhere(folder):
    moved_out(folder, WEIGHTS)


@hostile(LEADS_OUT)
def link_to_a_shard_elsewhere(folder):
    shard(folder)
    moved_out(folder, "model-2-of-3.safetensors")


@hostile(LEADS_OUT)
def link_to_an_index_elsewhere(folder):
    shard(folder)
    moved_out(folder, INDEX)


@hostile(LEADS_OUT)
def link_to_settings_elsewhere(folder):
    moved_out(folder, "config.json")


@hostile(LEADS_OUT)
def link_to_generation_settings_elsewhere(folder):
    (folder / "generation_config.json").write_text("{}")
    moved_out(folder, "generation_config.json")


@hostile(LEADS_OUT)
def link_to_a_tokeniser_elsewhere(folder):
    (folder / "tokenizer.json").write_text("{}")
    moved_out(folder, "tokenizer.json")


@hostile(LEADS_OUT)
def link_to_tokeniser_settings_elsewhere(folder):
    (folder / "vocab.txt").write_text("[UNK]\na\n")
    (folder / "tokenizer_config.json").write_text("{}")
    moved_out(folder, "tokenizer_config.json")


@hostile(LEADS_OUT, "sentence-transformers pooling")
def link_to_modules_elsewhere(folder):
    moved_out(folder, "modules.json")


@hostile(LEADS_OUT, "sentence-transformers pooling")
def link_to_a_pooling_elsewhere(folder):
    moved_out(folder, "1_Pooling/config.json")


@hostile("leads out of the folder", "sentence-transformers pooling")
def link_to_a_folder_of_pooling_elsewhere(folder):
    moved_out(folder, "1_Pooling")


@hostile(LEADS_OUT)
def link_to_a_folder_of_another_tokeniser_elsewhere(folder):
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (folder / "target").mkdir()
    for place in (folder, folder / "target"):
        (place / "tokenizer.json").write_text(json.dumps(words))
    moved_out(folder, "target")


def only(folder: Path, model: str, beside: str) -> None:
    """A folder with one model file, and a link out beside it."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name in (model, beside):
        (folder / name).write_bytes(b"\0" * 64)
    moved_out(folder, beside)


@hostile(LEADS_OUT)
def link_to_a_vocabulary_of_llama2c_elsewhere(folder):
    only(folder, "stories.bin", "tokenizer.bin")


@hostile(LEADS_OUT)
def link_to_ranks_of_whisper_elsewhere(folder):
    only(folder, "tiny.en.pt", "gpt2.tiktoken")


@hostile(LEADS_OUT)
def link_beside_a_folder_that_is_no_cache(folder):
    """`blobs` two steps above is the hub's only if the folder stands in `snapshots`."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    shutil.move(folder / WEIGHTS, blobs / "0")
    (folder / WEIGHTS).symlink_to(blobs / "0")


@hostile("has no weights")
def link_to_itself(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)


@hostile("has no weights")
def link_to_nothing(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "gone")


@hostile("no config.json")
def settings_that_link_to_themselves(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


@hostile("leads out of the folder")
def link_to_a_device(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")


# --- pickles ---


@hostile("names posix.system: it would run code .* nothing of it was run")
def pickle_that_runs_code(folder):
    (folder / WEIGHTS).unlink()
    torch.save({"a": Runs(folder / "ran")}, folder / "pytorch_model.bin")


@hostile("names posix.system: it would run code .* nothing of it was run")
def shard_of_a_pickle_that_runs_code(folder):
    where = shard(folder, ".bin")
    name = next(iter(where.values()))
    torch.save(torch.load(folder / name) | {"a": Runs(folder / "ran")}, folder / name)


@hostile("should hold tensors by name and nothing else, but it has epoch")
def pickle_with_more_than_tensors(folder):
    torch.save(load_file(folder / WEIGHTS) | {"epoch": 3}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@hostile("should hold tensors by name and nothing else, but it has model")
def pickle_of_a_whole_training(folder):
    torch.save({"model": load_file(folder / WEIGHTS)}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@hostile("should hold tensors by name")
def pickle_of_nothing(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@hostile("torch's two file formats|not a whole torch file")
def truncated_pickle(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])


# --- settings ---


@hostile("no config.json")
def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@hostile("no config.json")
def no_settings(folder):
    (folder / "config.json").unlink()


@hostile("config.json")
def directory_in_place_of_settings(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


for name, content in {
    "truncated": b'{"model_type": "gpt2", "n_lay',
    "empty": b"",
    "binary": bytes(range(256)),
    "nested": b'{"a":' * 100_000,
    "a long number": b'{"n_layer": ' + b"9" * 5000 + b"}",
    "not of this encoding": '{"a": "\u00fc"}'.encode("latin-1"),
}.items():

    @hostile("cannot be read as JSON", name=f"settings that are {name}")
    def _(folder, content=content):
        (folder / "config.json").write_bytes(content)


for content in (b"[]", b'"gpt2"', b"7", b"null"):

    @hostile("is not a table of settings", name=f"settings that are {content.decode()}")
    def _(folder, content=content):
        (folder / "config.json").write_bytes(content)


@hostile("larger than any settings file")
def settings_of_a_gigabyte(folder):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 30)


for said, near in {"gpt-2": "gpt2", "lama": "llama", "Bert": "bert", "t-5": "t5"}.items():

    @hostile(f'holds a "{said}".*Did you mean "{near}".*Supported: gpt2, llama', name=f"a {said}")
    def _(folder, said=said):
        edit(folder, model_type=said)


for said in (None, 7, ["gpt2"], {"gpt2": 1}, ""):

    @hostile("not supported.* Supported: gpt2, llama", name=f"model_type {said!r}")
    def _(folder, said=said):
        edit(folder, model_type=said)


@hostile("names code of its own, which is never run")
def code_of_an_unknown_model(folder):
    for name in ("modeling_mine.py", "configuration_mine.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    code = {"AutoConfig": "configuration_mine.Mine", "AutoModel": "modeling_mine.Mine"}
    edit(folder, model_type="mine", auto_map=code)


@hostile("quantised weights .*gptq.*load the original")
def quantised_weights(folder):
    edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})


for said in ("GPT2DoubleHeadsModel", "BertForMaskedLM", 7, ["GPT2LMHeadModel"], None):

    @hostile("not supported.*GPT2LMHeadModel|wrong type", name=f"architecture {said!r}")
    def _(folder, said=said):
        edit(folder, architectures=[said])


@hostile("config.json")
def architectures_that_are_a_table(folder):
    edit(folder, architectures={"GPT2LMHeadModel": 1})


def setting(row: str, message: str, **changes: Any) -> None:
    """A folder of that row with one setting changed; a nested one as outer__inner."""

    def damage(folder: Path) -> None:
        for name, value in changes.items():
            outer, _, inner = name.rpartition("__")
            if outer:
                whole = json.loads((folder / "config.json").read_text())[outer]
                edit(folder, **{outer: whole | {inner: value}})
            else:
                edit(folder, **{name: value})

    said = ", ".join(f"{name} = {value!r:.40}" for name, value in changes.items())
    hostile(message, row, f"{row} with {said}")(damage)


# Sizes beyond all weights: refused before anything is allocated, whatever was multiplied.
for size in (10**9, 10**12, 10**30, 2**63):
    for name in ("n_layer", "vocab_size", "n_embd", "n_positions", "n_inner", "n_head"):
        setting("gpt2 lm", f"{name} = {size}, which must be a whole number", **{name: size})
MANY = 10**7
setting("gpt2 lm", "says 10000000 layers, but the weights are only", n_layer=MANY)
setting("t5 v1.0", "says 10000000 layers, but the weights are only", num_decoder_layers=MANY)
setting("clip", "says 10000000 layers", vision_config__num_hidden_layers=MANY)
setting(
    "qwen2 lm", "says 10000000 layers", use_sliding_window=True, sliding_window=4,
    num_hidden_layers=MANY,
)  # fmt: skip
for name in ("vocab_size", "n_embd", "n_positions", "n_inner"):
    setting("gpt2 lm", "do not fit the model. of another shape", **{name: MANY})
setting("gpt2 lm", "does not divide by n_heads = 7", n_embd=MANY, n_head=7)
setting("llama lm", "cannot be built|do not fit", num_attention_heads=MANY, head_dim=MANY)
setting("llama lm", "heads", num_key_value_heads=MANY)
setting("gpt2 classification", "num_labels = 1000000000000", num_labels=10**12)
setting("gpt2 classification", "of another shape: head.proj.weight", num_labels=MANY)
setting("vit classification", "more than any", image_size=MANY, patch_size=1)
setting("vit classification", "of another shape: embed.proj.weight", num_channels=MANY)
setting("clip", "of another shape: .*text_proj", projection_dim=MANY)
setting("whisper", "of another shape: .*position", max_source_positions=MANY)
setting(
    "t5 v1.0", "of another shape: .*bias.table|exact buckets", relative_attention_num_buckets=MANY
)
setting("bert masked_lm", "of another shape: .*types|cannot be built", type_vocab_size=10**12)
setting("bert masked_lm", "cannot be built|config.json", type_vocab_size=10**30)

# Sizes that are none.
for size in (-1, 0, 2.5, "32", [32], {}, True):
    for name in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"):
        setting("gpt2 lm", f"{name} = .* must be a whole number", **{name: size})
for name in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"):
    setting("gpt2 lm", f"config.json.*(null: .*{name}|must be a whole number)", **{name: None})
setting("gpt2 lm", "does not divide by n_heads = 5", n_head=5)
setting("llama lm", "heads", num_key_value_heads=3)
setting("llama lm", "num_key_value_heads = 0", num_key_value_heads=0)
setting("roberta masked_lm", "max_len must be 1 or more", max_position_embeddings=1)
setting("mistral lm", "sliding_window = -4", sliding_window=-4)
setting("vit classification", "patch_size = 0", patch_size=0)
setting("vit classification", "does not divide into patches", patch_size=5)
setting("clip", "patch_size = 0", vision_config__patch_size=0)
setting("clip", "wrong type", text_config=[1])
setting("clip", "lacks 'vocab_size'", text_config={})

# Numbers that make no sense.
setting("gpt2 lm", "dropout must be in", resid_pdrop=2)
setting("gpt2 lm", "layer_norm_epsilon = nan", layer_norm_epsilon=float("nan"))
setting("gpt2 lm", "layer_norm_epsilon = -1.0", layer_norm_epsilon=-1.0)
setting("llama lm", "rms_norm_eps = -1", rms_norm_eps=-1)
setting("clip", "layer_norm_eps = -1", vision_config__layer_norm_eps=-1)
setting("llama lm", "theta", rope_parameters__rope_theta=0)
setting("llama lm", "theta|config.json", rope_parameters__rope_theta="many")
setting("llama rope linear lm", "factor", rope_parameters__factor=0)
setting("llama rope linear lm", "factor", rope_parameters__factor=-2.0)
setting("llama rope llama3 lm", "factor", rope_parameters__high_freq_factor=1.0)
setting(
    "llama rope yarn lm",
    "config.json|trained|max_pos",
    rope_parameters__original_max_position_embeddings=0,
)
setting("llama rope yarn lm", "lacks 'factor'", rope_parameters={"rope_type": "yarn"})
setting("llama lm", 'rotary scaling "su" is not known here', rope_parameters={"rope_type": "su"})
setting("llama lm", "config.json", rope_parameters=[1])
setting("t5 v1.0", "num_buckets = 0", relative_attention_num_buckets=0)
setting("t5 v1.0", "max_distance = 0", relative_attention_max_distance=0)
setting(
    "gpt2 lm",
    'activation "gelu_newest".*Did you mean "gelu_new"',
    activation_function="gelu_newest",
)
setting("gpt2 lm", "activation|wrong type", activation_function=["gelu"])
setting("t5 v1.0", "activation|wrong type", feed_forward_proj=7)
setting("roberta masked_lm", "offset", pad_token_id=-2)


def own_setting(family: str, message: str, **changes: Any) -> None:
    """A folder in our own layout with settings changed."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        sizes = {"vocab_size": 50, "max_len": 16, "d_model": 16, "n_layers": 1, "n_heads": 2}
        sizes |= {"n_mels": 8, "source_len": 8} if family == "whisper" else {}
        ch.build(family, seed=0, **sizes).save(folder)
        config = json.loads((folder / "config.json").read_text())["config"]
        edit(folder, config=config | changes)

    said = ", ".join(f"{name} = {value!r:.40}" for name, value in changes.items())
    hostile(message, name=f"our own {family} with {said}")(damage)


for name in ("bart", "t5", "whisper"):
    for depth in ("n_layers", "n_decoder_layers"):
        own_setting(name, f"says {MANY} layers, but the weights are only", **{depth: MANY})
        own_setting(name, f"{depth} is 1000000000000, more than any model", **{depth: 10**12})
        own_setting(name, f"{depth} must be 1 or more, not -1", **{depth: -1})
own_setting("gpt2", f"says {MANY} layers", n_layers=MANY)
for name in ("vocab_size", "d_model", "max_len", "d_ff"):
    own_setting("gpt2", "do not fit the model. of another shape", **{name: MANY})
own_setting("gpt2", "n_layer", n_layer=2)
own_setting("gpt2", "n_layers", n_layers="2")


# --- keys ---


@hostile(r"missing: .*stack.blocks.\*.ffn.in_proj.weight \(2 times\).*")
def many_missing_keys(folder):
    change_weights(
        folder, lambda ts: {k: t for k, t in ts.items() if ".h.1." not in k and "ln_f" in k}
    )


@hostile("missing: stack.blocks.1.ffn.in_proj.bias, stack.norm.bias|missing: .*stack.norm.bias")
def two_missing_keys(folder):
    gone = ("transformer.h.1.mlp.c_fc.bias", "transformer.ln_f.bias")
    change_weights(folder, lambda ts: {k: t for k, t in ts.items() if k not in gone})


@hostile(r"no place in this model: a\.\* \(40 times\)")
def many_keys_too_many(folder):
    change_weights(folder, lambda ts: ts | {f"a.{i}": torch.ones(1) for i in range(40)})


@hostile(r"no place in this model: transformer.h.99999999999.ln_1.weight")
def key_of_a_layer_that_is_not_there(folder):
    change_weights(folder, lambda ts: ts | {"transformer.h.99999999999.ln_1.weight": torch.ones(1)})


@hostile(r"no place in this model: .* and 2.. more")
def keys_of_every_name(folder):
    change_weights(folder, lambda ts: ts | {f"{i}_" * 40: torch.ones(1) for i in range(300)})


@hostile(
    r"twice, with different numbers: head.proj.bias; keys that .*: more.*; missing: head.dense.bias"
    r".*of another shape: embed.norm.bias",
    "bert masked_lm",
)
def all_that_can_be_wrong(folder):
    def damage(tensors):
        tensors.pop("cls.predictions.transform.dense.bias")
        return tensors | {
            "cls.predictions.decoder.bias": torch.ones(99),
            "more": torch.ones(1),
            "bert.embeddings.LayerNorm.bias": torch.ones(3),
        }

    change_weights(folder, damage)


@hostile(r"of another shape: .*tokens.weight is \(3, 32\), not \(99, 32\)")
def several_wrong_shapes(folder):
    change_weights(
        folder,
        lambda ts: (
            ts
            | {"transformer.wte.weight": torch.ones(3, 32), "transformer.ln_f.bias": torch.ones(7)}
        ),
    )


@hostile("no place in this model|do not fit")
def fewer_layers_than_the_file_has(folder):
    edit(folder, n_layer=1)


@hostile("missing: stack.blocks.2")
def more_layers_than_the_file_has(folder):
    edit(folder, n_layer=3)


for shape in ((), (96,), (32, 95), (32, 2), (2, 32, 96), (0, 0), (96, 32)):

    @hostile("of another shape: .*_proj.weight", name=f"fused matrix of shape {shape}")
    def _(folder, shape=shape):
        key = "transformer.h.0.attn.c_attn.weight"
        change_weights(folder, lambda ts: ts | {key: torch.zeros(shape)})


for shape in ((), (32,), (2, 48, 32), (32, 48)):

    @hostile("of another shape: .*ffn.out_proj.weight", name=f"transposed matrix of shape {shape}")
    def _(folder, shape=shape):
        key = "transformer.h.0.mlp.c_proj.weight"
        change_weights(folder, lambda ts: ts | {key: torch.zeros(shape)})


for shape in ((), (96,), (95, 32), (96, 31)):

    @hostile("of another shape: .*q_proj.weight", "neox lm", f"matrix by heads of shape {shape}")
    def _(folder, shape=shape):
        key = "gpt_neox.layers.0.attention.query_key_value.weight"
        change_weights(folder, lambda ts: ts | {key: torch.zeros(shape)})


for shape in ((), (2, 99), (1, 1, 98)):

    @hostile("of another shape: head.proj.bias", "bart", f"bias of the logits of shape {shape}")
    def _(folder, shape=shape):
        change_weights(folder, lambda ts: ts | {"final_logits_bias": torch.zeros(shape)})


@hostile("tied here, but two different tensors in the file: head.proj.weight differs from")
def tie_that_the_file_breaks(folder):
    change_weights(folder, lambda ts: ts | {"lm_head.weight": torch.zeros(99, 32)})


@hostile("tied here, but two different tensors in the file: decoder.embed.tokens", "t5 v1.0")
def tie_of_two_sides_that_the_file_breaks(folder):
    change_weights(folder, lambda ts: ts | {"decoder.embed_tokens.weight": torch.zeros(99, 32)})


@hostile(
    "twice, with different numbers: encoder.embed.tokens.weight",
    "t5 v1.0",
)
def one_parameter_under_two_names_that_differ(folder):
    change_weights(folder, lambda ts: ts | {"encoder.embed_tokens.weight": torch.zeros(99, 32)})


@hostile("twice, with different numbers: head.proj.bias", "bert masked_lm")
def one_bias_under_two_names_that_differ(folder):
    change_weights(folder, lambda ts: ts | {"cls.predictions.decoder.bias": torch.zeros(99)})


@hostile("missing: head.proj.weight")
def head_that_is_said_to_be_there(folder):
    edit(folder, tie_word_embeddings=False)


# --- what stands beside a model ---

SENTENCE = "sentence-transformers pooling"


@hostile("modules .*Dense.*not supported", SENTENCE)
def module_that_is_not_known(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


@hostile("modules .*Own.*not supported", SENTENCE)
def module_of_somebody_else(folder):
    (folder / "custom.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    (folder / "modules.json").write_text('[{"idx": 0, "path": "", "type": "custom.Own"}]')


for path in ("../1_Pooling", "/etc", "..", ".", "a/b"):

    @hostile("leads out of the folder", SENTENCE, f"pooling in {path!r}")
    def _(folder, path=path):
        modules = json.loads((folder / "modules.json").read_text())
        modules[1]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))


for content in ('{"a": 1}', "7", '["a"]', '[{"type": 7, "path": 7}]', "[[]]"):

    @hostile("modules", SENTENCE, f"modules.json that is {content}")
    def _(folder, content=content):
        (folder / "modules.json").write_text(content)


for modes in ((), ("cls_token", "mean_tokens"), ("mean_sqrt_len_tokens",)):

    @hostile("asks for the poolings", SENTENCE, f"poolings {modes}")
    def _(folder, modes=modes):
        asked = {f"pooling_mode_{mode}": True for mode in modes}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(asked))


@hostile("Pooling", SENTENCE)
def pooling_that_is_a_list(folder):
    (folder / "1_Pooling" / "config.json").write_text("[]")


@hostile("1_Pooling/config.json is missing", SENTENCE)
def pooling_that_is_not_there(folder):
    shutil.rmtree(folder / "1_Pooling")


for name in ("modules.json", "1_Pooling/config.json"):

    @hostile(f"{name} cannot be read as JSON", SENTENCE, f"{name} that is no JSON")
    def _(folder, name=name):
        (folder / name).write_bytes(b"{oops")


for name in ("generation_config.json", "preprocessor_config.json"):
    for content in (b"{oops", b"", b"\xff\xff"):

        @hostile(f"{name} cannot be read as JSON", name=f"{name} that is {content!r}")
        def _(folder, name=name, content=content):
            (folder / name).write_bytes(content)

    for content in ("[]", "7", '"text"', "null"):

        @hostile(f"{name}.* table", name=f"{name} that is {content}")
        def _(folder, name=name, content=content):
            (folder / name).write_text(content)


for said in (
    {"bad_words_ids": [5]},
    {"bad_words_ids": [[500]]},
    {"bad_words_ids": 5},
    {"bad_words_ids": [["a"]]},
    {"decoder_start_token_id": [0]},
    {"decoder_start_token_id": 99},
    {"decoder_start_token_id": True},
    {"forced_bos_token_id": -1},
    {"forced_bos_token_id": "a"},
    {"eos_token_id": {}},
    {"eos_token_id": [[1]]},
    {"num_beams": 0},
    {"num_beams": 10**9},
    {"num_beams": 2.5},
    {"length_penalty": float("nan")},
    {"length_penalty": 10**12},
    {"length_penalty": "long"},
):
    (name,) = said

    @hostile(f"generation_config.json says {name} = .*must be", "t5 v1.0", f"generation {said}")
    def _(folder, said=said):
        edit(folder, "generation_config.json", **said)


for content in (b"{oops", b"", b"[]", b"\0" * 99, b'{"version": "1.0"}'):

    @hostile("tokenizer.json", name=f"tokenizer.json that is {content[:20]!r}")
    def _(folder, content=content):
        (folder / "tokenizer.json").write_bytes(content)


@hostile("tokenizer_config.json", "bert masked_lm")
def tokeniser_settings_that_are_none(folder):
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (folder / "tokenizer_config.json").write_text("[1")


for content in ('{"max_seq_length": "long"}', '{"max_seq_length": -1}', "[]"):

    @hostile("max_seq_length|sentence_bert_config", SENTENCE, f"sentence settings {content}")
    def _(folder, content=content):
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
        (folder / "sentence_bert_config.json").write_text(content)


# --- what looks strange and is right ---


def test_code_in_a_folder_of_a_known_model_is_not_run(good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good("gpt2 lm"), folder)
    (folder / "modeling_mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert ch.load(folder).config.kind == "gpt2"
    assert not (folder / "ran").exists()


def test_links_of_the_hubs_cache_are_followed(good, tmp_path):
    """snapshots/<revision>/x -> ../../blobs/<hash>, in the folders below as well."""
    home = tmp_path / "models--me--mine"
    folder, blobs = home / "snapshots" / "0123abcd", home / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(good(SENTENCE), folder)
    for number, path in enumerate(p for p in sorted(folder.rglob("*")) if p.is_file()):
        shutil.move(path, blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    assert ch.load(folder).config.head.mode == "mean"


def test_links_inside_the_folder_are_followed(good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good("gpt2 lm"), folder)
    (folder / WEIGHTS).rename(folder / "weights")
    (folder / WEIGHTS).symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert ch.load(tmp_path / "link").config.kind == "gpt2"


def test_a_single_file_goes_before_shards(good, tmp_path):
    """As transformers does it: an index that was left over is not looked at."""
    folder = tmp_path / "model"
    shutil.copytree(good("gpt2 lm"), folder)
    index(folder, {"a": "gone.safetensors"})
    (folder / "pytorch_model.bin").write_bytes(b"what")
    assert ch.load(folder).config.kind == "gpt2"


def test_both_names_of_a_tie_with_the_same_numbers_are_fine(good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good("t5 v1.0"), folder)
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    change_weights(folder, lambda ts: ts | {name: ts["shared.weight"].clone() for name in names})
    expected = ch.load(good("t5 v1.0")).net.state_dict()
    assert all(t.equal(expected[name]) for name, t in ch.load(folder).net.state_dict().items())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_files_that_may_not_be_read(name, good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good("gpt2 lm"), folder)
    (folder / name).chmod(0)
    with pytest.raises(ClearheadError, match=name):
        ch.load(folder)


VALUES = [None, -1, 0, 1.5, "x", [], {}, True, 10**12, float("nan"), -3.0, [1], {"a": 1}, 2**31]
FUZZED = [
    "gpt2 lm", "llama rope yarn lm", "mistral lm", "qwen2 lm", "qwen3 lm", "neox lm", SENTENCE,
    "roberta masked_lm", "distilbert classification", "t5 v1.0", "marian", "bart",
    "vit classification", "clip", "whisper",
]  # fmt: skip


def places(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every setting, of tables in tables too."""
    found: list[tuple[str, ...]] = []
    for name, value in config.items():
        found.append((*above, name))
        found += places(value, (*above, name)) if isinstance(value, dict) else []
    return found


def try_all(folder: Path, file: str, share: int, use: Callable[[ch.Model], Any]) -> None:
    """Each setting of a file is set to things that it cannot be: an error of ours, or none."""
    whole = (folder / file).read_text()
    cases = [(path, value) for path in places(json.loads(whole)) for value in VALUES]
    for path, value in cases[::share]:
        config = json.loads(whole)
        table = config
        for step in path[:-1]:
            table = table[step]
        table[path[-1]] = value
        (folder / file).write_text(json.dumps(config))
        try:
            use(ch.load(folder))
        except ClearheadError:
            pass
        except Exception as error:
            pytest.fail(f"{file}: {'.'.join(path)} = {value!r}: {error!r}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", FUZZED)
@pytest.mark.parametrize(
    "share", [pytest.param(13, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_any_value_in_any_setting_is_refused_or_right(row, share, good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good(row), folder)
    try_all(folder, "config.json", share, lambda model: model)


GENERATION = {
    "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0, "decoder_start_token_id": 0,
    "forced_bos_token_id": 3, "bad_words_ids": [[5]], "num_beams": 2, "length_penalty": 1.0,
    "max_length": 8, "do_sample": False, "temperature": 1.0, "no_repeat_ngram_size": 0,
    "suppress_tokens": [4],
}  # fmt: skip
TOKENS = {
    "tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16,
    "unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]", "cls_token": "[CLS]",
    "clean_up_tokenization_spaces": True, "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"0": {"content": "[PAD]", "special": True, "lstrip": False}},
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ["gpt2 lm", "t5 v1.0"])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "share", [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_any_value_in_what_writing_needs_is_refused_or_right(row, file, share, good, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good(row), folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))

    def write(model: ch.Model) -> None:
        model.generate("a b", max_new_tokens=2)
        if model.config.shape == "encoder-decoder":
            model.translate("a b", max_new_tokens=2)

    write(ch.load(folder))
    try_all(folder, file, share, write)
