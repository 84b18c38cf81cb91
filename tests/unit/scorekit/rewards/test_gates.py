"""Each gate, on good translations and on those that it is there for."""

from __future__ import annotations

import random

import pytest

from scorekit.errors import UserError
from scorekit.rewards import load_definition
from scorekit.rewards.rules import load_gate
from scorekit.rewards.violations import target_probability

SRC = "Please save all of your changes before you close the window, or they will be lost."
KOREAN = (
    "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 모두 사라지게 됩니다."
)
GERMAN = (
    "Bitte speichern Sie alle Änderungen, bevor Sie das Fenster schließen, sonst gehen sie weg."
)


def gate(**config):
    definition = {"components": {"a": {"rule": "copy"}}, "gates": {"g": config}}
    return load_gate("gates.g", load_definition(definition).gates["g"])


def sample(mt, tgt_lang="ko", src=SRC, src_lang="en", **fields):
    return {"src": src, "mt": mt, "src_lang": src_lang, "tgt_lang": tgt_lang, **fields}


def test_the_language_gate_closes_on_another_language():
    rule = gate(rule="language")
    assert rule(sample(KOREAN)).status == rule(sample(GERMAN, "de-DE")).status == "open"
    for mt, language in ((SRC, "ko"), (GERMAN, "ko"), (KOREAN, "German"), (SRC, "de")):
        result = rule(sample(mt, language))
        assert result.status == "closed"
        assert result.value == target_probability(SRC, mt, "en", language) < 0.5


def test_the_language_gate_lets_short_texts_pass():
    result = gate(rule="language")(sample("Save all changes"))
    assert (result.status, result.value) == ("open", None)
    assert result.message == "fewer than 40 letters"
    assert gate(rule="language", min_letters=5)(sample("all the changes")).status == "closed"
    dense = sample("변경한 내용을 모두 저장하고 닫으십시오", "de")  # 17 letters, as much as 34
    assert gate(rule="language")(dense).status == "open"
    assert gate(rule="language", min_letters=34)(dense).status == "closed"


def test_an_unknown_language_is_no_reward_unless_it_may_pass():
    rule, tolerant = gate(rule="language"), gate(rule="language", unknown="pass")
    for unknown in (sample(KOREAN, "tlh"), sample(KOREAN, None), sample(KOREAN, "")):
        assert rule(unknown).status == "unknown" and rule(unknown).message
        assert tolerant(unknown).status == "open"
    assert rule(sample(KOREAN, None)).message == "the sample has no tgt_lang"


def test_the_least_probability_decides():
    probability = target_probability(SRC, KOREAN, "en", "ko")
    assert 0.9 < probability <= 1
    assert gate(rule="language", min_probability=probability)(sample(KOREAN)).status == "open"
    mixed = f"{GERMAN} {SRC}"
    value = target_probability(SRC, mixed, "en", "de")
    assert 0 < value < 1
    assert gate(rule="language", min_probability=value)(sample(mixed, "de")).status == "open"
    above = min(1.0, value * 1.01)
    assert gate(rule="language", min_probability=above)(sample(mixed, "de")).status == "closed"


@pytest.mark.parametrize("languages", [("en", "ko"), (None, None), ("", "ko")])
def test_the_copy_gate_closes_on_copied_source(languages):
    rule = gate(rule="copy")
    src_lang, tgt_lang = languages
    assert rule(sample(SRC, tgt_lang, src_lang=src_lang)).status == "closed"
    assert rule(sample(SRC, tgt_lang, src_lang=src_lang)).value == 1.0
    assert rule(sample(KOREAN, tgt_lang, src_lang=src_lang)).status == "open"


def test_what_the_copy_gate_leaves_open():
    rule = gate(rule="copy")
    assert rule(sample("Save", src="Save")).status == "open"  # a name?
    assert gate(rule="copy", min_letters=4)(sample("Save", src="Save")).status == "closed"
    assert rule(sample(SRC, "en-GB", src_lang="en-US")).status == "open"
    half = f"{SRC} {KOREAN}"
    value = rule(sample(half)).value
    assert 0.5 < value < 0.9 and rule(sample(half)).status == "open"
    assert gate(rule="copy", max_share=value - 0.01)(sample(half)).status == "closed"


