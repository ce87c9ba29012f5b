"""Ratchets: the laws of the house, read off the source. They may be tightened, never loosened."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import clearhead as ch
import tiny
from clearhead.attention.mask import Mask
from clearhead.attention.rotary import RopeScaling
from clearhead.config import Spec
from clearhead.models.family import FAMILIES
from clearhead.weights.hf import MODEL_TYPES

ROOT = Path(ch.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

MAX_LINES, MAX_CONSTRUCTOR, MAX_FORWARD = 500, 12, 6

# Who may import whom: a line may import from those above it, and its parts not from each other.
ORDER = [
    {"errors"},
    {"config", "tap", "memory", "paths"},
    {"attention"},
    {"layers"},
    {"models"},
    {"fast"},
    {"weights", "text", "media"},
    {"data"},
    {"generate", "lens", "measure"},
    {"model"},
    {"sources"},
    {"api"},
    {"recipes"},
    {"training"},
    {"serve"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


@functools.cache
def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


def part(file: str) -> str:
    """The part of the house that a file or a module belongs to: "attention", "cli", "tap", ..."""
    return file.removesuffix(".py").split("/")[0]


def classes(file: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef))


def methods(cls: ast.ClassDef, name: str) -> Iterator[ast.FunctionDef]:
    return (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Its parameters, self aside."""
    a = function.args
    named = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [*named, *(arg.arg for arg in (a.vararg, a.kwarg) if arg)][1:]


def is_dataclass(cls: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list)


def fields(cls: ast.ClassDef) -> list[tuple[int, ast.AnnAssign]]:
    """A dataclass' fields, each with its place in the body."""
    return [
        (i, node)
        for i, node in enumerate(cls.body)
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    ]


def calls(file: str) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


# --- sizes ---


@pytest.mark.parametrize("file", FILES)
def test_files_are_small(file):
    assert source(file).count("\n") <= MAX_LINES


@pytest.mark.parametrize("file", FILES)
def test_constructors_take_few_parameters(file):
    for cls in classes(file):
        for init in methods(cls, "__init__"):
            assert len(parameters(init)) <= MAX_CONSTRUCTOR, cls.name
        if is_dataclass(cls):
            assert len(fields(cls)) <= MAX_CONSTRUCTOR, cls.name


@pytest.mark.parametrize("file", FILES)
def test_forwards_take_few_parameters_and_return_one_thing(file):
    for cls in classes(file):
        for forward in methods(cls, "forward"):
            assert len(parameters(forward)) <= MAX_FORWARD, cls.name
            returns = [n for n in ast.walk(forward) if isinstance(n, ast.Return)]
            assert not any(isinstance(n.value, ast.Tuple) for n in returns), cls.name


# --- imports ---


