"""The same package however it is installed, and nothing installed that it should not install."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_architecture import sources

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"gpu_replay", "kernels", "tests", "bench", "docs", ".ci", ".github", ".gitignore", "LICENSE", "mkdocs.yml"}
TOP_LEVEL |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "constraints.txt", "pyproject.toml"}
TOP_LEVEL |= {"MANIFEST.in"}
# the folder that setuptools makes in what it builds
MADE = "gpu_replay.egg-info"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="installs with pip"),
    pytest.mark.skipif(os.name == "nt", reason="knows the folders of a POSIX environment"),
]

# what an environment says: the name of the other distribution, and where modules are; some of them can be imported
QUESTIONS = """
import importlib.util, json, sys
import kernels
import gpu_replay
specs = {name: importlib.util.find_spec(name) for name in json.loads(sys.argv[1])}
import gpu_replay.bench.measure
if importlib.util.find_spec("triton"):
    import gpu_replay.kernels.prefix_sum
print(json.dumps([kernels.NAME, {name: spec.origin for name, spec in specs.items() if spec}]))
"""
BESIDE = ["gpu_replay.gpu_replay", "gpu_replay.tests", "gpu_replay.docs"]

BUILD = """
import os, sys, tarfile
from setuptools import build_meta
# which setuptools overwrites
out = sys.argv[1]
packed = os.path.join(out, build_meta.build_sdist(out))
tarfile.open(packed).extractall(out)
os.chdir(packed.removesuffix(".tar.gz"))
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would have, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("clone") / "checkout"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in TOP_LEVEL - {".ci"}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


class Environment:
    """A fresh environment that sees the libraries of this one, but not how this one installed the package.

    A well-known distribution is called kernels; it is there as well and must stay importable.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        libraries = {str(Path(module.__file__).parent.parent) for module in (pytest, sys.modules["torch"])}
        (self.site / "libraries.pth").write_text("\n".join(libraries))
        (self.site / "kernels").mkdir()
        (self.site / "kernels" / "__init__.py").write_text('NAME = "the other distribution"')

    def install(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, "--quiet", "--disable-pip-version-check"]
        run([*command, "install", "--no-index", "--no-deps", "--no-build-isolation", *arguments])


def run(command: list[Any], cwd: Path | None = None) -> str:
    """What a command prints; a package that PYTHONPATH names counts as installed, so none is passed on."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, packed and unpacked, and with the wheel made of it and of nothing else."""
    out = tmp_path_factory.mktemp("built")
    run([sys.executable, "-c", BUILD, out], cwd=checkout)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_source_distribution_can_be_tested_and_read(checkout: Path, built: Path) -> None:
    (unpacked,) = (path for path in built.iterdir() if path.is_dir())
    expected = {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()}
    # what is only of use to git and its host, and what building makes
    expected -= {path for path in expected if path.parts[0] in (".github", ".gitignore", MADE)}
    found = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    assert expected - found == set()
    assert {path.parts[0] for path in found - expected} <= {"PKG-INFO", "setup.cfg", MADE, "build"}
    for path in expected:
        assert (unpacked / path).read_bytes() == (checkout / path).read_bytes()


def test_a_checkout_holds_the_package_once() -> None:
    """Its root lies beside the package, and would offer every folder there as a part of it, the package included."""
    modules = sources(ROOT)
    found = {name: spec.origin for name in [*modules, *BESIDE] if (spec := importlib.util.find_spec(name))}
    assert found == {name: str(path) for name, path in modules.items()}


def test_the_wheel_holds_the_package_and_nothing_beside_it(checkout: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    data = ("py.typed", "study/cliffwalk.md", "study/report.md", "bench/lower_bound.c")
    expected = {f"gpu_replay/{name}" for name in data}
    for name, path in sources(checkout).items():
        file = name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        expected.add(file)
        assert zipfile.ZipFile(wheel).read(file) == path.read_bytes()
    assert package == expected
    text = {name.split("/")[-1]: zipfile.ZipFile(wheel).read(name).decode() for name in names - package}
    assert "gpu-replay = gpu_replay.cli:main" in text["entry_points.txt"]
    assert text["top_level.txt"].split() == ["gpu_replay"]
    assert "MIT License" in text["LICENSE"]
    for extra in ("training", "cpu", "checkpoints", "tests", "peers", "dev"):
        assert f"Provides-Extra: {extra}\n" in text["METADATA"]
    assert re.search(r"Requires-Dist: triton>=\S+; platform_system == .Linux.\n", text["METADATA"])


# the arguments of pip that install the package
INSTALLATIONS = {"wheel": ["{wheel}"], "editable": ["--editable", "{checkout}"]}


def check_types_are_visible(environment: Environment, checkout: Path) -> None:
    """mypy and pyright read the folders that .pth files name, and run no import hooks."""
    lines = [line for file in environment.site.glob("*gpu_replay*.pth") for line in file.read_text().splitlines()]
    (found,) = [folder for folder in (environment.site, *map(Path, lines)) if (folder / "gpu_replay").is_dir()]
    for name in ("py.typed", "buffer.py"):
        assert (found / "gpu_replay" / name).read_text() == (checkout / "gpu_replay" / name).read_text()
    # only the package, and the well-known distribution
    assert not (found / "bench").exists()
    assert not (found / "kernels").exists() or found == environment.site


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLATIONS)
def test_every_installation_finds_all_modules(tmp_path: Path, checkout: Path, wheel: Path, name: str) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install(*(each.format(wheel=wheel, checkout=checkout) for each in INSTALLATIONS[name]))
    check_types_are_visible(environment, checkout)
    (tmp_path / "elsewhere").mkdir()
    later = checkout / "gpu_replay" / "ops" / "added_after_the_install.py"
    if name != "wheel":
        later.touch()
    try:
        modules = sources(checkout)
        question = [environment.python, "-W", "error", "-c", QUESTIONS, json.dumps([*modules, *BESIDE])]
        for cwd in (tmp_path / "elsewhere", checkout):
            other, found = json.loads(run(question, cwd=cwd))
            assert other == "the other distribution"
            assert found.keys() == modules.keys(), f"of {cwd}"
            for module, path in modules.items():
                assert Path(found[module]).read_bytes() == path.read_bytes()
    finally:
        later.unlink(missing_ok=True)


def test_nothing_at_the_top_that_does_not_belong_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not listed:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in listed} == TOP_LEVEL
    assert not {"kernels/__init__.py", "bench/__init__.py"} & set(listed)


def test_every_requirement_is_pinned() -> None:
    pinned: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, rest = re.fullmatch(r"([A-Za-z0-9_.-]+)([=><!].*)", line).groups()  # type: ignore[union-attr]
            pinned.setdefault(name.lower().replace("_", "-"), []).append(rest)
    table = (ROOT / "pyproject.toml").read_text()
    # libraries to compare with: one of them needs an older filelock than is pinned, so they go without the pins
    table = re.sub(r"^peers = \[.*?^\]", "", table, flags=re.MULTILINE | re.DOTALL)
    required = re.findall(r'^\s+"([a-z0-9-]+)>=', table, re.MULTILINE) + re.findall(r'\["([a-z0-9-]+)>=', table)
    assert len(set(required)) > 10
    assert {name for name in required if name not in pinned} == set()
    for name, lines in pinned.items():
        if name != "triton":
            assert all(rest.startswith("==") for rest in lines), name
    assert (pinned["torch"], pinned["triton"]) == (["==2.13.0"], [">=3.7.1,<=3.9.0,!=3.8.*"])
