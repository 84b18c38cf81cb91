"""`python -m services.embedder`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.embedder.model import EmbedderBackend
    from services.embedder.settings import EmbedderSettings


def make_backend(settings: EmbedderSettings) -> EmbedderBackend:
    """Return the backend that the settings describe. Its files are checked, but not loaded yet."""
    backend = EmbedderBackend(
        settings.model,
        revision=settings.revision,
        pooling=settings.pooling,
        max_input_length=settings.max_input_length,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )
    backend.check()
    return backend


if __name__ == "__main__":
    with clean_exit():
        main(EmbedderSettings, make_backend)
