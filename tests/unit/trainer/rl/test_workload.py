"""Check how many processes an update has work for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from trainer.rl.config import RLConfig
from trainer.rl.workload import Workload


def translation(samples: int = 4, **rl: Any) -> Workload:
    key = "generation.num_samples_per_prompt"
    return Workload(RLConfig(**rl), (samples, samples), key)


def search(*samples: int, **rl: Any) -> Workload:
    return Workload(
        RLConfig(**rl),
        (min(samples), max(samples)),
        "rollout.n_agent",
        unit="episodes",
        shares_sequences=True,
        drops_sequences=True,
    )


#: The published set-up: B, N; minibatches of 8.
PUBLISHED = [(32, 4), (16, 8), (8, 16), (32, 16)]


@pytest.mark.parametrize(("prompts", "samples"), PUBLISHED)
def test_the_published_sizes_have_work_for_eight(prompts: int, samples: int) -> None:
    workload = search(samples, batch_size=prompts, minibatch_size=8)
    assert (workload.max_sampling, workload.max_learning) == (prompts * samples, 8)
    assert (
        workload.check(8)
        == workload.check(1)
        == (
            f"one update: {prompts * samples} episodes, minibatches of 8 episodes: up to "
            "8 processes can have work"
        )
    )
    with pytest.raises(UserError) as error:
        workload.check(64)
    assert str(error.value) == (
        "64 processes, 8 episodes a minibatch (rl.minibatch_size): 56 have no work when learning. "
        "Raise rl.minibatch_size to 64 or more, or start 8 processes"
    )


@pytest.mark.parametrize(
    ("workload", "processes", "message"),
    [
        (
            translation(batch_size=3, grad_accum=2),
            7,
            "7 processes, 6 prompts an update (rl.batch_size x rl.grad_accum): 1 has no work when "
            "sampling. Raise rl.batch_size to 4, or start 6 processes",
        ),
        (
            translation(batch_size=8, minibatches=10),
            5,
            "5 processes, 4 sequences a minibatch (rl.minibatches): 1 has no work when learning. "
            "Lower rl.minibatches to 7, or start 4 processes",
        ),
        (
            translation(batch_size=3, minibatch_size=8),
            7,
            "7 processes, 3 prompts an update (rl.batch_size x rl.grad_accum): 4 have no work when "
            "sampling; 6 sequences a minibatch (rl.minibatch_size): 1 has no work when learning. "
            "Raise rl.batch_size to 7, or start 3 processes",
        ),
        (
            search(4, batch_size=2, minibatch_size=4),
            16,
            "16 processes, 8 episodes an update (rl.batch_size x rl.grad_accum x rollout.n_agent): "
            "8 have no work when sampling; 4 episodes a minibatch (rl.minibatch_size): 12 have no "
            "work when learning. Raise rl.batch_size to 4 and raise rl.minibatch_size to 16 or "
            "more, or start 4 processes",
        ),
        (
            search(1, batch_size=1, minibatch_size=8),
            2,
            "2 processes, 1 episode an update (rl.batch_size x rl.grad_accum x rollout.n_agent): "
            "1 has no work when sampling; 1 episode a minibatch (rl.minibatch_size): 1 has no "
            "work when learning. Raise rl.batch_size to 2, or start 1 process",
        ),
        (
            translation(1, batch_size=4, algorithm="reinforce", minibatches=4),
            5,
            "5 processes, 4 prompts an update (rl.batch_size x rl.grad_accum): 1 has no work when "
            "sampling; 4 sequences a minibatch (rl.algorithm reinforce: one a batch): 1 has no "
            "work when learning. Raise rl.batch_size to 5, or start 4 processes",
        ),
    ],
)
def test_processes_without_work_are_refused(
    workload: Workload, processes: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        workload.check(processes)
    assert str(error.value) == message
    assert workload.check(processes - 1) if workload.max_processes == processes - 1 else True


def test_groups_of_several_sizes_are_refused_by_the_largest() -> None:
    """Check that what may have work in some update is not refused."""
    workload = search(2, 6, batch_size=4, minibatch_size=100)
    assert workload.check(24) == (
        "one update: 8 to 24 episodes, minibatches of 24 episodes: up to 24 processes can have work"
    )
    with pytest.raises(UserError, match=r"24 episodes an update .*: 1 has no work"):
        workload.check(25)


SIZES = st.integers(1, 30)


@given(SIZES, SIZES, st.none() | SIZES, SIZES, st.booleans(), st.booleans())
def test_the_largest_step_is_that_of_an_update(
    prompts: int, samples: int, size: int | None, minibatches: int, drops: bool, one_step: bool
) -> None:
    """Compare with the steps of every number of sequences that an update may have."""
    algorithm = "reinforce" if one_step else "ppo"
    rl = RLConfig(
        batch_size=prompts, minibatch_size=size, minibatches=minibatches, algorithm=algorithm
    )
    workload = replace(translation(samples, batch_size=1), rl=rl, drops_sequences=drops)
    sequences = prompts * samples
    numbers = range(1 if drops else sequences, sequences + 1)
    steps = [len(range(0, number, rl.num_steps(number))) for number in numbers]
    assert workload.max_learning == max(steps)


@given(SIZES, SIZES, st.none() | SIZES, SIZES, st.integers(2, 40), st.booleans(), st.integers(1, 3))
def test_the_repair_gives_every_process_work(
    prompts: int,
    samples: int,
    size: int | None,
    minibatches: int,
    processes: int,
    is_search: bool,
    grad_accum: int,
) -> None:
    rl = {"batch_size": prompts, "minibatch_size": size, "minibatches": minibatches}
    workload = (search if is_search else translation)(samples, **rl, grad_accum=grad_accum)
    if processes <= workload.max_processes:
        assert workload.check(processes)
        return
    with pytest.raises(UserError) as error:
        workload.check(processes)
    words = str(error.value).split(". ")[1].replace(",", "").split()
    changes = {words[i][3:]: int(words[i + 2]) for i, w in enumerate(words) if w[:3] == "rl."}
    repaired = replace(workload, rl=workload.rl.model_copy(update=changes))
    assert repaired.check(processes)
    assert int(words[-2]) == workload.max_processes
    if workload.max_processes:
        assert workload.check(workload.max_processes)
