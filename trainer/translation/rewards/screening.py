"""Find before training what cannot be rewarded: sources, languages, rows and services."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scorekit.errors import UserError
from scorekit.rewards import RewardDefinition
from scorekit.rewards.engine import check_languages, required_fields
from scorekit.rewards.results import log_words
from scorekit.rewards.rules import load_gate
from scorekit.rewards.violations import OTHER_LANGUAGES
from scorekit.schemas import Scored
from scorekit.text.checks import language_probability
from scorekit.text.writing_scripts import scripts_of
from trainer.rl.distributed import DistributedContext
from trainer.runs.config import set_key
from trainer.translation.config import DataConfig
from trainer.translation.data import Example
from trainer.translation.rewards.config import GuardConfig, RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName, fields_of
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import nested_definition

log = logging.getLogger(__name__)
#: Bytes that every service reads if overlong texts are truncated: no service has a lower limit of
#: characters.
_SURE_BYTES = 10_000
#: Sources in one request.
_BATCH = 16
#: Rows that a message names.
_MAX_NAMED = 3
_PROBE = fields_of("Good morning.", "Guten Morgen.")


def bad_sources(
    sources: Sequence[str],
    rewarder: RewardClient,
    languages: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, str]:
    """Return source -> why no translation of it can be scored by a service with a weight.

    languages: of a source and its translations, for the judge.
    Services refuse a text for a NUL or for its length. So texts with a NUL are sent, and of the
    others the longest, until none of a batch is refused.
    """
    errors: dict[str, str] = {}
    distinct = list(dict.fromkeys(sources))
    languages = languages or {}

    def refused(name: ServiceName, batch: Sequence[str]) -> dict[str, str]:
        samples = [fields_of(src, "", *languages.get(src, ())) for src in batch]
        reasons = zip(batch, rewarder.refused_sources(name, samples), strict=True)
        return {src: reason for src, reason in reasons if reason is not None}

    with_nul = [src for src in distinct if "\0" in src]
    by_length = sorted((src for src in distinct if "\0" not in src), key=_size, reverse=True)
    for name in rewarder.needed:
        safe_bytes = _SURE_BYTES
        if rewarder.scoring.overlong == "error":  # a token has about one byte at least
            safe_bytes = min(safe_bytes, (rewarder.max_input_length(name) or 0) // 2)
        for batch in _batches(with_nul):
            errors |= refused(name, batch)
        for batch in _batches([src for src in by_length if _size(src) > safe_bytes]):
            batch_errors = refused(name, batch)
            if not batch_errors:
                break
            errors |= batch_errors
    return errors


def check_sources(
    examples: Sequence[Example], rewarder: RewardClient, key: str, *, refuse: bool
) -> dict[str, str]:
    """Return `bad_sources` of these examples, and log a warning with their rows.

    key: config key of the examples (`data.train`).
    Raises UserError, with the rows, if they are to be refused or there are no others.
    """
    languages = {row.src_text: (row.src_lang_code, row.tgt_lang_code) for row in examples}
    errors = bad_sources([example.src_text for example in examples], rewarder, languages)
    rows = [example for example in examples if example.src_text in errors]
    if not rows:
        return errors
    row_names = [
        f"{row.location or row.id} ({log_words(errors[row.src_text])})" for row in rows[:_MAX_NAMED]
    ]
    if len(rows) > _MAX_NAMED:
        row_names.append(f"and {len(rows) - _MAX_NAMED} more")
    message = (
        f"{key}: {len(rows)} of {len(examples)} sources cannot be scored with any "
        f"translation: {', '.join(row_names)}"
    )
    if refuse or len(rows) == len(examples):
        raise UserError(f"{message}. Correct those rows, or remove them (see data.bad_sources)")
    log.warning("%s; %s", message, "left out" if key == "data.train" else "they have no score")
    return errors


def screen(
    cfg: DataConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    rewarder: RewardClient,
    world: DistributedContext,
) -> list[Example]:
    """Return the training examples whose source can be scored.

    Held-out examples all stay, so that evaluations are comparable; those that cannot be scored are
    logged. Raises UserError as `check_sources`.
    """
    errors: list[dict[str, str]] = []
    refuse = cfg.bad_sources == "refuse"

    def check() -> None:
        errors.append(check_sources(train, rewarder, "data.train", refuse=refuse))
        for name, held_out in sets.items():
            check_sources(held_out, rewarder, set_key(name), refuse=refuse)

    world.on_main(check)  # every process has to leave out the same examples
    (train_errors,) = world.gather(errors)
    return [example for example in train if example.src_text not in train_errors]


def check_target_languages(
    definition: RewardDefinition | None, key: str, languages: Iterable[str]
) -> None:
    """Raise UserError if a gate does not know a target language of the examples.

    key: config key of the definition."""
    if definition is None:
        return
    rules = {name: load_gate(f"{key}.gates.{name}", g) for name, g in definition.gates.items()}
    try:
        check_languages(definition, rules, languages)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def check_guards(pairs: Iterable[tuple[str, str]], cfg: GuardConfig) -> None:
    """Raise UserError if a guard with a weight cannot work for a language.

    pairs: (source language, target language) of the examples.
    """
    for src_lang, tgt_lang in sorted(set(pairs)):
        if cfg.w_script and not scripts_of(tgt_lang):
            raise UserError(_unknown("script", tgt_lang, "scorekit/text/writing_scripts.py"))
        sample = language_probability("abc", tgt_lang, (src_lang, *OTHER_LANGUAGES))
        if cfg.w_language and sample is None:
            raise UserError(_unknown("language", tgt_lang, "the identifier"))


def _unknown(guard: str, language: str, owner: str) -> str:
    return (
        f"reward.guards.w_{guard}: {owner} does not know the language {language!r}. Give the "
        "examples another tgt_lang_code, or set the weight to 0"
    )


def check_references(examples: Sequence[Example], cfg: RewardConfig, key: str) -> None:
    """Raise UserError if chrF to the reference is rewarded and a row has none.

    key: config key of the rows.
    """
    key_of_rule = _reads_references(cfg)
    rows = [row.location or row.id for row in examples if key_of_rule and not row.ref_text]
    if rows:
        row_names = ", ".join([*rows[:_MAX_NAMED], *(["..."] if len(rows) > _MAX_NAMED else [])])
        raise UserError(
            f"{key}: {len(rows)} of {len(examples)} rows have no ref_text ({row_names}), which "
            f"{key_of_rule} requires. Remove those rows, or set its weight to 0"
        )


def _reads_references(cfg: RewardConfig) -> str | None:
    """Return the key of a rule with a weight that reads references; None without one."""
    if cfg.w_chrf:
        return "reward.w_chrf"
    nested = nested_definition(cfg)
    field = None if nested is None else required_fields(nested).get("ref")
    return field and f"reward.definition.{field}"


def check_spans(rewarder: RewardClient) -> None:
    """Raise UserError if spans are rewarded and the model marks none: only an answer shows it.

    If no answer is available now, the check is skipped: the run will wait for the service.
    """
    cfg = rewarder.cfg
    if not cfg.weight_of_spans(cfg.w_xcomet_span):
        return
    (result,) = rewarder.ask("xcomet", [_PROBE], [0]).result()
    if isinstance(result, Scored) and result.error_spans is None:
        raise UserError(
            f"{cfg.urls_key('xcomet')}: the model there marks no error spans. Set "
            "reward.w_xcomet_span to 0, or name one that does (xCOMET)"
        )


def _batches(sources: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(sources), _BATCH):
        yield sources[start : start + _BATCH]


def _size(text: str) -> int:
    return len(text.encode())
