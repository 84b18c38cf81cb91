"""Many candidates of each selected source (128 in the paper: arXiv 2601.09012, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synth.config import SynthConfig
from synth.drive.clients import Clients
from synth.folder.store import Record
from synth.record import Kept, Rejected, SourceFailed, teacher_seed
from synth.stages.settings import teacher_settings


class Generate128:
    """`final_generation.num_candidates` sampled translations."""

    name = "generate_128"
    after = "select_sources"

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """The teacher."""
        return frozenset({"teacher"})

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the candidates depend on. The strategy is not among it: both name the same ones."""
        return {
            **teacher_settings(cfg),
            "final_temperature": cfg.teacher.generation.final_temperature,
            "num_candidates": cfg.final_generation.num_candidates,
        }

    async def process(self, record: Record, clients: Clients) -> Kept | Rejected:
        """All candidates as they came; the next stage says which of them compete."""
        try:
            candidates = await clients.translate(
                record,
                temperature=clients.cfg.teacher.generation.final_temperature,
                n=clients.cfg.final_generation.num_candidates,
                seed=teacher_seed(clients.seed, record["source_id"], "final"),
            )
        except SourceFailed as error:
            return Rejected(record, error.code, str(error))
        same = len(candidates) > 1 and distinct_texts(candidates) == 1
        return Kept({**record, "candidates": candidates}, "identical_candidates" if same else "")


def distinct_texts(candidates: Sequence[Mapping[str, Any]]) -> int:
    """How many different texts there are among candidates."""
    return len({candidate["text"] for candidate in candidates})
