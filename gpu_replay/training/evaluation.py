"""Evaluations of the greedy policy on seeds that training never uses, and the best network so far.

Each of the parallel environments contributes exactly one episode, so that short episodes do not count more often than
long ones.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import Stream, stream_seed
from gpu_replay.training.actors import Actors
from gpu_replay.training.environments import Environment
from gpu_replay.training.exploration import greedy_actions
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings

CONFIRMATIONS = 3
STANDARD_ERRORS = 3


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes."""

    return_mean: float
    return_std: float
    length_mean: float
    episodes: int


@dataclass(frozen=True)
class Best:
    """The network with the best evaluation so far, and the evaluation on fresh seeds by which `stop_at` was reached."""

    network: QNetwork
    step: int
    evaluation: Evaluation
    solved: bool
    fresh: Evaluation | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: the greater, the better; a solved network is better than any that is not."""
        return self.solved, self.evaluation.return_mean


class Evaluator:
    """Evaluates networks in its own environments and keeps a copy of the best.

    environment: `settings.eval_episodes` parallel environments.
    stop:        checked in every step, since an evaluation of long episodes can take a minute; `evaluate` and `final`
                 raise Stopped.
    seconds:     spent here, which is not part of the learning loop's.
    """

    def __init__(
        self, environment: Environment, settings: Settings, *, device: torch.device, seed: int, stop: StopRequest
    ) -> None:
        self.best: Best | None = None
        self.seconds = 0.0
        self._stop = stop
        self._environment = environment
        self._actors = Actors(environment, device)
        self._settings = settings
        self._device = device
        self._seed = seed
        self._count = 0

    def evaluate(self, network: QNetwork, step: int) -> tuple[Evaluation, bool]:
        """Evaluate `network` and keep a copy if it is the best so far; returns whether the environment is solved, too.

        Solved: this evaluation reaches the environment's threshold, and the mean of three more on other seeds exceeds
        it by three standard errors, so that a run does not end by chance. With `stop_at`: this evaluation reaches it,
        and so does one more on other seeds, which is then that of `final`.
        """
        count = self._count + 1
        result = self._play(network, "evaluation", count)
        fresh = None
        solved = self._reaches(result.return_mean)
        if solved and self._settings.stop_at is not None:
            fresh = self._play(network, "confirmation", count)
            solved = self._reaches(fresh.return_mean)
        elif solved:
            solved = self._confirmed(network, count)
        # an interrupted evaluation does not count: the resumed run repeats it
        self._count = count
        candidate = Best(copy.deepcopy(network), step, result, solved, fresh if solved else None)
        if self.best is None or candidate.rank > self.best.rank:
            self.best = candidate
        return result, solved

    @property
    def threshold(self) -> float | None:
        """The mean return at which the environment counts as solved, or None."""
        stop_at = self._settings.stop_at
        return self._environment.spec.reward_threshold if stop_at is None else stop_at

    def _reaches(self, return_mean: float) -> bool:
        threshold = self.threshold
        return threshold is not None and return_mean >= threshold

    def _confirmed(self, network: QNetwork, count: int) -> bool:
        first = CONFIRMATIONS * count
        results = [self._play(network, "confirmation", first + i) for i in range(CONFIRMATIONS)]
        mean = sum(result.return_mean for result in results) / CONFIRMATIONS
        variance = sum(result.return_std**2 + (result.return_mean - mean) ** 2 for result in results) / CONFIRMATIONS
        episodes = sum(result.episodes for result in results)
        return self._reaches(mean - STANDARD_ERRORS * math.sqrt(variance / episodes))

    def final(self) -> Evaluation | None:
        """Evaluate the best network on episodes that were not used to choose it; None without a best network."""
        if self.best is None or self.best.fresh is not None:
            return None if self.best is None else self.best.fresh
        return self._play(self.best.network, "final", 0)

    def state(self) -> dict[str, Any]:
        """The number of evaluations, and the best network."""
        best = None
        if self.best is not None:
            best = vars(self.best) | {
                "network": self.best.network.state_dict(),
                "evaluation": asdict(self.best.evaluation),
                "fresh": None if self.best.fresh is None else asdict(self.best.fresh),
            }
        return {"count": self._count, "seconds": self.seconds, "best": best}

    def restore(self, state: Mapping[str, Any], network: QNetwork) -> None:
        """Continue from a state; `network` has the right architecture and is only copied."""
        self._count = state["count"]
        self.seconds = state["seconds"]
        self.best = None
        best = state["best"]
        if best is not None:
            copied = copy.deepcopy(network)
            copied.load_state_dict(best["network"])
            fresh = best.get("fresh")
            evaluations = Evaluation(**best["evaluation"]), None if fresh is None else Evaluation(**fresh)
            self.best = Best(copied, best["step"], evaluations[0], best["solved"], evaluations[1])

    def _play(self, network: QNetwork, stream: Stream, index: int) -> Evaluation:
        began = time.perf_counter()
        try:
            return self._episodes(network, stream, index)
        finally:
            self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def _episodes(self, network: QNetwork, stream: Stream, index: int) -> Evaluation:
        settings = self._settings
        seed = stream_seed(self._seed, stream, index)
        generator = torch.Generator(device=self._device).manual_seed(seed)
        _, obs = self._actors.reset(seed)
        # accumulated on the device of the environments
        returns = torch.zeros(self._environment.num_envs, device=self._actors.home)
        lengths = torch.zeros_like(returns)
        running = torch.ones_like(returns, dtype=torch.bool)
        for _ in range(settings.eval_max_steps):
            self._stop.check()
            self._actors.send(greedy_actions(network(obs), settings.eval_epsilon, generator))
            arrival = self._actors.recv()
            step = arrival.step
            returns += step.reward * running
            lengths += running
            running &= ~(step.terminated | step.truncated)
            if not running.any():
                break
            obs = arrival.obs
        return Evaluation(
            return_mean=float(returns.mean()),
            return_std=float(returns.std(correction=0)),
            length_mean=float(lengths.mean()),
            episodes=self._environment.num_envs,
        )
