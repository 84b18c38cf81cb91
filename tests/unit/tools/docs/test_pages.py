"""The site's sources: links lead to pages of the site, and a page that is not there is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scorekit.errors import UserError
from tools.docs import pages
from tools.docs.__main__ import page_times
from tools.docs.pages import assemble, navigation, site_path, source_of, write_pages

GENERATED = {"reference/errors.md": "# Errors\n"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository with one generated page."""
    files = {
        "mkdocs.yml": yaml.safe_dump({"nav": [{"Home": "index.md"}, "reference/errors.md"]}),
        "docs/index.md": "[demo](../demo/README.md#run), [errors](reference/errors.md)\n",
        "docs/site.css": "",
        "demo/README.md": "[code](run.py), [home](../docs/index.md)\n\n```\n[no](link.md)\n```\n",
        "demo/run.py": "print(1)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "CONFIG", tmp_path / "mkdocs.yml")
    monkeypatch.setattr(pages, "generated_pages", lambda: dict(GENERATED))
    return tmp_path


def test_links_lead_to_pages_of_the_site(tree: Path) -> None:
    files = assemble()
    assert files["index.md"] == "[demo](demo/README.md#run), [errors](reference/errors.md)\n"
    demo = files["demo/README.md"]
    assert isinstance(demo, str)
    assert "[code](../source/demo/run.py.md), [home](../index.md)" in demo
    assert "[no](link.md)" in demo  # in a code block
    assert "print(1)" in str(files["source/demo/run.py.md"])


def test_a_link_to_no_file_is_an_error(tree: Path) -> None:
    (tree / "docs/index.md").write_text("[gone](gone.md)\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"docs/index\.md: links to gone\.md"):
        assemble()


def test_a_link_to_no_generated_page_is_an_error(tree: Path) -> None:
    (tree / "docs/index.md").write_text("[gone](reference/gone.md)\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"docs/index\.md: links to reference/gone\.md"):
        assemble()


def test_a_written_page_of_the_reference_stands_beside_generated_ones(tree: Path) -> None:
    (tree / "docs/reference").mkdir()
    (tree / "docs/reference/protocol.md").write_text("[errors](errors.md)\n", encoding="utf-8")
    (tree / "docs/index.md").write_text("[protocol](reference/protocol.md#a)\n", encoding="utf-8")
    files = assemble()
    assert files["index.md"] == "[protocol](reference/protocol.md#a)\n"
    assert files["reference/protocol.md"] == "[errors](errors.md)\n"


def test_the_committed_reference_is_what_the_code_says() -> None:
    texts = {name: pages.checkout_form(text) for name, text in pages.committed_pages().items()}
    docs = pages.ROOT / "docs"
    stale = [name for name, text in texts.items() if _text(docs / name) != text]
    assert stale == [], "say: make docs"
    marked = {p for p in docs.rglob("*.md") if _text(p).startswith(pages.MADE_FROM_CODE)}
    assert marked == {docs / name for name in texts}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_a_link_to_an_id_works_in_a_checkout() -> None:
    text = "# A\n\n### `rl.x` { #rl-x .key }\n\ninteger\n{ .key-facts }\n\nIt.\n"
    expected = '# A\n\n<a id="rl-x"></a>\n\n### `rl.x`\n\ninteger\n\nIt.\n'
    assert pages.checkout_form(text) == f"{pages.MADE_FROM_CODE}\n\n{expected}"
    assert pages.checkout_form("`make x` { #x }\n:   It.\n").endswith(
        '<a id="x"></a>`make x`\n:   It.\n'
    )


def test_a_link_to_a_source_leads_to_the_page_that_is_made_of_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = {"reference/http/judge.md": "# HTTP: judge\n"}
    monkeypatch.setattr(pages, "generated_pages", lambda: GENERATED | http)
    nav = {"nav": ["index.md", "reference/errors.md", *http]}
    (tree / "mkdocs.yml").write_text(yaml.safe_dump(nav), encoding="utf-8")
    link = "[judge](../services/judge/openapi.json)\n"
    (tree / "docs/index.md").write_text(link, encoding="utf-8")
    assert assemble()["index.md"] == "[judge](reference/http/judge.md)\n"


def test_sources_that_stand_for_a_page_exist() -> None:
    sources = pages.page_by_source()
    assert all((pages.ROOT / source).is_file() for source in sources)
    assert {*sources.values()} == pages.generated_pages().keys() - pages.committed_pages().keys()


@pytest.mark.parametrize(
    ("nav", "message"),
    [
        (["index.md"], r"nav lacks the generated page reference/errors\.md"),
        (["index.md", "reference/errors.md", "no.md"], r"nav lists no\.md"),
    ],
    ids=["lacks", "lists"],
)
def test_the_navigation_has_every_page_and_no_other(
    tree: Path, nav: list[str], message: str
) -> None:
    (tree / "mkdocs.yml").write_text(yaml.safe_dump({"nav": nav}), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        assemble()


def test_a_page_that_is_gone_is_removed_and_others_are_left_alone(tree: Path) -> None:
    folder = tree / "build"
    write_pages(folder)
    (folder / "old.md").write_text("", encoding="utf-8")
    before = (folder / "index.md").stat().st_mtime_ns
    write_pages(folder)
    assert not (folder / "old.md").exists()
    assert (folder / "index.md").stat().st_mtime_ns == before


def test_every_page_of_docs_is_in_the_navigation() -> None:
    listed = navigation()
    for path in (pages.ROOT / "docs").rglob("*.md"):
        assert site_path(str(path.relative_to(pages.ROOT))) in listed, path


def test_a_change_of_any_page_is_noticed() -> None:
    sources = {pages.ROOT / source_of(page) for page in navigation()}
    assert {path for path in sources if path.is_file()} <= page_times().keys()
