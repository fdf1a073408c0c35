"""skrl's agents on our memory: samples are what its own RandomMemory holds, and its trainer learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("skrl", reason="needs skrl, in the extra `integrations`")

from skrl.agents.torch.sac import SAC  # noqa: E402
from skrl.envs.wrappers.torch import wrap_env  # noqa: E402
from skrl.memories.torch import RandomMemory  # noqa: E402
from skrl.trainers.torch import SequentialTrainer  # noqa: E402
from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model  # noqa: E402

from gpu_replay import CheckpointError, Proportional  # noqa: E402
from gpu_replay.integrations.skrl import ReplayMemory  # noqa: E402

SIZES = {"observations": 3, "states": 5, "actions": 2, "rewards": 1, "next_observations": 3, "next_states": 5}
SIZES |= {"terminated": 1}
NAMES = list(SIZES)


def steps_of(count: int, envs: int, resets: bool, seed: int = 0) -> list[dict[str, Tensor]]:
    """Steps as skrl's trainer records them; where `resets`, the next observation of an ended one is its last."""
    random = torch.Generator().manual_seed(seed)
    seen = {name: torch.rand(count + 1, envs, SIZES[name], generator=random) for name in ("observations", "states")}
    found = []
    for t in range(count):
        ended, kind = torch.rand(envs, 1, generator=random) < 0.3, torch.rand(envs, 1, generator=random) < 0.5
        step = {name: values[t] for name, values in seen.items()}
        for name, values in seen.items():
            last = torch.rand(envs, SIZES[name], generator=random)
            step[f"next_{name}"] = torch.where(ended, last, values[t + 1]) if resets else values[t + 1]
        step |= {"actions": torch.rand(envs, 2, generator=random), "rewards": torch.rand(envs, 1, generator=random)}
        found.append(step | {"terminated": ended & kind, "truncated": ended & ~kind})
    return found


def made(steps: int, envs: int, kind: Any = ReplayMemory, **more: Any) -> Any:
    """An empty memory with the tensors that SAC creates."""
    memory = kind(memory_size=steps, num_envs=envs, device="cpu", **more)
    for name, size in SIZES.items():
        assert memory.create_tensor(name, size=size, dtype=torch.bool if name == "terminated" else torch.float32)
    return memory


def store(steps: list[dict[str, Tensor]], *memories: Any) -> None:
    for step in steps:
        for memory in memories:
            memory.add_samples(**step)


