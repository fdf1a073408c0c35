"""Actor processes feed one buffer: DQN on CartPole-v1, or another environment with vector observations.

    python -m gpu_replay.examples.async_actors --actors 2

Every actor steps environments with a copy of the learner's network and sends chunks of transitions through a pipe. A
pipe is a bounded queue: an actor that is ahead waits until the learner reads. Each actor has its own pipe, because a
process that is killed while it writes to a shared queue leaves the queue locked. An actor that dies is replaced; the
chunks it sent are kept, and the chunk it was collecting is lost. Processes are spawned, not forked: like everything
that uses CUDA, a buffer does not work in a forked process.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from gpu_replay import LinearSchedule, Proportional, ReplayBuffer

GAMMA, ENVS, CHUNK, BATCH = 0.99, 4, 16, 128
# an actor copies the learner's weights every time it has sent this many chunks
COPY_EVERY = 2


def made_network(env_id: str) -> nn.Sequential:
    """A small network of action values, for vector observations and discrete actions."""
    with gymnasium.make(env_id) as env:
        (inputs,), outputs = env.observation_space.shape or (0,), int(env.action_space.n)  # type: ignore[attr-defined]
    return nn.Sequential(nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs))


def exploration(number: int, count: int) -> float:
    """An actor's share of random actions: 0.05 if it is alone, else from 0.0007 to 0.4, as in Horgan et al. 2018."""
    return 0.05 if count == 1 else 0.4 ** (8 - 7 * number / (count - 1))


