"""Run OpenEnv's clients against a server, in the environment of `make env-openenv`.

.venv-openenv/bin/python -m tests.kits.trainer.openenv.probe

It reads one call a line, {"function": NAME, "arguments": {...}} with a function of this file, and
prints what each returns as a line of JSON, or {"raised": "TYPE: MESSAGE"}.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import websockets
from openenv.core import GenericEnvClient
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import WSObservationResponse

from tests.kits.trainer.openenv.bodies import observations
from trainer.search.environment.openenv_client import SearchEnvClient
from trainer.search.environment.openenv_fields import observation_fields
from trainer.search.environment.openenv_types import SearchAction, SearchObservation


def observed(observation: SearchObservation) -> list[Any]:
    """Return the messages as role, text, and the hashes of the images."""
    return [_observed_message(message) for message in observation.messages]


def _observed_message(message: dict[str, Any]) -> list[Any]:
    content: Any = message["content"]
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [part["text"] for part in parts if part["type"] == "text"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    pngs = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    return [message["role"], "".join(texts), [hashlib.sha256(png).hexdigest() for png in pngs]]


def record_of(messages: list[Any], result: Any) -> dict[str, Any]:
    """Return the record of an episode from the client's last result."""
    last = result.observation
    return {
        "messages": messages,
        "end": last.end,
        "pages": last.pages,
        "status": last.status,
        "reward": result.reward,
        "components": last.components,
        "error": last.error,
    }


async def _played(env: SearchEnvClient, reset: dict[str, Any], turns: Sequence[str]) -> Any:
    result = await env.reset(**reset)
    messages = observed(result.observation)
    for turn in turns:
        result = await env.step(SearchAction(text=turn))
        messages += observed(result.observation)
        if result.done:
            break
    return record_of(messages, result)


def play(url: str, episodes: list[Any], sessions: int = 8, **options: Any) -> Any:
    """Return the records of episodes (options of reset, and turns), several sessions at once."""
    waiting = list(enumerate(episodes))[::-1]
    records: list[Any] = [None] * len(episodes)

    async def work() -> None:
        async with SearchEnvClient(url, **options) as env:
            while waiting:
                number, (reset, turns) = waiting.pop()
                records[number] = await _played(env, reset, turns)

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(min(sessions, len(episodes)))))

    asyncio.run(run())
    return records


def play_in_turns(url: str, episodes: list[Any]) -> Any:
    """Return the records of episodes whose sessions take one turn each, again and again."""

    async def run() -> Any:
        envs = [SearchEnvClient(url) for _ in episodes]
        results = [await env.reset(**reset) for env, (reset, _) in zip(envs, episodes, strict=True)]
        messages = [observed(result.observation) for result in results]
        for turn in range(max(len(turns) for _, turns in episodes)):
            for number, (_, turns) in enumerate(episodes):
                if not results[number].done:
                    results[number] = await envs[number].step(SearchAction(text=turns[turn]))
                    messages[number] += observed(results[number].observation)
        for env in envs:
            await env.close()
        return [record_of(seen, last) for seen, last in zip(messages, results, strict=True)]

    return asyncio.run(run())


def play_synchronously(url: str, reset: dict[str, Any], turns: list[str]) -> Any:
    """Return the record of an episode, played by the synchronous client, and the state then."""
    with SearchEnvClient(url).sync() as env:
        result = env.reset(**reset)
        messages = observed(result.observation)
        for turn in turns:
            result = env.step(SearchAction(text=turn))
            messages += observed(result.observation)
            if result.done:
                break
        return {"record": record_of(messages, result), "state": env.state().model_dump()}


def play_generically(url: str, reset: dict[str, Any], turns: list[str]) -> Any:
    """Return the last result that OpenEnv's own generic client has of an episode."""
    with GenericEnvClient(url, message_timeout_s=120.0).sync() as env:
        result = env.reset(**reset)
        for turn in turns:
            result = env.step({"text": turn})
        return {
            "reward": result.reward,
            "done": result.done,
            "observation": result.observation,
        }


def send_frames(url: str, frames: list[str], **options: Any) -> Any:
    """Return the answers to raw frames in one session; the last is "closed" if the server ends it.

    options: of the connection."""

    async def run() -> list[Any]:
        answers: list[Any] = []
        async with websockets.connect(_socket(url), max_size=None, **options) as connection:
            try:
                for frame in frames:
                    await connection.send(frame)
                    answers.append(json.loads(await asyncio.wait_for(connection.recv(), 60)))
            except websockets.ConnectionClosed:
                answers.append("closed")
        return answers

    return asyncio.run(run())


