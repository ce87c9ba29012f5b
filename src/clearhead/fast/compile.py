"""Compiled products: made by LLVM in a second or some, then kept on disk.

LLVM comes with the package llvmlite. Threads are those of the OpenMP library that torch itself has
loaded: a second pool would fight with torch's over the same cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearhead import __version__
from clearhead.errors import require
from clearhead.fast.formats import WHOLE
from clearhead.memory import give_back, let_go
from clearhead.paths import cache_folder

MISSING = "Fast products take llvmlite, which is not installed: pip install 'clearhead[fast]'."
ARGUMENTS = 10  # of every compiled function
# What attention is told, each in 8 bytes: its heads; where the number of keys that the first row
# sees stands, how many bytes behind it that of the next (0: one number for all), and the most of
# these; a table with the row of the buffers in which a row's key lies (of rows that share their
# past: the slot, counted over all rows; then k_row is the step of a slot, and k_key 0), and the
# bytes from a row of the table and from a key to the next; and the steps between numbers.
FACTS = (
    *("heads", "group", "d", "seen", "each", "most", "queries"),
    *("lies", "lies_row", "lies_key"),
    *("q_row", "q_head", "q_query", "k_row", "k_head", "k_key", "scale"),
)
# What attention that learns is told, each in 8 bytes: sizes; where the numbers of queries and of
# keys of each sequence stand, and the largest score and 1 / the sum of each query; where each
# tensor is, and the bytes from a sequence, a head and a token of it to the next.
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
HEAD_FACTS = (
    *("heads", "d", "queries", "keys", "causal", "scale", "asking", "seen", "tops", "shares"),
    *(f"{name}{what}" for name in TENSORS for what in ("", "_row", "_head", "_token")),
)
TOKENS = 256  # of a head, that `bounds` looks at together
FORK, WHO, TEAM = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"  # of torch's OpenMP
AHEAD = 2048  # bytes: see `words.Shape.ahead`
OLDEST = (0, 46)  # of llvmlite; before, addresses had types
_listeners: list[Callable[[str], None]] = []
_loading = threading.RLock()


@contextlib.contextmanager
def told(listener: Callable[[str], None]) -> Any:
    """Within the block, `listener` is told what is waited for, in a sentence."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(sentence: str) -> None:
    """Say it to whoever listens."""
    for listener in _listeners:
        listener(sentence)


@functools.cache
def available() -> bool:
    """Whether products can be compiled here; it imports nothing of LLVM."""
    if importlib.util.find_spec("llvmlite") is None:
        return False
    numbers = re.findall(r"\d+", importlib.metadata.version("llvmlite"))
    return tuple(map(int, numbers[:2])) >= OLDEST


@dataclass(frozen=True)
class Product:
    """The compiled functions of one weight format: see `emit.write_module`."""

    run: Any
    """(x, w, scales, bias, out, m, n, k, threads, scratch), addresses and sizes."""
    several: Any
    """(x, table, count, 0, out, m, 0, k, threads, scratch): several products of one x."""
    owner: Any
    """What keeps the code in memory."""


def _once(make: Callable[..., Any]) -> Any:
    """A cache whose values are made once, whichever threads ask: what a slower one had made would
    be freed, with code in it that may be running.
    """
    kept: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def made(*given: Any) -> Any:
        if given not in kept:
            with _loading:
                if given not in kept:
                    kept[given] = make(*given)
        return kept[given]

    made.cache_clear = kept.clear  # type: ignore[attr-defined]
    return made


@_once
def product(form: str) -> Product:
    """The compiled product of a weight format."""
    return loaded(form, _code_of(form))


@_once
def steps() -> dict[str, Any]:
    """Name -> the compiled function, of those that `steps.write_module` writes."""
    return functions("steps", _code_of("steps"))


@_once
def learning() -> dict[str, Any]:
    """Name -> the compiled function, of those that `learning.write_module` writes."""
    return functions("learning", _code_of("learning"))


def _code_of(name: str) -> bytes:
    """The code of a format's product, or of the steps, for this processor."""
    require(available(), MISSING)
    import llvmlite
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=host, features=features.flatten(), opt=3
    )
    key = (__version__, BEGUN, host, features.flatten(), machine.triple, llvmlite.__version__)
    mark = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    kept = cache_folder() / "code" / f"{name}-{mark}.o"
    return _kept(kept, name, _shape(dict(features), host), machine)


