"""The commands of the curation steps, made from the table. Steps are imported when they are called.

`trainer.search.steps.commands.NAME` is the function of the command `search NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from scorekit.lazy_commands import Entry
from trainer.search.steps.options import CurationOptions
from trainer.search.steps.table import STEPS, step


def entries() -> dict[str, Entry]:
    """Return the commands for `lazy_group`."""
    return {name: Entry(f"{__name__}:{name}", row.help) for name, row in STEPS.items()}


def __getattr__(name: str) -> Callable[..., None]:
    """Return the command of a step."""
    if name not in STEPS:
        raise AttributeError(name)
    return _command(name)


def _command(name: str) -> Callable[..., None]:
    """Return the function of a step's command: it takes the step's options by name.

    An option of the step's own that has the name of a shared one goes to both; its help counts.
    """
    curation_step, shared = step(name), _shared_parameters()
    own_options = {
        option: Parameter(
            option,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is ... else default,
            annotation=annotation,
        )
        for option, (annotation, default) in curation_step.further.items()
    }

    def command(**values: Any) -> None:
        from trainer.search.steps.engine import run_step

        shared_values = {option: values[option] for option in values if option in shared}
        own_values = {option: values[option] for option in values if option in own_options}
        run_step(name, CurationOptions(**shared_values, further=own_values))

    parameters = [own_options.get(option) or shared[option] for option in curation_step.options]
    command.__name__, command.__doc__ = name, type(curation_step).__doc__
    vars(command)["__signature__"] = Signature(parameters)  # typer makes options of it
    return command


def _shared_parameters() -> dict[str, Parameter]:
    """Return the fields of `CurationOptions` as parameters; without a default they are required."""
    hints = get_type_hints(CurationOptions, include_extras=True)
    return {
        item.name: Parameter(
            item.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(CurationOptions)
        if item.name != "further"
    }
