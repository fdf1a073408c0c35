"""How much of a study is done and how long the rest will take, from expected and measured costs of an episode.

Runs differ: an episode of one environment takes ten times as long as one of another, and episodes grow longer as agents
learn. Each kind of run (environment and method) therefore has an expected cost of an episode, which measured ones
replace little by little; kinds that have not begun are scaled by how far off the expectations were elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from gpu_replay.study.run import RunId
from gpu_replay.study.settings import AgentSettings

# steps of an episode, the mean over a run with the tutorial's settings; tuned agents are about as fast
_STEPS = {"CartPole-v1": 180, "Acrobot-v1": 380, "MountainCar-v0": 200}
# what one step costs beside its updates, in microseconds: mostly the environment's own
_STEP_COST = {"CartPole-v1": 60, "Acrobot-v1": 130, "MountainCar-v0": 60}
# what an update costs with a hidden layer of 128, in microseconds; a busy neighbour on the core included
_UPDATE_COST = {"none": 400, "uniform": 500, "proportional": 500, "rank": 800, "combined": 550, "hindsight": 1_500}
# episodes after which what was measured counts as much as what was expected
_TRUST = 10.0

Kind = tuple[str, str]


def expected_seconds(run: RunId, agent: AgentSettings) -> float:
    """A guess of what an episode takes, from before any was seen."""
    size = sum(wide * high for wide, high in pairwise(agent.hidden))
    update = _UPDATE_COST.get(run.method, 400) + size * agent.batch_size / 2_000
    step = _STEP_COST.get(run.environment, 60) + update * agent.updates / agent.train_every
    return _STEPS.get(run.environment, 200) * step * 1e-6


@dataclass
class _Kind:
    """Runs of one environment and method: how many episodes they have, and what those that were seen took."""

    expected: float
    planned: int = 0
    done: int = 0
    seen: int = 0
    seconds: float = 0.0


class Forecast:
    """Counts episodes as they end.

    runs:     all that belong to the study, each with its settings.
    finished: those that need nothing any more.
    """

    def __init__(self, runs: Iterable[tuple[RunId, AgentSettings]], finished: Iterable[RunId] = ()) -> None:
        self._kinds: dict[Kind, _Kind] = {}
        self._open: dict[RunId, int] = {}
        over = set(finished)
        for run, agent in runs:
            kind = self._kinds.setdefault((run.environment, run.method), _Kind(expected_seconds(run, agent)))
            kind.planned += agent.episodes
            if run in over:
                kind.done += agent.episodes
            else:
                self._open[run] = agent.episodes

    def count(self, run: RunId, episodes: int, seconds: float) -> None:
        """So many further episodes of a run ended, in so many seconds of its process."""
        kind = self._kinds[run.environment, run.method]
        kind.done += episodes
        kind.seen += episodes
        kind.seconds += seconds
        self._open[run] -= episodes
        if self._open[run] <= 0:
            del self._open[run]

    @property
    def open(self) -> int:
        """Runs that are not over."""
        return len(self._open)

    def _costs(self) -> dict[Kind, float]:
        """Seconds of an episode of each kind, as they look now."""
        seen = [kind for kind in self._kinds.values() if kind.seen]
        # as if all that was expected had been expected so many times larger
        measured = sum(kind.seconds for kind in seen)
        expected = sum(kind.expected * kind.seen for kind in seen)
        scale = measured / expected if expected and measured else 1.0
        return {
            name: (kind.expected * scale * _TRUST + kind.seconds) / (_TRUST + kind.seen)
            for name, kind in self._kinds.items()
        }

    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        costs = self._costs()
        total = sum(costs[name] * kind.planned for name, kind in self._kinds.items())
        done = sum(costs[name] * kind.done for name, kind in self._kinds.items())
        return done / total if total else 1.0

    def seconds_left(self, jobs: int) -> float:
        """What the rest will take in `jobs` processes: the work divided, or the longest single run."""
        costs = self._costs()
        rest = [costs[run.environment, run.method] * episodes for run, episodes in self._open.items()]
        return max(sum(rest) / jobs, max(rest)) if rest else 0.0


def clock(seconds: float) -> str:
    """A time for people: `40 s`, `7 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
