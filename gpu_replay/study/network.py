"""A fully connected network with its gradient and Adam written out, for updates that cost 0.1 instead of 0.7 ms.

At a batch of 64 and 128 hidden units the arithmetic takes microseconds; what autograd and an optimiser of four tensors
cost is bookkeeping. Here all parameters are one vector, memory is taken once, and NumPy does what is small, as its
calls are cheaper; large products are torch's, as the threads of NumPy's cannot be set. Tests hold gradient and Adam
against `torch.autograd` and `torch.optim.Adam`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
# multiplications in a product that NumPy makes: a quarter of what lets its libraries start threads
_SMALL = 2**16


class Matrix:
    """Memory of float32 that torch and NumPy both see; `t` is its transpose."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.array = tensor, tensor.numpy()

    @property
    def t(self) -> Matrix:
        """The same memory, rows and columns exchanged."""
        return Matrix(self.tensor.t())


class Product:
    """`left @ right` put into `out`, three matrices that stay where they are while their numbers change."""

    def __init__(self, left: Matrix, right: Matrix, out: Matrix) -> None:
        self._left, self._right, self._out = left, right, out
        rows, inner = left.array.shape
        self._small = rows * inner * right.array.shape[1] <= _SMALL

    def __call__(self) -> None:
        """Make it."""
        if self._small:
            np.matmul(self._left.array, self._right.array, out=self._out.array)
        else:
            torch.mm(self._left.tensor, self._right.tensor, out=self._out.tensor)


class Parameters:
    """One vector of float32, seen as the weights (in, out) and biases (out,) of the layers.

    sizes: numbers of inputs, of each hidden layer's units and of outputs.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        pairs = list(pairwise(sizes))
        # memory of torch begins at whole cache lines: products may round by where their numbers lie
        vector = torch.zeros(sum((wide + 1) * high for wide, high in pairs))
        self.array: Floats = vector.numpy()
        self.weights: list[Matrix] = []
        self.biases: list[Floats] = []
        at = 0
        for wide, high in pairs:
            self.weights.append(Matrix(vector[at : at + wide * high].view(wide, high)))
            at += wide * high
            self.biases.append(self.array[at : at + high])
            at += high

    def draw(self, generator: np.random.Generator) -> None:
        """The initial values of `torch.nn.Linear`: uniform within 1 / sqrt(inputs), weights and biases."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.array.shape[0])
            for values in (weight.array, bias):
                values[...] = generator.uniform(-bound, bound, values.shape)

    def copy_from(self, other: Parameters) -> None:
        """Take the values of a network of the same sizes."""
        np.copyto(self.array, other.array)


class Forward:
    """The network at work on batches of `rows`; each call overwrites what the last one returned.

    `inputs` is the memory in which a batch is put before `run`.
    """

    def __init__(self, parameters: Parameters, rows: int) -> None:
        self.parameters = parameters
        self.layers = [Matrix(torch.zeros(rows, size)) for size in parameters.sizes]
        self.inputs: Floats = self.layers[0].array
        self.outputs: Floats = self.layers[-1].array
        *self._hidden, self._last = [
            (Product(before, weight, after), bias, after.array)
            for (before, after), weight, bias in zip(
                pairwise(self.layers), parameters.weights, parameters.biases, strict=True
            )
        ]

    def run(self) -> Floats:
        """(rows, outputs) of what stands in `inputs`."""
        for product, bias, values in self._hidden:
            product()
            np.add(values, bias, out=values)
            np.maximum(values, 0, out=values)
        product, bias, values = self._last
        product()
        return np.add(values, bias, out=values)


class Backward:
    """The gradient of what a `Forward` has just computed.

    `outputs` is the memory in which the derivatives of the loss by the outputs, (rows, outputs), are put before `run`.
    """

    def __init__(self, forward: Forward) -> None:
        layers, weights = forward.layers, forward.parameters.weights
        self._gradient = Parameters(forward.parameters.sizes)
        errors = [Matrix(torch.zeros_like(layer.tensor)) for layer in layers]
        self.outputs: Floats = errors[-1].array
        # from the last layer to the first: the gradient of its weights and biases, and the errors of the layer before
        self._steps = [
            (
                Product(layers[index].t, errors[index + 1], self._gradient.weights[index]),
                errors[index + 1].array,
                self._gradient.biases[index],
                Product(errors[index + 1], weights[index].t, errors[index]),
                errors[index].array,
                layers[index].array,
            )
            for index in range(len(weights) - 1, -1, -1)
        ]

    def run(self) -> Floats:
        """The derivatives of the loss by all parameters, given those by the outputs in `outputs`."""
        *above, (first, errors, bias, *_) = self._steps
        for by_weights, later, by_bias, by_layer, earlier, values in above:
            by_weights()
            np.add.reduce(later, axis=0, out=by_bias)
            by_layer()
            # where a unit is cut off nothing passes
            np.multiply(earlier, values > 0, out=earlier)
        first()
        np.add.reduce(errors, axis=0, out=bias)
        return self._gradient.array


class Adam:
    """Kingma and Ba 2015, "Adam", Algorithm 1, with the defaults of `torch.optim.Adam`."""

    def __init__(self, parameters: Parameters, learning_rate: float) -> None:
        self._values = parameters.array
        self._rate = learning_rate
        self._first = np.zeros_like(self._values)
        self._second = np.zeros_like(self._values)
        self._work = np.zeros_like(self._values)
        self._steps = 0

    def step(self, gradient: Floats) -> None:
        """Move the parameters once."""
        self._steps += 1
        first, second, work = self._first, self._second, self._work
        np.subtract(gradient, first, out=work)
        work *= 1 - 0.9
        first += work
        second *= 0.999
        np.multiply(gradient, gradient, out=work)
        work *= 1 - 0.999
        second += work
        np.sqrt(second, out=work)
        work *= 1 / math.sqrt(1 - 0.999**self._steps)
        work += 1e-8
        np.divide(first, work, out=work)
        work *= self._rate / (1 - 0.9**self._steps)
        self._values -= work
