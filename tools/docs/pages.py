"""Assemble the pages of the site: those of the repository, and those made from the code.

A page keeps its place: `docs/how-to/sft.md` is `how-to/sft.md` of the site, `demo/README.md` stays.
A link to another page of the repository leads to that page; a link to a source file, to a page that
shows it. Most pages made from the code are committed, too, so that a reader of the checkout has
them. Those of HTTP and Python are not: there a link leads to the source, and the site has the page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from scorekit.errors import UserError
from tools.docs.api import PAGES, api_pages
from tools.docs.commands import command_pages
from tools.docs.configs import config_pages
from tools.docs.errors import errors_page
from tools.docs.http_routes import http_pages
from tools.docs.settings import SERVICES, environment_page

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "mkdocs.yml"
STYLE = "docs/site.css"
REFERENCE = "reference"
#: First line of a committed page that nobody should edit.
MADE_FROM_CODE = "<!-- Made from the code: `make docs` writes this page. -->"
_LINK = re.compile(r"""(\]\()([^)#\s]+)((?:#[^)\s]*)?(?: "[^"]*")?\))""")
_PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
#: A heading, and a target of make, with an id as the site's Markdown writes it.
_HEADING = re.compile(r"^(#+ .*?) \{ #([^ }]+)[^}\n]*\}$", re.MULTILINE)
_TARGET = re.compile(r"^(`make .*?`) \{ #([^ }]+) \}$", re.MULTILINE)
#: Files that are copied as they are.
_COPIED = (".svg", ".png", ".css")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}


def committed_pages() -> dict[str, str]:
    """Return the pages that are made from the code and committed: path below docs -> text."""
    pages = {f"{REFERENCE}/errors.md": errors_page()}
    pages[f"{REFERENCE}/environment.md"] = environment_page()
    for group, texts in (("config", config_pages()), ("commands", command_pages())):
        pages |= {f"{REFERENCE}/{group}/{name}": text for name, text in texts.items()}
    return pages


def generated_pages() -> dict[str, str]:
    """Return the pages that are made from the code: path on the site -> text."""
    pages = committed_pages()
    for group, texts in (("http", http_pages()), ("python", api_pages())):
        pages |= {f"{REFERENCE}/{group}/{name}": text for name, text in texts.items()}
    return pages


def page_by_source() -> dict[str, str]:
    """Return the files of the repository that stand for a page that is not committed."""
    pages = {f"services/{name}/openapi.json": f"{REFERENCE}/http/{name}.md" for name in SERVICES}
    for name, (_, _, modules) in PAGES.items():
        path = modules[0].replace(".", "/")
        is_package = (ROOT / path).is_dir()
        source = f"{path}/__init__.py" if is_package else f"{path}.py"
        pages[source] = f"{REFERENCE}/python/{name}.md"
    return pages


def checkout_form(text: str) -> str:
    """Return a page for a reader of the checkout, where headings have no attributes.

    An id stands before its heading, so that links to it work in both forms.
    """
    text = _HEADING.sub(r'<a id="\2"></a>\n\n\1', text)
    text = _TARGET.sub(r'<a id="\2"></a>\1', text).replace("\n{ .key-facts }\n", "\n")
    return f"{MADE_FROM_CODE}\n\n{text.strip()}\n"


def write_committed_pages() -> None:
    """Write the pages that are committed; remove those of commands and configs that are gone."""
    pages = {ROOT / "docs" / name: checkout_form(text) for name, text in committed_pages().items()}
    for group in ("config", "commands"):
        for path in (ROOT / "docs" / REFERENCE / group).glob("*.md"):
            if path not in pages:
                path.unlink()
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def navigation() -> list[str]:
    """Return the paths of the pages that mkdocs.yml lists."""
    return list(_page_paths(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"]))


def _page_paths(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict | list):
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _page_paths(part)


def assemble() -> dict[str, str | bytes]:
    """Return every file of the site's sources: path -> content.

    Raises UserError if mkdocs.yml lists a page that does not exist, or leaves out a generated one,
    or if a page links to a file that does not exist.
    """
    files: dict[str, str | bytes] = {**generated_pages()}
    generated = {*files}
    listed = navigation()
    unlisted = sorted(files.keys() - {*listed})
    if unlisted:
        raise UserError(f"mkdocs.yml: nav lacks the generated page {unlisted[0]}. Add it")
    waiting = [source_of(page) for page in listed if page not in files] + [STYLE]
    seen = {*waiting}
    while waiting:
        source = waiting.pop()
        if not (ROOT / source).is_file():
            raise UserError(f"mkdocs.yml: nav lists {site_path(source)}, but there is no {source}")
        content, targets = _page(source, generated)
        files[site_path(source)] = content
        waiting += targets - seen
        seen |= targets
    return files


def site_path(source: str) -> str:
    """Return the path on the site of a file of the repository."""
    path = source.removeprefix("docs/")
    return path if path.endswith((".md", *_COPIED)) else f"source/{path}.md"


def source_of(page: str) -> str:
    """Return the file of the repository that a page of mkdocs.yml shows."""
    return page if (ROOT / page).is_file() else f"docs/{page}"


def _page(source: str, generated: Set[str]) -> tuple[str | bytes, set[str]]:
    """Return what the site shows of a file, and the files that it links to."""
    path = ROOT / source
    if source.endswith(_COPIED):
        return path.read_bytes(), set()
    text = path.read_text(encoding="utf-8")
    if source.endswith(".ipynb"):
        return _notebook(source, json.loads(text)), set()
    if not source.endswith(".md"):
        language = _LANGUAGES.get(path.suffix, "text")
        return f"{_UNINDEXED}# `{source}`\n\n````{language}\n{text}\n````\n", set()
    targets: set[str] = set()
    parts = re.split(r"(^```.*?^```\s*?$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_linked(part, source, generated, targets) for part in parts[::2]]
    return "".join(parts), targets


#: Front matter of a page that the search leaves out.
_UNINDEXED = "---\nsearch:\n  exclude: true\n---\n\n"


def _linked(text: str, source: str, generated: Set[str], targets: set[str]) -> str:
    """Return text with its links turned into links of the site; add what they lead to."""

    def replace(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = os.path.normpath(PurePosixPath(source).parent / link)
        page = page_by_source().get(target, target.removeprefix("docs/"))
        if page in generated:
            target = page
        elif not (ROOT / target).is_file():
            raise UserError(f"{source}: links to {link}, which is no file")
        else:
            targets.add(target)
        away = os.path.relpath(site_path(target), PurePosixPath(site_path(source)).parent)
        return f"{match[1]}{away}{match[3]}"

    return _LINK.sub(replace, _PICTURE.sub(lambda match: _inline(match, source), text))


def _inline(match: re.Match[str], source: str) -> str:
    """Return a drawing as a part of the page, if it follows the page's colours."""
    drawing = (ROOT / source).parent / match[2]
    if not drawing.is_file():
        return match[0]
    text = drawing.read_text(encoding="utf-8")
    if "--md-" not in text:
        return match[0]
    svg = " ".join(text[text.index("<svg") :].split())  # Markdown ends raw HTML at a blank line
    return f"<div>{svg}</div>"


def _notebook(source: str, notebook: dict[str, Any]) -> str:
    parts = [f"{_UNINDEXED}# `{source}`\n"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"````python\n{text}\n````\n" if is_code else f"````markdown\n{text}\n````\n")
    return "\n".join(parts)


def write_pages(folder: Path) -> None:
    """Write the sources of the site; leave alone what has not changed, and remove other files."""
    files = assemble()
    for path in folder.rglob("*") if folder.is_dir() else ():
        if path.is_file() and str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
