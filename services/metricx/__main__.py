"""`python -m services.metricx`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.metricx.model import MetricXBackend
    from services.metricx.settings import MetricXSettings

make_backend = MetricXBackend.from_settings

if __name__ == "__main__":
    with clean_exit():
        main(MetricXSettings, make_backend)
