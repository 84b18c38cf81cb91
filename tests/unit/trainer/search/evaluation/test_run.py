"""Check when an evaluation of a search policy replaces an earlier one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from scorekit.errors import UserError
from trainer.search.evaluation import run


def test_an_earlier_evaluation_stays_where_the_policy_cannot_be_loaded(monkeypatch):
    @contextmanager
    def broken(candidate, world):
        raise UserError("policy.path: its weights cannot be read")
        yield

    started = []
    monkeypatch.setattr(run, "opened", broken)
    with pytest.raises(UserError, match="cannot be read"):
        run._reports(None, {}, started.append, None)
    assert started == []


def test_it_goes_when_the_policy_is_there(monkeypatch):
    @contextmanager
    def open_policy(candidate, world):
        yield "policy"

    started = []
    monkeypatch.setattr(run, "opened", open_policy)
    assert run._reports("candidate", {}, started.append, None) == {}
    assert started == ["candidate"]
