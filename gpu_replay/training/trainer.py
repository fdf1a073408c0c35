"""The learning loop: act, learn while the environments run, store; evaluate and log at intervals.

The order within a step is send, learn, receive: emulators with their own threads run while the network learns. The
host reads from the device once a step, for the actions of environments in host memory, and otherwise only to log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_replay import Batch, TrajectoryReplayBuffer
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.console.versions import cpu_cores
from gpu_replay.graphs.cuda_graph import CaptureError
from gpu_replay.training.actors import Actors
from gpu_replay.training.checkpoints import CheckpointManager
from gpu_replay.training.dqn import Agent
from gpu_replay.training.environments import Environment
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.helper_thread import HelperThread
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.replay import beta_of, make_buffer
from gpu_replay.training.settings import Settings
from gpu_replay.training.stopwatch import Part, Stopwatch, mean_seconds
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
        self._prioritized = settings.sampler != "uniform"
        self._actors = Actors(environment, device)
        self._frame, self._obs = self._actors.reset(stream_seed(seed, "training"))
        self._statistics = EpisodeStatistics(environment.num_envs, settings.return_window, self._actors.home)
        self._draw_size = settings.batch_size * settings.updates_a_sample
        self._learning_step = self.buffer.capture(self._draw_size, self._learn_from) if settings.graph else None
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
            self._frame, self._obs = self._actors.restore(state["actors"])
        else:
            self._frame, self._obs = self._actors.reset(stream_seed(self._seed, "training", self.resumed))
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
        watch = self.watch
        watch.begin()
        actions = self.agent.act(self._obs, self.settings.epsilon(self.step))
        watch.lap("act")
        self._actors.send(actions)
        watch.lap("env")
        # the warm-up is counted on the host: asking the buffer would wait for the device
        if self._added - self._open_windows - self._lost >= self.settings.warmup:
            self._learn()
        arrival = self._actors.recv()
        self._statistics.push(arrival.step.reward, arrival.step.terminated | arrival.step.truncated)
        watch.lap("env")
        self.buffer.add(
            obs=self._frame,
            action=actions,
            reward=arrival.reward.sign() if self.settings.clip_reward else arrival.reward,
            terminated=arrival.terminated,
            truncated=arrival.truncated,
            final_obs=arrival.final_frame,
        )
        watch.lap("replay")
        self._frame, self._obs = arrival.frame, arrival.obs
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
        self.agent.set_learning_rate(self.settings.learning_rate_at(self.step))
        together = self.settings.updates_a_sample
        for _ in range(self.settings.updates // together):
            self._update()
            for _ in range(together):
                self.agent.after_update()
        self.watch.lap("learn")

    def _update(self) -> None:
        """One draw and the updates that share it; on CUDA one graph, unless it cannot be captured."""
        if self._learning_step is not None:
            if not self._learning_step.captured:
                self.watch.skip()
            try:
                self._learning_step()
                return
            except CaptureError as error:
                self._learning_step = None
                reason = str(error.__cause__ or error).splitlines()[0]
                print(
                    f"the learning step cannot be captured as a CUDA graph and runs without: {reason}", file=sys.stderr
                )
        self._learn_from(self.buffer.sample(self._draw_size))

    def _learn_from(self, batch: Batch) -> None:
        """The updates that share a draw, all of it on the device.

        Priorities are updated here, in the order of the updates, and not returned to `capture` in the order of rows:
        the latest TD error of a key that was drawn twice is the one that counts.
        """
        self.watch.lap("replay")
        together = self.settings.updates_a_sample
        # adjacent rows come from adjacent strata of the distribution, so each batch takes rows at a stride
        parts = [Batch({name: rows[part::together] for name, rows in batch.items()}) for part in range(together)]
        td_errors = self.agent.updates_with(parts)
        self.watch.lap("learn")
        if self._prioritized:
            self.buffer.update_priorities(torch.cat([part.key for part in parts]), torch.cat(td_errors))
            self.watch.lap("replay")

    def _update_priorities_only(self, batch: Batch) -> Tensor | None:
        """Replaces `_learn_from` to time the buffer's part of an update alone: new priorities without learning."""
        return batch.weight if self._prioritized else None

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time of the learning loop; "replay" is add, sample and update_priorities together.

        A captured update cannot be split by timers. Instead the buffer's part is captured alone, both are replayed many
        times, and the ratio of their times is moved from "learn" to "replay". That continues to learn, so this must be
        the last call on a trainer.
        """
        shares = self.watch.shares()
        if self._learning_step is not None and self._learning_step.captured:
            whole = mean_seconds(self._learning_step, self.device)
            alone = mean_seconds(self.buffer.capture(self._draw_size, self._update_priorities_only), self.device)
            moved = shares["learn"] * min(1.0, alone / whole)
            shares["learn"] -= moved
            shares["replay"] += moved
        return shares

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates and writes; in a run of one process it does."""
        return self._team is None or self._team.rank == 0

    def _deserves_evaluation(self) -> bool:
        """Whether the mean return of training has come to `eval_from`; this waits for the device."""
        least = self.settings.eval_from
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