def leave(url: str, frames: list[str], departure: str) -> None:
    """Send frames, the last without waiting for its answer, and leave.

    departure: "closes" says so; "is lost" only ends the connection."""

    async def run() -> None:
        connection = await websockets.connect(_socket(url), max_size=None)
        for frame in frames[:-1]:
            await connection.send(frame)
            await connection.recv()
        await connection.send(frames[-1])
        if departure == "is lost":
            connection.transport.abort()
        else:
            await connection.close()

    asyncio.run(run())


#: The clients that `begin` has opened, so that their sessions stay.
_OPEN: list[Any] = []


def begin(url: str, index: int, **options: Any) -> Any:
    """Begin an episode in a session that stays open, and return the messages."""
    env = SearchEnvClient(url, **options).sync()
    _OPEN.append(env)
    return observed(env.reset(index=index).observation)


def end() -> None:
    """Close the sessions that `begin` has opened."""
    while _OPEN:
        _OPEN.pop().close()


def counts(url: str) -> Any:
    """Return the counts of episodes of the server by status."""
    with SearchEnvClient(url).sync() as env:
        return env.state().episodes


def patience(url: str, reset: dict[str, Any], **options: Any) -> Any:
    """Return the seconds that a client waits for an answer, before a reset and after it."""

    async def run() -> list[float]:
        async with SearchEnvClient(url, **options) as env:
            before = env._message_timeout
            await env.reset(**reset)
            return [before, env._message_timeout]

    return asyncio.run(run())


def outwait(url: str, reset: dict[str, Any], turns: list[str], released: str) -> Any:
    """Play an episode by two clients, of which one gives up waiting for the last turn.

    released: a file that is made when it has given up, so that the services may answer the other.
    """

    async def run() -> Any:
        hasty_client, slow_client = SearchEnvClient(url), SearchEnvClient(url)
        for env in (hasty_client, slow_client):
            await env.reset(**reset)
            for turn in turns[:-1]:
                await env.step(SearchAction(text=turn))
        last = SearchAction(text=turns[-1])
        waiting = asyncio.ensure_future(slow_client.step(last))
        hasty_client._message_timeout = 0.5
        gave_up = ""
        try:
            await hasty_client.step(last)
        except TimeoutError:
            gave_up = "TimeoutError"
        hasty_client._message_timeout = 60.0
        error = ""
        try:
            await hasty_client.step(last)  # in a session of its own
        except RuntimeError as raised:
            error = str(raised)
        Path(released).touch()
        result = await waiting
        await slow_client.close()
        await hasty_client.close()
        return {"gave_up": gave_up, "error": error, "record": record_of([], result)}

    return asyncio.run(run())


def fill(url: str, sessions: int) -> Any:
    """Open so many sessions; return how many are served, and the error of the first that is not."""

    async def run() -> Any:
        envs = [SearchEnvClient(url) for _ in range(sessions)]
        num_served, error = 0, ""
        try:
            for env in envs:
                await env.reset(index=0)
                num_served += 1
        except RuntimeError as raised:
            error = str(raised)
        for env in envs:
            await env.close()
        return [num_served, error]

    return asyncio.run(run())


def bodies() -> Any:
    """Return the bodies of `observations` as the server sends them, and what a client sends."""
    sent: list[Any] = []

    class Recording(SearchEnvClient):
        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            sent.append(message)
            return {"data": serialize_observation(SearchObservation())}

    async def record_requests() -> None:
        env = Recording("http://127.0.0.1:1")
        row = {"question": "기대 수명?", "reference_answer": "82"}
        for options in ({"index": 3}, {"id": "q1"}, {"question": row}, {"seed": 7}):
            await env.reset(**options)
        await env.step(SearchAction(text="<search>a</search>"))
        await env.step(SearchAction(text="<search>a</search>", tokens=5))

    asyncio.run(record_requests())
    received = {}
    for name, observation in observations().items():
        wire = serialize_observation(SearchObservation(**observation_fields(observation)))
        received[name] = json.loads(WSObservationResponse(data=wire).model_dump_json())
    return {"requests": sent, "responses": received}


def parsed(responses: dict[str, Any]) -> Any:
    """Return reward, status and end that the client reads in each response."""
    env = SearchEnvClient("http://127.0.0.1:1")
    results = {name: env._parse_result(body["data"]) for name, body in responses.items()}
    return {
        name: [result.reward, result.observation.reward, result.observation.status, result.done]
        for name, result in results.items()
    }


def _socket(url: str) -> str:
    return url.replace("http://", "ws://") + "/ws"


def main() -> None:
    """Answer the calls of standard input, one a line."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = globals()[call["function"]](**call["arguments"])
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
