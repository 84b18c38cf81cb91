"""Pages of the services' options and of the environment variables, from the settings classes."""

from __future__ import annotations

import argparse

from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from scorekit.adapters.shared import RewardSettings
from scorekit.server.settings import Secrets, ServiceSettings
from services.embedder.settings import EmbedderSettings
from services.judge.settings import JudgeSettings, UpstreamSecrets
from services.metricx.settings import MetricXSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings, RewardUpstreamSecrets
from services.xcomet.settings import XCometSettings
from tools.docs.entries import bounds_text, default_text, entry, escape, paragraphs, type_text

SERVICES: dict[str, type[ServiceSettings]] = {
    "metricx": MetricXSettings,
    "xcomet": XCometSettings,
    "judge": JudgeSettings,
    "embedder": EmbedderSettings,
    "retriever": RetrieverSettings,
    "reward_model": RewardModelSettings,
}
#: Classes whose values come from environment variables alone.
ENVIRONMENT: dict[str, type[BaseSettings]] = {
    "Secrets of every service": Secrets,
    "Secret of the judge": UpstreamSecrets,
    "Secret of the reward model": RewardUpstreamSecrets,
    "Settings of the adapters for trainers": RewardSettings,
}


def service_options(service: str) -> str:
    """Return the options of a service: its own first, then those of every service."""
    settings = SERVICES[service]
    shared = ServiceSettings.model_fields
    own_fields: list[str] = []
    common: list[str] = []
    for name, field in settings.model_fields.items():
        if argparse.SUPPRESS in field.metadata:  # set by the service, not by its user
            continue
        flag = f"--{'no-' if field.default is True else ''}{name.replace('_', '-')}"
        text = _entry(settings, name, field, flag)
        # An option that the service declares anew has a default of its own.
        is_own = name not in shared or shared[name].default != field.default
        (own_fields if is_own else common).append(text)
    headings = ("## Options of this service\n", "## Options of every service\n")
    return "\n".join([headings[0], *own_fields, headings[1], *common])


def _entry(settings: type[BaseSettings], name: str, field: FieldInfo, flag: str = "") -> str:
    """Return the entry of a setting.

    flag: empty for one that only the environment sets.
    """
    if not field.description:
        raise ValueError(f"{settings.__name__}.{name} has no description. Give its Field one")
    variables = [f"{settings.model_config.get('env_prefix', '')}{name.upper()}"]
    if isinstance(field.validation_alias, AliasChoices):
        variables = [str(choice) for choice in field.validation_alias.choices]
    facts = [type_text(field.annotation), default_text(field), bounds_text(field)]
    named = variables if flag else variables[1:]
    if named:
        facts.append(f"environment: {', '.join(f'`{variable}`' for variable in named)}")
    title = flag or variables[0]
    return entry(title, facts, escape(field.description), id=name if flag else title)


def environment_page() -> str:
    """Return the page of the values that only environment variables give."""
    parts = [
        "# Environment variables\n",
        "Values that are never flags, so that they appear neither in `ps` nor in a saved config. "
        "Each option of a service has a variable, too: see the command of the service.\n",
    ]
    for title, settings in ENVIRONMENT.items():
        parts.append(f"## {title}\n\n{paragraphs(settings.__doc__ or '')}\n")
        parts += [_entry(settings, name, field) for name, field in settings.model_fields.items()]
    return "\n".join(parts)
