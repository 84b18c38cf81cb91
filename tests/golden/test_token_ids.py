"""Compare ids of tokenizers made from sentencepiece's files with upstream's, text by text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scorekit.server.tokenizers import deberta_tokenizer, read_unigram_file, xlm_roberta_tokenizer
from services.metricx.model import load_tokenizer

GOLDEN = Path(__file__).parent
SPIECE = GOLDEN / "metricx_tiny" / "spiece.model"
MAKERS = {
    "t5": lambda: load_tokenizer(GOLDEN / "metricx_tiny", "golden"),
    "xlm_roberta": lambda: xlm_roberta_tokenizer(read_unigram_file(SPIECE)),
    "deberta": lambda: deberta_tokenizer(read_unigram_file(SPIECE)),
}


@pytest.mark.parametrize("form", MAKERS)
def test_ids_equal_upstream_s(form):
    """Check 360 texts written by people, and hundreds that a tokenizer may read as something
    else."""
    lines = (GOLDEN / "token_ids.jsonl").read_text(encoding="ascii").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) > 700
    encodings = MAKERS[form]().encode_batch([row["text"] for row in rows])
    wrong = [r["text"] for r, e in zip(rows, encodings, strict=True) if e.ids != r[form]]
    assert wrong == []
