"""Commands that are imported when they are called, so that one command can name all of them.

The help of such a group imports nothing: it names packages that may not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from scorekit.command import clean_imports


class Entry(NamedTuple):
    """A command, and where it is defined.

    target: "module:name" of a typer app or of a function; "module:app command" is one command of an
    app.
    panel: the heading in the group's help.
    settings: "module:class" of a service's settings; then the function parses the arguments itself,
    and takes the words before them, too.
    """

    target: str
    help: str
    panel: str | None = None
    settings: str | None = None


def lazy_group(entries: Mapping[str, Entry]) -> type[TyperGroup]:
    """Return the class of a group with these commands, after those that its app has itself."""

    class LazyGroup(TyperGroup):
        def __init__(self, *, commands: Any = None, **options: Any) -> None:
            lazy: dict[str, Any] = {
                name: LazyCommand(name, entry) for name, entry in entries.items()
            }
            super().__init__(commands=lazy | dict(commands or {}), **options)

    return LazyGroup


class LazyCommand(TyperCommand):
    """Stands for a command in the help, and gives way to it when it is called."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help, rich_help_panel=entry.panel)
        self.entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        command = self.load() if self.entry.settings is None else _Service(self.name, self.entry)
        return command.make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        """Import the command. Ends this one with exit code 2 if a package is not installed."""
        target, _, name = self.entry.target.partition(" ")
        app = _import(target)
        if not isinstance(app, typer.Typer):
            function, app = app, typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            app.command()(function)
        command: Any = get_command(app)
        return command.commands[name] if name else command


class _Service(TyperCommand):
    """Passes its arguments on. Its help is that of the settings, which need no extra."""

    def __init__(self, name: str | None, entry: Entry) -> None:
        super().__init__(name)
        self._entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        context = typer.Context(self, parent, info_name, **extra)
        context.args = args
        return context

    def invoke(self, ctx: Any) -> Any:
        if "--help" in ctx.args:
            _import(self._entry.settings or "").print_help(ctx.command_path)
        return _import(self._entry.target)(ctx.args, ctx.command_path)


def _import(target: str) -> Any:
    """Return what a "module:name" names. Ends the command if a package is not installed."""
    module, _, name = target.partition(":")
    with clean_imports():
        return getattr(import_module(module), name)
