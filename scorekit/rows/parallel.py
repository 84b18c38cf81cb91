"""Parallel text files as rows: a source, translations of one or more systems, a reference.

Line n of each file belongs to line n of the others. The rows are those of the first system, then
those of the next one: row k * n + i is line i of system k's file, for n lines a file. A row's `id`
is the line, its `system` the name of the file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from scorekit.errors import UserError
from scorekit.rows.read import TEXT, Row, RowFile


class ParallelFiles:
    """Rows of parallel text files, as RowFile has those of a table.

    blank: blank rows that were skipped since `rows` began, by system. A row is blank if its source,
    translation and reference are.
    """

    format = "parallel text"
    unit = "line"

    def __init__(
        self,
        src: Path,
        translations: Sequence[Path],
        ref: Path | None = None,
        *,
        encoding: str | None = None,
    ) -> None:
        """Raise UserError for a file that is there twice."""
        paths = [src, *translations, *([] if ref is None else [ref])]
        if sum(str(path) == "-" for path in paths) > 1:
            raise UserError("only one of the parallel files can be stdin")
        self.path = src
        self.paths = paths
        self._src = RowFile(src, "txt", encoding=encoding)
        self._ref = None if ref is None else RowFile(ref, "txt", encoding=encoding)
        self._systems = {
            name: RowFile(path, "txt", encoding=encoding)
            for name, path in zip(_names(translations), translations, strict=True)
        }
        self.blank_by_system: Counter[str] = Counter()
        self._num_lines = 0

    @property
    def blank(self) -> int:
        """Return the number of blank rows of all systems."""
        return self.blank_by_system.total()

    @property
    def systems(self) -> list[str]:
        """Return the names of the systems."""
        return list(self._systems)

    @property
    def encoding(self) -> str:
        """Return the encoding, or those of the files if one of them is not UTF-8."""
        encodings = [file.encoding for file in self._files()]
        return "utf-8" if set(encodings) == {"utf-8"} else ", ".join(encodings)

    def digest(self) -> str:
        """Return a digest of the names of the systems and the content of all files."""
        digest = hashlib.blake2b(digest_size=16)
        for name, file in self._by_role():
            digest.update(f"{name}\0{file.digest()}\0".encode())
        return digest.hexdigest()

    def rows(
        self, needed: Sequence[str], columns: Sequence[str] | None, *, with_bad: bool = False
    ) -> Iterator[Row]:
        """Yield the rows with `id`, `src`, `mt`, `ref` and `system`, without blank ones.

        needed, columns: not used, because these files have no columns.
        with_bad: as for RowFile.
        Raises UserError if the files have different numbers of lines."""
        self.blank_by_system = Counter()
        self._check_lengths()
        for index, (system, mt) in enumerate(self._systems.items()):
            files = {"src": self._src, "mt": mt} | ({"ref": self._ref} if self._ref else {})
            for texts in zip(*(file.lines() for file in files.values()), strict=True):
                row = self._row(
                    index * self._num_lines, system, dict(zip(files, texts, strict=True))
                )
                if row.problem and not with_bad:
                    raise UserError(f"{self.location(row.number)}: {row.problem}")
                if row.problem or any(row.fields[name].strip() for name in files):
                    yield row
                else:
                    self.blank_by_system[system] += 1

    def location(self, number: int) -> str:
        """Return the words for a row in a message."""
        index, line = divmod(number - 1, max(1, self._num_lines))
        return list(self._systems.values())[index].location(line + 1)

    def _row(self, before: int, system: str, texts: dict[str, Row]) -> Row:
        number = texts["src"].number
        for name, text in texts.items():
            if text.problem:
                return Row(before + number, {}, f"{name}: {text.problem}")
        fields = {name: text.fields[TEXT] for name, text in texts.items()}
        return Row(before + number, {"id": number, **fields, "system": system})

    def _check_lengths(self) -> None:
        counts = {file: sum(1 for _ in file.lines()) for file in self._files()}
        self._num_lines = counts[self._src]
        for file, count in counts.items():
            if count != self._num_lines:
                raise UserError(
                    f"{self._src.path} has {self._num_lines:,} lines, {file.path} {count:,}: "
                    "line n of one file belongs to line n of the other"
                )

    def _by_role(self) -> Iterator[tuple[str, RowFile]]:
        yield "src", self._src
        yield from ((f"mt {name}", file) for name, file in self._systems.items())
        if self._ref is not None:
            yield "ref", self._ref

    def _files(self) -> list[RowFile]:
        return [file for _, file in self._by_role()]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: without folder and ending, or with them if two would be equal.

    Raises UserError for a file that is named twice."""
    stems = [path.name.removesuffix(".gz") for path in paths]
    for names in (
        [Path(stem).stem for stem in stems],
        [path.name for path in paths],
        [str(path) for path in paths],
    ):
        if len(set(names)) == len(names):
            return names
    path = next(path for path in paths if paths.count(path) > 1)
    raise UserError(f"-t {path}: this file is named twice")
