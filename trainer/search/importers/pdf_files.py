"""The PDFs of a dataset, in a folder or a zip file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from scorekit.errors import UserError
from trainer.search.importers.page_folder import PageFolder
from trainer.search.importers.published import document_name


class PdfFiles:
    """All PDFs of a folder, with its subfolders, or of a zip file. Only their names count.

    Raises UserError if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = _zip_names(path) if path.is_file() else _folder_names(path)
        if not self.names:
            raise UserError(f"{path}: no PDF there. Name their folder or zip file with --images")

    def __len__(self) -> int:
        return len(self.names)

    def write(self, pages: PageFolder) -> Iterator[None]:
        """Write all PDFs to a page folder, and yield after each."""
        with self._archive() as archive:
            for name in self.names:
                position = f"{self.path}: {name}"
                try:
                    document = document_name(PurePosixPath(name).name, position, "name")
                    with self._opened(archive, name) as file:
                        pages.add_pdf(document, file, position)
                except UserError as error:
                    pages.errors.append(str(error))
                except (OSError, RuntimeError, zipfile.BadZipFile, NotImplementedError) as error:
                    pages.errors.append(f"{position}: cannot be read: {error}")
                yield

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile | None]:
        if not self.path.is_file():
            yield None
            return
        with zipfile.ZipFile(self.path) as archive:
            yield archive

    def _opened(self, archive: zipfile.ZipFile | None, name: str) -> IO[bytes]:
        return (self.path / name).open("rb") if archive is None else archive.open(name)


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
            names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
            return sorted(filter(_is_pdf, names))
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a zip file that can be read: {error}") from None
