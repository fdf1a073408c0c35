"""Environments behind one interface: endings, stacks of frames, names, and the rules of those that a device steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_runs import CPU, Sums

from gpu_replay import Field
from gpu_replay.training import device_games as rules
from gpu_replay.training.device_games import BALL, CELL, COURT, HEIGHT, LEFT, REACH, RIGHT, SIDE, WIDTH, DevicePong
from gpu_replay.training.environments import Actors, Step
from gpu_replay.training.host_envs import make_gymnasium
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import KINDS, identify
from gpu_replay.training.run import make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.train import beta_schedule

gymnasium = pytest.importorskip("gymnasium")


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


# the rules of Catch and DevicePong: rallies set up by hand, whole games, pictures, serves in plain integers

STAY, UP, DOWN = 0, 1, 2
SPEED, MIDDLE = rules.SERVE_SPEED, (COURT - HEIGHT) // 2
# where a paddle returns the ball level
LEVEL = COURT // 2 - (HEIGHT - BALL) // 2
STATE = ["AGENT", "OPPONENT", "BALL_X", "BALL_Y", "SPEED_X", "SPEED_Y", "HITS", "SERVES"]
STATE += ["AGENT_SCORE", "OPPONENT_SCORE"]


def stepped(action: int = STAY, steps: int = 1, **state: int) -> tuple[Step, Any]:
    """Steps of a game whose state is set by hand: a ball that flies level to the agent unless `state` says else."""
    game = DevicePong(1, CPU, side=84)
    game.reset(0)
    given = {"BALL_X": COURT // 2, "BALL_Y": COURT // 2, "SPEED_X": SPEED, "SPEED_Y": 0, "OPPONENT": MIDDLE}
    for name, value in (given | state).items():
        game.games[getattr(rules, name)] = value
    for _ in range(steps):
        game.send(torch.tensor([action]))
        step = game.recv()
    return step, {name: int(game.games[getattr(rules, name), 0]) for name in STATE}


# what is set up, and what it becomes in one step
RALLIES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    # the opponent follows the ball
    "the upper wall": (
        {"BALL_Y": 300, "SPEED_Y": -700},
        {"BALL_Y": 400, "SPEED_Y": 700, "BALL_X": COURT // 2 + SPEED, "OPPONENT": MIDDLE - rules.OPPONENT_SPEED},
    ),
    "the lower wall": ({"BALL_Y": COURT - BALL - 300, "SPEED_Y": 700}, {"BALL_Y": COURT - BALL - 400, "SPEED_Y": -700}),
    # the loser receives, and a rally begins with both paddles in the middle
    "missed by agent": ({"BALL_X": COURT - BALL - 1, "AGENT": 0}, {"SPEED_X": SPEED, "AGENT": MIDDLE}),
    "missed by opponent": ({"BALL_X": 1, "SPEED_X": -SPEED, "OPPONENT": 0}, {"SPEED_X": -SPEED, "OPPONENT": MIDDLE}),
}
NEW_RALLY = {"BALL_X": (COURT - BALL) // 2, "HITS": 0, "SERVES": 2}


@pytest.mark.parametrize("name", RALLIES)
def test_balls_bounce_and_missed_ones_are_points(name: str) -> None:
    given, expected = RALLIES[name]
    step, state = stepped(**given)
    if "missed" in name:
        won = "opponent" in name
        expected = expected | NEW_RALLY | {"AGENT_SCORE": int(won), "OPPONENT_SCORE": int(not won)}
        assert (step.reward.item(), step.terminated.item()) == (1 if won else -1, False)
    assert {each: state[each] for each in expected} == expected


@pytest.mark.parametrize("hits, speed", [(0, 8.75), (100, 12.0)])
def test_a_paddle_returns_the_ball_faster_and_at_an_angle(hits: int, speed: float) -> None:
    at: Any = {"BALL_X": RIGHT - BALL - 100, "HITS": hits}
    _, level = stepped(**at, AGENT=LEVEL)
    assert (level["SPEED_X"], level["SPEED_Y"], level["HITS"]) == (-speed * CELL, 0, hits + 1)
    # the way beyond the paddle is flown back
    assert level["BALL_X"] == RIGHT - BALL - (SPEED - 100)
    # half way to the end, at it and as far out as the ball still touches
    for out, share in ((rules.END // 2, 0.5), (rules.END, 1.0), ((HEIGHT + BALL) // 2 - 1, 1.0)):
        _, angled = stepped(**at, AGENT=LEVEL - out)
        assert angled["SPEED_Y"] == pytest.approx(share * (speed - 4) * CELL * 7 / 6, rel=0.01)
        assert -angled["SPEED_X"] == speed * CELL <= rules.MOST_SPEED
    # the opponent as the agent does
    _, state = stepped(BALL_X=LEFT + WIDTH + 100, SPEED_X=-SPEED, OPPONENT=LEVEL, HITS=hits)
    assert (state["SPEED_X"], state["HITS"]) == (speed * CELL, hits + 1)


def test_the_twenty_first_point_ends_the_game_and_shows_its_last_picture() -> None:
    step, state = stepped(BALL_X=COURT - BALL - 1, OPPONENT_SCORE=20, AGENT_SCORE=7, AGENT=0)
    assert step.terminated.tolist() == [True]
    assert [state[name] for name in ("AGENT_SCORE", "OPPONENT_SCORE", "AGENT")] == [0, 0, MIDDLE]
    # the agent's paddle was at the top, and begins in the middle
    assert [frame[0, 0, RIGHT // CELL].item() for frame in (step.final_frame, step.frame)] == [255, 0]


@pytest.mark.parametrize("action, way, end", [(STAY, 0, MIDDLE), (UP, -1, 0), (DOWN, 1, COURT - HEIGHT)])
def test_paddles_have_limited_speed_and_stay_on_the_court(action: int, way: int, end: int) -> None:
    for steps, expected in ((1, MIDDLE + way * rules.AGENT_SPEED), (11, end)):
        assert stepped(action, steps, AGENT=MIDDLE, SPEED_X=0)[1]["AGENT"] == expected


@pytest.mark.parametrize("side", [63, 84])
def test_a_pixel_is_as_bright_as_the_share_of_it_that_is_covered(side: int) -> None:
    pong = DevicePong(3, CPU, side)
    unit, edges = COURT / side, torch.arange(side) * COURT / side

    def covered(start: int, length: int) -> Tensor:
        return ((edges + unit).clamp(max=start + length) - edges.clamp(min=start)).clamp(min=0) / unit

    for shown, state in zip(pong.reset(5), pong.games.T.tolist(), strict=True):
        expected = torch.zeros(side, side)
        paddles = [(LEFT, state[rules.OPPONENT], WIDTH, HEIGHT), (RIGHT, state[rules.AGENT], WIDTH, HEIGHT)]
        for x, y, width, height in (*paddles, (state[rules.BALL_X], state[rules.BALL_Y], BALL, BALL)):
            expected = torch.maximum(expected, torch.outer(covered(y, height), covered(x, width)))
        # shares are rounded to fifteenths and seventeenths
        assert float((shown / 255 - expected).abs().max()) <= 1 / 30 + 1 / 34
        assert (shown == 255).sum() == (expected > 0.999).sum()


def test_serves_are_a_function_of_the_seed_and_fall_on_the_middle_of_the_court() -> None:
    rows = []
    for seed in (0, 12345, 0):
        pong = DevicePong(2_000, CPU, 42)
        pong.reset(seed)
        rows.append(pong.games[rules.BALL_Y].double())
        assert COURT // 8 <= rows[-1].min() < COURT // 7
        assert COURT * 6 // 7 < rows[-1].max() <= COURT - COURT // 8
    assert torch.equal(rows[0], rows[2])
    # those of two games, and of two seeds, have nothing in common
    for pair in (rows[:2], [rows[0][1:], rows[0][:-1]]):
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.1


# Catch


def parts(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of the ball, and centre of the paddle, read off boards on which they do not touch."""
    ball, floor = obs[:, :-1].flatten(1).long(), obs[:, -1].long()
    assert (ball.sum(1) == 1).all()
    assert (floor.sum(1) == 2 * REACH + 1).all()
    place = ball.argmax(1)
    return place // SIDE, place % SIDE, (floor * torch.arange(SIDE)).sum(1) // (2 * REACH + 1)


