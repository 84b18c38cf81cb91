"""Play episodes by OpenEnv's own server and clients (`make test-openenv`)."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scorekit.processes import end_with_parent
from testing.servers import PATIENCE_S, free_port, wait_until
from tests.kits.trainer.openenv.bodies import RECORDED
from tests.kits.trainer.openenv.processes import (
    OPENENV,
    ROOT,
    Probe,
    SearchServer,
    episodes_of,
    run_server,
    running_probe,
    running_server,
    server_command,
)
from tests.kits.trainer.search_environment.plays import (
    DemoServices,
    demo_services,
    played_by_trainer,
)
from tests.kits.trainer.search_environment.script import COMPLETE, fuzzed_turns, scripted_turns
from tests.kits.unwritable import BY_NAME, Unwritable
from trainer.search.environment.services import EPISODES_A_FILE
from trainer.search.trajectories.store import TrajectoryStore

pytestmark = [
    pytest.mark.openenv,
    pytest.mark.skipif(
        not OPENENV.exists(), reason="no .venv-openenv: `make env-openenv` makes it"
    ),
]
#: Episodes of 6 turns each: 5,040 turns.
FUZZED_EPISODES = 840
MAX_SESSIONS = 12
SEARCH = "<think>look</think>\n<search>life</search>"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_index: Path) -> Iterator[DemoServices]:
    with demo_services(tmp_path_factory.mktemp("openenv"), demo_index) as services:
        config = yaml.safe_load(services.config.read_text(encoding="utf-8"))
        # So that a busy machine is no failure.
        config["answering"]["generator"] |= {"request_timeout_s": 60.0, "deadline_s": 60.0}
        services.config.write_text(yaml.safe_dump(config), encoding="utf-8")
        yield DemoServices(services.config, services.servers)


@pytest.fixture
def services(demo: DemoServices) -> Iterator[DemoServices]:
    yield demo
    demo.recover()


@pytest.fixture(scope="module")
def server(demo: DemoServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchServer]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with running_server(demo.config, log, "--max-sessions", str(MAX_SESSIONS)) as running:
        yield running
    assert running.process.returncode == 0, running.log


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    with running_probe() as running:
        yield running


def _row(services: DemoServices, number: int, mark: str) -> dict[str, Any]:
    """Return a row of the questions, with a mark in its text."""
    lines = Path(str(services.cfg.data.train)).read_text(encoding="utf-8").splitlines()
    row: dict[str, Any] = json.loads(lines[number])
    return row | {"id": f"{mark} {number}", "question": f"{mark}: {row['question']}"}


def _frame(kind: str, data: Any = None) -> str:
    return json.dumps({"type": kind} if data is None else {"type": kind, "data": data})


def test_the_demo_s_questions_give_what_our_trainer_gives(
    services: DemoServices, server: SearchServer, probe: Probe, tmp_path: Path
) -> None:
    turns = [(question, scripted_turns(question)) for question in services.questions]
    records = probe.call("play", url=server.url, episodes=episodes_of(turns))
    assert records == played_by_trainer(services.cfg, tmp_path, turns)
    assert len(records) == 50 and all(record["status"] == "ok" for record in records)
    assert {record["end"] for record in records} == {"complete", "forced", "declined"}
    assert len({record["reward"] for record in records}) > 5


def test_fuzzed_turns_give_what_our_trainer_gives(
    services: DemoServices, probe: Probe, tmp_path: Path
) -> None:
    cfg = services.cfg.model_copy(deep=True)
    cfg.reward.w_judge = 0.0  # the pages matter here, and no answer
    rng = random.Random(7)
    turns = [
        (rng.choice(services.questions), fuzzed_turns(seed, cfg.episode.max_turns))
        for seed in range(FUZZED_EPISODES)
    ]
    expected = played_by_trainer(cfg, tmp_path, turns)
    options = ["--set", "reward.w_judge=0", "--set", f"misc.run_dir={tmp_path / 'run'}"]
    with running_server(services.config, tmp_path / "log.txt", *options) as fuzzed:
        records = probe.call("play", url=fuzzed.url, episodes=episodes_of(turns))
    assert sum(len(texts) for _, texts in turns) > 5000
    assert records == expected
    images = [message for record in records for message in record["messages"] if message[2]]
    assert len(images) > 200
    (folder,) = (tmp_path / "run").glob("environment-*/trajectories")
    assert len(list(TrajectoryStore(folder).read())) == FUZZED_EPISODES


def test_sessions_that_take_turns_do_not_mix(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    turns = [(question, scripted_turns(question)) for question in services.questions[:4]]
    episodes = episodes_of(turns)
    records = probe.call("play_in_turns", url=server.url, episodes=episodes)
    assert records == probe.call("play", url=server.url, episodes=episodes, sessions=1)
    assert len({json.dumps(record["pages"]) for record in records}) > 2


def test_the_synchronous_and_the_generic_client_play_the_same(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    question = services.questions[0]
    episode = {"reset": {"id": question.id}, "turns": scripted_turns(question)}
    played = probe.call("play_synchronously", url=server.url, **episode)
    record, state = played["record"], played["state"]
    generic = probe.call("play_generically", url=server.url, **episode)
    assert record["status"] == "ok" and record["reward"] == generic["reward"]
    assert generic["observation"]["pages"] == record["pages"] and generic["done"] is True
    assert state["done"] is True and state["question_id"] == question.id
    assert state["step_count"] == len(record["messages"]) - 1  # a last turn shows nothing
    assert state["episode_id"] == state["trajectory_id"]


def _sick_turns(name: str) -> list[str]:
    """Return turns of which the second search fails if the retriever does."""
    second = SEARCH.replace("life", "sick" if name == "retriever" else "income")
    return [SEARCH, second, COMPLETE]


def test_a_service_that_dies_midway_gives_no_reward_and_shows_nothing(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    names = {"retriever": "/v1/search", "generator": "completions", "judge": "/v1/score"}
    before = probe.call("counts", url=server.url)
    for name, route in names.items():
        services.servers[name].mood = lambda path, body, name=name, route=route: (
            "503"
            if path.endswith(route) and ("sick" if name == "retriever" else f"dead {name}") in body
            else None
        )
    sick = [
        [{"question": _row(services, number, f"dead {name}")}, _sick_turns(name)]
        for number, name in enumerate(names)
    ]
    well = [[{"question": _row(services, number, "well")}, _sick_turns("")] for number in range(3)]
    records = probe.call("play", url=server.url, episodes=[*sick, *well])
    for record in records[3:]:
        assert record["status"] == "ok" and record["reward"] is not None, record
    for name, record in zip(names, records[:3], strict=True):
        assert (record["status"], record["reward"]) == ("failed", None), record
        assert record["end"] == ("failed" if name == "retriever" else "complete")
        assert record["error"] and "judge" not in record["components"]
        # One page, and of the failure not a word.
        num_messages = 3 if name == "retriever" else 4
        assert [message[0] for message in record["messages"]] == [
            "system",
            *["user"] * (num_messages - 1),
        ]
        assert not any(
            word in message[1]
            for message in record["messages"][2:]
            for word in ("503", "failed", "unreachable", "unavailable", "error")
        )
    after = probe.call("counts", url=server.url)
    assert after["failed"] == before.get("failed", 0) + 3
    assert after["ok"] == before["ok"] + 3


def test_openenv_s_own_client_gets_none_for_an_unscored_episode(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    services.servers["generator"].mood = lambda path, body: "500" if "dead" in body else None
    result = probe.call(
        "play_generically",
        url=server.url,
        reset={"question": _row(services, 0, "dead")},
        turns=[SEARCH, COMPLETE],
    )
    assert result["reward"] is None and result["done"] is True
    assert result["observation"]["status"] == "failed" and result["observation"]["error"]


def test_a_judge_that_is_slower_than_a_client_costs_only_that_client_its_episode(
    services: DemoServices, server: SearchServer, probe: Probe, tmp_path: Path
) -> None:
    released = tmp_path / "released"
    services.servers["judge"].mood = lambda path, body: (
        "hang" if path.endswith("/v1/score") and "slow" in body and not released.exists() else None
    )
    before = probe.call("counts", url=server.url)
    result = probe.call(
        "outwait",
        url=server.url,
        reset={"question": _row(services, 0, "slow")},
        turns=[SEARCH, COMPLETE],
        released=str(released),
    )
    assert result["gave_up"] == "TimeoutError" and "no episode runs" in result["error"]
    assert result["record"]["status"] == "ok" and result["record"]["reward"] is not None
    after = probe.call("counts", url=server.url)
    assert after["failed"] == before.get("failed", 0) + 1 and after["ok"] == before["ok"] + 1


def test_a_client_waits_longer_than_the_server_s_longest_turn(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    cfg = services.cfg
    longest = 3 * cfg.retriever.deadline_s + cfg.rollout.deadline_s
    assert longest > cfg.answering.judge.deadline_s
    assert f"longer than {longest:g} s" in server.log
    patience = {"url": server.url, "reset": {"index": 0}}
    assert probe.call("patience", **patience) == [60.0, longest + 30]
    assert probe.call("patience", **patience, message_timeout_s=7.0) == [7.0, 7.0]


@pytest.mark.parametrize("departure", ["closes", "is lost"])
def test_a_client_that_leaves_in_a_turn_is_counted_and_its_turn_cancelled(
    departure: str, services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    before = probe.call("counts", url=server.url)
    services.servers["retriever"].mood = lambda path, body: "hang" if "never" in body else None
    frames = [
        _frame("reset", {"index": 0}),
        _frame("step", {"text": SEARCH}),
        _frame("step", {"text": SEARCH.replace("life", "never")}),
    ]
    probe.call("leave", url=server.url, frames=frames, departure=departure)
    failed = before.get("failed", 0) + 1
    wait_until(lambda: probe.call("counts", url=server.url).get("failed") == failed)
    services.recover()
    record = probe.call("play", url=server.url, episodes=[[{"index": 1}, [SEARCH, COMPLETE]]])[0]
    assert record["status"] == "ok"


def test_an_episode_that_is_reset_is_counted(server: SearchServer, probe: Probe) -> None:
    before = probe.call("counts", url=server.url)
    reset = _frame("reset", {"index": 0})
    frames = [reset, reset, _frame("step", {"text": COMPLETE}), _frame("state")]
    answers = probe.call("send_frames", url=server.url, frames=frames)
    assert answers[2]["data"]["observation"]["status"] == "ok"
    after = answers[3]["data"]["episodes"]
    assert after["failed"] == before.get("failed", 0) + 1 and after["ok"] == before["ok"] + 1


#: Frames -> what the answer to the last says.
HOSTILE = {
    "no_json": (["{"], "Invalid JSON"),
    "list": (["[]"], "SESSION_ERROR"),
    "unknown": ([_frame("explode")], "Unknown message type"),
    "no_text": ([_frame("step", {"tokens": 3})], "VALIDATION_ERROR"),
    "extra": ([_frame("step", {"text": "a", "reward": 1.0})], "VALIDATION_ERROR"),
    "number": ([_frame("step", {"text": 7})], "VALIDATION_ERROR"),
    "tokens": ([_frame("step", {"text": "a", "tokens": -1})], "VALIDATION_ERROR"),
    "no_episode": ([_frame("step", {"text": "a"})], "no episode runs"),
    "index": ([_frame("reset", {"index": 10**30})], "data.train has 50 questions"),
    "row": ([_frame("reset", {"question": {"question": "a\ud800", "answer": "b"}})], "reset|row"),
    "deep": (["[" * 100_000], "Invalid JSON|SESSION_ERROR"),
    "after_the_end": (
        [_frame("reset", {"index": 0}), *[_frame("step", {"text": COMPLETE})] * 2],
        "no episode runs",
    ),
}


def test_hostile_messages_end_no_other_session(
    services: DemoServices, server: SearchServer, probe: Probe
) -> None:
    probe.send("begin", url=server.url, index=1)
    assert probe.answer()[1][0] == "user"
    for name, (frames, expected) in HOSTILE.items():
        answers = probe.call("send_frames", url=server.url, frames=frames)
        assert any(word in json.dumps(answers[-1]) for word in expected.split("|")), (name, answers)
    odd = ["\ud800 <search>\udfff</search>", "\x00" * 1000, "<search>" + "가" * 200_000, SEARCH]
    frames = [_frame("reset", {"index": 0}), *(_frame("step", {"text": text}) for text in odd)]
    answers = probe.call("send_frames", url=server.url, frames=frames)
    assert [answer["type"] for answer in answers] == ["observation"] * 5
    assert len(answers[-1]["data"]["observation"]["messages"]) == 1
    too_large = [_frame("reset", {"index": 0}), _frame("step", {"text": "a" * 20_000_000})]
    assert probe.call("send_frames", url=server.url, frames=too_large)[-1] == "closed"
    episode = [[{"index": 2}, [SEARCH, COMPLETE]]]
    assert probe.call("play", url=server.url, episodes=episode)[0]["status"] == "ok"
    assert "Traceback" not in server.log, server.log


def test_one_session_too_many_is_refused(server: SearchServer, probe: Probe) -> None:
    probe.call("end")
    wait_until(lambda: probe.call("fill", url=server.url, sessions=1)[0] == 1)
    served, error = probe.call("fill", url=server.url, sessions=MAX_SESSIONS + 1)
    assert served == MAX_SESSIONS and "CAPACITY_REACHED" in error
    wait_until(lambda: probe.call("fill", url=server.url, sessions=1)[0] == 1)


def test_a_server_with_keys_refuses_others_and_writes_all_episodes_when_it_stops(
    services: DemoServices, probe: Probe, tmp_path: Path
) -> None:
    options = ["--set", f"misc.run_dir={tmp_path}"]
    with running_server(services.config, tmp_path / "log.txt", *options, keys="one,two") as keyed:
        for key in (None, "three"):
            refused = probe.call("begin", url=keyed.url, index=0, api_key=key)
            assert "rejected" in refused["raised"] and "40" in refused["raised"]
        assert probe.call("begin", url=keyed.url, index=0, api_key="two")[0][0] == "system"
    assert keyed.process.returncode == 0, keyed.log
    (folder,) = tmp_path.glob("environment-*/trajectories")
    (trajectory,) = TrajectoryStore(folder).read()
    assert trajectory.reward is not None and trajectory.reward.status == "failed"
    assert trajectory.end_detail == "the client left before its end"


def test_a_session_goes_on_after_episodes_could_not_be_written(
    services: DemoServices, probe: Probe, tmp_path: Path
) -> None:
    options = ["--set", f"misc.run_dir={tmp_path}"]
    with running_server(services.config, tmp_path / "log.txt", *options) as full:
        (folder,) = tmp_path.glob("environment-*/trajectories")
        folder.rename(tmp_path / "away")
        folder.write_text("a file", encoding="utf-8")
        episode = [_frame("reset", {"index": 0}), _frame("step", {"text": COMPLETE})]
        frames = episode * EPISODES_A_FILE + episode[:1]
        *_, last, after = probe.call("send_frames", url=full.url, frames=frames)
        assert last["type"] == "error" and after["type"] == "observation", (last, after)
        folder.unlink()
        (tmp_path / "away").rename(folder)
    assert len(list(TrajectoryStore(folder).read())) == EPISODES_A_FILE + 1


@pytest.mark.parametrize("unwritable", BY_NAME.values(), ids=BY_NAME)
def test_a_log_that_cannot_be_written_does_not_keep_the_server(
    services: DemoServices, unwritable: Unwritable, tmp_path: Path
) -> None:
    port = free_port()
    command = server_command(
        services.config, "--port", str(port), "--set", f"misc.run_dir={tmp_path}"
    )
    with (
        unwritable() as stderr,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=stderr,
            stderr=stderr,
            preexec_fn=end_with_parent(),
        ) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or _is_up(port))
            for number in (signal.SIGINT, signal.SIGTERM):  # the second changes nothing
                process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def _is_up(port: int) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def _validate(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [OPENENV.parent / "openenv", "validate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_openenv_validates_the_example_and_a_server(server: SearchServer) -> None:
    code, printed = _validate("examples/openenv", "--level", "static", "--skip-build")
    assert code == 0 and "Verdict: PASS" in printed, printed
    code, printed = _validate("--url", server.url, "--timeout", "60")
    assert code == 0 and "Verdict: PASS" in printed, printed


def test_a_mistake_is_one_line_before_it_listens(services: DemoServices) -> None:
    config = ["--config", str(services.config)]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        code, printed = run_server(*config, "--port", port)
        assert code == 2 and f"--port {port}: Address already in use" in printed
    code, printed = run_server(*config, "--set", "data.train=missing.jsonl")
    assert code == 2 and "missing.jsonl" in printed
    assert all(len(text.splitlines()) == 1 for text in (printed,)), printed


def test_the_recorded_bodies_are_those_of_openenv(probe: Probe) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert probe.call("bodies") == recorded
    parsed = probe.call("parsed", responses=recorded["responses"])
    assert parsed["failed"] == [None, None, "failed", True]
    assert parsed["late"] == [None, None, "late", True]
    assert parsed["zero"] == [0.0, 0.0, "ok", True]
    assert parsed["begin"] == [None, None, None, False]
