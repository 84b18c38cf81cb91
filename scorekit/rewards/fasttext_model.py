"""Language identification by a fastText model that the user gives by path.

Labels are codes or tags in any usual form: __label__ko, __label__kor_Hang, __label__zh-CN. Install
fasttext-predict, which only predicts, or a full build of fastText.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.languages import find_language
from scorekit.text.checks import without_names

_PREFIX = "__label__"


class FastTextLanguages:
    """A fastText model that names the language of a text.

    key: config key, for errors. Raises UserError if the file does not exist, is no model, names
    fewer than two languages, or if fastText is not installed.
    """

    def __init__(self, key: str, path: str) -> None:
        if not Path(path).is_file():
            raise UserError(f"{key}: {path}: this file does not exist. Give a fastText model")
        try:
            import fasttext
        except ModuleNotFoundError:
            raise UserError(f"{key}: install fastText: pip install fasttext-predict") from None
        try:
            self._model: Any = fasttext.load_model(path)
            labels = [label for _, label in self._predict("")]  # the end of the line is a word
        except ValueError as error:
            raise UserError(f"{key}: {path}: not a fastText model: {error}") from None
        self._language_by_label = {
            label: language.madlad
            for label in labels
            if (language := find_language(label.removeprefix(_PREFIX).replace("_", "-")))
        }
        self._languages = set(self._language_by_label.values())
        if len(self._languages) < 2:
            raise UserError(f"{key}: {path}: names fewer than two languages. Give another model")

    def knows(self, language: str) -> bool:
        """Return whether the model has a label for the language."""
        match = find_language(language)
        return match is not None and match.madlad in self._languages

    def target_probability(self, sample: Mapping[str, Any]) -> float | None:
        """Return the probability of all labels that are the sample's `tgt_lang`.

        Variants of a language (zh-CN, zh-TW) are the same. Code, links and the source's names are
        left out. Returns None if the model has no label for the language.
        """
        language = find_language(sample["tgt_lang"])
        if language is None or language.madlad not in self._languages:
            return None
        text = " ".join(without_names(sample["mt"], sample["src"]).split())
        total = sum(
            probability
            for probability, label in self._predict(text)
            if self._language_by_label.get(label) == language.madlad
        )
        return min(1.0, total)  # rounding of 32-bit numbers

    def _predict(self, text: str) -> list[tuple[float, str]]:
        """Return (probability, label) of all labels.

        The model's `predict` fails with numpy 2 in the older builds, so the call below it is used.
        """
        line = text.encode("utf-8", "replace").decode() + "\n"
        pairs: list[tuple[float, str]] = self._model.f.predict(line, -1, 0.0, "strict")
        return pairs