def test_games_follow_the_rules() -> None:
    games = 200
    game = rules.Catch(games, CPU)
    row, column, centre = parts(game.reset(3))
    for t in range(3 * (SIDE - 1)):
        arrived = (t + 1) % (SIDE - 1) == 0
        assert (row == t % (SIDE - 1)).all()
        action = torch.randint(0, 3, (games,), generator=torch.Generator().manual_seed(t))
        game.send(action)
        step = game.recv()
        moved = (centre + action - 1).clamp(REACH, SIDE - 1 - REACH)
        assert torch.equal(step.reward, torch.where((column - moved).abs() <= REACH, 1.0, -1.0) * arrived)
        assert step.terminated.tolist() == [arrived] * games
        assert not step.truncated.any()
        before = column
        row, column, centre = parts(step.frame)
        if arrived:
            # the ball is on the floor in its column, and another game begins
            assert step.final_frame[:, :-1].sum() == 0
            assert (step.final_frame[torch.arange(games), -1, before] == 1).all()
            assert not torch.equal(column, before)
        else:
            assert torch.equal(column, before)
            assert torch.equal(centre, moved)


# what an actor in a process of its own sends

ENVS = 3
COLLECTED = Settings.for_family("catch", n_step=1, capacity=50 * ENVS, num_envs=ENVS, warmup=64)


