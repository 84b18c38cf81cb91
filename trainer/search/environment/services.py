"""Open the services that the search environments of one process share."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from trainer.search.config import SearchConfig
from trainer.search.records import Trajectory
from trainer.search.reward import RewardStream
from trainer.search.rollout.prompt import ActionForm
from trainer.search.rollout.tools import MAX_TOOL_CALLS, SearchTools, WatchedRetriever
from trainer.search.services import open_services
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

log = logging.getLogger(__name__)

#: Finished episodes that are written to disk together.
EPISODES_A_FILE = 64


@dataclass(frozen=True, slots=True)
class EnvironmentServices:
    """The services that environments share, in any number of threads and event loops.

    stream: computes the rewards.
    episodes: takes the finished episodes.
    """

    cfg: SearchConfig
    run: str
    retriever: WatchedRetriever
    tools: SearchTools
    threads: Executor
    stream: RewardStream
    episodes: EpisodeLog

    @property
    def index_revision(self) -> str:
        """Return the revision of the retriever's index."""
        return self.tools.index_revision()

    def raise_if_broken(self) -> None:
        """Raise an error that concerns all episodes: the index changed, or a user's mistake."""
        if self.retriever.error is not None:
            # Without the traceback of the last time, which would grow with each episode.
            raise self.retriever.error.with_traceback(None)


@dataclass(slots=True)
class EpisodeLog:
    """The finished episodes: their counts, and their records on disk. Threads may share it.

    The command `scorekit search view FOLDER` shows the folder above the store's.
    """

    store: TrajectoryStore
    _counts: Counter[str] = field(default_factory=Counter)
    _waiting: list[Trajectory] = field(default_factory=list)
    _files: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished episode, and write the last ones when they fill a file.

        Raises OSError if they cannot be written; then they are written with a later one.
        """
        assert trajectory.reward is not None
        with self._lock:
            self._counts[trajectory.reward.status] += 1
            self._waiting.append(trajectory)
            if len(self._waiting) >= EPISODES_A_FILE:
                self._write()

    @property
    def counts(self) -> dict[str, int]:
        """Return how many episodes ended with which status of their reward: ok, failed, late."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Write the episodes that are not written yet, and log the counts."""
        with self._lock:
            if self._waiting:
                self._write()
            total, scored = sum(self._counts.values()), self._counts["ok"]
            if total:
                log.info("%d episodes, %d with a reward: %s", total, scored, self.store.folder)

    def _write(self) -> None:
        number = self._files + 1
        episodes = [episode.model_copy(update={"step": number}) for episode in self._waiting]
        self.store.write_step(number, episodes)  # may fail, and is tried again with the next one
        self._files = number
        self._waiting.clear()


@contextmanager
def open_environment_services(
    cfg: SearchConfig, form: ActionForm = "tags"
) -> Iterator[EnvironmentServices]:
    """Open the services of a config for environments, and check that each answers as configured.

    Each call has a folder of its own in `misc.run_dir` for its episodes; all calls share the file
    of paid answers there. If the retriever, the generator or the judge fails, an episode ends
    without a reward, and others go on.
    form: how the policies write their actions.
    Raises UserError, ServiceUnreachable.
    """
    folder = Path(cfg.misc.run_dir)
    run = f"environment-{uuid4().hex[:12]}"
    stores: list[TrajectoryStore] = []
    with open_services(
        cfg, run=run, load_image=lambda sha256: stores[0].read_image(sha256)
    ) as opened:
        store = TrajectoryStore(folder / run / FOLDER, run)
        stores.append(store)
        retriever = WatchedRetriever(opened.retriever, lambda: False, tolerates_outage=True)
        threads = ThreadPoolExecutor(MAX_TOOL_CALLS, thread_name_prefix="tools")
        episodes = EpisodeLog(store)
        try:
            yield EnvironmentServices(
                cfg=cfg,
                run=run,
                retriever=retriever,
                tools=SearchTools(
                    retriever, cfg.episode, store.save_image, cfg.original_pixels, form
                ),
                threads=threads,
                stream=opened.stream,
                episodes=episodes,
            )
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            retriever.close()
            episodes.close()
