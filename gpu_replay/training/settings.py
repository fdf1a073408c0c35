"""Every knob of the agent in one frozen dataclass, with the reason for its default.

The field defaults are those of Catch-sized problems; `PRESETS` says what each family of environments changes, and the
command line makes one flag of each field, so that a setting is written down exactly once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpu_replay.training.errors import UserError

Family = Literal["catch", "vector", "image", "atari", "atari-cuda"]


def knob(default: Any, reason: str, at_least: float | None = None, at_most: float | None = None) -> Any:
    """A dataclass field that knows why it has its default and which numbers make sense."""
    return dataclasses.field(default=default, metadata={"reason": reason, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class Settings:
    """How the agent learns. Raises UserError for a value outside its range."""

    steps: int = knob(25_000, "environment steps of the run, all environments together", 1)
    num_envs: int = knob(32, "environments stepped at once; their streams decorrelate each other", 1)
    capacity: int = knob(50_000, "transitions kept; old ones stay useful while rewards are rare", 1)
    warmup: int = knob(1_000, "transitions stored before learning starts, so that first batches are not all alike", 1)
    batch_size: int = knob(64, "transitions of one update", 1)
    updates: int = knob(2, "updates per step of all environments; more reuse costs time and gains little", 0)
    learning_rate: float = knob(1e-3, "Adam's step size at the start; a small MLP bears a large one", 0.0)
    learning_rate_end: float = knob(1e-3, "Adam's step size at the end of --steps, reached linearly", 0.0)
    adam_eps: float = knob(1.5e-4, "Rainbow's value: keeps rare gradients from making huge steps", 0.0)
    max_grad_norm: float = knob(10.0, "gradients are clipped to this norm, as in dueling networks", 0.0)
    gamma: float = knob(0.99, "discount per step", 0.0, 1.0)
    n_step: int = knob(3, "steps until bootstrapping: rewards travel faster, and the bias stays small", 1)
    double: bool = knob(True, "double Q-learning: the online network chooses, the target network values")
    dueling: bool = knob(True, "value and advantage are learned apart")
    network: Literal["mlp", "small", "nature"] = knob(
        "mlp", "mlp for vectors, small (conv 16/32/32) or nature (32/64/64) for images"
    )
    hidden: tuple[int, ...] = knob((128, 128), "widths of the fully connected layers")
    target_every: int = knob(200, "updates between copies to the target network", 1)
    target_tau: float = knob(1.0, "share of the online network in each copy; 1 is a hard copy", 0.0, 1.0)
    epsilon_start: float = knob(1.0, "share of random actions at the start", 0.0, 1.0)
    epsilon_end: float = knob(0.02, "share of random actions after --epsilon-steps", 0.0, 1.0)
    epsilon_steps: int = knob(10_000, "environment steps over which epsilon falls", 1)
    persistence: float = knob(0.0, "probability that a random action is repeated: swings build up", 0.0, 1.0)
    sampler: Literal["proportional", "uniform", "combined"] = knob("proportional", "how the replay buffer draws")
    alpha: float = knob(0.6, "how much priorities count: 0 is uniform, 1 fully proportional", 0.0)
    beta_start: float = knob(0.4, "importance correction at the start", 0.0)
    beta_end: float = knob(1.0, "importance correction at the end of --steps: unbiased when it matters most", 0.0)
    newest: int = knob(1, "newest transitions in every batch of the combined sampler", 1)
    clip_reward: bool = knob(False, "learn from the sign of rewards; returns are always reported unclipped")
    bfloat16: bool = knob(False, "convolutions in bfloat16 where the device computes in it; heads stay in float32")
    threads: int = knob(1, "torch threads on the CPU: spinning barriers ruin more threads when cores are shared", 1)
    frame_size: int = knob(84, "side of an Atari frame in pixels", 36)
    frame_stack: int = knob(4, "newest Atari frames that make one observation", 1)
    sticky: float = knob(0.0, "Atari: chance that the emulator repeats the last action (ALE's v5 ids: 0.25)", 0.0, 1.0)
    reduced_actions: bool = knob(True, "Pong: only NOOP, RIGHT, LEFT; the other three do the same")
    eval_every: int = knob(5_000, "environment steps between evaluations, by which the best network is kept", 1)
    eval_episodes: int = knob(256, "episodes of one evaluation, on seeds that training never sees", 1)
    eval_epsilon: float = knob(0.0, "share of random actions in evaluations", 0.0, 1.0)
    eval_max_steps: int = knob(10_000, "evaluation episodes are cut off after these steps", 1)
    early_stop: bool = knob(True, "stop when the environment is solved: two evaluations, the second a longer one")
    return_window: int = knob(100, "finished training episodes in the means of return and length", 1)
    log_every: int = knob(500, "environment steps between rows of progress.csv", 1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flag = f"--{field.name.replace('_', '-')}"
            if field.name == "hidden":
                if not value or any(width < 1 for width in value):
                    raise UserError(f"{flag} must name widths of at least 1, such as 128,128; found {value!r}.")
                continue
            if isinstance(value, (bool, str)):
                continue
            low, high = field.metadata["at_least"], field.metadata["at_most"]
            if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
                bound = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
                raise UserError(f"{flag} must be {bound}; found {value}.")
        if self.warmup > self.capacity:
            raise UserError(
                f"--warmup {self.warmup} does not fit in --capacity {self.capacity}: learning would never start."
            )
        if self.warmup < self.batch_size:
            raise UserError(f"--warmup {self.warmup} must be at least --batch-size {self.batch_size}.")
        if self.sampler == "combined" and self.newest > self.batch_size:
            raise UserError(f"--newest {self.newest} does not fit in --batch-size {self.batch_size}.")

    @property
    def planned_updates(self) -> int:
        """Updates of a run that uses all its steps."""
        learning_steps = max(0, self.steps - self.warmup)
        return max(1, learning_steps // self.num_envs * self.updates)

    def epsilon(self, step: int) -> float:
        """The share of random actions at environment step `step`."""
        progress = min(step / self.epsilon_steps, 1.0)
        return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * progress

    def learning_rate_at(self, step: int) -> float:
        """Adam's step size at environment step `step`."""
        progress = min(step / self.steps, 1.0)
        return self.learning_rate + (self.learning_rate_end - self.learning_rate) * progress

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, also after a trip through JSON. Raises UserError for unknown names."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"unknown settings: {', '.join(unknown)}.")
        plain: dict[str, Any] = dict(values)
        if "hidden" in plain:
            plain["hidden"] = tuple(plain["hidden"])
        return cls(**plain)

    @classmethod
    def for_family(cls, family: Family, **changes: Any) -> Settings:
        """The defaults of a family of environments, with `changes` on top."""
        return cls(**{**PRESETS[family], **changes})


