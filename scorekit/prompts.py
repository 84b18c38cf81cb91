"""Named prompt templates, and the postprocessing of a completion before it is scored.

A template is filled once: braces in a source text are never expanded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from scorekit.errors import UserError

_TRANSLATEGEMMA = (
    "You are a professional {source_lang} ({src_lang_code}) to {target_lang} ({tgt_lang_code}) "
    "translator. Your goal is to accurately convey the meaning and nuances of the original "
    "{source_lang} text while adhering to {target_lang} grammar, vocabulary, and cultural "
    "sensitivities. Produce only the {target_lang} translation, without any additional "
    "explanations or commentary. Please translate the following {source_lang} text into "
    "{target_lang}:"
)

#: `translategemma` is the trainer's default. `translategemma_paper` has the two blank lines that
#: the report's Figure 3 (arXiv 2601.09012) shows before the text. `source` is the text alone, for
#: models whose chat template holds the instruction. `teacher` asks a general model.
TEMPLATES: dict[str, str] = {
    "translategemma": _TRANSLATEGEMMA + "\n\n{text}",
    "translategemma_paper": _TRANSLATEGEMMA + "\n\n\n{text}",
    "source": "{text}",
    "teacher": (
        "Translate the following {source_lang} ({src_lang_code}) text into {target_lang} "
        "({tgt_lang_code}). Keep its meaning, nuance and register, and follow the grammar and "
        "usage of {target_lang}. Answer with the {target_lang} translation only: no explanation, "
        "no comment, no quotation marks around it.\n\nText:\n{text}"
    ),
}
#: The system turn before the user turn with the `teacher` template.
TEACHER_SYSTEM = "You are a professional translator."
FIELDS = frozenset({"source_lang", "src_lang_code", "target_lang", "tgt_lang_code", "text"})
_FIELD = re.compile(r"\{([a-z_]+)\}")


def load_template(name: str) -> str:
    """Return a template by its name in TEMPLATES, or the content of the file at that path."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        valid_names = ", ".join(sorted(TEMPLATES))
        raise UserError(f"prompt template {name!r}: neither one of {valid_names} nor a file")
    try:
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: the template is not UTF-8") from None
    unknown = sorted(set(_FIELD.findall(template)) - FIELDS)
    if unknown:
        valid_names = ", ".join(sorted(FIELDS))
        raise UserError(
            f"{path}: unknown field {unknown[0]!r} in the template; valid fields: {valid_names}"
        )
    if "{text}" not in template:
        raise UserError(f"{path}: the template has no {{text}}")
    return template


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Replace each `{field}` of the template by its value, in one pass over the template.

    Values are inserted as they are: braces in a source text stay braces. Other braces of the
    template stay too. Raises KeyError for a field of FIELDS that has no value.
    """
    return _FIELD.sub(
        lambda match: fields[match.group(1)] if match.group(1) in FIELDS else match.group(),
        template,
    )


def postprocess_translation(raw_text: str) -> str:
    """Return the translation to score: a decoded completion without white space at its ends."""
    return raw_text.strip()


#: Postprocessing functions of the trainer and the adapters, by name.
POSTPROCESS: dict[str, Callable[[str], str]] = {"strip": postprocess_translation, "none": str}


def load_postprocess(name: str) -> Callable[[str], str]:
    """Return a function by its name in POSTPROCESS, or by `module:function`. Raises UserError."""
    if name in POSTPROCESS:
        return POSTPROCESS[name]
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        valid_names = ", ".join(POSTPROCESS)
        raise UserError(f"postprocess {name!r}: neither one of {valid_names} nor module:function")
    try:
        postprocess: Callable[[str], str] = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"postprocess {name!r} cannot be loaded: {error}") from None
    return postprocess
