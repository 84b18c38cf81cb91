"""Pages of every command: options from the typer apps and argument parsers, targets from make."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from typer.main import get_command

from scorekit.__main__ import COMMANDS, app
from scorekit.lazy_commands import LazyCommand
from tools.docs.entries import anchor, entry, escape, paragraphs, type_text
from tools.docs.settings import SERVICES, service_options

ROOT = Path(__file__).parents[2]
#: Packages whose modules with a `__main__` block are commands.
PACKAGES = ("scorekit", "services", "trainer", "synth", "synth_parallel")
SCRIPTS = ("tools", "demo", "bench", "evidence", "deploy", "examples")
#: Pages of `scorekit`: name -> title. A group of commands has one, and so have all trainings.
GROUPS = {
    "scorekit": "scorekit",
    "training": "Training commands",
    "roleplay": "scorekit roleplay",
    "search": "scorekit search",
    "synth": "scorekit synth",
    "ingest": "scorekit ingest",
    "adapter": "scorekit adapter",
}


class Command(NamedTuple):
    """A command or sub-command."""

    name: str
    help: str
    parameters: list[Any]


@cache
def all_commands() -> list[Command]:
    """Return `scorekit` and everything below it but the services, whose options are settings."""
    return list(_walk(get_command(app), "scorekit"))


def _walk(command: Any, name: str) -> Iterator[Command]:
    if isinstance(command, LazyCommand):
        if command.entry.settings:
            return
        command = command.load()
    parameters = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    yield Command(name, command.help or "", parameters)
    for sub_name, sub_command in getattr(command, "commands", {}).items():
        yield from _walk(sub_command, f"{name} {sub_name}")


def group_of(command: Command) -> str:
    """Return the page of a command."""
    first = [*command.name.split(), ""][1]
    if first in COMMANDS and COMMANDS[first].panel == "Training":
        return "training"
    return first if first in GROUPS else "scorekit"


def group_page(group: str) -> str:
    """Return the page of a group of commands."""
    title = GROUPS[group]
    parts = [f"# {title}\n"]
    for command in all_commands():
        if group_of(command) != group:
            continue
        words = command.name.removeprefix("scorekit")
        if command.name != title:
            parts.append(f"## {command.name} {{ #{anchor(words)} }}\n")
        parts.append(f"{paragraphs(command.help)}\n")
        parts += [_parameter(words, parameter) for parameter in command.parameters]
    return "\n".join(parts)


def _parameter(command: str, parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    name = (parameter.metavar or parameter.name.upper()) if is_argument else ""
    flags = name or ", ".join([*parameter.opts, *parameter.secondary_opts])
    if not is_argument and not getattr(parameter, "help", None):
        raise ValueError(f"{command} {flags} has no help. Give its typer.Option one")
    help = getattr(parameter, "help", None) or ""
    return entry(
        flags, _facts(parameter), escape(help), id=anchor(f"{command.strip()} {parameter.name}")
    )


def _facts(parameter: Any) -> list[str]:
    annotation = parameter.type_descriptor.annotation
    is_flag = getattr(parameter, "is_flag", False)
    bounds = [
        f"{sign} {value}"
        for sign, value in (("≥", parameter.min), ("≤", parameter.max))
        if value is not None
    ]
    default = "" if parameter.default in (None, False, (), []) else f"default `{parameter.default}`"
    many = "may be repeated" if getattr(parameter, "multiple", False) else ""
    required = "required" if parameter.required else default
    return ["flag" if is_flag else type_text(annotation), required, ", ".join(bounds), many]


def modules_with_main(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the modules that can be started, and the docstring of each."""
    commands_by_name = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if '\nif __name__ == "__main__":' in text:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                commands_by_name[name] = ast.get_docstring(ast.parse(text)) or ""
    return commands_by_name


def service_page(service: str) -> str:
    """Return the page of the command of a service."""
    document = modules_with_main(("services",))[f"services.{service}.__main__"]
    about = SERVICES[service].__doc__ or document
    parts = [
        f"# scorekit serve {service.replace('_', '-')}\n",
        paragraphs(about),
        "",
        service_options(service),
    ]
    return "\n".join(parts)


