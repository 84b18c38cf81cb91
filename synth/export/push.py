"""Upload a finished run's export to the Hugging Face hub in one commit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token

from scorekit.errors import UserError
from scorekit.hub import hub_errors
from synth.config import SynthConfig, pair_configs
from synth.export.files import FOLDER, changed_files
from synth.storage.store import StageFolder, read_json

#: Patterns of files from an earlier export, which are deleted from the repository.
_DATA = ("train.*", "train-*", "pairs.*", "pairs-*", "manifest.json", "README.md")
_REPLACED = [*_DATA, *(f"*/{name}" for name in _DATA)]
_EXPORT_COMMAND = "run --stage export --overwrite"


def push(cfg: SynthConfig, repo_id: str, *, private: bool = False, partial: bool = False) -> str:
    """Upload out_dir/export to a dataset repository; return the commit's URL.

    The repository is created if it does not exist. Readers see all new files or none. A repeated
    push sends only missing files.

    private: make a new repository private; refuse a public one.
    partial: also a dry run, or a run under --limit. The token is that of HF_TOKEN, or of `hf auth
    login`.
    Raises UserError.
    """
    folder = cfg.run.out_dir / FOLDER
    names, rows, pairs = ["README.md"], 0, []
    for name, pair_cfg in pair_configs(
        cfg
    ).items():  # a single pair has the name "" and no subfolder
        manifest = _check(pair_cfg.run.out_dir, folder / name, partial)
        files = [file["name"] for file in manifest["files"]]
        names += [str(Path(name) / file) for file in (*files, "manifest.json", "README.md")]
        rows += manifest["rows"]["train"]
        pairs.append(manifest["pair_id"])
    token = get_token()
    if token is None:
        raise UserError("HF_TOKEN: give a token with write access, or `hf auth login`")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        api.create_repo(repo_id, repo_type="dataset", private=private or None, exist_ok=True)
        if private and not api.dataset_info(repo_id).private:
            raise UserError(f"{repo_id}: is public. Make it private first, or leave out --private")
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=folder,
            allow_patterns=names,
            delete_patterns=_REPLACED,
            commit_message=f"{rows:,} pairs, {', '.join(pairs)}",
        )
    except hub_errors(ValueError, RuntimeError) as error:
        raise UserError(f"{repo_id}: {_hub_error(error)}") from None
    return commit.commit_url


def _check(out_dir: Path, folder: Path, partial: bool) -> dict[str, Any]:
    """Return the manifest of an export that may be pushed. Raises UserError.

    folder: the export, or its copy within the export of several pairs."""
    stage_folder = StageFolder(out_dir, FOLDER)
    stage_manifest = stage_folder.manifest()
    manifest = read_json(folder / "manifest.json", "files", "rows", "pair_id", hint=_EXPORT_COMMAND)
    if stage_manifest is None or manifest is None or not stage_folder.done():
        raise UserError(f"{folder}: no finished export. Run `run --stage all --resume` first")
    if manifest.get("stage_digest") != stage_manifest["digest"]:
        raise UserError(f"{folder}: belongs to another run. Run: {_EXPORT_COMMAND}")
    changed = changed_files(folder, manifest["files"])
    if changed or not (folder / "README.md").exists():
        raise UserError(
            f"{folder / (changed or ['README.md'])[0]}: changed or missing. Run: {_EXPORT_COMMAND}"
        )
    if manifest.get("partial") and not partial:
        raise UserError(
            f"{folder}: is a dry run, or a part of the sources (--limit): give --partial to push it"
        )
    return manifest


def _hub_error(error: Exception) -> str:
    """Return the hub's or the network's error in one line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    message_by_status = {
        401: "the hub does not accept this token. Set another one in HF_TOKEN",
        403: "this token may not write there: it needs the write permission for that owner",
        404: "the hub has no such user or organisation",
    }
    if status in message_by_status:
        return message_by_status[status]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines)[:300] or type(error).__name__
    return f"{message}. Push again: only missing files are sent"
