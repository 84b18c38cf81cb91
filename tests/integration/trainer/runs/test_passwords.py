"""Check that the files of a run have no password of a URL, except its config."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from scorekit.config import load_config
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from trainer.rl.config import VLLMConfig
from trainer.runs.checkpoints.checkpoint import CheckpointState, finalize_checkpoint, read_state
from trainer.runs.config import check_config
from trainer.runs.evaluation.files import config_text
from trainer.runs.evaluation.pages import read_text
from trainer.runs.run_log import RunLog
from trainer.search.config import SearchConfig
from trainer.translation.check import _service
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.services import RewardClient

SECRET = "hidden"


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend()) as url:
        yield url.replace("http://", f"http://user:{SECRET}@")


def config(url: str, folder: Path) -> TranslationConfig:
    settings = {
        "reward.metricx_urls": [url, f"{url}/"],
        "reward.metricx_model_name": "fake-metricx",
        "reward.metricx_tokenizer_name": "words",
        "reward.w_xcomet_span": 0,
        "misc.run_dir": str(folder),
    }
    path = folder / "mine.yaml"
    values: dict = {}
    for key, value in settings.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    path.write_text(yaml.safe_dump(values))
    return load_config(TranslationConfig, path, [])


def test_the_files_of_a_run_have_no_password(url, tmp_path):
    cfg = config(url, tmp_path)
    with closing(RewardClient(cfg.reward, offer_unneeded=False)) as rewarder:
        infos = rewarder.infos
        assert rewarder.score([]).results is not None
    assert list(infos) == [url.replace(f"user:{SECRET}@", "")]
    run_log = RunLog(cfg, infos)
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    origin = {"reward.metricx_urls": {"path": url, "model": "m"}}
    finalize_checkpoint(checkpoint, CheckpointState(1, cfg.model_dump(mode="json"), origin=origin))
    for path in (run_log.folder / "services.json", checkpoint / "state.json"):
        assert SECRET not in path.read_text() and "127.0.0.1" in path.read_text()
    assert SECRET not in config_text(cfg, None)
    # The run is resumed with this file, so it keeps what the user's own has.
    assert SECRET in read_text(tmp_path / "config.yaml")


def test_the_check_of_a_config_prints_no_password(url, tmp_path):
    _, description = _service(config(url, tmp_path), "metricx")
    assert "fake-metricx" in description and SECRET not in description


def test_a_run_of_an_older_version_with_a_password_goes_on(url, tmp_path, caplog):
    """Check state.json of an older version, which has the URLs as they were written."""
    cfg = config(url, tmp_path)
    old = {"update": 1, "config": cfg.model_dump(mode="json")}
    old["origin"] = {"reward.metricx_urls": {"path": url, "model": "m"}}
    (tmp_path / "state.json").write_text(json.dumps(old))
    state = read_state(tmp_path)
    assert SECRET not in str(state)
    caplog.set_level(logging.WARNING)
    check_config(cfg, state.config)
    assert not caplog.records
    check_config(cfg, old["config"])  # as read by anything else
    assert not caplog.records
    moved = url.replace(f"user:{SECRET}@127.0.0.1", f"other:{SECRET}2@gpu7")
    check_config(config(moved, tmp_path), state.config)
    (line,) = {record.getMessage() for record in caplog.records}
    assert "gpu7" in line and SECRET not in line


def test_a_candidate_is_not_named_with_the_password_of_its_server():
    from trainer.search.evaluation.run import candidate_of

    cfg = load_config(SearchConfig, None, ["server.model=m"])
    candidate = candidate_of(cfg, Path(), f"http://user:{SECRET}@gpu7/v1#m")
    assert candidate.name == "http://gpu7/v1 (m)" and SECRET in str(candidate.cfg.server.url)


def test_a_server_is_one_whatever_its_password():
    with pytest.raises(ValueError, match="listed twice") as error_info:
        VLLMConfig(url=[f"http://a:{SECRET}@gpu7:8000", "http://gpu7:8000/v1"])
    assert SECRET not in str(error_info.value.errors(include_input=False))
