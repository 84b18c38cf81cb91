"""A scorer of translations that takes texts of any length: `overlong: windows`.

It stands between the queue and a backend, and all it does not cut goes through as it is: a sample
that fits has the very number that it has with every other `overlong`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import ScoreOptions, TranslationSample
from scorekit.server.backend import Backend, Encoded, Outcome
from scorekit.server.description import Description
from scorekit.server.queue.batch import (
    cut_batches,
    default_batch_tokens,
    fault_kind,
    padded_tokens,
    release_device_memory,
)
from scorekit.server.scoring import Scoring
from scorekit.server.windows.parts import InWindows, WindowPlace, encoded_whole, whole_outcome
from scorekit.text.windows import Border, Part, common_borders, pack, refine, surround

#: A window's first border and its last, as indexes.
Window = tuple[int, int]


def with_windows(backend: Backend, max_batch_tokens: int | None) -> Backend:
    """The backend, able to score in windows if it scores translations. max_batch_tokens: padded
    tokens of a batch; None: the device's default."""
    verb = backend.verb
    if isinstance(verb, Scoring) and issubclass(verb.options_type, ScoreOptions):
        return Windowed(backend, max_batch_tokens)
    return backend


class Windowed:
    """A backend around another."""

    def __init__(self, backend: Backend, max_batch_tokens: int | None) -> None:
        self._inner = backend
        self._max_tokens = max_batch_tokens or 0
        self.service = backend.service
        self.verb = backend.verb
        self.probe = backend.probe
        self.memory_bytes = backend.memory_bytes
        self.workers = int(getattr(backend, "workers", 1))

    def load(self) -> Description:
        """Load the other."""
        told = self._inner.load()
        self._max_tokens = self._max_tokens or default_batch_tokens(told.device)
        return told

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        """As the other does; with `overlong: windows`, what does not fit in windows that do."""
        return [
            self._in_windows(sample, options) if one is None else one
            for sample, one in zip(samples, self.encode_uncut(samples, options), strict=True)
        ]

    def encode_uncut(
        self, samples: Sequence[Any], options: Any
    ) -> Sequence[Encoded | SampleError | None]:
        """As `encode`, but None in the place of what has to be cut: that takes seconds where a text
        is long."""
        if options.overlong != "windows":
            return self._inner.encode(samples, options)
        found = self._inner.encode(samples, _strict(options))
        return [None if _is_overlong(one) else one for one in found]

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """As the other does, on the windows of all; in several batches where they are too many."""
        if not any(isinstance(one.payload, InWindows) for one in batch):
            return self._inner.forward(batch)
        parts: list[Encoded] = []
        for one in batch:
            parts += one.payload.windows if isinstance(one.payload, InWindows) else [one]
        outcomes: dict[int, Outcome] = {}
        sizes = [(part.length, part.rows) for part in parts]
        for chosen in cut_batches(sizes, max(self._max_tokens, 1)):
            scored = self._forward([parts[k] for k in chosen])
            outcomes |= dict(zip(chosen, scored, strict=True))
        whole: list[Outcome] = []
        at = 0
        for one in batch:
            sample = one.payload if isinstance(one.payload, InWindows) else None
            stop = at + (len(sample.windows) if sample else 1)
            own = [outcomes[k] for k in range(at, stop)]
            whole.append(whole_outcome(sample, own) if sample else own[0])
            at = stop
        return whole

    def _forward(self, batch: list[Encoded]) -> list[Outcome]:
        """A batch that does not fit the memory is halved: the queue cannot halve a sample."""
        try:
            return self._inner.forward(batch)
        except Exception as error:
            if len(batch) == 1 or fault_kind(error) != "memory":
                raise
        release_device_memory()
        self._max_tokens = max(1, min(self._max_tokens, padded_tokens(batch) // 2))
        half = len(batch) // 2
        return self._forward(batch[:half]) + self._forward(batch[half:])

    def _in_windows(self, sample: TranslationSample, options: Any) -> Encoded | SampleError:
        cutter = _Cutter(self._inner, sample, options, _strict(options))
        try:
            return cutter.encoded()
        except SampleError as error:
            return error


def _strict(options: Any) -> Any:
    return options.model_copy(update={"overlong": "error"})


def _is_overlong(one: Encoded | SampleError) -> bool:
    return isinstance(one, SampleError) and one.type == "overlong"


class _Cutter:
    """Cuts one sample. A failure of a part other than its length is raised: it is the sample's."""

    def __init__(
        self, backend: Backend, sample: TranslationSample, options: Any, strict: Any
    ) -> None:
        self._backend = backend
        self._sample = sample
        self._options, self._strict = options, strict
        self._cutting = options.model_copy(update={"overlong": "truncate"})
        self._texts = [sample.src, sample.mt] + ([sample.ref] if sample.ref else [])

    def encoded(self) -> Encoded:
        """The sample in windows: parts that fit, joined up to the limit, and read with as many of
        the neighbours as fit besides."""
        nothing = tuple(0 for _ in self._texts)
        (around,) = self._sizes([(nothing, nothing)])  # what the model reads besides the texts
        borders, sizes = refine(self._texts, common_borders(self._texts), self._sizes)
        room = self._options.max_input_length - (around or 0)
        own = [room + 1 if size is None else size - (around or 0) for size in sizes]
        empties = [[not text.strip() for text in self._cut(part)] for part in pairwise(borders)]
        windows = list(pairwise(pack(own, empties, room)))
        return self._fitted(borders, windows, lambda one: surround(own, *one, room))

    def _fitted(
        self, borders: list[Border], windows: list[Window], around: Callable[[Window], Window]
    ) -> Encoded:
        """The sample of windows; around: what is read for one. Where that has more tokens than its
        parts have apart, and too many, half of the neighbours are; where a window alone has, it is
        cut in two."""
        done: dict[Window, tuple[Encoded, WindowPlace]] = {}
        todo = {window: around(window) for window in windows}
        while todo:
            parts = [(borders[first], borders[last]) for first, last in todo.values()]
            found = self._encode(parts, self._strict, None)
            again: dict[Window, Window] = {}
            for (window, read), part, one in zip(todo.items(), parts, found, strict=True):
                begin, end = window
                if isinstance(one, Encoded):
                    done[window] = one, self._place((borders[begin], borders[end]), part)
                elif read != window:
                    again[window] = begin - (begin - read[0]) // 2, end + (read[1] - end) // 2
                elif end - begin > 1:
                    middle = (begin + end) // 2
                    again |= {half: around(half) for half in ((begin, middle), (middle, end))}
                else:
                    (cut,) = self._encode([part], self._cutting, None)
                    assert isinstance(cut, Encoded)
                    done[window] = cut, self._place(part, part)
            todo = again
        encoded, places = zip(*(done[window] for window in sorted(done)), strict=True)
        return encoded_whole(self._sample, list(encoded), list(places))

    def _sizes(self, parts: list[Part]) -> list[int | None]:
        # A part without a reference is measured as with an empty one: its window may have more.
        found = self._encode(parts, self._strict, "")
        return [one.length if isinstance(one, Encoded) else None for one in found]

    def _encode(
        self, parts: list[Part], options: Any, no_ref: str | None
    ) -> list[Encoded | SampleError]:
        """no_ref: what the model is given where a part of the reference is empty."""
        samples = []
        for part in parts:
            texts = [text.strip() for text in self._cut(part)]
            # A sample without a reference has none in any window; one with an empty reference that
            # counts as a text (`empty_ref`) has it in all.
            ref = texts[2] or no_ref if len(texts) > 2 else self._sample.ref
            new = {"src": texts[0], "mt": texts[1], "ref": ref}
            samples.append(self._sample.model_copy(update=new))
        found = self._backend.encode(samples, options)
        for part, one in zip(parts, found, strict=True):
            if isinstance(one, SampleError) and one.type != "overlong":
                where = f"window src[{part[0][0]}:{part[1][0]}], mt[{part[0][1]}:{part[1][1]}]"
                raise SampleError(one.type, f"{where}: {one}", retryable=one.retryable)
        return found

    def _cut(self, part: Part) -> list[str]:
        return [text[a:b] for text, a, b in zip(self._texts, *part, strict=True)]

    def _place(self, part: Part, read: Part) -> WindowPlace:
        src, mt = self._cut(read)[:2]
        (src_start, mt_start), (src_end, mt_end) = part[0][:2], part[1][:2]
        return WindowPlace(
            (src_start, src_end),
            (mt_start, mt_end),
            read[0][0] + len(src) - len(src.lstrip()),
            read[0][1] + len(mt) - len(mt.lstrip()),
        )
