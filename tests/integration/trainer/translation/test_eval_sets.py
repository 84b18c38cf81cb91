"""Check several evaluation sets: stats by set name, and one set that selects the best
checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.runs.checkpoints.checkpoint import best_checkpoint, read_state
from trainer.runs.checkpoints.export import export_policy
from trainer.runs.run_log import read_jsonl
from trainer.translation.check import check_run
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_held_out, load_train
from trainer.translation.evaluation.report import write_report
from trainer.translation.evaluation.run import run_evaluation
from trainer.translation.train import Artifacts, train_translation


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write three sets: data.eval, a path alone, and a file with its own columns."""
    folder = tmp_path_factory.mktemp("sets")
    save_policy(folder / "policy", byte_level_tokenizer())
    rows = [{"translation": {"en": f"Close {n}.", "de": f"Schließe {n}."}} for n in range(4)]
    (folder / "nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        values = {
            "data": {
                "train": str(write_examples(folder / "t.jsonl", [f"Open {n}." for n in range(8)])),
                "eval": str(write_examples(folder / "e.jsonl", ["Save.", "Go."], ref="저장")),
                "eval_sets": {
                    "news": str(write_examples(folder / "n.jsonl", ["Read."] * 2, ref="읽기")),
                    "de.menus": {
                        "path": str(folder / "nested.jsonl"),
                        "src_lang": "en",
                        "tgt_lang": "de",
                    },
                },
            },
            "policy": {"path": str(folder / "policy")},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 8,
                "num_samples_per_prompt": 2,
            },
            "reward": {"metricx_urls": m, "xcomet_urls": x},
            "rl": {"num_updates": 3, "batch_size": 4, "lr": 0.02},
            "eval": {"eval_every_n_updates": 1, "eval_limit": 3, "best_by": "news"},
            "misc": {
                "threads": 1,
                "device": "cpu",
                "run_dir": str(folder / "run"),
                "save_every_n_updates": 1,
                "keep_checkpoints": 5,
            },
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        yield folder / "config.yaml"


def trained(config: Path, *overrides: str, resume: bool = False) -> Artifacts:
    cfg = load_config(TranslationConfig, config, list(overrides))
    return train_translation(load_train(cfg), load_held_out(cfg), cfg, resume=resume)


@pytest.fixture(scope="module")
def run(config: Path) -> Artifacts:
    return trained(config)


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(folder / "eval.jsonl")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_every_set_has_its_lines_and_dumps(run: Artifacts) -> None:
    sizes = {"eval": 2, "news": 2, "de.menus": 3}  # eval_limit is 3
    eval_lines = lines(run.run_dir)
    assert [(line["update"], line["set"]) for line in eval_lines] == [
        (update, name) for update in range(4) for name in sizes
    ]
    for line in eval_lines:
        assert line["samples"] == sizes[line["set"]]
        assert line["decides"] == (line["set"] == "news")
        assert len(read_jsonl(run.run_dir / line["completions"])) == sizes[line["set"]]
    assert eval_lines[0]["completions"] == "completions/eval-000000.jsonl"
    assert eval_lines[1]["completions"] == "completions/eval-news-000000.jsonl"
    menus = read_jsonl(run.run_dir / eval_lines[2]["completions"])
    assert {row["pair"] for row in menus} == {"en-US>de-DE"}
    assert [row["ref"] for row in menus] == [f"Schließe {n}." for n in range(3)]
    assert list(run.sets) == list(sizes) and run.reports == run.sets["news"]


def test_the_best_checkpoint_is_that_of_the_set_that_decides(
    run: Artifacts, tmp_path: Path
) -> None:
    rewards = {
        line["update"]: line["reward_mean"]
        for line in lines(run.run_dir)
        if line["set"] == "news" and line["update"]
    }
    best = best_checkpoint(run.run_dir / "checkpoints")
    assert best is not None
    state = read_state(best)
    assert (state.rated_by, state.reward) == ("news", max(rewards.values()))
    assert rewards[state.update] == state.reward
    assert export_policy(run.run_dir, tmp_path / "out", best=True, dtype="float32") == best
    copy = Path(shutil.copytree(run.run_dir / "checkpoints", tmp_path / "checkpoints"))
    old = read_state(copy / "step-000001")
    raw_state = json.loads((copy / "step-000001/state.json").read_text())
    (copy / "step-000001/state.json").write_text(
        json.dumps(raw_state | {"rated_by": "eval", "reward": 1e9})
    )
    assert old.rated_by == "news"
    assert read_state(best_checkpoint(copy) or copy).rated_by == "news"  # rewards of one set


