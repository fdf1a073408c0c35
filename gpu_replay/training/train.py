"""The learning loop, from top to bottom: act, learn while the environments run, store; evaluate, log and save when due.

On CUDA the updates of a step are captured as one graph. If the environments run on the device as well, the graph holds
a whole step with its updates, and the host only counts and sets the values that depend on counts. If they run on the
host, a second graph covers the work between the arrival of a step and the next actions: statistics, the add, the
stacks and the network.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gpu_replay import Batch, LinearSchedule, ShardedReplay, TrajectoryReplayBuffer
from gpu_replay.console.clock import working_seconds
from gpu_replay.console.interrupt import Stopped, StopRequest
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training.actors import Fleet
from gpu_replay.training.agent import Agent
from gpu_replay.training.checkpoints import CheckpointManager
from gpu_replay.training.environments import Actors, Environment, EpisodeStatistics, Graphs, Step, replayed
from gpu_replay.training.evaluation import Evaluation, Evaluator
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.records import REPLAY_STATS, Recorder
from gpu_replay.training.settings import Settings
from gpu_replay.training.team import SAVE, Team

# number of batches on which the whitening of images is fitted
WHITENING_BATCHES = 16
NAN = float("nan")
# on a GPU one step in this many is timed: it runs without graphs, and waits for the device after each part
SAMPLED = 1_024
Part = Literal["env", "act", "replay", "learn"]


class Stopwatch:
    """Attributes the time since the last lap to a part of the loop; it stands still while Numba compiles.

    On the CPU every step is timed. On CUDA one step in 1,024 is: it runs without graphs and synchronises at each lap,
    so that work is attributed to the part that launched it. Such a step loses the overlap between parts.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Part, float] = {"env": 0.0, "act": 0.0, "replay": 0.0, "learn": 0.0}
        self._cuda = device if device.type == "cuda" else None
        self._steps = 0
        self._timing = False

    @property
    def looks_inside(self) -> bool:
        """Whether this is a timed step on a GPU, in which no graph may hide the parts."""
        return self._timing and self._cuda is not None

    def begin(self) -> None:
        """Start a step of the loop."""
        self._steps += 1
        self._timing = self._cuda is None or self._steps % SAMPLED == 0
        if self._timing:
            self._last = self._now()

    def lap(self, part: Part) -> None:
        """Attribute the time since the last lap, or the start of the step, to `part`."""
        if self._timing:
            now = self._now()
            self.seconds[part] += now - self._last
            self._last = now

    def shares(self) -> dict[Part, float]:
        """Share of each part in the time so far."""
        total = sum(self.seconds.values())
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return working_seconds()


@dataclass
class Progress:
    """How far a run is.

    step:    environment steps so far, of all environments and ranks together.
    added:   steps that this process added to the buffer; `lost` counts those whose n-step windows a reset cut off.
    owed:    steps of actors that are stored but whose updates have not been made yet.
    evaluated, logged: the last step at which that was done; `next_evaluation`, `next_row`: the step when it is due.
    seconds: duration of the run so far with evaluations and checkpoints; `checkpoint_seconds`: that of checkpoints.
    mark:    step, updates and seconds of the learning loop at the last row.
    evaluation: the evaluation to report in the next row, if any.
    """

    next_evaluation: int
    next_row: int
    step: int = 0
    added: int = 0
    lost: int = 0
    owed: int = 0
    evaluated: int = 0
    logged: int = 0
    solved: bool = False
    resumed: int = 0
    seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    mark: tuple[int, int, float] = (0, 0, 0.0)
    evaluation: dict[str, Any] | None = None


