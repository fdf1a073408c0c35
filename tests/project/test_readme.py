"""What the pages show is what happens: examples, commands, paths, links and sizes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import gpu_replay

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
MOST_WORDS = {"README.md": 1400, "gpu_replay/README.md": 1800, "CONTRIBUTING.md": 450}
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = [*MOST_WORDS, "CHANGELOG.md", "bench/README.md", "bench/RESULTS.md", "bench/LOG.md"]
PAGES += ["gpu_replay/integrations/README.md", "gpu_replay/examples/README.md", *DOCS]


def block(page: str, language: str, after: str = "") -> str:
    """The first code block of a language below a text."""
    match = re.search(rf"```{language}\n(.*?)```", page[page.index(after) :], re.DOTALL)
    return match[1]


def examples() -> list[Any]:
    """Every program of a page whose output stands below it; that of the README alone is run by default."""
    found = []
    for name in PAGES:
        pairs = re.findall(
            r"```python\n((?:(?!```).)*?)```\n\nprints\n\n```text\n(.*?)```", (ROOT / name).read_text(), re.DOTALL
        )
        marks = () if name == "README.md" else pytest.mark.slow
        found += [pytest.param(*pair, id=f"{name}-{place}", marks=marks) for place, pair in enumerate(pairs)]
    return found


@pytest.mark.parametrize(("code", "printed"), examples())
@pytest.mark.parametrize("device", ["cpu", pytest.param("default", marks=pytest.mark.gpu)])
def test_the_examples_print_what_they_say(device: str, code: str, printed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", printed)


def test_every_python_block_is_run() -> None:
    # the others: the two that the tests below run with what their readers have
    texts = ((ROOT / page).read_text() for page in PAGES)
    blocks = [code for text in texts for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert (len(examples()) >= 10, len(CHANGES) >= 9) == (True, True)
    assert len(blocks) - len(examples()) == 2
    for code in blocks:
        ast.parse(code)


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_the_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what its reader has already: environments, networks, a dataset."""
    for module in ("gymnasium", "minari"):
        pytest.importorskip(module)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", 2)
    obs, _ = envs.reset(seed=0)
    after, rewards, terminations, *_ = envs.step(np.array([0, 1]))
    table = torch.randn(2, 4)
    names: dict[str, Any] = {name: getattr(gpu_replay, name) for name in ("Proportional", "ReplayBuffer")}
    names |= {"envs": envs, "obs": obs, "actions": np.array([0, 1]), "rewards": rewards, "real_next_obs": after}
    names["terminations"] = terminations
    names["td_target"] = lambda reward, obs, terminated: reward + 0.99 * (obs @ table.T).amax(1) * ~terminated
    names["q_values"] = lambda obs, action: (obs @ table.T).gather(1, action[:, None])[:, 0]
    exec(block(COMING_FROM, "python", "## CleanRL"), names)
    assert names["loss"] > 0
    assert names["rb"].stats().max_priority != 1.0
    from test_integrations_minari import small_dataset

    names["dataset"] = small_dataset()
    exec(block(COMING_FROM, "python", "## Minari"), names)
    assert names["offline"].stats().eligible == 12


# sections of the page that change the lines of a program
COMING_FROM = (ROOT / "docs" / "coming-from.md").read_text()
CHANGES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff$", COMING_FROM, re.DOTALL | re.MULTILINE)
# what a program has that a change needs, where it is not installed by default
NEEDS = {"Stable-Baselines3": "stable_baselines3", "skrl": "skrl", "FastTD3 and holosoma": "tensordict"}
NEEDS |= dict.fromkeys(("TorchRL", "LeanRL and TorchRL's plain buffer"), "tensordict")


@pytest.mark.parametrize("name", CHANGES)
def test_the_changes_run(name: str) -> None:
    made = pytest.importorskip(NEEDS[name]) if name in NEEDS else None
    lines = block(COMING_FROM, "diff", f"## {name}\n").splitlines()
    code = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", "+"))
    names: dict[str, Any] = {"obs": np.zeros((40, 4), np.float32), "next_obs": np.ones((40, 4), np.float32)}
    names |= {"action": np.zeros(40, np.int64), "reward": np.ones(40, np.float32), "terminated": np.zeros(40, bool)}
    names["torch"] = torch
    if made is not None and NEEDS[name] == "tensordict":
        names["collected"] = made.TensorDict({"reward": torch.rand(40)}, [40])
        seen = {"observations": torch.rand(64, 3), "critic_observations": torch.rand(64, 5)}
        after = seen | {"rewards": torch.rand(64)} | dict.fromkeys(("dones", "truncations"), torch.zeros(64).long())
        names["transition"] = made.TensorDict({**seen, "actions": torch.rand(64, 2), "next": after}, [64])
    flags = dict.fromkeys(("terminated", "truncated"), torch.zeros(100, 1, dtype=torch.bool))
    rows = {"obs": torch.rand(100, 1, 4), "action": torch.rand(100, 1, 2), "reward": torch.rand(100, 1)}
    names["episode"] = rows | flags
    image = {"obs": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "action": torch.rand(2, 2), "reward": torch.rand(2)}
    no = torch.zeros(2, dtype=torch.bool)
    names["steps"] = [image | dict.fromkeys(("terminated", "truncated", "is_first"), no)] * 80
    exec(code, names)
    assert {"model", "memory", "data", "TorchUniformBuffer"} & names.keys() or len(names["batch"])


