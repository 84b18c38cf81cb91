"""Check the types of errors that a hub can raise."""

from __future__ import annotations

import importlib

from huggingface_hub.utils import get_session

from scorekit.hub import hub_errors


def test_errors_of_the_library_that_sends_the_hubs_requests_are_caught():
    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    for name in ("ConnectError", "ReadTimeout", "RemoteProtocolError", "ProxyError"):
        assert issubclass(getattr(library, name), hub_errors())
