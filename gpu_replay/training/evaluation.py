"""Evaluations of the greedy policy on seeds that training never uses, and the best network so far.

Each of the parallel environments contributes exactly one episode, so that short episodes do not count more often than
long ones. A step of environments on the device is captured as one CUDA graph, with the network and the sums.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gpu_replay import TrajectoryReplayBuffer
from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import Stream, stream_seed
from gpu_replay.training.agent import greedy_actions
from gpu_replay.training.environments import Actors, Environment, Graphs, replayed
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings

# captured steps between two questions whether an episode is still running: the answer waits for the device
LOOK_EVERY = 64


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of whole episodes."""

    return_mean: float = math.nan
    return_std: float = math.nan
    length_mean: float = math.nan
    episodes: int = 0


@dataclass(frozen=True)
class Best:
    """The network with the best evaluation so far, and its evaluation on fresh seeds if that solved the environment."""

    network: QNetwork
    step: int
    evaluation: Evaluation
    fresh: Evaluation | None

    @property
    def solved(self) -> bool:
        """Whether this network solved the environment."""
        return self.fresh is not None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: the greater, the better; a solved network is better than any that is not."""
        return self.solved, self.evaluation.return_mean


class Evaluator:
    """Evaluates networks in its own environments and keeps a copy of the best.

    environment: `settings.eval_episodes` parallel environments.
    stop:        checked in every step, since an evaluation of long episodes can take a minute; `evaluate` and `final`
                 raise Stopped.
    seconds:     time spent evaluating, which does not count as learning time.
    """

    def __init__(
        self, environment: Environment, settings: Settings, *, device: torch.device, seed: int, stop: StopRequest
    ) -> None:
        self.best: Best | None = None
        self.seconds = 0.0
        stop_at = settings.stop_at
        self.threshold = environment.spec.reward_threshold if stop_at is None else stop_at
        self._settings, self._seed, self._stop = settings, seed, stop
        self._actors = Actors(environment, device)
        self._count = 0
        self._generator = torch.Generator(device=device)
        self._returns = torch.zeros(environment.num_envs, device=device)
        self._lengths = torch.zeros_like(self._returns)
        self._lost = torch.zeros_like(self._returns)
        self._running = torch.ones_like(self._returns, dtype=torch.bool)
        # the network that plays: weights are copied into it, since a graph reads them where they were at its capture
        self._player: QNetwork | None = None
        self._graphs: Graphs = {}

    def capture(self, buffer: TrajectoryReplayBuffer) -> None:
        """Capture steps of environments on the buffer's device, after a few more calls; on a CPU they stay calls."""
        environment = self._actors.environment
        if environment.on_device:
            generators = (self._generator, *environment.generators)
            self._graphs["an evaluation"] = buffer.capture(None, self._step, generators=generators)

    def evaluate(self, network: QNetwork, step: int, *, whole: bool = True) -> tuple[Evaluation, bool]:
        """Evaluate `network` and keep a copy if it is the best so far; also returns whether the environment is solved.

        whole: play to the end even if the threshold is out of reach; otherwise such an evaluation stops, and all that
               it returns is NaN and no episodes.

        It is solved when this evaluation reaches the threshold and one more on fresh seeds does too; `final` then
        returns that second evaluation.
        """
        count = self._count + 1
        result, fresh = self._play(network, "evaluation", count, whole), None
        if self._reaches(result):
            second = self._play(network, "confirmation", count, whole=False)
            fresh = second if self._reaches(second) else None
        # an interrupted evaluation does not count: the resumed run repeats it
        self._count = count
        if not result.episodes:
            return result, False
        candidate = Best(copy.deepcopy(network), step, result, fresh)
        if self.best is None or candidate.rank > self.best.rank:
            self.best = candidate
        return result, candidate.solved

    def final(self) -> Evaluation | None:
        """Evaluate the best network on episodes that were not used to choose it; None without a best network."""
        if self.best is None:
            return None
        return self.best.fresh or self._play(self.best.network, "final", 0, whole=True)

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations, and the best network."""
        best = self.best and vars(self.best) | {"network": self.best.network.state_dict()}
        return {"count": self._count, "seconds": self.seconds, "best": best}

    def load_state_dict(self, state: Mapping[str, Any], network: QNetwork) -> None:
        """Continue from a state; `network` has the right architecture and is only copied."""
        self._count, self.seconds, best = state["count"], state["seconds"], state["best"]
        if best is not None:
            copied = copy.deepcopy(network)
            copied.load_state_dict(best["network"])
            fresh = best["fresh"] and Evaluation(*best["fresh"])
            self.best = Best(copied, best["step"], Evaluation(*best["evaluation"]), fresh)

    def _reaches(self, evaluation: Evaluation) -> bool:
        return self.threshold is not None and evaluation.return_mean >= self.threshold

    def _out_of_reach(self) -> bool:
        """Whether the mean return stays below the threshold even if every running episode earns all that is left."""
        most = self._actors.environment.spec.most_points
        if self.threshold is None or most is None:
            return False
        return bool(torch.where(self._running, most + self._lost, self._returns).mean() < self.threshold)

    @torch.no_grad()
    def _play(self, network: QNetwork, stream: Stream, index: int, whole: bool) -> Evaluation:
        began, seed = time.perf_counter(), stream_seed(self._seed, stream, index)
        if self._player is None:
            self._player = copy.deepcopy(network).requires_grad_(False)
            self._player.lower()
        self._player.load_state_dict(network.state_dict())
        self._generator.manual_seed(seed)
        self._actors.reset(seed)
        for sums in (self._returns, self._lengths, self._lost):
            sums.zero_()
        self._running.fill_(True)
        try:
            for played in range(1, self._settings.eval_max_steps + 1):
                self._stop.check()
                captured = replayed(self._graphs, "an evaluation")
                if not captured:
                    self._step()
                if captured and played % LOOK_EVERY:
                    continue
                if not self._running.any():
                    break
                if not whole and self._out_of_reach():
                    return Evaluation()
            mean, deviation = float(self._returns.mean()), float(self._returns.std(correction=0))
            return Evaluation(mean, deviation, float(self._lengths.mean()), len(self._returns))
        finally:
            self.seconds += time.perf_counter() - began

    def _step(self) -> None:
        """Choose actions, step all environments, and sum what the first episodes return; steps after them add 0."""
        actors = self._actors
        values = self._player(actors.stack.obs)  # type: ignore[misc]
        actors.environment.send(greedy_actions(values, self._settings.eval_epsilon, self._generator))
        step = actors.recv()
        actors.push(step)
        self._returns += step.reward * self._running
        self._lost += step.reward.clamp(max=0) * self._running
        self._lengths += self._running
        self._running &= ~step.ended
