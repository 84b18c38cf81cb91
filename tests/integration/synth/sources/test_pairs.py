"""Check several language pairs in one config: a run each, shared answers, one dataset."""

from __future__ import annotations

from collections import Counter

import datasets
import pytest
import yaml
from typer.testing import CliRunner

import synth.pairs
from scorekit.config import save_config
from scorekit.errors import UserError
from synth.__main__ import app
from synth.config import SynthConfig, pair_configs
from synth.execution.stage import StageIncomplete
from synth.pairs import run_pairs
from synth.run import RunOptions
from synth.stages.table import stage_names
from synth.storage.store import StageFolder, read_records
from testing.openai_server import FakeOpenAI
from tests.kits.synth import languages as one_pair
from tests.kits.synth.languages import answer

pytestmark = pytest.mark.usefixtures("restore_state")

TEXTS = {
    "(zh-TW)": "這個函式會傳回檔案的內容，並且關閉連線。",
    "(sr-Latn)": "Ova funkcija vraća sadržaj datoteke i zatvara vezu.",
}
PAIRS = [{"src_lang": "en", "tgt_lang": "zh-TW"}, {"src_lang": "kor", "tgt_lang": "sr-Latn"}]


def respond(body, seed):
    """Return a translation into the language of the prompt."""
    prompt = body["messages"][-1]["content"]
    (text,) = [text for tag, text in TEXTS.items() if tag in prompt]
    return answer(text, None, 0)(body, seed)


@pytest.fixture(scope="module")
def teacher():
    fake = FakeOpenAI(respond=respond)
    with fake.running() as url:
        fake.url = url
        yield fake


def config(out_dir, corpus, teacher, metricx_url, **sections):
    settings = one_pair.config(
        out_dir, corpus, teacher.url, metricx_url, data={"tgt_lang": "ko"}, **sections
    ).model_dump(mode="json")
    settings["data"] |= {"src_lang": "", "tgt_lang": "", "pairs": PAIRS}
    return SynthConfig.model_validate(settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, teacher, metricx_url):
    cfg = config(
        tmp_path_factory.mktemp("pairs") / "run",
        corpus,
        teacher,
        metricx_url,
        export={"preference_pairs": True},
    )
    run_pairs(cfg, RunOptions(stage_names("all")))
    return cfg


def test_each_pair_is_a_run_of_its_own(finished):
    out = finished.run.out_dir
    assert list(pair_configs(finished)) == ["en-zh-TW", "ko-sr-Latn"]
    for name, (source, target) in {
        "en-zh-TW": ("en-US", "zh-TW"),
        "ko-sr-Latn": ("ko-KR", "sr-Latn"),
    }.items():
        rows = list(read_records(out / name / "export/train.jsonl"))
        assert len(rows) == 6
        assert {(r["source_lang_code"], r["target_lang_code"]) for r in rows} == {(source, target)}
        assert {r["pair_id"] for r in rows} == {name.replace("-", "->", 1)}
    assert len(list(out.rglob("answers.sqlite"))) == 1 and (out / "answers.sqlite").is_file()


def test_the_exports_are_one_dataset_with_a_configuration_each(finished, tmp_path):
    folder = finished.run.out_dir / "export"
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["language"] == ["en", "zh", "ko", "sr"]
    assert {c["config_name"]: c["data_files"][0]["path"] for c in head["configs"]} == {
        "en-zh-TW": "en-zh-TW/train.parquet",
        "en-zh-TW-preference_pairs": "en-zh-TW/pairs.parquet",
        "ko-sr-Latn": "ko-sr-Latn/train.parquet",
        "ko-sr-Latn-preference_pairs": "ko-sr-Latn/pairs.parquet",
    }
    assert "| Traditional Chinese (Taiwan) (`zh-TW`) | 6 |" in card
    assert len(head["dataset_info"]) == 4
    for name in ("en-zh-TW", "ko-sr-Latn"):
        loaded = datasets.load_dataset(str(folder), name, cache_dir=str(tmp_path))["train"]
        assert Counter(loaded["pair_id"]) == {name.replace("-", "->", 1): 6}


