"""Run our tasks in verifiers' own loaders and loops, in the environment of `make env-verifiers`.

.venv-verifiers/bin/python -m tests.kits.trainer.verifiers.probe CALLS.json

CALLS.json: {NAME: [FUNCTION, {ARGUMENT: VALUE}]}, with a function of this file. It prints one JSON
object: what each call returns, or "TYPE: MESSAGE" of the exception that leaves it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.cli.eval import EvalConfig

from scorekit.adapters.prime_rl import INFO


def loaded(taskset_id: str, taskset: dict[str, Any]) -> Any:
    """Return the classes that verifiers resolves for an id, and the ids of the tasks."""
    env = vf.load_environment(_config(taskset_id, taskset, {}, "http://127.0.0.1:1/v1").env)
    return {
        "env": _name(type(env)),
        "taskset": _name(type(env.taskset)),
        "task": _name(vf.task_type(taskset_id)),
        "harness": _name(type(env._harnesses["agent"])),
        "runtime": env.config.agent.runtime.type,
        "ids": [task.data.id for task in env.taskset],
    }


def played(
    taskset_id: str,
    taskset: dict[str, Any],
    policy_url: str,
    env: dict[str, Any] | None = None,
    at_once: int = 8,
    rollouts: int = 1,
) -> Any:
    """Return a record of each episode of all tasks, and how the environment counted them."""
    config = _config(taskset_id, taskset, env or {}, policy_url)

    async def run() -> Any:
        environment = vf.load_environment(config.env)
        context = vf.ModelContext(config.model, config.client, config.sampling)
        limit = asyncio.Semaphore(at_once)
        async with environment.serving():
            slots = [s for task in environment.taskset for s in environment.slots(task, rollouts)]
            episodes = await asyncio.gather(
                *(environment.run_slot(slot, context, limit) for slot in slots)
            )
            services = getattr(environment, "_services", None)
            counts = {} if services is None else services.episodes.counts
        return {"episodes": [_record(episode) for episode in episodes], "counts": counts}

    return asyncio.run(run())


async def unending_metric(trace: Any) -> float:
    """Stand for a metric of the user that takes longer than verifiers waits."""
    await asyncio.Event().wait()
    return 0.0


def first_line(text: str) -> str:
    """Return the first line of an answer, as a user's `postprocess` may."""
    return text.split("\n")[0].strip()


def recorded(taskset: dict[str, Any], ids: list[int], prompt_ids: list[int], text: str) -> Any:
    """Return the record of a scored trace that has ids, as verifiers' training client makes it."""
    env = vf.load_environment(
        _config("scorekit-translation", taskset, {}, "http://127.0.0.1:1/v1").env
    )
    (task,) = env.taskset
    trace = vf.Trace(
        task=vf.TraceTask(type="TranslationRowTask", data=task.data),
        agent=vf.AgentInfo(config=env.config.agent),
        nodes=[
            vf.MessageNode(message=vf.UserMessage(content=task.data.prompt)),
            vf.MessageNode(
                parent=0,
                message=vf.AssistantMessage(content=text),
                sampled=True,
                token_ids=[*prompt_ids, *ids],
                mask=[False] * len(prompt_ids) + [True] * len(ids),
                logprobs=[-1.0] * len(ids),
            ),
        ],
        calls=[vf.ModelCall(node=1, finish_reason="stop")],
    )
    asyncio.run(task.score(trace))
    return trace.to_record()


def rescored(taskset_id: str, taskset: dict[str, Any], records: list[Any]) -> Any:
    """Return the rewards that traces get which were read back from verifiers' own records."""
    task_type = vf.task_type(taskset_id)
    config = _config(taskset_id, taskset, {}, "http://127.0.0.1:1/v1").env.taskset.task

    async def run() -> Any:
        values = []
        for record in records:
            trace = vf.WireTrace.model_validate(record)
            data = task_type.data_type().model_validate(trace.task.data.model_dump())
            await task_type(data, config).score(trace)
            values.append(trace.reward)
        return values

    return asyncio.run(run())


def _name(class_: type) -> str:
    return f"{class_.__module__}:{class_.__name__}"


def _config(taskset_id: str, taskset: dict[str, Any], env: dict[str, Any], url: str) -> Any:
    return EvalConfig.model_validate(
        {
            "env": {"taskset": {"id": taskset_id, **taskset}, **env},
            "model": "teacher",
            "client": {"base_url": url},
        }
    )


def _record(episode: Any) -> Any:
    (trace,) = episode.traces
    return {
        "id": episode.task.data.id,
        "episode_ok": episode.ok,
        "ok": trace.ok,
        "stop": trace.stop_condition,
        "errors": [f"{error.type}: {error.message}" for error in (*episode.errors, *trace.errors)],
        "reward": trace.reward,
        "rewards": {name: reward and reward.score for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "info": trace.info.get(INFO),
        "branches": trace.num_branches,
        "messages": [_observed(node.message) for node in trace.nodes if not node.sampled],
        "turns": [message.content or "" for message in trace.assistant_messages],
        "record": trace.to_record(),
    }


def _observed(message: Any) -> Any:
    """Return a message as `observed_message` of the search environment's tests does."""
    if isinstance(message.content, str):
        return [message.role, message.content, []]
    texts = [part.text for part in message.content if part.type == "text"]
    urls = [part.image_url.url for part in message.content if part.type == "image_url"]
    digests = [hashlib.sha256(b64decode(url.partition(",")[2])).hexdigest() for url in urls]
    return [message.role, "".join(texts), digests]


def main() -> None:
    """Print the results of all calls."""
    results = {}
    for name, (function, arguments) in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            results[name] = globals()[function](**arguments)
        except BaseException as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
