"""Hook of mkdocs: pages of the site that are not files of docs/.

README.md is the first page. What pages link outside docs/ becomes part of the site below `repository/`: Markdown as pages,
anything else as files. The page of the command line is every command's `--help`. So the same links work here and in the
repository, and `mkdocs build --strict` checks all of them.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

from memo.cli.main import COMMANDS, WITH_SUBCOMMANDS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
HELP = "reference/command-line.md"
TRACE_COMMANDS = ("stats", "html", "diff", "chrome")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, what is linked outside docs/, and the page of the command line."""
    config.extra["source"] = {uri: f"docs/{uri}" for uri in files.src_uris} | {"index.md": "README.md"}
    pages = [name for name in files.src_uris if name.endswith(".md")]
    waiting = ["README.md", *(f"docs/{name}" for name in pages)]
    seen = set(waiting)
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            uri = _uri(target)
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                config.extra["source"][uri] = target
                waiting.append(target)
    files.append(File.generated(config, HELP, content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page in the repository into links of the site."""
    source = config.extra["source"].get(page.file.src_uri)
    if source is None:
        return markdown

    def changed(link: re.Match[str]) -> str:
        path, _, fragment = link[2].partition("#")
        target = _resolved(source, path)
        if target is None:
            return link[0]
        there = posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{there}{'#' + fragment if fragment else ''}{link[3]}"

    return LINK.sub(changed, markdown)


def _targets(page: str) -> list[str]:
    """Files of the repository that a page of it links."""
    links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    found = (_resolved(page, link.partition("#")[0]) for _, link, _ in links)
    return [target for target in found if target is not None]


def _resolved(page: str, path: str) -> str | None:
    """Path in the repository of a relative link; None for another kind, and for what is not there."""
    if not path or ":" in path:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if (ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    return target if (ROOT / target).is_file() else None


def _uri(target: str) -> str:
    """Path in the site of a file of the repository."""
    if target == "README.md":
        return "index.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{target}"


def _command_line() -> str:
    """Page of every command's help."""
    calls = [
        [name, *sub]
        for name in COMMANDS
        for sub in ([[one] for one in TRACE_COMMANDS] if name in WITH_SUBCOMMANDS else [[]])
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        helps = list(pool.map(_help, calls))
    parts = ["# The command line", "What `memo COMMAND --help` prints."]
    parts += [f"## memo {' '.join(call)}\n\n```text\n{text}```" for call, text in zip(calls, helps, strict=True)]
    return "\n\n".join(parts)


def _help(call: list[str]) -> str:
    command = [sys.executable, "-m", "memo.cli.main", *call, "--help"]
    done = subprocess.run(command, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True)
    return done.stdout
