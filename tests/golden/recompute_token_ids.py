"""Recompute token_ids.jsonl by the tokenizers that upstream's code uses; no test runs this.

    PYTHONPATH=. python -m tests.golden.recompute_token_ids

In an environment with transformers 4.30.2, MetricX's pin, for the ids of T5's form; then in one
with 4.57.6, the last that unbabel-comet 2.2 takes, for those of XLM-R's and DeBERTa's. All three
are made of the one file metricx_tiny/spiece.model, with no tokenizer.json beside it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "token_ids.jsonl"
FOLDER = Path(__file__).parent / "metricx_tiny"
DATA = Path(__file__).parents[1] / "data"
#: Form -> (transformers, class, name of its sentencepiece file).
FORMS = {
    "t5": ("4.30.2", "T5TokenizerFast", "spiece.model"),
    "xlm_roberta": ("4.57.6", "XLMRobertaTokenizerFast", "sentencepiece.bpe.model"),
    "deberta": ("4.57.6", "DebertaV2TokenizerFast", "spm.model"),
}
#: Texts of each file of English and Korean, English and German, Chinese and English prose.
PROSE = {"ko_en": 160, "ted_en_de": 100, "ted_zh_en": 100}
MARKS = (
    "</s> <s> <pad> <unk> <mask> <extra_id_0> <extra_id_99> [CLS] [SEP] [MASK] [UNK] <0x0A> <0xE9>"
)
SPACES = ["", " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x85", "\u00a0", "\u2003", "\u2028"]
SPACES += ["\u2029", "\u202f", "\u205f", "\u3000", "\u1680", "\u180e", "\u200b", "\u2060", "\ufeff"]
CHARACTERS = [chr(k) for k in (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x61C, 0xFFFD, 0xFFFE)]
CHARACTERS += (
    "▁…½①²₂ﬁﬀÅ\u212bΩ\u2126ſßİıǅㄱ㎏㍿豈﹏ﷺＡｂ３！￥｡ｶﾞ\U0001d518\U0001d15e\U00020000\U000e0001"
)
CHARACTERS += "\u0301\u1112\u1161\u11ab\u0e33\u200c\u200d\u200e\u202e\u20e3🇰\U0010ffff\U000f0000"
#: Several characters that are one to a reader, and words of other scripts.
CHARACTERS += ["e\u0301", "\u00e9", "a\u0323\u0307", "a\u0307\u0323", "q\u0301\u0301", "가\u11a8"]
CHARACTERS += ["\u1112\u1161\u11ab", "\u0e40\u0e33", "1\ufe0f\u20e3", "❤\ufe0f", "🇰🇷", "👍🏽"]
CHARACTERS += ["👩\u200d👩\u200d👧", "👩\u200d", "अनुच्छेद", "مرحبا", "שלום"]
WHOLE = [
    *(
        run
        for c in ("a", "ab", "가", "龘", " ", "\u0301", "9", "-", ".", "😀", "\n")
        for run in (c * 7, c * 300)
    ),
    "-999999999 999999999 99999999999999",  # segmentations of equal probability
    "source:  candidate: ",
    "source: a candidate: b  reference:  c ",
    "source: a\u00a0candidate:\u3000b",
    "</s></s> </s>",
    "a <pad>b<unk> c</s >< /s>",
    "＜/s＞ ＜mask＞ ［UNK］ ＜pad＞",
    "▁▁a▁b ▁c ▁",
    "[[CLS]] <<s>> <extra_id_ 0> <extra_id_100>",
]


def hostile() -> Iterator[str]:
    """Return texts that a tokenizer may read as something else."""
    for space in SPACES:
        yield from (
            space,
            f"a{space}b",
            f"{space}a b{space}",
            f"가 {space} 나",
            f"a.{space}{space}",
        )
    for character in CHARACTERS:
        yield from (character, f"ab{character}c {character} 집{character}{character}")
    for mark in MARKS.split():
        yield from (mark, f"a{mark}b", f"a {mark} b", f" {mark}  {mark} ")
    yield from WHOLE


def prose() -> Iterator[str]:
    """Return texts written by people, of at most 120 characters."""
    for name, count in PROSE.items():
        lines = (DATA / f"prose/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [
            text for line in lines for text in json.loads(line).values() if len(str(text)) > 20
        ]
        step = max(1, len(texts) // count)
        yield from (str(text)[:120] for text in texts[::step][:count])


def main() -> None:
    """Write the ids of the forms that this environment decides; the others are unchanged."""
    import transformers

    rows: dict[str, dict[str, Any]] = {}
    if FILE.exists():
        for line in FILE.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["text"]] = row
    texts = list(dict.fromkeys((*hostile(), *prose())))
    rows = {text: rows.get(text, {"text": text}) for text in texts}
    for form, (version, kind, name) in FORMS.items():
        if version != transformers.__version__:
            continue
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(FOLDER / "spiece.model", Path(folder, name))
            if form == "t5":
                for settings in ("tokenizer_config.json", "special_tokens_map.json"):
                    shutil.copy(FOLDER / settings, folder)
            tokenizer = getattr(transformers, kind).from_pretrained(folder)
        for text, row in rows.items():
            row[form] = tokenizer(text)["input_ids"]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows.values()]
    FILE.write_text("\n".join(lines) + "\n", encoding="ascii")
    print(len(lines), "texts")


if __name__ == "__main__":
    main()
