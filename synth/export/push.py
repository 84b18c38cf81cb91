"""An export on its way to the Hugging Face hub: one commit, of a run that is finished."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from scorekit.errors import UserError
from synth.config import SynthConfig, pair_configs
from synth.export.files import changed_files
from synth.folder.store import StageFolder, read_json
from synth.stages.export import FOLDER, Export

#: What an earlier, larger or smaller export may have left in the repository.
_DATA = ("train.*", "train-*", "pairs.*", "pairs-*", "manifest.json", "README.md")
_REPLACED = [*_DATA, *(f"*/{name}" for name in _DATA)]
_AGAIN = "run --stage export --overwrite"


def push(cfg: SynthConfig, repo_id: str, *, private: bool = False, partial: bool = False) -> str:
    """Upload out_dir/export to a dataset repository, which is made where there is none; the URL of
    the commit. Its readers see all of the new files or none. Who pushes again sends only what the
    hub has not got yet.

    private: of a new repository; one that is public is refused. partial: also a dry run, or a run
    under --limit. The token is that of HF_TOKEN, or of `hf auth login`. Raises UserError.
    """
    from huggingface_hub import HfApi, get_token

    folder = cfg.run.out_dir / FOLDER
    names, rows, pairs = ["README.md"], 0, []
    for name, one in pair_configs(cfg).items():  # of one pair alone, "": it stands in the folder
        manifest = _checked(one.run.out_dir, folder / name, partial)
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
            raise UserError(f"{repo_id}: is public; make it private first, or leave out --private")
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=folder,
            allow_patterns=names,
            delete_patterns=_REPLACED,
            commit_message=f"{rows:,} pairs, {', '.join(pairs)}",
        )
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        raise UserError(f"{repo_id}: {_told(error)}") from None
    return commit.commit_url


def _checked(out_dir: Path, folder: Path, partial: bool) -> dict[str, Any]:
    """The manifest of an export that may be pushed; of several pairs, folder is that in which the
    run's own export stands again. Raises UserError."""
    own = StageFolder(out_dir, Export.name)
    begun = own.manifest()
    manifest = read_json(folder / "manifest.json", "files", "rows", "pair_id", mend=_AGAIN)
    if begun is None or manifest is None or not own.done():
        raise UserError(f"{folder}: no finished export; `run --stage all --resume` first")
    if manifest.get("stage_digest") != begun["digest"]:
        raise UserError(f"{folder}: is not of the run that stands beside it: {_AGAIN}")
    changed = changed_files(folder, manifest["files"])
    if changed or not (folder / "README.md").exists():
        raise UserError(
            f"{folder / (changed or ['README.md'])[0]}: was changed or is gone: {_AGAIN}"
        )
    if manifest.get("partial") and not partial:
        raise UserError(
            f"{folder}: is a dry run, or a part of the sources (--limit): give --partial to push it"
        )
    return manifest


def _told(error: Exception) -> str:
    """What the hub or the network said, in a line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    known = {
        401: "the hub does not know this token: give another in HF_TOKEN",
        403: "this token may not write there: it needs the write permission for that owner",
        404: "the hub has no such user or organisation",
    }
    if status in known:
        return known[status]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = " ".join(lines)[:300] or type(error).__name__
    return f"{told}; push again, and only what is missing is sent"