def tools_page() -> str:
    """Return the page of the scripts of `tools` and `deploy`, with their options."""
    parts = ["# Tools\n", "Scripts for people who work on the project.\n"]
    for module, document in modules_with_main(("tools", "deploy")).items():
        name = module.removesuffix(".__main__")
        parts.append(f"## python -m {name} {{ #{anchor(name)} }}\n")
        parts.append(f"{_document(document)}\n")
        parts += [_argument(name, action) for action in _actions(module)]
    return "\n".join(parts)


def _document(text: str) -> str:
    """Return a module's docstring; indented lines of it are examples."""
    parts = []
    for part in text.split("\n\n"):
        is_example = all(line.startswith("    ") for line in part.splitlines())
        parts.append(f"```\n{textwrap.dedent(part)}\n```" if is_example else escape(part))
    return "\n\n".join(parts)


class _ParserReached(Exception):
    """Carries the parser that a script has built."""


def _actions(module: str) -> list[argparse.Action]:
    """Return the options of a script by running its main up to the parser."""
    main = getattr(importlib.import_module(module), "main", None)
    source = Path(ROOT, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    if main is None or "ArgumentParser(" not in source:
        return []

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _ParserReached(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            main()
        except _ParserReached as reached:
            actions = reached.args[0]._actions
            return [action for action in actions if action.dest != "help"]
    raise ValueError(f"{module}: main() calls no parse_args")


def _argument(module: str, action: argparse.Action) -> str:
    flags = ", ".join(action.option_strings) or action.dest.upper()
    kind = getattr(action.type, "__name__", "") if action.nargs != 0 else "flag"
    kind = {"int": "integer", "float": "number", "str": "text"}.get(kind, kind.lower() or "text")
    has_default = action.default not in (None, False, [], argparse.SUPPRESS)
    facts = [kind, f"default `{action.default}`" if has_default else ""]
    text = escape((action.help or "").replace("%(default)s", str(action.default)))
    return entry(flags, facts, text, id=anchor(f"{module}-{action.dest}"))


def scripts_page() -> str:
    """Return the list of everything else that can be started."""
    parts = ["# Demos, benchmarks and training runs\n"]
    for package in ("demo", "bench", "evidence", "examples"):
        parts.append(f"## {package}\n")
        for module, document in modules_with_main((package,)).items():
            name = module.removesuffix(".__main__")
            command = f"python {module.replace('.', '/')}.py"
            command = command if package == "examples" else f"python -m {name}"
            parts.append(f"`{command}`\n:   {escape(document.split(chr(10) * 2)[0])}\n")
    return "\n".join(parts)


def make_page() -> str:
    """Return the page of the targets of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z0-9-]+):.*?## (.*)$", text, re.MULTILINE)
    rows = [f"`make {name}` {{ #{name} }}\n:   {escape(help)}\n" for name, help in targets]
    return "\n".join(["# make\n", "People and CI call the same targets.\n", *rows])


def command_pages() -> dict[str, str]:
    """Return every page of commands, by file name."""
    pages = {f"{group}.md": group_page(group) for group in GROUPS}
    pages |= {f"{service}.md": service_page(service) for service in SERVICES}
    pages |= {"tools.md": tools_page(), "scripts.md": scripts_page(), "make.md": make_page()}
    modules = modules_with_main(PACKAGES)
    listed = "\n".join(
        f"`python -m {module.removesuffix('.__main__')}`\n"
        f":   {escape(document.split(chr(10) * 2)[0])}\n"
        for module, document in modules.items()
    )
    links = "\n".join(f"- [{page_title(page)}]({name})" for name, page in pages.items())
    pages["index.md"] = (
        "# Commands\n\nEvery command says its options with `--help`, too. What each exit code "
        f"means: [errors and exit codes](../errors.md).\n\n{links}\n\n"
        "## The names of modules\n\nEvery command has the name of a module, too, which starts "
        "where `scorekit` is not on the path, and under `accelerate launch -m`. `synth_parallel` "
        f"is `scorekit synth`.\n\n{listed}"
    )
    return pages


def page_title(page: str) -> str:
    """Return the title of a page."""
    return page.partition("\n")[0].removeprefix("# ")
