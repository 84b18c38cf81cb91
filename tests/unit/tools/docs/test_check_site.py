"""A broken link of a built site is found, and so is what would be loaded from a network."""

from __future__ import annotations

from pathlib import Path

from tools.docs.check_site import problems_of


def _site(folder: Path, body: str) -> list[str]:
    (folder / "a").mkdir()
    (folder / "a/index.html").write_text('<h2 id="there">A</h2>', encoding="utf-8")
    (folder / "index.html").write_text(body, encoding="utf-8")
    return problems_of(folder)


def test_links_to_pages_headings_and_other_sites_are_fine(tmp_path: Path) -> None:
    body = '<a href="a/">1</a><a href="a/#there">2</a><a href="https://example.org/x">3</a>'
    assert _site(tmp_path, body) == []


def test_a_missing_page_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    problems = _site(tmp_path, '<a href="b/">1</a><a href="a/#gone">2</a><img src="c.png">')
    assert problems == [
        "index.html: b/: no such page",
        "index.html: a/#gone: no such heading",
        "index.html: c.png: no such page",
    ]


def test_what_comes_from_a_network_is_found(tmp_path: Path) -> None:
    problems = _site(tmp_path, '<script src="https://cdn.example/x.js"></script>')
    assert problems == ["index.html: loads https://cdn.example/x.js: put it into the site"]
