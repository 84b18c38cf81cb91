"""Test the checks before a run: one line for each mistake, before any change."""

from __future__ import annotations

import gzip
import json

import fsspec
import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from synth.__main__ import app
from synth.preflight import check_run, need_passing
from synth.run import RunOptions
from synth.stages.table import BY_NAME, stage_names
from synth.storage.store import StageFolder
from testing.corpus import write_corpus
from testing.judge import PASS, running_judge, saying
from testing.openai_server import FakeOpenAI
from testing.servers import free_port, running_service
from tests.kits.synth.driver import TEXTS, config, korean, run, write_sources

NOBODY = f"http://127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def quiet_terminal(monkeypatch):
    """Suppress messages about slow services, which depend on the machine's load."""
    monkeypatch.setattr("synth.execution.services.AWAY_S", 1e9)


@pytest.fixture(scope="module")
def xcomet():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


@pytest.fixture(scope="module")
def rules():
    with running_judge() as url:
        yield url


def full_config(folder, teacher, metricx, judge=None, **more):
    """Return a config of all stages, with a corpus of five documents."""
    write_corpus(folder / "corpus.jsonl.gz", 5)
    return config(
        folder / "run",
        teacher,
        metricx,
        **{
            "data__files": [str(folder / "corpus.jsonl.gz")],
            "data__sample_pool_size": 8,
            "data__target_examples_total": 4,
            "filters__rule_based": False,
            "filters__llm_judge": {"enabled": judge is not None, "url": judge or NOBODY},
            **more,
        },
    )


def command(cfg, command_name, *flags):
    """Run the command with this config, as a user does."""
    path = cfg.run.out_dir.with_name("c.json")
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    stage = [] if "--stage" in flags else ["--stage", "all"]
    return CliRunner().invoke(app, [command_name, "--config", str(path), *stage, *flags])


def wants_a_key(cfg, teacher, _):
    teacher.api_key = "secret"


def has_no_template(cfg, teacher, _):
    teacher.no_template = True


def has_no_chats(cfg, teacher, _):
    teacher.fail(404, message="Not Found", times=None)


def reads_too_little(cfg, teacher, _):
    teacher.context_length = cfg.teacher.generation.max_tokens_blob


def has_another_name(cfg, teacher, _):
    cfg.teacher.model = "another"


def is_away(cfg, teacher, _):
    cfg.teacher.base_url = NOBODY


def metricx_is_away(cfg, teacher, _):
    cfg.metricx.url = [cfg.metricx.url, NOBODY]


def metricx_has_another_model(cfg, teacher, _):
    cfg.metricx.checkpoint = "google/metricx-24-hybrid-xl"


def metricx_is_none(cfg, teacher, xcomet):
    cfg.metricx.url, cfg.metricx.checkpoint = xcomet, "fake-xcomet"


def judge_is_away(cfg, teacher, _):
    cfg.filters.llm_judge.url = NOBODY


def judge_is_none(cfg, teacher, xcomet):
    cfg.filters.llm_judge.url = xcomet


def judge_asks_no_model(cfg, teacher, _):
    cfg.filters.llm_judge.model = "Qwen/Qwen3-235B"


def corpus_is_gone(cfg, teacher, _):
    cfg.data.files = [str(cfg.run.out_dir / "no.jsonl.gz")]


FAULTS = {
    wants_a_key: "teacher: {url} wants an API key and got none",
    has_no_template: "has no chat template: start the server with --chat-template",
    has_no_chats: "is no OpenAI-compatible API (HTTP 404)",
    reads_too_little: "teacher: teacher.generation.max_tokens_blob: is 1536, but",
    has_another_name: "does not serve a model named 'another'",
    is_away: "teacher: base_url: cannot connect to",
    metricx_is_away: f"metricx: metricx.url: {NOBODY} cannot be reached",
    metricx_has_another_model: "metricx.checkpoint is google/metricx-24-hybrid-xl, the service has",
    metricx_is_none: "higher scores of fake-xcomet are better",
    judge_is_away: f"judge: filters.llm_judge.url: {NOBODY} cannot be reached",
    judge_is_none: "is a xcomet service, not judge",
    judge_asks_no_model: "filters.llm_judge.model is Qwen/Qwen3-235B, but the judge at",
    corpus_is_gone: "data.files: ",
}


