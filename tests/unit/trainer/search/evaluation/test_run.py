"""An evaluation of a search policy: what becomes of an earlier one."""

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

    begun = []
    monkeypatch.setattr(run, "opened", broken)
    with pytest.raises(UserError, match="cannot be read"):
        run._reports(None, {}, begun.append, None)
    assert begun == []


def test_it_goes_when_the_policy_is_there(monkeypatch):
    @contextmanager
    def there(candidate, world):
        yield "policy"

    begun = []
    monkeypatch.setattr(run, "opened", there)
    assert run._reports("candidate", {}, begun.append, None) == {}
    assert begun == ["candidate"]
