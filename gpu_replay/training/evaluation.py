"""Evaluations of the greedy policy on seeds that training never uses, and the best network so far.

Each of the parallel environments contributes exactly one episode, so that short episodes do not count more often than
long ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpu_replay.console.interrupt import StopRequest
from gpu_replay.console.seeds import Stream, stream_seed
from gpu_replay.training.agent import greedy_actions
from gpu_replay.training.environments import Actors, Environment
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.settings import Settings


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes."""

    return_mean: float
    return_std: float
    length_mean: float
    episodes: int


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
        self._stop = stop
        self._actors = Actors(environment, device)
        self._settings = settings
        self._seed = seed
        self._count = 0

    def evaluate(self, network: QNetwork, step: int) -> tuple[Evaluation, bool]:
        """Evaluate `network` and keep a copy if it is the best so far; also returns whether the environment is solved.

        It is solved when this evaluation reaches the threshold and one more on fresh seeds does too; `final` then
        returns that second evaluation.
        """
        count = self._count + 1
        result, fresh = self._play(network, "evaluation", count), None
        if self._reaches(result):
            second = self._play(network, "confirmation", count)
            fresh = second if self._reaches(second) else None
        # an interrupted evaluation does not count: the resumed run repeats it
        self._count = count
        candidate = Best(copy.deepcopy(network), step, result, fresh)
        if self.best is None or candidate.rank > self.best.rank:
            self.best = candidate
        return result, candidate.solved

    def final(self) -> Evaluation | None:
        """Evaluate the best network on episodes that were not used to choose it; None without a best network."""
        if self.best is None or self.best.fresh is not None:
            return None if self.best is None else self.best.fresh
        return self._play(self.best.network, "final", 0)

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations, and the best network."""
        best = None
        if self.best is not None:
            fresh = None if self.best.fresh is None else asdict(self.best.fresh)
            network, evaluation = self.best.network.state_dict(), asdict(self.best.evaluation)
            best = {"network": network, "step": self.best.step, "evaluation": evaluation, "fresh": fresh}
        return {"count": self._count, "seconds": self.seconds, "best": best}

    def load_state_dict(self, state: Mapping[str, Any], network: QNetwork) -> None:
        """Continue from a state; `network` has the right architecture and is only copied."""
        self._count, self.seconds, best = state["count"], state["seconds"], state["best"]
        if best is not None:
            copied = copy.deepcopy(network)
            copied.load_state_dict(best["network"])
            fresh = None if best["fresh"] is None else Evaluation(**best["fresh"])
            self.best = Best(copied, best["step"], Evaluation(**best["evaluation"]), fresh)

    def _reaches(self, evaluation: Evaluation) -> bool:
        return self.threshold is not None and evaluation.return_mean >= self.threshold

    @torch.no_grad()
    def _play(self, network: QNetwork, stream: Stream, index: int) -> Evaluation:
        began = time.perf_counter()
        settings, actors, seed = self._settings, self._actors, stream_seed(self._seed, stream, index)
        generator = torch.Generator(device=actors.device).manual_seed(seed)
        actors.reset(seed)
        returns = torch.zeros(actors.environment.num_envs, device=actors.device)
        lengths = torch.zeros_like(returns)
        running = torch.ones_like(returns, dtype=torch.bool)
        try:
            for _ in range(settings.eval_max_steps):
                self._stop.check()
                values = network(actors.stack.obs)
                actors.environment.send(greedy_actions(values, settings.eval_epsilon, generator))
                step = actors.recv()
                actors.push(step)
                returns += step.reward * running
                lengths += running
                running &= ~step.ended
                if not running.any():
                    break
        finally:
            self.seconds += time.perf_counter() - began
        return Evaluation(
            return_mean=float(returns.mean()),
            return_std=float(returns.std(correction=0)),
            length_mean=float(lengths.mean()),
            episodes=len(returns),
        )
