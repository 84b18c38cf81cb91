"""Who a search run talks to: retriever, policy, generator and judge, opened from its config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr, ValidationError

from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.llm import LLMClient, Sampling
from scorekit.retrieval.client import Retriever
from scorekit.retrieval.wire import IndexInfo
from trainer.search.answer.answering import Answering
from trainer.search.config import PolicyServerConfig, SearchConfig
from trainer.search.reward.stream import RewardStream
from trainer.search.turns.policies import ChatPolicy, Policy

#: In which a retriever has to answer when a run begins.
_AT_START_S = 10.0


@dataclass(frozen=True, slots=True)
class Around:
    """All were there when the run began. answering: None where no weight needs an answer. stream:
    None on a process that asks for no rewards."""

    retriever: Retriever
    index: IndexInfo
    answering: Answering | None
    stream: RewardStream | None


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The same with a policy that learns nothing."""

    retriever: Retriever
    index: IndexInfo
    policy: Policy
    answering: Answering | None
    stream: RewardStream


@contextmanager
def services(
    cfg: SearchConfig, *, run: str, pictures: Callable[[str], bytes], is_main: bool = True
) -> Iterator[Around]:
    """Open them and look whether each is there and as configured, before anything is paid for.

    run: its name. pictures: SHA-256 -> PNG. is_main: of several processes, only this one asks for
    rewards. Raises UserError, ServiceUnreachable.
    """
    with ExitStack() as opened:
        meet_retriever(cfg)
        retriever = opened.enter_context(open_retriever(cfg))
        index = retriever.info()
        answering = stream = None
        if is_main and cfg.reward.weights["judge"]:
            answering = Answering(cfg.answering, run=run, folder=Path(cfg.misc.run_dir))
        if is_main:
            stream = RewardStream(cfg.reward, answering, pictures)
            opened.callback(stream.close)
            stream.check()
        yield Around(retriever, index, answering, stream)


@contextmanager
def neighbours(
    cfg: SearchConfig, *, run: str, pictures: Callable[[str], bytes]
) -> Iterator[Neighbours]:
    """`services`, and the policy of the config."""
    with services(cfg, run=run, pictures=pictures) as found, open_policy(cfg) as policy:
        assert found.stream is not None
        yield Neighbours(found.retriever, found.index, policy, found.answering, found.stream)


@contextmanager
def open_retriever(cfg: SearchConfig) -> Iterator[Retriever]:
    """The client of `retriever`."""
    section = cfg.retriever
    client = Retriever(section.url, timeout_s=section.timeout_s, deadline_s=section.deadline_s)
    try:
        yield client
    finally:
        client.close()


def meet_retriever(cfg: SearchConfig) -> None:
    """Raise UserError where it does not answer soon: who has forgotten to start it is told so now,
    and not when a run's patience ends."""
    url = cfg.retriever.url
    try:
        with Retriever(url, deadline_s=_AT_START_S) as once:
            once.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(
            f"retriever.url: no page retriever answers ({error}): start one (python -m "
            "services.retriever --index DIR), or mend the address"
        ) from None


def check_index(folder: Path, now: IndexInfo) -> None:
    """Raises UserError where the run was begun on another index."""
    try:
        then = IndexInfo.model_validate_json((folder / "index.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder / 'index.json'}: cannot be read: {error}") from None
    if then.revision != now.revision:
        raise UserError(
            f"retriever.url: the index is {now.id!r}, revision {now.revision}; the run was begun "
            f"on {then.id!r}, revision {then.revision}: serve that one, or start another run"
        )


def has_page(retriever: Retriever, page_id: str) -> bool:
    """Whether the index has a page of that id."""
    try:
        retriever.page(page_id)
    except RequestError as error:
        if error.type == "not_found":
            return False
        raise
    return True


@contextmanager
def open_policy(cfg: SearchConfig) -> Iterator[Policy]:
    """The policy of `server`, else of `policy`. Raises UserError where neither is named, or it is
    not there."""
    if cfg.server.url is not None:
        _check_server(cfg)
        policy = ChatPolicy(lambda: _client(cfg.server), _sampling(cfg))
        try:
            policy.check()
            yield policy
        finally:
            policy.close()
    elif cfg.policy.path is not None:
        from trainer.search.local import local_policy

        yield local_policy(cfg)
    else:
        raise UserError("no policy: set server.url, or policy.path to a model's folder or hub id")


def _check_server(cfg: SearchConfig) -> None:
    """Raise UserError for what a server would not be asked for."""
    for key, is_set in (
        ("episode.context_length", cfg.episode.context_length is not None),
        ("generation.engine", cfg.generation.engine != "generate"),
    ):
        if is_set:
            raise UserError(
                f"{key}: is of a policy in this process, and server.url (--policy URL) names a "
                "server, which has its own: leave it out"
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
    of = cfg.generation
    return Sampling(
        max_tokens=of.max_new_tokens,
        temperature=of.temperature,
        top_p=of.top_p,
        top_k=of.top_k,
        seed=cfg.misc.seed,
    )
