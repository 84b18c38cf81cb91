"""Starts Ray Serve on this machine."""

from __future__ import annotations

import os
from typing import Any


def start_serve(**options: Any) -> None:
    """Start a local Ray with Serve, also on a busy machine.

    Ray gives its proxy 60 seconds to start and has no setting for that. A second start waits
    for the same proxy again.
    """
    import ray
    from ray import serve

    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # the processes of Ray inherit it
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    for attempts_left in (3, 2, 1, 0):
        try:
            serve.start(**options)
            return
        except TimeoutError:
            if not attempts_left:
                raise
