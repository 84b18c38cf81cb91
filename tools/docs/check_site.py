"""Check a built site: links lead to pages and headings of it, and nothing comes from a network.

    python -m tools.docs.check_site build/site

Zensical checks links in Markdown. This checks the links of the pages as a browser sees them, also
those of the navigation and of docstrings, and what a page loads.
"""

from __future__ import annotations

import argparse
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scorekit.command import run_command
from scorekit.errors import UserError

#: Tags whose address a browser loads by itself.
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
#: Kinds of `<link>` that name an address and load nothing.
_NAMED = {"canonical", "prev", "next", "edit", "alternate"}


class Page(HTMLParser):
    """Collects the ids, the links and the loaded addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add what a tag has."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        address = values.get(_LOADED.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") in _NAMED):
            self.loaded.append(address)


@cache
def _page(path: Path) -> Page:
    return Page(path)


def problems_of(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each address outside the site."""
    lines = []
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site)
        page = _page(path)
        for address in page.loaded:
            if urlsplit(address).netloc:
                lines.append(f"{name}: loads {address}: put it into the site")
        for address in [*page.links, *page.loaded]:
            problem = _problem(address, path, site)
            if problem:
                lines.append(f"{name}: {address}: {problem}")
    return lines


def _problem(address: str, path: Path, site: Path) -> str:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    target = path
    if parts.path:
        base = site if parts.path.startswith("/") else path.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve()
        target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "no such page"
    if parts.fragment and target.suffix == ".html":
        fragment = unquote(parts.fragment)
        if fragment not in _page(target).ids and not fragment.startswith("__"):
            return "no such heading"
    return ""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Check the links of a built site.")
    parser.add_argument("site", type=Path, help="the folder of the site")
    site: Path = parser.parse_args().site.resolve()
    if not (site / "index.html").is_file():
        raise UserError(f"{site}: no site is there. Build it: make docs")
    problems = problems_of(site)
    if problems:
        raise UserError(f"{len(problems)} links of the site are wrong", problems)
    pages = len(list(site.rglob("*.html")))
    print(f"{pages} pages: every link leads to a page and a heading, nothing comes from elsewhere")
    return 0


if __name__ == "__main__":
    run_command(main)
