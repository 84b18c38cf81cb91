"""Check that the demo's xCOMET trains with our networks, and that its export is a valid
checkpoint."""

from __future__ import annotations

import random

import pytest
import torch

from demo.train import xcomet
from demo.train.examples import Example
from testing.checkpoints.xcomet import QE, REF, loaded, score
from tests.kits.comet.golden import DEMO


def _examples(count):
    """Return wrong translations with one tag and one score, which are easy to learn."""
    rng = random.Random(1)
    ids = lambda n: [rng.randrange(300, 3000) for _ in range(n)]  # noqa: E731
    return [
        Example(ids(9), ids(6), ids(7), score=20.0, tags=[2] * 6, fixes=[-1] * 6, kind="sample")
        for _ in range(count)
    ]


def train(folder, monkeypatch):
    """Run a few steps of both trainings.

    Returns the model, the loss of each step, and the weights that a gradient reached (in a step,
    dropout may leave out a layer)."""
    monkeypatch.setattr(xcomet, "TOKENIZER", DEMO / "encoder")
    torch.manual_seed(1)
    model, fix = xcomet.new_model().train(), torch.nn.Linear(256, 256)
    examples = _examples(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, reached = [], set()
    for step in range(8):
        loss = xcomet.qe_loss(model, fix, examples, ("src", "ref", "both")[step % 3], 0.0)
        if step == 0:
            loss = loss + xcomet.lm_loss(model, examples)
        optimizer.zero_grad()
        loss.backward()
        named = model.named_parameters()
        reached |= {n for n, w in named if w.grad is not None and w.grad.abs().sum()}
        optimizer.step()
        losses.append(float(loss.detach()))
    xcomet.export(model, folder)
    return model, losses, reached


@pytest.fixture
def trained(tmp_path, monkeypatch):
    return *train(tmp_path / "model", monkeypatch), tmp_path / "model"


def test_every_weight_learns_and_the_loss_falls(trained):
    model, losses, reached, _ = trained
    assert losses[-1] < 0.8 * losses[1]
    assert {name for name, _ in model.named_parameters()} == reached


def test_the_export_is_served(trained):
    model, _, _, folder = trained
    model.eval()
    results = score(loaded(folder), [*QE[:5], *REF[:5]])
    assert all(torch.isfinite(torch.tensor(r.score)) for r in results)
    # The heads and the mix are those of the model, except for bf16.
    stored = torch.load(folder / "checkpoints/model.ckpt", weights_only=True)["state_dict"]
    assert stored.keys() == {k for k, v in model.state_dict().items() if v.is_floating_point()}
