"""The process that reads files: `python -m services.retriever.index.worker FD`, for a `Reader`."""

from __future__ import annotations

import hashlib
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scorekit.files import write_atomic
from scorekit.retrieval.wire import TextBox
from services.retriever.index.pdf import PdfError, PdfFile
from services.retriever.index.pictures import UnreadablePicture, png_of, read_picture, sha256
from services.retriever.index.reading import Ocr, Places, ReadingRules, ocr_of
from services.retriever.index.records import PageContent
from services.retriever.index.sources import Source

#: Bytes of address space of this process.
_MEMORY = 4 * 2**30


class _Unwritable(Exception):
    """The index cannot be written (a full disk): number, reason, path. No fault of the file that
    is read."""


def serve(pipe: Connection) -> None:
    """Read the files that are asked for, until the pipe is closed."""
    rules, places = pipe.recv()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ocr = ocr_of(rules.ocr)
    pipe.send(("ready", None))
    while True:
        try:
            source, first = pipe.recv()
        except EOFError:
            return
        try:
            _read_file(pipe, source, first, rules, places, ocr)
        except BrokenPipeError:  # nobody waits any more
            return
        except _Unwritable as error:
            pipe.send(("unwritable", error.args))
        except (PdfError, UnreadablePicture) as error:
            pipe.send(("failed", str(error)))
        except OSError as error:
            pipe.send(("failed", error.strerror or type(error).__name__))
        except MemoryError:
            pipe.send(("failed", "it takes too much memory"))
        else:
            pipe.send(("end", None))


def _read_file(
    pipe: Connection,
    source: Source,
    first: int,
    rules: ReadingRules,
    places: Places,
    ocr: Ocr | None,
) -> None:
    content = source.path.read_bytes()
    key = _key(content, rules)
    if source.page is not None:
        pipe.send(("opened", (key, 1)))
        if not _is_done(places, key, 1):
            _keep(read_picture(content, rules.max_pixels), [], places, key, 1, ocr)
        pipe.send(("page", (1, None)))
        return
    pdf = PdfFile(content)
    try:
        pipe.send(("opened", (key, pdf.pages)))
        for number in range(first, pdf.pages + 1):
            fault = None
            if not _is_done(places, key, number):
                try:
                    picture, boxes = pdf.read(number, rules.dpi, rules.max_pixels)
                    _keep(picture, boxes, places, key, number, ocr)
                except PdfError as error:
                    fault = str(error)
            pipe.send(("page", (number, fault)))
    finally:
        pdf.close()


def _key(content: bytes, rules: ReadingRules) -> str:
    """A digest of all that the pages of a file depend on."""
    import PIL
    import pypdfium2

    versions = (pypdfium2.PDFIUM_INFO.version, PIL.__version__)
    told = "\0".join(map(str, (*rules, *versions, sha256(content))))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _is_done(places: Places, key: str, number: int) -> bool:
    """Whether record and picture of a page are there, and whole; else it is read again."""
    try:
        page = PageContent.model_validate_json(places.record(key, number).read_bytes())
    except (OSError, ValueError):
        return False
    return _is_whole(places, page.picture)


def _is_whole(places: Places, picture: str) -> bool:
    try:
        return sha256(places.picture(picture).read_bytes()) == picture
    except OSError:
        return False


def _keep(
    picture: Any, boxes: list[TextBox], places: Places, key: str, number: int, ocr: Ocr | None
) -> None:
    if not boxes and ocr is not None:
        try:
            boxes = [TextBox.model_validate(box, from_attributes=True) for box in ocr(picture)]
        except Exception as error:  # the user's own code
            raise PdfError(f"the function of --ocr failed ({type(error).__name__})") from error
    png = png_of(picture)
    name = sha256(png)
    if not _is_whole(places, name):
        _write(places.picture(name), png)
    page = PageContent(width=picture.width, height=picture.height, picture=name, boxes=boxes)
    _write(places.record(key, number), page.model_dump_json())


def _write(path: Path, content: bytes | str) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise _Unwritable(error.errno, error.strerror, str(path)) from error


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
