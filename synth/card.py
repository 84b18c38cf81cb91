"""The dataset card of an export: what it holds, whose licence, and what became of every source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from scorekit.languages import language_name
from synth.config import SynthConfig, languages
from synth.reasons import explain
from synth.stats import StageCounts, funnel
from synth.store import StageFolder, read_json, write_atomic

if TYPE_CHECKING:
    from synth.context import Context

#: Keys that say where a run is, not what it makes.
_PLACES: dict[str, Any] = {
    "run": {"out_dir", "log_level", "shard_records", "answers", "prometheus_port"},
    "data": {"files"},
    "teacher": {
        "base_url", "api_key_env", "request_timeout_s", "connect_timeout_s", "wait_for_server_s",
        "max_concurrency", "max_sequences", "requests_per_minute", "retry",
    },
    "metricx": {"url", "batch_size", "device", "cache_db"},
    "filters": {"llm_judge": {"url"}},
}  # fmt: skip


def write_card(path: Path, ctx: Context, rows: Mapping[str, int]) -> None:
    """Write the card. rows: of "train", and of "pairs" where there are preference pairs."""
    counts = [c for c in funnel(ctx.out_dir, ctx.inputs) if c.stage != "export"]
    write_atomic(path, card(ctx.cfg, counts, rows, _corpus(ctx)).encode())


def card(
    cfg: SynthConfig, counts: list[StageCounts], rows: Mapping[str, int], corpus: Mapping[str, Any]
) -> str:
    """The text of the card; the same for the same config and counts.

    corpus: what sample_sources says of what it read.
    """
    tags = languages(cfg)
    names = [language_name(tag) for tag in tags]
    environment = Environment(
        loader=PackageLoader("synth", "."), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    settings = cfg.model_dump(mode="json", exclude=_PLACES)
    return environment.get_template("card.md").render(
        cfg=cfg,
        source=names[0],
        target=names[1],
        tags=tags,
        codes=[tag.split("-")[0] for tag in tags],
        suffix="parquet" if "parquet" in cfg.export.formats else "jsonl",
        rows=rows,
        corpus=corpus,
        size=_size_category(rows["train"]),
        stages=counts,
        reasons={code: explain(code) for code in sorted({c for s in counts for c in s.rejected})},
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
    )


def _corpus(ctx: Context) -> dict[str, Any]:
    for folder in (ctx.out_dir, ctx.inputs):
        path = StageFolder(folder, "sample_sources").path / "counts.json" if folder else None
        if path is not None and (counts := read_json(path)) is not None:
            return counts
    return {}


def _size_category(rows: int) -> str:
    """As the hub names sizes."""
    names = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M")
    return names[min(len(names) - 1, sum(rows >= 10**i for i in range(3, 7)))]
