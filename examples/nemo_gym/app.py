"""Entry point of the resources server: NeMo Gym starts it."""

from __future__ import annotations

from scorekit.adapters.nemo_gym.server import CompositeRewardServer
from scorekit.command import run_command


def main() -> None:
    """Serve until NeMo Gym ends the process."""
    CompositeRewardServer.run_webserver()


if __name__ == "__main__":
    run_command(main, stdout="log")