class Trainer:
    """One run of the agent; `evaluator` plays in environments of its own.

    buffer: the run's replay buffer, empty or filled by an earlier part of the run.
    team:   the ranks that share the run, with its settings; `settings` are this rank's share of them.
    fleet:  the Ray actors that step the environments; `environment` then only describes theirs.

    Raises UserError if the network does not fit the environment.
    """

    def __init__(
        self,
        environment: Environment,
        evaluator: Evaluator,
        buffer: TrajectoryReplayBuffer,
        team: Team,
        *,
        seed: int,
        fleet: Fleet | None = None,
    ) -> None:
        settings, spec, count, device = team.share(), environment.spec, environment.num_envs, buffer.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "network"))
            network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
        # all ranks start with the same network; all other randomness is their own
        seed = team.seed(seed)
        self.settings, self.device, self.environment, self.evaluator = settings, device, environment, evaluator
        self.buffer, self.fleet = buffer, fleet
        # of several ranks with weights over the steps of all; they wait while rank 0 evaluates
        self._replay = buffer if team.size == 1 else ShardedReplay(buffer, timeout=1_800.0)
        self.watch, self._seed, self._team = Stopwatch(device), seed, team
        self.agent = Agent(network, settings, device, count, stream_seed(seed, "actions"), team.average)
        self._beta = beta_schedule(team.settings)
        self._rate = LinearSchedule(settings.learning_rate, settings.learning_rate_end, settings.steps)
        self._early = LinearSchedule(settings.epsilon_start, settings.epsilon_end, settings.epsilon_steps)
        late = max(settings.epsilon_late_steps - settings.epsilon_steps, 1)
        self._late = LinearSchedule(settings.epsilon_end, settings.epsilon_end * settings.epsilon_late, late)
        self.progress = Progress(next_evaluation=settings.eval_every, next_row=settings.log_every)
        self.statistics = EpisodeStatistics(count, settings.return_window, device)
        self._actors = Actors(environment, device, self.statistics)
        self._actions = torch.zeros(count, dtype=torch.int64, device=device)
        self._arrived: Step
        # updates that share one call of `sample`, rows of such a call, and calls per step
        self._together = settings.updates_a_sample
        self._draw_size, self._draws = settings.batch_size * self._together, settings.updates // self._together
        self._graphs: Graphs = {}
        self.last_row: Mapping[str, float] = {}
        self._began = time.perf_counter()
        self._begin(stream_seed(seed, "training"))
        if settings.graph and device.type == "cuda":
            self.capture()

    @property
    def step(self) -> int:
        """Steps of all environments together so far, of all ranks."""
        return self.progress.step

    @property
    def seconds(self) -> float:
        """Seconds since the run began, evaluations and earlier parts included."""
        return self.progress.seconds + time.perf_counter() - self._began

    def epsilon(self, step: int) -> float:
        """The share of random actions at environment step `step`."""
        settings = self.settings
        return self._early(step) if step < settings.epsilon_steps else self._late(step - settings.epsilon_steps)

    # the loop

    def run(
        self,
        records: Recorder | None,
        stop: StopRequest,
        max_seconds: float | None = None,
        checkpoints: CheckpointManager | None = None,
    ) -> str:
        """Learn until the steps or seconds are used up, the environment is solved, or a signal arrives.

        records:     the recorder, on the rank that evaluates and writes; None on others.
        checkpoints: saved when due and at the end of the loop, before the closing evaluation and row, so that a
                     resumed run continues as if it had never stopped.

        Returns why it ended: "steps", "max_seconds", "solved", or the name of the signal.
        """
        self._began = time.perf_counter()
        self._records, self._stop, self._limit, self._checkpoints = records, stop, max_seconds, checkpoints
        if records is not None and records.rows:
            self.last_row = records.rows[-1]
        while True:
            try:
                reason = self._between_steps()
            except Stopped as stopped:
                reason = stopped.reason
            reason = self._team.agree(reason)
            if reason == SAVE:
                self._save()
            elif reason:
                break
            self.advance()
            if records is not None:
                records.advance(self.progress.step)
        self._save()
        try:
            stop.check()
            if self.progress.evaluated != self.progress.step:
                self._evaluate(whole=True)
        except Stopped as stopped:
            reason = stopped.reason
        if self.progress.logged != self.progress.step or not self.last_row:
            self._log()
        return reason

    def _between_steps(self) -> str:
        """Evaluate and log if due; returns why the run ends, SAVE if a checkpoint is due, or ""."""
        progress, settings = self.progress, self.settings
        # an evaluation or row that an interruption skipped comes first
        if progress.step >= progress.next_evaluation and self.agent.updates:
            ready = settings.eval_from is None or self._recent_return() >= settings.eval_from
            if ready:
                self._evaluate(whole=False)
            # a return that rises meanwhile is noticed with the next row
            progress.next_evaluation += settings.eval_every if ready else min(settings.eval_every, settings.log_every)
        if progress.step >= progress.next_row:
            progress.next_row += settings.log_every
            self._log()
        if progress.solved and settings.early_stop:
            return "solved"
        if progress.step >= settings.steps:
            return "steps"
        if self._limit is not None and self.seconds >= self._limit:
            return "max_seconds"
        self._stop.check()
        return SAVE if self._checkpoints is not None and time.perf_counter() >= self._checkpoints.due else ""

    def _recent_return(self) -> float:
        """The latest return of training, exploration included; synchronises with the device."""
        most = self.environment.spec.most_points
        return self.statistics.read()[1] if most is None else self.statistics.expected(most)

    def advance(self) -> None:
        """Step all environments once, with the updates; with a fleet, take its chunks or make the updates owed."""
        progress, settings, agent = self.progress, self.settings, self.agent
        stride = self.environment.num_envs * self._team.size
        # the warm-up is counted on the host: asking the buffer would synchronise with the device
        learns = progress.added - progress.lost - self._open_windows >= settings.warmup and settings.updates > 0
        self.watch.begin()
        # applies to the actions chosen after this step
        agent.follow(self._rate(progress.step), self.epsilon(progress.step + stride))
        if learns and settings.whiten and not agent.updates:
            self._fit_whitening()
        if self.fleet is not None:
            self._take_or_learn(self.fleet, learns)
            return
        if not (learns and self._replayed("a step with its updates")):
            self._play(self._learn if learns else None)
        if learns:
            agent.after_updates(settings.updates)
        progress.added += self.environment.num_envs
        progress.step += stride

    def _play(self, learn: Callable[[], None] | None) -> None:
        """Send the actions, learn while emulators run, receive the step and answer it."""
        self.environment.send(self._actions)
        self.watch.lap("env")
        if learn is not None:
            learn()
        self._arrived = self._actors.recv()
        self.watch.lap("env")
        if not self._replayed("acting and adding"):
            self._answer()

    def _answer(self) -> None:
        """Store the step that arrived, and choose the next actions."""
        step, stack = self._arrived, self._actors.stack
        reward = step.reward.sign() if self.settings.clip_reward else step.reward
        flags = {"terminated": step.terminated, "truncated": step.truncated}
        # the frame in which the actions were chosen
        self.buffer.add(obs=stack.frame, action=self._actions, reward=reward, final_obs=step.final_frame, **flags)
        self.watch.lap("replay")
        self._actors.push(step)
        self.watch.lap("env")
        self._actions.copy_(self.agent.act(stack.obs))
        self.watch.lap("act")

    def _learn(self) -> None:
        """Make the updates of one step of all environments."""
        for _ in range(self._draws):
            if not self._replayed("the learning step"):
                self._learn_from(self._replay.sample(self._draw_size))

    def _learn_from(self, batch: Batch) -> None:
        """Make the updates that share one sampled batch, and the targets of all of them.

        The online network of before the first of them chooses the actions of the targets, in one pass for all rows.

        Priorities are updated here, in the order of the updates, instead of being returned to `capture` in the order
        of the rows, so that the latest TD error of a key that was sampled twice counts.
        """
        self.watch.lap("replay")
        # adjacent rows come from adjacent strata of the distribution, so each update takes rows at a stride
        target = self.agent.targets(batch)
        rows = [slice(part, None, self._together) for part in range(self._together)]
        td_errors = [self.agent.update(batch[each], target[each]) for each in rows]
        self.watch.lap("learn")
        if self.settings.sampler != "uniform":
            self.buffer.update_priorities(torch.cat([batch.key[each] for each in rows]), torch.cat(td_errors))
            self.watch.lap("replay")

    # graphs

    def capture(self) -> None:
        """Capture the repeated work of a step as CUDA graphs, after a few more calls; on a CPU it stays calls.

        Graphs keep working on the memory that they were captured with, so no state may be restored after this.
        """
        capture = self.buffer.capture
        self.evaluator.capture(self.buffer)
        generators = (self.agent.explorer.generator, *self.environment.generators)

        def learn_with(first: Batch) -> None:
            self._learn_from(first)
            for _ in range(self._draws - 1):
                self._learn_from(self.buffer.sample(self._draw_size))

        def whole(first: Batch) -> None:
            self._play(lambda: learn_with(first))

        if self.environment.on_device and self._draws:
            self._graphs["a step with its updates"] = capture(self._draw_size, whole, generators=generators)
        elif not self.environment.on_device:
            self._graphs["the learning step"] = capture(self._draw_size, self._learn_from)
            if self.fleet is None:
                self._graphs["acting and adding"] = capture(None, self._answer, generators=generators)

    def _replayed(self, name: str) -> bool:
        """Replay the graph of this name, except in a timed step; returns whether there is one and it was replayed."""
        return not self.watch.looks_inside and replayed(self._graphs, name)

    # actors in processes of their own

    def _take_or_learn(self, fleet: Fleet, learns: bool) -> None:
        """Take the chunks that have arrived, or make the updates of as many steps as there are environments."""
        progress, settings = self.progress, self.settings
        if not learns:
            progress.owed = 0
        if progress.owed >= settings.num_envs:
            progress.owed -= settings.num_envs
            self._learn()
            self.agent.after_updates(settings.updates)
            return
        chunks = fleet.receive(self.agent, self.epsilon(progress.step))
        self.watch.lap("env")
        for chunk in chunks:
            reward = np.sign(chunk.steps["reward"]) if settings.clip_reward else chunk.steps["reward"]
            self.buffer.extend(**{**chunk.steps, "reward": reward})
            self.statistics.finish(chunk.returns, chunk.lengths)
            self.statistics.count_points(torch.as_tensor(chunk.steps["reward"]))
            count = int(reward.size)
            progress.added += count
            progress.step += count
            progress.owed += count
        self.watch.lap("replay")

    # what is done now and then

    def _begin(self, seed: int) -> None:
        """Start new episodes, and choose the first actions."""
        self._actors.reset(seed)
        self.agent.follow(self._rate(self.progress.step), self.epsilon(self.progress.step))
        self._actions.copy_(self.agent.act(self._actors.stack.obs))

    @property
    def _open_windows(self) -> int:
        """Steps whose n-step windows are not complete yet."""
        return self.settings.n_step * self.environment.num_envs

    def _fit_whitening(self) -> None:
        """Fit the whitening to the warm-up, before the first update."""
        obs = torch.cat([self.buffer.sample(self.settings.batch_size).obs for _ in range(WHITENING_BATCHES)])
        self.agent.whiten(self._team.of_first(obs))

    def _evaluate(self, *, whole: bool) -> None:
        progress, records = self.progress, self._records
        if records is not None:
            evaluation, progress.solved = self.evaluator.evaluate(self.agent.judged, progress.step, whole=whole)
            progress.evaluation = evaluation._asdict()
            best = self.evaluator.best
            improved = best is not None and best.step == progress.step
            records.evaluated(progress.step, evaluation, best.network if best is not None and improved else None)
            if not evaluation.episodes:
                return
        progress.evaluated = progress.step

    def _log(self) -> None:
        progress, settings = self.progress, self.settings
        episodes, return_mean, length_mean = self.statistics.read()
        loss, td_error, value = self.agent.means()
        updates, seconds = self.agent.updates, self.seconds
        last_step, last_updates, last_seconds = progress.mark
        # evaluations and checkpoints are not learning time
        loop_seconds = seconds - self.evaluator.seconds - progress.checkpoint_seconds
        elapsed = max(loop_seconds - last_seconds, 1e-9)
        progress.mark, progress.logged = (progress.step, updates, loop_seconds), progress.step
        evaluation, progress.evaluation = Evaluation(**(progress.evaluation or {})), None
        # this synchronises with the device, as reading the mean losses already did
        stats = self.buffer.stats()
        self.last_row = {
            "step": progress.step,
            "seconds": seconds,
            "episodes": episodes,
            "return_mean": return_mean,
            "length_mean": length_mean,
            "loss": loss,
            "td_error": td_error,
            "beta": NAN if settings.sampler == "uniform" else self._beta(updates // self._together),
            "epsilon": self.epsilon(progress.step),
            "updates_per_second": (updates - last_updates) / elapsed,
            "steps_per_second": (progress.step - last_step) / elapsed,
            "updates": updates,
            "value_mean": value,
            "learning_rate": self._rate(progress.step),
            "stored": min(progress.added, self.buffer.capacity),
            **{f"eval_{name}": getattr(evaluation, name) for name in ("return_mean", "return_std", "length_mean")},
            **{name: float(getattr(stats, name)) for name in REPLAY_STATS},
            "actor_restarts": NAN if self.fleet is None else self.fleet.restarts,
        }
        if self._records is not None:
            self._records.row(self.last_row)

    def _save(self) -> None:
        if self._checkpoints is not None:
            self.progress.checkpoint_seconds += self._checkpoints.save()

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs except the content of the replay buffer; tensors are not copied."""
        games = None if self.fleet is not None or not self.environment.resumable else self._actors.state_dict()
        updates = self.agent.updates
        whitening = WHITENING_BATCHES if self.settings.whiten and updates else 0
        return {
            "progress": dataclasses.asdict(self.progress) | {"seconds": self.seconds},
            "samples": updates // self._together + whitening,
            "agent": self.agent.state_dict(),
            "statistics": self.statistics.state_dict(),
            "part_seconds": dict(self.watch.seconds),
            "actions": self._actions,
            "actors": games,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another trainer.

        With a replay buffer that is not the other's, the warm-up ends when it holds enough, with the agent as it is.

        Environments that expose their state continue in mid-episode, if both trainers have the same number of them.
        Others start new episodes on unused seeds, and the last steps of their unfinished episodes are never sampled.
        """
        self.progress = progress = Progress(**state["progress"])
        progress.resumed += 1
        if progress.added != self.buffer.added:
            progress.added, progress.lost = self.buffer.added, 0
        agent, statistics, games = state["agent"], state["statistics"], state["actors"]
        if len(state["actions"]) != len(self._actions):
            # what belongs to single environments stays this trainer's own
            own, running, games = self.agent.state_dict(), self.statistics.state_dict(), None
            agent = agent | {name: own[name] for name in own if name.startswith("explorer.")}
            statistics = statistics | {name: running[name] for name in ("returns", "lengths")}
        self.agent.load_state_dict(agent)
        self.statistics.load_state_dict(statistics)
        self.watch.seconds = dict(state["part_seconds"])
        self._began = time.perf_counter()
        if games is not None:
            self._actors.load_state_dict(games)
            self._actions.copy_(state["actions"])
            return
        self._begin(stream_seed(self._seed, "training", progress.resumed))
        self.statistics.abandon()
        self.buffer.begin_episodes()
        # the n-step windows that were open are never completed
        progress.lost += self._open_windows


def beta_schedule(settings: Settings) -> LinearSchedule:
    """The importance-sampling exponent: it moves one step with each sample and ends with the planned number of them."""
    updates = max(0, settings.steps - settings.warmup) // settings.num_envs * settings.updates
    samples = max(1, updates // settings.updates_a_sample)
    return LinearSchedule(settings.beta_start, settings.beta_end, samples)