@pytest.mark.parametrize("break_setup", FAULTS, ids=lambda break_setup: break_setup.__name__)
def test_a_fault_is_one_line_before_anything_is_begun(
    tmp_path, metricx, xcomet, rules, monkeypatch, break_setup
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    away = break_setup in (metricx_is_away, judge_is_away)
    if away:  # it is waited for, and so is a late answer on a busy machine
        monkeypatch.setattr("synth.execution.services.READY_S", 0.1)
    teacher = FakeOpenAI(respond=korean)
    with teacher.running() as teacher.url:
        cfg = full_config(tmp_path, teacher, metricx, rules)
        break_setup(cfg, teacher, xcomet)
        run_result = command(cfg, "run")
        looked = command(cfg, "check")
    for result in (run_result, looked):
        lines = result.stderr.splitlines()
        (line,) = [
            output_line
            for output_line in lines
            if FAULTS[break_setup].format(url=teacher.url) in output_line
        ]
        assert line.startswith("error: ") and result.exit_code == 2
        assert lines == [line] or away
    assert not (tmp_path / "run").exists()
    assert sum(request.choices for request in teacher.requests) <= 2  # one token each


def test_all_faults_are_told_at_once_and_a_run_that_can_begin_begins(
    tmp_path, teacher, metricx, rules
):
    cfg = full_config(tmp_path, teacher, metricx, rules)
    broken = cfg.model_copy(deep=True)
    broken.teacher.model, broken.metricx.checkpoint = "another", "another"
    lines = command(broken, "run").stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["teacher", "metricx"]
    assert command(cfg, "check").exit_code == 0
    assert not (tmp_path / "run").exists()
    result = command(cfg, "run")
    assert result.exit_code == 0 and (tmp_path / "run/export/train.jsonl").exists()
    assert "teacher: " in result.stderr and "judge: " in result.stderr


def test_a_finished_export_outlives_an_overwrite_that_cannot_begin(
    tmp_path, teacher, metricx, xcomet, rules
):
    cfg = full_config(tmp_path, teacher, metricx, rules)
    assert command(cfg, "run").exit_code == 0

    def everything():
        names = ("export/*", "stages/*/*", "stages/*/*/*", "*.jsonl")
        return {p: p.read_bytes() for n in names for p in (tmp_path / "run").glob(n) if p.is_file()}

    before = everything()
    assert any(path.name == "train.parquet" for path in before)
    for break_setup in (has_no_template, metricx_has_another_model, judge_is_none, corpus_is_gone):
        broken = cfg.model_copy(deep=True)
        break_setup(broken, teacher, xcomet)
        result = command(broken, "run", "--overwrite", "--yes")
        teacher.well()
        assert result.exit_code == 2 and everything() == before, break_setup
    assert command(cfg, "run", "--overwrite", "--yes").exit_code == 0


def write_corpus_file(cfg, name, content):
    path = cfg.run.out_dir.with_name(name)
    path.write_bytes(content)
    cfg.data.files = [str(path)]


def corpus_is_a_table(cfg):
    write_corpus_file(cfg, "rows.csv", b"text,id\nA house stands here.,1\n")


def corpus_is_cut_off(cfg):
    write_corpus_file(cfg, "cut.jsonl.gz", gzip.compress(b'{"text": "A house."}\n' * 99)[:20])


def corpus_is_empty(cfg):
    write_corpus_file(cfg, "empty.txt", b"\n \n")


def corpus_has_no_lists(cfg):
    cfg.segmentation.mode = "list_field"


def one_file_of_two_is_no_corpus(cfg):
    write_corpus_file(cfg, "b.parquet", b"PAR1 no lines of JSON\n")
    cfg.data.files.append(str(cfg.run.out_dir.with_name("corpus.jsonl.gz")))


def corpus_is_a_folder(cfg):
    cfg.data.files = [str(cfg.run.out_dir.parent)]


def text_is_remote(cfg):
    cfg.data.files = ["memory://corpus/a.txt"]
    fsspec.filesystem("memory").pipe("/corpus/a.txt", b"A house.")


def set_is_gone(cfg):
    cfg.data.decontaminate = [str(cfg.run.out_dir / "gone.txt")]


def tokenizer_is_gone(cfg):
    cfg.bucketing.measure, cfg.bucketing.tokenizer = "tokenizer", "./gone"


def folder_is_a_file(cfg):
    cfg.run.out_dir.write_text("")


def folder_has_another_seed(cfg):
    assert command(cfg, "run", "--stage", "sample_sources").exit_code == 0
    cfg.run.seed += 1


def folder_has_another_teacher(cfg):
    assert command(cfg, "run").exit_code == 0
    cfg.teacher.prompt = "source"


#: What breaks a config, and the words of both commands.
REFUSED = {
    corpus_is_a_table: "data.files: rows.csv line 1: ",
    corpus_is_cut_off: "data.files: cut.jsonl.gz line 1: ",
    corpus_is_empty: "data.files: empty.txt: it has no document",
    corpus_has_no_lists: "data.files: corpus.jsonl.gz line 1: segmentation.mode list_field: ",
    one_file_of_two_is_no_corpus: "data.files: b.parquet line 1: ",
    corpus_is_a_folder: "Is a directory",
    text_is_remote: "corpus/a.txt: a .txt has to be on this machine's disk",
    set_is_gone: "gone.txt: No such file or directory",
    tokenizer_is_gone: "bucketing.tokenizer: ./gone: cannot be loaded",
    folder_is_a_file: "run.out_dir: ",
    folder_has_another_seed: "was begun with other settings: run.seed was 1234, is 1235",
    folder_has_another_teacher: "was begun with other settings: ",
}


@pytest.mark.parametrize("break_config", REFUSED, ids=lambda break_config: break_config.__name__)
def test_a_check_refuses_what_a_run_refuses(tmp_path, teacher, metricx, break_config):
    cfg = full_config(tmp_path, teacher, metricx)
    break_config(cfg)
    paid = len(teacher.requests)
    lines = []
    for words in (["run", "--resume"], ["check"]):
        done = command(cfg, *words)
        assert done.exit_code == 2, done.output
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        lines.append(line.replace("error: stages: ", "error: "))
    assert lines[0] == lines[1] and REFUSED[break_config] in lines[0]
    assert sum(request.choices for request in teacher.requests[paid:]) <= 2  # one token each


def test_a_check_of_one_stage_wants_its_input_as_a_run_does(tmp_path, teacher, metricx):
    cfg = full_config(tmp_path, teacher, metricx)
    for words in (["run"], ["check"]):
        done = command(cfg, *words, "--stage", "generate_128")
        assert done.exit_code == 2 and "no output there. Run --stage select_sources" in done.stderr


def test_a_finished_run_passes_a_check_with_its_own_options(tmp_path, teacher, metricx):
    cfg = full_config(tmp_path, teacher, metricx)
    (tmp_path / "set.txt").write_text("Nothing of this stands in the corpus anywhere at all.\n")
    options = ["--limit", "4", "--decontaminate", str(tmp_path / "set.txt")]
    assert command(cfg, "run", *options).exit_code == 0
    assert command(cfg, "check", *options).exit_code == 0
    done = command(cfg, "check")
    assert done.exit_code == 2 and "limit was 4, is None" in done.stderr


def test_lines_of_a_text_file_are_sources_with_their_line_numbers(tmp_path, teacher, metricx):
    text = "첫 번째 문장은 여기에 서 있습니다.\n\n두 번째 문장도 그 아래에 서 있습니다.\n"
    cfg = full_config(tmp_path, teacher, metricx)
    cfg.data.src_lang, cfg.data.tgt_lang = "kor", "eng"
    cfg.segmentation.min_chars = 5
    (tmp_path / "windows.txt").write_bytes(text.encode("cp949"))
    (tmp_path / "packed.txt.gz").write_bytes(
        gzip.compress("넷째 줄에는 새 문장이 있습니다.".encode())
    )
    cfg.data.files = [str(tmp_path / "*.txt*")]
    assert command(cfg, "check").exit_code == 0
    assert command(cfg, "run", "--stage", "sample_sources").exit_code == 0
    records = StageFolder(cfg.run.out_dir, "sample_sources").records()
    assert {r["source_text"]: r["source_meta"]["madlad"]["doc_id"] for r in records} == {
        "첫 번째 문장은 여기에 서 있습니다.": "windows.txt:1",
        "두 번째 문장도 그 아래에 서 있습니다.": "windows.txt:3",
        "넷째 줄에는 새 문장이 있습니다.": "packed.txt.gz:1",
    }


def test_only_what_the_coming_stages_need_is_asked(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    cfg.filters.llm_judge.enabled = False

    def checked_services(*stages, **options):
        names = [c.name for c in check_run(cfg, RunOptions(stages, **options)).checks]
        return [name for name in names if name in ("teacher", "metricx", "judge")]

    later = stage_names("all")[1:]
    assert checked_services(*later) == ["teacher", "metricx"]
    run(cfg)
    assert StageFolder(tmp_path, "score_select_best").done()
    assert checked_services(*later, resume=True) == []
    assert checked_services(*later, overwrite=True) == ["teacher", "metricx"]
    assert checked_services("generate_128", overwrite=True) == ["teacher"]
    assert checked_services("score_select_best", overwrite=True) == ["metricx"]
    assert checked_services("select_sources", overwrite=True) == []
    assert checked_services("format_filter") == []
    assert checked_services("generate_128", resume=True, repair=0) == ["teacher"]


def test_the_teacher_is_asked_for_one_token_and_the_judge_for_one_verdict(tmp_path, metricx):
    teacher, llm = FakeOpenAI(respond=korean), saying(PASS)
    with (
        teacher.running() as teacher.url,
        llm.running() as upstream,
        running_judge(upstream=upstream) as url,
    ):
        cfg = full_config(tmp_path, teacher, metricx, url)
        before = len(metricx.batches)
        assert not check_run(cfg, RunOptions(stage_names("all"))).failed
    (teacher_request,) = teacher.requests
    assert teacher_request.body["max_tokens"] == 1 and teacher_request.body["n"] == 1
    assert [message["role"] for message in teacher_request.body["messages"]] == ["system", "user"]
    assert len(llm.requests) == 1 and len(metricx.batches) == before


def test_a_judge_whose_llm_refuses_the_key_is_found_before_the_start(tmp_path, teacher, metricx):
    llm = saying(PASS)
    llm.api_key = "right"
    with llm.running() as upstream, running_judge(upstream=upstream, key="wrong") as url:
        findings = check_run(
            full_config(tmp_path, teacher, metricx, url), RunOptions(stage_names("all"))
        )
    (message,) = findings.errors
    assert f"judge: filters.llm_judge.url: {url} gives no verdict (upstream: " in message
    assert "\n" not in message and "it refuses the API key" in message


def test_a_run_asks_again_what_is_busy_and_a_check_does_not(tmp_path, teacher, metricx):
    cfg = full_config(tmp_path, teacher, metricx)
    options, lines = RunOptions(stage_names("all")), []
    teacher.fail(503)
    assert "HTTP 503" in check_run(cfg, options).errors[0]
    teacher.fail(503)
    need_passing(cfg, options, lines.append)
    assert len(lines) == 2 and lines[0].startswith("teacher: ")


def test_a_run_that_waits_for_a_service_names_its_address(tmp_path, teacher, metricx, monkeypatch):
    monkeypatch.setattr("synth.execution.services.AWAY_S", 0.0)
    monkeypatch.setattr("synth.execution.services._CHECK_S", 0.01)
    cfg = full_config(tmp_path, teacher, metricx, teacher__wait_for_server_s=0.5)
    is_away(cfg, teacher, None)
    lines = []
    with pytest.raises(UserError, match="cannot connect"):
        need_passing(cfg, RunOptions(stage_names("all")), lines.append)
    address = cfg.teacher.base_url
    assert f"the teacher at {address} does not answer: it is asked again, for 0.5 s" in lines


def test_a_stage_that_goes_on_with_another_metricx_is_refused_before_the_others_run(
    tmp_path, teacher, metricx
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=[BY_NAME["prefilter_score"]], shard_id=0, num_shards=2)
    folder = StageFolder(tmp_path, "prefilter_score")
    path = folder.service("metricx")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "another"}))
    with pytest.raises(UserError, match="metricx service's revision was another, is fake"):
        need_passing(cfg, RunOptions(("prefilter_score",), resume=True), lambda line: None)
    need_passing(cfg, RunOptions(("prefilter_score",), overwrite=True), lambda line: None)
