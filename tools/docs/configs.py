"""Pages of all config keys and settings, from the pydantic classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scorekit.rewards import RewardDefinition
from services.judge.mqm import MqmExamples
from services.judge.rubrics import Rubric
from services.reward_model.prompts import ScoringPrompt
from synth.config import SynthConfig
from tools.docs.entries import (
    anchor,
    bounds_text,
    default_text,
    entry,
    escape,
    paragraphs,
    type_text,
)
from trainer.roleplay.config import RoleplayConfig
from trainer.search.config import SearchConfig
from trainer.search.rounds.config import RoundsConfig
from trainer.search.steps.config import CurationConfig
from trainer.sft.config import SftConfig
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.config import TranslationConfig


class ConfigPage(NamedTuple):
    """A page of one kind of file.

    use: what reads the file.
    """

    title: str
    config: type[BaseModel]
    use: str


_TRAIN = "Read by `scorekit train --config FILE`"
PAGES: dict[str, ConfigPage] = {
    "translation": ConfigPage("Translation run", TranslationConfig, f"{_TRAIN}."),
    "best-of-n": ConfigPage("Best-of-n SFT", BestOfNConfig, f"{_TRAIN}; `task: best_of_n`."),
    "search": ConfigPage(
        "Search run", SearchConfig, f"{_TRAIN} and `scorekit search`; `task: search`."
    ),
    "roleplay": ConfigPage("Role-play run", RoleplayConfig, f"{_TRAIN}; `task: roleplay`."),
    "sft": ConfigPage("SFT run", SftConfig, "Read by `scorekit sft --config FILE`."),
    "curation": ConfigPage(
        "Curation",
        CurationConfig,
        "Read by the curation commands of `scorekit search`, such as `verify`.",
    ),
    "rounds": ConfigPage("Rounds", RoundsConfig, "Read by `scorekit search loop --rounds FILE`."),
    "synth": ConfigPage(
        "Synthesis run", SynthConfig, "Read by `scorekit synth run --config FILE`."
    ),
    "reward": ConfigPage(
        "Reward definition",
        RewardDefinition,
        "Read by every adapter and by a translation run (`reward.definition`).",
    ),
    "rubric": ConfigPage(
        "Judge's rubric", Rubric, "Read by `scorekit serve judge --rubrics FOLDER`."
    ),
    "mqm-examples": ConfigPage(
        "Judge's MQM examples",
        MqmExamples,
        "Read by `scorekit serve judge --mqm-examples FILE`.",
    ),
    "reward-prompt": ConfigPage(
        "Prompt of a reward model",
        ScoringPrompt,
        "Read by `scorekit serve reward-model --prompt FILE`.",
    ),
}


class Section(NamedTuple):
    """A section of a config.

    meaning: of the key that holds it.
    """

    path: str
    config: type[BaseModel]
    meaning: str


def sections_of(config: type[BaseModel], path: str = "", meaning: str = "") -> Iterator[Section]:
    """Yield a config, then each section in it, in the order of a file."""
    yield Section(path, config, meaning)
    for name, field in config.model_fields.items():
        for section in models_in(field.annotation):
            inside = f"{_join(path, name)}{_step(field.annotation, section)}"
            yield from sections_of(section, inside, field.description or "")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the config classes in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _step(annotation: Any, section: type[BaseModel]) -> str:
    """Return what stands between a key and the keys of its section: a name, or a position."""
    origins = {get_origin(part) for part in (annotation, *get_args(annotation))}
    step = "[]" if origins & {list, tuple} else ".NAME" if dict in origins else ""
    rule = section.model_fields.get("rule")
    if rule is not None and get_origin(rule.annotation) is Literal:  # one class for each rule
        step += f"({get_args(rule.annotation)[0]})"
    return step


def is_plain_section(field: FieldInfo) -> bool:
    """Return whether a key is a section and nothing else: it needs no entry of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def config_page(page: ConfigPage) -> str:
    """Return the page of a config. Raises ValueError for a key without a description."""
    parts = [f"# {page.title}: all keys\n", paragraphs(page.config.__doc__ or ""), page.use]
    for section in sections_of(page.config):
        parts += _section_parts(section)
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _section_parts(section: Section) -> list[str]:
    keys = {
        name: field
        for name, field in section.config.model_fields.items()
        if not is_plain_section(field)
    }
    parts = []
    if section.path:
        parts.append(f"## {section.path} {{ #{anchor(section.path)} }}")
        documents = [section.meaning, *(section.config.__doc__ or "").split("\n\n")]
        parts += [escape(text) for text in dict.fromkeys(documents) if text.strip()]
    elif keys:
        parts.append("## Keys of the file { #keys }")
    return parts + [_key(_join(section.path, name), field) for name, field in keys.items()]


def _key(path: str, field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"the config key {path} has no description. Give its Field one")
    extra = field.json_schema_extra
    resumable = isinstance(extra, dict) and bool(extra.get("may_change"))
    facts = [type_text(field.annotation), default_text(field), bounds_text(field)]
    facts.append("may change when a run is resumed" if resumable else "")
    return entry(path, facts, escape(field.description))


def config_pages() -> dict[str, str]:
    """Return every page of configs, by file name."""
    pages = {f"{name}.md": config_page(page) for name, page in PAGES.items()}
    rows = [
        f"- [{page.title}]({name}.md): {escape((page.config.__doc__ or '').splitlines()[0])}"
        for name, page in PAGES.items()
    ]
    intro = (
        "Each kind of config file has a page with every key: its type, its default, its bounds and "
        "its meaning. An unknown key is an error. `--set section.key=value` overrides one."
    )
    pages["index.md"] = "\n".join(["# Config keys", "", intro, "", *rows, ""])
    return pages
