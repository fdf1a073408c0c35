"""The table of kernel microbenchmarks: each operation and size beside the best torch operations that do all of it."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_replay.console.markdown import number, table

from .baselines import ALONE
from .cases import short
from .kernel_cases import KERNELS, OURS
from .record import Record

NOTE = (
    "Best baseline: the fastest torch operations that do the whole work; speedup: their time over ours. % of copy "
    "bandwidth: the bytes that must move over the time, relative to a plain copy in the same run. Caches are flushed "
    f"before each call of {', '.join(name for name, kernel in KERNELS.items() if kernel.cold)}."
)


def best_baseline(records: Sequence[Record], case: str, clock: str) -> Record | None:
    """The fastest other implementation that does the whole work of a case, timed in the same way."""
    others = [
        record
        for record in records
        if record.case == case
        and record.clock == clock
        and record.implementation != OURS
        and not record.implementation.endswith(ALONE)
    ]
    return min(others, key=lambda record: record.median, default=None)


def kernels_table(records: Sequence[Record]) -> str:
    """Every measured case of this package, in the order of the registry."""
    order = {name: place for place, name in enumerate(KERNELS)}
    ours = [record for record in records if record.implementation == OURS]
    ours.sort(key=lambda r: (order.get(r.operation, len(order)), r.operation, r.capacity, r.batch, r.clock))
    rows = []
    for record in ours:
        best = best_baseline(records, record.case, record.clock)
        rows.append(
            [
                record.operation + (", events" if record.clock == "events" else ""),
                short(record.capacity) if record.capacity else "",
                f"{record.batch:,}" if record.batch else "",
                number(record.median),
                f"{number(best.median)} ({best.implementation})" if best else "",
                f"{best.median / record.median:.2f}x" if best else "",
                f"{record.copy_share:.1%}" if record.copy_share and record.bytes else "",
            ]
        )
    return table(["operation", "N", "B", "µs", "best baseline, µs", "speedup", "% of copy bandwidth"], rows)
