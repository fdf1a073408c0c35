"""What is compared with other libraries: the rows they get, how wrong ones are noticed, who takes part, the table.

Adapters are tried on the libraries that are installed, with tiny sizes; none is imitated.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import Capture, Patch
from torch import Tensor

from gpu_replay.bench import peers, peers_suite, report
from gpu_replay.bench.measure import check, fill
from gpu_replay.bench.peers import PEERS, make_peer
from gpu_replay.bench.records import CannotMeasure, read
from gpu_replay.bench.subjects import EPISODE, FRAMES, Sampled, StackStream, Subject, Task, faults, frames

CPU = torch.device("cpu")
# what must be importable for an adapter to work at all
LIBRARIES = {name: (name,) for name in ("cpprb", "tianshou", "stable_baselines3")}
LIBRARIES |= {"flashbax": ("jax", "flashbax"), "torchrl": ("tensordict", "torchrl"), "python_sum_tree": ()}


# rows


def test_steps_follow_on_each_other_until_an_episode_ends() -> None:
    stream = StackStream(2)
    steps = [stream.step() for _ in range(EPISODE)]
    for number, (before, step) in enumerate(pairwise(steps)):
        going = ~before["terminated"]
        assert torch.equal(before["next_obs"][going, -1], step["obs"][going, -1])
        if EPISODE - 120 < number < EPISODE - 80:
            assert torch.equal(before["next_obs"][going], step["obs"][going])
    assert [int(sum(step["terminated"][env] for step in steps)) for env in (0, 1)] == [1, 1]
    first = steps[EPISODE - 100]["obs"]
    # environment 1 has just begun: its stack is its first frame four times
    assert [bool((first[env] == first[env, -1]).all()) for env in (0, 1)] == [False, True]


def batch_of(envs: int = 64, skip: int = 20) -> dict[str, Tensor]:
    stream = StackStream(envs)
    *_, step = (stream.step() for _ in range(skip + 1))
    return {**step, "weight": torch.ones(envs)}


DAMAGES: dict[str, tuple[str, Any]] = {
    "action": ("'action' does not belong", lambda f: {"action": f["action"] + 1}),
    "reward": ("'reward' does not belong", lambda f: {"reward": f["reward"] + 1}),
    "ended": ("'terminated' does not belong", lambda f: {"terminated": ~f["terminated"]}),
    "order": ("frames that are not those before", lambda f: {"obs": f["obs"][:, [1, 0, 2, 3]]}),
    "newest": ("not one that was stored", lambda f: {"obs": f["obs"] // 2}),
    "next": ("not that of the step after", lambda f: {"next_obs": f["obs"]}),
    "another environment's next": ("not that of the step after", lambda f: {"next_obs": f["next_obs"].roll(1, 0)}),
    "next's frames": ("next_obs has frames", lambda f: {"next_obs": f["next_obs"][:, [0, 0, 2, 3]]}),
    "weights": ("the weights are not 64 positive", lambda f: {"weight": f["weight"] * 0}),
}


def test_whole_rows_have_no_faults_and_a_few_at_the_seam_may_be_cut() -> None:
    for skip in (0, 1, 20, FRAMES - 2):
        assert faults(batch_of(envs=8, skip=skip)) == []
    # the last step of environment 9
    assert faults(batch_of(envs=10, skip=EPISODE - 901)) == []
    fields = batch_of()
    for cut, allowed in ((3, True), (12, False)):
        after = torch.cat([fields["obs"][:cut], fields["next_obs"][cut:]])
        assert (faults({**fields, "next_obs": after}, seam=0.1) == []) is allowed


def test_mixed_up_rows_of_stacks_are_noticed() -> None:
    fields = batch_of()
    for name, (message, damage) in DAMAGES.items():
        wrong = faults({**fields, **damage(fields)}, seam=0.1)
        assert any(message in fault for fault in wrong), (name, wrong)


@pytest.mark.parametrize("n_step, envs", [(1, 8), (3, 8), (1, 64)])
def test_our_own_buffer_gives_whole_rows(n_step: int, envs: int) -> None:
    subject = frames(1_280, n_step=n_step, envs=envs)
    fill(subject, 1_280, CPU, rounds=2)
    check(subject, "ours")


# libraries


def test_a_library_that_mixes_rows_up_is_refused() -> None:
    whole = make_peer("python_sum_tree", Task(256, 8, stacks=True))

    def sample(batch: int) -> Sampled:
        slots, found = whole.sample(batch)
        return slots, {**found, "reward": found["reward"].roll(1)}

    subject = replace(whole, sample=sample)
    fill(subject, 256, CPU, rounds=1)
    with pytest.raises(CannotMeasure, match="mixing is not measured: .*reward"):
        check(subject, "mixing")


@pytest.mark.parametrize("name", [name for name, modules in LIBRARIES.items() if modules])
def test_without_the_library_a_peer_is_skipped_with_the_way_to_install_it(
    name: str, monkeypatch: Patch, capsys: Capture
) -> None:
    for module in [found for found in sys.modules if found.startswith(LIBRARIES[name][-1])]:
        monkeypatch.delitem(sys.modules, module)
    for module in LIBRARIES[name]:
        # Python's own way of saying that there is no such module
        monkeypatch.setitem(sys.modules, module, None)
    assert peers.available([name, "python_sum_tree"], CPU) == ["python_sum_tree"]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"{name} skipped: .*; it needs `pip install .*{PEERS[name].distribution}`", line)


def test_what_a_library_cannot_do_is_refused() -> None:
    with pytest.raises(CannotMeasure, match="^cpprb skipped: it stores nothing on a device of type 'cuda'"):
        make_peer("cpprb", Task(256, 8, device=torch.device("cuda")))


def made(name: str, task: Task) -> Subject:
    """A library's buffer, or a skipped test where it is not installed or its extension does not load."""
    for module in LIBRARIES[name]:
        pytest.importorskip(module)
    try:
        return make_peer(name, task)
    except CannotMeasure as reason:
        if "cannot be loaded by torch" in str(reason):
            pytest.skip(str(reason))
        raise


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("added", [8, 64])
@pytest.mark.parametrize("stacks", [False, True], ids=["vectors", "stacks"])
@pytest.mark.parametrize("name", PEERS)
def test_an_installed_library_stores_samples_and_updates(name: str, stacks: bool, added: int) -> None:
    subject = made(name, Task(1_280, added, stacks=stacks))
    fill(subject, 1_280, CPU, rounds=2)
    check(subject, name)
    fields = subject.sample(32)[1]
    assert all(isinstance(values, Tensor) and values.shape[0] == 32 for values in fields.values())
    if stacks:
        assert fields["obs"].shape == fields["next_obs"].shape == (32, 4, 84, 84)
        assert fields["obs"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.uniform])
