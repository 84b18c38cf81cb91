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
    """A run's config (`SynthConfig`) with its sections `data` and `run`."""

    data: Any
    run: Any

    def model_copy(self, *, deep: bool = False) -> Self: ...


C = TypeVar("C", bound=HasPairs)


def check_languages(cfg: HasPairs) -> None:
    """Raise ValueError for an unknown language, and if the pair is missing or set twice."""
    data = cfg.data
    if data.pairs is None and not (data.src_lang and data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs")
    if data.pairs is not None and (data.src_lang or data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs: not both")
    for pair_cfg in pair_configs(cfg).values():
        languages(pair_cfg)


def pair_configs(cfg: C) -> dict[str, C]:
    """Return folder name -> config of each of `data.pairs`; without pairs the config under "".

    Raises ValueError for a repeated pair.
    """
    if cfg.data.pairs is None:
        return {"": cfg}
    configs: dict[str, C] = {}
    for pair in cfg.data.pairs:
        pair_cfg = cfg.model_copy(deep=True)
        pair_cfg.data.pairs = None
        pair_cfg.data.src_lang, pair_cfg.data.tgt_lang = pair.src_lang, pair.tgt_lang
        pair_cfg.data.files = cfg.data.files if pair.files is None else pair.files
        name = "-".join(short_tag(tag) for tag in languages(pair_cfg))
        if name in configs:
            raise ValueError(f"data.pairs: {name} is repeated")
        pair_cfg.run.out_dir, pair_cfg.run.answers = cfg.run.out_dir / name, answers_place(cfg)
        configs[name] = pair_cfg
    return configs


def answers_place(cfg: HasPairs) -> str:
    """Return where answers are cached. A dry run shares the answers of its run."""
    return cfg.run.answers or str(cfg.run.out_dir / "answers.sqlite")


def languages(cfg: HasPairs) -> tuple[str, str]:
    """Return the BCP-47 tags of source and target, such as ("ko-KR", "en-US").

    A user's tag stays if it has more than the language. Registers `data.languages` in this process.
    Raises ValueError."""
    for custom in cfg.data.languages:
        if unknown := set(custom.scripts) - SCRIPTS.keys():
            raise ValueError(
                f"data.languages: {custom.code}: unknown script {min(unknown)!r}. Expected one of "
                f"{', '.join(sorted(SCRIPTS))}"
            )
        add_language(custom.code, custom.name, madlad=custom.madlad, scripts=tuple(custom.scripts))
    language_by_key = {
        key: find_language(getattr(cfg.data, key)) for key in ("src_lang", "tgt_lang")
    }
    for key, language in language_by_key.items():
        if language is None:
            message = unknown_language(getattr(cfg.data, key))
            raise ValueError(f"data.{key}: {message} (add your own to data.languages)")
    source, target = (language.tag for language in language_by_key.values() if language)
    return source, target
