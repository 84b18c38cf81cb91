"""Check the evidence on gain: its sets, its arms, its tables and the sentences made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo.train.data import DATA, NearDuplicates, read_jsonl
from evidence.gain.arms import (
    ARMS,
    END_BIAS,
    LONGER,
    PPO_CONFIG,
    SFT,
    SFT_CONFIG,
    SHUFFLED,
    START,
    Size,
    make_plan,
    overrides,
    results_of,
)
from evidence.gain.data import (
    DIRECTIONS,
    MEASURED,
    PROMPTS,
    SETS,
    key_of,
    metric_rows,
    new_sources,
    read_rows,
    split_held_out,
    write_sets,
)
from evidence.gain.measure import EndsLater, stats_of
from evidence.gain.report import (
    PAGE,
    balanced,
    changes_of,
    greedy_chrf,
    marks,
    needed,
    parted,
    processor_seconds,
    read_results,
    source_interval,
    tables,
    unfinished_table,
    verdicts,
)
from evidence.gain.runs import (
    is_done,
    policy_of,
    relative,
    result_path,
    settings_of,
    start_digest,
)
from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.rollouts import TranslationRollout


def run(arm, seed, chrf, *, bleu=20.0, prompts=None):
    """Return a result whose two sources both have this chrF."""

    def stats(value):
        return {
            "sources": 2,
            "greedy": [value - 1, value + 1],
            "sampled": [value - 3, value - 3],
            "bleu": bleu,
            "sampled_bleu": bleu - 2,
            "length": 1.0,
            "reward": -10.0,
        }

    sets = {"test": stats(chrf), "tracked": stats(chrf if prompts is None else prompts)}
    return {"arm": arm, "seed": seed, "sets": sets, "processor_seconds": 60.0, "commit": "c"}


def runs_of(**arms):
    """Return the results of arms, each given by the chrF of its seeds; the start has 20."""
    lines = [run(START, 0, 20.0)]
    for name, values in arms.items():
        lines += [run(name, seed, value) for seed, value in enumerate(values, 1)]
    return lines


# -- data ---------------------------------------------------------------------------------------


def test_a_prompt_is_plain_new_and_unlike_every_measured_source():
    texts = [
        "Turn the light on",
        "turn the  light ON!",
        "one",
        "a {name} b",
        "Known text",
        "Fine text",
    ]
    texts.append("Measured sources stay unseen.")
    sources = new_sources(texts, ["known, text"], ["Measured sources stay unseen"])
    assert sources == ["Turn the light on", "Fine text"]


def test_no_committed_prompt_resembles_a_measured_source_or_has_a_translation():
    index, keys = NearDuplicates(), set()
    for name in ("sft", "rl_prompts", *MEASURED):
        for row in read_jsonl(DATA / f"{name}.jsonl"):
            keys.add(key_of(row["src_text"]))
            if name in MEASURED:
                index.add(row["src_text"])
    prompts = [row["src_text"] for row in read_jsonl(PROMPTS)]
    assert len(prompts) > 5000
    assert not [text for text in prompts if index.resembles(text) or key_of(text) in keys]


def test_no_row_for_development_is_trained_on():
    tracked, development = split_held_out([{"id": i} for i in range(5)], [{"id": 9}], 2)
    assert [row["id"] for row in tracked] == [0, 1]
    assert [row["id"] for row in development] == [2, 3, 4, 9]


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=list(DIRECTIONS))
def test_the_training_rows_hold_the_tracked_sources_without_references(tmp_path, direction):
    sizes = write_sets(tmp_path, direction, 30, 10)
    rows = {name: read_jsonl(tmp_path / f"{name}.jsonl") for name in sizes}
    assert sizes.pop("pairs") > 11_000
    assert sizes == {"train": 30, "tracked": 10, "development": 10, "test": 10}
    sources = {name: {row["src_text"] for row in lines} for name, lines in rows.items()}
    assert sources["tracked"] <= sources["train"]
    assert not sources["train"] & (sources["development"] | sources["test"])
    assert not any("ref_text" in row for row in rows["train"])


def test_a_reversed_row_has_the_reference_as_its_source():
    row, reversed_row = (read_rows(DIRECTIONS[name])["final_test"][0] for name in DIRECTIONS)
    assert (reversed_row["src_text"], reversed_row["ref_text"]) == (
        row["ref_text"],
        row["src_text"],
    )
    languages = (
        reversed_row["src_lang"],
        reversed_row["tgt_lang"],
        reversed_row["src_lang_code"],
        reversed_row["tgt_lang_code"],
    )
    assert languages == ("Korean", "English", "ko-KR", "en-US")
    assert (
        f"{reversed_row['src_lang_code']}>{reversed_row['tgt_lang_code']}"
        == DIRECTIONS["ko-en"].pair
    )


def test_no_reversed_source_resembles_one_of_an_earlier_set(tmp_path):
    rows, index = read_rows(DIRECTIONS["ko-en"]), NearDuplicates()
    for name in SETS:
        sources = [row["src_text"] for row in rows[name]]
        assert not [source for source in sources if index.resembles(source)]
        for source in sources:
            index.add(source)
    write_sets(tmp_path, DIRECTIONS["ko-en"], 500)
    prompts = {row["src_text"] for row in read_jsonl(tmp_path / "train.jsonl")}
    metric_sources = {row["src_text"] for row in metric_rows(DIRECTIONS["ko-en"], rows)}
    assert len(prompts) > 490 and not prompts & metric_sources


# -- arms ---------------------------------------------------------------------------------------


def config_of(name):
    """Return the config of an arm as its process reads it, without addresses."""
    plan = make_plan()
    urls = [f"reward.{service}_urls=http://127.0.0.1:1" for service in ("metricx", "xcomet")]
    settings = [*settings_of(plan, name, 1), *urls]
    kind, path = (
        (TranslationConfig, PPO_CONFIG) if ARMS[name].kind == "ppo" else (BestOfNConfig, SFT_CONFIG)
    )
    return load_config(kind, path, settings).model_dump(mode="json")


def differing(first, second, prefix=""):
    """Return the keys whose values differ."""
    out = set()
    for key in first.keys() | second.keys():
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out |= differing(a, b, f"{prefix}{key}.")
        elif a != b:
            out.add(prefix + key)
    return out - {"misc.run_dir"}


def test_each_arm_differs_from_its_rival_in_what_it_is_named_for():
    assert differing(config_of("ppo"), config_of(SHUFFLED)) == set()
    assert differing(config_of("ppo"), config_of("both")) == {
        "policy.path",
        "rl.num_updates",
    }
    assert differing(config_of("best-of-n"), config_of("random")) == {
        "choice.by",
        "generation.num_samples_per_prompt",
    }
    assert differing(config_of("best-of-n"), config_of(SFT)) == {"pairs.share", "sft.max_steps"}
    assert ARMS[SHUFFLED].shuffled and not ARMS["ppo"].shuffled


def test_the_second_half_of_both_starts_from_best_of_n_of_the_same_seed():
    plan = make_plan()
    assert config_of("both")["policy"]["path"] == str(policy_of(plan, "best-of-n", 1))
    assert config_of("ppo")["policy"]["path"] == str(plan.start / "policy")


def test_core_runs_go_first_seed_by_seed_after_the_start():
    plan = make_plan(only=["start", "ppo", "sft", "both"], seeds=[1, 2])
    later_runs = (("sft", 1), ("both", 1), ("sft", 2), ("both", 2))
    assert plan.runs == (("start", 0), ("ppo", 1), ("ppo", 2), *later_runs)
    assert make_plan().runs[:2] == (("start", 0), ("round", 0))
    assert ("round", 0) not in make_plan(quick=True).runs
    names = list(ARMS)
    assert names.index("both") > names.index("best-of-n")


def test_what_is_tried_keeps_away_from_the_test_set():
    assert make_plan(development=True).sets == ("development",)
    assert make_plan(development=True).results != make_plan().results
    assert make_plan(quick=True).folder != make_plan().folder
    forward, backward = (make_plan(direction=direction) for direction in DIRECTIONS.values())
    assert forward.folder != backward.folder and forward.results != backward.results
    assert forward.start != backward.start


def test_a_run_counts_as_done_with_its_own_settings_and_start_only(tmp_path):
    plan = make_plan(quick=True, seeds=[1])
    plan = replace(plan, folder=tmp_path, results=tmp_path / "results")
    assert not is_done(plan, "ppo", 1, "a start")
    plan.results.mkdir()
    recorded = {"settings": relative(settings_of(plan, "ppo", 1)), "start": "a start"}
    result_path(plan, "ppo", 1).write_text(json.dumps(recorded), encoding="utf-8")
    assert is_done(plan, "ppo", 1, "a start")
    larger = replace(plan, size=Size(updates=9))
    assert not is_done(larger, "ppo", 1, "a start")
    with pytest.raises(UserError, match=r"ppo-1\.json: is of another start than .*demo/models"):
        is_done(plan, "ppo", 1, "another start")


def test_the_digest_of_a_start_follows_its_weights(tmp_path):
    for name in ("policy/model.safetensors", "metricx/model.safetensors", "xcomet/a/model.ckpt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"weights")
    digest = start_digest(tmp_path)
    (tmp_path / "policy/notes.json").write_text("{}", encoding="utf-8")
    assert start_digest(tmp_path) == digest
    (tmp_path / "xcomet/a/model.ckpt").write_bytes(b"others")
    assert start_digest(tmp_path) != digest


def test_all_runs_of_the_page_have_one_start():
    starts = [run["start"] for run in read_results(results_of(DIRECTIONS["en-ko"]))["runs"]]
    assert len(starts) > 3 and len(set(starts)) == 1


def test_overrides_name_the_seed_and_the_folder(tmp_path):
    plan = make_plan()
    settings = overrides("ppo", 7, plan, tmp_path)
    assert "misc.seed=7" in settings and f"policy.path={tmp_path}" in settings
    assert any(setting.endswith("/ppo-7") for setting in settings)


# -- stats --------------------------------------------------------------------------------------


def rollout(src, text):
    """Return a rollout of this translation."""
    return TranslationRollout(
        group=0,
        prompt_input_ids=[1],
        completion_token_ids=[2],
        finish_reason="eos",
        example_id=src,
        src_text=src,
        prompt_text=src,
        completion_text=text,
        token_char_offsets=[(0, len(text))],
        pair="en-US>ko-KR",
    )


def test_the_samples_of_a_source_are_averaged_and_lengths_are_relative():
    examples = [
        Example(id=src, src_text=src, src_lang="English", tgt_lang="Korean", ref_text=ref)
        for src, ref in (("a", "가나다라"), ("b", "마바사아"))
    ]
    greedy = [rollout("a", "가나다라"), rollout("b", "하하")]
    texts = ("가나다라", "하하하하", "마바사아", "마바사아")
    samples = [rollout(src, text) for src, text in zip("aabb", texts, strict=True)]
    stats = stats_of(examples, greedy, samples, [1.0, None])
    assert stats["greedy"] == [100.0, 0.0] and stats["sampled"] == [50.0, 100.0]
    assert stats["length"] == 6 / 8
    assert (stats["reward"], stats["reward_coverage"], stats["cut"]) == (1.0, 0.5, 0.0)


def test_a_table_has_only_seeds_that_every_core_arm_has():
    balanced_runs = balanced(runs_of(ppo=[21.0], sft=[20.0, 20.1], both=[21.0, 22.0]))
    assert {line["seed"] for line in balanced_runs if line["arm"] != START} == {1}
    assert {line["arm"] for line in balanced_runs} == {START, "ppo", "sft", "both"}


def test_an_arm_with_two_seeds_is_in_no_table_of_results():
    lines = runs_of(ppo=[21.0, 22.0, 23.0], sft=[20.0, 20.0, 20.0], shuffled=[19.0, 18.5])
    enough, unfinished = parted(lines)
    assert {line["arm"] for line in enough} == {START, "ppo", "sft"}
    assert {line["arm"] for line in unfinished} == {START, "shuffled"}
    assert "PPO, shuffled (control) | -1.00, -1.50 |" in unfinished_table(
        unfinished, "test", "tracked"
    )
    text = tables({"runs": lines})
    assert "Fewer than 3 seeds" in text and "less the control" in text


def test_an_arm_that_goes_on_from_another_costs_what_both_cost():
    lines = runs_of(**{"best-of-n": [21.0], "both": [21.0], "ppo": [21.0]})
    assert [processor_seconds(lines, arm) for arm in ("ppo", "both")] == [60.0, 120.0]


def test_a_change_is_taken_from_the_start():
    changes = changes_of(runs_of(ppo=[21.0, 19.5]), "test", greedy_chrf)
    assert changes == {"ppo": {1: pytest.approx(1.0), 2: pytest.approx(-0.5)}}


def test_the_interval_over_sources_averages_the_seeds():
    lines = runs_of(ppo=[21.0, 23.0])
    for line in lines:
        line["sets"]["test"]["greedy"] = [line["sets"]["test"]["greedy"][0]] * 20
    assert source_interval(lines, "ppo", START, "test") == pytest.approx((2.0, 2.0))


def test_the_power_calculation_is_that_of_a_paired_test():
    assert needed(1.0, 1.0) == 10  # (1.96 + 0.84)^2 + 1.92 = 9.77
    assert needed(2.0, 1.0) == 34 and needed(1.0, 2.0) < needed(1.0, 1.0)


def test_a_gain_is_claimed_above_start_and_continued_sft_only():
    better = runs_of(ppo=[22.0, 22.2, 22.1], sft=[20.1, 20.0, 20.2], shuffled=[19.0, 19.2, 19.1])
    text = " ".join(verdicts(better, "test", "tracked"))
    assert "rises above the frozen start and above continued SFT" in text and "*PPO*" in text
    worn = runs_of(ppo=[22.0, 22.2, 22.1], sft=[23.0, 23.1, 22.9], shuffled=[19.0, 19.2, 19.1])
    text = " ".join(verdicts(worn, "test", "tracked"))
    assert "No arm is shown to raise greedy chrF above both" in text
    assert "Above the frozen start in greedy chrF, clear of 0: *PPO*." in text


def test_a_gain_in_chrf_with_a_loss_in_bleu_is_not_claimed():
    lines = runs_of(ppo=[22.0, 22.2, 22.1], sft=[20.1, 20.0, 20.2])
    for line, bleu in zip(lines[1:4], (17.9, 18.0, 18.1), strict=True):
        line["sets"]["test"]["bleu"] = bleu
    text = " ".join(verdicts(lines, "test", "tracked"))
    assert "No arm is shown" in text and "BLEU below the start, clear of 0: *PPO*." in text


@pytest.mark.parametrize(("next_round", "names"), [(21.0, "*PPO*"), (22.1, "none"), (25.0, "none")])
def test_the_next_round_of_sft_is_a_rival(next_round, names):
    lines = runs_of(ppo=[22.0, 22.1, 22.3], sft=[20.0, 20.1, 20.2], round=[next_round])
    text = " ".join(verdicts(lines, "test", "tracked"))
    assert f"one run: {next_round - 20:+.2f} greedy chrF" in text
    assert f"against that one run: {names}." in text


def test_a_later_end_is_less_likely_and_all_else_is_as_likely():
    head = torch.nn.Linear(3, 5)
    hidden = torch.randn(2, 4, 3)
    before, after = head(hidden), EndsLater(head, 2, 1.5)(hidden)
    assert torch.allclose(before[..., 2] - after[..., 2], torch.tensor(1.5))
    assert torch.equal(before[..., [0, 1, 3, 4]], after[..., [0, 1, 3, 4]])


def test_length_alone_is_a_rival():
    lines = runs_of(ppo=[22.0, 22.1, 22.3], longer=[21.0])
    text = " ".join(verdicts(lines, "test", "tracked"))
    assert "longer: +1.00 greedy chrF. Above it, with all seeds of an arm: *PPO*." in text
    settings = {
        n: overrides(LONGER, 0, make_plan(direction=d), Path("p")) for n, d in DIRECTIONS.items()
    }
    assert settings["ko-en"][-1] == f"end_bias={END_BIAS['ko-en']}"
    assert settings["ko-en"] != settings["en-ko"]


def test_two_seeds_claim_nothing():
    text = verdicts(runs_of(ppo=[25.0, 25.1], sft=[20.0, 20.1]), "test", "tracked")
    assert text == ["No arm has 3 seeds yet: nothing is shown."]


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=list(DIRECTIONS))
def test_the_page_has_the_tables_of_the_results(direction):
    folder, (begin, end) = results_of(direction), marks(direction)
    text = PAGE.read_text(encoding="utf-8")
    if not folder.is_dir():
        assert begin not in text
        return
    written = text.partition(begin)[2].partition(end)[0].strip()
    assert written == tables(read_results(folder)).strip()


def test_a_report_without_a_result_is_refused_and_leaves_the_page(monkeypatch, tmp_path):
    import typer
    from typer.testing import CliRunner

    import evidence.gain.__main__ as command

    before, empty = PAGE.read_text(encoding="utf-8"), make_plan(direction=DIRECTIONS["ko-en"])
    plan = replace(empty, results=tmp_path)
    monkeypatch.setattr(command, "make_plan", lambda *args, **options: plan)
    app = typer.Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, ["--direction", "ko-en", "--report"])
    assert result.exit_code == 2
    assert PAGE.read_text(encoding="utf-8") == before
