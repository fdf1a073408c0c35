"""All hyperparameters of the agent in one frozen dataclass, each with the reason for its default.

The defaults of the fields suit problems of the size of Catch; `PRESETS` holds what other families of environments
change, and `ENVIRONMENTS` what single ones do. The command line derives one flag from each field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gpu_replay.console.errors import UserError

Family = Literal["catch", "device-pong", "vector", "image", "atari", "atari-cuda", "device-pong-cuda"]


def setting(default: Any, reason: str, at_least: float | None = None, at_most: float | None = None) -> Any:
    """A dataclass field with the reason for its default and its range."""
    return dataclasses.field(default=default, metadata={"reason": reason, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class Settings:
    """How the agent learns. Raises UserError for a value outside its range."""

    steps: int = setting(25_000, "environment steps of the run, all environments together", 1)
    num_envs: int = setting(32, "environments stepped in parallel; their streams decorrelate each batch", 1)
    capacity: int = setting(50_000, "transitions kept; old ones remain useful while rewards are rare", 1, 2**31 - 1)
    warmup: int = setting(1_000, "transitions stored before learning starts, so that the first batches are diverse", 1)
    batch_size: int = setting(64, "transitions of one update", 1)
    updates: int = setting(2, "updates per step of all environments; more cost time and gain little", 0, 10**6)
    shared_draw: bool = setting(False, "one call of sample for all updates of a step: less work, but older priorities")
    learning_rate: float = setting(1e-3, "Adam's step size at the start; a small MLP tolerates a large one", 0)
    learning_rate_end: float = setting(1e-3, "Adam's step size at the end of --steps, reached linearly", 0)
    adam_eps: float = setting(1.5e-4, "Rainbow's value: prevents huge steps on rare gradients", 0)
    gamma: float = setting(0.99, "discount per step", 0, 1)
    n_step: int = setting(3, "steps until bootstrapping: rewards propagate faster, and the bias stays small", 1)
    network: Literal["mlp", "cosine", "fine", "nature"] = setting(
        "mlp", "mlp for vectors; for images cosine (an MLP on low frequencies), fine or nature (convolutions)"
    )
    hidden: tuple[int, ...] = setting((128, 128), "widths of the fully connected layers")
    layer_norm: bool = setting(False, "LayerNorm before each ReLU of the fully connected layers, as in PQN")
    whiten: bool = setting(False, "images: subtract the warm-up's mean and scale to a deviation of 1")
    target_every: int = setting(200, "updates between copies to the target network", 1)
    ema_updates: int = setting(0, "updates over which evaluated weights are averaged, exponentially; 0: the latest", 0)
    epsilon_start: float = setting(1.0, "share of random actions at the start", 0, 1)
    epsilon_end: float = setting(0.02, "share of random actions after --epsilon-steps", 0, 1)
    epsilon_steps: int = setting(10_000, "environment steps over which epsilon falls", 1)
    epsilon_late: float = setting(1.0, "share of --epsilon-end that remains after --epsilon-late-steps", 0, 1)
    epsilon_late_steps: int = setting(1_000_000, "environment steps until then; linear after --epsilon-steps", 1)
    persistence: float = setting(0.0, "probability that a random action is repeated: swings build up", 0, 1)
    sampler: Literal["proportional", "uniform", "combined", "rank"] = setting(
        "proportional", "how the replay buffer samples"
    )
    alpha: float = setting(0.6, "exponent of priorities: 0 is uniform, 1 fully proportional", 0)
    beta_start: float = setting(0.4, "importance-sampling exponent at the start", 0)
    beta_end: float = setting(1.0, "importance-sampling exponent at the end of --steps: unbiased near convergence", 0)
    clip_reward: bool = setting(False, "learn from the sign of rewards; reported returns are never clipped")
    end_on_reward: bool = setting(False, "learn each reward as the last of its episode, as wrappers do with lost lives")
    advantage_learning: float = setting(
        0.0, "share of an action's gap to the best one that is taken off its target", 0, 0.99
    )
    bfloat16: bool | None = setting(False, "all but the last layer in bfloat16; auto: where the device has it")
    graph: bool = setting(True, "CUDA: an update, or a whole step of games on the device, is one graph of launches")
    threads: int = setting(1, "torch threads on the CPU; more are slower on shared cores", 1, 1024)
    frame_size: int = setting(84, "side of an Atari frame in pixels", 36, 1024)
    frame_stack: int = setting(1, "newest frames of Atari or device-pong stacked into one observation", 1)
    sticky: float = setting(0.0, "Atari: probability that the emulator repeats an action (ALE's v5 ids: 0.25)", 0, 1)
    eval_every: int = setting(5_000, "environment steps between evaluations, which choose the best network", 1)
    eval_from: float | None = setting(None, "return of training from which to evaluate, in Pong by its latest points")
    eval_episodes: int = setting(256, "episodes of one evaluation, on seeds that training never uses", 1, 10**6)
    eval_epsilon: float = setting(0.0, "share of random actions in evaluations", 0, 1)
    eval_max_steps: int = setting(10_000, "limit on the steps of an evaluation episode", 1)
    early_stop: bool = setting(True, "stop when solved: two evaluations reach the threshold, one on fresh seeds")
    stop_at: float | None = setting(None, "mean return at which it is solved; auto: what the environment itself says")
    return_window: int = setting(100, "finished training episodes in the reported means of return and length", 1, 10**6)
    log_every: int = setting(500, "environment steps between rows of progress.csv", 1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _wanted(value, TYPES[field.name], field.metadata["at_least"], field.metadata["at_most"])
            if wanted:
                raise UserError(f"--{field.name.replace('_', '-')} must be {wanted}; found {value!r}.")
        if self.persistence == 1:
            raise UserError("--persistence must be less than 1: the first random action would be repeated for ever.")
        # steps whose windows are incomplete, or whose stacks are partly overwritten
        unusable = (self.n_step + self.frame_stack) * self.num_envs
        if self.warmup + unusable > self.capacity:
            given = f"--num-envs {self.num_envs}, --n-step {self.n_step} and --frame-stack {self.frame_stack}"
            problem = (
                f"does not fit in --capacity {self.capacity}: with {given} up to {unusable} steps cannot be sampled"
            )
            raise UserError(f"--warmup {self.warmup} {problem}.")
        drawn = self.batch_size * self.updates_a_sample
        if self.warmup < drawn:
            what = "--batch-size" if drawn == self.batch_size else "--batch-size times --updates, with --shared-draw,"
            raise UserError(f"--warmup {self.warmup} must be at least {what} {drawn}.")

    @property
    def updates_a_sample(self) -> int:
        """Updates that share one call of `sample`."""
        return max(1, self.updates) if self.shared_draw else 1

    def lines(self) -> list[str]:
        """A line for each setting: its flag, its value, and the reason for its default."""
        found = [(_flag(each.name, getattr(self, each.name)), each) for each in dataclasses.fields(self)]
        width = max(len(flag) for flag, _ in found)
        return [f"{flag:<{width}}  {each.metadata['reason']}" for flag, each in found]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, also through JSON. Raises UserError for unknown names and values of other types."""
        unknown = sorted(set(values) - set(TYPES))
        if unknown:
            raise UserError(f"unknown settings: {', '.join(unknown)}.")
        # JSON has no tuples
        plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**plain)

    @classmethod
    def for_family(cls, family: Family, **changes: Any) -> Settings:
        """The defaults of a family of environments, with `changes` on top."""
        return cls(**{**PRESETS[family], **changes})