def test_what_is_done_is_asked_for_no_more(finished, teacher):
    before, card = len(teacher.requests), (finished.run.out_dir / "export/README.md").read_bytes()
    (finished.run.out_dir / "export/en-zh-TW/of-an-earlier-one.jsonl").touch()
    run_pairs(finished, RunOptions(stage_names("all"), resume=True))
    assert len(teacher.requests) == before
    assert (finished.run.out_dir / "export/README.md").read_bytes() == card
    assert not (finished.run.out_dir / "export/en-zh-TW/of-an-earlier-one.jsonl").exists()


@pytest.mark.parametrize("command", ["status", "estimate", "repair"])
def test_the_commands_go_over_all_pairs(command, finished, tmp_path):
    save_config(finished, tmp_path / "pairs.yaml")
    result = CliRunner().invoke(app, [command, "--config", str(tmp_path / "pairs.yaml")])
    assert result.exit_code == 0, result.output
    for name in ("en-zh-TW", "ko-sr-Latn"):
        assert name in result.output.replace("\n", "")


def test_show_prints_all_pairs_and_the_command_runs_them(tmp_path, corpus, teacher, metricx_url):
    cfg = config(tmp_path / "run", corpus, teacher, metricx_url)
    save_config(cfg, tmp_path / "pairs.yaml")
    options = ["--config", str(tmp_path / "pairs.yaml")]
    nothing = CliRunner().invoke(app, ["status", *options])
    assert nothing.exit_code == 2 and "no run here" in nothing.output
    result = CliRunner().invoke(app, ["run", "--stage", "all", *options])
    assert result.exit_code == 0 and "dataset of all pairs" in result.output, result.output
    repeated = CliRunner().invoke(app, ["run", "--stage", "all", *options])
    assert repeated.exit_code == 2 and "error: en-zh-TW: " in repeated.output
    records_result = CliRunner().invoke(app, ["show", "format_filter", *options])
    assert len(records_result.stdout.splitlines()) == 12


def test_a_pair_that_is_left_open_stops_no_other(
    monkeypatch, tmp_path, corpus, teacher, metricx_url
):
    cfg = config(tmp_path / "run", corpus, teacher, metricx_url)
    real = synth.pairs.run_stages

    def run(pair_cfg, options):
        if pair_cfg.data.tgt_lang == "zh-TW":
            raise StageIncomplete("prefilter_score", Counter(teacher_server=3))
        real(pair_cfg, options)

    monkeypatch.setattr(synth.pairs, "run_stages", run)
    with pytest.raises(StageIncomplete, match="en-zh-TW: prefilter_score: 3 records are left open"):
        run_pairs(cfg, RunOptions(stage_names("all")))
    assert StageFolder(tmp_path / "run/ko-sr-Latn", "export").done()
    assert not (tmp_path / "run/export").exists()
    monkeypatch.undo()
    run_pairs(cfg, RunOptions(stage_names("all"), resume=True))
    assert (tmp_path / "run/export/README.md").is_file()


def test_what_no_config_of_pairs_may_say(tmp_path, corpus, teacher, metricx_url):
    settings = config(tmp_path, corpus, teacher, metricx_url).model_dump(mode="json")
    for data, words in (
        ({"src_lang": "en", "tgt_lang": "ko"}, "or pairs: not both"),
        ({"pairs": None}, "give src_lang and tgt_lang, or pairs"),
        ({"pairs": [*PAIRS, {"src_lang": "eng", "tgt_lang": "zh_TW"}]}, "en-zh-TW is repeated"),
        ({"pairs": [{"src_lang": "en", "tgt_lang": "xx"}]}, "data.tgt_lang: unknown language 'xx'"),
        ({"pairs": []}, "at least 1 item"),
    ):
        with pytest.raises(ValueError, match=words):
            SynthConfig.model_validate({**settings, "data": {**settings["data"], **data}})


def test_a_users_mistake_names_its_pair(tmp_path, corpus, teacher, metricx_url):
    cfg = config(tmp_path / "run", corpus, teacher, metricx_url)
    cfg.data.pairs[1].files = [str(tmp_path / "nothing/*.gz")]
    with pytest.raises(UserError, match=r"^ko-sr-Latn: data\.files: "):
        run_pairs(cfg, RunOptions(stage_names("all")))