def test_console_and_report_name_the_sets(
    config: Path, run: Artifacts, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained(config, f"misc.run_dir={tmp_path}", "rl.num_updates=1")
    console_lines = [line for line in capsys.readouterr().err.splitlines() if "held out" in line]
    for name in ("held out, after", "held out (news), after", "held out (de.menus), after"):
        assert sum(name in line for line in console_lines) == 2
    page = write_report(run.run_dir).read_text(encoding="utf-8")
    assert page.count("Held-out sources (news), before and after") == 1
    assert page.count("Held-out sources (de.menus)") == page.count("Held-out sources, before") == 1
    assert page.count("The best checkpoint is chosen by the reward on this set.") == 1
    news = page[page.index("Held-out sources (news)") : page.index("Held-out sources (de.menus)")]
    assert "The best checkpoint is chosen" in news
    assert "The first of the set (de.menus)" in page and "Schließe 1." in page


def test_a_resumed_run_goes_on_with_all_sets(config: Path, run: Artifacts, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.run_dir, tmp_path / "run"))
    for update in (2, 3):
        shutil.rmtree(copy / f"checkpoints/step-{update:06d}")
    trained(config, f"misc.run_dir={copy}", resume=True)
    assert lines(copy) == lines(run.run_dir)
    names = {path.name for path in (copy / "completions").iterdir()}
    assert names == {path.name for path in (run.run_dir / "completions").iterdir()}
    shutil.rmtree(copy / "checkpoints/step-000003")
    with pytest.raises(UserError, match=r"eval.best_by: 'news' then, None now"):
        trained(config, f"misc.run_dir={copy}", "eval.best_by=null", resume=True)
    other = write_examples(tmp_path / "other.jsonl", ["Else."])
    with pytest.raises(UserError, match=r"data.eval_sets.news: .* the data, the prompt template"):
        trained(config, f"misc.run_dir={copy}", f"data.eval_sets.news={other}", resume=True)


def test_an_evaluation_writes_files_for_each_set(config: Path, tmp_path: Path) -> None:
    cfg = load_config(TranslationConfig, config, [f"misc.run_dir={tmp_path / 'a'}"])
    comparisons = run_evaluation(cfg, load_held_out(cfg))
    assert [comparison.name for comparison in comparisons] == ["eval", "news", "de.menus"]
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        f"evaluation{name}.{ending}"
        for name in ("", "-news", "-de.menus")
        for ending in ("json", "jsonl", "html")
    }
    without_config_sets = cfg.model_copy(
        update={"misc": cfg.misc.model_copy(update={"run_dir": f"{tmp_path}/b"})}
    )
    compared = run_evaluation(without_config_sets, load_held_out(cfg), str(tmp_path / "a"))
    assert all(comparison.earlier is not None and comparison.comparison for comparison in compared)
    assert (tmp_path / "b/comparison-de.menus.html").is_file()
    (tmp_path / "a/evaluation-news.jsonl").unlink()
    with pytest.raises(UserError, match=r"a has no evaluation-news.jsonl. Evaluate that set"):
        run_evaluation(without_config_sets, load_held_out(cfg), str(tmp_path / "a"), overwrite=True)


def test_check_looks_at_every_set(config: Path, tmp_path: Path) -> None:
    overrides = [f"misc.run_dir={tmp_path}", "data.eval_sets.news=gone.jsonl"]
    findings = check_run(load_config(TranslationConfig, config, overrides))
    check_by_name = {check.name: check for check in findings.checks}
    assert check_by_name["data.eval"].ok and check_by_name["data.eval_sets.de.menus"].ok
    assert [check.name for check in findings.failed] == ["data.eval_sets.news"]
    assert "prompts of data.eval_sets.de.menus" in check_by_name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.best_by=nwes"], "eval.best_by: 'nwes' is no evaluation set (eval, news, de.menus)"),
        (["data.eval_sets.eval=x.jsonl"], "the name eval is that of data.eval"),
        (["data.eval_sets={a/b: x.jsonl}", "eval.best_by=null"], "data.eval_sets.a/b"),
        (["data.eval_sets.more={pth: x.jsonl}"], "data.eval_sets.more.path: Field required"),
        (["data.eval_sets.more={path: x, splt: dev}"], "(did you mean data.eval_sets.more.split?)"),
    ],
)
def test_a_mistake_in_the_sets_is_one_line(
    config: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        load_config(TranslationConfig, config, overrides)
    assert message in str(error.value)
