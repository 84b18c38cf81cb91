"""Check that what the documents name exists."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

from scorekit.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
#: All but the changelog, which tells of files that were.
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        path
        for package in (
            "services",
            "trainer",
            "synth",
            "demo",
            "examples",
            "bench",
            "evidence",
            "testing",
            "tests",
            "deploy",
        )
        for path in sorted((ROOT / package).rglob("*.md"))
        if path.parent != ROOT / "synth/export"  # templates of what a run writes
    ),
]
#: What people write; the other pages are made from the code.
DOCUMENTS = [
    path
    for path in PAGES
    if not path.read_text(encoding="utf-8").startswith("<!-- Made from the code")
]
_ROOMS = (
    "scorekit|services|trainer|synth|synth_parallel|demo|configs|docs|tests|tools|bench|evidence|testing|examples"
    "|deploy"
)
_PATH = re.compile(rf"(?<![\w/.:-])((?:{_ROOMS})/[\w./*-]*[\w/*])")
_MODULE = re.compile(rf"(?<![\w/.@-])((?:{_ROOMS})(?:\.(?!py\b)\w+)+)")
_SOURCE = re.compile(r"`([\w./-]+\.py)`")
_LINK = re.compile(r"""\]\(([^)#\s]+)(?:#[^)\s]*)?(?: "[^"]*")?\)""")
#: What CONTRIBUTING.md and a tutorial let their reader make.
_CREATED_BY_READER = {
    "runs/first/compare.py",
    "brevity.py",
    "trainer/rl/algorithms/ratio_free.py",
    "services/ratio/model.py",
    "services/ratio/__main__.py",
    "services.ratio",
    "synth/stages/drop_long.py",
    "trainer/search/steps/short.py",
}
_HEADING = re.compile(r"^#+ (.*?)\s*$", re.MULTILINE)
_BLOCK = re.compile(r"^( *)```.*?^\1```\s*?$", re.MULTILINE | re.DOTALL)
_LINK_TO_HEADING = re.compile(r"""\]\(((?!\w+://)[^)#\s]*)#([^)\s]+)(?: "[^"]*")?\)""")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"`?make ([a-z-]+)`?")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_files_that_a_document_names_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in set(_PATH.findall(text)) - _CREATED_BY_READER:
        assert list(ROOT.glob(name)) or list(path.parent.glob(name)), f"it names {name}"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_files_that_a_document_links_to_exist(path):
    for name in _LINK.findall(path.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(path.parent / name))
        assert "://" in name or target.exists(), f"it links to {name}"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_headings_that_a_document_links_to_exist(path):
    for name, heading_id in _LINK_TO_HEADING.findall(path.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(path.parent / name)) if name else path
        assert target.suffix != ".md" or heading_id in _heading_ids(target), (
            f"it links to {name}#{heading_id}"
        )


@cache
def _heading_ids(path):
    """Return the ids of a page's headings, as GitHub and the site make them, and its own ids."""
    text = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = [re.sub(r"\]\([^)]*\)", "", title).lower() for title in _HEADING.findall(text)]
    slugs = {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}
    return slugs | {*re.findall(r'<a id="([^"]+)"', text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_source_files_that_a_document_names_without_their_folder_exist(path):
    sources = [p for package in _ROOMS.split("|") for p in (ROOT / package).rglob("*.py")]
    for name in set(_SOURCE.findall(path.read_text(encoding="utf-8"))) - _CREATED_BY_READER:
        assert any(str(source).endswith(f"/{name}") for source in sources), f"it names {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_modules_that_a_document_names_exist(path):
    for name in set(_MODULE.findall(path.read_text(encoding="utf-8"))) - _CREATED_BY_READER:
        if name.endswith(".md"):
            continue  # a page, which another test looks for
        top, *parts = name.split(".")
        folder = ROOT / top
        while parts and (folder / parts[0]).is_dir():
            folder /= parts.pop(0)
        if parts and (folder / f"{parts[0]}.py").exists():
            folder, parts = folder / f"{parts[0]}.py", parts[1:]
        assert not parts or parts[0] in _words(folder), f"it names {name}"


def _words(module: Path) -> set[str]:
    file = module / "__init__.py" if module.is_dir() else module
    return set(re.findall(r"\w+", file.read_text(encoding="utf-8"))) if file.exists() else set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_that_a_document_names_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in path.read_text(encoding="utf-8").splitlines():
        for target in _TARGET.findall(line) if "`make" in line or line.startswith("make") else []:
            assert f"\n{target}:" in makefile, f"{path.name} names make {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_a_document_says_where_its_commands_are_found(path):
    """Check that the environment is named first: a reader has no `python` of ours on the path."""
    text = path.read_text(encoding="utf-8")
    names = "|".join([*COMMANDS, "serve", "adapter", "fetch"])
    command = rf"(?:^|`)(?:python -m |python examples|synth_parallel [a-z]|scorekit (?:{names}) )"
    bare = re.search(command, text, re.MULTILINE)
    activation = re.search(r"source \.venv/bin/activate|\.venv/bin/python", text)
    assert (
        bare is None
        or (activation and activation.start() < bare.start())
        or path.name == "AGENTS.md"
    ), bare


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_python_in_a_document_compiles_and_what_it_imports_exists(path):
    for code in _PYTHON.findall(path.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.ImportFrom) or not _MODULE.fullmatch(f"{node.module}"):
                continue
            name = ROOT / node.module.replace(".", "/")
            module = name if name.is_dir() else name.with_suffix(".py")
            for alias in node.names:
                exists = alias.name in _words(module) or (module / f"{alias.name}.py").is_file()
                assert exists, f"it imports {node.module}.{alias.name}"


def test_the_readme_is_short_and_its_first_command_comes_early():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("make demo") for line in lines[:25])


def test_the_index_leads_to_every_written_page():
    index = ROOT / "docs/index.md"
    links = _LINK.findall(index.read_text(encoding="utf-8"))
    targets = {Path(os.path.normpath(index.parent / link)) for link in links}
    written = {path for path in DOCUMENTS if index.parent in path.parents and path != index}
    assert written <= targets


def test_every_setting_and_wire_field_stands_in_the_protocol_or_the_help():
    from scorekit import schemas

    text = (ROOT / "docs/reference/protocol.md").read_text(encoding="utf-8")
    models = (
        schemas.TranslationSample,
        schemas.XCometOptions,
        schemas.Scored,
        schemas.JudgeSample,
        schemas.JudgeOptions,
        schemas.JudgeScored,
    )
    for model in models:
        for name in model.model_fields:
            assert f"`{name}" in text or f'"{name}"' in text, f"{model.__name__}.{name}"


def test_nobody_is_told_to_install_what_is_not_published():
    """Check that no text has `pip install scorekit[...]`, which would ask the registry.

    The extras exist only in the checkout.
    """
    text = {".py", ".md", ".sh", ".yaml", ".yml", ".toml", ".ipynb"}
    rooms = (
        "scorekit",
        "services",
        "trainer",
        "synth",
        "tools",
        "deploy",
        "docs",
        "examples",
        "demo",
        "bench",
        "evidence",
        "testing",
        "README.md",
        "CHANGELOG.md",
    )
    files = [
        p
        for package in rooms
        for p in [ROOT / package, *(ROOT / package).rglob("*")]
        if p.is_file()
    ]
    for path in files:
        if path.suffix in text:
            content = path.read_text(encoding="utf-8")
            assert not re.search(r"pip install [^\n`]*scorekit([\[`\"'])", content), path
