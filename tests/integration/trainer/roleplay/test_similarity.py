"""Test an embedding server over HTTP: its discovery, its calibration check, and no fallback."""

from __future__ import annotations

import base64
import json
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from services.embedder.endpoint import EmbeddingsEndpoint
from testing.fake_embedder import FakeEmbedder, vector_of
from testing.servers import free_port, running_app, running_service
from trainer.roleplay import rewards
from trainer.roleplay.calibration import CANARIES, FILE, read_calibration
from trainer.roleplay.cli import app
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import (
    configure,
    reward_grounded_to_user,
    reward_reference_alignment,
)
from trainer.roleplay.similarity import Similarity, open_similarity
from trainer.roleplay.turn import RoleplayTurn

TURNS = [
    RoleplayTurn(
        f"{k:02}",
        ({"role": "user", "content": f"낱말{k // 2} 질문{k}"},),
        f"낱말{k // 2} 대답{k}",
        character_name="유나",
        dialogue=f"{k // 2}",
        place=k % 2,
    )
    for k in range(60)
]


class UncheckedEndpoint(EmbeddingsEndpoint):
    """An endpoint without checks, like a third-party server that returns what its model gives."""

    def outcome_error(self, fields):
        return None


class OtherVectors(FakeEmbedder):
    """A model with the same description but other vectors."""

    def forward(self, batch):
        return [
            {"embedding": vector_of([*sample.payload, "x"], self.dimension)} for sample in batch
        ]


class ZeroVectors(FakeEmbedder):
    """A model that returns zeros for every text but the canaries."""

    endpoint = UncheckedEndpoint()

    def forward(self, batch):
        canaries = [text.split() for text in CANARIES]
        outcomes = super().forward(batch)
        for sample, outcome in zip(batch, outcomes, strict=True):
            if sample.payload not in canaries and len(sample.payload) < 4:
                outcome["embedding"] = np.zeros(self.dimension, np.float32)
        return outcomes


@pytest.fixture(scope="module")
def url():
    with running_service(FakeEmbedder(dimension=32)) as server_url:
        yield server_url


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(rewards, "_setting", None)


@pytest.fixture(scope="module")
def folder(url, tmp_path_factory):
    """Return the directory of a run that has fitted its anchors."""
    path = tmp_path_factory.mktemp("run")
    open_similarity(RewardConfig(embedding_model=url), TURNS, path).embedder.close()
    return path


def _opened(url, folder, turns=None, **cfg):
    similarity = open_similarity(RewardConfig(embedding_model=url, **cfg), turns, folder)
    similarity.embedder.close()
    return similarity.calibration


def test_a_run_fits_its_anchors_once_and_goes_on_with_them(url, folder):
    calibration = read_calibration(folder / FILE)
    assert calibration.grounded.separation > 0.7
    assert (
        calibration.model,
        calibration.revision,
        calibration.pooling,
        calibration.dimension,
    ) == ("fake", "0", "mean", 32)
    assert _opened(url, folder) == calibration
    assert _opened(url, folder, TURNS[:30]) == calibration


def test_a_calibration_that_is_named_is_kept_in_the_folder(url, folder, tmp_path):
    calibration = read_calibration(folder / FILE)
    assert _opened(url, tmp_path, calibration=folder / FILE) == calibration
    assert read_calibration(tmp_path / FILE) == calibration
    another = calibration.model_copy(update={"seed": 7})
    another.write(tmp_path / "another.json")
    with pytest.raises(UserError, match="the run uses another"):
        _opened(url, tmp_path, calibration=tmp_path / "another.json")


def test_without_anchors_and_without_turns_there_is_no_similarity(url, tmp_path):
    with pytest.raises(UserError, match="Name a calibration"):
        _opened(url, tmp_path)


def test_a_server_that_is_not_there_is_the_users_mistake(folder, monkeypatch):
    monkeypatch.setattr("trainer.roleplay.similarity._REACH_S", 0.2)
    with pytest.raises(
        UserError, match=r"cannot be reached|no answer"
    ):  # the latter: a busy machine
        _opened(f"http://127.0.0.1:{free_port()}", folder)
    with pytest.raises(UserError, match="is no URL"):
        _opened("data/embedding/BGE-m3-ko", folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimension": 64}, "dimension 32, not 64"),
        ({"revision": "of another"}, "revision 0, not of another"),
        ({"pooling": "cls"}, "pooling mean, not cls"),
        ({"canaries": {CANARIES[2]: list(map(float, range(32)))}}, "another vector for a fixed"),
        ({"canaries": {CANARIES[0]: [1.0] * 8}}, "vectors of 32 numbers, not 8"),
    ],
)
def test_another_model_than_the_calibrations_is_refused(url, folder, tmp_path, changes, message):
    read_calibration(folder / FILE).model_copy(update=changes).write(tmp_path / FILE)
    with pytest.raises(UserError, match=message):
        _opened(url, tmp_path)


def test_a_server_that_tells_the_same_and_has_other_vectors_is_found(folder):
    with running_service(OtherVectors(dimension=32)) as other:
        with pytest.raises(UserError, match="another vector for a fixed text"):
            _opened(other, folder)
        configure(RewardConfig(), Similarity(Embeddings(other), read_calibration(folder / FILE)))
        with pytest.raises(ServiceUnreachable, match="another vector"):
            reward_grounded_to_user(["가"], ["나"])


