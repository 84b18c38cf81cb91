"""Make scorekit/text/letter_groups.txt: weights that tell short English and German texts apart.

They separate each of the two from other languages in Latin letters. Each has its own logistic
regression, over texts of user interfaces (Home Assistant: Apache-2.0; Django: BSD-3-Clause), talks
(bench/meta_eval) and documentation (demo/data). Half of these texts are for training, chosen by a
hash of the English text; the other half is for measuring.

    pip download --no-deps home-assistant-frontend==20250109.2 homeassistant==2024.3.3
    pip download --no-deps Django==5.2.19
    unzip each into FOLDER, and
    python -m tools.letter_groups FOLDER
"""

from __future__ import annotations

import gettext
import gzip
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scorekit.command import run_command
from scorekit.text.letter_groups import SCALE, TABLE, groups
from scorekit.text.markup import mask

ROOT = Path(__file__).parents[1]
NOTICE = """\
# Groups of letters, and how much each speaks for a language: see scorekit/text/letter_groups.py.
# Made by tools/letter_groups.py of texts of Home Assistant (Apache License 2.0), Django (BSD
# 3-Clause License), google/wmt-mqm-human-evaluation (Apache License 2.0) and the Python
# documentation (PSF License).
"""
TOLD = ("en", "de")
_OTHERS = "es fr it pt nl pl sv da fi cs tr hu ro id vi ca nb et sk lt"
OTHERS = tuple(_OTHERS.split())
#: Languages that are hard to tell from English or German count more.
HARD = {"en": 2.0, "de": 2.0, "nl": 1.5, "fr": 1.5, "es": 1.5}
MOST_TEXTS = {"en": 14_000, "de": 14_000}
MOST_TEXTS_OF_OTHERS = 7_000
RAREST = 12  # texts that a group stands in
MOST_GROUPS = 10_000  # of each language
PENALTY = 0.3
#: Added to the odds, so that one threshold of -1 leaves alone 99 of 100 texts of either language.
SHIFT = {"en": -0.5, "de": 1.25}
#: With plural forms, or a reference to another text.
_FORMS = re.compile(r"plural,|select,|%[sd(]|\[%key")

Row = tuple[str, str, str]  # language, English, text


def main() -> None:
    """Read the folder that the command names, and write the table."""
    texts, languages = _examples(list(_rows(Path(sys.argv[1]))))
    TABLE.write_text(NOTICE + "".join(f"{ln}\n" for ln in _learn(texts, languages)), "utf-8")


def is_seen(english: str) -> bool:
    """Return True if a text, with its translations, is in the training half."""
    return hashlib.sha256(english.encode()).digest()[0] % 2 == 0


def _rows(folder: Path) -> Iterator[Row]:
    yield from _from_json(folder / "hass_frontend/static/translations", r"(.*?)-[0-9a-f]{32}")
    yield from _from_json(folder / "homeassistant/components", r"([^.]+)")
    for path in sorted(folder.glob("django/**/locale/*/LC_MESSAGES/django.mo")):
        with path.open("rb") as file:
            catalog: dict[Any, str] = vars(gettext.GNUTranslations(file))["_catalog"]
        for english, text in catalog.items():
            if isinstance(english, str) and english:
                yield path.parts[-3], english, text
                yield "en", english, english
    with gzip.open(ROOT / "bench/meta_eval/mqm_ted_ende.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield from (("en", row["src"], text) for text in _sentences(row["src"]))
            yield from (("de", row["src"], text) for text in _sentences(row["mt"]))
    for line in (ROOT / "demo/data/pydocs.jsonl").read_text(encoding="utf-8").splitlines():
        english = json.loads(line)["src_text"]
        yield "en", english, english


def _from_json(folder: Path, name: str) -> Iterator[Row]:
    """Return texts of files that are named for their language, beside the English of the same
    key.
    """
    by_language: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*.json")):
        match = re.fullmatch(name, path.stem)
        if match and match[1] in (*TOLD, *OTHERS):
            flat = _flat(json.loads(path.read_text(encoding="utf-8")), str(path.parent))
            by_language.setdefault(match[1], {}).update(flat)
    english = by_language.get("en", {})
    for language, texts in by_language.items():
        yield from ((language, english[key], text) for key, text in texts.items() if key in english)


def _flat(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _flat(child, f"{key}.{name}")
    elif isinstance(node, str):
        yield key, node


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _examples(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Return texts and their languages, each text once, without those that were left in English.

    A longer text is in the list twice: as a whole, and as a few words of it.
    """
    rng = random.Random(0)
    english = {row[1].casefold() for row in rows}
    by_language: dict[str, list[str]] = {}
    for language, source, text in sorted(set(rows)):
        left = language != "en" and text.casefold() in english
        fits = language in (*TOLD, *OTHERS) and len(text) >= 4 and not _FORMS.search(text)
        if fits and is_seen(source) and not left:
            by_language.setdefault(language, []).append(text.strip())
    examples = []
    for language, texts in sorted(by_language.items()):
        rng.shuffle(texts)
        for text in dict.fromkeys(texts[: MOST_TEXTS.get(language, MOST_TEXTS_OF_OTHERS)]):
            examples.append((text[:200], language))
            if len(text) > 40:
                words = text.split()
                start = rng.randrange(max(1, len(words) - 4))
                examples.append((" ".join(words[start : start + rng.randint(2, 6)]), language))
    return [text for text, _ in examples], [language for _, language in examples]


def _learn(texts: list[str], languages: list[str]) -> Iterator[str]:
    """Yield the lines of the table."""
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    counter = CountVectorizer(
        analyzer=lambda text: groups(mask(text)), min_df=RAREST, dtype=np.float32
    )
    matrix = counter.fit_transform(texts)
    names = counter.get_feature_names_out()
    frequency = np.sqrt(np.asarray(matrix.sum(axis=0))[0])
    added, columns = [], []
    for target in TOLD:
        is_target = np.array([language == target for language in languages])
        weight = np.where(is_target, 0.5 / is_target.mean(), 0.5 / (1 - is_target.mean()))
        weight *= [1.0 if ln == target else HARD.get(ln, 1.0) for ln in languages]
        model = LogisticRegression(C=PENALTY, max_iter=80).fit(
            matrix, is_target, sample_weight=weight
        )
        scaled = np.rint(model.coef_[0] * SCALE).astype(int)
        strength = np.abs(model.coef_[0]) * frequency
        scaled[np.argsort(-strength)[MOST_GROUPS:]] = 0
        columns.append(scaled)
        added.append(round((float(model.intercept_[0]) + SHIFT[target]) * SCALE))
    yield "\t".join(("language", *TOLD))
    yield "\t".join(("added", *map(str, added)))
    for name, *weights in sorted(zip(names, *columns, strict=True)):
        if any(weights):
            yield "\t".join((name, *map(str, weights)))


if __name__ == "__main__":
    run_command(main)
