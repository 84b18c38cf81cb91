"""Check what is removed from the sample afterwards: near duplicates and evaluation texts."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter

import pytest

from demo.madlad_shard import documents, write_shard
from scorekit.errors import UserError
from synth.stages.table import BY_NAME
from synth.storage.stats import count_stage
from synth.storage.store import StageFolder
from tests.kits import forked
from tests.kits.synth.driver import prepared
from tests.kits.synth.output import config as output_config
from tests.kits.synth.output import make_run, run_filter
from tests.kits.synth.sample_sources import config, counts, run, shards, tree


def near_copies(folder):
    """Return a corpus in which every text occurs twice, the second time with another ending."""
    texts = documents("ko", 0, 6)
    copies = [text.replace("\n", " 그렇다.\n") for text in texts]
    for index, group in enumerate([texts[:3], copies[3:], texts[3:], copies[:3]]):
        write_shard(folder, group, lang="ko", index=index)
    return [str(folder / "data/*/*.gz")]


def sampled(folder):
    return [record["source_id"] for record in folder.records()]


def test_one_of_sources_that_nearly_repeat_each_other_is_kept(tmp_path):
    files = near_copies(tmp_path / "corpus")
    data = {"near_duplicates": 0.7, "sample_pool_size": 400}
    plain = sampled(run(config(tmp_path / "1", files, data={"sample_pool_size": 400})))
    folder = run(config(tmp_path / "2", files, data=data))
    accepted = sampled(folder)
    duplicates = list(folder.all_rejected())
    assert {r["reason_code"] for r in duplicates} == {"near_duplicate"} and len(duplicates) > 20
    order = {identity: position for position, identity in enumerate(plain)}
    assert [i for i in plain if i in set(accepted)] == accepted
    assert set(accepted) | {r["source_id"] for r in duplicates} == set(plain)
    for record in duplicates:
        assert order[record["resembles"]] < order[record["source_id"]]
        assert record["reason"] == f"resembles {record['resembles']}"
    stage_counts = counts(folder)
    assert stage_counts["screened"] == {"near_duplicate": len(duplicates)} and stage_counts[
        "sampled"
    ] == len(accepted)
    rejected = stage_counts["rejected"].values()
    assert stage_counts["pieces"] == stage_counts["sampled"] + sum(rejected) + len(duplicates)
    stage = count_stage(folder)
    assert stage.records_in == stage_counts["pieces"] and stage.rejected["near_duplicate"] == len(
        duplicates
    )


def test_without_them_the_settings_are_those_of_earlier_versions(tmp_path):
    folder = run(config(tmp_path, shards(tmp_path)))
    data = folder.manifest()["settings"]["data"]
    assert not {"near_duplicates", "decontaminate"} & set(data)
    assert "screened" not in counts(folder) and not list(folder.all_rejected())


def test_several_processes_screen_as_one(tmp_path):
    files = near_copies(tmp_path / "corpus")
    evaluation = tmp_path / "set.txt"
    evaluation.write_text("\n".join(documents("ko", 0, 1)[0].splitlines()[:5]))
    data = {"near_duplicates": 0.7, "decontaminate": [str(evaluation)]}
    single_folder = run(config(tmp_path / "1", files, data=data))
    for shard_id in (2, 0, 1):
        run(config(tmp_path / "2", files, data=data), shard_id=shard_id, num_shards=3, resume=True)
    single, three = tree(tmp_path / "1"), tree(tmp_path / "2")
    assert single == three and counts(single_folder)["screened"].keys() == {
        "near_duplicate",
        "contaminated",
    }


KILLED = """
import os, signal, sys
from synth.sources import screen
from tests.kits.synth.sample_sources import config, run
whole = screen.NearDuplicates.find
def find(self, able):
    whole(self, able)
    os.kill(os.getpid(), signal.SIGKILL)
screen.NearDuplicates.find = find
run(config(sys.argv[1], [sys.argv[2]], data={"near_duplicates": 0.7}))
"""


def test_a_run_that_is_killed_while_it_screens_goes_on(tmp_path):
    (files,) = near_copies(tmp_path / "corpus")
    result = forked.run([sys.executable, "-c", KILLED, str(tmp_path / "1"), files], cwd=os.getcwd())
    assert result.returncode == -signal.SIGKILL
    data = {"near_duplicates": 0.7}
    run(config(tmp_path / "1", [files], data=data), resume=True)
    run(config(tmp_path / "2", [files], data=data))
    assert tree(tmp_path / "1") == tree(tmp_path / "2")


def test_sources_of_an_evaluation_set_are_left_out_and_a_changed_set_refuses_to_resume(tmp_path):
    plain = list(run(config(tmp_path / "1")).records())
    sentences = [r for r in plain if r["source_type"] == "sentence"]
    evaluation = tmp_path / "flores.jsonl"
    evaluation.write_text(json.dumps({"sentence": sentences[0]["source_text"]}) + "\n")
    cfg = config(tmp_path / "2", data={"decontaminate": [str(evaluation)]})
    folder = run(cfg)
    rejected = list(folder.all_rejected())
    assert sentences[0]["source_id"] in {r["source_id"] for r in rejected}
    assert {r["reason_code"] for r in rejected} == {"contaminated"}
    assert "flores.jsonl row 1" in rejected[0]["reason"]
    assert counts(folder)["screened"] == {"contaminated": len(rejected)}
    evaluation.write_text(json.dumps({"sentence": "다른 문장입니다."}) + "\n")
    with pytest.raises(UserError, match=r"data\.decontaminate was .*, is"):
        run(cfg, resume=True)
    evaluation.unlink()
    with pytest.raises(UserError, match=r"flores\.jsonl"):
        run(cfg, resume=True)


def test_translations_of_an_evaluation_set_are_left_out(tmp_path):
    records = make_run(tmp_path / "run", chatter=0)
    reference = records[3]["topk"][0]["text"]
    evaluation = tmp_path / "wmt.txt"
    evaluation.write_text(reference.replace("\n", " ") + "\n")
    cfg = output_config(tmp_path / "run", data={"decontaminate": [str(evaluation)]})
    run_filter(cfg)
    folder = StageFolder(tmp_path / "run", "format_filter")
    codes = Counter(r["reason_code"] for r in folder.all_rejected())
    assert codes["contaminated"] == 1
    (rejected,) = [r for r in folder.all_rejected() if r["reason_code"] == "contaminated"]
    assert rejected["source_id"] == records[3]["source_id"]
    assert rejected["reason"] == "is wmt.txt line 1"
    evaluation.write_text("Something else.\n")
    with pytest.raises(UserError, match="decontaminate was"):
        prepared(BY_NAME["format_filter"], cfg, resume=True)
