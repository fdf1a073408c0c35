"""A griffe extension that turns this package's docstring style into Markdown for the site."""

from __future__ import annotations

import re

import griffe

# `name: text`, or `one, other: text`, continued by lines with a deeper indent
ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*):\s+(.*)")


def as_markdown(docstring: str) -> str:
    """Turn descriptions of arguments into a list, and escape asterisks outside of code."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        found = ENTRY.fullmatch(line)
        starts_block = found is not None and (inside or not lines or not lines[-1])
        if found and starts_block:
            line, inside = f"- **{found[1]}** – {escaped(found[2])}", True
        elif inside and line.startswith(" "):
            line = f"    {escaped(line.strip())}"
        else:
            if inside and line:
                lines.append("")
            inside = False
            line = line if line.startswith("    ") else escaped(line)
        lines.append(line)
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Escape Markdown's emphasis in text outside of code."""
    code_and_text = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in code_and_text)


class Docstrings(griffe.Extension):
    """Turns each docstring into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
