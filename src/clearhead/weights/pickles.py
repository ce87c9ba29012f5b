"""Torch's .bin and .pt files, read without running anything that is in them.

Such a file is a pickle, which is a program: loaded carelessly it can call any function. Here torch
loads it with weights_only, which calls nothing but the few functions that rebuild tensors; and
before that the program is looked through without running it. It may name nothing else at all, and
neither it nor the zip around it may claim sizes that would fill the memory.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, require

MOST_PROGRAM = 1 << 23  # bytes of the pickle itself; that of 40000 tensors is smaller
MOST_NESTING = 64  # hashing a tuple in a tuple in a tuple ... needs stack for each
MOST_NUMBER = 1 << 61  # beyond it, chosen numbers would all hash alike
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first thing in a file from before torch 1.6

# All that it may name: a kind of dict, tensors, and their number formats.
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    *(
        f"torch.{kind}Storage"
        for kind in "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()  # noqa: SIM905
    ),
    *(
        f"torch.{name}"
        for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()  # noqa: SIM905
    ),
}

# All that it may do: what torch.save writes, in pickle protocol 2.
_OPCODES = set(
    "PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE "  # noqa: SIM905
    "NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING BINPUT LONG_BINPUT "
    "BINGET LONG_BINGET SETITEM SETITEMS APPEND APPENDS GLOBAL REDUCE BUILD BINPERSID".split()
)


def read_pickle(path: str | Path) -> dict[str, Any]:
    """What a torch file holds, on the CPU and memory-mapped where the format allows it.

    It is a dict with texts as keys, or an error. No code in the file is run.
    """
    path = Path(path)
    require(os.path.isfile(path), f"There is no file {path}: check the path.")
    try:
        mapped = _look_through(path)
        loaded = torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=mapped)
        _check_tensors(loaded, path)
    except ClearheadError:
        raise
    except Exception as error:  # whatever a damaged file makes of torch, zipfile and pickle
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ClearheadError(
            f"{path} is not a whole torch file ({reason}): it is truncated, damaged or of another "
            "format. Download it again, or ask for a safetensors file."
        ) from error
    require(
        isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded),
        f"{path} holds a {type(loaded).__name__}, not tensors by name: ask for the model's weights "
        "alone, best as a safetensors file.",
    )
    return loaded


def _look_through(path: Path) -> bool:
    """Check a file before torch sees it; whether it is a zip, which can be mapped."""
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"
        file.seek(0)
        start = b"" if zipped else file.read(MOST_PROGRAM)
    if zipped:
        _check_program(io.BytesIO(_zipped_program(path)), path, MOST_NUMBER)
        return True
    _check_legacy(start, path)
    return False


def _zipped_program(path: Path) -> bytes:
    """The pickle in a torch zip, once the zip's own directory is believable."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = Counter(entry.filename for entry in entries)
        programs = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        require(
            stored and sum(entry.file_size for entry in entries) <= size,
            f"{path} is a zip that unpacks to more than itself; torch's own are not compressed. It "
            "is refused: ask for a safetensors file.",
        )
        require(
            len(programs) == 1
            and max(names.values()) == 1
            and len({name.partition("/")[0] for name in names}) == 1,
            f"{path} is a zip, but not one that torch.save wrote (one folder with one data.pkl): "
            "check what was downloaded.",
        )
        require(programs[0].file_size <= MOST_PROGRAM, _too_long(path))
        return archive.read(programs[0])


def _check_legacy(start: bytes, path: Path) -> None:
    """The five pickles at the start of a file from before torch 1.6."""
    stream = io.BytesIO(start)
    try:
        opening = [argument for _, argument, _ in pickletools.genops(stream)]
    except Exception:
        opening = []
    require(
        opening == [2, LEGACY_MAGIC, None],  # protocol, magic number, end
        f"{path} is in neither of torch's two file formats. A bare pickle would run code while "
        "loading, and is refused. Check what was downloaded, or ask for a safetensors file.",
    )
    most = max(path.stat().st_size, 1 << 20)  # torch allocates these sizes before it compares them
    for _ in range(4):
        _check_program(stream, path, most)


def _check_program(stream: io.BytesIO, path: Path, most: int) -> None:
    """Refuse a pickle that does more than lay out tensors, without running it."""
    try:
        for depth, opcode, argument in _rehearsed(stream):
            if opcode not in _OPCODES:
                raise ClearheadError(
                    _refused(path, f"uses {opcode}, unlike a pickle of torch.save")
                )
            if opcode == "GLOBAL" and argument.replace(" ", ".") not in _NAMES:
                raise ClearheadError(_refused(path, f"names {argument.replace(' ', '.')}"))
            if depth > MOST_NESTING:
                raise ClearheadError(_refused(path, f"nests deeper than {MOST_NESTING}"))
            if isinstance(argument, int) and abs(argument) >= most:
                raise ClearheadError(_refused(path, "holds a number beyond all sizes"))
    except ClearheadError:
        raise
    except Exception as error:
        raise ClearheadError(
            f"{path} is not a whole torch file (its pickle is damaged: {str(error)[:200]}). "
            "Download it again, or ask for a safetensors file."
        ) from error


