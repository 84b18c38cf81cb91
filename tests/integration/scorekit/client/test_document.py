"""Check that every example of the how-to pages about scoring and other trainers runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from scorekit.adapters.verl import compute_score
from scorekit.rewards import SyncCompositeReward, load_definition
from scorekit.server.fake import FakeBackend
from testing.fake_embedder import FakeEmbedder
from testing.judge import running_judge, saying
from testing.servers import running_app, running_service
from tests.kits import forked
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.callers.slime import Sample, score, slime_args, train_data

ROOT = Path(__file__).parents[4]
_FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
PAGES = (
    "score",
    "composite-rewards",
    "add-a-reward",
)
#: Text of each page.
TEXTS = {page: (ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8") for page in PAGES}


def blocks(language: str, *pages: str) -> list[str]:
    """Return the code blocks of pages (by default of all) in a language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [code for page in pages or PAGES for code in pattern.findall(TEXTS[page])]


#: Code of each page. A first line that names a file says that it stands in there.
PYTHON = [
    pytest.param(page, code, id=f"{page}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks("python", page))
    if not _FILE.match(code)
]
SHELL = blocks("sh")
OURS, EMBEDDER = "http://127.0.0.1:8001", "http://127.0.0.1:8004"
RETRIEVER, XCOMET = "http://127.0.0.1:8005", "http://127.0.0.1:8002"


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend("metricx")) as url:
        yield url


@pytest.fixture(scope="module")
def embedder_url():
    with running_service(FakeEmbedder()) as url:
        yield url


