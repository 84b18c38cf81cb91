"""`python -m synth_parallel.cli`: the same command as `synth_parallel` and `python -m synth`."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from synth.__main__ import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