def test_every_row_of_every_chunk_is_a_step_of_the_game() -> None:
    pytest.importorskip("zstandard", reason="needs zstandard, in the extra `ray`")
    from gpu_replay.training.actors import CHUNK, Collector, unpack

    collectors = [Collector(identify("catch"), COLLECTED, ENVS, seed) for seed in (1, 2)]
    network = QNetwork(rules.Catch.spec.stacked, 3, COLLECTED)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    buffer = make_buffer(rules.Catch.spec, COLLECTED, beta_schedule(COLLECTED), CPU, 0, ENVS)
    lengths: list[float] = []
    # of two actors by turns, and more than the ring holds
    for turn in range(6):
        chunk = collectors[turn % 2].collect(weights, 0.5)
        steps = {name: unpack(value) for name, value in chunk.steps.items()}
        assert steps["action"].shape == (CHUNK, ENVS)
        # sent compressed
        assert len(chunk.steps["obs"][1]) < steps["obs"].nbytes / 5
        buffer.extend(**steps)
        lengths += chunk.lengths
        assert len(chunk.returns) == len(chunk.lengths) == int(steps["terminated"].sum())
        assert not (steps["truncated"][:-1]).any()
        assert (steps["truncated"] | steps["terminated"])[-1].all()
    assert set(lengths) == {11}
    assert buffer.stats().eligible == 50 * ENVS
    batch = buffer.sample(50 * ENVS)
    going = ~batch.terminated
    before, after = batch.obs[going].float(), batch.next_obs[going].float()
    # the ball falls by one row in its column
    assert torch.equal(before[:, :10], after[:, 1:11])
    # the mean place of its cells
    was, became = ((board[:, 11] * torch.arange(12)).sum(1) / board[:, 11].sum(1) for board in (before, after))
    moved, wanted = became - was, batch.action[going] - 1
    # the walls stop it
    assert bool(((moved == 0) | (moved == wanted)).all())
    assert (moved == wanted).float().mean() > 0.7


def test_new_weights_act_from_the_next_chunk_on_which_is_longer_where_frames_are_stacked() -> None:
    pytest.importorskip("zstandard", reason="needs zstandard, in the extra `ray`")
    from gpu_replay.training.actors import Collector

    pong, settings = identify("device-pong"), Settings.for_family("device-pong", frame_size=36, hidden=(8,))
    collector, spec = Collector(pong, settings, ENVS, 0), pong.make(1, settings, CPU).spec
    network = QNetwork(spec.stacked, spec.num_actions, settings)
    weights = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    for best in (0, 2):
        # the value, then an advantage for each action
        weights |= {"last.weight": weights["last.weight"] * 0, "last.bias": np.eye(4, dtype=np.float32)[1 + best]}
        actions = collector.collect(weights, 0.0).steps["action"]
        assert (actions.shape, (actions == best).all()) == ((128, ENVS), True)
