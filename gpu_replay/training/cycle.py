"""What a run repeats: act, step, learn and store, in calls of their own or, on CUDA, as graphs.

An update is one graph wherever environments are; where they are on the device as well, a whole step with its updates
is, and the host only counts and sets what changes with the counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gpu_replay import Batch, TrajectoryReplayBuffer
from gpu_replay.graphs.cuda_graph import CaptureError, CudaGraphCall
from gpu_replay.graphs.learning_step import LearningStep
from gpu_replay.training.actors import Actors, DeviceStep
from gpu_replay.training.dqn import Agent
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.settings import Settings
from gpu_replay.training.stopwatch import Part, Stopwatch, mean_seconds


class Cycle:
    """One step of all environments after another, and the updates of each.

    The caller sets epsilon and learning rate, which replays follow, and calls `begin` first. Captured steps go on with
    the memory of what they work on, so nothing may be restored once there are any.
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
        if settings.graph:
            self.learning_step = buffer.capture(self.draw_size, self._learn_from)
        if settings.graph and self._on_device and settings.updates:
            self.whole_step = buffer.capture(self.draw_size, self._step_from, generators=self._generators)

    def begin(self, frame: Tensor, obs: Tensor) -> None:
        """Environments were reset or restored: their newest frames, and the observations to act on."""
        self.frame, self.obs = frame, obs

    def step(self, learn: Callable[[], object] | None = None) -> None:
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
        self._store(actions, arrival)
        if self._on_device:
            for mine, new in ((self.frame, arrival.frame), (self.obs, arrival.obs)):
                if mine is not new:
                    mine.copy_(new)
        else:
            self.frame, self.obs = arrival.frame, arrival.obs
        watch.lap("replay")

    def make_updates(self) -> None:
        """The updates of one step of all environments."""
        for _ in range(self._draws):
            self._draw_and_learn()
            for _ in range(self._together):
                self._agent.after_update()
        self._watch.lap("learn")

    def step_at_once(self) -> bool:
        """`step` with `make_updates` in one call, on CUDA one graph; returns whether that could be.

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
            return divided(shares, self.learning_step, {"replay": alone}, self._device)
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

    # the parts of a step, all of which can be captured

    def _step_from(self, batch: Batch) -> None:
        """A step of all environments with its updates, whose first draw was made."""
        self._watch.lap("replay")
        self.step(lambda: self._use_draws(batch, self._learn_from))

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
        self._statistics.push(arrival.step.reward, arrival.step.terminated | arrival.step.truncated)
        return arrival

    def _store(self, actions: Tensor, arrival: DeviceStep) -> None:
        """Add a step, whose frame is the one before it."""
        self._buffer.add(
            obs=self.frame,
            action=actions,
            reward=arrival.reward.sign() if self._settings.clip_reward else arrival.reward,
            terminated=arrival.terminated,
            truncated=arrival.truncated,
            final_obs=arrival.final_frame,
        )

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
            self._store(actions, arrival)

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
) -> dict[Part, float]:
    """The shares when that of a captured call, which was timed as "learn", is divided among its parts.

    Timers cannot look into a graph. So each part is captured alone, all are replayed many times, and the ratios of
    their times to that of the whole are moved from "learn" to the parts.
    """
    found = dict(shares)
    if not found["learn"]:
        # no step was timed
        return found
    timed = mean_seconds(whole, device)
    for part, call in parts.items():
        moved = min(found["learn"], shares["learn"] * mean_seconds(call, device) / timed)
        found["learn"] -= moved
        found[part] += moved
    return found