@pytest.mark.parametrize("told", [False, True], ids=["as SAC passes them", "with truncated"])
@pytest.mark.parametrize("resets", [False, True], ids=["next of the new episode", "next of the old episode"])
@pytest.mark.parametrize("count", [20, 75], ids=["not full", "full"])
@pytest.mark.parametrize("envs", [1, 4])
def test_samples_are_what_its_own_memory_holds(envs: int, count: int, resets: bool, told: bool) -> None:
    ours, theirs = made(32, envs), made(32, envs, RandomMemory)
    for step in steps_of(count, envs, resets):
        given = step if told else {name: value for name, value in step.items() if name != "truncated"}
        # an environment may write its next step into the same tensors
        reused = {name: value.clone() for name, value in given.items()}
        ours.add_samples(**reused)
        theirs.add_samples(**given)
        for value in reused.values():
            value.fill_(7)
    assert len(ours) == len(theirs)
    (found,) = ours.sample([*NAMES, "nothing"], batch_size=400)
    assert found.pop() is None
    # one step more is stored than there: the newest one is kept beside the ring
    recent = ours.get_sampling_indexes() >= (count - 32) * envs
    key, found = ours.get_sampling_indexes()[recent], [column[recent] for column in found]
    (wanted,) = theirs.sample_by_index(NAMES, indexes=key % (32 * envs))
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other), name
    # the newest step is sampled with the next one, and so is the one before it where its episode goes on
    stored = range(max(0, count - 32), count - 2)
    assert set((key // envs).tolist()) >= set(stored)
    assert key.max() < (count - 1) * envs


@pytest.mark.parametrize("length", [1, 3])
def test_without_replacement_a_batch_has_no_row_twice_as_there(length: int) -> None:
    ours = made(6, 2, replacement=False, sequence_length=length)
    theirs = made(6, 2, RandomMemory, replacement=False)
    for count, step in enumerate(steps_of(10, 2, True), 1):
        store([step], ours, theirs)
        if count < length + 2:
            continue
        for asked in (2, 100):
            (found,), (wanted,) = (
                memory.sample(["observations"], batch_size=asked, sequence_length=length) for memory in (ours, theirs)
            )
            rows = [tuple(row) for row in found[0][::length].tolist()]
            assert len(rows) == len({*rows})
            # the newest step is sampled once another one follows
            assert min(asked, len(wanted) // length - 2) <= len(rows) <= asked
    with pytest.raises(ValueError, match="replacement=False is of uniform sampling"):
        made(6, 2, replacement=False, sampler=Proportional())


def test_mini_batches_share_the_rows() -> None:
    ours = made(32, 4)
    store(steps_of(20, 4, True), ours)
    parts = ours.sample(["observations", "states"], batch_size=10, mini_batches=3)
    assert [[len(column) for column in part] for part in parts] == [[4, 4], [3, 3], [3, 3]]


def test_windows_are_consecutive_steps_of_an_environment() -> None:
    ours = made(32, 4, sequence_length=5)
    steps = steps_of(60, 4, False)
    store(steps, ours)
    (found,) = ours.sample(["observations", "terminated"], batch_size=50, sequence_length=5)
    assert [column.shape for column in found] == [(250, 3), (250, 1)]
    for row, key in enumerate(ours.get_sampling_indexes().tolist()):
        t, e = divmod(key, 4)
        for k in range(5):
            assert torch.equal(found[0][5 * row + k], steps[t + k]["observations"][e])
            assert torch.equal(found[1][5 * row + k], steps[t + k]["terminated"][e])
    with pytest.raises(ValueError, match=r"windows of 5 steps; make it with ReplayMemory\(\.\.\., sequence_length=3\)"):
        ours.sample(["observations"], batch_size=8, sequence_length=3)
    with pytest.raises(ValueError, match="at least 1; found 0"):
        made(32, 4, sequence_length=0)


def test_the_first_steps_are_sampled_at_once() -> None:
    ours, theirs = made(32, 4), made(32, 4, RandomMemory)
    for call in (lambda: ours.sample(NAMES, batch_size=8), lambda: ours.save("anywhere")):
        with pytest.raises(RuntimeError, match="holds 0 steps. Add more"):
            call()
    for step in steps_of(5, 4, True):
        store([step], ours, theirs)
        (found,) = ours.sample(NAMES, batch_size=8)
        (held,) = theirs.sample_by_index(NAMES, indexes=list(range(len(theirs))))
        for name, one, other in zip(NAMES, found, held, strict=True):
            assert name.startswith("next") or {tuple(row) for row in one.tolist()} <= {tuple(r) for r in other.tolist()}


def test_a_saved_memory_continues_with_new_episodes(tmp_path: Path) -> None:
    first, second = made(32, 4), made(32, 4)
    with pytest.raises(ValueError, match="needs a folder"):
        first.save()
    steps = steps_of(20, 4, False)
    store(steps[:12], first)
    first.save(str(tmp_path / "memory"), format="pt")
    second.load(str(tmp_path / "memory"))
    # the newest step is not saved
    assert len(second) == 11 * 4
    (found,) = second.sample(["observations", "actions"], batch_size=100)
    t, e = second.get_sampling_indexes() // 4, second.get_sampling_indexes() % 4
    assert torch.equal(found[1], torch.stack([steps[int(a)]["actions"][int(b)] for a, b in zip(t, e, strict=True)]))
    store(steps[12:], second)
    with pytest.raises(CheckpointError, match="has the capacity 128; this buffer has 64"):
        made(16, 4).load(str(tmp_path / "memory"))
    second.reset()
    assert len(second) == 0


def test_what_it_cannot_do_says_so() -> None:
    memory = ReplayMemory(memory_size=32, num_envs=4, device="cpu")
    assert memory.create_tensor("observations", size=3, dtype=torch.float32)
    assert not memory.create_tensor("observations", size=3, dtype=torch.float32)
    assert not memory.create_tensor("states", size=None)
    assert memory.get_tensor_names() == ["observations"]
    with pytest.raises(ValueError, match="created with size .3,. and torch.float32; found .4,."):
        memory.create_tensor("observations", size=4, dtype=torch.float32)
    with pytest.raises(KeyError, match="actions, rewards, next_observations, terminated is missing"):
        memory.add_samples(observations=torch.zeros(4, 3))
    for call in (memory.sample_all, memory.get_tensor_by_name, memory.sample_by_index):
        with pytest.raises(RuntimeError, match="On-policy agents.*need RandomMemory"):
            call(["observations"])
    ours = made(32, 4)
    step = {name: value[:2] for name, value in steps_of(1, 4, False)[0].items()}
    with pytest.raises(ValueError, match=r"needs shape \[4, 3\], all environments at once; found \[2, 3\]"):
        ours.add_samples(**step)
    assert len(ours) == 0


def test_priorities_are_given_by_the_keys_of_the_last_sample_and_observations_may_be_short() -> None:
    ours, steps = made(32, 4, sampler=Proportional(eps=0.0), dtype=torch.bfloat16), steps_of(20, 4, False)
    store(steps, ours)
    ours.sample(NAMES, batch_size=256)
    key = ours.get_sampling_indexes()
    ours.buffer.update_priorities(key, torch.where(key == 21, 1e6, 1e-6))
    (found,) = ours.sample(["observations", "actions"], batch_size=64)
    drawn = ours.get_sampling_indexes() == 21
    assert drawn.float().mean() > 0.9
    assert torch.equal(found[0][drawn][0], steps[5]["observations"][1].bfloat16().float())
    assert torch.equal(found[1][drawn][0], steps[5]["actions"][1])


@pytest.mark.parametrize("envs", [1, 4])
def test_its_trainer_learns_from_its_first_step_on(envs: int) -> None:
    """SAC on Pendulum, cut after 20 steps; a single environment is reset by the trainer."""
    torch.manual_seed(0)
    same = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    plain = gymnasium.make("Pendulum-v1", max_episode_steps=20)
    many = gymnasium.make_vec("Pendulum-v1", 4, "sync", vector_kwargs=same, max_episode_steps=20)
    env = wrap_env(plain if envs == 1 else many, verbose=False)
    given: Any = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    layers = {"name": "net", "layers": [32], "activations": "relu"}
    network = [layers | {"input": "OBSERVATIONS"}]
    models = {"policy": gaussian_model(**given, network=network, output="2 * tanh(ACTIONS)")}
    network = [layers | {"input": "concatenate([OBSERVATIONS, ACTIONS])"}]
    for name in ("critic_1", "critic_2", "target_critic_1", "target_critic_2"):
        models[name] = deterministic_model(**given, network=network, output="ONE")
    for model in models.values():
        model.init_state_dict()
    memory = ReplayMemory(memory_size=300, num_envs=envs, device="cpu")
    quiet = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
    cfg = {"batch_size": 32, "learning_starts": 0, **quiet}
    agent = SAC(models=models, memory=memory, cfg=cfg, **given)
    before = [each.clone() for each in agent.policy.parameters()]
    quiet = {"disable_progressbar": True, "close_environment_at_exit": False, "headless": True}
    SequentialTrainer(cfg={"timesteps": 60, **quiet}, env=env, agents=agent).train()
    env.close()
    assert not all(map(torch.equal, before, agent.policy.parameters()))
    assert all(each.isfinite().all() for each in agent.policy.parameters())
    (found,) = memory.sample(["observations", "actions", "next_observations"], batch_size=300)
    assert memory.buffer.stats().eligible == memory.buffer.added - envs
    # its trainer reset the single environment itself: the next observation is still that of the old episode
    cosine, sine = found[2][:, 0], found[2][:, 1]
    torch.testing.assert_close(cosine.square() + sine.square(), torch.ones(300))
    speed, moved = found[2][:, 2], torch.atan2(sine, cosine) - torch.atan2(found[0][:, 1], found[0][:, 0])
    within = moved.abs() < 3
    follows = (moved[within] - 0.05 * speed[within]).abs() < 1e-4
    assert bool(follows.all()) if envs == 1 else follows.float().mean() > 0.9