def test_an_installed_library_draws_by_priority(name: str) -> None:
    subject = made(name, Task(1_280, 8))
    fill(subject, 1_280, CPU, rounds=1)
    obs = torch.cat([subject.sample(256)[1]["obs"].reshape(256, 4)[:, 0] for _ in range(20)])
    # about half of what is drawn gets a priority of almost nothing, and is hardly drawn again
    border = float(obs.median())
    for _ in range(60):
        keys, fields = subject.sample(256)
        low = fields["obs"].reshape(256, 4)[:, 0] < border
        subject.update(keys, torch.where(low, 1e-6, 1.0))
    drawn = subject.sample(256)[1]["obs"].reshape(256, 4)[:, 0]
    assert float((drawn < border).float().mean()) < 0.25


# who takes part in what


def test_every_part_has_those_that_can_do_it() -> None:
    parts = peers_suite.parts(peers_suite.Sizes(), list(PEERS), CPU)
    found = {case.name: list(part.keywords["makers"]) for cases, part in parts for case in cases}
    for batch in (32, 256, 4096):
        assert found[f"cycle/N=10k/B={batch}"] == found[f"frame-cycle/N=20k/B={batch}"] == ["gpu_replay", *PEERS]
        assert found[f"ratio-rank/N=1M/B={batch}"] == ["Proportional", "RankBased"]
    assert {"add/N=1M/B=64", "frame-add/N=20k/B=64", "step-add/N=100k/B=1"} <= found.keys()
    assert found["step-uniform/N=100k/B=64"] == ["gpu_replay", "stable_baselines3"]
    on_gpu = peers_suite.parts(peers_suite.Sizes(), [], torch.device("cuda"))
    names = {case.name for cases, _ in on_gpu for case in cases}
    assert "update/N=1M/B=4096" in names
    assert not any(name.startswith(("ratio", "step")) for name in names)


def test_what_is_recorded_is_what_the_command_measures() -> None:
    # a row of a table without a record, or a record that no command renews, would be a figure from nowhere
    parts = peers_suite.parts(peers_suite.Sizes(), [], CPU)
    measured = {case.name for cases, _ in parts for case in cases}
    root = Path(__file__).parents[2]
    recorded = read(root / "bench" / "results" / "peers.jsonl")
    assert {each.case for each in recorded} == measured
    assert report.section("peers", recorded) in (root / "bench" / "RESULTS.md").read_text()
    assert report.section("peers-in-short", recorded) in (root / "README.md").read_text()


def test_a_mistake_of_ours_is_no_failure_of_the_library(monkeypatch: Patch) -> None:
    def mistaken(task: Task) -> Subject:
        raise AttributeError("a typing mistake")

    monkeypatch.setitem(PEERS, "python_sum_tree", PEERS["python_sum_tree"]._replace(make=mistaken))
    with pytest.raises(CannotMeasure, match="installed, but it fails here"):
        make_peer("python_sum_tree", Task(100, 8))
    # the same in the file of the adapters
    space: dict[str, Any] = {}
    exec(compile("def mistaken(task):\n    return task.no_such_field", peers.__file__, "exec"), space)
    monkeypatch.setitem(PEERS, "python_sum_tree", PEERS["python_sum_tree"]._replace(make=space["mistaken"]))
    with pytest.raises(AttributeError, match="no_such_field"):
        make_peer("python_sum_tree", Task(100, 8))
