"""Every sampler of the package is public, explained and tested; what a new class of `samplers.py` lacks is named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import SAMPLERS
from test_distributions import SAMPLED

import gpu_replay
from gpu_replay.console import sizes
from gpu_replay.samplers import BaseSampler, Combined, Latest, Sampler

ROOT = Path(__file__).resolve().parents[2]
KINDS = {name: kind for name, kind in Sampler.kinds.items() if kind.__module__ == Sampler.__module__}


def has(kind: type[Sampler]) -> dict[str, bool]:
    """What a sampler must have, and whether it has it."""
    page = (ROOT / "docs" / "choosing.md").read_text()
    explained = re.findall(r"^\| `(\w+)\(", page[page.index("## Which sampler") :], re.MULTILINE)
    played = {name: type(sampler) for name, sampler in SAMPLERS.items()}
    return {
        "a name in gpu_replay.__all__": kind.__name__ in gpu_replay.__all__,
        "a row in docs/choosing.md": kind.__name__ in explained,
        "kernel in its class": "kernel" in vars(kind) or kind in (Combined, Latest),
        # which models, checkpoints and shards go through
        "an entry in SAMPLERS of tests/helpers/programs.py": kind in played.values(),
        "its exact distribution in SAMPLED of test_distributions.py": kind in [played[name] for name in SAMPLED],
        "a choice of gpu-replay estimate": kind in map(type, sizes.SAMPLERS.values()),
    }


def test_every_sampler_is_public_explained_and_tested() -> None:
    assert len(KINDS) >= 5
    assert {(name, what) for name, kind in KINDS.items() for what, there in has(kind).items() if not there} == set()


def test_a_newcomer_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "kinds", dict(Sampler.kinds))

    @dataclass(frozen=True)
    class Newcomer(BaseSampler):
        places: Any = None

    assert not any(has(Newcomer).values())
