"""A small fake hub: what huggingface_hub needs to create a dataset, upload to it, and read it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from testing.servers import PATIENCE_S, running_app

TOKEN = "hf_test"


@dataclass
class Repo:
    """A dataset: its files as they are after the last commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return f"{len(self.commits):040x}"


class Hub:
    """A fake hub.

    repos: by id.
    puts: how often the content of each digest was sent.
    blocked_uploads: digests whose uploads wait for `go`.
    sick: the status of refused uploads.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.blocked_uploads: set[str] = set()
        self.go, self.entered = threading.Event(), threading.Event()
        self.sick: int | None = None
        self.cards: list[str] = []

    @contextmanager
    def running(self) -> Any:
        """Serve until the block ends, and yield the URL."""
        name = "/api/datasets/{user}/{name}"
        git = "/datasets/{user}/{name}.git/info/lfs/objects/batch"
        app = Starlette(
            routes=[
                Route("/api/repos/create", self._create, methods=["POST"]),
                Route("/api/validate-yaml", self._validate, methods=["POST"]),
                Route(name + "/preupload/main", self._preupload, methods=["POST"]),
                Route(name + "/commit/main", self._commit, methods=["POST"]),
                Route(name + "/tree/{revision}", self._tree),
                Route(name + "/tree/{revision}/{path:path}", self._tree),
                Route(name + "/revision/{revision}", self._info),
                Route(name, self._info),
                Route(git, self._batch, methods=["POST"]),
                Route("/upload/{oid}", self._upload, methods=["PUT"]),
                Route("/datasets/{user}/{name}/resolve/{revision}/{path:path}", self._file),
            ]
        )
        with running_app(app) as self.url:
            try:
                yield self.url
            finally:
                self.go.set()

    def _repo(self, request: Request) -> Repo | None:
        """Return the dataset of a request; the case of its name does not matter, as on the hub."""
        name = "{user}/{name}".format(**request.path_params).lower()
        return next((repo for id, repo in self.repos.items() if id.lower() == name), None)

    async def _create(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid credentials"}, 401)
        body = await request.json()
        if body["organization"] == "others":
            return JSONResponse({"error": "no rights"}, 403)
        repo_id = f"{body['organization']}/{body['name']}"
        url = {"url": f"{self.url}/datasets/{repo_id}"}
        if repo_id in self.repos:
            return JSONResponse(url, 409)
        self.repos[repo_id] = Repo(body.get("visibility") == "private")
        return JSONResponse(url)

    async def _validate(self, request: Request) -> Response:
        content = (await request.json())["content"]
        self.cards.append(content)
        head = yaml.safe_load(content.split("---\n")[1])
        missing = {"license", "language", "task_categories", "size_categories"} - head.keys()
        errors = [{"message": f"{key} is missing"} for key in sorted(missing)]
        return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)

    async def _preupload(self, request: Request) -> Response:
        files = [
            {
                "path": file["path"],
                "shouldIgnore": False,
                "uploadMode": "regular" if file["path"].endswith((".md", ".json")) else "lfs",
            }
            for file in (await request.json())["files"]
        ]
        return JSONResponse({"files": files})

    async def _batch(self, request: Request) -> Response:
        objects = [
            requested
            if requested["oid"] in self.blobs
            else {
                **requested,
                "actions": {"upload": {"href": f"{self.url}/upload/{requested['oid']}"}},
            }
            for requested in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _upload(self, request: Request) -> Response:
        oid = request.path_params["oid"]
        if self.sick:
            return Response(status_code=self.sick)
        content = await request.body()
        assert hashlib.sha256(content).hexdigest() == oid
        if oid in self.blocked_uploads:
            self.entered.set()
            await anyio.to_thread.run_sync(self.go.wait, PATIENCE_S)
            return Response(status_code=500)
        self.puts[oid] += 1
        self.blobs[oid] = content
        return Response()

    async def _commit(self, request: Request) -> Response:
        repo = self._repo(request)
        assert repo is not None
        header, *changes = [json.loads(line) for line in (await request.body()).splitlines()]
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                repo.files[value["path"]] = self.blobs[value["oid"]]
            else:
                del repo.files[value["path"]]
        repo.commits.append(header["value"]["summary"])
        url = self.url + "/datasets/{user}/{name}/commit/".format(**request.path_params) + repo.sha
        return JSONResponse({"commitUrl": url, "commitOid": repo.sha})

    async def _info(self, request: Request) -> Response:
        repo = self._repo(request)
        if repo is None:
            return JSONResponse({}, 404, {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": path} for path in repo.files]
        name = "{user}/{name}".format(**request.path_params)
        return JSONResponse(
            {
                "id": name,
                "sha": repo.sha,
                "private": repo.private,
                "tags": [],
                "siblings": siblings,
                "downloads": 0,
                "likes": 0,
            }
        )

    async def _tree(self, request: Request) -> Response:
        repo = self._repo(request)
        assert repo is not None
        folder = request.path_params.get("path", "")
        prefix = folder + "/" if folder else ""
        is_recursive = request.query_params.get("recursive", "").lower() == "true"
        entries: dict[str, dict[str, Any]] = {}
        for path, content in repo.files.items():
            if not path.startswith(prefix):
                continue
            inner_folders = path.removeprefix(prefix).split("/")[:-1]
            for depth in range(1, len(inner_folders) + 1 if is_recursive else 2):
                if inner := "/".join(inner_folders[:depth]):
                    name = prefix + inner
                    entries[name] = {"type": "directory", "path": name, "oid": "0" * 40}
            if is_recursive or not inner_folders:
                entries[path] = {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": "0" * 40,
                }
        return JSONResponse(list(entries.values()))

    async def _file(self, request: Request) -> Response:
        repo = self._repo(request)
        if repo is None:
            return Response(status_code=404, headers={"X-Error-Code": "RepoNotFound"})
        content = repo.files.get(request.path_params["path"])
        if content is None:
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repo.sha}
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", "")):
            first, last = int(byte_range[1]), min(int(byte_range[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return Response(content[first : last + 1], 206, headers)
        return Response(content, headers=headers)
