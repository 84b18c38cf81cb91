"""The reference has every command, sub-command and option."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from rich.markup import render
from typer.main import get_command

from scorekit.lazy_commands import LazyCommand
from tools.docs import commands, configs
from tools.docs.commands import APPS, app_of, command_pages, commands_in, modules_with_main

ROOT = Path(__file__).parents[4]
#: Modules of lazy commands whose options are on the page of their group.
OWN_COMMANDS = (
    "scorekit.client.files.score_command",
    "scorekit.first_config",
    "scorekit.metaeval.command",
)


@cache
def pages() -> dict[str, str]:
    """Return the pages, which are made when a test first asks for them."""
    return command_pages()


@pytest.mark.parametrize("module", APPS)
def test_every_option_of_a_command_is_on_its_page(module: str) -> None:
    page = next(p for p in pages().values() if p.startswith(f"# {APPS[module]}\n"))
    waiting = [(APPS[module], get_command(app_of(module)))]
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, LazyCommand):
            if command.entry.target.partition(":")[0] not in OWN_COMMANDS:
                continue
            command = command.load()
        waiting += [(f"{name} {sub}", c) for sub, c in getattr(command, "commands", {}).items()]
        heading = f"# {name}\n" if name == APPS[module] else f"## {name} {{"
        section = page[page.index(heading) + 2 :].partition("\n## ")[0]
        for option in command.params:
            flags = option.opts if option.param_type_name == "option" else []
            assert all(f"`{flag}" in section or f", {flag}" in section for flag in flags), name


def test_no_words_of_a_help_are_taken_for_markup() -> None:
    for module, name in APPS.items():
        for command in commands_in(app_of(module), name):
            for text in [command.help, *(getattr(p, "help", "") for p in command.parameters)]:
                assert render(text or "").plain == (text or ""), command.name


@pytest.mark.parametrize("page", configs.PAGES)
def test_what_reads_a_config_has_the_option(page: str) -> None:
    named = re.findall(r"`([^`]+?) (--[a-z-]+) \w+`", configs.PAGES[page].use)
    for name, option in named:
        (text,) = (t for t in pages().values() if name.startswith(commands.page_title(t)))
        section = text.partition(f"## {name} {{")[2].partition("\n## ")[0] or text
        assert f"`{option}`" in section, name


def test_every_app_of_the_project_has_a_page() -> None:
    declared = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in commands.PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^app = typer\.Typer\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    inside = {"trainer.search.cli", "trainer.roleplay.cli"}  # sub-commands of the trainer
    assert declared - inside == set(APPS)
    assert "## python -m trainer search loop {" in pages()["trainer.md"]


def test_a_command_of_another_package_leads_to_its_page() -> None:
    section = pages()["scorekit.md"].partition("## scorekit train {")[2].partition("\n## ")[0]
    assert "The same as `python -m trainer train`" in section
    section = pages()["scorekit.md"].partition("## scorekit search {")[2].partition("\n## ")[0]
    assert "The same as `python -m trainer search`" in section
    assert "The same as `python -m services.judge`" in pages()["scorekit.md"]


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
