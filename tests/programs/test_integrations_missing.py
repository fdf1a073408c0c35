"""Adapters where their library is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpu_replay import integrations

# those that need a library, and which
NEEDED = {"fasttd3": "tensordict", "gymnasium": "gymnasium", "minari": "minari", "skrl": "skrl"}
NEEDED |= {"sb3": "stable_baselines3", "torchrl": "tensordict"}
NEED_NOTHING = {"__init__", "flashsac", "streams"}
PROGRAM = """
import importlib, json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
said = {}
for name in sys.argv[1].split():
    try:
        importlib.import_module(f"gpu_replay.integrations.{name}")
    except ImportError as error:
        said[name] = str(error), error.name
print(json.dumps(said))
"""


def test_an_adapter_without_its_library_names_the_extra() -> None:
    folder = Path(integrations.__file__).resolve().parent
    assert {path.stem for path in folder.glob("*.py")} == {*NEEDED} | NEED_NOTHING
    command = [sys.executable, "-c", PROGRAM, " ".join([*NEEDED, "flashsac"]), *{*NEEDED.values()}]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder.parents[1])
    said = json.loads(done.stdout)
    assert said.keys() == NEEDED.keys()
    for name, (message, missing) in said.items():
        assert missing.partition(".")[0] in (NEEDED[name], "gymnasium")
        assert f".{name} cannot be imported: No module named '{missing}'. Run: pip install " in message
        assert "[integrations]" in message
