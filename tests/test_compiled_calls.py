"""Steps that a compiled loop stores as they come: the same bytes and the same refusals as without it."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from devices import host_only

from gpu_replay import Field, Proportional, RankBased, ReplayBuffer
from gpu_replay.engines.host import nothing_stored
from gpu_replay.ops import _backend
from gpu_replay.ops.counters import HostWords

pytestmark = [host_only, pytest.mark.skipif(_backend.whole_calls() is None, reason="Numba is not installed")]
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# the largest float64 that rounds to a finite float32, and the next
LARGE = np.nextafter(2.0**128 - 2.0**103, 0), 2.0**128 - 2.0**103
VALUES = {
    "whole": [0, 1, -1, 127, 128, 255, 256, -128, -129, 2**15, 2**31 - 1, 2**31, 2**53 + 1, -(2**63), 2**63 - 1],
    "floating": [0.0, -0.0, 0.1, 1e-300, 65504.0, 65520.0, *LARGE, -LARGE[1], np.inf, -np.inf, np.nan],
}


def pair(fields: dict[str, Field], capacity: int = 5, **settings: Any) -> tuple[Any, Any]:
    """Two buffers, of which the second takes nothing as it comes."""
    buffers = tuple(ReplayBuffer(capacity, fields, device="cpu", **settings) for _ in range(2))
    buffers[1]._append_given, buffers[1]._engine._compiled = nothing_stored, None
    return buffers


def stored(buffer: Any, values: dict[str, Any]) -> Any:
    """What an add does: the bytes that it leaves, or what it raises."""
    try:
        keys = buffer.add(**values).tolist()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    # as text, in which nothing equals nothing
    state = str([tensor.tolist() for tensor in buffer._state_tensors(buffer.added).values()])
    return keys, state, buffer._counters.tolist()


@pytest.mark.parametrize("target", DTYPES)
def test_every_dtype_is_cast_or_refused_as_without_the_loop(target: str) -> None:
    field = Field((), getattr(torch, target))
    taken = 0
    for source in DTYPES:
        dtype = np.dtype(source)
        found = VALUES["floating" if dtype.kind == "f" else "whole"]
        if dtype.kind != "f":
            found = [each for each in found if dtype.kind == "b" or np.iinfo(dtype).min <= each <= np.iinfo(dtype).max]
        with np.errstate(over="ignore"):
            values = [np.array([each]).astype(dtype) for each in found]
        buffers = pair({"a": field})
        # NumPy has no bfloat16
        half = torch.tensor([1.5], dtype=torch.bfloat16)
        # a list of one float or bool is read where it is
        listed = [each.tolist() for each in (values if source in ("bool", "float64") else values[-1:])]
        for value in (*values, *listed, torch.from_numpy(values[0]), half):
            taken += bool(buffers[0]._append_given(buffers[0]._lock, {"a": value}))
            buffers[0].load_state_dict(buffers[1].state_dict())
            assert stored(buffers[0], {"a": value}) == stored(buffers[1], {"a": value}), (source, value)
    assert taken > 5


FIELDS = {"obs": Field((2, 3), torch.float32), "n": Field((), torch.int32), "big": Field((80,), torch.float64)}


@pytest.mark.parametrize("sampler", [Proportional(), Proportional(initial=3.0), RankBased()], ids=str)
def test_rows_in_any_order_and_over_the_seam(sampler: Any) -> None:
    buffers = pair(FIELDS, capacity=7, sampler=sampler, seed=2)
    random = np.random.default_rng(3)
    for turn, rows in enumerate((1, 3, 7, 2, 5, 7, 1, 8)):
        values = {
            "obs": random.standard_normal((rows, 2, 3)),
            "n": random.integers(-9, 9, rows),
            "big": random.standard_normal((rows, 80), dtype=np.float32),
        }
        names = list(itertools.permutations(values))[turn % 6]
        given = {name: values[name] for name in names}
        assert stored(buffers[0], given) == stored(buffers[1], given)
        # rows of other memory, and what is not an array at all
        odd = {**given, "obs": np.asfortranarray(values["obs"])[::-1], "n": values["n"].tolist()}
        assert stored(buffers[0], odd) == stored(buffers[1], odd)
        for each in zip(*(buffer.sample(3).values() for buffer in buffers), strict=True):
            assert torch.equal(*each)


@pytest.mark.parametrize("wrong", ["rows", "shape", "name", "masked", "text", "nothing"])
def test_what_is_wrong_is_refused_in_the_same_words(wrong: str) -> None:
    good = {"obs": np.zeros((2, 2, 3), np.float32), "n": np.zeros(2, np.int32), "big": np.zeros((2, 80))}
    bad: dict[str, Any] = {
        "rows": {"n": np.zeros(3, np.int32)},
        "shape": {"big": np.zeros((2, 81))},
        "name": {"other": np.zeros(2)},
        "masked": {"n": np.ma.masked_array([1, 2], [True, False])},
        "text": {"n": np.array(["a", "b"])},
        "nothing": {name: value[:0] for name, value in good.items()},
    }
    found = []
    for buffer in pair(FIELDS):
        before = stored(buffer, good)
        with pytest.raises((TypeError, ValueError, KeyError)) as error:
            buffer.add(**{**good, **bad[wrong]})
        found.append((before, type(error.value), str(error.value), buffer.added))
    assert found[0] == found[1]
    assert found[0][-1] == 2


def test_steps_of_one_environment_need_no_second_look() -> None:
    buffer = pair({"obs": Field((4,), torch.float32), "r": Field((), torch.float32), "t": Field((), torch.bool)})[0]
    obs = np.zeros((1, 4), dtype=np.float32)
    for reward, ended in (([0.5], [True]), (np.array([0.5]), np.array([True])), ([np.float64(1)], [np.False_])):
        assert buffer._append_given(buffer._lock, {"obs": obs, "r": reward, "t": ended})
    # a list of one number is one row of a field without a shape, and nothing else
    for given in ({"obs": [0.5]}, {"obs": np.zeros((2, 4), np.float32)}, {"r": [0.5, 0.5]}, {"r": []}, {"t": [0.5]}):
        step = {"obs": obs, "r": [0.5], "t": [True]} | given
        assert not buffer._append_given(buffer._lock, step)
    assert buffer.added == 3


def test_random_numbers_are_those_of_numpy() -> None:
    from numba import njit

    from gpu_replay.ops import numba_transitions

    own = numba_transitions._doubles
    doubles = njit(lambda block, key, count: own(block, key, count))
    for seed, block, count in ((0, 0, 1), (2**64 - 1, 2**40, 7), (12345, 3, 100)):
        key = np.array([seed, 0], dtype=np.uint64)
        assert np.array_equal(doubles(block, key, count), HostWords(seed).doubles(block, count))


COMPILES = """
import torch
from gpu_replay import Field, ReplayBuffer
from gpu_replay.ops import numba_transitions
ReplayBuffer(4, {"a": Field((), torch.float32)}, device="cpu").add(a=torch.ones(2))
print(sum(numba_transitions.append.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_loops_are_compiled_again_when_a_file_that_they_contain_is_newer(tmp_path: Path) -> None:
    def compiled() -> int:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        return int(subprocess.check_output([sys.executable, "-c", COMPILES], env=environment))

    assert compiled() == 1
    assert compiled() == 0
    for index in tmp_path.rglob("numba_transitions.*.nbi"):
        os.utime(index, (1, 1))
    assert compiled() == 1


@pytest.mark.parametrize("name", ["loops", "rank_loops", "streams", "transitions", "tree"])
def test_all_modules_whose_loops_and_numbers_are_compiled_are_looked_at(name: str) -> None:
    def numbers(value: Any) -> bool:
        """Whether it is a number, or a class of numbers as `Counter` is."""
        parts = vars(value).items() if isinstance(value, type) else ()
        return isinstance(value, (int, float)) or any(type(each) is int for key, each in parts if key.isupper())

    def contained(module: Any) -> set[str]:
        """The modules of `ops` from which numbers or compiled functions are taken."""
        found = set()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gpu_replay.ops."):
                values = [vars(module)[alias.asname or alias.name] for alias in node.names]
                if any(numbers(each) or hasattr(each, "py_func") for each in values):
                    found.add(str(node.module))
        return found

    module = importlib.import_module(f"gpu_replay.ops.numba_{name}")
    calls = [node for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if getattr(node.func, "id", "") == "forget_older_code")
    given: list[Any] = []
    for part in call.args[1:]:
        starred = isinstance(part, ast.Starred)
        value = eval(ast.unparse(part.value if isinstance(part, ast.Starred) else part), vars(module))
        given += value if starred else [value]
    wanted = contained(module).union(*(contained(each) for each in given if ".numba_" in each.__name__))
    assert "gpu_replay.ops.counters" in wanted
    assert wanted <= {each.__name__ for each in given} | {module.__name__}


def test_code_that_another_process_forgot_first_is_no_error(tmp_path: Path) -> None:
    from gpu_replay.ops.numba_memory import forget_older_code

    # listed, and gone when it is looked at
    kept = tmp_path / f"{Path(__file__).stem}.loop.nbi"
    kept.symlink_to(tmp_path / "gone")
    forget_older_code(SimpleNamespace(stats=SimpleNamespace(cache_path=tmp_path), py_func=lambda: None), _backend)
    assert kept.is_symlink()
