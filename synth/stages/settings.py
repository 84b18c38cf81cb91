"""What the output of several stages depends on, for the digest that guards a resumed run."""

from __future__ import annotations

from typing import Any

from scorekit.prompts import load_template
from synth.config import SynthConfig, languages


def teacher_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Of every request to the teacher. URLs, time-outs and concurrency change no answer."""
    generation, revision = cfg.teacher.generation, cfg.teacher.revision
    source, target = languages(cfg)
    return {
        "teacher": cfg.teacher.model,
        **({} if revision is None else {"revision": revision}),
        "prompt": load_template(cfg.teacher.prompt),
        "languages": [source, target],
        **({"own": [own.name for own in cfg.data.languages]} if cfg.data.languages else {}),
        "seed": cfg.run.seed if generation.seed is None else generation.seed,
        "top_p": generation.top_p,
        "max_tokens": generation.max_tokens,
        "max_tokens_blob": generation.max_tokens_blob,
    }


def metricx_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Of every score."""
    return {"metricx": cfg.metricx.checkpoint}
