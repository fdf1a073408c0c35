"""Actors on Ray, in processes of their own, here or on other machines, that step environments for one learner.

An actor sends chunks of steps, each complete in itself. If an episode continues in the next chunk, its last step in
this one is marked as truncated and carries the next frame as its final observation. Every n-step window of the chunk
can then be learned from: windows that reach the end bootstrap there, a few steps early. Chunks of several actors enter
the learner's buffer in any order. Only the frame stacks at the start of a chunk are shorter than those the actor saw.

Every actor has two calls of `collect` in flight, so it keeps stepping while the learner handles its last chunk. The
learner takes the chunks that have arrived, makes the updates due for their steps, and asks for more with its newest
weights. It makes as many updates per step as with environments of its own. It waits only when no chunk at all has
arrived, never for one particular actor. An actor whose process or machine died is replaced; chunks it sent are kept.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_replay.console.errors import UserError, install, require
from gpu_replay.console.seeds import stream_seed
from gpu_replay.console.versions import cpu_cores
from gpu_replay.training.agent import Agent, Explorer
from gpu_replay.training.environments import Actors
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import CPU, EnvironmentId
from gpu_replay.training.settings import Settings

# steps of each environment in a chunk: its end cuts n-step windows short, and the stacks of its first frames are padded
# like those of a new episode
CHUNK, CHUNK_OF_STACKS = 32, 128
# calls of `collect` in flight per actor
IN_FLIGHT = 2
# the shortest time between two copies of the weights
WEIGHTS_SECONDS = 0.2
# how long the learner waits for a chunk before it looks for signals, when there is nothing else to do
PATIENCE = 0.2
# an actor that died this often before its first chunk is not restarted again
MOST_DEATHS = 3
# at this level frames shrink 80 to 220 times, in less than a hundredth of the emulator's own time; smaller arrays are
# sent uncompressed
LEVEL, SMALLEST = 1, 4096


@dataclass(frozen=True)
class Chunk:
    """What an actor sends.

    steps:   obs, action, reward, terminated, truncated, `[T, E, ...]`, and final_obs, as `extend` takes them; byte
             arrays are compressed for sending.
    returns, lengths: one entry for each episode that ended.
    """

    steps: dict[str, Any]
    returns: list[float]
    lengths: list[float]


class Collector:
    """`num_envs` environments, and a copy of the learner's network that acts in them.

    seed: seeds the episodes and the random actions.
    """

    def __init__(self, environment: EnvironmentId, settings: Settings, num_envs: int, seed: int) -> None:
        torch.set_num_threads(1)
        # one thread: there is an actor for each core, and the emulators need the rest
        alone = dataclasses.replace(settings, threads=cpu_cores())
        self._actors = Actors(environment.make(num_envs, alone, CPU), CPU)
        spec = self._actors.environment.spec
        self._network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
        self._explorer = Explorer(settings.persistence, num_envs, CPU, seed)
        self._actors.reset(seed)
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs)

    @torch.no_grad()
    def collect(self, weights: Mapping[str, np.ndarray], epsilon: float) -> Chunk:
        """Step all environments for one chunk with these weights."""
        self._network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
        self._explorer.set_epsilon(epsilon)
        actors, stack = self._actors, self._actors.stack
        rows: list[dict[str, np.ndarray]] = []
        finals: list[Any] = []
        returns: list[float] = []
        lengths: list[float] = []
        for _ in range(CHUNK if actors.environment.spec.stack == 1 else CHUNK_OF_STACKS):
            obs, actions = stack.frame.clone(), self._explorer.choose(self._network(stack.obs))
            actors.environment.send(actions)
            step = actors.recv()
            actors.push(step)
            row = {"obs": obs, "action": actions, "reward": step.reward}
            row |= {"terminated": step.terminated, "truncated": step.truncated}
            rows.append({name: value.numpy().copy() for name, value in row.items()})
            ended = step.ended.numpy()
            final = None if step.final_frame is None or not ended.any() else step.final_frame.numpy().copy()
            finals.append(final)
            self._return += rows[-1]["reward"]
            self._length += 1
            returns += self._return[ended].tolist()
            lengths += self._length[ended].tolist()
            self._return[ended], self._length[ended] = 0, 0
        goes_on, newest = ~ended, stack.frame.numpy()
        finals[-1] = newest.copy() if final is None else final
        finals[-1][goes_on] = newest[goes_on]
        rows[-1]["truncated"] |= goes_on
        steps = {name: pack(np.stack([row[name] for row in rows])) for name in rows[0]}
        return Chunk({**steps, "final_obs": [pack(each) for each in finals]}, returns, lengths)


def pack(array: np.ndarray | None) -> Any:
    """Prepare an array for sending: large byte arrays are compressed with Zstandard, others stay as they are."""
    if array is None or array.dtype != np.uint8 or array.nbytes < SMALLEST:
        return array
    import zstandard

    return array.shape, zstandard.ZstdCompressor(level=LEVEL).compress(array.tobytes())


def unpack(packed: Any) -> Any:
    """Undo `pack`, for one array or for a list of them."""
    if isinstance(packed, list):
        return [unpack(each) for each in packed]
    if not isinstance(packed, tuple):
        return packed
    import zstandard

    shape, content = packed
    return np.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(content)), np.uint8).reshape(shape)


def check_actors(actors: str) -> None:
    """Raise UserError unless `--actors` is a number or a cluster's address, and the packages it needs are installed."""
    if not re.fullmatch(r"[1-9]\d*|ray://[^/:]+:\d+", actors):
        raise UserError(f"--actors must be a number such as 4, or ray://HOST:PORT; found {actors!r}.")
    require("ray", "zstandard", purpose="--actors", extra=install("training,ray"))