@pytest.fixture(scope="module")
def retriever_url():
    with running_app(StandInRetriever({"deck_1": "life expectancy in Korea"}).app) as url:
        yield url


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python(page, code, url, embedder_url, retriever_url, capsys, tmp_path, monkeypatch):
    def with_urls(text):
        text = text.replace(OURS, url).replace(EMBEDDER, embedder_url)
        return text.replace(RETRIEVER, retriever_url)

    for text in blocks("(?:python|yaml)", page):
        if name := _FILE.match(text):
            (tmp_path / name[1]).write_text(with_urls(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(with_urls(code), f"docs/how-to/{page}.md", "exec"), {"__name__": "__example__"})
    assert capsys.readouterr().out


def test_the_function_of_the_reader_is_a_component(url, tmp_path, monkeypatch):
    files = {
        _FILE.match(t)[1]: t for t in blocks("(?:python|yaml)", "add-a-reward") if _FILE.match(t)
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace(OURS, url))
    monkeypatch.syspath_prepend(str(tmp_path))
    with SyncCompositeReward(tmp_path / "reward.yaml") as reward:
        (result,) = reward.score([{"src": "ab", "mt": "abcde"}])
    assert result.components["brevity"].raw == -3.0


def test_the_command(url, tmp_path):
    (command,) = (code for code in SHELL if "in.jsonl out.jsonl" in code)
    (tmp_path / "in.jsonl").write_text('{"src": "a", "mt": "b"}\n')
    _run(command.replace(OURS, url), tmp_path)
    assert '"line":1,' in (tmp_path / "out.jsonl").read_text()


def test_several_metrics_of_a_file(url, tmp_path):
    (command,) = (code for code in SHELL if "in.tsv" in code)
    (parallel,) = (code for code in SHELL if "-s src.txt" in code)
    (show, _) = next(code for code in SHELL if "scorekit show" in code).splitlines()
    (_, compare) = next(code for code in SHELL if "scorekit compare" in code).splitlines()
    (tmp_path / "in.tsv").write_text("src\tmt\tsystem\na\tb\tx\na\td\ty\n")
    for name in ("src", "a", "b", "ref"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n")
    with running_service(FakeBackend("xcomet")) as xcomet_url:
        output = [
            _run(text.replace(OURS, url).replace(XCOMET, xcomet_url), tmp_path)
            for text in (
                command,
                parallel,
                show.replace("in.jsonl", "in.tsv"),
                compare.replace("SYSTEM", "x"),
            )
        ]
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [(line["line"], line["metricx"]["ok"], line["xcomet"]["ok"]) for line in lines] == [
        (2, True, True),
        (3, True, True),
    ]
    assert [line.split("\t")[:2] for line in output[1].splitlines()] == [
        ["metric", "system"],
        ["xcomet", "a"],
        ["xcomet", "b"],
    ]
    assert "2 worst of 2 by metricx" in output[2] and "A: x\nB: y\n" in output[3]


def test_the_command_with_a_judge(tmp_path):
    command, mqm = (code for code in SHELL if "--task" in code)
    (tmp_path / "in.jsonl").write_text('{"src": "The house is red.", "mt": "집은 빨간색이다."}\n')
    with running_judge() as url:
        _run(command.replace("http://127.0.0.1:8003", url), tmp_path)
    assert '"pass":true' in (tmp_path / "verdicts.jsonl").read_text()
    fake = saying({"errors": []})
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        _run(mqm.replace("http://127.0.0.1:8003", url), tmp_path)
    assert '"error_spans":[],"omissions":[]' in (tmp_path / "errors.jsonl").read_text()


def _run(command, folder):
    words = shlex.split(command.replace("\\\n", " "))
    words = [sys.executable, "-m", *words[words.index("scorekit") :]]
    return forked.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_reward_definition(tmp_path):
    definition, with_tokens = blocks("yaml", "composite-rewards")
    (tmp_path / "reward.yaml").write_text(definition)
    checked = load_definition(tmp_path / "reward.yaml")
    (tmp_path / "tokens.yaml").write_text(with_tokens)
    token_rewards = load_definition(tmp_path / "tokens.yaml").token_rewards
    assert token_rewards is not None and token_rewards.spans == {"xcomet": 1.0}
    assert list(checked.components) == ["xcomet", "metricx", "repetition"]
    assert checked.gates["copy"].reward == -1.0


def test_slime_s_settings(url):
    (_, text) = blocks("yaml", "add-a-reward")
    flags = dict(re.findall(r"#   --(custom-[a-z-]+-path) (\S+)", text))
    assert flags.pop("custom-config-path") == "slime.yaml"
    paths = {flag.replace("-", "_"): path for flag, path in flags.items()}
    settings = yaml.safe_load(text)["scorekit"]
    settings["definition"] = {"components": {"metricx": {"service": url, "scale": -1.0}}}
    args = slime_args(**paths, scorekit=settings)
    samples = score(args, [[Sample(response="b", label='{"src": "a"}')] * 2])
    assert len(paths) == 3 and set(train_data(args, samples)["rewards"]) == {0.0}


def test_verl_s_settings(url):
    (settings,) = (code for code in SHELL if "custom_reward_function" in code)
    words = [word for word in shlex.split(settings.replace(OURS, url)) if "=" in word]
    prefix = "reward.custom_reward_function."
    values = {k.removeprefix("+"): v for k, _, v in (word.partition("=") for word in words)}
    function = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    assert function.pop("path") == f"pkg://{compute_score.__module__}"
    assert function.pop("name") == compute_score.__name__
    reward_kwargs = {k.removeprefix("reward_kwargs."): v for k, v in function.items()}
    assert reward_kwargs.pop("reward_manager") == "${reward.reward_manager.name}"
    call = compute_score("d", "b", "", {"src": "a"}, reward_manager="naive", **reward_kwargs)
    assert isinstance(asyncio.run(call)["score"], float)


def test_the_flags_of_the_adapter_s_server():
    commands = [code for code in SHELL if "scorekit adapter openrlhf" in code]
    help_output = forked.run(
        [sys.executable, "-m", "scorekit", "adapter", "openrlhf", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert len(commands) == 3  # OpenRLHF's, with a definition, and slime's
    for command in commands:
        for flag in re.findall(r"--[a-z-]+", command.splitlines()[0]):
            assert flag in help_output.stdout
