"""`make verify-checkpoints`: score published pairs on the real MetricX-24-large and XCOMET-XL.

For a machine that reaches the hub (some 5 and 14 GB; XCOMET-XL's licence has to be accepted
there first, and `huggingface-cli login` done). Expected values: the tests of naist-nlp/mbrs (MIT),
computed in float32.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from scorekit.client import resolve_scorer
from scorekit.command import run_command
from scorekit.scorers import SampleForScoring, Scorer

TOLERANCE = 1e-4
SRC = "これはテストです"
LONG = "Producția de zahăr primă va fi exprimată în ceea ce privește zahărul alb;"
LONG_REF = "producţia de zahăr brut se exprimă în zahăr alb;"
#: (mt, ref or None, MetricX-24-hybrid-large-v2p6, XCOMET-XL); None: no published value.
PUBLISHED: tuple[tuple[str, str | None, float | None, float | None], ...] = (
    ("another test", None, 0.80446, 0.99120),
    ("this is a test", None, 0.24616, 0.99120),
    ("this is an test", None, 0.24536, 0.99120),
    ("another test", "another test", 0.23774, 1.00000),
    ("this is a test", "this is a fest", 5.31166, 0.90545),
    ("this is an test", "this is a test", 0.10797, 1.00000),
    ("this is a test", "ref", 1.88180, 0.97671),
    ("this is a test", "this is a test", 0.02979, 1.00000),
    ("this is a test", LONG_REF, 22.75496, 0.49054),
    ("another test", "this is a test", 1.20656, 0.99120),
    ("this is a fest", "ref", 7.01185, 0.71786),
    ("this is a fest", "this is a test", 7.85715, 0.71210),
    (LONG, "ref", 25.0, 0.21788),
    (LONG, LONG_REF, 6.35110, 0.61004),
)
SCORERS = {
    "metricx": (
        "services.metricx.model:MetricXQEScorer",
        {"metricx_model_name": "google/metricx-24-hybrid-large-v2p6"},
    ),
    "xcomet": ("services.xcomet.model:XCometXLScorer", {}),
}


def check(name: str, scorer: Scorer, console: Console) -> bool:
    """Print the table of one metric and return whether every score equals the published one."""
    column = 2 if name == "metricx" else 3
    rows = [row for row in PUBLISHED if row[column] is not None]
    output = scorer.score_batch([SampleForScoring(SRC, mt, ref) for mt, ref, *_ in rows])
    table = Table("mt", "ref", "published", "here", "", title=name)
    passed = True
    for row, score in zip(rows, output.sequence_scores, strict=True):
        good = score is not None and abs(score - row[column]) <= TOLERANCE  # type: ignore[operator]
        passed &= good
        local_score = "failed" if score is None else f"{score:.5f}"
        table.add_row(
            row[0][:30],
            (row[1] or "–")[:30],
            f"{row[column]:.5f}",
            local_score,
            "pass" if good else "FAIL",
        )
    console.print(table)
    return passed


def main() -> int:
    """Check all metrics, and return 0 if all scores agree, else 1.

    Raises UserError if a checkpoint is not available.
    """
    console = Console()
    passed = True
    for name, (target, arguments) in SCORERS.items():
        passed &= check(name, resolve_scorer(target, **arguments), console)
    console.print("pass" if passed else "FAIL", style="bold")
    return 0 if passed else 1


if __name__ == "__main__":
    run_command(main)
