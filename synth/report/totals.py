"""Write stats.json: the stats of all stages of a run so far."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from scorekit.documents import parse_json
from scorekit.files import write_atomic
from synth.context import Stage, StageContext
from synth.stages.table import BY_NAME
from synth.storage.distributions import as_dicts
from synth.storage.stats import funnel, process_stats, shortfall, unreadable
from synth.storage.store import digest_of, to_line


def write_stats(ctx: StageContext, stage: str) -> dict[str, Any]:
    """Write this process's stats of a stage, then stats.json from the stages' folders; return
    it."""
    ctx.stats.flush(ctx.folder(stage), every_s=0.0)
    stages = {}
    for counts in funnel(BY_NAME, ctx.out_dir):
        folder = ctx.folder(counts.stage)
        stages[counts.stage] = {
            "records_in": counts.records_in,
            "records_out": counts.records_out,
            "rejected": counts.rejected,
            "told": counts.told,
            "unreadable": unreadable(folder),
            "shortfall": shortfall(folder),
            "shards": counts.shards,
            "shards_done": counts.done,
            **process_stats(folder),
            "distributions": _distributions(ctx, BY_NAME[counts.stage]) if folder.done() else {},
        }
    stats = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "stages": stages}
    text = json.dumps(stats, ensure_ascii=False, indent=1) + "\n"
    write_atomic(ctx.out_dir / "stats.json", text.encode())
    return stats


def _distributions(ctx: StageContext, stage: Stage) -> dict[str, Any]:
    """Return a stage's distributions; its records are read once, not after every later stage."""
    folder = ctx.folder(stage.name)
    digests = [(folder.mark(i) or {}).get("digest") for i in range(folder.shards() or 0)]
    digest = digest_of(digests)
    path = folder.path / "distributions.json"
    try:
        stored = parse_json(path.read_bytes())
        if stored["of"] == digest:
            return dict(stored["distributions"])
    except (FileNotFoundError, ValueError, KeyError):
        pass
    distributions = as_dicts(stage.distributions(ctx.cfg, folder.records()))
    write_atomic(path, to_line({"of": digest, "distributions": distributions}))
    return distributions
