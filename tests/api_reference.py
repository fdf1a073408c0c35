"""Writes gpu_replay/API.md from signatures and docstrings: `python tests/api_reference.py`.

griffe reads the sources and griffe2md renders them. What is done here: docstrings in the style of this package become
Markdown, long signatures one line a parameter, and what both buffers inherit stands once.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from griffe2md import render_object_docs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "gpu_replay" / "API.md"
HEAD = """# API reference

Written by `python tests/api_reference.py` from signatures and docstrings; edit those, not this page. Symbols: `N`
capacity in transitions, `B` batch size, `E` parallel environments, `n` n-step length, `S` frames of a stack.
"""
# `name: text`, or `one, other: text`, continued by lines that are indented more
ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*):\s+(.*)")
SPOKEN_OF = ("__getitem__", "__call__")
MADE_BY_A_BUFFER = "LearningStep"
# what buffers ask of a Hindsight
INTERNAL = ("describe", "count", "check", "rewrite")
MOST_COLUMNS = 100


def as_markdown(docstring: str) -> str:
    """Descriptions of arguments as a list; asterisks outside of code mean themselves."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        found = ENTRY.fullmatch(line)
        starts_block = found is not None and (inside or not lines or not lines[-1])
        if found and starts_block:
            line, inside = f"- **{found[1]}** – {escaped(found[2])}", True
        elif inside and line.startswith(" "):
            line = f"  {escaped(line.strip())}"
        else:
            if inside and line:
                lines.append("")
            inside = False
            line = line if line.startswith("    ") else escaped(line)
        lines.append(line)
    return "\n".join(lines)


def escaped(text: str) -> str:
    code_and_text = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in code_and_text)


def wrapped(signature: str) -> str:
    """A signature of one line with its parameters on lines of their own where it is long."""
    if len(signature) <= MOST_COLUMNS:
        return signature
    head, _, rest = signature.partition("(")
    inside, _, tail = rest.rpartition(")")
    # commas within brackets belong to a type
    parameters = re.findall(r"(?:[^,\[\]()]|\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\([^()]*\))+", inside)
    return "\n".join([f"{head}(", *(f"    {parameter.strip()}," for parameter in parameters), f"){tail}"])


class Docstrings(griffe.Extension):
    """Makes Markdown of each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def resolved(expression: object, modules: griffe.ModulesCollection) -> object:
    """The value of a constant or of a type alias of this package in the place of its name."""
    if isinstance(expression, griffe.ExprName) and expression.canonical_path.startswith("gpu_replay."):
        found = modules[expression.canonical_path]
        if found.is_attribute and not str(found.value).startswith("TypeVar"):
            return found.value
    return expression


def methods(members: dict[str, griffe.Object | griffe.Alias]) -> list[str]:
    return [
        name
        for name, member in members.items()
        if member.is_function and member.has_docstring and name not in INTERNAL
        if not name.startswith("_") or name in SPOKEN_OF
    ]


def section(cls: griffe.Class, shared: griffe.Class | None) -> str:
    """One class; what it inherits as another one does is named there and described here."""
    inherited = (
        [] if shared is None else [name for name in methods(cls.inherited_members) if name in shared.all_members]
    )
    shown = [name for name in methods({**cls.members, **cls.inherited_members}) if name not in inherited]
    for name in ("__init__", *shown):
        for parameter in cls.all_members[name].parameters if name in cls.all_members else ():
            parameter.default = resolved(parameter.default, cls.modules_collection)
            parameter.annotation = resolved(parameter.annotation, cls.modules_collection)
    text = render_object_docs(
        cls,
        {
            "members": shown,
            "merge_init_into_class": cls.name != MADE_BY_A_BUFFER,
            "members_order": "source",
            "docstring_style": None,
            "line_length": 10**6,
            "show_bases": False,
            "show_signature_annotations": True,
            "summary": False,
        },
    )
    text = re.sub(rf"^(#+ `){re.escape(cls.parent.path)}\.", r"\1", text, flags=re.MULTILINE)
    text = re.sub(rf"^({cls.name}\(.*\)) -> None$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=```python\n)(.*)(?=\n```)", lambda found: wrapped(found[1]), text)
    about = [
        f"- **{name}** (`{member.annotation}`) – {member.docstring.value}"
        for name, member in cls.all_members.items()
        if member.is_attribute and member.has_docstring and not name.startswith("_")
    ]
    if about:
        about = ["Attributes:", "", *about, ""]
    if inherited:
        names = ", ".join(f"`{name}`" for name in inherited)
        about += [f"As in [{shared.name}](#{shared.name.lower()}): {names}.", ""]
    head, mark, rest = text.partition("\n### ")
    return "\n".join([head, "", *about]) + mark + rest


def reference() -> str:
    loader = griffe.GriffeLoader(
        extensions=griffe.load_extensions(Docstrings), search_paths=[str(ROOT)], allow_inspection=False
    )
    package = loader.load("gpu_replay")
    loader.resolve_aliases()
    classes = [package[name].final_target for name in package.exports if not name.startswith("_")]
    classes.append(package[f"graphs.learning_step.{MADE_BY_A_BUFFER}"])
    buffer = package["ReplayBuffer"].final_target
    # the sharded one reads its own shard where the others read all that is stored
    own = (buffer.name, "ShardedReplayBuffer")
    sections = [section(cls, None if cls.name in own else buffer) for cls in classes]
    contents = [f"- [{cls.name}](#{cls.name.lower()})" for cls in classes]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([HEAD, *contents, "", *sections])).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference())
