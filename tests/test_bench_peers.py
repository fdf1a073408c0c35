"""What is compared with other libraries: the rows they get, how wrong ones are noticed, who takes part, the table.

Adapters are tried on the libraries that are installed, with tiny sizes; none is imitated.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from bench_records import Capture, Patch
from torch import Tensor

from gpu_replay.bench import peers_suite, variants
from gpu_replay.bench.frames import FrameSubject
from gpu_replay.bench.peers.python_sum_tree import PythonSumTree
from gpu_replay.bench.runner import Refused, check, fill
from gpu_replay.bench.stacks import EPISODE, FRAMES, StackStream, faults
from gpu_replay.bench.subjects import PEERS, MissingPeer, Subject, Task, make_peer
from gpu_replay.console.progress import Progress

CPU = torch.device("cpu")
# what must be importable for an adapter to work at all
LIBRARIES = {name: (name,) for name in ("cpprb", "tianshou", "stable_baselines3")}
LIBRARIES |= {"flashbax": ("jax", "flashbax"), "torchrl": ("tensordict", "torchrl"), "python_sum_tree": ()}
LIBRARIES |= {"dopamine": ("dopamine", "gin", "snappy")}


# rows


def stream_of(count: int, envs: int = 2, skip: int = 0) -> list[dict[str, Tensor]]:
    stream = StackStream(envs)
    steps = [stream.step() for _ in range(skip + count)]
    return steps[skip:]


def test_steps_follow_on_each_other_until_an_episode_ends() -> None:
    steps = stream_of(EPISODE, envs=2)
    for number, (before, step) in enumerate(pairwise(steps)):
        going = ~before["terminated"]
        assert torch.equal(before["next_obs"][going, -1], step["obs"][going, -1])
        if EPISODE - 120 < number < EPISODE - 80:
            assert torch.equal(before["next_obs"][going], step["obs"][going])
    assert [int(sum(step["terminated"][env] for step in steps)) for env in (0, 1)] == [1, 1]
    first = steps[EPISODE - 100]["obs"]
    # environment 1 has just begun: its stack is its first frame four times
    assert (first[1] == first[1, -1]).all()
    assert not (first[0] == first[0, -1]).all()


def batch_of(envs: int = 64, skip: int = 20) -> dict[str, Tensor]:
    step = stream_of(1, envs=envs, skip=skip)[0]
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


def test_whole_rows_have_no_faults() -> None:
    for skip in (0, 1, 20, FRAMES - 2):
        assert faults(batch_of(envs=8, skip=skip)) == []
    # the last step of environment 9
    assert faults(batch_of(envs=10, skip=EPISODE - 901)) == []


@pytest.mark.parametrize("name", DAMAGES)
def test_mixed_up_rows_of_stacks_are_noticed(name: str) -> None:
    message, damage = DAMAGES[name]
    fields = batch_of()
    wrong = faults({**fields, **damage(fields)}, seam=0.1)
    assert any(message in fault for fault in wrong), wrong


def test_only_a_few_rows_at_the_seam_may_be_cut() -> None:
    fields = batch_of()
    for cut, allowed in ((3, True), (12, False)):
        after = fields["next_obs"].clone()
        after[:cut] = fields["obs"][:cut]
        assert (faults({**fields, "next_obs": after}, seam=0.1) == []) is allowed
        assert faults({**fields, "next_obs": after}) != []


@pytest.mark.parametrize("n_step, envs", [(1, 8), (3, 8), (1, 64)])
def test_our_own_buffer_gives_whole_rows(n_step: int, envs: int) -> None:
    subject = FrameSubject(1_280, CPU, n_step=n_step, envs=envs)
    fill(subject, 1_280, CPU, rounds=2)
    check(subject, "ours")


# libraries


class _OtherRewards(PythonSumTree):
    """Gives rewards of other rows."""

    def fields(self, sampled: Any) -> Mapping[str, Tensor]:
        found = dict(super().fields(sampled))
        return {**found, "reward": found["reward"].roll(1)}


@pytest.mark.parametrize("stacks", [False, True], ids=["vectors", "stacks"])
def test_a_library_that_mixes_rows_up_is_refused(stacks: bool) -> None:
    subject = _OtherRewards(Task(256, 8, stacks=stacks))
    fill(subject, 256, CPU, rounds=1)
    with pytest.raises(Refused, match="mixing is not measured: .*reward"):
        check(subject, "mixing")


@pytest.mark.parametrize("name", [name for name, modules in LIBRARIES.items() if modules])
def test_without_the_library_a_peer_is_skipped_with_the_way_to_install_it(name: str, monkeypatch: Patch) -> None:
    for module in [found for found in sys.modules if found.startswith(LIBRARIES[name][-1])]:
        monkeypatch.delitem(sys.modules, module)
    for module in LIBRARIES[name]:
        # Python's own way of saying that there is no such module
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPeer, match=rf"^{name} skipped: .*; it needs `pip install .*{PEERS[name].distribution}`"):
        make_peer(name, Task(256, 8))


def test_a_device_that_a_library_does_not_know_is_refused() -> None:
    with pytest.raises(MissingPeer, match=r"cpprb skipped: it stores nothing on a device of type 'cuda'\."):
        make_peer("cpprb", Task(256, 8, device=torch.device("cuda")))


def made(name: str, task: Task, *, index: bool = False) -> Subject:
    """A library's buffer, or a skipped test where it is not installed or its extension does not load."""
    for module in LIBRARIES[name]:
        pytest.importorskip(module)
    try:
        return make_peer(name, task, index=index)
    except MissingPeer as reason:
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
    fields = subject.fields(subject.sample(32))
    assert all(isinstance(values, Tensor) and values.shape[0] == 32 for values in fields.values())
    if stacks:
        assert fields["obs"].shape == fields["next_obs"].shape == (32, 4, 84, 84)
        assert fields["obs"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.uniform])
