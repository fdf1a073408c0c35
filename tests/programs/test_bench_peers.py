"""What is compared with other libraries: the rows they get, how wrong ones are noticed, who takes part, the pages.

Adapters are tried on the libraries that are installed, with tiny sizes; none is imitated.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bench_records import ENVIRONMENT, Capture, Patch, quicker
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_replay.bench import field, peers, peers_suite, report
from gpu_replay.bench import main as commands
from gpu_replay.bench.measure import Plan, Run, check, fill
from gpu_replay.bench.operations import OURS
from gpu_replay.bench.peers import PEERS, make_peer
from gpu_replay.bench.records import CannotMeasure, read, recorded_files
from gpu_replay.bench.subjects import EPISODE, FRAMES, StackStream, Subject, Task, faults, frames
from gpu_replay.bench.torch_rings import PrioritizedTorchRing
from gpu_replay.console.progress import Progress

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]

# rows


def batch_of(envs: int = 64, skip: int = 20) -> dict[str, Tensor]:
    stream = StackStream(envs)
    *_, step = (stream.step() for _ in range(skip + 1))
    return {**step, "weight": torch.ones(envs)}


DAMAGES: dict[str, tuple[str, Any]] = {
    "reward": ("'reward' does not belong", lambda f: {"reward": f["reward"] + 1}),
    "order": ("frames that are not those before", lambda f: {"obs": f["obs"][:, [1, 0, 2, 3]]}),
    "newest": ("not one that was stored", lambda f: {"obs": f["obs"] // 2}),
    "next": ("not that of the step after", lambda f: {"next_obs": f["obs"]}),
    "another environment's next": ("not that of the step after", lambda f: {"next_obs": f["next_obs"].roll(1, 0)}),
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


def test_our_own_buffer_gives_whole_rows() -> None:
    subject = frames(1_280, n_step=3, envs=8)
    fill(subject, 1_280, CPU, rounds=2)
    check(subject, "ours")


# libraries


def test_a_library_that_cannot_be_measured_is_skipped_with_the_reason(monkeypatch: Patch, capsys: Capture) -> None:
    with pytest.raises(CannotMeasure, match="^tianshou skipped: it is not measured on a device of type 'cuda'"):
        make_peer("tianshou", Task(256, 8, device=torch.device("cuda")))
    # Python's own way of saying that there is no such module
    monkeypatch.setitem(sys.modules, "cpprb", None)

    broken = mock.Mock(side_effect=AttributeError("a name that another version has"))
    monkeypatch.setitem(PEERS, "tianshou", PEERS["tianshou"]._replace(make=broken))
    assert peers.available(["cpprb", "tianshou", "python_sum_tree"], CPU) == ["python_sum_tree"]
    missing, failing = capsys.readouterr().err.splitlines()
    assert re.match("cpprb skipped: .*; it needs `pip install cpprb`", missing)
    assert "tianshou skipped: installed, but it fails here" in failing


def made(name: str, task: Task) -> Subject:
    """A library's buffer, or a skipped test where it is not installed or its extension does not load."""
    if "cpu" not in PEERS[name].devices:
        # measured on a GPU alone, the same on a CPU
        return PEERS[name].make(task)
    try:
        return make_peer(name, task)
    except CannotMeasure as reason:
        if re.search("needs `pip install|cannot be loaded by torch|stores float32 alone", str(reason)):
            pytest.skip(str(reason))
        raise


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stacks", [False, True], ids=["vectors", "stacks"])
@pytest.mark.parametrize("name", PEERS)
def test_an_installed_library_stores_samples_and_updates(name: str, stacks: bool) -> None:
    subject = made(name, Task(1_280, 8, stacks=stacks))
    fill(subject, 1_280, CPU, rounds=2)
    check(subject, name)
    fields = subject.sample(32)[1]
    assert all(isinstance(values, Tensor) and values.shape[0] == 32 for values in fields.values())
    if stacks:
        assert fields["obs"].shape == fields["next_obs"].shape == (32, 4, 84, 84)
        assert fields["obs"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.both])
def test_a_library_without_priorities_draws_new_rows_and_weighs_all_alike(name: str) -> None:
    subject = made(name, Task(1_280, 8, uniform=True))
    fill(subject, 1_280, CPU, rounds=1)
    check(subject, name)
    keys, first = subject.sample(256)
    assert torch.equal(first["weight"], torch.ones(256))
    # this does nothing
    subject.update(keys, torch.where(torch.arange(256) > 0, 1e-6, 1e6))
    drawn = torch.cat([subject.sample(256)[1]["obs"].reshape(256, 4)[:, 0] for _ in range(20)])
    # 5,120 draws of 1,280 rows: 1,257 different ones are expected, with a deviation of 4.6
    assert 1_235 < len(drawn.unique()) <= 1_280
    assert not torch.equal(drawn[:256], first["obs"].reshape(256, 4)[:, 0])


