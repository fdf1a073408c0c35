"""Deep Q-learning on batches of NumPy arrays: how a drawn batch becomes a step of the network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_replay.study.methods import Drawn
from gpu_replay.study.network import Adam, Backward, Floats, Forward, Parameters
from gpu_replay.study.settings import AgentSettings


@dataclass(frozen=True)
class Learned:
    """What an update was like; overwritten by the next one.

    td_error: (B,) value of the chosen action minus its target.
    values:   (B, A) values of all actions in the drawn states, before the update.
    """

    td_error: Floats
    values: Floats


class Agent:
    """The online network, its target copy and their optimiser.

    inputs, actions: how many numbers the network sees, and how many actions it values.
    """

    def __init__(self, settings: AgentSettings, inputs: int, actions: int, seed: int) -> None:
        sizes = (inputs, *settings.hidden, actions)
        rows = settings.batch_size
        # goals that stand behind the observation are not scaled
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
        # the place of each row's first action in the flat values
        self._rows: NDArray[np.int64] = np.arange(rows) * actions

    def act(self, seen: Floats) -> int:
        """The action of the largest value, the first among equals."""
        np.multiply(seen, self._scale, out=self._one.inputs[0])
        return int(self._one.run().argmax())

    def copy_to_target(self) -> None:
        """Make the target network the online one as it is now."""
        self._target.copy_from(self.online)

    def learn(self, drawn: Drawn) -> Learned:
        """One step of Adam on the importance-weighted smooth L1 loss."""
        targets = self._next_values(drawn.next_inputs)
        targets *= drawn.discount
        targets += drawn.reward
        np.multiply(drawn.inputs, self._scale, out=self._now.inputs)
        values = self._now.run()
        chosen = self._rows + drawn.action
        td_error = values.take(chosen)
        td_error -= targets
        # the derivative of smooth L1 is its error, cut off at one
        slope = np.minimum(np.maximum(td_error, -1), 1)
        slope *= drawn.weight
        slope *= 1 / len(slope)
        outputs = self._backward.outputs
        outputs.fill(0)
        outputs.put(chosen, slope)
        self._adam.step(self._backward.run())
        return Learned(td_error, values)

    def _next_values(self, next_inputs: Floats) -> Floats:
        """(B,) what the target network says of the best next action."""
        np.multiply(next_inputs, self._scale, out=self._next.inputs)
        values = self._next.run()
        if self._next_online is None:
            return values.max(axis=1)
        np.copyto(self._next_online.inputs, self._next.inputs)
        return values.take(self._rows + self._next_online.run().argmax(axis=1))


def smooth_l1(errors: Floats) -> Floats:
    """Half the square up to an error of one, linear beyond: the loss whose mean `Agent.learn` lowers."""
    size = np.abs(errors)
    return np.where(size < 1, 0.5 * np.square(size), size - 0.5).astype(np.float32)
