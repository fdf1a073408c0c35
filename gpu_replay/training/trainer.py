"""The learning loop: act, learn while the environments run, store, and now and then look at how it goes.

The order within a step is send, learn, receive: emulators with threads of their own work while the network learns.
The program reads from the device once a step for the actions of environments in host memory, and otherwise only
where it logs.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from gpu_replay import Combined, Field, LinearSchedule, Proportional, ReplayBuffer, Uniform
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import Environment, EnvironmentSpec, Step
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.evaluation import Evaluation, Examiner
from gpu_replay.training.interrupt import Stopped, StopRequest
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.nstep import NStepAssembler
from gpu_replay.training.seeds import stream_seed
from gpu_replay.training.settings import Settings
from gpu_replay.training.stopwatch import Stopwatch


class Listener(Protocol):
    """Who is told how a run goes."""

    def advance(self, step: int) -> None:
        """After every step of the environments; `step` counts those of all environments together."""

    def row(self, row: dict[str, float]) -> None:
        """A row of progress.csv."""

    def evaluated(self, step: int, evaluation: Evaluation, best: QNetwork | None) -> None:
        """The greedy policy was evaluated; `best` is its network if it is the best so far."""


def make_buffer(spec: EnvironmentSpec, settings: Settings, device: torch.device, seed: int) -> ReplayBuffer:
    """The replay buffer of a run, with the sampler that the settings ask for."""
    fields = {
        "obs": spec.observation,
        "action": Field((), torch.int64),
        "reward": Field((), torch.float32),
        "next_obs": spec.observation,
        "discount": Field((), torch.float32),
    }
    prioritized = Proportional(alpha=settings.alpha, beta=_beta(settings))
    sampler: Uniform | Proportional | Combined = prioritized
    if settings.sampler == "uniform":
        sampler = Uniform()
    elif settings.sampler == "combined":
        sampler = Combined(prioritized, newest=settings.newest)
    return ReplayBuffer(settings.capacity, fields, sampler=sampler, device=device, seed=seed)


class Trainer:
    """One run of the agent; `examiner` plays in environments of its own.

    Raises MemoryError when the replay buffer does not fit, UserError when the network does not suit the environment.
    """

    def __init__(
        self,
        environment: Environment,
        examiner: Examiner,
        settings: Settings,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        spec = environment.spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "network"))
            network = QNetwork(spec.observation, spec.num_actions, settings, spec.bounds)
        self.settings = settings
        self.device = device
        self.environment = environment
        self.examiner = examiner
        self.agent = Agent(network, settings, device, stream_seed(seed, "actions"))
        self.buffer = make_buffer(spec, settings, device, stream_seed(seed, "replay"))
        self.watch = Stopwatch(device)
        self.step = 0
        self._assembler = NStepAssembler(settings.n_step, settings.gamma)
        self._beta = _beta(settings)
        self._prioritized = settings.sampler != "uniform"
        self._obs = environment.reset(stream_seed(seed, "training"))
        self._statistics = EpisodeStatistics(environment.num_envs, settings.return_window, self._obs.device)
        self._obs = self._obs.to(device)
        self._began = time.perf_counter()
        self.last_row: dict[str, float] = {}
        self._added = 0
        self._evaluated = self._logged = 0
        self._last_mark = (0, 0, 0.0)

    @property
    def seconds(self) -> float:
        """Seconds since the run began, evaluations included."""
        return time.perf_counter() - self._began

    @property
    def loop_seconds(self) -> float:
        """Seconds of the learning loop, evaluations excluded, when the last row was written."""
        return self._last_mark[2]

    def run(self, listener: Listener, stop: StopRequest, max_seconds: float | None = None) -> str:
        """Learn until the steps or seconds are used up, the environment is solved, or `stop` is asked to stop.

        Returns why it ended: "steps", "max_seconds", "solved", or the name of the signal.
        """
        self._began = time.perf_counter()
        try:
            reason = self._loop(listener, stop, max_seconds)
            if self._evaluated != self.step:
                self._evaluate(listener)
        except Stopped as stopped:
            reason = stopped.reason
        if self._logged != self.step or not self.last_row:
            self._log(listener)
        return reason

    def _loop(self, listener: Listener, stop: StopRequest, max_seconds: float | None) -> str:
        settings = self.settings
        next_row, next_evaluation = settings.log_every, settings.eval_every
        while (reason := self._used_up(max_seconds)) is None:
            stop.check()
            self._advance()
            listener.advance(self.step)
            if self.step >= next_evaluation and self.agent.updates:
                next_evaluation += settings.eval_every
                if self._evaluate(listener) and settings.early_stop:
                    return "solved"
            if self.step >= next_row:
                next_row += settings.log_every
                self._log(listener)
        return reason

    def _used_up(self, max_seconds: float | None) -> str | None:
        if self.step >= self.settings.steps:
            return "steps"
        if max_seconds is not None and self.seconds >= max_seconds:
            return "max_seconds"
        return None

    def _advance(self) -> None:
        """One step of all environments, and the updates that go with it."""
        watch = self.watch
        watch.begin()
        actions = self.agent.act(self._obs, self.settings.epsilon(self.step))
        watch.lap("act")
        self.environment.send(actions)
        watch.lap("env")
        # asking the buffer for its length would wait for the device
        if self._added >= self.settings.warmup:
            self._learn()
        outcome = self.environment.recv()
        self._statistics.push(outcome.reward, outcome.terminated | outcome.truncated)
        self._obs, step = self._on_device(actions, outcome)
        watch.lap("env")
        transitions = self._assembler.push(**step)
        if transitions is not None:
            self.buffer.add(**transitions)
            self._added += self.environment.num_envs
        watch.lap("replay")
        self.step += self.environment.num_envs

    def _on_device(self, actions: Tensor, outcome: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """What to act upon next, and the finished step for the assembler; observations cross to the device once."""
        obs = outcome.obs.to(self.device, non_blocking=True)
        same = outcome.next_obs is outcome.obs
        reward = outcome.reward.to(self.device, non_blocking=True)
        return obs, {
            "obs": self._obs,
            "action": actions,
            "reward": reward.sign() if self.settings.clip_reward else reward,
            "next_obs": obs if same else outcome.next_obs.to(self.device, non_blocking=True),
            "terminated": outcome.terminated.to(self.device, non_blocking=True),
            "truncated": outcome.truncated.to(self.device, non_blocking=True),
        }

    def _learn(self) -> None:
        self.agent.set_learning_rate(self.settings.learning_rate_at(self.step))
        for _ in range(self.settings.updates):
            batch = self.buffer.sample(self.settings.batch_size)
            self.watch.lap("replay")
            td_error = self.agent.learn(batch)
            self.watch.lap("learn")
            if self._prioritized:
                self.buffer.update_priorities(batch.key, td_error)
                self.watch.lap("replay")

    def _evaluate(self, listener: Listener) -> bool:
        self._evaluated = self.step
        evaluation, solved = self.examiner.examine(self.agent.online, self.step)
        best = self.examiner.best
        is_best = best is not None and best.step == self.step
        listener.evaluated(self.step, evaluation, best.network if best is not None and is_best else None)
        return solved

    def _log(self, listener: Listener) -> None:
        episodes, return_mean, length_mean = self._statistics.read()
        loss, td_error, value = self.agent.means()
        updates, seconds = self.agent.updates, self.seconds
        last_step, last_updates, last_seconds = self._last_mark
        # evaluations are not learning time
        loop_seconds = seconds - self.examiner.seconds
        elapsed = max(loop_seconds - last_seconds, 1e-9)
        self._last_mark = (self.step, updates, loop_seconds)
        self._logged = self.step
        self.last_row = {
            "step": self.step,
            "seconds": seconds,
            "episodes": episodes,
            "return_mean": return_mean,
            "length_mean": length_mean,
            "loss": loss,
            "td_error": td_error,
            "beta": self._beta(updates) if self._prioritized else float("nan"),
            "epsilon": self.settings.epsilon(self.step),
            "updates_per_second": (updates - last_updates) / elapsed,
            "steps_per_second": (self.step - last_step) / elapsed,
            "value_mean": value,
            "learning_rate": self.settings.learning_rate_at(self.step),
            "updates": updates,
            "stored": min(self._added, self.settings.capacity),
        }
        listener.row(self.last_row)


def _beta(settings: Settings) -> LinearSchedule:
    """Beta over the updates of a run; the buffer counts the same way, one step for each sample."""
    return LinearSchedule(settings.beta_start, settings.beta_end, steps=settings.planned_updates)
