"""The datasets of one file of questions about PDFs."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath

from scorekit.errors import UserError
from trainer.search.importers.page_folder import PageFolder
from trainer.search.importers.published import (
    Importer,
    ImportOptions,
    chosen_splits,
    document_name,
)

#: A PDF of a zip file is larger than this, in bytes, only if it is not a bomb, see `_check_sizes`.
_MAX_PACKED_BYTES = 2**26
#: Most times that a large PDF, or all of them, may be larger than in the zip file. PDFs are packed
#: already: a zip file of them is hardly smaller.
_MAX_RATIO = 50
#: The only split: these datasets are benchmarks, and their files name none.
SPLIT = "test"


class PdfImporter(Importer):
    """Reads a file of questions, and all PDFs of a folder, with its subfolders, or of a zip file.

    Of the PDFs only their names count. Raises UserError if there is none.
    """

    def __init__(self, options: ImportOptions, file: Path, pdfs: Path) -> None:
        super().__init__(options)
        self.files = [file]
        self._path = pdfs
        self._names = _zip_names(pdfs) if pdfs.is_file() else _folder_names(pdfs)
        if not self._names:
            raise UserError(f"{pdfs}: no PDF there. Name their folder or zip file with --images")
        chosen_splits({SPLIT: self.files}, options)

    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write all PDFs."""
        is_zip = self._path.is_file()
        opened: AbstractContextManager[zipfile.ZipFile | None] = (
            zipfile.ZipFile(self._path) if is_zip else nullcontext()
        )
        with opened as archive:
            for name in self._names:
                position = f"{self._path}: {name}"
                try:
                    document = document_name(PurePosixPath(name).name, position, "name")
                    with archive.open(name) if archive else (self._path / name).open("rb") as file:
                        pages.add_pdf(document, file, position)
                except UserError as error:
                    pages.errors.append(str(error))
                except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                    pages.errors.append(f"{position}: cannot be read: {error}")
                step(1)

    def num_steps(self) -> int:
        """Return the number of PDFs."""
        return len(self._names)


def _is_pdf(name: str) -> bool:
    # macOS puts a file ._NAME.pdf of another kind beside each file.
    base = PurePosixPath(name).name
    return base.lower().endswith(".pdf") and not base.startswith(".")


def _folder_names(path: Path) -> list[str]:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder or zip file")
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted(name for file in files if _is_pdf(name := file.relative_to(path).as_posix()))


def _zip_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a zip file that can be read: {error}") from None
    pdfs = [entry for entry in entries if _is_pdf(entry.filename)]
    _check_sizes(path, pdfs)
    return sorted(entry.filename for entry in pdfs)


def _check_sizes(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Raise UserError if a PDF, or all of them, would take far more disk than the zip file.

    zipfile unpacks no more bytes than the sizes say, whatever the content is."""
    for entry in entries:
        if entry.file_size > max(_MAX_PACKED_BYTES, _MAX_RATIO * entry.compress_size):
            raise UserError(
                f"{path}: {entry.filename!r:.80} would have {entry.file_size:,} bytes, more than "
                f"{_MAX_RATIO} times as many as in the zip file. Unpack it yourself if you trust it"
            )
    total = sum(entry.file_size for entry in entries)
    if total > max(_MAX_PACKED_BYTES, _MAX_RATIO * path.stat().st_size):
        raise UserError(
            f"{path}: its PDFs would have {total:,} bytes, more than {_MAX_RATIO} times as many as "
            "the zip file. Unpack it yourself if you trust it"
        )
