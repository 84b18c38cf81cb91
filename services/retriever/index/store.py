"""An index's folder: what is in it, and how a state of it becomes the current one.

    index.json                    the manifest; to replace it makes another state the current one
    states/REVISION/              pages.jsonl, and a folder for each back end; never changed
    pictures/ab/SHA256.png        of all states; never changed, never taken away
    done/ab/KEY/PAGE.json         pages that were read, by a digest of their file and of how
    vectors/KEY/ab/SHA256.npy     vectors that were paid for, by what they depend on

A service that runs holds the state that it has begun with: whatever `ingest` does beside it, its
answers are of one state.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from scorekit.digest import digest_files
from scorekit.errors import UserError
from scorekit.files import put_folder, remove_temporaries, temporary_of, write_atomic
from services.retriever.index.reading import Places
from services.retriever.index.records import INDEX_SCHEMA, Manifest, PageRecord

_MANIFEST = "index.json"
_PAGES = "pages.jsonl"


class Index:
    """The folder of an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = Places(folder / "pictures", folder / "done", folder / "vectors")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For one process at a time. Raises UserError where another writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"--index {self.folder}: another ingest writes to it") from None
            self._clear()
            yield

    def manifest(self) -> Manifest | None:
        """Of the current state; None where there is none yet. Raises UserError."""
        path = self.folder / _MANIFEST
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError:
            manifest = None
        if manifest is None or manifest.schema_version != INDEX_SCHEMA:
            raise UserError(
                f"{path}: not an index as this version writes it ({INDEX_SCHEMA}): ingest anew, "
                "into another folder"
            )
        return manifest

    def state(self, revision: str) -> Path:
        """The folder of a state."""
        return self.folder / "states" / revision

    @contextmanager
    def new_state(self) -> Iterator[Path]:
        """A folder to write the back ends' files to; gone at the end, unless it was published."""
        states = self.folder / "states"
        states.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(states / "new")
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(self, temporary: Path, pages: Sequence[PageRecord], told: Manifest) -> Manifest:
        """Make what was written the current state; its manifest, with its revision."""
        lines = "".join(page.model_dump_json() + "\n" for page in pages)
        write_atomic(temporary / _PAGES, lines)
        manifest = told.model_copy(update={"revision": digest_of(temporary)})
        folder = self.state(manifest.revision)
        if not folder.exists() or digest_of(folder) != manifest.revision:
            put_folder(temporary, folder)
        write_atomic(self.folder / _MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        return manifest

    def open(self) -> tuple[Manifest, list[PageRecord], Path]:
        """The current state: manifest, pages in their order, folder. Raises UserError where there
        is none, and where its files are not what was written."""
        manifest = self.manifest()
        if manifest is None:
            raise UserError(
                f"--index {self.folder}: no index there; make one: python -m services.retriever "
                f"ingest SOURCES... --index {self.folder}"
            )
        folder = self.state(manifest.revision)
        damaged = UserError(f"{folder}: not what was written there: ingest again")
        try:
            if digest_of(folder) != manifest.revision:
                raise damaged
            lines = (folder / _PAGES).read_bytes().rstrip(b"\n").split(b"\n")
            pages = [PageRecord.model_validate_json(line) for line in lines]
        except (OSError, ValidationError):
            raise damaged from None
        return manifest, pages, folder

    def _clear(self) -> None:
        """Take away what a killed run has left, and states that are past. The current one may be
        being opened."""
        remove_temporaries(self.folder)
        for place in self.places:
            remove_temporaries(place, deep=True)
        manifest = self.manifest()
        states = self.folder / "states"
        for folder in states.iterdir() if states.exists() else ():
            if manifest is None or folder.name != manifest.revision:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(state: Path) -> str:
    """Over all files of a state and the folders they are in."""
    whole = hashlib.blake2b(digest_size=16)
    for folder in sorted([state, *(p for p in state.iterdir() if p.is_dir())]):
        name = "" if folder == state else folder.name
        files = [path for path in folder.iterdir() if path.is_file()]
        whole.update(f"{name}\0{digest_files(files)}\0".encode())
    return whole.hexdigest()
