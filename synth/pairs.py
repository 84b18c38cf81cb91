"""Several language pairs in one config: each is a run of its own, in a folder of its own, and all
share the kept answers. What they export stands together as one dataset."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from scorekit.errors import ScorekitError, UserError
from scorekit.files import put, temporary_of, write_atomic
from scorekit.languages import language_name
from synth.config import SynthConfig, languages, pair_configs
from synth.context import Unfinished
from synth.export.card import size_category
from synth.folder.locks import held
from synth.folder.stats import count_stage
from synth.folder.store import StageFolder
from synth.preflight import need_passing
from synth.run import RunOptions, run_folder, run_stages
from synth.stages.export import FOLDER, Export

log = structlog.get_logger()


class PairsUnfinished(Unfinished):
    """Records of several pairs are left open."""

    def __init__(self, told: Iterable[str]) -> None:
        ScorekitError.__init__(self, "; ".join(told))


def run_pairs(cfg: SynthConfig, options: RunOptions) -> Path | None:
    """Run the stages of every pair, then put their exports together; the dataset's folder, where
    all are exported. A pair that is left unfinished stops no other. Nothing is begun, and nothing
    cleared, before what all of them need is there. Raises UserError."""
    console = Console(stderr=True, highlight=False, markup=False)
    need_passing(cfg, options, partial(console.print, soft_wrap=True))
    if cfg.data.pairs is None:
        run_stages(cfg, options)
        return None
    unfinished = {}
    for name, one in pair_configs(cfg).items():
        try:
            run_stages(one, options)
        except Unfinished as error:
            unfinished[name] = f"{name}: {error}"
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    if unfinished:
        raise PairsUnfinished(unfinished.values())
    return None if options.dry_run else write_dataset(cfg, options)


def write_dataset(cfg: SynthConfig, options: RunOptions) -> Path | None:
    """out_dir/export: a folder for each pair with the files of its export (by hard link where the
    file system can), and a card with a configuration of the hub for each. None where a pair is not
    exported yet."""
    # By one process at a time: what is none of its files goes, and another's would.
    with held([(cfg.run.out_dir / ".locks" / "dataset.lock", False)], "write it", wait=log.info):
        return _write_dataset(cfg, options)


def _write_dataset(cfg: SynthConfig, options: RunOptions) -> Path | None:
    folder = cfg.run.out_dir / FOLDER
    pairs = []
    for name, one in pair_configs(cfg).items():
        made = run_folder(one, options)
        stage = StageFolder(made, Export.name)
        counts = count_stage(stage)
        if counts is None or not stage.done():
            return None
        _link(made / FOLDER, folder / name)
        source, target = languages(one)
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
    write_atomic(folder / "README.md", dataset_card(pairs).encode())
    return folder


def dataset_card(pairs: list[dict[str, Any]]) -> str:
    """The card over those of the pairs: their configurations, with the pair's name before each."""
    cards = [pair["card"] for pair in pairs]
    first = next((card for card in cards if card["license"] == "other"), cards[0])
    configs, infos = [], []
    for pair in pairs:
        for one in pair["card"]["configs"]:
            files = _within(pair["name"], one["data_files"])
            configs.append({**_named(pair["name"], one), "data_files": files})
        infos += [_named(pair["name"], one) for one in pair["card"]["dataset_info"]]
    head = {
        **first,
        "pretty_name": f"Synthetic translations of {len(pairs)} language pairs",
        "language": list(dict.fromkeys(code for card in cards for code in card["language"])),
        "size_categories": [size_category(sum(pair["rows"] for pair in pairs))],
        "configs": configs,
        "dataset_info": infos,
    }
    environment = Environment(
        loader=PackageLoader("synth.export", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("dataset.md").render(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        pairs=pairs,
        rows=sum(pair["rows"] for pair in pairs),
    )


def _named(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """A configuration of a pair's card under the pair's name."""
    kind = one["config_name"]
    return {**one, "config_name": name if kind == "default" else f"{name}-{kind}"}


def _within(name: str, files: Any) -> Any:
    """`data_files` of a pair's card (a path, several, or splits with theirs), from a folder up."""
    if isinstance(files, str):
        return f"{name}/{files}"
    if isinstance(files, list):
        return [_within(name, one) for one in files]
    return {**files, "path": _within(name, files["path"])}


def _front_matter(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8").split("---\n")[1])
    return found


def _link(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others."""
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in sorted(wanted):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(place)
        try:
            os.link(source / path, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source / path, temporary)
        put(temporary, place)
    for path in target.rglob("*"):
        if path.is_file() and path.relative_to(target) not in wanted:
            path.unlink()
