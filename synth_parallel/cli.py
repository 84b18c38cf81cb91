"""`python -m synth_parallel.cli`: the same command as `synth_parallel` and `python -m synth`."""

from __future__ import annotations

from synth.__main__ import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