# the type of each setting: a Python type, which may allow None, a Literal, or a tuple of widths
TYPES: dict[str, Any] = get_type_hints(Settings)


def without_none(kind: Any) -> Any:
    """`bool` of `bool | None`."""
    return next(each for each in get_args(kind) if each is not NoneType) if NoneType in get_args(kind) else kind


def _flag(name: str, value: Any) -> str:
    """A setting as it is given on the command line; auto stands for None, which is given by no flag."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else "auto" if value is None else value
    return f"--{flag} {shown}"


def _wanted(value: Any, kind: Any, low: float | None, high: float | None) -> str:
    """What a setting of this type must be, or "" if `value` is valid."""
    if value is None and NoneType in get_args(kind):
        return ""
    kind = without_none(kind)
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        fits = isinstance(value, tuple) and value and all(type(each) is int and 1 <= each <= 65_536 for each in value)
        return "" if fits else "widths from 1 to 65,536, such as 128,128"
    # an int also counts as a float, but a bool does not count as an int
    if type(value) is not kind and (type(value), kind) != (int, float):
        return f"of type {kind.__name__}"
    # what counters and schedules can hold
    limit = 10**15 if kind is int else 1e100
    if kind is bool or (-limit if low is None else low) <= value <= (limit if high is None else high):
        return ""
    if high is not None:
        return f"from {low:,} to {high:,}"
    return f"at least {low}" if low is not None and value < low else f"finite and no larger than {limit:.0e}"


# what each family changes, and why
_PIXELS: dict[str, Any] = {
    "capacity": 200_000,  # two hundred games; more does not help Pong
    "layer_norm": True,  # the step sizes were tuned with it
    "whiten": True,  # Pong's moving pixels have a deviation of 0.034 around its mean image
    "adam_eps": 1e-5,  # 1.5e-4 exceeded the root of the second moment of all weights of Pong's largest layer
}
_SMALL: dict[str, Any] = {
    "shared_draw": True,  # three draws took 8% of the loop, one shared draw 5%
    "frame_size": 42,  # a third of the work of 84, and the ball is still visible
    "eval_episodes": 30,  # of ten the luckiest network was chosen, not the best
    "return_window": 30,  # games; a hundred would lag too far behind
    "log_every": 5_000,  # every few seconds
}
_IMAGES: dict[str, Any] = {
    "hidden": (512,),  # as in DQN (Mnih et al. 2015)
    "bfloat16": None,  # the best action differs in 2% of states, where values nearly tie
    "target_every": 500,  # with a small step size the target may lag more
    "epsilon_end": 0.05,  # below that, Pong gets stuck in endless rallies until the score is positive
    "eval_epsilon": 0.01,  # a greedy policy can loop forever
    "eval_episodes": 10,  # whole games are long
}
_ATARI: dict[str, Any] = {
    **_IMAGES,
    **_PIXELS,
    **_SMALL,
    "steps": 1_500_000,  # one and a half times what Pong needed with the slowest of ten seeds
    "num_envs": 64,  # emulators run while the network learns
    "batch_size": 128,  # with 64, by 32 emulators, the median run of Pong needed twice as many updates
    "updates": 3,  # six samples a step: with fewer learning starts later, more only cost time
    "frame_stack": 4,  # as in DQN
    "clip_reward": True,  # one step size for all games (Mnih et al. 2015)
    "learning_rate": 3.5e-4,  # that of batches of 64, 2.5e-4, times the root of two
    "learning_rate_end": 2e-5,  # with 3e-4 after a million steps Pong fluctuated between +4 and +12
    "ema_updates": 1_000,  # about 20,000 steps: single networks of the same minute differ by ten points
    "n_step": 10,  # a point is scored twenty steps after the stroke that decides it
    "target_every": 200,  # and with this
    "epsilon_late": 0.2,  # the last 0.04 cost the network of 800,000 steps about four points
    "eval_max_steps": 6_000,  # ends the long rallies of an agent that cannot score yet
    "warmup": 10_000,  # ten games of Pong
    "network": "fine",  # with a stride of 2 it left 3x3 cells of 42 pixels, and Pong stayed near +10
    "hidden": (128,),  # a quarter of the parameters of 512 in the largest layer, and Pong needs no more steps
    "epsilon_steps": 100_000,  # games get longer from then on
    "eval_every": 50_000,  # half a minute of Pong on two cores
    "eval_episodes": 20,  # as long; with 30 they took a quarter of the fastest run
}
_DEVICE_PONG: dict[str, Any] = {
    **_PIXELS,
    "network": "cosine",  # +15 after 30,000 updates where an MLP on pixels had -4, and networks of convolutions less
    "hidden": (256, 128),  # twice as many learned no faster in a test with known values
    "frame_stack": 2,  # older frames add nothing
    "n_step": 5,  # half of a slow ball's flight from paddle to paddle
    "learning_rate_end": 5e-5,  # less noise at the end
    "ema_updates": 500,  # single networks of the same minute differ by six points
    "eval_max_steps": 4_000,  # a perfect player needs a thousand
}
PRESETS: dict[Family, dict[str, Any]] = {
    "catch": {
        "early_stop": False  # the run is short, and its end shows the return while exploring
    },
    "device-pong": {
        **_DEVICE_PONG,
        **_SMALL,
        "steps": 400_000,  # some four minutes on one core
        "num_envs": 16,  # stepping them takes a tenth of the loop
        "warmup": 5_000,  # a dozen games
        "epsilon_steps": 50_000,  # the first balls are returned from then on
        "eval_every": 50_000,  # every half minute
    },
    "vector": {
        "steps": 200_000,  # five seeds of CartPole needed 10,000 to 50,000, MountainCar up to 100,000
        "num_envs": 16,  # stepped one after another, in this process
        "capacity": 100_000,  # half of the run
        "batch_size": 128,  # with two updates sixteen samples a step
        "learning_rate_end": 1e-4,  # so that CartPole stays at 500 at the end
        "n_step": 10,  # values near 100 are learned from rewards of 1: three steps took far longer
        "target_every": 100,  # short runs need fresh targets
        "epsilon_steps": 40_000,  # Acrobot reaches its goal by chance before that
        "persistence": 0.8,  # without it Acrobot and MountainCar never reach their goals
        "eval_every": 10_000,  # an evaluation takes a second
        "eval_episodes": 20,  # usual for judging thresholds
        "log_every": 2_000,  # about a row a second
    },
    "image": {
        **_IMAGES,
        "steps": 1_000_000,  # hours on a CPU
        "num_envs": 8,  # simulators that render are slow
        "warmup": 5_000,  # a few episodes
        "updates": 1,  # eight samples a step, as for Atari
        "network": "nature",  # for images of 36 pixels and more
        "learning_rate": 2.5e-4,  # Fast Rainbow (Schmidt and Schmied 2021)
        "learning_rate_end": 1e-4,  # less noise at the end
        "epsilon_steps": 100_000,  # a tenth of the run
        "eval_every": 50_000,  # twenty times in a run
        "eval_max_steps": 2_000,  # a thousand steps are usual
    },
    "atari": _ATARI,
    # not tried on a GPU yet. With 84 pixels, batches of 256 and 128 emulators an H200 was after 51,000 updates where
    # runs on a CPU are after 31,000 to 56,000 of 64 rows: their number takes the time, 1.2 ms each, not their size
    "atari-cuda": {
        **_ATARI,
        "log_every": 25_000,  # a row waits for the device
    },
    "device-pong-cuda": {
        **_DEVICE_PONG,
        "steps": 4_000_000,  # an H200 needed 1.5M
        "num_envs": 1_024,  # stepping them costs about what stepping one does
        "warmup": 50_000,  # fifty steps of each game
        "batch_size": 512,  # smaller batches are bound by launches
        "updates": 8,  # four samples a step
        "epsilon_steps": 400_000,  # a tenth of the run
        "frame_size": 42,  # as on a CPU: the cosine transform reads a quarter
        "shared_draw": True,  # one draw, gather and priority update for the eight updates of a step
        "eval_every": 100_000,  # some steps of all games; an evaluation takes less time than they do
        "eval_from": 12.0,  # a weak player's games are long
        "return_window": 30,  # games
        "log_every": 500_000,  # a row takes 10 to 15 ms by calculation, and an eager step after it
    },
}
# what single environments change of their family
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "pong": {
        "end_on_reward": True,  # a point says nothing of the next: three seeds needed 0.6 to 0.9 of the steps
        "advantage_learning": 0.9,  # six seeds came to +5 within 270,000 steps; without, two of six did
        "eval_from": 15.0,  # of evaluations that began below it 11 of 57 were wins, above it 10 of 27
    },
    # with those of its family it hovered at -50 until the time limit, after 200,000 steps and with each of seven seeds;
    # these were tried together, with a seed of their own
    "LunarLander-v3": {
        "steps": 300_000,  # twice what solved it in the median
        "n_step": 1,  # as usual for it
        "updates": 8,  # an update for two steps: with one for four, and three-step returns, 500,000 steps gave +160
        "hidden": (256, 256),  # as in RL Baselines3 Zoo
        "learning_rate": 5e-4,  # between those of the Zoo and of DQN on images
        "target_every": 500,  # a thousand steps
        "persistence": 0.0,  # rewards come without it
    },
}
