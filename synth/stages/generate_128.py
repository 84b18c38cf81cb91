"""Generate many candidates of each selected source (128 in arXiv 2601.09012, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synth.config import SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.clients import Clients, teacher_settings
from synth.execution.stage import MapStage
from synth.reasons import Reason
from synth.record import KeptRecord, RejectedRecord, SourceFailed, teacher_seed
from synth.storage.store import Record


class Generate128(MapStage):
    """Samples `final_generation.num_candidates` translations.

    A record gains `candidates`: [{index, text, finish_reason}].
    """

    name = "generate_128"
    services = frozenset({"teacher"})
    shows_rejected = True

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the settings of the candidates. The strategy is excluded: both give the same
        ones."""
        return {
            **teacher_settings(cfg),
            "final_temperature": cfg.teacher.generation.final_temperature,
            "num_candidates": cfg.final_generation.num_candidates,
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of all candidates of the chosen sources."""
        sequences = run.chosen * run.cfg.final_generation.num_candidates
        return Cost(
            self.name,
            records=run.chosen,
            requests=run.chosen * run.parts,
            sequences=sequences,
            tokens_in=int(run.chosen * run.parts * run.prompt_tokens),
            tokens_out=int(sequences * run.target_tokens),
            disk_bytes=int(run.chosen * (run.scored_bytes + run.candidates_bytes)),
            driver_s=(0.001, 0.00006),
        )

    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Return all candidates; the next stage decides which of them compete."""
        try:
            candidates = await clients.translate(
                record,
                temperature=clients.cfg.teacher.generation.final_temperature,
                n=clients.cfg.final_generation.num_candidates,
                seed=teacher_seed(clients.seed, record["source_id"], "final"),
            )
        except SourceFailed as error:
            return RejectedRecord(record, error.code, str(error))
        same = len(candidates) > 1 and distinct_texts(candidates) == 1
        note = Reason.IDENTICAL_CANDIDATES if same else None
        return KeptRecord({**record, "candidates": candidates}, note)


def distinct_texts(candidates: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of different texts among candidates."""
    return len({candidate["text"] for candidate in candidates})
