"""What can still be read of a damaged file of answers: every page is looked at on its own.

SQLite finds a row from page to page, so that one bad page hides those behind it, and a file that
was cut off cannot be opened at all. Here no page leads to another: what looks like a row of ours
is taken where the checksum of its value says that it is one (`contract.unpack`). The layout is that
of https://www.sqlite.org/fileformat2.html, sections 1.6, 2.1 and 4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Bytes of a page of the files that we make (SQLite's own default).
PAGE = 4096
_TABLE_LEAF = 0x0D
_MOST_LOCAL = PAGE - 35  # bytes of a row in its leaf; the rest is in overflow pages
_LEAST_LOCAL = (PAGE - 12) * 32 // 255 - 23
_WAL_HEADER, _FRAME_HEADER = 32, 24
_NULL, _KEY = 0, 44  # serial types: the id, which stands beside the row, and 16 bytes


def rows(path: Path) -> Iterator[tuple[bytes, bytes] | None]:
    """(key, value) of all that may be a row, damaged or not, and None for a row that cannot be
    read. What was written since the last checkpoint (NAME-wal) is read first, and may come twice.
    """
    with _Pages(path) as pages:
        for number in pages:
            page = pages.read(number)
            if len(page) == PAGE and page[0] == _TABLE_LEAF:
                for at in _cells(page):
                    yield _row(page, at, pages)


class _Pages:
    """The pages of a database by number, the newest of each; pages of its log that it outgrew are
    not taken."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._count = -(-path.stat().st_size // PAGE)
        self._wal: BinaryIO | None = None
        self._newest: dict[int, int] = {}  # page -> where it begins in the log
        log = path.with_name(path.name + "-wal")
        if log.exists():
            self._wal = log.open("rb")
            self._read_log()

    def _read_log(self) -> None:
        assert self._wal is not None
        salt = self._wal.read(_WAL_HEADER)[16:24]
        while len(frame := self._wal.read(_FRAME_HEADER)) == _FRAME_HEADER:
            if frame[8:16] == salt:
                self._newest[int.from_bytes(frame[:4], "big")] = self._wal.tell()
            self._wal.seek(PAGE, os.SEEK_CUR)

    def __iter__(self) -> Iterator[int]:
        yield from sorted(self._newest)
        yield from (n for n in range(2, self._count + 1) if n not in self._newest)

    def read(self, number: int) -> bytes:
        """A page, shorter or empty where the file ends before."""
        if number in self._newest:
            assert self._wal is not None
            self._wal.seek(self._newest[number])
            return self._wal.read(PAGE)
        if number < 1:
            return b""
        self._file.seek((number - 1) * PAGE)
        return self._file.read(PAGE)

    def __enter__(self) -> _Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._wal is not None:
            self._wal.close()


def _cells(page: bytes) -> list[int]:
    """Where the rows of a leaf begin."""
    count = min(int.from_bytes(page[3:5], "big"), (PAGE - 8) // 2)
    places = (int.from_bytes(page[8 + 2 * i : 10 + 2 * i], "big") for i in range(count))
    return [at for at in places if 8 <= at < PAGE]


def _row(page: bytes, at: int, pages: _Pages) -> tuple[bytes, bytes] | None:
    size, at = _varint(page, at)
    _, at = _varint(page, at)  # its id
    payload = _payload(page, at, size, pages)
    head, place = _varint(payload, 0)
    kinds = []
    while place < head <= len(payload):
        kind, place = _varint(payload, place)
        kinds.append(kind)
    if len(kinds) != 3 or kinds[:2] != [_NULL, _KEY] or kinds[2] < 12 or kinds[2] % 2:
        return None
    end = head + 16
    return payload[head:end], payload[end : end + (kinds[2] - 12) // 2]


def _payload(page: bytes, at: int, size: int, pages: _Pages) -> bytes:
    """The bytes of a row, as many of them as are there."""
    if size <= _MOST_LOCAL:
        return page[at : at + size]
    local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % (PAGE - 4)
    local = local if local <= _MOST_LOCAL else _LEAST_LOCAL
    parts = [page[at : at + local]]
    following = page[at + local : at + local + 4]
    left = size - local
    while left > 0:
        more = pages.read(int.from_bytes(following, "big"))
        if len(more) < PAGE:
            break
        parts.append(more[4 : 4 + left])
        following, left = more[:4], left - (PAGE - 4)
    return b"".join(parts)


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of 1 to 9 bytes and where it ends; 0 where the content ends before."""
    value = 0
    for place in range(at, min(at + 8, len(content))):
        value = value << 7 | content[place] & 0x7F
        if content[place] < 0x80:
            return value, place + 1
    return 0, at + 9
