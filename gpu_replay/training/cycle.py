"""What a run repeats: act, step, learn and store, in calls of their own or, on CUDA, as graphs.

An update is one graph wherever environments are; where they are on the device as well, a whole step with its updates
is, and the host only counts and sets what changes with the counts. Of environments on the host what comes between the
arrival of a step and the next actions is another graph: statistics, stacks, the add and the network.

Groups of environments are stepped one after the other: while the device acts for one, emulators play for the others.
All of them act before the updates of a step and are added together, so the run is that of a single group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from gpu_replay import Batch, TrajectoryReplayBuffer
from gpu_replay.graphs.cuda_graph import CaptureError, CudaGraphCall
from gpu_replay.graphs.learning_step import LearningStep
from gpu_replay.training.actors import Actors, DeviceStep
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import Step, joined
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.settings import Settings
from gpu_replay.training.stopwatch import Part, Stopwatch, mean_seconds


class Cycle:
    """One step of all environments after another, and the updates of each.

    The caller sets epsilon and learning rate, which replays follow, and calls `begin` first. Captured steps go on with
    the memory of what they work on, so nothing may be restored once there are any.

    Environments on the host that `runs_ahead` names are still under way at the end of a step: the next one, or
    `settle`, stores what they did. Whoever looks from outside settles first, and finds all as the plain loop leaves it.
    """

    def __init__(
        self,
        agent: Agent,
        actors: Actors,
        buffer: TrajectoryReplayBuffer,
        statistics: EpisodeStatistics,
        settings: Settings,
        watch: Stopwatch,
    ) -> None:
        self._agent, self._actors, self._buffer, self._statistics = agent, actors, buffer, statistics
        self._settings, self._watch, self._device = settings, watch, agent.device
        self._on_device = actors.environment.on_device
        self._generators = (agent.explorer.generator, *actors.environment.generators)
        self._prioritized = settings.sampler != "uniform"
        # updates that share a draw, draws of a step, and rows of a draw
        self._together = settings.updates_a_sample
        self._draws = settings.updates // self._together
        self.draw_size = settings.batch_size * self._together
        self.learning_step: LearningStep | None = None
        self.whole_step: LearningStep | None = None
        # environments on the host: what each group has done, the actions before that and after it, and whether another
        # step is under way
        self._ahead = runs_ahead(actors, agent.device)
        self._arrived: dict[int, Step] = {}
        self._sent = torch.zeros(actors.environment.num_envs, dtype=torch.int64, device=agent.device)
        self._chosen = torch.zeros_like(self._sent)
        self._under_way = False
        # for each group, from its arrival to its next actions
        self.answers: list[LearningStep] = []
        if settings.graph and self._ahead:
            self.answers = [
                buffer.capture(None, partial(self._take_in, part), generators=self._generators)
                for part in range(len(actors.parts))
            ]
        if settings.graph:
            self.learning_step = buffer.capture(self.draw_size, self._learn_from)
        if settings.graph and self._on_device and settings.updates:
            self.whole_step = buffer.capture(self.draw_size, self._step_from, generators=self._generators)

    def begin(self, frame: Tensor, obs: Tensor) -> None:
        """Environments were reset or restored: their newest frames, and the observations to act on."""
        self.frame, self.obs = frame, obs
        self._under_way = False
        if self._ahead:
            # each step writes here, which must not be memory of the environments
            self.frame = frame.clone()
            self.obs = self.frame if obs is frame else obs

    def advance(self, learn: Callable[[], object] | None = None) -> None:
        """A step of all environments, which calls `learn` while those on the host run."""
        if self._ahead:
            self._step_ahead(learn)
        else:
            self._step(learn)

    def _step(self, learn: Callable[[], object] | None) -> None:
        """Act, send, learn while simulators run, receive and store."""
        watch = self._watch
        actions = self._agent.act(self.obs)
        watch.lap("act")
        self._actors.send(actions)
        watch.lap("env")
        if learn is not None:
            learn()
        arrival = self._receive()
        watch.lap("env")
        self._store(actions, arrival, arrival.final_frame)
        if self._on_device:
            for mine, new in ((self.frame, arrival.frame), (self.obs, arrival.obs)):
                if mine is not new:
                    mine.copy_(new)
        else:
            self.frame, self.obs = arrival.frame, arrival.obs
        watch.lap("replay")

    def settle(self) -> None:
        """Wait for the step that is under way, if one is, and store it."""
        if not self._under_way:
            return
        for part in range(len(self._actors.parts)):
            self._arrived[part] = self._actors.fetch(part)
        self._keep(self._seen(push=True))
        self._under_way = False

    def make_updates(self) -> None:
        """The updates of one step of all environments."""
        for _ in range(self._draws):
            self._draw_and_learn()
            for _ in range(self._together):
                self._agent.after_update()
        self._watch.lap("learn")

    def step_at_once(self) -> bool:
        """`advance` with `make_updates` in one call, on CUDA one graph; returns whether that could be.

        It cannot be where the host has something to do in between: before the first update ever, and where the target
        network is renewed between two draws.
        """
        agent, updates = self._agent, self._settings.updates
        if self.whole_step is None or not agent.updates or agent.target_due(updates - self._together):
            return False
        if not self._called(self.whole_step, "a step with its updates"):
            self.whole_step = None
            return False
        for _ in range(updates):
            agent.after_update()
        self._watch.lap("learn")
        return True

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time so far; "replay" is add, sample and update_priorities together.

        To divide the time of a captured step continues to learn, so this must be the last call.
        """
        shares = self._watch.shares()
        if self.whole_step is not None and self.whole_step.captured:
            return divided(shares, self.whole_step, self._parts(), self._device)
        if self.learning_step is not None and self.learning_step.captured:
            alone = self._buffer.capture(self.draw_size, self._update_only)
            shares = divided(shares, self.learning_step, {"replay": alone}, self._device)
        if self.answers and all(answer.captured for answer in self.answers):
            shares = divided(shares, self._answer_again, self._parts_of_answers(), self._device, "act")
        return shares

    def _called(self, step: LearningStep, name: str) -> bool:
        """Make the call; returns whether it was made, and says on standard error why where it cannot be captured."""
        if not step.captured:
            self._watch.skip()
        try:
            step()
        except CaptureError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            print(f"{name} cannot be captured as a CUDA graph and runs without: {reason}", file=sys.stderr)
            return False
        return True

    # environments on the host that run ahead

    def _step_ahead(self, learn: Callable[[], object] | None) -> None:
        """Receive a group, act and send, one after another; the last one stores the step; then learn."""
        for part, rows in enumerate(self._actors.rows):
            if self._under_way:
                self._arrived[part] = self._actors.fetch(part)
                self._watch.lap("env")
                self._answer(part)
            else:
                self._choose(part, self.obs[rows])
            self._watch.lap("act")
            self._actors.send_to(part, self._chosen[rows])
            self._watch.lap("env")
        if not self._under_way:
            self._sent.copy_(self._chosen)
            self._under_way = True
        if learn is not None:
            learn()

    def _answer(self, part: int) -> None:
        """From the arrival of a group to its next actions; on CUDA one graph, unless it cannot be captured."""
        if self.answers and not self._called(self.answers[part], "acting and adding"):
            # graphs of other groups would be captured with memory that eager calls leave behind
            self.answers = []
        if not self.answers:
            self._take_in(part)

    def _take_in(self, part: int) -> None:
        """What `_answer` does; after the last group the step before it is complete, and stored."""
        obs = self._actors.push(part, self._arrived[part])
        self._watch.lap("env")
        self._choose(part, obs)
        self._watch.lap("act")
        if part == len(self._actors.parts) - 1:
            step = self._seen()
            self._watch.lap("env")
            self._keep(step)
            self._sent.copy_(self._chosen)
            self._watch.lap("replay")

    def _choose(self, part: int, obs: Tensor) -> None:
        parts = self._actors.rows
        self._chosen[parts[part]].copy_(self._agent.act(obs, part, len(parts)))

    def _seen(self, *, push: bool = False) -> Step:
        """The step that all groups have arrived at, counted in the statistics, or stacked as well."""
        if push:
            for part, step in self._arrived.items():
                self._actors.push(part, step)
        whole = joined(list(self._arrived.values()))
        self._statistics.push(whole.reward, whole.terminated | whole.truncated)
        return whole

    def _keep(self, step: Step) -> None:
        """Store the step of all groups; its frames are those before the next one."""
        self._store(self._sent, step, step.final_obs)
        self.frame.copy_(step.obs)

    def _step_from(self, batch: Batch) -> None:
        """A step of all environments with its updates, whose first draw was made."""
        self._watch.lap("replay")
        self._step(lambda: self._use_draws(batch, self._learn_from))

    def _use_draws(self, first: Batch, use: Callable[[Batch], None]) -> None:
        """Use the first draw, and make and use the others of a step."""
        use(first)
        for _ in range(self._draws - 1):
            use(self._buffer.sample(self.draw_size))

    def _draw_and_learn(self) -> None:
        """One draw and the updates that share it; on CUDA one graph, unless it cannot be captured."""
        if self.learning_step is not None and not self._called(self.learning_step, "the learning step"):
            self.learning_step = None
        if self.learning_step is None:
            self._learn_from(self._buffer.sample(self.draw_size))

    def _learn_from(self, batch: Batch) -> None:
        """The updates that share a draw.

        Priorities are updated here, in the order of the updates, and not returned to `capture` in the order of rows:
        the latest TD error of a key that was drawn twice is the one that counts.
        """
        self._watch.lap("replay")
        together = self._together
        # adjacent rows come from adjacent strata of the distribution, so each batch takes rows at a stride
        parts = [Batch({name: rows[part::together] for name, rows in batch.items()}) for part in range(together)]
        td_errors = self._agent.updates_with(parts)
        self._watch.lap("learn")
        if self._prioritized:
            self._buffer.update_priorities(torch.cat([part.key for part in parts]), torch.cat(td_errors))
            self._watch.lap("replay")

    def _update_only(self, batch: Batch) -> None:
        """Replaces `_learn_from` to time the buffer's part of an update alone: new priorities without learning."""
        if self._prioritized:
            self._buffer.update_priorities(batch.key, batch.weight)

    def _receive(self) -> DeviceStep:
        arrival = self._actors.recv()
        self._statistics.push(arrival.reward, arrival.terminated | arrival.truncated)
        return arrival

    def _store(self, actions: Tensor, arrival: DeviceStep | Step, final: Tensor | None) -> None:
        """Add a step, whose frame is the one before it."""
        self._buffer.add(
            obs=self.frame,
            action=actions,
            reward=arrival.reward.sign() if self._settings.clip_reward else arrival.reward,
            terminated=arrival.terminated,
            truncated=arrival.truncated,
            final_obs=final,
        )

    def _answer_again(self) -> None:
        for answer in self.answers:
            answer()

    def _parts_of_answers(self) -> dict[Part, Callable[[], object]]:
        """The parts of all answers of a step but acting, each as a graph of its own."""
        step = joined(list(self._arrived.values()))
        return {
            "env": CudaGraphCall(lambda: self._seen(push=True).reward, self._device),
            "replay": self._buffer.capture(None, lambda: self._keep(step)),
        }

    def _parts(self) -> dict[Part, Callable[[], object]]:
        """The parts of a whole step but learning, each as a graph of its own."""
        actions = self._agent.act(self.obs)
        self._actors.send(actions)
        arrival = self._receive()

        def play() -> None:
            self._actors.send(actions)
            self._receive()

        def replay(batch: Batch) -> None:
            self._use_draws(batch, self._update_only)
            self._store(actions, arrival, arrival.final_frame)

        return {
            "act": CudaGraphCall(lambda: self._agent.act(self.obs), self._device, generators=self._generators),
            "env": CudaGraphCall(play, self._device, generators=self._generators),
            "replay": self._buffer.capture(self.draw_size, replay),
        }


def divided(
    shares: Mapping[Part, float],
    whole: Callable[[], object],
    parts: Mapping[Part, Callable[[], object]],
    device: torch.device,
    timed_as: Part = "learn",
) -> dict[Part, float]:
    """The shares when that of a captured call, which was `timed_as` one part, is divided among all of its parts.

    Timers cannot look into a graph. So each other part is captured alone, all are replayed many times, and the ratios
    of their times to that of the whole are moved to them.
    """
    found = dict(shares)
    if not found[timed_as]:
        # no step was timed
        return found
    timed = mean_seconds(whole, device)
    for part, call in parts.items():
        moved = min(found[timed_as], shares[timed_as] * mean_seconds(call, device) / timed)
        found[timed_as] -= moved
        found[part] += moved
    return found


def runs_ahead(actors: Actors, device: torch.device) -> bool:
    """Whether environments are under way from one step to the next: on the host, and a device or groups gain by it."""
    return not actors.environment.on_device and (device.type == "cuda" or len(actors.parts) > 1)