def test_peers_are_refused_at_once_where_none_is_installed(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(commands, "installed_version", lambda distribution: None)
    monkeypatch.setattr(commands, "available", lambda names, device: pytest.fail("a library was tried"))
    for chosen in ([], ["--peer", "cpprb"], ["--only", "cycle"]):
        assert commands.main(["peers", "--output", str(tmp_path / "peers.jsonl"), *chosen]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(r"nothing to compare with is installed \(.*cpprb.*pip install .*\[peers\]\"", line)
    assert list(tmp_path.iterdir()) == []


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


ONE_NUMBER = {"n": ((), torch.int64)}


def test_a_plain_prioritized_ring_draws_by_priority_and_weighs_what_it_draws() -> None:
    ring = PrioritizedTorchRing(8, ONE_NUMBER, alpha=0.5, beta=1.0, eps=0.0)
    ring.add({"n": torch.arange(5)})
    ring.update(torch.tensor([0, 1, 3]), torch.tensor([4.0, 16.0, 0.0]))
    # a new transition has the largest so far: 2, 4, 1, 0, 1 and 4
    ring.add({"n": torch.tensor([5])})
    slots, found = ring.sample(12_000)
    assert torch.bincount(slots, minlength=8).tolist() == pytest.approx(
        [2_000, 4_000, 1_000, 0, 1_000, 4_000, 0, 0], abs=2
    )
    assert torch.equal(found["weight"], 1 / ring.powers[slots].float())


def test_on_a_gpu_all_are_launched_and_this_package_alone_is_captured(monkeypatch: Patch) -> None:
    quicker(monkeypatch)
    rings = ("torch_ring", "torch_prioritized_ring")
    for name in rings:
        monkeypatch.setitem(PEERS, name, PEERS[name]._replace(devices=("cpu",)))
    parts = peers_suite.gpu_parts(peers_suite.Sizes((320,), 96, (8,), many=(16,)), rings, CPU)
    plan = Plan(warmup=0, seconds=0, fewest=1, most=1)
    run = Run("peers", CPU, plan, ENVIRONMENT, 1e9, quick=True, way="events")
    with Progress(5, "test") as progress:
        found = [record for cases, measured in parts for record in measured(run, cases, progress)]
        assert {(each.case, each.added) for each in found} == {
            ("cycle/N=320/B=8", 8),
            ("many-cycle/N=320/B=8", 16),
            ("frame-cycle/N=96/B=8", 8),
            ("many-frame-cycle/N=96/B=8", 16),
            ("update/N=320/B=8", 0),
        }
        by_name = {name: {each.operation for each in found if each.implementation == name} for name in (OURS, *rings)}
        # an update of what has no priorities is none
        assert by_name[OURS] == by_name[rings[1]] == by_name[rings[0]] | {"update"}
        assert len(by_name[rings[0]]) == 4
        captured: list[list[str]] = []
        monkeypatch.setattr(Run, "subjects", lambda run, capacity, makers, progress: captured.append([*makers]) or {})
        for cases, measured in parts:
            assert list(measured(replace(run, way="graph"), cases, progress)) == []
    assert captured == [[OURS]] * 5


# many environments


@pytest.mark.parametrize("n", field.STEPS)
@pytest.mark.parametrize("name", field.MAKERS)
def test_rows_of_many_environments_belong_together(name: str, n: int) -> None:
    envs, steps = 64, 40
    if name == "skrl":
        pytest.importorskip("skrl")
        if n > 1:
            with pytest.raises(CannotMeasure, match="no windows of"):
                field.MAKERS[name](envs, steps, n, CPU)
            return
    subject, held = field.MAKERS[name](envs, steps, n, CPU)
    assert held > 600 * envs * steps
    fill(subject, envs * steps, CPU, rounds=1)
    check(subject, name)
    sample = subject.sample
    subject.sample = lambda batch: (None, {**sample(batch)[1], "reward": torch.zeros(256)})
    with pytest.raises(CannotMeasure, match="do not belong"):
        check(subject, name)


def test_the_rule_of_fasttd3_adds_the_oldest_rewards_to_the_newest_windows() -> None:
    """As its own class does: with rewards that are step numbers start 19 of a full ring of 16 gets 19 + 4 + 5."""
    ring, stream = field.RuleOfFastTD3(8, 16, 3, CPU), field.steps_of(8, CPU)
    for number in range(20):
        step = next(stream)
        ring.add(step | {"reward": torch.full((8,), float(number)), "done": 0 * step["done"], "cut": 0 * step["cut"]})
    found = ring.sample(4096)
    newest = found["critic"][:, 0] == 19
    assert newest.any()
    torch.testing.assert_close(found["reward"][newest].unique(), torch.tensor([19 + 0.99 * 4 + 0.99**2 * 5]))


@pytest.mark.parametrize("n, most", [(1, 10), (3, 44), (8, 44)])
def test_the_rule_of_fasttd3_asks_torch_for_no_more_operations_than_its_class(n: int, most: int) -> None:
    """Those counted in its class, of which each is a launch on a GPU; views are none."""
    ring, stream, names = field.RuleOfFastTD3(64, 16, n, CPU), field.steps_of(64, CPU), []
    for _ in range(20):
        ring.add(next(stream))

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.extend([call.__name__] if not call.is_view else [])
            return call(*args, **(kwargs or {}))

    with Counted():
        ring.sample(256)
    assert 0.9 * most <= len([name for name in names if "view" not in name]) <= most


# what is recorded


def test_the_pages_show_what_the_commands_have_recorded() -> None:
    """A figure that no command renews, or a table that no record fills, would be one from nowhere."""
    parts = [*peers_suite.parts(peers_suite.Sizes(), list(PEERS)), *field.parts(False, CPU)]
    measured = {(case.name, name) for cases, part in parts for case in cases for name in part.keywords["makers"]}
    recorded = {(each.case, each.implementation) for each in read(ROOT / "bench" / "results" / "peers.jsonl")}
    assert {case for case, _ in recorded} == {case for case, _ in measured}
    # not every library could be installed
    assert recorded <= measured
    found = [each for file in recorded_files() for each in read(file)]
    for page in (ROOT / "README.md", ROOT / "bench" / "RESULTS.md", ROOT / "docs" / "gpu-simulation.md"):
        assert report.updated(page.read_text(), found) == page.read_text()
