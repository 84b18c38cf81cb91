"""Run all robustness tests (an hour; --quick: minutes), and print their results in one table.

python -m bench.chaos [--quick]
"""

from __future__ import annotations

from bench.chaos.endurance import questions
from bench.common import run

if __name__ == "__main__":
    run("chaos", __doc__, questions)
