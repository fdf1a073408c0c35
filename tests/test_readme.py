"""What the pages show is what happens: examples, commands, paths, and the reference is that of the docstrings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, after: str = "") -> str:
    """The first code block of a language below a text."""
    match = re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.parametrize(
    "section", ["## Example", "## Streams of steps", "### Hindsight", "## A learning step as one call"]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("default", marks=pytest.mark.gpu)])
def test_the_examples_print_what_they_say(device: str, section: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    code = block("python", section)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout == block("text", section)


def test_the_commands_name_extras_and_files_that_there_are() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    commands = [line for line in block("bash").splitlines() + block("bash", "<!-- ci: tests -->").splitlines() if line]
    assert len(commands) == 2
    for command in commands:
        install = shlex.split(command.split("&&")[1])
        assert install[:4] == [".venv/bin/pip", "install", "-c", "constraints.txt"]
        (extras,) = re.findall(r"\[(.*)\]", install[-1])
        assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras.split(","))
    assert "gpu-replay train pong" in commands[0]
    assert commands[1].endswith(".venv/bin/python -m pytest -n 2")


def test_minimum_versions_are_those_of_pyproject() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    for name, written in (("torch", "PyTorch"), ("numpy", "NumPy")):
        (minimum,) = re.findall(rf'"{name}>=([\d.]+)"', pyproject)
        assert re.search(rf"{written}\s+{re.escape(minimum)}\b", README)
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', pyproject)
    assert f"Python {python} or newer" in README


def test_the_tree_names_what_there_is() -> None:
    tree = block("", "## The tree")
    named = re.findall(r"^( *)(\w+/)", tree, re.MULTILINE)
    parent = ROOT
    for indent, name in named:
        folder = (parent if indent else ROOT) / name
        assert folder.is_dir(), folder
        parent = parent if indent else folder
    assert len(named) > 4


def test_the_reference_is_that_of_the_docstrings() -> None:
    pytest.importorskip("griffe2md", reason="needs griffe2md, of the extra `tests` from Python 3.11 on")
    from api_reference import PAGE, reference

    assert PAGE.read_text() == reference(), "run `python tests/api_reference.py`"
