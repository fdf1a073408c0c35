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

from gpu_replay.console.errors import UserError

Family = Literal["catch", "vector", "image", "atari", "atari-cuda"]


def knob(default: Any, reason: str, at_least: int | None = None, at_most: int | None = None) -> Any:
    """A dataclass field that knows why it has its default and which numbers make sense."""
    return dataclasses.field(default=default, metadata={"reason": reason, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class Settings:
    """How the agent learns. Raises UserError for a value outside its range."""

    steps: int = knob(25_000, "environment steps of the run, all environments together", 1)
    num_envs: int = knob(32, "environments stepped at once; their streams decorrelate each other", 1)
    capacity: int = knob(50_000, "transitions kept; old ones stay useful while rewards are rare", 1, 2**31 - 1)
    warmup: int = knob(1_000, "transitions stored before learning starts, so that first batches are not all alike", 1)
    batch_size: int = knob(64, "transitions of one update", 1)
    updates: int = knob(2, "updates per step of all environments; more reuse costs time and gains little", 0)
    shared_draw: bool = knob(
        False, "one sample draws the batches of all updates of a step: less work, and their priorities come together"
    )
    learning_rate: float = knob(1e-3, "Adam's step size at the start; a small MLP bears a large one", 0)
    learning_rate_end: float = knob(1e-3, "Adam's step size at the end of --steps, reached linearly", 0)
    adam_eps: float = knob(1.5e-4, "Rainbow's value: keeps rare gradients from making huge steps", 0)
    max_grad_norm: float = knob(10.0, "gradients are clipped to this norm, as in dueling networks", 0)
    gamma: float = knob(0.99, "discount per step", 0, 1)
    n_step: int = knob(3, "steps until bootstrapping: rewards travel faster, and the bias stays small", 1)
    double: bool = knob(True, "double Q-learning: the online network chooses, the target network values")
    dueling: bool = knob(True, "value and advantage are learned apart")
    network: Literal["mlp", "compact", "small", "nature"] = knob(
        "mlp", "mlp for vectors; compact (conv 16/32), small (16/32/32) or nature (32/64/64) for images"
    )
    hidden: tuple[int, ...] = knob((128, 128), "widths of the fully connected layers")
    layer_norm: bool = knob(False, "LayerNorm before each ReLU of the fully connected layers, as in PQN")
    whiten: bool = knob(
        False, "images: the mean image of the warm-up is subtracted, and what moves is scaled to a deviation of 1"
    )
    target_every: int = knob(200, "updates between copies to the target network", 1)
    target_tau: float = knob(1.0, "share of the online network in each copy; 1 is a hard copy", 0, 1)
    epsilon_start: float = knob(1.0, "share of random actions at the start", 0, 1)
    epsilon_end: float = knob(0.02, "share of random actions after --epsilon-steps", 0, 1)
    epsilon_steps: int = knob(10_000, "environment steps over which epsilon falls", 1)
    epsilon_late: float = knob(1.0, "share of --epsilon-end that is left after --epsilon-late-steps", 0, 1)
    epsilon_late_steps: int = knob(1_000_000, "environment steps until then, falling linearly after --epsilon-steps", 1)
    persistence: float = knob(0.0, "probability that a random action is repeated: swings build up", 0, 1)
    sampler: Literal["proportional", "uniform", "combined", "rank"] = knob(
        "proportional", "how the replay buffer draws"
    )
    alpha: float = knob(0.6, "how much priorities count: 0 is uniform, 1 fully proportional", 0)
    beta_start: float = knob(0.4, "importance correction at the start", 0)
    beta_end: float = knob(1.0, "importance correction at the end of --steps: unbiased when it matters most", 0)
    newest: int = knob(1, "newest transitions in every batch of the combined sampler", 1)
    clip_reward: bool = knob(False, "learn from the sign of rewards; returns are always reported unclipped")
    bfloat16: bool = knob(False, "convolutions in bfloat16 where the device computes in it; heads stay in float32")
    graph: bool = knob(True, "CUDA: an update is captured as one graph, or some hundred launches would take its time")
    threads: int = knob(1, "torch threads on the CPU: spinning barriers ruin more threads when cores are shared", 1)
    frame_size: int = knob(84, "side of an Atari frame in pixels", 36)
    frame_stack: int = knob(4, "newest Atari frames that make one observation", 1)
    sticky: float = knob(0.0, "Atari: chance that the emulator repeats the last action (ALE's v5 ids: 0.25)", 0, 1)
    reduced_actions: bool = knob(True, "Pong: only NOOP, RIGHT, LEFT; the other three do the same")
    eval_every: int = knob(5_000, "environment steps between evaluations, by which the best network is kept", 1)
    eval_episodes: int = knob(256, "episodes of one evaluation, on seeds that training never sees", 1)
    eval_epsilon: float = knob(0.0, "share of random actions in evaluations", 0, 1)
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
                bound = f"at least {low:,}" if high is None else f"from {low:,} to {high:,}"
                raise UserError(f"{flag} must be {bound}; found {value}.")
        if self.warmup > self.capacity:
            raise UserError(
                f"--warmup {self.warmup} does not fit in --capacity {self.capacity}: learning would never start."
            )
        # steps whose windows are open, or whose stacks are partly overwritten
        unusable = (self.n_step + self.frame_stack) * self.num_envs
        if self.warmup + unusable > self.capacity:
            raise UserError(
                f"--warmup {self.warmup} does not fit in --capacity {self.capacity}: with --num-envs {self.num_envs}, "
                f"--n-step {self.n_step} and --frame-stack {self.frame_stack} up to {unusable} steps cannot be drawn."
            )
        drawn = self.batch_size * self.updates_a_sample
        if self.warmup < drawn:
            what = "--batch-size" if drawn == self.batch_size else "--batch-size times --updates, with --shared-draw,"
            raise UserError(f"--warmup {self.warmup} must be at least {what} {drawn}.")
        if self.sampler == "combined" and self.newest > self.batch_size:
            raise UserError(f"--newest {self.newest} does not fit in --batch-size {self.batch_size}.")

    @property
    def updates_a_sample(self) -> int:
        """Updates that learn from what one call of `sample` draws."""
        return max(1, self.updates) if self.shared_draw else 1

    @property
    def planned_updates(self) -> int:
        """Updates of a run that uses all its steps."""
        learning_steps = max(0, self.steps - self.warmup)
        return max(1, learning_steps // self.num_envs * self.updates)

    def epsilon(self, step: int) -> float:
        """The share of random actions at environment step `step`."""
        if step < self.epsilon_steps:
            return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * step / self.epsilon_steps
        late = min((step - self.epsilon_steps) / max(self.epsilon_late_steps - self.epsilon_steps, 1), 1.0)
        return self.epsilon_end * (1 + (self.epsilon_late - 1) * late)

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


# what the families change, each line with its reason
_IMAGES: dict[str, Any] = {
    "hidden": (512,),  # as in DQN (Mnih et al. 2015)
    "bfloat16": True,  # a quarter less time; the best action differs in 2% of states, all near ties
    "target_every": 500,  # with a small step size the target may lag longer
    "epsilon_end": 0.05,  # below that, Pong ends in endless rallies until the score is positive
    "eval_epsilon": 0.01,  # a greedy policy can go in circles for ever
    "eval_episodes": 10,  # whole games are long
}
_ATARI: dict[str, Any] = {
    **_IMAGES,
    "steps": 2_000_000,  # Pong is won after one to two million
    "clip_reward": True,  # one step size for all games (Mnih et al. 2015)
    "capacity": 200_000,  # more does not help Pong
    "learning_rate": 5e-4,  # on the CPU Pong passed 0 after 820,000 steps; a run with 1e-3 was behind
    "learning_rate_end": 5e-5,  # with 3e-4 after a million steps Pong went up and down between +4 and +12
    "n_step": 10,  # the point comes twenty steps after the stroke that decides it
    "layer_norm": True,  # part of the recipe that the step size was tried with
    "whiten": True,  # Pong's moving pixels have a deviation of 0.034 around its mean image
    "target_every": 200,  # part of that recipe too
    "epsilon_late": 0.2,  # the last 0.04 cost a network of 800,000 steps about four points
    "eval_max_steps": 6_000,  # long rallies of an agent that cannot score yet say nothing new
}
PRESETS: dict[Family, dict[str, Any]] = {
    "catch": {
        "early_stop": False,  # the run is short, and its end shows what the agent earns while it explores
    },
    "vector": {
        "steps": 200_000,  # five seeds of CartPole needed 10,000 to 50,000, MountainCar up to 100,000
        "num_envs": 16,  # they are stepped one after another, in this process
        "capacity": 100_000,  # half of the run
        "batch_size": 128,  # with two updates sixteen samples a step
        "learning_rate_end": 1e-4,  # calmer at the end, where CartPole then stays at 500
        "n_step": 10,  # values near 100 must be learned from rewards of 1: three steps took far longer
        "target_every": 100,  # short runs need fresh targets
        "epsilon_steps": 40_000,  # Acrobot reaches its goal by chance before that
        "persistence": 0.8,  # without it Acrobot and MountainCar never reach their goals
        "eval_every": 10_000,  # an evaluation takes a second
        "eval_episodes": 20,  # what thresholds are usually judged by
        "log_every": 2_000,  # about a row a second
    },
    "image": {
        **_IMAGES,
        "steps": 1_000_000,  # hours on a CPU
        "num_envs": 8,  # simulators with pictures are slow
        "warmup": 5_000,  # a few episodes
        "updates": 1,  # eight samples a step, as for Atari
        "network": "nature",  # for pictures of any size from 36 pixels
        "learning_rate": 2.5e-4,  # Fast Rainbow (Schmidt and Schmied 2021)
        "learning_rate_end": 1e-4,  # calmer at the end
        "epsilon_steps": 100_000,  # a tenth of the run
        "eval_every": 50_000,  # twenty times in a run
        "eval_max_steps": 2_000,  # a thousand steps are usual
    },
    "atari": {
        **_ATARI,
        "warmup": 10_000,  # ten games of Pong
        "updates": 3,  # six samples a step: fewer delay the take-off, more only cost time
        "shared_draw": True,  # three draws took 8% of the loop, one that serves all three updates 5%
        "network": "compact",  # an update takes 9 ms of one core, small with 512 units 14 to 18
        "hidden": (256,),  # half the size of the largest layer; it won Pong
        "frame_size": 42,  # a third of the work of 84, and the ball is still there
        "epsilon_steps": 100_000,  # games get longer from then on
        "eval_every": 200_000,  # some minutes
        "return_window": 30,  # games; a hundred would look too far back
        "log_every": 5_000,  # every few seconds
    },
    "atari-cuda": {
        **_ATARI,
        "num_envs": 128,  # keeps sixteen cores busy
        "warmup": 20_000,  # twenty games of Pong
        "batch_size": 256,  # below that a GPU waits for launches
        "updates": 4,  # eight samples a step
        "network": "nature",  # the usual one for 84 pixels
        "epsilon_steps": 300_000,  # when the first games get longer
        "eval_every": 250_000,  # about every half minute
        "eval_episodes": 32,  # they run side by side
        "log_every": 10_000,  # about a row a second
    },
}
