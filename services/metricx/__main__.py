"""`scorekit serve metricx`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from typing import NoReturn

from scorekit.command import clean_exit, clean_imports

with clean_imports():  # a package that is not installed is named in one line
    from scorekit.server.run import main
    from services.metricx.model import MetricXBackend
    from services.metricx.settings import MetricXSettings

make_backend = MetricXBackend.from_settings


def run(args: list[str] | None = None, program: str | None = None) -> NoReturn:
    """Serve until a signal stops it.

    args, program: see `parse_settings`.
    """
    with clean_exit(stdout="log"):
        main(MetricXSettings, make_backend, args, program)


if __name__ == "__main__":
    run()