def imported(file: str) -> set[str]:
    """The parts of clearhead that a file imports from, wherever the import stands."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            module = node.module or ""
            if module == "clearhead":
                found |= {alias.name for alias in node.names}
            elif module.startswith("clearhead."):
                found.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("clearhead.")
            }
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_go_down_only(file):
    own = part(file)
    assert own in RANK, f"{own} has no place in the order: give it one"
    for other in imported(file) - {own, "__version__"}:
        assert other in RANK, f"{file} imports {other}, which has no place in the order"
        assert RANK[other] < RANK[own], f"{file} imports upwards or sideways, from {other}"


@pytest.mark.parametrize("file", FILES)
def test_transformers_is_an_oracle_not_a_dependency(file):
    if file in ("weights/check.py", "measure/speed.py"):
        return  # the bridges that compare with it, where it is installed
    for node in ast.walk(tree(file)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & {"transformers", "pickle"}


# --- choices are made when a model is built ---


@functools.cache
def module_classes() -> set[str]:
    """The names of all classes that come from nn.Module."""
    bases = {
        cls.name: {ast.unparse(base).split(".")[-1] for base in cls.bases}
        for file in FILES
        for cls in classes(file)
    }
    found = {"Module"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - {"Module"}


@pytest.mark.parametrize("file", FILES)
def test_no_module_keeps_or_reads_a_config(file):
    modules = module_classes()
    assert {"Attention", "Block", "Stack", "Decoder", "Embedding", "Softmax"} <= modules
    for cls in classes(file):
        if cls.name not in modules:
            continue
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                assert node.attr not in {"config", "cfg", "spec", "args"}, cls.name
        for forward in methods(cls, "forward"):
            names = {n.id for n in ast.walk(forward) if isinstance(n, ast.Name)}
            assert not names & {"config", "cfg"}, cls.name


@pytest.mark.parametrize("name", tiny.MODELS)
def test_no_part_of_a_network_is_a_spec(name):
    """But masks, which are formulas, and how rotary angles are stretched, which is one too."""
    kept: list[tuple[str, object]] = []
    for path, module in tiny.tiny(name).named_modules():
        for attribute, value in vars(module).items():
            inner = value if isinstance(value, (tuple, list)) else [value]
            inner = list(value.values()) if isinstance(value, dict) else inner
            kept += [(f"{path}.{attribute}", v) for v in inner if isinstance(v, Spec)]
    assert [place for place, value in kept if not isinstance(value, (Mask, RopeScaling))] == []
    masked = not name.startswith("rnn")
    assert any(isinstance(value, Mask) for _, value in kept) == masked  # it looks where they are


@pytest.mark.parametrize("file", FILES)
def test_no_architecture_is_named_outside_its_home(file):
    """Formats of foreign weights and tokenisers have the name of a model, and so have styles of
    initialisation; nothing else may ask which architecture it holds.
    """
    if part(file) in {"models", "weights", "text"} or file == "layers/init.py":
        return
    names = {*FAMILIES, *MODEL_TYPES}
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.Compare, ast.match_case)):
            said = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            assert not said & names, f"{file}:{node.lineno} asks for an architecture"


def test_a_new_family_is_one_file_and_one_line():
    """GPT-NeoX was written to prove it."""
    lines = {
        file: [line for line in source(file).splitlines() if "gpt_neox" in line] for file in FILES
    }
    lines = {file: found for file, found in lines.items() if found and part(file) != "text"}
    home = "models/gpt_neox.py"
    assert set(lines) <= {home, "models/family.py", "models/presets.py", "weights/hf.py"}
    assert lines["models/family.py"] == ['    "gpt_neox": "clearhead.models.gpt_neox",']
    assert len(lines["weights/hf.py"]) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_its_name_once(name):
    """The table, the file and the kind of its settings agree."""
    assert FAMILIES[name] == f"clearhead.models.{name}"
    (config,) = (cls for cls in classes(f"models/{name}.py") if cls.name == "Config")
    assert [ast.unparse(keyword.value) for keyword in config.keywords] == [f"'{name}'"]


# --- what is said ---


@pytest.mark.parametrize("file", FILES)
def test_every_module_says_what_it_is(file):
    text = ast.get_docstring(tree(file))
    assert text
    assert len(text) > 10


@pytest.mark.parametrize("file", FILES)
def test_every_public_class_and_function_says_what_it_is(file):
    for node in tree(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{file}: {node.name}"


@pytest.mark.parametrize("file", FILES)
def test_every_field_is_explained_under_it(file):
    for cls in filter(is_dataclass, classes(file)):
        for i, field in fields(cls):
            after = cls.body[i + 1] if i + 1 < len(cls.body) else None
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert said, f"{cls.name}.{ast.unparse(field.target)}"
            assert isinstance(after.value.value, str)
            assert after.value.value.strip()[-1] in ".?", f"{cls.name}.{field.target.id}"


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_left_for_later(file):
    for word in ("TODO", "FIXME", "XXX", "HACK"):
        assert word not in source(file)


# --- what is not done ---


@pytest.mark.parametrize("file", [file for file in FILES if part(file) != "cli"])
def test_the_library_does_not_print(file):
    assert not [name for _, name in calls(file) if name == "print"]


@pytest.mark.parametrize("file", FILES)
def test_the_library_does_not_pickle_and_leaves_the_random_state_alone(file):
    forbidden = {"torch.save", "torch.manual_seed", "random.seed", "np.random.seed", "eval", "exec"}
    for call, name in calls(file):
        assert name not in forbidden
        if name == "torch.load":  # files of others; nothing in them is ever executed
            assert "weights_only=True" in ast.unparse(call)


def infinities(file: str) -> list[str]:
    """Where a file writes infinity down: math.inf, torch.inf, float("-inf")."""
    found = [
        ast.unparse(n)
        for n in ast.walk(tree(file))
        if isinstance(n, ast.Attribute) and n.attr in {"inf", "INF", "Infinity"}
    ]
    for call, name in calls(file):
        text = ast.unparse(call)
        if name == "float" and "inf" in text:
            found.append(text)
    return found


@pytest.mark.parametrize("file", FILES)
def test_minus_infinity_is_made_in_one_place(file):
    """One function alone knows how attention is forbidden; a numpy walk-through has its own."""
    if file == "attention/view.py":
        (merge,) = (n for n in tree(file).body if getattr(n, "name", "") == "merge")
        assert ast.unparse(merge).count("-math.inf") == 1
        assert infinities(file) == ["math.inf"]
    elif part(file) in {"attention", "layers", "models"}:
        assert infinities(file) == []


@pytest.mark.parametrize("file", FILES)
def test_no_number_stands_in_for_minus_infinity(file):
    """-1e9 and finfo.min average a row in which everything is forbidden."""
    if part(file) in {"attention", "layers"}:
        assert "finfo" not in source(file).replace("finfo(kept.dtype).tiny", "")
        numbers = {n.value for n in ast.walk(tree(file)) if isinstance(n, ast.Constant)}
        assert not [n for n in numbers if isinstance(n, float) and n > 1e8]


# --- the public names ---

# Name -> what it takes. A change here is a change for every user.
API: dict[str, str] = {
    "ClearheadError": "ValueError",
    "Model": "",
    "Model.__init__": "(self, net, config, tokenizer=None, companions=None)",
    "Model.__call__": "(self, *ids, at=None, **more)",
    "Model.fast": "(self, form='int8')",
    "Model.generate": "(self, prompt, **settings)",
    "Model.stream": "(self, prompt, **settings)",
    "Model.chat": "(self, messages, **settings)",
    "Model.fill": "(self, text, best=5)",
    "Model.embed": "(self, texts)",
    "Model.translate": "(self, texts, beams=None, length_penalty=None, max_new_tokens=None, "
    "batch_tokens=4096, **others)",
    "Model.score": "(self, text, source=None)",
    "Model.classify": "(self, texts)",
    "Model.tag": "(self, text)",
    "Model.answer": "(self, question, context)",
    "Model.see": "(self, *images)",
    "Model.transcribe": "(self, sound, language='en')",
    "Model.labels": "(self)",
    "Model.save": "(self, folder)",
    "Model.write_companions": "(self, folder)",
    "Positions": "",
    "Positions.span": "(start, length, device=None)",
    "Positions.ragged": "(lengths, side='right', start=0, width=None, device=None)",
    "Positions.of": "(pos)",
    "Positions.packed": "(lengths, device=None)",
    "Positions.with_data": "(self, segment=None, prefix=None, pairs=None)",
    "Positions.length": "(self)",
    "Positions.filled": "(self)",
    "Positions.row_ends": "(self, rows)",
    "Positions.distance": "(self, keys)",
    "build": "(name, /, *, seed=None, device=None, **changes)",
    "capture": "(net, *globs, every=False)",
    "export": "(model, folder, to='hf', dtype=None, overwrite=False)",
    "load": "(source, *, head=None, labels=None, seed=None, revision=None, report=False)",
    "patch": "(net, changes)",
    "presets": "()",
    "train": "(recipe, out=None, resume=False, **changes)",
}


def signature(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults of the parameters; what types they have is the type checker's."""
    bare = copy.deepcopy(function.args)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(bare)})"


def public_api() -> dict[str, str]:
    found = {}
    for name in ch.__all__:
        if name == "__version__":
            continue
        home = getattr(ch, name).__module__
        file = home.removeprefix("clearhead.").replace(".", "/") + ".py"
        (node,) = (n for n in tree(file).body if getattr(n, "name", "") == name)
        if isinstance(node, ast.FunctionDef):
            found[name] = signature(node)
            continue
        found[name] = ", ".join(ast.unparse(base) for base in node.bases)
        for method in node.body:
            called = getattr(method, "name", "_")
            if called in {"__init__", "__call__"} or not called.startswith("_"):
                found[f"{name}.{called}"] = signature(method)
    return found


def test_public_api_is_this():
    assert public_api() == API