def test_the_recipe_shifts_each_image_by_any_move_and_repeats_its_edges() -> None:
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(block((ROOT / "docs" / "guide.md").read_text(), "python", "## Random shifts of images"), names)
    most, seen = 2, Counter()
    moves = [(down, right) for down in range(2 * most + 1) for right in range(2 * most + 1)]
    torch.manual_seed(0)
    for shape, dtype in (((6, 9), torch.uint8), ((3, 7, 5), torch.float16), ((2, 4, 5, 6), torch.float32)):
        images = torch.randint(0, 256, (200, *shape)).to(dtype)
        shifted, (height, width) = names["shifted"](images, most), shape[-2:]
        assert (shifted.shape, shifted.dtype) == (images.shape, dtype)
        padded = np.pad(images.numpy(), [(0, 0)] * (images.dim() - 2) + [(most, most)] * 2, mode="edge")
        for row, image in enumerate(shifted.numpy()):
            crops = {at: padded[row, ..., at[0] : at[0] + height, at[1] : at[1] + width] for at in moves}
            (found,) = [move for move, crop in crops.items() if np.array_equal(crop, image)]
            seen[found] += 1
    # of 24 expected each; that one is outside has a chance of 1e-5
    assert len(seen) == len(moves)
    assert all(4 <= count <= 60 for count in seen.values())


def test_the_commands_name_extras_and_files_that_there_are() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv .venv &&")]
    assert len(commands) == 2
    assert block(README, "bash", "<!-- ci: tests -->").strip() == commands[1]
    for command in commands:
        install = shlex.split(command.split("&&")[1])
        assert install[:4] == [".venv/bin/pip", "install", "-c", "constraints.txt"]
        (extras,) = re.findall(r"\[(.*)\]", install[-1])
        assert all(re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE) for extra in extras.split(","))
    assert commands[1].endswith(".venv/bin/python -m pytest -n 2")


def test_the_first_screens_say_what_a_newcomer_asks() -> None:
    asked = [
        "](docs/guide.md)",
        "```bash\npip install",
        "```python",
        "\nprints\n",
        "It replaces",
        "**For**",
        "**Not for**",
    ]
    asked += ["-m venv", "<!-- ci: tests -->", "## DQN", "## Why", "## Speed"]
    places = [README.index(words) for words in asked]
    assert places == sorted(places)
    assert len(block(README, "python").splitlines()) <= 12


def test_versions_agree() -> None:
    for name, written in (("torch", "PyTorch"), ("numpy", "NumPy")):
        (minimum,) = re.findall(rf'"{name}>=([\d.]+)"', PYPROJECT)
        assert re.search(rf"{written}\s+{re.escape(minimum)}\b", README)
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', PYPROJECT)
    assert f"Python {python} or newer" in README
    version = gpu_replay.__version__
    assert f'version = "{version}"' in PYPROJECT
    citation, changes = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    (released,) = re.findall(rf"\nversion: {version}\ndate-released: (.*)\n", citation)
    assert f"\n## {version} ({released})\n" in changes


def test_pong_is_won_as_fast_as_the_readme_says() -> None:
    runs = [json.loads(path.read_text()) for path in (ROOT / "bench/results/pong-cpu").glob("*/summary.json")]
    assert len(runs) == 10
    assert min(run["eval_return_mean"] for run in runs) >= 18
    minutes = [run["wall_seconds"] / 60 for run in runs]
    found = f"in {median(minutes):.0f} minutes on two CPU cores (median; {min(minutes):.1f} to {max(minutes):.1f})"
    assert f"average of +18 (of 21) with each of ten seeds, {found}" in " ".join(README.split())


def test_the_tree_on_the_page_for_developers_names_every_folder() -> None:
    tree = block((ROOT / "gpu_replay" / "README.md").read_text(), "", "## The tree")
    named, parents = [], [""]
    for indent, name in re.findall(r"^( *)([\w.]+/?)(?= |$)", tree, re.MULTILINE):
        del parents[len(indent) // 2 + 1 :]
        named.append(parents[-1] + name)
        parents.append(named[-1])
    assert [path for path in named if not (ROOT / path).exists()] == []
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not listed:
        pytest.skip("not a git checkout")
    folders = {f"{parent.as_posix()}/" for file in listed for parent in list(Path(file).parents)[:-1]}
    assert folders - set(named) == set()


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`: headings in small letters, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for path, _, anchor in (link.partition("#") for link in links):
        target = folder / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    # files of the sources in code, relative to the page, to the top, to the package or to the tests
    files = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|sh))`", text))
    places = (folder, ROOT, ROOT / "gpu_replay", *(ROOT / "tests").glob("**/"))
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
    assert {page: most for page, most in MOST_WORDS.items() if len((ROOT / page).read_text().split()) > most} == {}


def test_the_reference_names_every_public_class() -> None:
    named = re.findall(r"^::: gpu_replay\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert set(named) == {*gpu_replay.__all__, "LearningStep", "BaseSampler"} - {"__version__"}