def _sources() -> str:
    """A hash of the files that write the code: reading them is much quicker than writing it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


BEGUN = _sources()  # as this process found them


def loaded(form: str, code: bytes) -> Product:
    """The functions of a product in compiled code."""
    engine = _engine(code)
    run, several = (engine.get_function_address(form + end) for end in ("", "_several"))
    ten = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * ARGUMENTS)
    return Product(ten(run), ten(several), engine)


def functions(module: str, code: bytes) -> dict[str, Any]:
    """Those of a module in compiled code; they take ten whole numbers each."""
    return _Functions(module, _engine(code))


class _Functions(dict[str, Any]):
    """Functions, each looked up when it is first asked for."""

    def __init__(self, module: str, engine: Any) -> None:
        super().__init__()
        self.module, self.engine = module, engine

    def __missing__(self, name: str) -> Any:
        address = self.engine.get_function_address(f"{self.module}_{name}")
        if not address:
            raise KeyError(name)
        self[name] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * ARGUMENTS)(address)
        return self[name]


def _engine(code: bytes) -> Any:
    """What keeps compiled code in memory."""
    from llvmlite import binding as llvm

    for symbol, address in _openmp().items():
        llvm.add_symbol(symbol, address)
    machine = llvm.Target.from_default_triple().create_target_machine()  # the engine keeps it
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    let_go("libllvmlite")
    return engine


def _text(form: str, shape: Any) -> str:
    """LLVM's text for a format, for the steps or for what learns."""
    from clearhead.fast import emit, integers, learning, nibbles, steps

    if form in ("steps", "learning"):
        return {"steps": steps, "learning": learning}[form].write_module(form, shape)
    if form not in WHOLE:
        return emit.write_module(form, shape)
    narrow = replace(shape, lanes=8) if shape.dot == "sign" else shape  # as AVX2 has it
    return {"int8": integers, "int4": nibbles}[form].write_module(form, narrow)


def compiled_code(form: str, shape: Any, machine: Any) -> bytes:
    """The machine code of a format's functions."""
    from llvmlite import binding as llvm

    module = llvm.parse_assembly(_text(form, shape))
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _kept(path: Path, form: str, shape: Any, machine: Any) -> bytes:
    """The code from disk, or compiled and written there."""
    with contextlib.suppress(OSError):
        code = path.read_bytes()
        if hashlib.sha256(code[:-32]).digest() == code[-32:]:  # whole
            return code[:-32]
    others = {"steps": "the steps between products", "learning": "the products of training"}
    what = others.get(form, f"the {form} product")
    tell(f"compiling {what} for this processor, once")
    code = compiled_code(form, shape, machine)
    give_back()  # some 40 MB, of which the work that waits would else be the more
    if _sources() != BEGUN:  # an upgrade or an edit meanwhile: who knows what wrote this
        return code
    with contextlib.suppress(OSError):  # a disk that cannot be written to costs time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code + hashlib.sha256(code).digest())
        os.replace(file.name, path)
    return code


def _shape(features: dict[str, bool], host: str) -> Any:
    """Vectors and tiles for a processor with these features."""
    from clearhead.fast.words import Shape

    # As it was measured on Zen 3 to 5, and on server processors of Intel.
    ahead = 0 if host.startswith("znver") else AHEAD
    if features.get("avx512f"):  # 32 registers of 16 numbers
        return Shape(16, 4, 4, _dot(features, "avx512vnni"), 12, ahead)
    # 16 of 8 (AVX2), or 32 of 4 in pairs (ARM)
    return Shape(8, 3, 2, _dot(features, "avxvnni"), 6, ahead)


def _dot(features: dict[str, bool], whole: str) -> Any:
    """How bytes are multiplied where this feature does it at once."""
    return "vnni" if features.get(whole) else "sign" if features.get("avx2") else "plain"


@functools.cache
def _openmp() -> dict[str, int]:
    """Name -> address of the functions that are needed of OpenMP; 0 where there is none."""
    names = (FORK, WHO, TEAM)
    for library in _loaded():
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(library)
            return {name: _address(getattr(found, name)) for name in names}
    return dict.fromkeys(names, 0)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _loaded() -> list[str]:
    """The OpenMP libraries of this process, torch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:  # another system: threads are not used there
        return []
    paths = [line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")]
    found = {path for path in paths if re.search(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$", path)}
    return sorted(found, key=lambda path: ("/torch/" not in path, path))


def threads() -> int:
    """How many threads a product uses: torch's number, or one where there is no OpenMP."""
    return torch.get_num_threads() if _has_openmp() else 1


@functools.cache
def _has_openmp() -> bool:
    return all(_openmp().values())
