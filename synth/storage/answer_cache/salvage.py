"""Read the intact rows of a damaged file of answers, page by page.

SQLite follows pointers between pages, so one bad page hides others, and a truncated file cannot be
opened at all. This module reads each page independently, and accepts a row if its value's checksum
is right (`contract.unpack`). The layout is described in https://www.sqlite.org/fileformat2.html,
sections 1.6, 2.1 and 4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Page size in bytes of our files (SQLite's default).
PAGE = 4096
_TABLE_LEAF = 0x0D
_MOST_LOCAL = PAGE - 35  # bytes of a row in its leaf; the rest is in overflow pages
_LEAST_LOCAL = (PAGE - 12) * 32 // 255 - 23
_WAL_HEADER, _FRAME_HEADER = 32, 24
_NULL, _KEY = 0, 44  # serial types: the id, which is stored outside the row, and 16 bytes


def rows(path: Path) -> Iterator[tuple[bytes, bytes] | None]:
    """Yield (key, value) of possible rows, damaged or not, and None for an unreadable row.

    Rows since the last checkpoint (NAME-wal) come first, and may be repeated.
    """
    with _Pages(path) as pages:
        for number in pages:
            page = pages.read(number)
            if len(page) == PAGE and page[0] == _TABLE_LEAF:
                for offset in _cells(page):
                    yield _row(page, offset, pages)


class _Pages:
    """The newest version of each page of a database, by number. Outdated log pages are ignored."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._count = -(-path.stat().st_size // PAGE)
        self._wal: BinaryIO | None = None
        self._newest: dict[int, int] = {}  # page -> its offset in the log
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
        """Return a page; shorter or empty if the file ends before."""
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
    """Return the offsets of a leaf's rows."""
    count = min(int.from_bytes(page[3:5], "big"), (PAGE - 8) // 2)
    offsets = (int.from_bytes(page[8 + 2 * i : 10 + 2 * i], "big") for i in range(count))
    return [offset for offset in offsets if 8 <= offset < PAGE]


def _row(page: bytes, offset: int, pages: _Pages) -> tuple[bytes, bytes] | None:
    size, offset = _varint(page, offset)
    _, offset = _varint(page, offset)  # its id
    payload = _payload(page, offset, size, pages)
    head, position = _varint(payload, 0)
    kinds = []
    while position < head <= len(payload):
        kind, position = _varint(payload, position)
        kinds.append(kind)
    if len(kinds) != 3 or kinds[:2] != [_NULL, _KEY] or kinds[2] < 12 or kinds[2] % 2:
        return None
    end = head + 16
    return payload[head:end], payload[end : end + (kinds[2] - 12) // 2]


def _payload(page: bytes, offset: int, size: int, pages: _Pages) -> bytes:
    """Return the bytes of a row, as many as exist."""
    if size <= _MOST_LOCAL:
        return page[offset : offset + size]
    local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % (PAGE - 4)
    local = local if local <= _MOST_LOCAL else _LEAST_LOCAL
    parts = [page[offset : offset + local]]
    following = page[offset + local : offset + local + 4]
    remaining = size - local
    while remaining > 0:
        overflow = pages.read(int.from_bytes(following, "big"))
        if len(overflow) < PAGE:
            break
        parts.append(overflow[4 : 4 + remaining])
        following, remaining = overflow[:4], remaining - (PAGE - 4)
    return b"".join(parts)


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Return a number of 1 to 9 bytes and its end; 0 if the content ends before."""
    value = 0
    for position in range(offset, min(offset + 8, len(content))):
        value = value << 7 | content[position] & 0x7F
        if content[position] < 0x80:
            return value, position + 1
    return 0, offset + 9