def _rehearsed(stream: io.BytesIO) -> Iterator[tuple[int, str, Any]]:
    """Every step of a pickle, with how deeply nested the thing is that it makes."""
    stack: list[int] = []  # the depth of each thing, in place of the thing
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name, before = opcode.name, opcode.stack_before
        depth = 0
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            taken = _taken(stack, marks, before)
            # A list or dict that is added to is no deeper than before, unless by what is added.
            grows = name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS")
            first = taken[:1] if grows else []
            depth = max([*first, *(1 + d for d in taken[len(first) :])], default=0)
            stack += [depth] * len(opcode.stack_after)
        yield depth, name, argument


def _taken(stack: list[int], marks: list[int], before: list[Any]) -> list[int]:
    """What a step takes off the stack: a fixed number of things, or all down to the last mark."""
    if pickletools.markobject in before:
        start = marks.pop() - before.index(pickletools.markobject)
    else:
        start = len(stack) - len(before)
    if start < 0 or (marks and start < marks[-1]):
        raise ValueError("it takes what is not there")
    taken = stack[start:]
    del stack[start:]
    return taken


def _refused(path: Path, what: str) -> str:
    return (
        f"{path} {what}: it would run code while loading, or more than weights need, and is "
        "refused; nothing of it was run. Ask for a safetensors file."
    )


def _too_long(path: Path) -> str:
    return (
        f"{path} has a pickle of more than {MOST_PROGRAM >> 20} MB, which weights do not need. It "
        "is refused: ask for a safetensors file."
    )


def _check_tensors(loaded: Any, path: Path) -> None:
    """Every tensor must have its numbers in the file: not one number repeated a billion times."""
    todo: list[Any] = [loaded]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor):
            held = item.untyped_storage().nbytes()
            require(
                item.numel() * item.element_size() <= held,
                f"{path} has a tensor of shape {list(item.shape)} with {held} bytes of numbers, "
                "too few: it is refused. Ask for a safetensors file.",
            )
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            todo += item.values() if isinstance(item, dict) else item


WHISPER_DIMS = (
    "n_mels",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_vocab",
    "n_text_ctx",
    "n_text_state",
    "n_text_head",
    "n_text_layer",
)


def read_whisper_pt(path: str | Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes and the tensors of an official Whisper file (tiny.en.pt, ...), as they are."""
    loaded = read_pickle(path)
    require(
        loaded.keys() == {"dims", "model_state_dict"},
        f"{path} is not an official Whisper file: it holds {_listed(loaded)}, not dims and "
        "model_state_dict.",
    )
    dims, tensors = loaded["dims"], loaded["model_state_dict"]
    require(
        isinstance(dims, dict)
        and dims.keys() == set(WHISPER_DIMS)
        and all(type(size) is int and 1 <= size <= 1 << 20 for size in dims.values())
        and max(dims["n_audio_layer"], dims["n_text_layer"]) <= 1024,
        f"{path} has no such sizes as a Whisper model: {str(dims)[:300]}. It needs "
        f"{', '.join(WHISPER_DIMS)}, each a sensible whole number.",
    )
    require(
        isinstance(tensors, dict)
        and all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors.values())
        and all(isinstance(name, str) for name in tensors),
        f"{path} has a model_state_dict that is not tensors of floating-point numbers by name.",
    )
    _check_whisper(dims, tensors, path)
    return dict(dims), dict(tensors)


def _check_whisper(dims: dict[str, int], tensors: dict[str, Tensor], path: str | Path) -> None:
    """The tensors that the sizes are about have those sizes."""
    said = {
        "encoder.conv1.weight": (dims["n_audio_state"], dims["n_mels"], 3),
        "encoder.positional_embedding": (dims["n_audio_ctx"], dims["n_audio_state"]),
        "decoder.token_embedding.weight": (dims["n_vocab"], dims["n_text_state"]),
        "decoder.positional_embedding": (dims["n_text_ctx"], dims["n_text_state"]),
    }
    odd = [
        f"{name} is {tuple(tensors[name].shape) if name in tensors else 'missing'}, not {shape}"
        for name, shape in said.items()
        if name not in tensors or tuple(tensors[name].shape) != shape
    ]
    require(not odd, f"The sizes in {path} are not those of its tensors: {'; '.join(odd)}.")


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names))[:8]) or "nothing"
