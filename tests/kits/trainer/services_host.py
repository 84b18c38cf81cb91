"""The services and samplers of two learning hosts, on a third: `services_host PLAN.json`.

They run on the loopback of this host. A proxy of each listens on the address of the plan:

    address: of this host
    out: the file to write when all are ready: the config sections that name them
    translation: whether there are MetricX and xCOMET
    samplers: folders of policies, each of which a stand-in for vLLM serves
    search: the folder of an index, for a retriever, a generator, a judge and a Redis
    is_rough: whether the proxies delay each part of a reply, and cut some

Services and samplers want their keys. The process ends with its host.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from testing.judge import judge_app
from testing.proxy import delaying_proxy
from testing.redis_process import running_redis
from testing.servers import running_app, running_service
from tests.kits.trainer.searching import learning
from tests.kits.vllm_stub import VLLMStub

KEY = "key-of-the-services"
#: Of a rough link: the longest delay in seconds, and the share of the parts that are cut.
_DELAY_S, _CUT = 0.02, 0.08
_LOCAL = re.compile(r"127\.0\.0\.1:(\d+)")


def serve(plan: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Start what the plan has, and return the config sections with loopback addresses."""
    secrets = Secrets(api_keys=SecretStr(KEY))
    sections: dict[str, Any] = {}
    if plan.get("translation"):
        urls = [
            stack.enter_context(running_service(FakeBackend(name), secrets))
            for name in ("metricx", "xcomet")
        ]
        sections["reward"] = {"metricx_urls": urls[0], "xcomet_urls": urls[1]}
    if policies := plan.get("samplers"):
        urls = [stack.enter_context(running_app(VLLMStub(Path(policy)).app)) for policy in policies]
        sections["vllm"] = {"url": urls}
    if index := plan.get("search"):
        generator, judge = learning.counting().app, judge_app(secrets=secrets)
        running = learning.running_services(Path(index), generator, judge, secrets)
        sections |= stack.enter_context(running)
        redis = stack.enter_context(
            running_redis("--appendonly", "yes", "--maxmemory-policy", "noeviction")
        )
        sections["answering"]["answers"] = redis.url
    return sections


def publish(sections: dict[str, Any], plan: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Return the sections with the addresses of proxies, which are started."""
    numbers, ports = random.Random(0), dict[str, int]()
    is_rough = bool(plan.get("is_rough"))

    def public(match: re.Match[str]) -> str:
        if match[1] not in ports:
            proxy = delaying_proxy(
                int(match[1]),
                lambda: numbers.uniform(0, _DELAY_S) if is_rough else 0.0,
                host=plan["address"],
                cuts=lambda: is_rough and numbers.random() < _CUT,
            )
            ports[match[1]] = stack.enter_context(proxy)
        return f"{plan['address']}:{ports[match[1]]}"

    published: dict[str, Any] = json.loads(_LOCAL.sub(public, json.dumps(sections)))
    return published


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with ExitStack() as stack:
        sections = publish(serve(plan, stack), plan, stack)
        partial = Path(plan["out"]).with_suffix(".partial")
        partial.write_text(json.dumps(sections), encoding="utf-8")
        partial.rename(plan["out"])
        threading.Event().wait()
