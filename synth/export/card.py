"""The dataset card of an export: content, license, and what happened to the sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from scorekit.languages import language_name
from synth.config import SynthConfig, languages
from synth.export.files import PAIRS, TRAIN
from synth.export.manifest import row_counts, settings
from synth.export.rows import arrow_schema, pair_schema
from synth.reasons import explain
from synth.storage.stats import StageCounts

#: The hub's size categories: (upper bound of rows, name).
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)


def card(
    cfg: SynthConfig,
    counts: list[StageCounts],
    files: list[dict[str, Any]],
    read: Mapping[str, Any],
) -> str:
    """Return the text of the card; equal for equal config and counts.

    counts: of the stages before the export.
    files: from `write_files`.
    read: the first stage's summary of the corpus.
    """
    tags = languages(cfg)
    names = [language_name(tag) for tag in tags]
    rows = row_counts(files)
    head = _head(cfg, names, files)
    return render(
        "card.md",
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=1000),
        cfg=cfg,
        source=names[0],
        target=names[1],
        tags=tags,
        patterns={name: _pattern(cfg, files, name) for name in rows},
        rows=rows,
        corpus=read,
        stages=counts,
        reasons={
            code: explain(code)
            for code in sorted({c for s in counts for c in (*s.rejected, *s.told)})
        },
        settings=yaml.safe_dump(settings(cfg), sort_keys=False, allow_unicode=True),
    )


def render(template: str, **fields: Any) -> str:
    """Return a Markdown template of this folder with the fields filled in."""
    environment = Environment(
        loader=PackageLoader("synth.export", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**fields)


def _head(cfg: SynthConfig, names: list[str], files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata that the hub reads."""
    rows = row_counts(files)
    configs = {TRAIN: "default", PAIRS: "preference_pairs"}
    licence = {"license": "odc-by"}
    if cfg.data.files:
        licence = {"license": "other", "license_name": "of-the-source-files"}
    source = {} if cfg.data.files else {"source_datasets": [cfg.data.madlad_dataset]}
    return {
        "pretty_name": f"Synthetic translations from {names[0]} into {names[1]}",
        **licence,
        "language": list(dict.fromkeys(tag.split("-")[0] for tag in languages(cfg))),
        "task_categories": ["translation"],
        "multilinguality": ["translation"],
        "annotations_creators": ["machine-generated"],
        "language_creators": ["found", "machine-generated"],
        **source,
        "size_categories": [size_category(rows[TRAIN])],
        "tags": ["synthetic", "machine-translation", "parallel-corpus"],
        "configs": [
            {
                "config_name": config,
                "data_files": [{"split": "train", "path": _pattern(cfg, files, name)}],
            }
            for name, config in configs.items()
            if name in rows
        ],
        "dataset_info": [
            _info(cfg, files, name, config) for name, config in configs.items() if name in rows
        ],
    }


def size_category(rows: int) -> str:
    """Return the hub's size category."""
    return next((name for limit, name in _SIZES if rows < limit), "n>1T")


def _info(cfg: SynthConfig, files: list[dict[str, Any]], name: str, config: str) -> dict[str, Any]:
    """Return features and sizes of a configuration, as `datasets` writes them."""
    from datasets import DatasetInfo, Features, SplitDict, SplitInfo

    features = Features.from_arrow_schema(arrow_schema() if name == TRAIN else pair_schema())
    info = DatasetInfo(features=features)
    if "parquet" in cfg.export.formats:
        loaded = _data_files(cfg, files, name)
        memory = sum(file["memory"] for file in loaded)
        split = SplitInfo("train", num_bytes=memory, num_examples=row_counts(files)[name])
        info.splits = SplitDict({"train": split})
        info.download_size, info.dataset_size = sum(file["bytes"] for file in loaded), memory
    return {"config_name": config, **info._to_yaml_dict()}


def _data_files(cfg: SynthConfig, files: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the files that `load_dataset` reads: Parquet if there is any."""
    kind = ".parquet" if "parquet" in cfg.export.formats else ".jsonl"
    return [file for file in files if file["of"] == name and kind in file["name"]]


def _pattern(cfg: SynthConfig, files: list[dict[str, Any]], name: str) -> str:
    """Return one pattern that matches these files."""
    matches = _data_files(cfg, files, name)
    first: str = matches[0]["name"]
    return first if len(matches) == 1 else f"{name}-*.{first.partition('.')[2]}"
