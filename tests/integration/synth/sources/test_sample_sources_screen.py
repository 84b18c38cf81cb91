"""What is taken out of the sample once it is drawn: near duplicates, evaluation texts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from demo.madlad_shard import documents, write_shard
from scorekit.errors import UserError
from synth.context import StageContext
from synth.stages.table import BY_NAME
from synth.storage.stage_start import prepare_stage
from synth.storage.stats import count_stage
from synth.storage.store import StageFolder
from tests.kits.synth.output import config as output_config
from tests.kits.synth.output import make_run, run_filter
from tests.kits.synth.sample_sources import config, counts, run, shards, tree


def near_copies(folder):
    """A corpus in which every text stands twice, the second time with another ending."""
    texts = documents("ko", 0, 6)
    again = [text.replace("\n", " 그렇다.\n") for text in texts]
    for index, group in enumerate([texts[:3], again[3:], texts[3:], again[:3]]):
        write_shard(folder, group, lang="ko", index=index)
    return [str(folder / "data/*/*.gz")]


def sampled(folder):
    return [record["source_id"] for record in folder.records()]


def test_one_of_sources_that_nearly_repeat_each_other_is_kept(tmp_path):
    files = near_copies(tmp_path / "corpus")
    data = {"near_duplicates": 0.7, "sample_pool_size": 400}
    plain = sampled(run(config(tmp_path / "1", files, data={"sample_pool_size": 400})))
    folder = run(config(tmp_path / "2", files, data=data))
    kept = sampled(folder)
    lost = list(folder.all_rejected())
    assert {r["reason_code"] for r in lost} == {"near_duplicate"} and len(lost) > 20
    order = {identity: place for place, identity in enumerate(plain)}
    assert [i for i in plain if i in set(kept)] == kept
    assert set(kept) | {r["source_id"] for r in lost} == set(plain)
    for record in lost:
        assert order[record["resembles"]] < order[record["source_id"]]
        assert record["reason"] == f"resembles {record['resembles']}"
    told = counts(folder)
    assert told["screened"] == {"near_duplicate": len(lost)} and told["sampled"] == len(kept)
    rejected = told["rejected"].values()
    assert told["pieces"] == told["sampled"] + sum(rejected) + len(lost)
    stage = count_stage(folder)
    assert stage.records_in == told["pieces"] and stage.rejected["near_duplicate"] == len(lost)


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
    whole = run(config(tmp_path / "1", files, data=data))
    for shard_id in (2, 0, 1):
        run(config(tmp_path / "2", files, data=data), shard_id=shard_id, num_shards=3, resume=True)
    one, three = tree(tmp_path / "1"), tree(tmp_path / "2")
    assert one == three and counts(whole)["screened"].keys() == {"near_duplicate", "contaminated"}


KILLED = """
import os, signal, sys
from synth.sources import near_duplicates
from tests.kits.synth.sample_sources import config, run
whole = near_duplicates.NearDuplicates.find
def find(self, able):
    whole(self, able)
    os.kill(os.getpid(), signal.SIGKILL)
near_duplicates.NearDuplicates.find = find
run(config(sys.argv[1], [sys.argv[2]], data={"near_duplicates": 0.7}))
"""


def test_a_run_that_is_killed_while_it_screens_goes_on(tmp_path):
    (files,) = near_copies(tmp_path / "corpus")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "1"), files], cwd=os.getcwd()
    )
    assert done.returncode == -signal.SIGKILL
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
    lost = list(folder.all_rejected())
    assert sentences[0]["source_id"] in {r["source_id"] for r in lost}
    assert {r["reason_code"] for r in lost} == {"contaminated"}
    assert "flores.jsonl row 1" in lost[0]["reason"]
    assert counts(folder)["screened"] == {"contaminated": len(lost)}
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
    (lost,) = [r for r in folder.all_rejected() if r["reason_code"] == "contaminated"]
    assert lost["source_id"] == records[3]["source_id"]
    assert lost["reason"] == "is wmt.txt line 1"
    evaluation.write_text("Something else.\n")
    with pytest.raises(UserError, match="decontaminate was"):
        prepare_stage(BY_NAME["format_filter"], [], StageContext(cfg, cfg.run.out_dir, resume=True))