def test_an_installed_library_draws_by_priority(name: str) -> None:
    subject = made(name, Task(1_280, 8))
    fill(subject, 1_280, CPU, rounds=1)
    obs = torch.cat([subject.fields(subject.sample(256))["obs"].reshape(256, 4)[:, 0] for _ in range(20)])
    # about half of what is drawn gets a priority of almost nothing, and is hardly drawn again
    border = float(obs.median())
    for _ in range(60):
        sampled = subject.sample(256)
        low = subject.fields(sampled)["obs"].reshape(256, 4)[:, 0] < border
        subject.update(sampled, torch.where(low, 1e-6, 1.0))
    drawn = subject.fields(subject.sample(256))["obs"].reshape(256, 4)[:, 0]
    assert float((drawn < border).float().mean()) < 0.25


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.index])
def test_an_installed_index_works_alone(name: str) -> None:
    subject = made(name, Task(1_000, 0), index=True)
    fill(subject, 1_000, CPU, rounds=4)
    check(subject, name)


@pytest.mark.filterwarnings("ignore")
def test_trees_on_a_gpu_are_refused_without_a_build_that_has_them() -> None:
    made("torchrl", Task(256, 8))
    extension = importlib.import_module("torchrl._torchrl")
    if hasattr(extension, "CudaSumSegmentTreeFp32"):
        pytest.skip("this build of TorchRL has CUDA trees")
    with pytest.raises(MissingPeer, match="torchrl skipped: installed, but it fails here"):
        make_peer("torchrl", Task(256, 8, device=torch.device("cuda")))


# who takes part in what


def test_every_part_has_those_that_can_do_it() -> None:
    everything = list(PEERS)
    vectors, stacks, more, more_stacks, *others, index = peers_suite.parts(peers_suite.Sizes(), CPU)
    assert [case.name for case in stacks.cases] == [f"frame-cycle/N=20k/B={batch}" for batch in (32, 64, 256, 4096)]
    assert [case.name for case in (*more.cases, *more_stacks.cases)] == ["add/N=1M/B=64", "frame-add/N=20k/B=64"]
    assert (vectors.added, more.added) == (8, 64)
    assert "dopamine" in peers_suite.makers(vectors, 10_000, everything, CPU)
    assert "dopamine" not in peers_suite.makers(vectors, 100_000, everything, CPU)
    assert list(peers_suite.makers(stacks, 20_000, everything, CPU)) == ["gpu_replay", *everything]
    assert list(peers_suite.makers(others[2], 100_000, everything, CPU)) == ["gpu_replay", "stable_baselines3"]
    settings = [case.operation for part in others[3:] for case in part.cases]
    assert len(set(settings)) == 6
    assert all(len(variants.makers(operation)) == 2 for operation in settings)
    with_index = ["gpu_replay", "tianshou", "torchrl", "dopamine"]
    assert list(peers_suite.makers(index, 10_000_000, everything, CPU)) == with_index
    on_gpu = peers_suite.parts(peers_suite.Sizes(), torch.device("cuda"))
    assert "index" not in {part.contents for part in on_gpu}
    assert "update/N=1M/B=4096" in {case.name for part in on_gpu for case in part.cases}


def test_what_is_missing_is_said_once(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "cpprb", None)
    with Progress(1, "test") as progress:
        found = peers_suite.available(["cpprb", "python_sum_tree"], CPU, progress)
    assert (found, capsys.readouterr().err.count("cpprb skipped")) == (["python_sum_tree"], 1)
