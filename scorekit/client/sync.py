"""The client of every scoring service for code that is not async: scripts, notebooks, data frames.

with SyncScoringClient("http://127.0.0.1:8001") as client:
    results = client.score([{"src": "Hello.", "mt": "안녕하세요."}], progress=True)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.deduplication import Sample
from scorekit.client.tables import (
    as_sample_list,
    dataset_with_results,
    frame_with_results,
    samples_of_dataset,
    samples_of_frame,
    score_rows,
)
from scorekit.net.loops import ForkSafeClient
from scorekit.net.retry import INTERACTIVE_S
from scorekit.report.progress import progress_bar
from scorekit.schemas import Info, Result

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame


class SyncScoringClient(ForkSafeClient[ScoringClient]):
    """ScoringClient for code that is not async. The arguments are the same.

    first_answer_s: None: 10 s for a call with `progress`, too, because somebody watches it.
    A forked child creates its own connections, thread and cache.
    """

    def __init__(
        self, urls: str | Iterable[str], *, first_answer_s: float | None = None, **kwargs: Any
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        self._watched_s = INTERACTIVE_S if first_answer_s is None else first_answer_s
        kwargs["first_answer_s"] = first_answer_s
        super().__init__("client", lambda: ScoringClient(urls, **kwargs), ScoringClient.close)

    def info(self) -> Info:
        """See ScoringClient.info."""
        return self.run(lambda client: client.info())

    def limits(self) -> Info:
        """See ScoringClient.limits."""
        return self.run(lambda client: client.limits())

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """See ScoringClient.wait_ready."""
        self.run(lambda client: client.wait_ready(timeout_s))

    def score(
        self, samples: Iterable[Sample], *args: Any, progress: bool = False, **kwargs: Any
    ) -> list[Result]:
        """See ScoringClient.score. progress: show a bar with rate and remaining time."""
        samples = as_sample_list(samples)
        if not progress:
            return self.run(lambda client: client.score(samples, *args, **kwargs))

        async def score(client: ScoringClient) -> list[Result]:
            if samples:
                await client.limits(first_answer_s=self._watched_s)
            return await client.score(samples, *args, **kwargs)

        with progress_bar(len(samples)) as advance:
            kwargs["on_progress"] = advance
            return self.run(score)

    def score_frame(
        self, frame: DataFrame, *, task: str | None = None, prefix: str = "", **kwargs: Any
    ) -> DataFrame:
        """Return a copy of a pandas data frame with the results as columns.

        Columns: `score` (NaN if the row failed), `ok`, `error` (None if it did not fail) and, if a
        result has them, `error_spans`, `omissions`, `unplaced` and `windows`. prefix: put in front
        of these names.

        The frame has text columns `src` and `mt`, and may have `ref` (NaN, None or "": no
        reference). Other columns stay as they are. A row without a text (None, a number) fails with
        `invalid_input`; the others are scored. task: of a judge (mqm), which also needs the columns
        `src_lang` and `tgt_lang`. `kwargs` as for `score`.

        Raises UserError before any request: if a column is missing, if a column of results exists
        already, or if no row has its texts.
        """
        rows = samples_of_frame(frame, task, prefix)
        results = score_rows(rows, lambda samples: self.score(samples, **kwargs))
        return frame_with_results(frame, results, prefix)

    def score_dataset(
        self, dataset: Dataset, *, task: str | None = None, prefix: str = "", **kwargs: Any
    ) -> Dataset:
        """Return a datasets.Dataset with the results as columns, as `score_frame` does for a frame.

        A score that is missing is None."""
        rows = samples_of_dataset(dataset, task, prefix)
        results = score_rows(rows, lambda samples: self.score(samples, **kwargs))
        return dataset_with_results(dataset, results, prefix)
