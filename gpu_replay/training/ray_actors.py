"""Actors as Ray actors, on this machine or on a cluster, and the trainer that learns from what they send.

Every actor has two calls of `collect` in flight, so that it steps on while the learner handles what it sent. The
learner takes what has arrived, makes the updates that belong to it, and asks for more with its newest weights: it
learns as often per step as with environments of its own. It waits only while nothing at all has arrived, never for one
actor. An actor whose process or machine is gone is replaced; of what it sent nothing is lost.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpu_replay.console.errors import UserError, require
from gpu_replay.console.seeds import stream_seed
from gpu_replay.training.collector import Collector, final_rows, sent_bytes, unpack
from gpu_replay.training.episodes import EpisodeStatistics
from gpu_replay.training.registry import EnvironmentId
from gpu_replay.training.settings import Settings
from gpu_replay.training.trainer import Trainer

EXTRA = 'pip install "gpu-replay[training,ray]"'
# steps of each environment in a chunk: its end cuts windows short, and where frames are stacked its first ones have
# stacks that are padded as those of a new episode
CHUNK, CHUNK_OF_STACKS = 32, 128
# calls of each actor that are under way
IN_FLIGHT = 2
# the shortest time between two copies of the weights
WEIGHTS_SECONDS = 0.2
# how long the learner waits for a chunk before it looks for signals, when there is nothing else to do
PATIENCE = 0.2
# an actor that ends so often before its first chunk would end the next time, too
MOST_DEATHS = 3


def check_actors(actors: str) -> None:
    """Raise UserError unless `--actors` is a number or the address of a cluster, and what it needs is installed."""
    if not re.fullmatch(r"[1-9]\d*|ray://[^/:]+:\d+", actors):
        raise UserError(f"--actors must be a number such as 4, or ray://HOST:PORT; found {actors!r}.")
    require("ray", "zstandard", purpose="--actors", extra=EXTRA)


class Fleet:
    """Ray actors that collect.

    where:    a number of actors of a Ray of this machine, started here, or `ray://HOST:PORT`, where there is one for
              each CPU of the cluster, at most one for each environment; its machines need this package, too.
    num_envs: of each actor; by default `settings.num_envs` are divided among them.

    Raises UserError where Ray cannot be reached.
    """

    def __init__(
        self, where: str, environment: EnvironmentId, settings: Settings, seed: int, num_envs: int | None = None
    ) -> None:
        import ray

        self._ray, on_sigterm = ray, signal.getsignal(signal.SIGTERM)
        # one that runs already is left as it is
        self._started = not ray.is_initialized()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            with warnings.catch_warnings():
                # what matters of them, the errors below say
                warnings.simplefilter("ignore")
                if self._started and where.startswith("ray://"):
                    ray.init(where, **quiet)
                elif self._started:
                    ray.init("local", num_cpus=int(where), num_gpus=0, include_dashboard=False, **quiet)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"--actors {where}: Ray cannot be reached: {' '.join(str(error).split())[:300]} For a "
                "cluster with a token set RAY_AUTH_MODE=token, with the token in RAY_AUTH_TOKEN or ~/.ray/auth_token."
            ) from None
        finally:
            # Ray would end the process at once, with nothing written
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.count = max(1, min(settings.num_envs, cpus)) if where.startswith("ray://") else int(where)
        self.num_envs = num_envs or max(1, settings.num_envs // self.count)
        self.restarts = 0
        # bytes that came, and those of the same frames as they are stored
        self.received = self.unpacked = 0
        self._make = ray.remote(num_cpus=1, num_gpus=0, max_restarts=0)(Collector).remote
        self._of = environment, settings, self.num_envs
        self._seed = seed
        self._steps = CHUNK if settings.frame_stack == 1 or environment.kind != "atari" else CHUNK_OF_STACKS
        # the actor of each number, which of its kind it is, and its deaths since its last chunk
        self._actors: list[Any] = [None] * self.count
        self._lives, self._deaths = [-1] * self.count, [0] * self.count
        self._pending: dict[Any, tuple[int, int]] = {}
        self._weights: Any = None
        self._version = -1

    def publish(self, weights: Mapping[str, torch.Tensor], version: int, epsilon: float) -> None:
        """Give the weights to calls from now on, and start the actors if this is the first time."""
        self._weights = self._ray.put({name: value.detach().cpu().numpy() for name, value in weights.items()})
        self._version, self._epsilon = version, epsilon
        if self._actors[0] is None:
            for number in range(self.count):
                self._start(number)

    def receive(self, wait: float, epsilon: float) -> list[dict[str, Any]]:
        """The chunks that have arrived, or the first within `wait` seconds; their actors go on with this epsilon.

        Raises UserError for an actor whose environment or network fails, or that dies again and again at once.
        """
        ray, self._epsilon = self._ray, epsilon
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ready and wait:
            ready, _ = ray.wait(refs, num_returns=1, timeout=wait)
        found = []
        for ref in ready:
            number, life = self._pending.pop(ref)
            try:
                chunk = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                raise UserError(f"actor {number} failed: {str(error).strip().splitlines()[-1]}") from error
            except ray.exceptions.RayError as error:
                # the other call of the same actor fails as well
                if life == self._lives[number]:
                    self._replace(number, str(error).strip().splitlines()[0])
                continue
            self._deaths[number] = 0
            self.received += sent_bytes(chunk["obs"])
            found.append(chunk)
            if life == self._lives[number]:
                self._ask(number)
        return found

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        for actor in self._actors:
            if actor is not None:
                self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()

    def _start(self, number: int) -> None:
        self._lives[number] += 1
        self._actors[number] = self._make(
            *self._of, stream_seed(self._seed, "actor", number + 100_000 * (self._lives[number] + 1))
        )
        for _ in range(IN_FLIGHT):
            self._ask(number)

    def _ask(self, number: int) -> None:
        call = self._actors[number].collect.remote
        ref = call(self._weights, self._version, self._epsilon, self._steps)
        self._pending[ref] = number, self._lives[number]

    def _replace(self, number: int, reason: str) -> None:
        self._deaths[number] += 1
        if self._deaths[number] == MOST_DEATHS:
            raise UserError(f"actor {number} ended {MOST_DEATHS} times before its first chunk: {reason}")
        print(f"actor {number} is gone ({reason}); another takes its place", file=sys.stderr)
        self.restarts += 1
        self._start(number)


class FinishedEpisodes(EpisodeStatistics):
    """The last episodes that actors finished, whose returns and lengths they count themselves."""

    def finish(self, returns: list[float], lengths: list[float]) -> None:
        """Returns and lengths of some more."""
        for row in zip(returns, lengths, strict=True):
            self._finished[int(self._count) % self._window] = torch.tensor(row)
            self._count += 1


class ActorTrainer(Trainer):
    """A trainer that stores what a fleet sends; its own environment only describes those of the actors.

    A resumed run goes on with new episodes.
    """

    def __init__(self, fleet: Fleet, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fleet = fleet
        self._statistics = self._finished = FinishedEpisodes(1, self.settings.return_window, torch.device("cpu"))
        # steps that are stored and not yet learned from
        self._owed = 0
        # when each version of the weights was sent: the number of updates, which is its name, and the time
        self._published: dict[int, float] = {}
        self._ages: list[tuple[float, float]] = []
        self._age_sum, self._chunks = np.zeros(2), 0

    def state(self) -> dict[str, Any]:
        """As that of a trainer, without running episodes."""
        return super().state() | {"actors": None, "owed": self._owed}

    def restore(self, state: Mapping[str, Any], *, filled: bool) -> None:
        """As that of a trainer."""
        super().restore(state, filled=filled)
        self._owed = state["owed"]

    @property
    def weights_age(self) -> tuple[float, float]:
        """Age of the weights with which chunks were collected when they came, mean of all: updates, and seconds."""
        updates, seconds = (self._age_sum / max(self._chunks, 1)).tolist()
        return updates, seconds

    @property
    def fleet(self) -> Fleet:
        """The actors."""
        return self._fleet

    def _advance(self) -> None:
        """Take what has come, or make the updates of as many steps as there are environments."""
        self.watch.begin()
        self._publish()
        ready = self._added - self._open_windows - self._lost >= self.settings.warmup
        if not ready:
            self._owed = 0
        if self._owed < self.settings.num_envs:
            chunks = self._fleet.receive(PATIENCE, self.settings.epsilon(self.step))
            self.watch.lap("env")
            for chunk in chunks:
                self._store(chunk)
            self.watch.lap("replay")
        else:
            self._owed -= self.settings.num_envs
            self.agent.set_learning_rate(self.settings.learning_rate_at(self.step))
            self._learn()

    def _publish(self) -> None:
        """Send the weights to the actors if they have changed and the last time is long enough ago."""
        now, version = time.perf_counter(), self.agent.updates
        last = next(reversed(self._published)) if self._published else None
        if last is None or (version != last and now - self._published[last] >= WEIGHTS_SECONDS):
            self._fleet.publish(self.agent.online.state_dict(), version, self.settings.epsilon(self.step))
            self._published[version] = now

    def _store(self, chunk: Mapping[str, Any]) -> None:
        obs = unpack(chunk["obs"])
        self._fleet.unpacked += obs.nbytes
        reward = chunk["reward"]
        self.buffer.extend(
            obs=obs,
            action=chunk["action"],
            reward=np.sign(reward) if self.settings.clip_reward else reward,
            terminated=chunk["terminated"],
            truncated=chunk["truncated"],
            final_obs=final_rows(chunk),
        )
        self._finished.finish(chunk["returns"], chunk["lengths"])
        steps = int(chunk["action"].size)
        self._added += steps
        self.step += steps
        self._owed += steps
        version = chunk["version"]
        age = (self.agent.updates - version, time.perf_counter() - self._published[version])
        self._ages.append(age)
        self._age_sum += age
        self._chunks += 1

    def _actor_figures(self) -> dict[str, float]:
        """Mean age of the weights of the chunks since the last row, and how many actors were replaced so far."""
        updates, seconds = np.mean(self._ages, 0).tolist() if self._ages else (float("nan"),) * 2
        self._ages.clear()
        return {"weights_age": updates, "weights_seconds": seconds, "actor_restarts": self._fleet.restarts}
