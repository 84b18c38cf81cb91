"""`python -m services.embedder`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.embedder.model import EmbedderBackend
    from services.embedder.settings import EmbedderSettings

make_backend = EmbedderBackend.from_settings

if __name__ == "__main__":
    with clean_exit():
        main(EmbedderSettings, make_backend)
