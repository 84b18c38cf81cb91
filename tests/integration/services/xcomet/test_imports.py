"""Check what a process that scores with xCOMET imports."""

from __future__ import annotations

import sys

from testing.checkpoints.xcomet import build_checkpoint
from tests.kits import forked
from tests.kits.comet.golden import GOLDEN

PAIRS = [{"src": "Das ist ein Haus.", "mt": "This is a house."}, {"src": "Ja", "mt": "Yes, no."}]


def test_scoring_needs_no_unbabel_comet(tmp_path):
    """Check that unbabel-comet, Lightning, entmax and pkg_resources are not imported.

    torch and transformers, which are needed, may have been loaded before.
    """
    folder = build_checkpoint(tmp_path, GOLDEN, PAIRS, seed=1, hidden=8, layers=1)
    code = (
        "import sys\n"
        "assert not any(name.startswith('services.xcomet') for name in sys.modules)\n"
        "for name in ('comet', 'pytorch_lightning', 'torchmetrics', 'entmax', 'pkg_resources'):\n"
        "    sys.modules[name] = None\n"
        "from testing.checkpoints.xcomet import loaded, score\n"
        "from pathlib import Path\n"
        "print(score(loaded(Path(sys.argv[1])), [{'src': 'a', 'mt': 'b'}])[0].score)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = forked.run(command, torch=True, capture_output=True, text=True, check=True)
    assert float(done.stdout)
