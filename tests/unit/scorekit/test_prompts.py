"""Check prompt templates byte for byte."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from scorekit.prompts import TEACHER_SYSTEM, TEMPLATES, fill, load_template

FIELDS = {
    "source_lang": "English",
    "src_lang_code": "en-US",
    "target_lang": "Korean",
    "tgt_lang_code": "ko-KR",
    "text": "The house is {text}, isn't it?\n{source_lang} {unknown}",
}
TRANSLATEGEMMA = (
    "You are a professional English (en-US) to Korean (ko-KR) translator. Your goal is to "
    "accurately convey the meaning and nuances of the original English text while adhering to "
    "Korean grammar, vocabulary, and cultural sensitivities. Produce only the Korean translation, "
    "without any additional explanations or commentary. Please translate the following English "
    "text into Korean:"
)
GOLDEN = {
    "translategemma": TRANSLATEGEMMA + "\n\n" + FIELDS["text"],
    "translategemma_paper": TRANSLATEGEMMA + "\n\n\n" + FIELDS["text"],
    "source": FIELDS["text"],
    "teacher": (
        "Translate the following English (en-US) text into Korean (ko-KR). Keep its meaning, "
        "nuance and register, and follow the grammar and usage of Korean. Answer with the Korean "
        "translation only: no explanation, no comment, no quotation marks around it.\n\nText:\n"
        + FIELDS["text"]
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_is_its_golden_text_and_never_expands_the_source(name):
    assert fill(load_template(name), FIELDS) == GOLDEN[name]


def test_the_teacher_s_system_turn_is_short():
    assert TEACHER_SYSTEM == "You are a professional translator."


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("{target_lang}: {text}", encoding="utf-8")
    assert fill(load_template(str(path)), FIELDS | {"text": "안녕"}) == "Korean: 안녕"


@pytest.mark.parametrize(
    ("content", "reason"), [("{txet}", "unknown field 'txet'"), ("no field", "has no {text}")]
)
def test_a_wrong_template_file_is_one_clear_line(tmp_path, content, reason):
    path = tmp_path / "mine.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=reason):
        load_template(str(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        UserError, match=r"neither one of source, teacher, translategemma.* nor a file"
    ):
        load_template("translategema")


def test_a_field_without_a_value_is_an_error_not_a_brace_in_a_prompt():
    with pytest.raises(KeyError, match="source_lang"):
        fill("{source_lang}: {text}", {"text": "a"})


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xff{text}")
    with pytest.raises(UserError, match="not UTF-8"):
        load_template(str(path))
