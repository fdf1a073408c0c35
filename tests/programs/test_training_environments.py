"""Environments behind one interface: endings, truncations, stacks of frames, and the names by which they are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_games import Sums

from gpu_replay import Field
from gpu_replay.training.environments import Actors
from gpu_replay.training.host_envs import make_gymnasium
from gpu_replay.training.registry import KINDS, identify
from gpu_replay.training.settings import Settings

pytest.importorskip("gymnasium")
CPU = torch.device("cpu")


def test_an_ending_keeps_its_final_observation_and_starts_a_new_episode() -> None:
    import gymnasium

    environment = make_gymnasium("CartPole-v1", 3)
    obs = environment.reset(11)
    # single ones, stepped by hand
    alone = [gymnasium.make("CartPole-v1") for _ in range(3)]
    seeds = np.random.SeedSequence(11).generate_state(3, np.uint32).astype(np.int64) >> 1
    firsts = [each.reset(seed=int(seed))[0].tolist() for each, seed in zip(alone, seeds, strict=True)]
    assert obs.tolist() == firsts
    over: set[int] = set()
    # pushing one way lets the pole fall within a dozen steps
    for _ in range(14):
        environment.send(torch.ones(3, dtype=torch.int64))
        step = environment.recv()
        for env in set(range(3)) - over:
            expected, _, ended, *_ = alone[env].step(1)
            assert bool(step.terminated[env]) == ended
            assert (step.frame[env].tolist() == expected.tolist()) != ended
            if ended:
                over.add(env)
                assert step.final_frame[env].tolist() == expected.tolist()
                # a new episode starts near zero
                assert step.frame[env].abs().max() <= 0.05
    assert (over, step.reward.dtype) == ({0, 1, 2}, torch.float32)
    environment.close()


def test_truncation_is_told_apart_and_keeps_its_observation() -> None:
    environment = make_gymnasium("MountainCar-v0", 2)
    obs = environment.reset(0)
    for t in range(1, 202):
        environment.send(torch.tensor([0, 1]))
        step = environment.recv()
        assert not step.terminated.any()
        assert (step.truncated.tolist(), step.final_frame is None) == ([t == 200] * 2, t != 200)
        if step.final_frame is not None:
            # it moved on by one step, and did not start anew
            assert (step.final_frame - obs).abs().max() < 0.1
            assert not torch.equal(step.final_frame, step.frame)
        obs = step.frame
    environment.close()


@pytest.mark.parametrize(
    ("shape", "dtype", "field", "network"),
    [
        ((40, 50, 3), np.uint8, Field((3, 40, 50), torch.uint8, torch.float32, 1 / 255), "nature"),
        # what is no picture goes to the MLP
        ((8, 8, 3), np.uint8, Field((8, 8, 3), torch.uint8, torch.float32, 1 / 255), "mlp"),
        ((5,), np.float64, Field((5,), torch.float32), "mlp"),
    ],
)
def test_observations_are_stored_for_their_network_and_actions_may_start_anywhere(
    shape: tuple[int, ...], dtype: type, field: Field, network: str
) -> None:
    import gymnasium

    shown = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)

    class Paying(gymnasium.Env):  # type: ignore[type-arg]
        """Shows one thing for ever and pays the number of its action."""

        observation_space = gymnasium.spaces.Box(0, 255, shape, dtype)
        action_space = gymnasium.spaces.Discrete(3, start=4)

        def reset(self, *, seed: int | None = None, options: object = None) -> tuple[object, dict[str, object]]:
            super().reset(seed=seed)
            return shown, {}

        def step(self, action: int) -> tuple[object, float, bool, bool, dict[str, object]]:
            return shown, float(action), False, False, {}

    name = f"Paying{'x'.join(map(str, shape))}-v0"
    gymnasium.register(name, entry_point=Paying, disable_env_checker=True)
    found = identify(name)
    assert found.settings(CPU).network == network
    environment = found.make(2, found.settings(CPU), CPU)
    assert environment.spec.observation == field
    obs = environment.reset(0)
    environment.send(torch.tensor([0, 2]))
    step = environment.recv()
    assert (step.reward.dtype, step.reward.tolist()) == (torch.float32, [4.0, 6.0])
    # the same thing for ever, with channels first
    seen = torch.from_numpy(shown if network == "mlp" else np.moveaxis(shown, -1, 0)).to(field.dtype)
    for each in (*obs, *step.frame):
        assert torch.equal(each, seen)
    environment.close()


def test_a_pong_game_ends_at_twenty_one_and_the_next_one_starts_anew() -> None:
    pytest.importorskip("ale_py")
    environment = identify("ALE/Pong-v5").make(1, Settings.for_family("atari"), CPU)
    assert environment.spec.num_actions == 3
    assert (environment.spec.observation.shape, environment.spec.stacked.shape) == ((42, 42), (4, 42, 42))
    before = environment.reset(1)
    assert (before.shape, before.dtype) == ((1, 42, 42), torch.uint8)
    score, ended = 0.0, False
    for _ in range(1_500):
        environment.send(torch.zeros(1, dtype=torch.int64))
        step = environment.recv()
        assert step.reward.item() in (-1.0, 0.0, 1.0)
        score += step.reward.item()
        ended = bool(step.terminated | step.truncated)
        assert (step.final_frame is None) == (not ended)
        if ended:
            break
        before = step.frame
    assert abs(score) == 21
    # the last frame is of the old game: it shows both paddles, the new one starts with an empty field
    assert not torch.equal(step.frame, step.final_frame)
    assert (step.final_frame != before).float().mean() < 0.1
    environment.close()


NAMES = dict.fromkeys(("pong", "Pong", "ALE/Pong-v5", "Pong-v4", "PongNoFrameskip-v4"), ("pong", "atari"))
NAMES |= dict.fromkeys(("ALE/MsPacman-v5", "MsPacman", "ms_pacman"), ("ms_pacman", "atari"))
NAMES |= {"catch": ("catch", "catch"), "Acrobot-v1": ("Acrobot-v1", "gymnasium")}
FAMILIES = {"atari": ("atari", "atari-cuda"), "gymnasium": ("vector", "vector"), "catch": ("catch", "catch")}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_recognised(name: str) -> None:
    pytest.importorskip("ale_py")
    found = identify(name)
    assert (found.name, found.kind) == NAMES[name]
    assert tuple(KINDS[found.kind].family(found.name, cuda) for cuda in (False, True)) == FAMILIES[found.kind]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_actors_hand_over_steps_and_stacks_of_the_newest_frames(depth: int, device: str) -> None:
    games, actors = Sums(5, depth), Actors(Sums(5, depth), torch.device(device))
    actors.reset(3)
    histories, endings = [[each] for each in games.reset(3)], torch.zeros(2, 5)
    for t in range(1, 40):
        obs = actors.stack.obs
        assert obs.device.type == device
        for env, history in enumerate(histories):
            # zeros before the first frame of an episode; a single frame has no stack axis
            newest = [*[torch.zeros(3, 2, dtype=torch.uint8)] * depth, *history][-depth:]
            assert torch.equal(obs[env].cpu(), torch.stack(newest) if depth > 1 else newest[0])
        if t == 11:
            # others continue from the state of these
            saved, environment = actors.state_dict(), actors.environment
            actors = Actors(environment, torch.device(device))
            actors.load_state_dict(saved)
        for each in (games, actors.environment):
            each.send((torch.arange(5) + t) % 3)
        step, expected = actors.recv(), games.recv()
        for name in ("frame", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(step, name).cpu(), getattr(expected, name))
        over = expected.terminated | expected.truncated
        endings += torch.stack((expected.terminated, expected.truncated))
        assert torch.equal(step.ended.cpu(), over)
        assert not over.any() or torch.equal(step.final_frame.cpu(), expected.final_frame)
        actors.push(step)
        frame = expected.frame
        assert torch.equal(actors.stack.frame.cpu(), frame)
        histories = [[frame[env]] if over[env] else [*histories[env], frame[env]] for env in range(5)]
    assert bool((endings.sum(1) > 3).all())
