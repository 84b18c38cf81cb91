"""Check that processes share the work of an update: equal gradients, and none without work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits import forked
from tests.kits.trainer.ranks.shared_gradients import CASES, CUTS, FEW_CASES, FEW_CUTS
from tests.kits.trainer.runs import write_examples

ROOT = Path(__file__).parents[4]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
#: Largest relative difference of a gradient, as a vector: sums in another order. float64's epsilon
#: is 2.2e-16, of which models of two layers lose less than 1e4; float32's is 6e-8.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}


def results(folder: Path, processes: int, *options: str) -> dict[str, Any]:
    result = forked.completed(
        "tests.kits.trainer.ranks.shared_gradients",
        str(folder / "out.pt"),
        *options,
        environment=ENVIRONMENT,
        ranks=processes,
    )
    assert result.returncode == 0, result.stderr
    written = torch.load(folder / "out.pt")
    assert written["processes"] == processes
    return dict(written["results"])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(
    scope="module", params=[1, "2, few", *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))]
)
def processes(
    request: pytest.FixtureRequest,
    one_process: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    if request.param == 1:
        return one_process
    folder = tmp_path_factory.mktemp("several")
    if request.param == "2, few":
        return results(folder, 2, "--few")
    return results(folder, request.param)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_any_cut_has_the_gradient_of_one_pass_of_one_process(
    one_process: dict[str, Any], processes: dict[str, Any], case: str, dtype: str
) -> None:
    """Compare texts with token advantages and a KL, and episodes with images, action masks and
    recomputed log-probabilities.

    float64 is compared with all rows in one pass. In float32 one pass itself differs by almost the
    tolerance from small ones, so that it is compared with one process that has the same setting."""
    prefix = f"{dtype}, {case}, "
    names = [name for name in processes if name.startswith(prefix)]
    of_some = sum(len(cuts) for (of_dtype, _), cuts in FEW_CUTS.items() if of_dtype == dtype)
    of_some *= case in FEW_CASES[dtype]
    assert len(names) in (len(CUTS), 2 * len(CUTS), of_some)  # with several processes, also sharded
    for name in names:
        cut = name.rsplit(", ", 1)[1]
        if dtype == "float32" and cut == "one pass" and processes is not one_process:
            continue
        base_cut = cut if dtype == "float32" else "one pass"
        expected, actual = one_process[f"{prefix}plain, {base_cut}"], processes[name]
        norm = expected["gradient"].norm()
        assert norm > 0.1
        difference = (actual["gradient"] - expected["gradient"]).norm() / norm
        assert difference <= TOLERANCES[dtype], (name, float(difference))
        near = {"rel": 10 * TOLERANCES[dtype], "abs": 10 * TOLERANCES[dtype]}
        assert actual["stats"] == pytest.approx(expected["stats"], **near), name
        for row, expected_row in zip(actual["logprobs"], expected["logprobs"], strict=True):
            assert row == pytest.approx(expected_row, **near), name


def test_processes_without_work_end_the_start(tmp_path: Path) -> None:
    """Start three processes for two prompts: one line before a model is loaded, and exit code 2."""
    train = write_examples(tmp_path / "train.jsonl", ["Open file 1.", "Open file 2."])
    settings = (
        f"data.train={train}",
        "policy.path=does/not/exist",
        "generation.num_samples_per_prompt=2",
        "rl.batch_size=2",
        "misc.device=cpu",
        f"misc.run_dir={tmp_path}/out",
    )
    arguments = [part for setting in settings for part in ("--set", setting)]
    config = ("--config", str(ROOT / "configs/translation/toy.yaml"))
    result = forked.completed(
        "trainer", "train", *config, *arguments, environment=ENVIRONMENT, ranks=3
    )
    assert result.returncode == 2
    line = (
        "3 processes, 2 prompts an update (rl.batch_size x rl.grad_accum): 1 has no work when "
        "sampling. Raise rl.batch_size to 3, or start 2 processes"
    )
    assert result.stderr.count("error: ") == 1
    assert f"error: {line}" in result.stderr
    assert not (tmp_path / "out").exists()

    check = forked.completed(
        "trainer", "check", *config, *arguments, "--processes", "3", environment=ENVIRONMENT
    )
    assert check.returncode == 2
    assert line in " ".join(check.stdout.replace("│", " ").split())
