"""Open the services of a search run from its config: retriever, policy, generator and judge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import SecretStr, ValidationError

from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.llm import LLMClient, Sampling
from scorekit.processes import boot_id
from scorekit.retrieval.client import Retriever
from scorekit.retrieval.wire import IndexInfo
from trainer.search.answer.pipeline import AnswerPipeline, answers_location
from trainer.search.config import PolicyServerConfig, SearchConfig
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import Policy
from trainer.search.rollout.policies import ChatPolicy
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

if TYPE_CHECKING:
    from trainer.rl.distributed import DistributedContext

#: Deadline of the first call to a retriever, when a run starts.
_AT_START_S = 10.0


@dataclass(frozen=True, slots=True)
class SearchServices:
    """The services of a run, all checked when it starts.

    answering: None if no reward component needs an answer.
    stream: of the rewards of this process's episodes.
    """

    retriever: Retriever
    index: IndexInfo
    answering: AnswerPipeline | None
    stream: RewardStream


@dataclass(frozen=True, slots=True)
class PolicyAndServices(SearchServices):
    """The services of a run and a policy that is not trained."""

    policy: Policy


@contextmanager
def open_services(
    cfg: SearchConfig,
    *,
    run: str,
    load_image: Callable[[str], bytes],
    world: DistributedContext | None = None,
) -> Iterator[SearchServices]:
    """Open the services and check that each answers as configured, before any paid call.

    run: name of the run.
    load_image: SHA-256 -> PNG.
    world: the processes of the run, each of which gets the rewards of its episodes and has to open
    and close the services; None: there is only this one.
    Raises UserError, ServiceUnreachable.
    """
    with ExitStack() as exit_stack:
        check_retriever(cfg)
        retriever = exit_stack.enter_context(open_retriever(cfg))
        index = retriever.info()
        answering = None
        if cfg.reward.weights["judge"]:
            folder = Path(cfg.misc.run_dir)
            rank, size = (0, 1) if world is None else (world.rank, world.size)
            if world is not None:
                _check_machines(answers_location(cfg.answering, folder), world)
            answering = AnswerPipeline(cfg.answering, run=run, folder=folder, rank=rank, size=size)
        stream = RewardStream(cfg.reward, answering, load_image)
        exit_stack.callback(stream.close)
        _check_on_all(stream, world)
        yield SearchServices(retriever, index, answering, stream)


def _check_machines(answers: str, world: DistributedContext) -> None:
    """Raise UserError, on the main process, if several machines would share a file of answers."""
    machines = set(world.gather([boot_id()]))
    if "://" not in answers and len(machines) > 1:
        if not world.is_main:
            raise SystemExit(0)
        raise UserError(
            f"answering.answers: the processes run on {len(machines)} machines, which cannot share "
            f"the file {answers}. Name a Redis (redis://HOST:PORT/0)."
        )


def _check_on_all(stream: RewardStream, world: DistributedContext | None) -> None:
    """Check generator and judge on the main process first, so that one line names a mistake."""
    if world is None:
        stream.check()
        return
    world.on_main(stream.check)
    failure = None
    if not world.is_main:
        try:
            stream.check()
        except UserError as error:
            failure = f"process {world.rank} of {world.size}: {error}"
    failures = [line for line in world.gather([failure]) if line is not None]
    if failures:
        raise UserError(failures[0]) if world.is_main else SystemExit(0)


@contextmanager
def open_policy_and_services(
    cfg: SearchConfig, *, run: str, load_image: Callable[[str], bytes]
) -> Iterator[PolicyAndServices]:
    """Open the services and the policy of the config."""
    with open_services(cfg, run=run, load_image=load_image) as opened, open_policy(cfg) as policy:
        yield PolicyAndServices(
            opened.retriever, opened.index, opened.answering, opened.stream, policy
        )


@contextmanager
def open_retriever(cfg: SearchConfig) -> Iterator[Retriever]:
    """Open the client of the config section `retriever`."""
    section = cfg.retriever
    with Retriever(
        section.url,
        timeout_s=section.timeout_s,
        deadline_s=section.deadline_s,
        max_in_flight=section.max_in_flight,
    ) as client:
        yield client


def check_retriever(cfg: SearchConfig) -> None:
    """Raise UserError if the retriever does not answer within 10 s.

    So a user who forgot to start it need not wait for the deadline of a run.
    """
    url = cfg.retriever.url
    try:
        with Retriever(url, deadline_s=_AT_START_S) as client:
            client.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(
            f"retriever.url: no page retriever answers ({error}). Start one (python -m "
            "services.retriever --index DIR) or correct the address."
        ) from None


def check_index(folder: Path, current: IndexInfo) -> None:
    """Raise UserError if the run started with another index."""
    try:
        first = IndexInfo.model_validate_json((folder / "index.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder / 'index.json'}: cannot be read: {error}") from None
    if first.revision != current.revision:
        raise UserError(
            f"retriever.url: the index is {current.id!r}, revision {current.revision}; "
            f"the run started with {first.id!r}, revision {first.revision}. Serve that index, or "
            "start a new run."
        )


def run_name(folder: Path, resume: bool = False) -> str:
    """Return the name of the resumed run in a folder, so its cost counts; else a new name."""
    if resume and (folder / FOLDER / "store.json").is_file():
        return TrajectoryStore(folder / FOLDER).run
    return f"{folder.name}-{uuid4().hex[:8]}"


def has_page(retriever: Retriever, page_id: str) -> bool:
    """Return whether the index has a page with that id."""
    try:
        retriever.page(page_id)
    except RequestError as error:
        if error.type == "not_found":
            return False
        raise
    return True


@contextmanager
def open_policy(cfg: SearchConfig) -> Iterator[Policy]:
    """Open the policy of `server`, else of `policy`.

    Raises UserError if the config names neither, or if it is not available.
    """
    if cfg.server.url is not None:
        _check_server(cfg)
        with closing(ChatPolicy(lambda: _client(cfg.server), _sampling(cfg))) as policy:
            policy.check()
            yield policy
    elif cfg.policy.path is not None:
        from trainer.search.rollout.sampled import local_policy

        yield local_policy(cfg)
    else:
        raise UserError("policy.path: not set. Name a model's folder or hub id, or set server.url.")


def _check_server(cfg: SearchConfig) -> None:
    """Raise UserError for settings that do not apply to a server."""
    for key, is_set in (
        ("episode.context_length", cfg.episode.context_length is not None),
        ("generation.engine", cfg.generation.engine != "generate"),
        ("rollout.deterministic", cfg.rollout.deterministic),
    ):
        if is_set:
            raise UserError(
                f"{key}: applies only to a policy in this process, and server.url (--policy URL) "
                "names a server, which has its own. Remove the key."
            )


def _client(cfg: PolicyServerConfig) -> LLMClient:
    key = os.environ.get(cfg.api_key_env)
    return LLMClient(
        str(cfg.url),
        cfg.model,
        api_key=SecretStr(key) if key else None,
        request_timeout_s=cfg.request_timeout_s,
        max_concurrency=cfg.max_in_flight,
        max_attempts=cfg.max_attempts,
        dialect=cfg.api,
    )


def _sampling(cfg: SearchConfig) -> Sampling:
    generation = cfg.generation
    return Sampling(
        max_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        seed=cfg.misc.seed,
    )