def test_the_length_gate_closes_outside_the_band():
    rule = gate(rule="length")
    assert rule(sample(KOREAN)).status == "open"
    for mt in ("", "창", KOREAN * 4):
        assert rule(sample(mt)).status == "closed"
    assert gate(rule="length", slack=100.0)(sample(KOREAN * 4)).status == "open"
    assert rule(sample("저장된 모든 변경 내용", src="Save")).status == "open"
    assert (
        gate(rule="length", floor=0)(sample("저장된 모든 변경 내용", src="Save")).status == "closed"
    )
    assert rule(sample("창", src="")).value is None  # infinite


# -- fastText --------------------------------------------------------------------------------------

_WORDS = {
    "kor_Hang": "창을 닫기 전에 변경한 내용을 모두 저장하세요 그렇지 않으면 사라집니다 집은 빨간색",
    "deu_Latn": "bitte speichern sie alle änderungen bevor das fenster geschlossen wird haus rot",
    "en": "please save all of your changes before you close the window the house is red lost",
    "zh-CN": "请 在 关闭 窗口 之前 保存 所有 更改 否则 它们 将 丢失 房子 是 红色 的",
    "zh_Hant": "請 在 關閉 視窗 之前 儲存 所有 變更 否則 它們 將 遺失 房子 是 紅色 的",
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Train a small language model and return its path."""
    fasttext = pytest.importorskip("fasttext", reason="it has no wheel for this Python")
    folder, numbers = tmp_path_factory.mktemp("fasttext"), random.Random(0)
    lines = []
    for label, text in _WORDS.items():
        for _ in range(60):
            words = numbers.sample(text.split(), 8)
            lines.append(f"__label__{label} {' '.join(words)}\n")
    (folder / "train.txt").write_text("".join(lines), encoding="utf-8")
    model = fasttext.train_supervised(
        str(folder / "train.txt"), dim=8, epoch=30, minn=1, maxn=3, bucket=2000, thread=1, verbose=0
    )
    model.save_model(str(folder / "languages.bin"))
    return str(folder / "languages.bin")


def test_a_fasttext_model_tells_the_language(model_path):
    rule = gate(rule="language", model=model_path)
    german = GERMAN + "\n" + GERMAN  # one line at a time
    for mt, language in ((KOREAN, "ko-KR"), (german, "German"), (SRC, "eng")):
        result = rule(sample(mt, language))
        assert result.status == "open" and 0.5 <= result.value <= 1.0
    for mt, language in ((SRC, "ko"), (GERMAN, "kor"), (KOREAN, "de")):
        result = rule(sample(mt, language))
        assert result.status == "closed" and 0.0 <= result.value < 0.5


def test_variants_of_a_language_are_the_same_for_a_fasttext_model(model_path):
    rule = gate(rule="language", model=model_path, min_letters=10)
    simplified = "请 在 关闭 窗口 之前 保存 所有 更改"
    values = [rule(sample(simplified, language)).value for language in ("zh", "zh-TW", "zh-Hans")]
    assert values[0] == values[1] == values[2] > 0.8


def test_a_language_without_a_label_is_unknown_to_a_fasttext_model(model_path):
    for language in ("ja", "nonsense", None):
        assert gate(rule="language", model=model_path)(sample(KOREAN, language)).status == "unknown"


def test_half_a_surrogate_pair_is_read_as_a_question_mark_by_a_fasttext_model(model_path):
    rule = gate(rule="language", model=model_path, min_letters=1)
    assert rule(sample(f"{KOREAN} \ud800")) == rule(sample(f"{KOREAN} ?"))


def test_a_file_that_is_no_model_is_one_line(model_path, tmp_path):
    (tmp_path / "other.bin").write_text("words")
    with pytest.raises(UserError, match=r"gates.g.model: .*other.bin: not a fastText model"):
        gate(rule="language", model=str(tmp_path / "other.bin"))
