"""What an actor does in a process of its own, here or on another machine: steps environments and sends chunks of steps.

A chunk is complete in itself. Where an episode goes on in the next chunk its last step is marked as truncated, with the
next frame as its final observation, so that every window of the chunk can be learned from: those that reach its end
bootstrap from there, a few steps early. Chunks of several actors follow each other in the learner's buffer in any
order. Only the stacks of the first frames of a chunk are shorter than they were when the actor saw them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpu_replay.console.versions import cpu_cores
from gpu_replay.training.actors import Actors
from gpu_replay.training.exploration import Explorer
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.registry import EnvironmentId, make_environment
from gpu_replay.training.settings import Settings

# Frames compress 80 to 220 times at this level, in less than a hundredth of the time that the emulator takes for them
# (bench/README.md); numbers hardly at all.
LEVEL = 1
# smaller arrays are sent as they are
SMALLEST = 4096
Packed = dict[str, Any]


class Collector:
    """`num_envs` environments, and a copy of the learner's network that acts in them.

    seed: of the episodes and of the random actions.
    """

    def __init__(self, environment: EnvironmentId, settings: Settings, num_envs: int, seed: int) -> None:
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        # emulators get the cores that the network leaves: here one thread, since there is an actor for each core
        alone = dataclasses.replace(settings, threads=cpu_cores())
        self._actors = Actors(make_environment(environment, num_envs, alone, cpu), cpu)
        spec = self._actors.environment.spec
        self._network = QNetwork(spec.stacked, spec.num_actions, settings, spec.bounds)
        self._explorer = Explorer(settings.persistence, torch.Generator().manual_seed(seed))
        self._version = -1
        self._frame, self._obs = self._actors.reset(seed)
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs)

    @torch.no_grad()
    def collect(self, weights: Mapping[str, np.ndarray], version: int, epsilon: float, steps: int) -> dict[str, Any]:
        """Step all environments `steps` times with these weights, unless the version of the last call is the same.

        Returns obs, action, reward, terminated, truncated, `[T, E, ...]` and packed where that pays; `final`, the last
        observations of episodes and of the chunk, and `final_at`, (rows, 2), the step and environment of each; the
        version of the weights; and `returns` and `lengths` of the episodes that ended.
        """
        if version != self._version:
            self._network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
            self._version = version
        self._explorer.set_epsilon(epsilon)
        count, frame = self._actors.environment.num_envs, self._frame.numpy()
        obs = np.empty((steps, *frame.shape), frame.dtype)
        action, reward = np.empty((steps, count), np.int64), np.empty((steps, count), np.float32)
        terminated, truncated = np.empty((steps, count), bool), np.empty((steps, count), bool)
        finals: list[np.ndarray] = []
        places: list[tuple[int, int]] = []
        returns: list[float] = []
        lengths: list[float] = []
        for step in range(steps):
            obs[step] = self._frame.numpy()
            actions = self._explorer.choose(self._network(self._obs))
            self._actors.send(actions)
            arrival = self._actors.recv()
            action[step], reward[step] = actions.numpy(), arrival.reward.numpy()
            terminated[step], truncated[step] = arrival.terminated.numpy(), arrival.truncated.numpy()
            ended = terminated[step] | truncated[step]
            self._frame, self._obs = arrival.frame, arrival.obs
            for env in np.flatnonzero(ended):
                if arrival.final_frame is not None:
                    finals.append(arrival.final_frame[env].numpy().copy())
                    places.append((step, int(env)))
            self._return += reward[step]
            self._length += 1
            returns += self._return[ended].tolist()
            lengths += self._length[ended].tolist()
            self._return[ended], self._length[ended] = 0, 0
        goes_on = ~(terminated[-1] | truncated[-1])
        for env in np.flatnonzero(goes_on):
            finals.append(self._frame[env].numpy().copy())
            places.append((steps - 1, int(env)))
        truncated[-1] |= goes_on
        final = np.stack(finals) if finals else np.empty((0, *frame.shape[1:]), frame.dtype)
        return {
            "obs": pack(obs),
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "final": pack(final),
            "final_at": np.array(places, np.int64).reshape(-1, 2),
            "version": version,
            "returns": returns,
            "lengths": lengths,
        }


def pack(array: np.ndarray) -> Packed:
    """An array as it is sent: bytes are compressed with Zstandard, all else stays."""
    if array.dtype != np.uint8 or array.nbytes < SMALLEST:
        return {"array": array}
    import zstandard

    return {"shape": array.shape, "zstd": zstandard.ZstdCompressor(level=LEVEL).compress(array.tobytes())}


def unpack(packed: Packed) -> np.ndarray:
    """The inverse of `pack`."""
    if "array" in packed:
        found: np.ndarray = packed["array"]
        return found
    import zstandard

    whole = zstandard.ZstdDecompressor().decompress(packed["zstd"])
    return np.frombuffer(bytearray(whole), np.uint8).reshape(packed["shape"])


def sent_bytes(packed: Packed) -> int:
    """Bytes that travel for `packed`."""
    return packed["array"].nbytes if "array" in packed else len(packed["zstd"])


def final_rows(chunk: Mapping[str, Any]) -> list[np.ndarray | None]:
    """The final observations of a chunk as `extend` takes them: `[E, *shape]` where something ended, else None."""
    final, places = unpack(chunk["final"]), chunk["final_at"]
    steps, count = chunk["action"].shape
    rows: list[np.ndarray | None] = [None] * steps
    for row, (step, env) in zip(final, places, strict=True):
        found = rows[step]
        if found is None:
            found = rows[step] = np.zeros((count, *final.shape[1:]), final.dtype)
        found[env] = row
    return rows
