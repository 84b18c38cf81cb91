"""Check that texts in another language are detected with almost no false positives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scorekit.text.checks import whole_identifier
from synth.config import SegmentationConfig, SynthConfig
from synth.sources.ingest import Ingest, SourceLanguage, _Odds
from synth.sources.madlad import Document
from synth.sources.parts import PartCounts
from synth.sources.sampling import BottomK

ROOT = Path(__file__).parents[4]
MARGIN = SegmentationConfig().language_margin
#: Articles 1 and 3 of the Universal Declaration of Human Rights.
TEXTS = {
    "en": "All human beings are born free and equal in dignity and rights.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ja": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
}


def is_other(text, language, margin=MARGIN):
    return SourceLanguage(language, margin).is_other([text])[0]


@pytest.mark.parametrize("true_language", TEXTS)
def test_a_text_is_told_from_every_other_language(true_language):
    assert not is_other(TEXTS[true_language], true_language)
    for language in TEXTS.keys() - {true_language}:
        assert is_other(TEXTS[true_language], language), language


def test_sources_are_in_the_variant_that_the_tag_names():
    simplified, traditional = TEXTS["zh"], "人人生而自由，在尊嚴和權利上一律平等。"
    assert is_other(simplified, "zh-TW") and is_other("这是一个短句。", "zh-Hant")
    assert is_other(traditional, "zh-CN")
    assert not is_other(traditional, "zh-TW") and not is_other(simplified, "zh-Hans")
    assert not is_other(traditional, "zh") and not is_other(simplified, "zh")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Too short to say.", "deu"),
        ("OpenAI GPT, DeepMind AlphaGo, Microsoft Azure 등 여러 인공지능 회사의 제품", "kor"),
        ("The German word is Weltschmerz, the French one is ennui, says the book.", "eng"),
        ("All human beings are born free and equal in dignity and rights.", "tlh"),
        ("1234567890 1234567890 1234567890 1234567890", "deu"),
    ],
)
def test_what_cannot_be_told_is_kept(text, language):
    assert not is_other(text, language)


def _rows(path, key):
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[key] for line in lines]


@pytest.mark.parametrize(
    ("path", "key", "language"),
    [
        ("tests/data/prose/ko_en.jsonl", "ko", "kor"),
        ("tests/data/prose/ko_en.jsonl", "en", "eng"),
        ("demo/data/pydocs.jsonl", "src_text", "eng"),
        ("demo/data/pydocs.jsonl", "ref_text", "kor"),
        ("demo/data/foreign_de.jsonl", "text", "deu"),
    ],
)
def test_of_real_text_fewer_than_one_in_a_thousand_is_taken_for_another_language(
    path, key, language
):
    texts = _rows(path, key)
    flags = SourceLanguage(language, MARGIN).is_other(texts)
    assert sum(flags) <= len(texts) / 1000, [
        text for text, other in zip(texts, flags, strict=True) if other
    ]


@pytest.mark.parametrize("language", ["deu", "fra", "kor", "zho", "rus"])
def test_of_english_prose_nearly_all_that_is_long_enough_is_found(language):
    texts = [text for text in _rows("tests/data/prose/ko_en.jsonl", "en") if len(text) > 60]
    flags = SourceLanguage(language, MARGIN).is_other(texts)
    assert sum(flags) >= 0.97 * len(texts)


def test_many_texts_at_once_get_the_identifiers_own_numbers():
    odds = _Odds(("de",), ("en", "fr"))
    texts = [*TEXTS.values(), "", "ß", TEXTS["de"] * 20, "\ud800 broken"]
    model = whole_identifier()
    index_of = model.nb_classes.index
    for text, margin in zip(texts, odds.margins(texts), strict=True):
        seen = text[:480].encode("utf-8", "surrogatepass")[:480]
        scores = model.nb_classprobs(model.instance2fv(seen, datatype="uint32"))
        best = max(scores[index_of("en")], scores[index_of("fr")])
        assert margin == pytest.approx(best - scores[index_of("de")], rel=1e-4, abs=1e-2)
        assert odds.margins([text]) == [margin]
    assert odds.margins([]) == []


def ingest(**segmentation):
    data = {"src_lang": "deu", "tgt_lang": "eng"}
    cfg = SynthConfig.model_validate(
        {"run": {"out_dir": "x"}, "data": data, "segmentation": segmentation}
    )
    return Ingest(cfg, BottomK([1] * 18))


@pytest.mark.parametrize(
    ("segmentation", "is_accepted"), [({}, False), ({"language_margin": None}, True)]
)
def test_segments_in_another_language_are_left_out_with_a_code(segmentation, is_accepted):
    text = "\n".join([TEXTS["de"], TEXTS["en"], TEXTS["de"], "Kurz und gut, das war es."])
    counts = PartCounts("f")
    counts.newlines = "real"
    sources = list(ingest(**segmentation)._sources([Document(1, text)], counts))
    alone = {source.text for source in sources if source.kind == 0}
    blobs = [source.text for source in sources if source.kind == 1]
    assert (TEXTS["en"] in alone) == any(TEXTS["en"] in blob for blob in blobs) == is_accepted
    assert counts.rejected["source_language"] == (not is_accepted)
    assert counts.pieces == 4 + len(blobs)
