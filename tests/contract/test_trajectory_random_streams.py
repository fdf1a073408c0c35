"""Thousands of random streams, played to the buffer and to the oracle that knows every step ever added.

What can be drawn must be exactly what the oracle says, every row and every window must hold exactly the oracle's
values, and every other key must be refused. Small rings pass their seam many times; stacks and windows may be longer
than the ring; episodes may be one step long; flags, rewards and priorities of dead steps are garbage.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import device_fixture as device_fixture
from devices import scale
from oracle import UNIT
from tolerances import close
from trajectory_oracle import Step, View
from trajectory_pair import FIELDS, Pair, final_of, numbered

from gpu_replay import Combined, Field, Latest, LinearSchedule, Proportional, Uniform

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

pytestmark = pytest.mark.contract

SAMPLERS: dict[str, Any] = {
    "running": Proportional(alpha=1.0, beta=0.5, eps=0.0),
    "stored": Proportional(alpha=1.0, beta=0.5, eps=0.0, initial="stored", normalize="buffer"),
    "number": Proportional(alpha=1.0, beta=LinearSchedule(0.0, 1.0, 9), eps=0.0, initial=0.25, stratified=False),
    "uniform": Uniform(),
    "replacement": Uniform(replacement=True),
    "latest": Latest(),
    "combined-uniform": Combined(Uniform(), newest=2),
    "combined-proportional": Combined(Proportional(alpha=1.0, eps=0.0), newest=3),
}
MODES = [(autoreset, padding) for autoreset in ("next_step", "same_step", "disabled") for padding in ("reset", "zero")]


class Environments:
    """Random steps of all environments of a pair.

    end:   how likely a step ends its episode.
    final: how often a call brings final observations.
    own:   how often a call brings priorities.
    """

    def __init__(self, pair: Pair, generator: random.Random, end: float, final: float, own: float) -> None:
        self.pair, self.generator, self.end, self.final, self.own = pair, generator, end, final, own

    def steps(self) -> list[Step]:
        """The next step of every environment."""
        pair, draw, view = self.pair, self.generator, self.pair.history.view()
        with_final, with_priority = draw.random() < self.final, draw.random() < self.own
        steps = []
        for env in range(pair.history.num_envs):
            dead = view.next_is_dead(env)
            flags = draw.choice(((True, False), (False, True), (True, True))) if draw.random() < self.end else (0, 0)
            step = numbered(
                pair.history.count, env, pair.fields, reward=draw.choice((draw.gauss(0, 1), draw.randint(-9, 9)))
            )
            step |= {"terminated": bool(flags[0]), "truncated": bool(flags[1])}
            if dead and draw.random() < 0.5:
                step["reward"] = float("nan")
            if with_final:
                step["final"] = final_of(step, bool(flags[1]))
            if with_priority:
                step["priority"] = draw.choice((1, -1)) * draw.randint(1, 2**24) / UNIT * (1e4 if dead else 1)
            steps.append(step)
        return steps


def any_keys(generator: random.Random, pair: Pair) -> list[int]:
    """Some keys, repeated ones, ineligible ones and some that are no longer or not yet live."""
    added = pair.history.added
    around = [
        generator.randint(max(-2, added - pair.history.capacity - 3), added + 2)
        for _ in range(generator.randint(1, 12))
    ]
    return around + around[:2]


def check_draws(pair: Pair, view: View, generator: random.Random) -> None:
    """Fail unless a sample is what its sampler promises, of eligible starts alone."""
    eligible, sampler, buffer = view.eligible(), pair.sampler, pair.buffer
    base = sampler.base if isinstance(sampler, Combined) else sampler
    newest = sampler.newest if isinstance(sampler, Combined) else 0
    assert buffer.stats().eligible == len(eligible)
    if not eligible:
        with pytest.raises(RuntimeError):
            buffer.sample(max(newest, 1))
        return
    if newest > len(eligible):
        with pytest.raises(ValueError, match=r"newest"):
            buffer.sample(newest + 1)
        return
    distinct = isinstance(base, Latest) or (isinstance(base, Uniform) and not base.replacement)
    drawn = len(eligible) if distinct else generator.randint(1, 9)
    batch = buffer.sample(drawn + newest)
    keys = batch.key.tolist()
    pair.check_rows(batch, view)
    if distinct:
        assert sorted(keys[:drawn]) == eligible
        with pytest.raises(ValueError, match=rf"{drawn + 1 + newest}"):
            buffer.sample(drawn + 1 + newest)
    if isinstance(base, Latest):
        assert keys == eligible
    elif pair.priorities is not None:
        shares = pair.priorities.shares()
        assert close(batch.probability[:drawn], [shares[key] for key in keys[:drawn]], "probability")
    else:
        assert close(batch.probability[:drawn], [1 / len(eligible)] * drawn, "probability")
    if newest:
        assert keys[drawn:] == eligible[-newest:]
        assert batch.probability[drawn:].tolist() == batch.weight[drawn:].tolist() == [1.0] * newest


def check_windows(pair: Pair, view: View, generator: random.Random) -> None:
    """Fail unless sequences are what the sampler promises, of starts whose steps are all stored."""
    length = generator.randint(1, 6)
    burn_in = generator.randint(0, 4)
    total = length + burn_in
    starts = view.sequence_starts(total)
    newest = pair.sampler.newest if isinstance(pair.sampler, Combined) else 0
    if not starts:
        with pytest.raises(RuntimeError):
            pair.buffer.sample_sequences(max(newest, 1), length, burn_in)
        return
    if newest > len(starts):
        return
    base = pair.sampler.base if isinstance(pair.sampler, Combined) else pair.sampler
    distinct = isinstance(base, Latest) or (isinstance(base, Uniform) and not base.replacement)
    drawn = len(starts) if distinct else 5
    batch = pair.buffer.sample_sequences(drawn + newest, length, burn_in)
    keys = batch.key.tolist()
    pair.check_sequences(batch, view, total)
    if distinct:
        assert sorted(keys[:drawn]) == starts
    if newest:
        assert keys[drawn:] == starts[-newest:]


def run(pair: Pair, generator: random.Random, steps: int, end: float, final: float, own: float, check: float) -> None:
    """So many steps of all environments, with everything else that can happen between them."""
    environments = Environments(pair, generator, end, final, own)
    restless = generator.random() < 0.4
    for _ in range(steps):
        pair.add(environments.steps())
        if generator.random() < 0.3:
            keys = any_keys(generator, pair)
            pair.update(keys, [generator.randint(1, 2**24) / UNIT for _ in keys])
        if restless and generator.random() < 0.06:
            pair.clear()
        if restless and generator.random() < 0.06:
            few = [generator.random() < 0.5 for _ in range(pair.history.num_envs)]
            pair.begin_episodes(generator.choice((None, few)))
        if generator.random() < check:
            view = pair.check()
            check_draws(pair, view, generator)
    view = pair.check()
    pair.check_refusals(view)
    check_draws(pair, view, generator)
    check_windows(pair, view, generator)
    if pair.priorities is not None:
        assert pair.buffer.stats().stale_updates == pair.priorities.stale


FLOATS = FIELDS | {"obs": Field((2,), torch.float32)}
DICTIONARY = {
    "obs.image": Field((2, 3), torch.int16),
    "obs.vector": Field((2,), torch.float64),
    "action": Field((2,), torch.float32),
}


def streams(name: str, autoreset: str, padding: str, device: str) -> int:
    """Play a random pair of this name to its end; returns its number of environments."""
    generator = random.Random(f"{name} {autoreset} {padding}")
    num_envs = generator.randint(1, 7)
    turn = generator.choice((1, 2, 3, 5, 8, 13, 21))
    pair = Pair(
        num_envs * turn + generator.randrange(num_envs),
        num_envs,
        sampler=SAMPLERS[generator.choice(list(SAMPLERS))],
        fields=generator.choice((FIELDS, FIELDS, FLOATS, DICTIONARY)),
        device=device,
        stack=min(turn, generator.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))),
        n_step=min(turn, generator.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))),
        gamma=generator.choice((0.99, 0.5, 1.0, 0.9)),
        autoreset=autoreset,
        padding=padding,
    )
    try:
        run(
            pair,
            generator,
            steps=generator.randint(1, 20 + turn),
            end=generator.choice((0.02, 0.1, 0.3, 0.6, 1.0)),
            final=generator.choice((0.0, 0.5, 1.0)),
            own=generator.choice((0.0, 0.3, 1.0)),
            check=0.15,
        )
    except AssertionError as error:
        raise AssertionError(f"streams({name!r}, {autoreset!r}, {padding!r}) in {pair.buffer}: {error}") from error
    return num_envs


@pytest.mark.parametrize("autoreset, padding", MODES)
def test_random_streams_agree_with_the_oracle(autoreset: str, padding: str, device: str, full: bool) -> None:
    # on a GPU almost every setting is other code to compile, and the kernels' own tests are many
    count = scale(200, 6) if full else scale(40, 2) if device == "cpu" else 5
    names = (f"more {number}" if full else str(number) for number in range(count))
    played = sum(streams(name, autoreset, padding, device) for name in names)
    assert played >= 2 * count


FLAGS = st.sampled_from([(False, False)] * 3 + [(True, False), (False, True), (True, True)])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(FLAGS, min_size=3, max_size=3)),
        st.tuples(st.just("final"), st.lists(FLAGS, min_size=3, max_size=3)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("begin"), st.lists(st.booleans(), min_size=3, max_size=3)),
    ),
    max_size=25,
)


@hypothesis.settings(
    max_examples=15 if torch.cuda.is_available() else scale(40, 4),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    mode=st.sampled_from(MODES),
    num_envs=st.integers(1, 3),
    turn=st.integers(1, 9),
    stack=st.integers(1, 8),
    n_step=st.integers(1, 8),
    events=EVENTS,
)
def test_any_stream_agrees_with_the_oracle(
    device: str, mode: tuple[str, str], num_envs: int, turn: int, stack: int, n_step: int, events: list[tuple[str, Any]]
) -> None:
    autoreset, padding = mode
    own: dict[str, Any] = {"stack": min(stack, turn), "n_step": min(n_step, turn)}
    pair = Pair(num_envs * turn, num_envs, device=device, autoreset=autoreset, padding=padding, **own)
    for event, argument in events:
        if event == "clear":
            pair.clear()
        elif event == "begin":
            pair.begin_episodes(argument[:num_envs])
        else:
            steps = []
            for env, (terminated, truncated) in enumerate(argument[:num_envs]):
                step = numbered(pair.history.count, env, pair.fields, reward=float(pair.history.count % 5))
                step |= {"terminated": terminated, "truncated": truncated}
                steps.append(step | ({"final": final_of(step, truncated)} if event == "final" else {}))
            pair.add(steps)
        pair.check()
    pair.check_refusals(pair.check())
