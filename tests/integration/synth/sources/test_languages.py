"""Check that a config's tag passes prompts, judge, rules and the exported row unchanged."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from services.judge.rules import judge_translation
from synth.run import RunOptions, run_stages
from synth.stages.table import stage_names
from synth.storage.store import StageFolder, read_records
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI

#: For each tag: its name in the prompt, a text in it, and a text in its other variant (None if no
#: check distinguishes them) with the code that rejects it.
from tests.kits.synth.languages import answer, config

pytestmark = pytest.mark.usefixtures("restore_state")

VARIANTS = {
    "zh-TW": (
        "Traditional Chinese (Taiwan)",
        "這個函式會傳回檔案的內容，並且關閉連線。",
        "这个函数会返回文件的内容，并且关闭连接。",
        "wrong_variant",
    ),
    "zh-CN": (
        "Simplified Chinese",
        "这个函数会返回文件的内容，并且关闭连接。",
        "這個函式會傳回檔案的內容，並且關閉連線。",
        "wrong_variant",
    ),
    "sr-Latn": (
        "Serbian (Latin script)",
        "Ova funkcija vraća sadržaj datoteke i zatvara vezu sa serverom.",
        "Ова функција враћа садржај датотеке и затвара везу са сервером.",
        "wrong_script",
    ),
    "hi-Latn": (
        "Hindi (Latin script)",
        "Yeh function file ki saamagri lautata hai aur connection band karta hai.",
        "यह फ़ंक्शन फ़ाइल की सामग्री लौटाता है और कनेक्शन को तुरंत बंद कर देता है।",
        "wrong_script",
    ),
    "pt-BR": (
        "Portuguese (Brazil)",
        "Esta função devolve o conteúdo do arquivo e fecha a conexão.",
        None,
        None,
    ),
    "pt-PT": (
        "Portuguese (Portugal)",
        "Esta função devolve o conteúdo do ficheiro e fecha a ligação.",
        None,
        None,
    ),
}


@pytest.mark.parametrize("tag", VARIANTS)
def test_a_tag_is_kept_to_the_exported_row(tag, tmp_path, corpus, metricx_url):
    name, good, bad, code = VARIANTS[tag]
    fake = FakeOpenAI(respond=answer(good, bad, 0.5))
    with fake.running() as url:
        cfg = config(tmp_path / "run", corpus, url, metricx_url, data={"tgt_lang": tag})
        run_stages(cfg, RunOptions(stage_names("all")))
    prompt = fake.requests[0].body["messages"][-1]["content"]
    assert f"{name} ({tag})" in prompt and "English (en-US)" in prompt
    rows = list(read_records(cfg.run.out_dir / "export/train.jsonl"))
    assert rows and {row["target_lang_code"] for row in rows} == {tag}
    assert {row["source_lang_code"] for row in rows} == {"en-US"}
    assert all(row["target_text"].startswith(good) for row in rows)
    tried = [t["reason_code"] for row in rows for t in row["selection"]["filters"]["tried"]]
    assert set(tried) == ({code} if code else set())
    card = (cfg.run.out_dir / "export/README.md").read_text()
    assert f"into {name}" in card and f"(en-US to {tag})" in card


@pytest.mark.parametrize("tag", [tag for tag in VARIANTS if VARIANTS[tag][3]])
def test_a_teacher_that_writes_the_other_variant_is_rejected_by_its_code(
    tag, tmp_path, corpus, metricx_url
):
    _, good, bad, code = VARIANTS[tag]
    with FakeOpenAI(respond=answer(bad, good, 0.0)).running() as url:
        cfg = config(tmp_path / "run", corpus, url, metricx_url, data={"tgt_lang": tag})
        with pytest.raises(
            UserError, match=f"format_filter: no record was accepted \\({code} 6\\)"
        ):
            run_stages(cfg, RunOptions(stage_names("all")))
    rejected = list(StageFolder(cfg.run.out_dir, "format_filter").all_rejected())
    assert len(rejected) == 6 and {record["reason_code"] for record in rejected} == {code}


@pytest.mark.parametrize(("tag", "code"), [("zh-TW", "wrong_variant"), ("sr-Latn", "wrong_script")])
def test_the_judge_is_told_the_tag(tag, code, tmp_path, corpus, metricx_url):
    _, good, bad, _ = VARIANTS[tag]
    with FakeOpenAI(respond=answer(good, bad, 0.5)).running() as url, running_judge() as judge:
        cfg = config(
            tmp_path / "run",
            corpus,
            url,
            metricx_url,
            data={"tgt_lang": tag},
            segmentation={"max_chars": 100},
            filters={"rule_based": False, "llm_judge": {"url": judge}},
        )
        run_stages(cfg, RunOptions(stage_names("all")))
    rows = list(read_records(cfg.run.out_dir / "export/train.jsonl"))
    assert rows and all(row["target_text"].startswith(good) for row in rows)
    tried = [t["reason_code"] for row in rows for t in row["selection"]["filters"]["tried"]]
    assert set(tried) == {f"judge:{code}"}


def test_a_judge_that_is_asked_for_the_bare_language_takes_both_variants():
    texts = {
        "source_lang": "en",
        "source_text": "It gives back what the file holds, and closes it.",
    }
    for tag, (_, good, bad, code) in VARIANTS.items():
        language = tag.split("-")[0]
        if code and language != "hi":  # its default script is Devanagari
            verdicts = [
                judge_translation({**texts, "target_lang": key, "candidate": text})["verdict"]
                for key, text in ((language, good), (language, bad), (tag, good), (tag, bad))
            ]
            assert [verdict["reason_code"] for verdict in verdicts] == ["ok", "ok", "ok", code]


def test_a_language_of_ones_own_is_named_and_exported(tmp_path, corpus, metricx_url):
    language = {"code": "qjj", "name": "Udo Korean", "scripts": ["Hangul"]}
    fake = FakeOpenAI(
        respond=answer("이 함수는 파일의 내용을 돌려주고 연결을 닫습니다.", None, 0.0)
    )
    with fake.running() as url:
        cfg = config(
            tmp_path / "run",
            corpus,
            url,
            metricx_url,
            data={"tgt_lang": "qjj", "languages": [language]},
        )
        run_stages(cfg, RunOptions(stage_names("all")))
    assert "Udo Korean (qjj)" in fake.requests[0].body["messages"][-1]["content"]
    rows = list(read_records(cfg.run.out_dir / "export/train.jsonl"))
    assert rows and {(r["pair_id"], r["target_lang_code"]) for r in rows} == {("en->qjj", "qjj")}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"tgt_lang": "Koraen"},
            r"data\.tgt_lang: unknown language 'Koraen'; did you mean .*Korean \(ko\)",
        ),
        ({"tgt_lang": "qxx"}, r"data\.tgt_lang: unknown language 'qxx' \(add your own"),
        (
            {"tgt_lang": "qjj", "languages": [{"code": "qjj", "name": "x", "scripts": ["Elvish"]}]},
            "data.languages: qjj: unknown script 'Elvish'. Expected one of",
        ),
        ({"tgt_lang": "q j", "languages": [{"code": "q j", "name": "x"}]}, "is not a language tag"),
    ],
)
def test_an_unknown_language_is_one_line(data, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, "x.jsonl", "http://localhost:1/v1", "http://localhost:2", data=data)
