"""`python -m services.xcomet`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.xcomet.model import XCometBackend
    from services.xcomet.settings import XCometSettings


def make_backend(settings: XCometSettings) -> XCometBackend:
    """Return the backend that the settings describe. Its files are checked, but not loaded yet."""
    backend = XCometBackend(
        settings.model,
        settings.encoder,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        implementation=settings.implementation,
    )
    backend.check()
    return backend


if __name__ == "__main__":
    with clean_exit():
        main(XCometSettings, make_backend)
