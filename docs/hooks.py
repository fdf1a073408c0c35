"""Adds to the site what lies outside docs/: pages beside the code, the files that pages link to, and these links.

Links are written as file paths, so that they also work in a checkout. On the site a link to a page leads to that page,
any other linked file is copied, and of a link to a folder the text stays. A link to what does not exist is an error.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# pages outside docs/: path in the repository to path on the site
PAGES = {
    "README.md": "index.md",
    "gpu_replay/README.md": "how-it-works.md",
    "gpu_replay/integrations/README.md": "integrations.md",
    "gpu_replay/examples/README.md": "examples.md",
    "bench/README.md": "measurements.md",
    "bench/RESULTS.md": "results.md",
    "bench/LOG.md": "log.md",
    "bench/results/study-tuned/report.md": "study.md",
    "bench/results/study/cliffwalk.md": "cliffwalk.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^][]*)\]\((?!\w+://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for source in [*PAGES, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]:
        for _, target, _ in LINK.findall((ROOT / source).read_text()):
            path = resolved(source, target)
            copied = not is_page(path) and (ROOT / path).is_file()
            if copied and files.get_file_from_path(f"files/{path}") is None:
                files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    name = page.file.src_uri
    source = next((path for path, given in PAGES.items() if given == name), f"docs/{name}")

    def on_site(match: re.Match[str]) -> str:
        path, anchor = resolved(source, match[2]), match[3] or ""
        if (ROOT / path).is_dir():
            return match[1]
        place = PAGES.get(path, path.removeprefix("docs/")) if is_page(path) else f"files/{path}"
        return f"[{match[1]}]({posixpath.relpath(place, posixpath.dirname(name) or '.')}{anchor})"

    return LINK.sub(on_site, markdown)


def resolved(source: str, target: str) -> str:
    """The path, from the top of the repository, of a file that a page links to.

    Raises PluginError if it does not exist.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not os.path.exists(ROOT / path):
        raise PluginError(f"{source} links to {target}, which does not exist.")
    return path


def is_page(path: str) -> bool:
    return path in PAGES or (path.startswith("docs/") and path.endswith(".md"))
