"""Markdown tables and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def number(value: float) -> str:
    """Three significant digits or all digits before the point: 0.123, 12.3, 123, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first left, the others right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def joined(line: Sequence[str]) -> str:
        first, *others = line
        cells = [first.ljust(widths[0]), *[cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)]]
        return "| " + " | ".join(cells) + " |"

    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([joined(lines[0]), "| " + " | ".join(rule) + " |", *[joined(line) for line in lines[1:]]])
