"""The command `trainer roleplay calibrate`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from trainer.roleplay.calibration.anchors import USES
from trainer.roleplay.calibration.fit import fit
from trainer.roleplay.calibration.page import rows_of, write_page
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.data import load_turns
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import reach
from trainer.roleplay.training.launcher import embedder_of


def calibrate(cfg: RewardConfig, source: str, data: RoleplayData, out: Path, seed: int) -> None:
    """Fit a calibration, write the file and its page (.html), and print the table.

    For a folder of weights a server is started; its log is next to the file. Raises UserError.
    """
    turns = load_turns(source, data)
    running_server = embedder_of(cfg, out.with_suffix(".embedder.log"))
    with running_server as server, closing(reach(cfg, server)) as embedder:
        try:
            calibration = fit(embedder, turns, rows=cfg.calibration_rows, seed=seed)
        except (ServiceUnreachable, RequestError, SampleError) as error:
            raise UserError(f"--embedding-model: {error}") from None
    calibration.write(out)
    page = out.with_suffix(".html")
    num_sampled = min(cfg.calibration_rows, len(turns))
    write_page(page, calibration, f"{num_sampled:,} of {len(turns):,} turns of {source}")
    table = Table("", "scores 0 at", "scores 1 at", "true / shuffled pairs", "separation")
    for use in USES:
        table.add_row(*rows_of(use, calibration.anchors(use)))
    console = Console()
    console.print(table)
    console.print(f"written: {out}, {page}", highlight=False, soft_wrap=True)
