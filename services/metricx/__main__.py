"""`python -m services.metricx`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.metricx.model import MetricXBackend
    from services.metricx.settings import MetricXSettings


def make_backend(settings: MetricXSettings) -> MetricXBackend:
    """Return the backend that the settings describe. Its files are checked, but not loaded yet."""
    backend = MetricXBackend(
        settings.model,
        settings.tokenizer,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )
    backend.check()
    return backend


if __name__ == "__main__":
    with clean_exit():
        main(MetricXSettings, make_backend)
