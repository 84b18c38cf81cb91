"""`python -m bench.fuzz.probe PORT`: requests /health/live until stdin ends; prints JSON."""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

from scorekit.command import run_command

PAUSE_S = 0.05


def main() -> None:
    """Print the longest waits.

    oversleep: by how much the longest pause was too long; the machine causes it, not a service.
    """
    waits: list[float] = []
    failed = 0
    oversleep = 0.0
    while True:
        started = time.perf_counter()
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            break
        oversleep = max(oversleep, time.perf_counter() - started - PAUSE_S)
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
        try:
            connection.request("GET", "/health/live")
            failed += connection.getresponse().status != 200
        except (http.client.HTTPException, OSError):
            failed += 1
        finally:
            connection.close()
        waits.append(time.perf_counter() - started)
    waits.sort()
    summary = {
        "longest_s": waits[-1],
        "longest_ten_s": waits[-10:],
        "p99_s": waits[len(waits) * 99 // 100],
        "asked": len(waits),
        "failed": failed,
        "longest_oversleep_of_the_probe_s": oversleep,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    run_command(main)