# what the families change; an "atari-cuda" agent is an "atari" one with more of everything
_ATARI: dict[str, Any] = {
    "clip_reward": True,
    "n_step": 3,
    "hidden": (512,),
    "bfloat16": True,
    "target_every": 500,
    "epsilon_end": 0.05,
    "epsilon_steps": 250_000,
    "eval_epsilon": 0.01,
    "eval_max_steps": 6_000,
}
PRESETS: dict[Family, dict[str, Any]] = {
    # the run is short, and its end shows what the agent earns while it explores
    "catch": {"early_stop": False},
    "vector": {
        "steps": 200_000,
        "num_envs": 16,
        "capacity": 100_000,
        "batch_size": 128,
        "learning_rate_end": 1e-4,
        "eval_every": 10_000,
        "n_step": 10,
        "target_every": 100,
        "epsilon_steps": 40_000,
        "persistence": 0.8,
        "eval_episodes": 20,
        "log_every": 2_000,
    },
    "image": {
        **_ATARI,
        "steps": 1_000_000,
        "num_envs": 8,
        "warmup": 5_000,
        "updates": 1,
        "network": "nature",
        "learning_rate": 2.5e-4,
        "learning_rate_end": 1e-4,
        "clip_reward": False,
        "eval_every": 50_000,
        "eval_episodes": 10,
        "eval_max_steps": 2_000,
    },
    "atari": {
        **_ATARI,
        "steps": 3_000_000,
        "capacity": 200_000,
        "warmup": 10_000,
        "updates": 3,
        "learning_rate": 3e-4,
        "learning_rate_end": 3e-4,
        "network": "small",
        "frame_size": 42,
        "eval_every": 200_000,
        "eval_episodes": 10,
        "return_window": 30,
        "log_every": 5_000,
    },
    "atari-cuda": {
        **_ATARI,
        "steps": 3_000_000,
        "num_envs": 128,
        "capacity": 200_000,
        "warmup": 20_000,
        "batch_size": 256,
        "learning_rate": 2.5e-4,
        "learning_rate_end": 2.5e-4,
        "network": "nature",
        "epsilon_steps": 300_000,
        "eval_every": 250_000,
        "eval_episodes": 32,
        "log_every": 10_000,
    },
}
