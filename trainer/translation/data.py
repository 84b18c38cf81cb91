"""Prompts: rows of a file, folder or hub dataset -> Example -> the text of a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.languages import Language, find_language
from scorekit.prompts import fill, load_template
from scorekit.prompts import postprocess_translation as postprocess_translation
from scorekit.rows.samples import BadRows
from scorekit.text.chat_marks import neutral
from trainer.runs.readers import cell, id_cell, parse_rows, read_rows, text_cell
from trainer.translation.config import TranslationConfig

log = logging.getLogger(__name__)

REQUIRED = ("src_text", "src_lang", "tgt_lang")
OPTIONAL = ("id", "src_lang_code", "tgt_lang_code", "ref_text")


@dataclass(frozen=True, slots=True)
class Example:
    """A source text to translate.

    id: an int becomes a str.
    src_lang, tgt_lang: English names ("Korean").
    src_lang_code, tgt_lang_code: tags such as "ko-KR"; without one ("" or None) that of the
    language's name, else the name itself.
    ref_text: a reference translation if there is one; used in reports and by `w_chrf` only, never
    sent to a service.
    location: its row ("train.jsonl line 7"), for messages.

    Raises UserError if a text or a language is no str.
    """

    id: str
    src_text: str
    src_lang: str
    tgt_lang: str
    src_lang_code: str = ""
    tgt_lang_code: str = ""
    ref_text: str | None = None
    location: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and self.id is not None:
            object.__setattr__(self, "id", str(self.id))
        for name in ("src_text", "src_lang", "tgt_lang"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"Example {self.id!r}: {name}: a text is required")
        for side in ("src", "tgt"):
            if not getattr(self, f"{side}_lang_code"):
                code = _code_of(getattr(self, f"{side}_lang"))
                object.__setattr__(self, f"{side}_lang_code", code)


def load_examples(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    name: str | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    bad_rows: BadRows = "refuse",
) -> list[Example]:
    """Read examples.

    source: a file, a folder (see trainer/runs/readers.py for the formats), or a hub id.
    split: part of a folder or hub dataset (default for the latter: "train").
    limit: read this many rows at most.
    columns: our field name -> its column; `a.b` is `b` within the column `a`.
    name: configuration of a hub dataset.
    src_lang, tgt_lang: of rows without a language.
    bad_rows: "skip" leaves out the rows that cannot be used, with a warning.

    If a row has a column `translation` ({"en": ..., "ko": ...}) and no source text, the texts of
    its two languages are source and reference.
    A missing id becomes a hash of the row's source and languages; a missing language code is that
    of the language's name, else the name itself. Raises UserError with a line for each wrong
    row, its number and the field, unless they are skipped.
    """
    columns = dict(columns or {})
    unknown = sorted(set(columns) - {*REQUIRED, *OPTIONAL})
    if unknown:
        valid_names = ", ".join((*REQUIRED, *OPTIONAL))
        raise UserError(f"data.columns: unknown field {unknown[0]!r}. Choose from {valid_names}")
    rows = islice(read_rows(str(source), split, name, with_bad=True), limit)
    constant = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    parse = partial(_example, columns=columns, defaults=constant)
    examples = parse_rows(str(source), rows, parse, bad_rows)
    duplicates = [
        name for name, count in Counter(example.id for example in examples).items() if count > 1
    ]
    if duplicates:
        log.warning(
            "%s: %d ids occur more than once, %r first", source, len(duplicates), duplicates[0]
        )
    return examples


def load_train(cfg: TranslationConfig) -> list[Example]:
    """Return the examples to train on. Raises UserError."""
    data = cfg.data
    if data.train is None:
        raise UserError("data.train: required. Set the prompts to train on")
    return load_examples(
        data.train,
        split=data.train_split,
        limit=data.train_limit,
        columns=data.columns,
        name=data.train_name,
        src_lang=data.src_lang,
        tgt_lang=data.tgt_lang,
        bad_rows=data.bad_rows,
    )


def load_held_out(cfg: TranslationConfig) -> dict[str, list[Example]]:
    """Return the examples to evaluate on, by the names of their sets. Raises UserError."""
    return {name: load_set(cfg, name) for name in cfg.data.held_out}


def load_set(cfg: TranslationConfig, name: str) -> list[Example]:
    """Return the examples of one set. Raises UserError."""
    eval_set = cfg.data.held_out[name]
    options = eval_set.model_dump(exclude={"path"})
    return load_examples(
        eval_set.path, limit=cfg.eval.eval_limit, bad_rows=cfg.data.bad_rows, **options
    )


def in_both(key: str, train: Sequence[Example], held_out: Sequence[Example]) -> str:
    """Return a line on held-out rows that are also trained on; "" without any.

    Rows are equal if text and languages are equal, with any id.
    key: config key of the rows (`data.eval`).
    """

    def content(example: Example) -> tuple[str, str, str]:
        return example.src_text.strip(), example.src_lang_code, example.tgt_lang_code

    trained_contents = {content(example) for example in train}
    shared_examples = [example for example in held_out if content(example) in trained_contents]
    if not shared_examples:
        return ""
    return (
        f"{key}: {len(shared_examples)} of {len(held_out)} rows are also in data.train (the same "
        f"source and languages; first {shared_examples[0].location or shared_examples[0].id}). "
        "Their stats measure memorization, too"
    )


def format_translation_prompt(example: Example, template: str = "translategemma") -> str:
    """Return the prompt of an example. `template`: a name of scorekit.prompts or a path."""
    return fill(
        load_template(template),
        {
            "source_lang": example.src_lang,
            "src_lang_code": example.src_lang_code,
            "target_lang": example.tgt_lang,
            "tgt_lang_code": example.tgt_lang_code,
            "text": example.src_text,
        },
    )


def chat_prompt(example: Example, template: str = "translategemma") -> str:
    """Return `format_translation_prompt` for a trainer that renders the turn itself.

    Its tokenizer is not known here: each form of a special token in the source becomes text.
    """
    safe = dataclasses.replace(example, src_text=neutral(example.src_text))
    return format_translation_prompt(safe, template)


def _example(
    row: Mapping[str, Any],
    location: str,
    columns: Mapping[str, str],
    defaults: Mapping[str, str | None],
) -> Example:
    values = {}
    for field in (*REQUIRED, *OPTIONAL):
        column = columns.get(field, field)
        if field != "id":
            values[field] = text_cell(cell(row, column), location, column) or defaults.get(field)
    if not values["src_text"] and isinstance(row.get("translation"), dict):
        values |= _translation(row["translation"], values, location)
    column = columns.get("id", "id")
    values["id"] = id_cell(cell(row, column), location, column) or _hash(values)
    for field in REQUIRED:
        if not (values[field] or "").strip():
            column = columns.get(field, field)
            columns_hint = "" if column in row else f" (the row has {', '.join(map(str, row))})"
            raise UserError(f"{location}: {column}: missing or empty{columns_hint}")
    for side in ("src", "tgt"):
        name = values[f"{side}_lang"] or ""
        language = find_language(name)
        values[f"{side}_lang_code"] = values[f"{side}_lang_code"] or _code_of(name)
        if language is not None:
            # A code, as in a corpus or in the export of `synth`: the prompt needs the name.
            is_name = name.lower() == language.name.lower()
            values[f"{side}_lang"] = name if is_name else language.name
    return Example(**values, location=location)  # type: ignore[arg-type]


def _code_of(name: str) -> str:
    """Return the code of a language by its name or code; an unknown name is its own code."""
    language = find_language(name)
    if language is None:
        return name
    is_tag = name.lower() != language.name.lower() and "-" in name
    return name if is_tag else language.tag


def _same_language(key: str, language: Language) -> bool:
    """Return whether a key is a name of that language, in any variant ("en" and "en-GB")."""
    match = find_language(key)
    return match is not None and match.iso639_3 == language.iso639_3


def _translation(
    texts: Mapping[str, Any], values: Mapping[str, str | None], location: str
) -> dict[str, str | None]:
    """Return source and reference of {language: text}, by the row's languages or the config's."""
    keys = {}
    for side in ("src", "tgt"):
        name = values[f"{side}_lang"] or ""
        language = find_language(name)
        matching_keys = [key for key in texts if language and _same_language(key, language)]
        matching_keys = [name] if name in texts else matching_keys
        keys[side] = matching_keys[0] if matching_keys else None
        if not name or len(matching_keys) > 1 or (side == "src" and not matching_keys):
            raise UserError(
                f"{location}: translation: has {', '.join(map(str, texts))}. Set data.src_lang and "
                "data.tgt_lang, or name the columns (data.columns: "
                "{src_text: translation.en, ...})"
            )
    cells = {
        side: text_cell(texts[key], location, f"translation.{key}") if key else None
        for side, key in keys.items()
    }
    return {"src_text": cells["src"], "ref_text": values["ref_text"] or cells["tgt"]}


def _hash(values: Mapping[str, str | None]) -> str:
    text = "\x1f".join(str(values[field]) for field in REQUIRED)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
