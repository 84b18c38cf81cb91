"""Hold the table of what was tried on several processes against the tests that try it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/several-machines.md"
COLUMNS = ["DDP", "FSDP", "adapters", "4 bits", "resume", "two hosts"]
TRL_REFUSALS = (
    "tests/unit/trainer/runs/trl/test_processes.py::test_what_trl_cannot_share_is_refused"
)
REFUSAL = "tests/unit/trainer/runs/test_launch.py::test_what_cannot_be_shared_is_refused"
_WORLD = "tests/integration/trainer/rl/test_world.py::"
_ALIKE = "test_adapters_and_4_bits_learn_alike_however_they_are_shared"
_TRAINER = "tests/integration/trainer/"
#: Task -> for each column what the page says, and the tests that try or refuse it.
CELLS = {
    "translation": [
        ("yes", f"{_WORLD}test_several_processes_update_as_one"),
        ("yes", f"{_WORLD}test_any_number_of_prompts_can_be_shared"),
        ("yes, both", f"{_WORLD}test_adapters_learn_alike_whether_the_weights_are_shared"),
        (
            "DDP; with FSDP refused",
            f"{_WORLD}test_4_bits_learn_and_resume_in_two_processes",
            REFUSAL,
        ),
        (
            "yes",
            f"{_WORLD}test_all_processes_leave_after_the_same_update",
            f"{_TRAINER}runs/test_resume.py::test_processes_with_other_checkpoints_do_not_resume",
        ),
        (
            "yes",
            f"{_TRAINER}translation/test_two_hosts.py::"
            "test_two_hosts_learn_as_one_with_services_and_samplers_elsewhere",
        ),
    ],
    "search": [
        (
            "yes",
            f"{_TRAINER}search/training/test_processes.py::"
            "test_two_processes_play_the_questions_of_one_and_pay_once",
        ),
        (
            "yes",
            f"{_TRAINER}search/training/test_taught.py::test_two_processes_learn_from_crops",
        ),
        (
            "yes, both",
            f"{_TRAINER}search/training/test_taught.py::test_two_processes_learn_from_crops",
        ),
        (
            "DDP; with FSDP refused",
            f"{_TRAINER}search/training/test_processes.py::"
            "test_two_processes_learn_and_resume_in_4_bits",
            REFUSAL,
        ),
        (
            "yes",
            f"{_TRAINER}search/training/test_two_hosts.py::"
            "test_a_host_that_dies_is_named_and_the_run_resumes",
        ),
        (
            "yes",
            f"{_TRAINER}search/training/test_two_hosts.py::"
            "test_two_hosts_learn_as_one_with_services_elsewhere",
        ),
    ],
    "role-play": [
        (
            "yes",
            f"{_TRAINER}roleplay/test_processes.py::test_an_update_of_two_processes_is_that_of_one",
        ),
        ("yes", f"{_TRAINER}roleplay/test_processes.py::{_ALIKE}"),
        (
            "DDP; with FSDP refused",
            f"{_TRAINER}roleplay/test_processes.py::{_ALIKE}",
            TRL_REFUSALS,
        ),
        (
            "DDP; with FSDP refused",
            f"{_TRAINER}roleplay/test_processes.py::{_ALIKE}",
            TRL_REFUSALS,
        ),
        (
            "yes",
            f"{_TRAINER}roleplay/test_processes.py::"
            "test_an_outage_and_a_signal_end_both_and_the_run_resumes_as_if_not",
        ),
        (
            "yes",
            f"{_TRAINER}roleplay/test_two_hosts.py::"
            "test_two_hosts_share_a_run_with_a_folder_or_none",
        ),
    ],
    "SFT": [
        (
            "yes",
            f"{_TRAINER}sft/test_processes.py::test_an_update_of_two_processes_is_that_of_one",
        ),
        ("yes", f"{_TRAINER}sft/test_processes.py::{_ALIKE}"),
        ("yes, both", f"{_TRAINER}sft/test_processes.py::{_ALIKE}"),
        ("DDP; with FSDP refused", f"{_TRAINER}sft/test_processes.py::{_ALIKE}", TRL_REFUSALS),
        (
            "yes",
            f"{_TRAINER}sft/test_processes.py::"
            "test_a_run_of_two_processes_is_logged_and_resumed_as_one",
        ),
        (
            "yes",
            f"{_TRAINER}sft/test_two_hosts.py::test_two_hosts_learn_as_one_with_a_folder_or_none",
        ),
    ],
}


def rows_of_page():
    """Return the cells of the first table below the heading."""
    text = PAGE.read_text(encoding="utf-8").partition("### What was tried")[2]
    table = text[text.index("|") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_page_says_what_the_tests_try():
    titles, _, *rows = rows_of_page()
    assert titles == ["task", *COLUMNS]
    assert {task: cells for task, *cells in rows} == {
        task: [cell[0] for cell in cells] for task, cells in CELLS.items()
    }


@pytest.mark.parametrize("task", CELLS)
def test_each_cell_has_its_test(task):
    assert len(CELLS[task]) == len(COLUMNS)
    for cell, *tests in CELLS[task]:
        assert ("refused" in cell) == any("refuse" in test for test in tests)
        for test in tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names, test
