"""What is to be beaten: the best peer of each cell.

The figures are microseconds, medians, measured on a 2-core machine with one thread, of the same work: five fields with
observations of four floats, or stacks of four Atari frames (`frame-`), capacity N, full cycle of adding 8, sampling B
and updating B; the best of cpprb 11.0.0, Tianshou 2.0, flashbax 0.1.3 and Python lists, cell by cell. They hold until
peers have been measured on the machine at hand (`gpu-replay bench peers`), whose records then take their place.
"""

from __future__ import annotations

from collections.abc import Iterable

from .record import Record
from .subjects import PEERS

BEST_PEER_US = {
    "cycle/N=10k/B=32": 36.0,
    "cycle/N=10k/B=256": 122.0,
    "cycle/N=10k/B=4096": 512.0,
    "cycle/N=100k/B=32": 46.0,
    "cycle/N=100k/B=256": 166.0,
    "cycle/N=100k/B=4096": 732.0,
    "cycle/N=1M/B=32": 63.0,
    "cycle/N=1M/B=256": 209.0,
    "cycle/N=1M/B=4096": 1192.0,
    "index/N=1M/B=32": 10.9,
    "index/N=1M/B=4096": 274.0,
    "index/N=10M/B=32": 12.2,
    "index/N=10M/B=4096": 342.0,
    # 3.2 million transitions a second
    "add/N=1M/B=64": 20.0,
    "frame-cycle/N=20k/B=32": 159.0,
    "frame-cycle/N=20k/B=256": 1758.0,
    "frame-cycle/N=20k/B=4096": 24000.0,
    # 462,000 transitions a second
    "frame-add/N=20k/B=64": 138.5,
}
# they have no priorities, do less, and are measured beside the others but not compared with
UNIFORM = frozenset(name for name, peer in PEERS.items() if peer.uniform)
ELSEWHERE = "best peer, other machine"


def best_peer(case: str, peers: Iterable[Record], cpu: str) -> tuple[float, str] | None:
    """Microseconds of the best peer in a case and who it was, on the CPU; None where none was measured.

    peers: records of any suite; those of peers on the same CPU model are preferred to the figures above.
    """
    here = [
        record
        for record in peers
        if record.suite == "peers"
        and record.case == case
        and record.implementation not in {"gpu_replay", *UNIFORM}
        and record.environment.cpu == cpu
        and record.environment.device == "cpu"
        and not record.quick
    ]
    if here:
        best = min(here, key=lambda record: record.median)
        return best.median, best.implementation
    return (BEST_PEER_US[case], ELSEWHERE) if case in BEST_PEER_US else None
