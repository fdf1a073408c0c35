"""Deep Q-learning on batches of NumPy arrays: the network's update from a batch, and epsilon-greedy exploration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.methods import Minibatch
from gpu_replay.study.network import Adam, Backward, Floats, Forward, Parameters
from gpu_replay.study.settings import AgentSettings


class Agent:
    """The online network, its target copy and their optimiser.

    inputs, actions: number of the network's inputs and of its outputs.
    """

    def __init__(self, settings: AgentSettings, inputs: int, actions: int, seed: int) -> None:
        sizes = (inputs, *settings.hidden, actions)
        rows = settings.batch_size
        # goals, which follow the observation, are not scaled
        self._scale = np.ones(inputs, dtype=np.float32)
        if settings.scale is not None:
            self._scale[: len(settings.scale)] = settings.scale
        self._double = settings.double
        self.online = Parameters(sizes)
        self.online.draw(np.random.default_rng(seed))
        self._target = Parameters(sizes)
        self.copy_to_target()
        self._one = Forward(self.online, 1)
        self._now = Forward(self.online, rows)
        self._next = Forward(self._target, rows)
        self._next_online = Forward(self.online, rows) if self._double else None
        self._backward = Backward(self._now)
        self._adam = Adam(self.online, settings.learning_rate)
        # index of each row's first action in the flattened values
        self._rows: NDArray[np.int64] = np.arange(rows) * actions

    def act(self, inputs: Floats) -> int:
        """The action with the largest value; the first one if several are equal."""
        np.multiply(inputs, self._scale, out=self._one.inputs[0])
        return int(self._one.run().argmax())

    def copy_to_target(self) -> None:
        """Copy the online network's parameters to the target network."""
        np.copyto(self._target.array, self.online.array)

    def update(self, batch: Minibatch) -> tuple[Floats, Floats]:
        """One step of Adam on the importance-weighted smooth L1 loss.

        returns: (B,) value of the chosen action minus its target, and (B,) the best value, max over actions of Q, of
                 each sampled state; both before the update.
        """
        targets = self._next_values(batch.next_inputs)
        targets *= batch.discount
        targets += batch.reward
        np.multiply(batch.inputs, self._scale, out=self._now.inputs)
        values = self._now.run()
        chosen = self._rows + batch.action
        td_error = values.take(chosen)
        td_error -= targets
        # the derivative of smooth L1 is the error, clipped at one
        slope = np.minimum(np.maximum(td_error, -1), 1)
        slope *= batch.weight
        slope *= 1 / len(slope)
        outputs = self._backward.outputs
        outputs.fill(0)
        outputs.put(chosen, slope)
        self._adam.step(self._backward.run())
        return td_error, values.max(axis=1)

    def _next_values(self, next_inputs: Floats) -> Floats:
        """(B,) the target network's value of the best next action."""
        np.multiply(next_inputs, self._scale, out=self._next.inputs)
        values = self._next.run()
        if self._next_online is None:
            return values.max(axis=1)
        np.copyto(self._next_online.inputs, self._next.inputs)
        return values.take(self._rows + self._next_online.run().argmax(axis=1))


def smooth_l1(errors: Floats) -> Floats:
    """Half the square up to an error of one, linear beyond: the loss whose mean `Agent.update` lowers."""
    size = np.abs(errors)
    return np.where(size < 1, 0.5 * np.square(size), size - 0.5).astype(np.float32)


class Explorer:
    """Epsilon-greedy exploration: random actions, repeated with probability `persistence`.

    The share of random actions is `epsilon`, whatever the persistence. Where a system must be made to swing,
    independent random actions cancel out: of 60 random episodes of MountainCar-v0 none reached the flag, and 6 did
    when each action was repeated with probability 0.95. The tutorial's agent does not repeat actions.

    Dabney et al. 2021, "Temporally-Extended Epsilon-Greedy Exploration", with a geometric duration.
    """

    def __init__(self, actions: int, persistence: float, seed: int) -> None:
        self._actions = actions
        self._persistence = persistence
        self._generator = np.random.default_rng(seed)
        self._repeated: int | None = None

    def choose(self, epsilon: float) -> int | None:
        """A random action, or None for the greedy one."""
        chance = self._generator.random
        if self._repeated is not None and chance() < self._persistence:
            return self._repeated
        self._repeated = None
        # exploration begins with the probability that makes a share `epsilon` of all steps exploring ones
        begin = epsilon * (1 - self._persistence) / (1 - epsilon * self._persistence)
        if chance() >= begin:
            return None
        found = int(self._generator.integers(self._actions))
        if self._persistence:
            self._repeated = found
        return found
