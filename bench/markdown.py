"""Tables as documentation shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
