"""Check when an evaluation of a search policy replaces an earlier one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from scorekit.errors import UserError
from tests.kits.trainer.searching.pages import PagesHere
from trainer.rl.distributed import DistributedContext
from trainer.search.config import SearchConfig
from trainer.search.evaluation import run
from trainer.search.evaluation.run import SearchCandidate


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Evaluate a policy, which `load` opens, in a folder that has the file of an earlier call."""

    @contextmanager
    def services(*_, **__):
        pages = PagesHere()
        yield SimpleNamespace(retriever=pages, index=pages.info(), stream=None, answering=None)

    def evaluated(load):
        monkeypatch.setattr(run, "open_candidate", contextmanager(load))
        monkeypatch.setattr(run, "open_services", services)
        monkeypatch.setattr(run, "_write", lambda *_: None)
        cfg = SearchConfig.model_validate({"misc": {"run_dir": str(tmp_path)}})
        candidate = SearchCandidate("policy", cfg, tmp_path)
        return run._evaluate(cfg, [candidate], {}, None, DistributedContext(torch.device("cpu")))

    earlier = tmp_path / run.EPISODES / "earlier"
    earlier.mkdir(parents=True)
    return evaluated, earlier


def test_an_earlier_evaluation_stays_where_the_policy_cannot_be_loaded(evaluate):
    def broken(candidate, world):
        raise UserError("policy.path: its weights cannot be read")
        yield

    evaluated, earlier = evaluate
    with pytest.raises(UserError, match="cannot be read"):
        evaluated(broken)
    assert earlier.exists()


def test_it_goes_when_the_policy_is_there(evaluate):
    def loaded(candidate, world):
        yield "policy"

    evaluated, earlier = evaluate
    assert evaluated(loaded) == [{}]
    assert not earlier.exists()