class Fleet:
    """Ray actors that collect.

    where:    the number of actors, run by a local Ray that is started here, or the address `ray://HOST:PORT` of a
              cluster, which runs one actor per CPU and at most one per environment. Its machines need this package.
    num_envs: environments of each actor; by default `settings.num_envs` are divided among the actors.
    restarts: how many actors have been replaced so far.

    Raises UserError if Ray cannot be reached.
    """

    def __init__(
        self, where: str, environment: EnvironmentId, settings: Settings, seed: int, num_envs: int | None = None
    ) -> None:
        import ray

        self._ray, on_sigterm = ray, signal.getsignal(signal.SIGTERM)
        # a Ray that runs already is not shut down by `close`
        self._started = not ray.is_initialized()
        remote, quiet = where.startswith("ray://"), {"log_to_driver": False, "logging_level": "ERROR"}
        local = {"address": "local", "num_cpus": 1 if remote else int(where), "num_gpus": 0, "include_dashboard": False}
        try:
            with warnings.catch_warnings():
                # Ray's own messages are hidden: the errors below say what matters
                warnings.simplefilter("ignore")
                if self._started:
                    ray.init(**quiet, **({"address": where} if remote else local))
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            found = " ".join(str(error).split())[:300]
            token = "a token set RAY_AUTH_MODE=token, with the token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
            raise UserError(f"--actors {where}: Ray cannot be reached: {found} For a cluster with {token}.") from None
        finally:
            # Ray's handler would end the process at once, before the run's files are written
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.count = max(1, min(settings.num_envs, cpus)) if remote else int(where)
        self.num_envs = num_envs or max(1, settings.num_envs // self.count)
        self.restarts = 0
        self._make = ray.remote(num_cpus=1, num_gpus=0, max_restarts=0)(Collector).remote
        self._of, self._seed = (environment, settings, self.num_envs), seed
        # by actor number: the actor, its generation, and its deaths since its last chunk
        self._actors: list[Any] = [None] * self.count
        self._lives, self._deaths = [-1] * self.count, [0] * self.count
        self._pending: dict[Any, tuple[int, int]] = {}
        # the newest weights, and when they were sent
        self._weights, self._sent = None, -WEIGHTS_SECONDS

    def receive(self, agent: Agent, epsilon: float, wait: float = PATIENCE) -> list[Chunk]:
        """Return the chunks that have arrived, waiting at most `wait` seconds; their actors go on with this epsilon.

        The agent's weights are sent first if the last copy is old enough.
        Raises UserError if an actor's environment or network fails, or if it keeps dying before its first chunk.
        """
        ray, self._epsilon = self._ray, epsilon
        self._publish(agent)
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ready and wait:
            ready, _ = ray.wait(refs, num_returns=1, timeout=wait)
        found = []
        for ref in ready:
            number, life = self._pending.pop(ref)
            try:
                chunk: Chunk = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                raise UserError(f"actor {number} failed: {str(error).strip().splitlines()[-1]}") from error
            except ray.exceptions.RayError as error:
                # the other call of the same actor fails as well
                if life == self._lives[number]:
                    self._replace(number, str(error).strip().splitlines()[0])
                continue
            self._deaths[number] = 0
            steps = {name: unpack(value) for name, value in chunk.steps.items()}
            found.append(dataclasses.replace(chunk, steps=steps))
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

    def _publish(self, agent: Agent) -> None:
        """Use the newest weights in all further calls; the first time, start the actors."""
        if time.perf_counter() - self._sent >= WEIGHTS_SECONDS:
            weights = {name: value.detach().cpu().numpy() for name, value in agent.online.state_dict().items()}
            self._weights, self._sent = self._ray.put(weights), time.perf_counter()
        if self._actors[0] is None:
            for number in range(self.count):
                self._start(number)

    def _start(self, number: int) -> None:
        self._lives[number] += 1
        self._actors[number] = self._make(
            *self._of, stream_seed(self._seed, "actor", number + 100_000 * (self._lives[number] + 1))
        )
        for _ in range(IN_FLIGHT):
            self._ask(number)

    def _ask(self, number: int) -> None:
        call = self._actors[number].collect.remote
        ref = call(self._weights, self._epsilon)
        self._pending[ref] = number, self._lives[number]

    def _replace(self, number: int, reason: str) -> None:
        self._deaths[number] += 1
        if self._deaths[number] == MOST_DEATHS:
            raise UserError(f"actor {number} ended {MOST_DEATHS} times before its first chunk: {reason}")
        print(f"actor {number} is gone ({reason}); another takes its place", file=sys.stderr)
        self.restarts += 1
        self._start(number)
