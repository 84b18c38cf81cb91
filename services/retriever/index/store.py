"""The folder of an index, and how a new state becomes the current one.

    index.json                    the manifest; replacing it switches the current state
    states/REVISION/              pages.jsonl, and a folder for each backend; never changed
    pictures/ab/SHA256.png        images of all states; never changed or removed
    done/ab/KEY/PAGE.json         pages that were read, by a digest of file and settings
    vectors/KEY/ab/SHA256.npy     cached vectors, by the settings that they depend on

A running service keeps the state that it started with, even while `ingest` runs: all its answers
come from one state.
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
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import INDEX_SCHEMA, Manifest, PageRecord

_MANIFEST = "index.json"
_PAGES = "pages.jsonl"


class Index:
    """The folder of an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = IndexPaths(folder / "pictures", folder / "done", folder / "vectors")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the writer's lock. Raises UserError if another process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"--index {self.folder}: another ingest writes to it") from None
            self._clear()
            yield

    def manifest(self) -> Manifest | None:
        """Return the manifest of the current state; None without a state. Raises UserError."""
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
                f"{path}: not the index format of this version ({INDEX_SCHEMA}). Ingest "
                "into another folder"
            )
        return manifest

    def own_folders(self) -> set[Path]:
        """Return the resolved paths of the folder and of what it holds: no documents of the user's.

        The folder alone is not enough: documents may be beside what it holds.
        """
        return {path.resolve() for path in (self.folder, self.folder / "states", *self.paths)}

    def state(self, revision: str) -> Path:
        """Return the folder of a state."""
        return self.folder / "states" / revision

    @contextmanager
    def new_state(self) -> Iterator[Path]:
        """Provide a folder for the backends' files. It is removed at the end unless published."""
        states = self.folder / "states"
        states.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(states / "new")
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(self, temporary: Path, pages: Sequence[PageRecord], draft: Manifest) -> Manifest:
        """Make the written files the current state; return its manifest with the revision."""
        lines = "".join(page.model_dump_json() + "\n" for page in pages)
        write_atomic(temporary / _PAGES, lines)
        manifest = draft.model_copy(update={"revision": digest_of(temporary)})
        folder = self.state(manifest.revision)
        if not folder.exists() or digest_of(folder) != manifest.revision:
            put_folder(temporary, folder)
        write_atomic(self.folder / _MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        return manifest

    def open(self) -> tuple[Manifest, list[PageRecord], Path]:
        """Return the current state: manifest, pages in order, folder.

        Raises UserError if there is none, or if its files are damaged."""
        manifest = self.manifest()
        if manifest is None:
            raise UserError(
                f"--index {self.folder}: no index there. Make one: scorekit ingest "
                f"SOURCES... --index {self.folder}"
            )
        folder = self.state(manifest.revision)
        damaged = UserError(f"{folder}: the files are damaged. Ingest again")
        try:
            if digest_of(folder) != manifest.revision:
                raise damaged
            lines = (folder / _PAGES).read_bytes().rstrip(b"\n").split(b"\n")
            pages = [PageRecord.model_validate_json(line) for line in lines]
        except (OSError, ValidationError):
            raise damaged from None
        return manifest, pages, folder

    def _clear(self) -> None:
        """Remove the remains of killed runs, and old states. The current state may be in use."""
        remove_temporaries(self.folder)
        for directory in self.paths:
            remove_temporaries(directory, deep=True)
        manifest = self.manifest()
        states = self.folder / "states"
        for folder in states.iterdir() if states.exists() else ():
            if manifest is None or folder.name != manifest.revision:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(state: Path) -> str:
    """Return a digest over all files of a state and the names of their folders."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in sorted([state, *(p for p in state.iterdir() if p.is_dir())]):
        name = "" if folder == state else folder.name
        files = [path for path in folder.iterdir() if path.is_file()]
        digest.update(f"{name}\0{digest_files(files)}\0".encode())
    return digest.hexdigest()
