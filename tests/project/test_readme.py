"""What the pages show is what happens: examples, commands, paths, and the reference is that of the docstrings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "gpu_replay" / "GUIDE.md").read_text()
PAGES = ["README.md", "gpu_replay/README.md", "gpu_replay/GUIDE.md", "gpu_replay/API.md", "bench/README.md"]


def block(page: str, language: str, after: str = "") -> str:
    """The first code block of a language below a text."""
    match = re.search(rf"```{language}\n(.*?)```", page[page.index(after) :], re.DOTALL)
    return match[1]


@pytest.mark.parametrize(
    ("page", "section"),
    [
        pytest.param(README, "## Example", id="example"),
        pytest.param(GUIDE, "## Streams of steps", id="streams", marks=pytest.mark.slow),
        pytest.param(GUIDE, "`TrajectoryReplayBuffer.from_env", id="from_env", marks=pytest.mark.slow),
        pytest.param(GUIDE, "## Hindsight", id="hindsight", marks=pytest.mark.slow),
        pytest.param(GUIDE, "## Checkpoints", id="checkpoints", marks=pytest.mark.slow),
        pytest.param(GUIDE, "## Rings larger than the memory", id="places", marks=pytest.mark.slow),
        pytest.param(GUIDE, "## A learning step as one call", id="capture", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("default", marks=pytest.mark.gpu)])
def test_the_examples_print_what_they_say(device: str, page: str, section: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    code = block(page, "python", section)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", block(page, "text", section))


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_the_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what its reader has already: environments, networks, a dataset."""
    for module in ("gymnasium", "stable_baselines3", "tensordict", "minari"):
        pytest.importorskip(module)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    import gymnasium
    from tensordict import TensorDict

    from gpu_replay import Proportional, ReplayBuffer

    section = README[README.index("## In your own loop") : README.index("## Commands")]
    loop, libraries = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    envs = gymnasium.make_vec("CartPole-v1", 2)
    obs, _ = envs.reset(seed=0)
    after, rewards, terminations, *_ = envs.step(np.array([0, 1]))
    table = torch.randn(2, 4)
    names = {"Proportional": Proportional, "ReplayBuffer": ReplayBuffer, "envs": envs, "obs": obs}
    names |= {"actions": np.array([0, 1]), "rewards": rewards, "real_next_obs": after, "terminations": terminations}
    names["td_target"] = lambda reward, obs, terminated: reward + 0.99 * (obs @ table.T).amax(1) * ~terminated
    names["q_values"] = lambda obs, action: (obs @ table.T).gather(1, action[:, None])[:, 0]
    exec(loop, names)
    assert names["loss"] > 0  # type: ignore[operator]
    assert names["rb"].stats().max_priority != 1.0  # type: ignore[attr-defined]
    from test_integrations_minari import small_dataset

    names |= {"collected": TensorDict({"a": torch.arange(9)}, [9]), "dataset": small_dataset()}
    exec(libraries.replace("1_000", "120"), names)
    assert names["model"].replay_buffer.size() == 120  # type: ignore[attr-defined]
    assert names["batch"].shape == (128,)  # type: ignore[attr-defined]
    assert names["offline"].stats().eligible == 12  # type: ignore[attr-defined]


def test_the_commands_name_extras_and_files_that_there_are() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    blocks = block(README, "bash") + block(README, "bash", "<!-- ci: tests -->")
    commands = [line for line in blocks.splitlines() if line]
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


def paths_of_the_tree() -> list[str]:
    """The folders and files that the README's tree names, each by its path."""
    found, parents = [], [""]
    for indent, name in re.findall(r"^( *)([\w.]+/?)(?= |$)", block(README, "", "## The tree"), re.MULTILINE):
        del parents[len(indent) // 2 + 1 :]
        found.append(parents[-1] + name)
        parents.append(found[-1])
    return found


def test_the_tree_names_every_folder() -> None:
    named = paths_of_the_tree()
    assert [path for path in named if not (ROOT / path).exists()] == []
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not listed:
        pytest.skip("not a git checkout")
    folders = {f"{parent.as_posix()}/" for file in listed for parent in list(Path(file).parents)[:-1]}
    assert folders - set(named) == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    links = {link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link}
    assert [link for link in links if not (folder / link).exists()] == []
    # files of the sources in code, relative to the page, to the top or to the tests
    files = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|sh))`", text))
    places = (folder, ROOT, *(ROOT / "tests").glob("**/"))
    assert [file for file in files if not any((place / file).exists() for place in places)] == []


def test_what_the_page_for_developers_names_is_in_the_sources() -> None:
    text = (ROOT / "gpu_replay" / "README.md").read_text()
    folders = set(re.findall(r"`((?:[\w.]+/)+)`", text))
    assert [name for name in folders if not (ROOT / "gpu_replay" / name).is_dir()] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "gpu_replay").rglob("*.py"))
    spoken = [words for words in re.findall(r"`([A-Za-z_.]+)`", text) if not words.endswith((".py", ".sh"))]
    names = {name for words in spoken for name in words.split(".")}
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()


def test_the_pages_are_short() -> None:
    assert len(README.splitlines()) <= 300
    assert len((ROOT / "gpu_replay" / "README.md").read_text().splitlines()) <= 150


def test_the_reference_is_that_of_the_docstrings() -> None:
    pytest.importorskip("griffe2md", reason="needs griffe2md, of the extra `tests` from Python 3.11 on")
    from api_reference import PAGE, reference

    assert PAGE.read_text() == reference(), "run `python tests/api_reference.py`"
