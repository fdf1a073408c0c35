"""Markdown tables and the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NOTHING = "–"


def number(value: float) -> str:
    """Three significant digits, or all before the point if those are more: 0.123, 12.3, 1,234; a dash for NaN."""
    if math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first left, the others right."""
    lines = [list(header), *[list(row) for row in rows]]
    # "-:", the rule of a column, takes two characters at least
    widths = [max(2, *(len(line[i]) for line in lines)) for i in range(len(header))]

    def joined(line: Sequence[str]) -> str:
        first, *others = line
        cells = [first.ljust(widths[0]), *[cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)]]
        return "| " + " | ".join(cells) + " |"

    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([joined(lines[0]), "| " + " | ".join(rule) + " |", *[joined(line) for line in lines[1:]]])
