"""The embedding server of the role-play tests on a host: `ngram_host ADDRESS PORT`."""

from __future__ import annotations

import sys

from tests.kits.trainer.roleplay import NgramServer

if __name__ == "__main__":
    server = NgramServer(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    server.serve_forever(0.05)
