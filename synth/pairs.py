"""Several language pairs in one config.

Each pair is a separate run in its own folder; all share the answer cache. Their exports are
combined into one dataset."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import yaml
from rich.console import Console

from scorekit.errors import ScorekitError, UserError
from scorekit.files import replace_file, temporary_of, write_atomic
from scorekit.languages import language_name
from scorekit.locks import hold_locks
from synth.config import SynthConfig, languages, pair_configs
from synth.execution.stage import StageIncomplete
from synth.export.card import render, size_category
from synth.export.files import FOLDER
from synth.preflight import need_passing
from synth.run import RunOptions, run_folder, run_stages
from synth.storage.stats import count_stage
from synth.storage.store import StageFolder

log = structlog.get_logger()


class PairsUnfinished(StageIncomplete):
    """Raised if records of several pairs are left open."""

    def __init__(self, messages: Iterable[str]) -> None:
        ScorekitError.__init__(self, "; ".join(messages))


def run_pairs(cfg: SynthConfig, options: RunOptions) -> Path | None:
    """Run the stages of every pair, then combine their exports; return the dataset's folder.

    Returns None if a pair is not exported yet. An unfinished pair does not stop the others. Nothing
    starts, and nothing is cleared, before all pairs pass the preflight. Raises UserError."""
    console = Console(stderr=True, highlight=False, markup=False)
    need_passing(cfg, options, partial(console.print, soft_wrap=True))
    if cfg.data.pairs is None:
        run_stages(cfg, options)
        return None
    unfinished = {}
    for name, pair_cfg in pair_configs(cfg).items():
        try:
            run_stages(pair_cfg, options)
        except StageIncomplete as error:
            unfinished[name] = f"{name}: {error}"
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    if unfinished:
        raise PairsUnfinished(unfinished.values())
    return None if options.dry_run else write_dataset(cfg, options)


def write_dataset(cfg: SynthConfig, options: RunOptions) -> Path | None:
    """Write out_dir/export: one folder per pair with its export, and a card with all of them.

    Files are hard links if the file system supports them. Returns None if a pair is not exported
    yet."""
    folder = cfg.run.out_dir / FOLDER
    pairs = []
    lock = cfg.run.out_dir / ".locks" / "dataset.lock"
    # One process at a time, because it removes all files that are not its own.
    with hold_locks([(lock, False)], "write it", wait=log.info):
        for name, pair_cfg in pair_configs(cfg).items():
            pair_folder = run_folder(pair_cfg, options)
            stage = StageFolder(pair_folder, FOLDER)
            counts = count_stage(stage)
            if counts is None or not stage.done():
                return None
            _link(pair_folder / FOLDER, folder / name)
            source, target = languages(pair_cfg)
            pairs.append(
                {
                    "name": name,
                    "rows": counts.records_out,
                    "source": language_name(source),
                    "target": language_name(target),
                    "tags": (source, target),
                    "card": _front_matter(folder / name / "README.md"),
                }
            )
        write_atomic(folder / "README.md", dataset_card(pairs))
    return folder


def dataset_card(pairs: list[dict[str, Any]]) -> str:
    """Return the dataset's card, with the pairs' configurations prefixed by the pair's name."""
    cards = [pair["card"] for pair in pairs]
    first = next((card for card in cards if card["license"] == "other"), cards[0])
    configs, infos = [], []
    for pair in pairs:
        for config in pair["card"]["configs"]:
            files = _within(pair["name"], config["data_files"])
            configs.append({**_named(pair["name"], config), "data_files": files})
        infos += [_named(pair["name"], config) for config in pair["card"]["dataset_info"]]
    head = {
        **first,
        "pretty_name": f"Synthetic translations of {len(pairs)} language pairs",
        "language": list(dict.fromkeys(code for card in cards for code in card["language"])),
        "size_categories": [size_category(sum(pair["rows"] for pair in pairs))],
        "configs": configs,
        "dataset_info": infos,
    }
    return render(
        "dataset.md",
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        pairs=pairs,
        rows=sum(pair["rows"] for pair in pairs),
    )


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of a pair's card under the pair's name."""
    kind = config["config_name"]
    return {**config, "config_name": name if kind == "default" else f"{name}-{kind}"}


def _within(name: str, files: Any) -> Any:
    """Return a pair's `data_files` (a path, a list, or splits) relative to the dataset's folder."""
    if isinstance(files, str):
        return f"{name}/{files}"
    if isinstance(files, list):
        return [_within(name, entry) for entry in files]
    return {**files, "path": _within(name, files["path"])}


def _front_matter(path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8").split("---\n")[1])
    return metadata


def _link(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others."""
    paths = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in sorted(paths):
        destination = target / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(destination)
        try:
            os.link(source / path, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source / path, temporary)
        replace_file(temporary, destination)
    for path in target.rglob("*"):
        if path.is_file() and path.relative_to(target) not in paths:
            path.unlink()
