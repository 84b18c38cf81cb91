"""Print a run's reward: YAML to paste, with a comment in words above it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
import yaml

from scorekit.net.addresses import without_userinfo


def print_reward(words: Iterable[str], data: dict[str, Any]) -> None:
    """Print lines of comment, and the data as YAML without the passwords of its URLs."""
    for line in words:
        typer.echo(f"# {without_userinfo(line)}")
    if data:
        text = yaml.safe_dump(without_userinfo(data), sort_keys=False, allow_unicode=True)
        typer.echo(text, nl=False)
