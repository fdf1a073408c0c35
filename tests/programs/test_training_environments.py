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

gymnasium = pytest.importorskip("gymnasium")
CPU = torch.device("cpu")


@pytest.mark.parametrize("name, steps", [("CartPole-v1", 40), ("MountainCar-v0", 201)])
def test_an_ending_keeps_its_final_observation_and_starts_a_new_episode(name: str, steps: int) -> None:
    """As single environments that are stepped and reset by hand: poles fall, cars run out of time."""
    environment, alone, seen = make_gymnasium(name, 3), [gymnasium.make(name) for _ in range(3)], 0
    seeds = np.random.SeedSequence(11).generate_state(3, np.uint32).astype(np.int64) >> 1
    firsts = [each.reset(seed=int(seed))[0].tolist() for each, seed in zip(alone, seeds, strict=True)]
    assert environment.reset(11).tolist() == firsts
    for _ in range(steps):
        environment.send(torch.ones(3, dtype=torch.int64))
        step = environment.recv()
        assert (step.final_frame is None) == (not step.ended.any())
        for env, single in enumerate(alone):
            last, reward, *ended, _ = single.step(1)
            assert [bool(step.terminated[env]), bool(step.truncated[env])] == ended
            assert step.reward[env] == reward
            if any(ended):
                seen += 1
                assert step.final_frame[env].tolist() == last.tolist()
                last, _ = single.reset()
            assert step.frame[env].tolist() == last.tolist()
    assert (seen >= 3, step.reward.dtype) == (True, torch.float32)
    environment.close()


# what is no picture goes to the MLP
PICTURE = Field((3, 40, 50), torch.uint8, torch.float32, 1 / 255)
SHAPES = [((40, 50, 3), PICTURE, "nature"), ((8, 8, 3), Field((8, 8, 3), torch.float32), "mlp")]


@pytest.mark.parametrize("shape, field, network", SHAPES)
def test_observations_are_stored_for_their_network(shape: tuple[int, ...], field: Field, network: str) -> None:
    dtype = np.uint8 if network == "nature" else np.float64
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
    assert before.dtype == torch.uint8
    score = 0.0
    for _ in range(1_500):
        environment.send(torch.zeros(1, dtype=torch.int64))
        step = environment.recv()
        score += step.reward.item()
        if step.ended.any():
            break
        before = step.frame
    assert abs(score) == 21
    # the last frame is of the old game: it shows both paddles, the new one starts with an empty field
    assert not torch.equal(step.frame, step.final_frame)
    assert (step.final_frame != before).float().mean() < 0.1
    environment.close()


ATARI = ("atari", "atari", "atari-cuda")
NAMES = dict.fromkeys(("pong", "Pong", "ALE/Pong-v5", "PongNoFrameskip-v4"), ("pong", *ATARI))
NAMES |= dict.fromkeys(("ALE/MsPacman-v5", "ms_pacman"), ("ms_pacman", *ATARI))
NAMES |= {"catch": ("catch",) * 4, "Acrobot-v1": ("Acrobot-v1", "gymnasium", "vector", "vector")}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_recognised(name: str) -> None:
    pytest.importorskip("ale_py")
    found = identify(name)
    families = (KINDS[found.kind].family(found.name, cuda) for cuda in (False, True))
    assert (found.name, found.kind, *families) == NAMES[name]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [1, 4])
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
