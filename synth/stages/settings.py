"""Settings that the output of several stages depends on, for the digest of a resumed run."""

from __future__ import annotations

from typing import Any

from scorekit.prompts import load_template
from synth.config import SynthConfig, languages


def teacher_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Return the settings of teacher requests. URLs, timeouts and concurrency do not matter."""
    generation, revision = cfg.teacher.generation, cfg.teacher.revision
    source, target = languages(cfg)
    return {
        "teacher": cfg.teacher.model,
        **({} if revision is None else {"revision": revision}),
        "prompt": load_template(cfg.teacher.prompt),
        "languages": [source, target],
        **({"own": [custom.name for custom in cfg.data.languages]} if cfg.data.languages else {}),
        "seed": cfg.run.seed if generation.seed is None else generation.seed,
        "top_p": generation.top_p,
        "max_tokens": generation.max_tokens,
        "max_tokens_blob": generation.max_tokens_blob,
    }


def metricx_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Return the settings of scores."""
    return {"metricx": cfg.metricx.checkpoint}
