"""Adds to the site what lies outside docs/: pages beside the code, their pictures, and the links between them.

Links are written as file paths, so that they also work in a checkout. On the site, a link to a page leads to that page
of the site, a linked picture is copied, and a link to any other file leads to the repository. A link to a file that
does not exist is an error.
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
    "bench/README.md": "measurements.md",
    "bench/RESULTS.md": "results.md",
    "bench/LOG.md": "log.md",
    "bench/results/study/cliffwalk.md": "cliffwalk.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\]\((?!\w+://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
        for target, _ in LINK.findall((ROOT / source).read_text()):
            path = resolved(source, target)
            picture = f"pictures/{path}"
            if is_picture(path) and files.get_file_from_path(picture) is None:
                files.append(File.generated(config, picture, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    source = next((path for path, given in PAGES.items() if given == name), f"docs/{name}")

    def on_site(match: re.Match[str]) -> str:
        path, anchor = resolved(source, match[1]), match[2] or ""
        if path in PAGES or (path.startswith("docs/") and path.endswith(".md")):
            place = PAGES.get(path, path.removeprefix("docs/"))
        elif is_picture(path):
            place = f"pictures/{path}"
        else:
            return f"]({config.repo_url}/blob/main/{path}{anchor})"
        return f"]({posixpath.relpath(place, posixpath.dirname(name) or '.')}{anchor})"

    return LINK.sub(on_site, markdown)


def resolved(source: str, target: str) -> str:
    """The path, from the top of the repository, of a file that a page links to.

    Raises PluginError if it does not exist.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not os.path.exists(ROOT / path):
        raise PluginError(f"{source} links to {target}, which does not exist.")
    return path


def is_picture(path: str) -> bool:
    return path.endswith((".png", ".gif", ".svg"))
