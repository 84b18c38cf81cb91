"""Check which files form MetricX's tokenizer and which are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from scorekit.errors import UserError
from services.metricx.model import load_tokenizer

GOLDEN = Path(__file__).parents[3] / "golden" / "metricx_tiny"
DEMO = Path(__file__).parents[4] / "demo" / "models" / "metricx"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
#: Adjacent marks, spaces of all kinds, characters that the normalizer joins, splits or drops.
NASTY = [
    *("</s>", "<pad>", "<unk>", "<extra_id_0>", "＜/s＞", "▁", " ", "  ", "\n", "\t", "\u00a0"),
    *("\u3000", "\x85", "\u2028", "\x00", "\x1f", "\u200b", "\u200d", "\ufeff", "\u00ad", "a"),
    *("the ", "집은 ", "日本", "龘", "😀", "ﬁ", "㍿", "½", "…", "Å", "e\u0301", "\u0301", "\u0323"),
    *("\u1112", "\u1161", "\u11ab", "🇰", "👩\u200d👧", "\u0e33", "\U000e0001", "\U0010ffff", "7"),
]


def copied(to: Path, *names: str) -> Path:
    """Return a folder with some of the golden tokenizer's files."""
    for name in names:
        shutil.copy(GOLDEN / name, to)
    return to


def stored() -> Tokenizer:
    """Return the golden tokenizer.json of transformers 4.30.2 with the marks that upstream adds.

    Its scores equal the file's to the last digit: `from_file` rounds some.
    """
    content = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    scores = [(token, score) for token, score in content["model"]["vocab"]]
    tokenizer.model = models.Unigram(scores, content["model"]["unk_id"])
    tokenizer.add_special_tokens(["</s>", "<unk>", "<pad>"])
    return tokenizer


LOADED, STORED = load_tokenizer(GOLDEN, "golden"), stored()


@given(st.lists(st.sampled_from(NASTY) | st.text(max_size=3), max_size=30).map("".join))
def test_ids_and_offsets_are_those_of_the_stored_tokenizer(text):
    actual, expected = LOADED.encode(text), STORED.encode(text)
    assert actual.ids == expected.ids
    assert actual.offsets == expected.offsets


def test_a_space_at_the_end_is_an_id_and_marks_are_found_in_a_text():
    """Check a final space, which transformers 4.57 and 5 strip before T5's tokenization."""
    space = LOADED.token_to_id("▁")
    assert LOADED.encode("a ").ids == [*LOADED.encode("a").ids[:-1], space, 1]
    assert LOADED.encode("a</s>").ids == [*LOADED.encode("a").ids, 1]


def test_a_folder_with_only_tokenizer_json_is_read_as_it_is(tmp_path):
    texts = ["a </s>b", "집은 빨간색이다. ", "龘<pad>"]
    only = load_tokenizer(copied(tmp_path, "tokenizer.json", *SETTINGS), "x")
    assert [only.encode(t).ids for t in texts] == [STORED.encode(t).ids for t in texts]
    demo = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer = load_tokenizer(DEMO, "demo")
    assert [tokenizer.encode(t).ids for t in texts] == [demo.encode(t).ids for t in texts]


def test_settings_say_which_marks_are_ids_of_their_own(tmp_path):
    folder = copied(tmp_path, "spiece.model")
    assert load_tokenizer(folder, "x").get_vocab_size() == 4000
    settings = {"extra_ids": 2, "eos_token": {"content": "</s>", "lstrip": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder, "x")
    assert tokenizer.encode("<extra_id_1><extra_id_0>").ids == [4000, 4001, 1]
    assert tokenizer.encode("a  </s>").ids == [*tokenizer.encode("a").ids, 1]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("spiece.model", b"", "no whole sentencepiece model"),
        ("spiece.model", b"version https://git-lfs.github.com/spec/v1", "no sentencepiece model"),
        ("spiece.model", (GOLDEN / "spiece.model").read_bytes()[:-9], "its end is missing"),
        ("spiece.model", (GOLDEN / "spiece.model").read_bytes()[:9000], "sentencepiece model"),
        ("tokenizer.json", b"{", "EOF"),
        ("tokenizer.json", (DEMO / "tokenizer.json").read_bytes(), "have other pieces; remove"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: expected a JSON object"),
        ("special_tokens_map.json", b"{", "special_tokens_map.json"),
        ("tokenizer_config.json", b'{"extra_ids": "many"}', "extra_ids"),
        ("special_tokens_map.json", b'{"eos_token": 7}', "eos_token is no token"),
        ("added_tokens.json", b'{"<new>": 4000}', "added_tokens.json has <new>"),
        ("added_tokens.json", b"[]", "added_tokens.json: expected a JSON object"),
    ],
)
def test_a_faulty_file_gets_a_line(tmp_path, name, content, reason):
    folder = copied(tmp_path, "spiece.model", "tokenizer.json", *SETTINGS)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^--tokenizer mine: cannot be read: .*{reason}") as raised:
        load_tokenizer(folder, "mine")
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"neither spiece\.model nor tokenizer\.json"):
        load_tokenizer(tmp_path, "mine")
