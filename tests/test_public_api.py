"""The public names: lazy, complete, and helpful to whoever misspells one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

NAMES = {
    "ClearheadError",
    "Model",
    "Positions",
    "build",
    "capture",
    "export",
    "load",
    "patch",
    "presets",
    "train",
}


def test_the_public_names_are_these():
    assert set(clearhead.__all__) == NAMES | {"__version__"}
    assert set(dir(clearhead)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_the_one_of_its_module(name):
    value = getattr(clearhead, name)
    assert value.__name__ == name
    assert value.__module__.startswith("clearhead.")
    assert getattr(clearhead, name) is value


def test_editors_see_the_same_names():
    """The block under TYPE_CHECKING and the table of lazy names say the same."""
    tree = ast.parse(Path(clearhead.__file__).read_text(encoding="utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == clearhead._HOME


def test_import_loads_neither_torch_nor_numpy():
    code = "import clearhead, json, sys; dir(clearhead); print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(_python(code))
    assert "clearhead" in loaded
    assert not {"torch", "numpy", "rich", "tyro"}.intersection(loaded)


def test_misspelt_name_suggests_the_nearest_without_torch():
    code = """
import clearhead, sys
try:
    clearhead.biuld
except AttributeError as error:
    print(error, "torch" in sys.modules)
"""
    out = _python(code)
    assert out.strip() == (
        "module 'clearhead' has no attribute 'biuld'. Did you mean \"build\"? False"
    )


def test_a_name_far_from_all_gets_no_suggestion():
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzz'\.$"):
        _ = clearhead.zzzzzz
    assert not hasattr(clearhead, "__wrapped__")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
