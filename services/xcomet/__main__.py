"""`python -m services.xcomet`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.server.http.run import main
    from services.xcomet.model import XCometBackend
    from services.xcomet.settings import XCometSettings

make_backend = XCometBackend.from_settings

if __name__ == "__main__":
    with clean_exit():
        main(XCometSettings, make_backend)
