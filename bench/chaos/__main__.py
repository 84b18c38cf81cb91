"""All proofs of strength (an hour; --quick: minutes), with their figures in one table.

python -m bench.chaos [--quick]
"""

from __future__ import annotations

from bench.chaos.endurance import questions
from bench.common import run

if __name__ == "__main__":
    run("chaos", __doc__, questions)
