"""The reference has every command, sub-command and option."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from rich.markup import render
from typer.main import get_command

from scorekit.__main__ import ADAPTERS, COMMANDS, app
from scorekit.lazy_commands import LazyCommand
from tools.docs import commands, configs
from tools.docs.commands import all_commands, command_pages, group_of, modules_with_main

ROOT = Path(__file__).parents[4]


@cache
def pages() -> dict[str, str]:
    """Return the pages, which are made when a test first asks for them."""
    return command_pages()


def test_every_option_of_a_command_is_on_its_page() -> None:
    num_options = 0
    waiting = [("scorekit", get_command(app))]
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, LazyCommand):
            if command.entry.settings:
                continue  # test_settings.py
            command = command.load()
        waiting += [(f"{name} {sub}", c) for sub, c in getattr(command, "commands", {}).items()]
        page = pages()[f"{group_of(commands.Command(name, '', []))}.md"]
        heading = f"# {name}\n" if page.startswith(f"# {name}\n") else f"## {name} {{"
        section = page[page.index(heading) + 2 :].partition("\n## ")[0]
        for option in command.params:
            flags = option.opts if option.param_type_name == "option" else []
            num_options += len(flags)
            assert all(f"`{flag}" in section or f", {flag}" in section for flag in flags), name
    assert num_options > 200


def test_no_words_of_a_help_are_taken_for_markup() -> None:
    for command in all_commands():
        for text in [command.help, *(getattr(p, "help", "") for p in command.parameters)]:
            assert render(text or "").plain == (text or ""), command.name


@pytest.mark.parametrize("page", configs.PAGES)
def test_what_reads_a_config_has_the_option(page: str) -> None:
    named = re.findall(r"`([^`]+?) (--[a-z-]+) \w+`", configs.PAGES[page].use)
    for name, option in named:
        (text,) = (t for t in pages().values() if f"\n## {name} {{" in t or f"# {name}\n" in t[:40])
        section = text.partition(f"## {name} {{")[2].partition("\n## ")[0] or text
        assert f"`{option}`" in section, name


def test_every_app_of_the_project_is_below_scorekit() -> None:
    declared = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in commands.PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^app = typer\.Typer\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    entries = [*COMMANDS.values(), *ADAPTERS.values()]
    targets = {entry.target.partition(":")[0] for entry in entries}
    assert declared <= targets | {"scorekit.__main__"}
    assert "## scorekit search loop {" in pages()["search.md"]


def test_every_command_of_the_trainer_is_below_scorekit() -> None:
    from trainer.__main__ import app as trainer

    names = {command.name for command in all_commands()}
    assert {f"scorekit {name}" for name in get_command(trainer).commands} <= names


def test_every_module_that_can_be_started_is_listed() -> None:
    everything = "\n".join(pages().values())
    for module in modules_with_main((*commands.PACKAGES, *commands.SCRIPTS)):
        name = module.removesuffix(".__main__")
        assert f"python -m {name}" in everything or f"{name.replace('.', '/')}.py" in everything


def test_an_option_of_a_script_comes_from_its_parser() -> None:
    assert "### `--changed` { #tools-tests_of-changed .key }" in pages()["tools.md"]


def test_a_package_is_started_by_its_name() -> None:
    assert "## python -m tools.docs { #tools-docs }" in pages()["tools.md"]
    assert "__main__" not in pages()["tools.md"]


def test_every_target_of_make_is_listed() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split():
        assert f"`make {target}` {{ #{target} }}" in pages()["make.md"], target
