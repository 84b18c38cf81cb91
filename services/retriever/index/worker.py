"""The process of a `PageReader`: `python -m services.retriever.index.worker FD` reads files."""

from __future__ import annotations

import hashlib
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import PIL
import pypdfium2

from scorekit.files import write_atomic
from scorekit.images import UnreadableImage
from scorekit.retrieval.wire import TextBox
from services.retriever.index.annotations import in_reading_order, without_doubles
from services.retriever.index.images import ImageFile, png_of, sha256
from services.retriever.index.pdf import PdfError, PdfFile
from services.retriever.index.reader import IndexPaths, Ocr, ReadingRules, ocr_of
from services.retriever.index.records import FilePage, PageContent
from services.retriever.index.sources import Source

#: Limit of this process's address space in bytes.
_MEMORY = 4 * 2**30
#: Increase it when annotations and form fields of PDFs are read differently.
_ANNOTATIONS = "annotations 1"
#: A PDF with neither has no annotations; in an object stream they may be compressed. So pages of
#: other PDFs need not be read again.
_ANNOTATION_MARKS = (b"/Annots", b"/ObjStm")


class _Unwritable(Exception):
    """Raised with (errno, reason, path) if the index cannot be written, e.g. on a full disk."""


def serve(pipe: Connection) -> None:
    """Read the requested files until the pipe is closed."""
    rules, paths = pipe.recv()
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
            _read_file(pipe, source, first, rules, paths, ocr)
        except BrokenPipeError:  # the parent has gone
            return
        except _Unwritable as error:
            pipe.send(("unwritable", error.args))
        except (PdfError, UnreadableImage) as error:
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
    paths: IndexPaths,
    ocr: Ocr | None,
) -> None:
    content = source.path.read_bytes()
    if not content:
        raise UnreadableImage("an empty file")
    key = _key(content, rules, is_pdf=source.is_pdf)
    file = PdfFile(content) if source.is_pdf else ImageFile(content, source.page)
    try:
        pipe.send(("opened", (key, file.pages)))
        if file.note is not None:
            pipe.send(("note", file.note))
        for number in range(first, file.pages + 1):
            reason = None
            if not _is_done(paths, key, number):
                try:
                    page = file.read(number, rules.dpi, rules.max_pixels)
                    _save(page, paths, key, number, ocr)
                except (PdfError, UnreadableImage) as error:
                    if not source.is_pdf and file.pages == 1:
                        raise
                    reason = str(error)
            pipe.send(("page", (number, reason)))
    finally:
        file.close()


def _key(content: bytes, rules: ReadingRules, *, is_pdf: bool) -> str:
    """Return a digest of everything that the pages of a file depend on."""
    versions = [pypdfium2.PDFIUM_INFO.version, PIL.__version__]
    if is_pdf and any(mark in content for mark in _ANNOTATION_MARKS):
        versions.append(_ANNOTATIONS)
    content_key = "\0".join(map(str, (*rules, *versions, sha256(content))))
    return hashlib.sha256(content_key.encode()).hexdigest()[:32]


def _is_done(paths: IndexPaths, key: str, number: int) -> bool:
    """Return True if record and image of a page exist and are undamaged."""
    try:
        page = PageContent.model_validate_json(paths.record(key, number).read_bytes())
    except (OSError, ValueError):
        return False
    return _is_intact(paths, page.picture)


def _is_intact(paths: IndexPaths, name: str) -> bool:
    try:
        return sha256(paths.image_path(name).read_bytes()) == name
    except OSError:
        return False


def _save(page: FilePage, paths: IndexPaths, key: str, number: int, ocr: Ocr | None) -> None:
    image, boxes = page.image, page.boxes
    if not boxes and ocr is not None:
        try:
            boxes = [TextBox.model_validate(box, from_attributes=True) for box in ocr(image)]
        except Exception as error:  # the user's code can fail in any way
            raise PdfError(f"the function of --ocr failed ({type(error).__name__})") from error
        boxes = without_doubles(boxes, page.annotations)
    boxes = in_reading_order(boxes, page.annotations)
    png = png_of(image)
    name = sha256(png)
    if not _is_intact(paths, name):
        _write(paths.image_path(name), png)
    content = PageContent(width=image.width, height=image.height, picture=name, boxes=boxes)
    _write(paths.record(key, number), content.model_dump_json())


def _write(path: Path, content: bytes | str) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise _Unwritable(error.errno, error.strerror, str(path)) from error


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