def _server_that_gives(vector):
    """Yield a server in OpenAI's format that returns one vector for all texts."""

    async def serve(scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("body") is not None:
            body += message["body"]
            if not message.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            answer = {"data": [{"id": "stub"}]}
        elif scope["path"] == "/v1/embeddings":
            packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            texts = json.loads(body)["input"]
            rows = [{"index": k, "embedding": packed} for k in range(len(texts))]
            answer = {"data": rows, "model": "stub"}
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    return running_app(serve)


def test_a_number_that_is_not_finite_ends_the_run_before_it_begins(folder, tmp_path):
    with _server_that_gives([math.nan] * 32) as stub, pytest.raises(UserError, match="not finite"):
        _opened(stub, folder)
    with (
        _server_that_gives([1.0] * 32) as stub,
        pytest.raises(UserError, match="cannot separate them"),
    ):
        _opened(stub, tmp_path, TURNS)


def test_zeros_end_a_run_though_the_canary_is_intact(folder, tmp_path):
    with running_service(ZeroVectors(dimension=32)) as broken:
        similarity = open_similarity(RewardConfig(embedding_model=broken), None, folder)
        configure(RewardConfig(), similarity)
        for reward in (reward_grounded_to_user, reward_reference_alignment):
            with pytest.raises(ServiceUnreachable, match="a vector of zeros") as error_info:
                reward(["가"], ["나"], reference=["다"])
            assert error_info.value.exit_code == 2 and not error_info.value.retryable
        similarity.embedder.close()
        with pytest.raises(UserError, match="a vector of zeros"):
            _opened(broken, tmp_path, TURNS)


def test_an_embedder_of_ones_own_is_held_to_the_same(folder):
    calibration = read_calibration(folder / FILE)
    for number, message in ((0.0, "a vector of zeros"), (math.nan, "not finite")):
        embedder = SimpleNamespace(embed=lambda texts, canary, n=number: [[n] * 32] * len(texts))
        configure(RewardConfig(), Similarity(embedder, calibration))
        with pytest.raises(ServiceUnreachable, match=message):
            reward_grounded_to_user(["가"], ["나"])


def test_a_server_that_goes_away_in_mid_run_raises_what_the_run_ends_with(folder):
    with (
        running_service(FakeEmbedder(dimension=32)) as closed_url,
        Embeddings(closed_url) as client,
    ):
        similarity = Similarity(client, read_calibration(folder / FILE))
        configure(RewardConfig(), similarity)
        reward_grounded_to_user(["가"], ["나"])
    with Embeddings(closed_url, deadline_s=0.5) as client:
        similarity.embedder = client
        assert reward_grounded_to_user(["가"], ["나"])  # a cached text is not requested again
        with pytest.raises((ServiceUnreachable, RequestError), match=r"be reached|no answer"):
            reward_grounded_to_user(["가"], ["다"])


def test_two_functions_ask_together_and_replies_that_nobody_takes_are_nothing(url, folder):
    similarity = open_similarity(
        RewardConfig(embedding_model=url, embedding_batch_size=4), None, folder
    )
    configure(RewardConfig(), similarity)
    reference = "낱말1 대답2"
    replies = [reference, "", "\0", "말 " * 65, "가" * 9_000, "다른 말"]
    row = {"prompts": ["낱말1 질문2"] * 6, "completions": replies, "reference": [reference] * 6}
    logged = {}
    grounded = reward_grounded_to_user(**row, log_metric=logged.__setitem__)
    similarity.embedder.close()  # the second function has its vectors in the cache
    aligned = reward_reference_alignment(**row)
    assert grounded[0] > 0.5
    assert aligned[0] == 1
    assert grounded[1:5] == aligned[1:5] == [0] * 4
    assert logged["grounded/not_embedded"] == pytest.approx(4 / 6)


def test_server_and_anchors_may_come_from_the_environment(url, folder, monkeypatch):
    monkeypatch.setenv("REWARD_EMBEDDING_URL", url)
    monkeypatch.setenv("REWARD_CALIBRATION", str(folder / FILE))
    reference = ["낱말1 대답2"]
    assert reward_reference_alignment(["가"], reference, reference=reference) == [1]


def _calibrate(*flags):
    return CliRunner().invoke(app, ["calibrate", *map(str, flags)])


def test_calibrate_writes_anchors_and_a_page_with_both_histograms(url, tmp_path):
    rows = [
        {"prompt": list(turn.prompt), "reference": turn.reference, "character_name": "유나"}
        | {"talk": turn.dialogue, "place": turn.place, "id": turn.id}
        for turn in TURNS
    ]
    data = tmp_path / "turns.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    flags = ("--data", data, "--out", tmp_path / "anchors.json", "--column", "dialogue=talk")
    result = _calibrate(*flags, "--embedding-model", url)
    assert result.exit_code == 0, result.output
    calibration = read_calibration(tmp_path / "anchors.json")
    assert calibration.grounded.true_pairs == 60
    assert calibration.reference.true_pairs == 30
    page = (tmp_path / "anchors.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert f"{calibration.grounded.low:.3f}" in page
    second_run = _calibrate(*flags, "--embedding-model", url)
    assert second_run.exit_code == 2
    assert "--overwrite" in second_run.output


def test_calibrate_says_in_a_line_why_it_cannot(url, tmp_path, monkeypatch):
    data = tmp_path / "turns.jsonl"
    row = {"prompt": [{"role": "user", "content": "가"}], "reference": "나"}
    data.write_text(json.dumps(row), encoding="utf-8")
    flags = ("--data", data, "--out", tmp_path / "anchors.json", "--embedding-model")
    result = _calibrate(*flags, url)
    assert result.exit_code == 2
    assert "at least 20 are required" in result.output
    monkeypatch.setattr("trainer.roleplay.similarity._REACH_S", 0.2)
    address = f"http://127.0.0.1:{free_port()}"
    nobody = _calibrate(*flags, address)
    assert nobody.exit_code == 2
    assert f"reward.embedding_model: {address}" in nobody.output.replace("timeout: ", "")
    assert not (tmp_path / "anchors.json").exists()