def act(env_id: str, shared: nn.Sequential, sender: Any, epsilon: float, seed: int) -> None:
    """Step environments, and send chunks of transitions with the returns of finished episodes, until the pipe closes.

    epsilon: share of random actions.
    """
    torch.set_num_threads(1)
    network, generator = made_network(env_id), np.random.default_rng(seed)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    env = gymnasium.make_vec(env_id, ENVS, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    obs, _ = env.reset(seed=seed)
    totals, chunks = np.zeros(ENVS), 0
    try:
        while True:
            if chunks % COPY_EVERY == 0:
                # the learner may write meanwhile: a mixture of two successive updates is as good a policy as either
                network.load_state_dict(shared.state_dict())
            rows: list[dict[str, np.ndarray]] = []
            returns: list[float] = []
            for _ in range(CHUNK):
                with torch.no_grad():
                    action = network(torch.from_numpy(obs)).argmax(1).numpy()
                explored = generator.random(ENVS) < epsilon
                action[explored] = generator.integers(0, env.single_action_space.n, explored.sum())  # type: ignore[attr-defined]
                after, reward, terminated, truncated, info = env.step(action)
                next_obs, ended = after.copy(), terminated | truncated
                for place in np.flatnonzero(ended):
                    next_obs[place] = info["final_obs"][place]
                rows.append(
                    {"obs": obs, "action": action, "reward": reward.astype(np.float32), "next_obs": next_obs}
                    | {"terminated": terminated}
                )
                totals += reward
                returns += totals[ended].tolist()
                totals[ended] = 0.0
                obs = after
            sender.send(({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, returns))
            chunks += 1
    except (BrokenPipeError, KeyboardInterrupt):
        # the learner has closed the pipe, or Ctrl-C was sent to all processes
        pass


@dataclass
class Actors:
    """The actor processes, one pipe each."""

    env_id: str
    shared: nn.Sequential
    count: int
    seed: int = 0
    restarts: int = 0
    _running: dict[Any, tuple[int, BaseProcess]] = field(default_factory=dict)
    # actors that have sent a chunk since they were started
    _heard: set[int] = field(default_factory=set)

    def __enter__(self) -> Actors:
        for number in range(self.count):
            self._start(number)
        return self

    def _start(self, number: int) -> None:
        context = mp.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        epsilon = exploration(number, self.count)
        seed = self.seed + 1_000 * number + 100_000 * self.restarts
        process = context.Process(target=act, args=(self.env_id, self.shared, sender, epsilon, seed), daemon=True)
        process.start()
        # close the learner's copy, so that the pipe ends when the actor does
        sender.close()
        self._running[receiver] = number, process

    def receive(self, timeout: float) -> list[Any]:
        """Return the chunks that arrive within `timeout` seconds; actors that died are replaced.

        A chunk is the number of its actor, the transitions by field, and the returns of the episodes that ended.

        Raises RuntimeError if an actor ends before its first chunk, because its replacement would too.
        """
        found = []
        receiver: Any
        for receiver in wait(list(self._running), timeout):
            number, process = self._running[receiver]
            try:
                found.append((number, *receiver.recv()))
                self._heard.add(number)
            except (EOFError, OSError):
                del self._running[receiver]
                process.join()
                if number not in self._heard:
                    raise RuntimeError(f"actor {number} ended with exit code {process.exitcode} at once") from None
                print(f"actor {number} ended with exit code {process.exitcode}; another takes its place", flush=True)
                self._heard.remove(number)
                self.restarts += 1
                self._start(number)
        return found

    @property
    def processes(self) -> list[BaseProcess]:
        """The running processes."""
        return [process for _, process in self._running.values()]

    def __exit__(self, *_exception: object) -> None:
        for receiver, (_, process) in self._running.items():
            receiver.close()
            process.terminate()
            process.join()


def update(
    network: nn.Sequential, target: nn.Sequential, optimizer: torch.optim.Optimizer, buffer: ReplayBuffer
) -> None:
    """One step of double DQN on a prioritized batch."""
    batch = buffer.sample(BATCH)
    with torch.no_grad():
        best = network(batch.next_obs).argmax(1, keepdim=True)
        value = target(batch.next_obs).gather(1, best)[:, 0]
        wanted = batch.reward + GAMMA * value * ~batch.terminated
    error: Tensor = wanted - network(batch.obs).gather(1, batch.action[:, None])[:, 0]
    loss = (batch.weight * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    buffer.update_priorities(batch.key, error.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--actors", type=int, default=2, choices=range(1, 257), metavar="1..256")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--goal", type=float, default=475.0, help="stop when the mean of 50 episodes is this high")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)

    # actors read this copy; the learner's own network may be on a GPU
    shared = made_network(arguments.env_id).share_memory()
    network, target = (made_network(arguments.env_id).to(arguments.device) for _ in range(2))
    network.load_state_dict(shared.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    with gymnasium.make(arguments.env_id) as env:
        sampler = Proportional(alpha=0.6, beta=LinearSchedule(0.4, 1.0, arguments.updates))
        spaces = env.observation_space, env.action_space
        buffer = ReplayBuffer.from_spaces(200_000, *spaces, sampler=sampler, device=arguments.device)

    returns: list[float] = []
    start, updates = time.perf_counter(), 0
    with Actors(arguments.env_id, shared, arguments.actors, arguments.seed) as actors:
        while updates < arguments.updates:
            # the learner waits for actors only at the beginning
            for number, chunk, ended in actors.receive(timeout=0.0 if len(buffer) >= 1_000 else 1.0):
                buffer.add(**chunk)
                # the others explore more
                returns += ended if number == 0 else []
            if len(buffer) < 1_000:
                continue
            update(network, target, optimizer, buffer)
            updates += 1
            if updates % 10 == 0:
                shared.load_state_dict(network.state_dict())
            if updates % 250 == 0:
                target.load_state_dict(network.state_dict())
            if updates % 1_000 == 0:
                mean = float(np.mean(returns[-50:])) if returns else float("nan")
                print(
                    f"{updates:,} updates, {buffer.added:,} transitions, {time.perf_counter() - start:.0f} s: "
                    f"mean return of the greediest actor's last 50 episodes {mean:.1f}",
                    flush=True,
                )
                if mean >= arguments.goal:
                    break


if __name__ == "__main__":
    main()
