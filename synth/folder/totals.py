"""stats.json: what the stages of a run have done so far."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from scorekit.files import write_atomic
from synth.config import SynthConfig
from synth.context import Context
from synth.folder.distributions import distributions
from synth.folder.stats import funnel, process_figures, unreadable
from synth.folder.store import StageFolder, digest_of, to_line


def write_stats(ctx: Context, stage: str) -> dict[str, Any]:
    """Write this process's figures of a stage; then stats.json, from what stands in the stages'
    folders, and return it."""
    ctx.stats.flush(ctx.folder(stage), every_s=0.0)
    stages = {}
    for counts in funnel(ctx.out_dir):
        folder = ctx.folder(counts.stage)
        stages[counts.stage] = {
            "records_in": counts.records_in,
            "records_out": counts.records_out,
            "rejected": counts.rejected,
            "told": counts.told,
            "unreadable": unreadable(folder),
            "shards": counts.shards,
            "shards_done": counts.done,
            **process_figures(folder),
            "distributions": _cached_distributions(ctx.cfg, folder) if folder.done() else {},
        }
    stats = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "stages": stages}
    text = json.dumps(stats, ensure_ascii=False, indent=1) + "\n"
    write_atomic(ctx.out_dir / "stats.json", text.encode())
    return stats


def _cached_distributions(cfg: SynthConfig, folder: StageFolder) -> dict[str, Any]:
    """Read through a stage once, not after every later one."""
    digests = [(folder.mark(i) or {}).get("digest") for i in range(folder.shards() or 0)]
    digest = digest_of(digests)
    path = folder.path / "distributions.json"
    try:
        kept = json.loads(path.read_bytes())
        if kept["of"] == digest:
            return dict(kept["distributions"])
    except (FileNotFoundError, ValueError, KeyError):
        pass
    found = distributions(cfg, folder)
    write_atomic(path, to_line({"of": digest, "distributions": found}))
    return found
