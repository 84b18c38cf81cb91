"""The languages of a config: its pair or pairs, and languages of the caller's own."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

from pydantic import Field

from scorekit.config import Config
from scorekit.languages import add_language, find_language, short_tag, unknown_language
from scorekit.text.writing_scripts import SCRIPTS


class LanguageConfig(Config):
    """A language that is in no registry, or that you call otherwise."""

    code: str = Field(description="What src_lang, tgt_lang and the export call it.")
    name: str = Field(min_length=1, description="What the prompt calls it.")
    madlad: str | None = Field(None, description="Its folder in the corpus; null: the code.")
    scripts: list[str] = Field(
        [], description="Of scorekit/text/writing_scripts.py (Latin, Hangul); none: not checked."
    )


class PairConfig(Config):
    """A language pair of several."""

    src_lang: str = Field(description="As data.src_lang.")
    tgt_lang: str = Field(description="As data.tgt_lang.")
    files: list[str] | None = Field(None, description="As data.files; null: data.files itself.")


class HasPairs(Protocol):
    """Of a run's config (`SynthConfig`): its sections `data` and `run`."""

    data: Any
    run: Any

    def model_copy(self, *, deep: bool = False) -> Self: ...


C = TypeVar("C", bound=HasPairs)


def check_languages(cfg: HasPairs) -> None:
    """Raises ValueError for an unknown one, and where the pair is given twice or not at all."""
    data = cfg.data
    if data.pairs is None and not (data.src_lang and data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs")
    if data.pairs is not None and (data.src_lang or data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs: not both")
    for one in pair_configs(cfg).values():
        languages(one)


def pair_configs(cfg: C) -> dict[str, C]:
    """Folder name -> config of each of `data.pairs`; the config itself under "" without them.

    Raises ValueError for a pair that stands there twice.
    """
    if cfg.data.pairs is None:
        return {"": cfg}
    configs: dict[str, C] = {}
    for pair in cfg.data.pairs:
        one = cfg.model_copy(deep=True)
        one.data.pairs = None
        one.data.src_lang, one.data.tgt_lang = pair.src_lang, pair.tgt_lang
        one.data.files = cfg.data.files if pair.files is None else pair.files
        name = "-".join(short_tag(tag) for tag in languages(one))
        if name in configs:
            raise ValueError(f"data.pairs: {name} stands there twice")
        one.run.out_dir, one.run.answers = cfg.run.out_dir / name, answers_place(cfg)
        configs[name] = one
    return configs


def answers_place(cfg: HasPairs) -> str:
    """Where answers are kept: of a dry run, too, in the folder of the run itself."""
    return cfg.run.answers or str(cfg.run.out_dir / "answers.sqlite")


def languages(cfg: HasPairs) -> tuple[str, str]:
    """BCP-47 tags of source and target, such as ("ko-KR", "en-US"): the caller's own where it says
    more than the language. Lets this process know `data.languages`. Raises ValueError."""
    for own in cfg.data.languages:
        if unknown := set(own.scripts) - SCRIPTS.keys():
            raise ValueError(
                f"data.languages: {own.code}: no script {min(unknown)!r}; there are "
                f"{', '.join(sorted(SCRIPTS))}"
            )
        add_language(own.code, own.name, madlad=own.madlad, scripts=tuple(own.scripts))
    found = {key: find_language(getattr(cfg.data, key)) for key in ("src_lang", "tgt_lang")}
    for key, language in found.items():
        if language is None:
            told = unknown_language(getattr(cfg.data, key))
            raise ValueError(f"data.{key}: {told} (one of your own goes into data.languages)")
    source, target = (language.tag for language in found.values() if language)
    return source, target
