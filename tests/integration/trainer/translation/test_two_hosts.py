"""Train a translation policy on two hosts, with services and samplers on a third.

The hosts are network namespaces with addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.hosts import missing_permission
from tests.kits.trainer.services_host import KEY
from tests.kits.trainer.toy_runs import UPDATES, toy_values
from tests.kits.trainer.two_hosts import TwoHosts, check_same, run_on_one_host, stats, two_hosts

REASON = missing_permission()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


def sampling(trio: TwoHosts, served: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return the section `generation` of samplers that are served. keys: of `vllm`."""
    vllm = served["vllm"] | {"timeout_s": 120.0} | keys
    return trio.values["generation"] | {"engine": "vllm", "vllm": vllm}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(folder) as trio:
        (folder / "data").mkdir()
        trio.values = toy_values(folder / "data", {})
        trio.values["policy"] |= {"lora": {"r": 2}}
        trio.values["misc"] |= {"patience_s": 60}
        served = trio.serve(translation=True, samplers=[str(folder / "data/policy")] * 2)
        trio.values |= {"reward": served["reward"], "generation": sampling(trio, served)}
        yield trio


@pytest.fixture(scope="module")
def on_one(trio: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose two processes are on one host."""
    return run_on_one_host(trio, tmp_path_factory.mktemp("one") / "run", UPDATES)


def test_two_hosts_learn_as_one_with_services_and_samplers_elsewhere(
    trio: TwoHosts, on_one: Path, tmp_path: Path
) -> None:
    """Check a folder that both see, one that the second does not see, and a wrong key."""
    for name, hidden in (("shared", ()), ("own", [tmp_path])):
        codes, texts = trio.finish(trio.config(tmp_path / name), hidden=hidden)
        assert codes == [0, 0], texts
        check_same(on_one, tmp_path / name, UPDATES)

    wrong = trio.config(tmp_path / "wrong")
    codes, texts = trio.finish(wrong, keys=(KEY, "another"))
    assert codes[0] and codes[1] == 2, texts
    assert "SCOREKIT_API_KEY" in texts[1] and "Traceback" not in "".join(texts)
    assert "process 1 is at" in texts[0]
    codes, texts = trio.finish(wrong, keys=("another", "another"))
    assert codes[0] == 2 and texts[0].count("error: ") == 1, texts
    assert "SCOREKIT_API_KEY" in texts[0]


def test_what_a_host_does_not_see_is_one_line(trio: TwoHosts, on_one: Path, tmp_path: Path) -> None:
    """Check the data, the checkpoints, the buffer, and the folder of weights for the samplers."""
    more = {"num_updates": UPDATES + 1}
    resumed = trio.config(on_one, rl=more)
    early = trio.config(tmp_path / "early", rl={"max_staleness": 1})
    for config, flags, hidden, line in (
        (trio.config(tmp_path / "data"), (), trio.folder / "data", "process 1 of 2: "),
        (resumed, ("--resume",), on_one.parent, "misc.run_dir: process 1 has no checkpoint in "),
        (early, (), tmp_path, "misc.run_dir: process 1 does not see "),
    ):
        codes, texts = trio.finish(config, *flags, hidden=[hidden])
        assert codes == [2, 0], texts
        assert texts[0].count("error: ") == 1 and f"error: {line}" in texts[0], texts
        assert "Traceback" not in "".join(texts) and "error: " not in texts[1]

    (tmp_path / "sync").mkdir()
    served = trio.serve(hidden=[tmp_path / "sync"], samplers=[str(trio.folder / "data/policy")])
    generation = sampling(trio, served, sync_dir=str(tmp_path / "sync"), timeout_s=20)
    codes, texts = trio.finish(trio.config(tmp_path / "run", generation=generation))
    assert codes[0] == 2, texts
    assert texts[0].count("error: ") == 1 and "No adapter found for" in texts[0], texts[0]


def test_a_host_that_dies_is_named_and_the_run_resumes(
    trio: TwoHosts, on_one: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    endless = trio.config(run_dir, rl={"num_updates": 10_000})
    text = trio.lose_one(endless)
    assert "process 0 of 2 " in text and "process 1 is at 'update" in text, text
    saved = sorted((run_dir / "checkpoints").iterdir())
    assert saved
    done = int(saved[-1].name.removeprefix("step-"))
    config = trio.config(run_dir, rl={"num_updates": done + 4})
    codes, texts = trio.finish(config, "--resume")
    assert codes == [0, 0], texts
    lines = stats(run_dir)
    assert [line["update"] for line in lines] == list(range(1, done + 5))
    shared = min(done, UPDATES)
    assert [line["reward_mean"] for line in lines[:shared]] == [
        line["reward_mean"] for line in stats(on_one)[:shared]
    ]


def test_a_rough_link_changes_no_number(trio: TwoHosts, on_one: Path, tmp_path: Path) -> None:
    """Check services whose replies come late, and of which some are cut."""
    served = trio.serve(translation=True, is_rough=True)
    codes, texts = trio.finish(trio.config(tmp_path / "run", reward=served["reward"]))
    assert codes == [0, 0], texts
    check_same(on_one, tmp_path / "run", UPDATES)
