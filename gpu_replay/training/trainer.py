"""The learning loop: act, learn while the environments run, store; evaluate and log at intervals.

The order within a step is send, learn, receive: emulators with their own threads run while the network learns. The
host reads from the device once a step and group, for the actions of environments in host memory, and otherwise only to
log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.console.versions import cpu_cores
from gpu_replay.training.actors import Actors
from gpu_replay.training.checkpoints import CheckpointManager
from gpu_replay.training.cycle import Cycle
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import Environment
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.helper_thread import HelperThread
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.replay import beta_of, make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.stopwatch import Part, Stopwatch
from gpu_replay.training.team import Team

# batches to which the whitening of images is fitted
WHITENING_BATCHES = 16
# statistics of the replay buffer in each row
REPLAY_STATS = (
    *("effective_sample_size", "entropy", "mean_priority", "max_priority", "mean_age", "max_age"),
    *("mean_times_sampled", "stale_updates", "rejected_priorities", "saturated_priorities"),
)


class Listener:
    """Receives the progress events of a run; this one ignores them."""

    def advance(self, step: int) -> None:
        """After every step of the environments; `step` counts those of all environments together."""

    def row(self, row: dict[str, float]) -> None:
        """A row of progress.csv."""

    def evaluated(self, step: int, evaluation: Evaluation, best: QNetwork | None) -> None:
        """The greedy policy was evaluated; `best` is its network if it is the best so far."""


class Trainer:
    """One run of the agent; `evaluator` plays in environments of its own.

    buffer: of a resumed run; without it an empty one is made.
    team:   the ranks that share the run, of whose settings these are a share; None for a run of one process.

    `step` counts those of all environments together, of all ranks, `resumed` how often the run was resumed.

    Raises MemoryError if the replay buffer does not fit, UserError if the network does not fit the environment.
    """

    def __init__(
        self,
        environment: Environment,
        evaluator: Evaluator,
        settings: Settings,
        *,
        device: torch.device,
        seed: int,
        buffer: TrajectoryReplayBuffer | None = None,
        team: Team | None = None,
    ) -> None:
        spec = environment.spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "network"))
            network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
        self.settings = settings
        self.device = device
        self.environment = environment
        self.evaluator = evaluator
        # vectors take too little time to share
        helps = device.type == "cpu" and settings.convolutional and settings.helper and cpu_cores() > 1
        helper = HelperThread() if helps else None
        self._team = team
        planned = settings.planned_updates
        average = None
        if team is not None:
            # all ranks have one network; whatever else is random is their own
            seed, planned, average = team.seed(seed), team.settings.planned_updates, team.average
        self.agent = Agent(network, settings, device, stream_seed(seed, "actions"), helper=helper, average=average)
        # an empty buffer counts as false
        if buffer is None:
            buffer = make_buffer(spec, settings, device, stream_seed(seed, "replay"), environment.num_envs, planned)
        self.buffer = buffer
        self.watch = Stopwatch(device)
        self.step = 0
        self._seed = seed
        self._actors = Actors(environment, device)
        frames = self._actors.reset(stream_seed(seed, "training"))
        self._statistics = EpisodeStatistics(environment.num_envs, settings.return_window, device)
        self._cycle = Cycle(self.agent, self._actors, buffer, self._statistics, settings, self.watch)
        self._cycle.begin(*frames)
        self.last_row: dict[str, float] = {}
        # steps added to the buffer in its lifetime, and those of them whose windows a reset cut off
        self._added = self._lost = 0
        self._evaluated = self._logged = 0
        self._next_evaluation, self._next_row = settings.eval_every, settings.log_every
        self._solved = False
        self._last_mark = (0, 0, 0.0)
        self.resumed = 0
        self._checkpoints: CheckpointManager | None = None
        self._earlier_checkpoints = 0.0
        # seconds of earlier parts of the run, and the start of this one
        self._before = 0.0
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the run began, evaluations and earlier parts included."""
        return self._before + time.perf_counter() - self._began

    @property
    def loop_seconds(self) -> float:
        """Seconds of the learning loop, evaluations and checkpoints excluded, when the last row was written."""
        return self._last_mark[2]

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs except the content of the replay buffer; the tensors are not copies."""
        self._cycle.settle()
        return {
            "step": self.step,
            "seconds": self.seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
            "added": self._added,
            "lost": self._lost,
            "samples": self._samples,
            "evaluated": self._evaluated,
            "logged": self._logged,
            "next_evaluation": self._next_evaluation,
            "next_row": self._next_row,
            "solved": self._solved,
            "last_mark": list(self._last_mark),
            "last_row": {name: torch.tensor(value, dtype=torch.float64) for name, value in self.last_row.items()},
            "resumed": self.resumed,
            "agent": self.agent.state(),
            "statistics": self._statistics.state(),
            "watch": self.watch.state(),
            "actors": self._actors.state(),
        }

    def restore(self, state: Mapping[str, Any], *, filled: bool) -> None:
        """Continue from the state of another trainer.

        filled: whether this trainer was made with that one's replay buffer. Otherwise the warm-up of the buffer is
                repeated, with the agent as it is.

        Environments that have a state continue in mid-episode. Others start new episodes, on seeds that the run has not
        used, and the last steps of the unfinished episodes are not learned from.
        """
        self.step, self._before = state["step"], state["seconds"]
        self._earlier_checkpoints = state["checkpoint_seconds"]
        self._evaluated, self._logged = state["evaluated"], state["logged"]
        self._next_evaluation, self._next_row = state["next_evaluation"], state["next_row"]
        self._solved = state["solved"]
        step, updates, seconds = state["last_mark"]
        self._last_mark = (step, updates, seconds)
        self.last_row = {name: float(value) for name, value in state["last_row"].items()}
        self.resumed = state["resumed"] + 1
        self.agent.restore(state["agent"])
        self._statistics.restore(state["statistics"])
        self.watch.restore(state["watch"])
        if filled:
            self._added, self._lost = state["added"], state["lost"]
        else:
            # the schedule of beta continues
            empty = self.buffer.state_dict()
            empty["counters"]["STEP"] = state["samples"]
            self.buffer.load_state_dict(empty)
        if state["actors"] is not None:
            self._cycle.begin(*self._actors.restore(state["actors"]))
        else:
            self._cycle.begin(*self._actors.reset(stream_seed(self._seed, "training", self.resumed)))
            self._statistics.abandon()
            self.buffer.begin_episodes()
            # windows that were open are never completed
            self._lost += self._open_windows

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds spent on checkpoints, earlier parts included."""
        return self._earlier_checkpoints + (0.0 if self._checkpoints is None else self._checkpoints.seconds)

    def run(
        self,
        listener: Listener,
        stop: StopRequest,
        max_seconds: float | None = None,
        checkpoints: CheckpointManager | None = None,
    ) -> str:
        """Learn until the steps or seconds are used up, the environment is solved, or a signal arrives.

        checkpoints: saved when due and at the end of the loop, before the closing evaluation and row: a resumed run
                     continues as if it had never stopped.

        Returns why it ended: "steps", "max_seconds", "solved", or the name of the signal.
        """
        self._began = time.perf_counter()
        self._checkpoints = checkpoints
        reason = self._loop(listener, stop, max_seconds)
        if checkpoints is not None:
            checkpoints.save()
        try:
            stop.check()
            if self._evaluated != self.step:
                self._evaluate(listener)
        except Stopped as stopped:
            reason = stopped.reason
        if self._logged != self.step or not self.last_row:
            self._log(listener)
        return reason

    def _loop(self, listener: Listener, stop: StopRequest, max_seconds: float | None) -> str:
        while True:
            try:
                reason = self._between_steps(listener, stop, max_seconds)
            except Stopped as stopped:
                reason = stopped.reason
            if self._team is not None:
                reason = self._team.agree(reason)
            if reason:
                return reason
            self._advance()
            listener.advance(self.step)

    def _between_steps(self, listener: Listener, stop: StopRequest, max_seconds: float | None) -> str:
        """What is due before the next step; returns why the run ends, or nothing."""
        # an evaluation or row that an interruption skipped comes first
        if self.step >= self._next_evaluation and self.agent.updates:
            if self._deserves_evaluation():
                self._evaluate(listener)
            self._next_evaluation += self.settings.eval_every
        if self.step >= self._next_row:
            self._next_row += self.settings.log_every
            self._log(listener)
        if self._solved and self.settings.early_stop:
            return "solved"
        if self.step >= self.settings.steps:
            return "steps"
        if max_seconds is not None and self.seconds >= max_seconds:
            return "max_seconds"
        if self._checkpoints is not None and self._checkpoints.due():
            self._checkpoints.save()
        stop.check()
        return ""

    def _advance(self) -> None:
        """One step of all environments, with its updates."""
        settings = self.settings
        self.watch.begin()
        self.agent.explorer.set_epsilon(settings.epsilon(self.step))
        # the warm-up is counted on the host: asking the buffer would wait for the device
        if self._added - self._open_windows - self._lost < settings.warmup:
            self._cycle.advance()
        else:
            self.agent.set_learning_rate(settings.learning_rate_at(self.step))
            if not self._cycle.step_at_once():
                self._cycle.advance(self._learn)
        self._added += self.environment.num_envs
        self.step += self.environment.num_envs * (1 if self._team is None else self._team.size)

    @property
    def _open_windows(self) -> int:
        """Steps whose n-step windows are not complete yet."""
        return self.settings.n_step * self.environment.num_envs

    def _fit_whitening(self) -> None:
        """Fit the whitening to the warm-up, before the first update."""
        if self.settings.whiten:
            batches = [self.buffer.sample(self.settings.batch_size).obs for _ in range(WHITENING_BATCHES)]
            obs = torch.cat(batches)
            self.agent.whiten(obs if self._team is None else self._team.of_first(obs))

    @property
    def _samples(self) -> int:
        """Calls of the buffer's `sample` so far."""
        whitening = WHITENING_BATCHES if self.settings.whiten and self.agent.updates else 0
        return self.agent.updates // self.settings.updates_a_sample + whitening

    def _learn(self) -> None:
        """The updates of one step of all environments."""
        if self.agent.updates == 0 and self.settings.updates:
            self._fit_whitening()
        self._cycle.make_updates()

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time of the learning loop, see `Cycle.shares`; the last call on a trainer."""
        return self._cycle.shares()

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates and writes; in a run of one process it does."""
        return self._team is None or self._team.rank == 0

    def _deserves_evaluation(self) -> bool:
        """Whether the mean return of training has come to `eval_from`; this waits for the device."""
        least = self.settings.eval_from
        self._cycle.settle()
        return least is None or self._statistics.read()[1] >= least

    def _evaluate(self, listener: Listener) -> None:
        if not self.leads:
            self._evaluated = self.step
            return
        evaluation, self._solved = self.evaluator.evaluate(self.agent.judged, self.step)
        self._evaluated = self.step
        best = self.evaluator.best
        improved = best is not None and best.step == self.step
        listener.evaluated(self.step, evaluation, best.network if best is not None and improved else None)

    def _log(self, listener: Listener) -> None:
        self._cycle.settle()
        episodes, return_mean, length_mean = self._statistics.read()
        loss, td_error, value = self.agent.means()
        updates, seconds = self.agent.updates, self.seconds
        last_step, last_updates, last_seconds = self._last_mark
        # evaluations and checkpoints are not learning time
        loop_seconds = seconds - self.evaluator.seconds - self.checkpoint_seconds
        elapsed = max(loop_seconds - last_seconds, 1e-9)
        self._last_mark = (self.step, updates, loop_seconds)
        self._logged = self.step
        # this waits for the device, as reading the means of losses has
        stats = self.buffer.stats()
        self.last_row = {
            "step": self.step,
            "seconds": seconds,
            "episodes": episodes,
            "return_mean": return_mean,
            "length_mean": length_mean,
            "loss": loss,
            "td_error": td_error,
            "beta": beta_of(self.buffer, updates // self.settings.updates_a_sample),
            "epsilon": self.settings.epsilon(self.step),
            "updates_per_second": (updates - last_updates) / elapsed,
            "steps_per_second": (self.step - last_step) / elapsed,
            "value_mean": value,
            "learning_rate": self.settings.learning_rate_at(self.step),
            "updates": updates,
            "stored": min(self._added, self.buffer.capacity),
            **{name: getattr(stats, name) for name in REPLAY_STATS},
            **self._actor_figures(),
        }
        listener.row(self.last_row)

    def _actor_figures(self) -> dict[str, float]:
        """More for a row, of actors in processes of their own."""
        return {}
