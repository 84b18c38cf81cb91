"""Run the examples against the demo's services on real ports, and check their output."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from scorekit.server.fake import FakeBackend
from testing.processes import running_service as running_process
from testing.servers import running_service

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
_NUMBER = re.compile(r"-?\d+\.\d+")


def _read(path):
    return nbformat.read(path, as_version=4)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """Return an environment with a MetricX, an xCOMET and an embedder that require a key."""
    folder = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as running:
        patch.setenv("SCOREKIT_API_KEYS", "a-key-of-the-tests")
        patch.setenv("SCOREKIT_API_KEY", "a-key-of-the-tests")
        models = {"metricx": "metricx", "xcomet": "xcomet", "embedder": "encoder"}
        urls = {
            f"{name.upper()}_URL": running.enter_context(
                running_process(name, folder, "--model", str(ROOT / "demo/models" / model))
            )
            for name, model in models.items()
        }
        yield os.environ | urls | {"PYTHONPATH": str(ROOT)}


# -- notebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_as_it_ran_from_top_to_bottom(path):
    notebook = _read(path)
    nbformat.validate(notebook)
    cells = _code(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr"


def test_notebooks_are_small_and_hold_nothing_that_changes_with_each_run():
    assert NOTEBOOKS
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 300_000
    for notebook in map(_read, NOTEBOOKS):
        assert set(notebook.metadata) == {"kernelspec", "language_info"}
        assert set(notebook.metadata.language_info) == {"name"}
        assert not any(cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_imports_names_that_are_where_it_looks_for_them(path):
    tree = ast.parse("\n".join(cell.source for cell in _code(_read(path))))
    imports = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (ROOT / node.module.split(".")[0]).is_dir()
        for alias in node.names
    ]
    assert imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def _cell_outputs(notebook):
    """Return what each cell shows without numbers, then the numbers; an image counts as present."""
    kinds, numbers = [], []
    for cell in _code(notebook):
        for output in cell.outputs:
            data = output.get("data", {})
            text = output.get("text") or data.get("text/html") or data["text/plain"]
            kinds.append((sorted(data), " ".join(_NUMBER.sub("#", text).split())))
            numbers += map(float, _NUMBER.findall(text))
    return kinds, numbers


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_executes_and_shows_again_what_is_committed(path, services, tmp_path):
    committed, notebook = _read(path), _read(path)
    for cell in _code(notebook):
        cell.outputs = []
    resources = {"metadata": {"path": str(EXAMPLES)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    client.execute(env=services | {"IPYTHONDIR": str(tmp_path)})
    (kinds, numbers), (kinds_before, numbers_before) = (
        _cell_outputs(notebook),
        _cell_outputs(committed),
    )
    assert kinds == kinds_before
    assert numbers == pytest.approx(numbers_before, abs=0.05)
    assert any('<mark style="background:' in text for _, text in kinds)
    assert any("image/png" in data for data, _ in kinds)


def test_the_two_systems_are_told_apart_by_nothing_but_their_translations():
    lines = (EXAMPLES / "two_systems.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = (ROOT / "demo/data/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    for line, row in zip(map(json.loads, lines), map(json.loads, held_out), strict=False):
        assert set(line) == {"id", "src", "ref", "before", "after"}
        assert (line["id"], line["src"], line["ref"]) == (
            row["id"],
            row["src_text"],
            row["ref_text"],
        )


# -- TRL ------------------------------------------------------------------------------------------


def _train(*flags, env, script="trl_grpo.py"):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *flags],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )


@pytest.mark.slow
def test_trl_takes_two_steps_by_the_services_rewards(services, tmp_path):
    flags = ("--steps", "2", "--sources", "2", "--samples", "4", "--output", str(tmp_path))
    result = _train(*flags, env=services)
    assert result.returncode == 0, result.stderr
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    for step in state["log_history"][:2]:
        assert step["scored"] == 1 and step["grad_norm"] > 0
        assert -20 <= step["metricx_reward"] <= 5 and 0 < step["xcomet_score"] < 1
        total = step["metricx_reward"] + 10 * step["xcomet_score"]
        assert step["reward"] == pytest.approx(total, abs=1e-3)
    assert (tmp_path / "model.safetensors").is_file()


def _definition(folder, services):
    """Return the path of examples/reward.yaml with the URLs of the tests' services."""
    text = (EXAMPLES / "reward.yaml").read_text(encoding="utf-8")
    for url, name in (("http://127.0.0.1:8001", "METRICX"), ("http://127.0.0.1:8002", "XCOMET")):
        assert text.count(url) == 1
        text = text.replace(url, services[f"{name}_URL"])
    path = folder / "reward.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_trl_takes_two_steps_by_a_reward_definition(services, tmp_path):
    flags = ("--steps", "2", "--sources", "2", "--samples", "4", "--output", str(tmp_path))
    result = _train("--definition", _definition(tmp_path, services), *flags, env=services)
    assert result.returncode == 0, result.stderr
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    for step in state["log_history"][:2]:
        assert step["composite/coverage"] == 1 and step["grad_norm"] > 0
        metricx, xcomet, repetition = (
            step[f"composite/component/{name}"] for name in ("metricx", "xcomet", "repetition")
        )
        assert step["composite/gate_closed/copy"] == 0
        total = 5 - metricx + 10 * xcomet - 5 * repetition
        assert step["reward"] == pytest.approx(total, abs=1e-3)
    assert (tmp_path / "model.safetensors").is_file()


def test_a_service_that_does_not_fit_the_definition_is_told_before_weights_load(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with running_service(FakeBackend("xcomet")) as url:
        urls = {"METRICX_URL": url, "XCOMET_URL": url}
        flags = ("--policy", "/nowhere", "--definition", _definition(tmp_path, urls))
        result = _train(*flags, env=environment)
    assert result.returncode == 2
    assert result.stderr.startswith("error: components.metricx: higher values of `score` are")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_trl_takes_two_steps_with_token_advantages(services, tmp_path):
    flags = ("--steps", "2", "--sources", "2", "--samples", "4", "--output", str(tmp_path))
    result = _train(*flags, env=services, script="trl_token_grpo.py")
    assert result.returncode == 0, result.stderr
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    for step in state["log_history"][:2]:
        assert step["coverage"] == 1 and step["grad_norm"] > 0
        assert 0 < step["penalized_tokens"] <= 1
        assert -20 <= step["rewards/metricx/mean"] <= 5 and 0 < step["rewards/xcomet/mean"] < 1
        assert step["reward"] == pytest.approx(step["rewards/metricx/mean"], abs=1e-3)
    assert (tmp_path / "model.safetensors").is_file()


def test_a_completion_that_one_service_could_not_score_has_no_reward():
    script = runpy.run_path(str(EXAMPLES / "trl_grpo.py"))
    logged = {}
    reward = script["sum_of_rewards"](
        lambda *_, **__: [-1.0, None, -3.0], lambda *_, **__: [0.5, 0.25, None], 10.0
    )
    assert reward(["p"] * 3, ["c"] * 3, log_metric=logged.__setitem__) == [4.0, None, None]
    assert logged == {"metricx_reward": -2.0, "xcomet_score": 0.375, "scored": 1 / 3}


@pytest.mark.parametrize("script", ["trl_grpo.py", "trl_token_grpo.py"])
def test_the_wrong_service_is_told_before_weights_load(script):
    flags = ("--policy", "/nowhere", "--metricx-url")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with running_service(FakeBackend("xcomet")) as url:
        result = _train(*flags, url, env=environment, script=script)
    assert result.returncode == 2
    assert result.stderr == f"error: {url} is a xcomet service, not metricx\n"
