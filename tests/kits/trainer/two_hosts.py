"""A run that two hosts share, with its services on a third."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from testing.servers import wait_until
from tests.kits import forked
from tests.kits.hosts import Host, hosts
from tests.kits.trainer.services_host import KEY
from tests.kits.vllm_stub import KEY as VLLM_KEY
from trainer.runs.run_log import read_jsonl

#: Only stops a hang.
_PATIENCE_S = 600.0
#: Begin the keys of stats that count calls: some were repeated, or answered by an earlier run.
_CALLS = ("sampler_", "cost/", "generator_calls", "answers_known", "answers/", "money")


def torchrun(
    machines: Sequence[Host], configs: Sequence[Any], logs: Path, *more: str
) -> list[subprocess.Popen[bytes]]:
    """Start torchrun on each host as a user does: the first one's address is the rendezvous."""
    processes = []
    for number, (host, cfg) in enumerate(zip(machines, configs, strict=True)):
        path = logs / f"{number}.yaml"
        path.write_text(yaml.safe_dump(cfg.model_dump(mode="json")), encoding="utf-8")
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc_per_node", "1", "--node_rank", str(number)),
            *("--master_addr", machines[0].address, "--master_port", "29500"),
            *("-m", "trainer", "train", "--config", str(path), *more),
        )
        output = logs / f"{number}.txt"
        processes.append(host.start(*command, output=output, GLOO_SOCKET_IFNAME="eth0"))
    return processes


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make three hosts. folder: for configs and output."""
    with hosts(3) as machines:
        yield TwoHosts(machines[:2], machines[2], folder)


def check_same(first: Path, second: Path, last: int, dumps: str = "*") -> None:
    """Check that two runs are the same to the bit, whatever calls they had to make.

    last: the update of their last checkpoint.
    dumps: pattern of the files of completions to compare.
    """
    names = sorted(path.name for path in (first / "completions").glob(dumps))
    assert names == sorted(path.name for path in (second / "completions").glob(dumps))
    for name in ("log.jsonl", "eval.jsonl", *(f"completions/{name}" for name in names)):
        rows, second_rows = (
            [
                {key: value for key, value in row.items() if not key.startswith(_CALLS)}
                for row in stats(run_dir, name)
            ]
            for run_dir in (first, second)
        )
        assert rows == second_rows, name
    folders = [run_dir / f"checkpoints/step-{last:06d}" for run_dir in (first, second)]
    for path in (*folders[0].glob("*.safetensors"), folders[0] / "optimizer.pt"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


def stats(run_dir: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a file of a run without times."""
    return [
        {key: value for key, value in line.items() if not key.endswith(("_s", "seconds"))}
        for line in read_jsonl(run_dir / name)
    ]


@dataclass
class TwoHosts:
    """Two hosts that learn, and one for services.

    folder: of configs and of what they print.
    values: the config of a run.
    """

    learners: list[Host]
    services: Host
    folder: Path
    values: dict[str, Any] = field(default_factory=dict)
    _served: int = 0

    def config(self, run_dir: Path, **sections: Any) -> dict[str, Any]:
        """Return the config of a run in this folder. sections: changes of those of `values`."""
        sections["misc"] = sections.get("misc", {}) | {"run_dir": str(run_dir)}
        changed = {name: self.values.get(name, {}) | keys for name, keys in sections.items()}
        return self.values | changed

    def serve(self, hidden: Sequence[Path] = (), **plan: Any) -> dict[str, Any]:
        """Start services on the third host, and return the config sections that name them.

        hidden: folders that the services' host does not see.
        plan: as `tests.kits.trainer.services_host` says.
        """
        self._served += 1
        paths = [self.folder / f"services-{self._served}.{end}" for end in ("plan", "json", "txt")]
        plan |= {"address": self.services.address, "out": str(paths[1])}
        paths[0].write_text(json.dumps(plan), encoding="utf-8")
        module = "tests.kits.trainer.services_host"
        process = self.services.fork(module, str(paths[0]), output=paths[2], hidden=hidden)
        wait_until(lambda: paths[1].exists() or process.poll() is not None, _PATIENCE_S)
        assert paths[1].exists(), paths[2].read_text()
        sections: dict[str, Any] = json.loads(paths[1].read_text(encoding="utf-8"))
        return sections

    def start(
        self,
        config: Mapping[str, Any],
        *more: str,
        hosts: Sequence[int] = (0, 1),
        hidden: Sequence[Path] = (),
        keys: Sequence[str] = (KEY, KEY),
    ) -> list[forked.Popen]:
        """Start a run of two processes, as torchrun would.

        hosts: the host of each process.
        hidden: folders that the second process does not see.
        keys: for the services, of each process.
        """
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        processes = []
        for rank, (host, key) in enumerate(zip(hosts, keys, strict=True)):
            group = {
                "RANK": str(rank),
                "LOCAL_RANK": str(hosts[:rank].count(host)),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": str(hosts.count(host)),
                "MASTER_ADDR": self.learners[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "SCOREKIT_API_KEY": key,
                "VLLM_API_KEY": VLLM_KEY,
            }
            words = ("train", "--config", str(path), *more)
            process = self.learners[host].fork(
                "trainer", *words, output=self.output(rank), hidden=hidden if rank else (), **group
            )
            processes.append(process)
        return processes

    def output(self, rank: int) -> Path:
        """Return the file of what a process has printed."""
        return self.folder / f"{rank}.txt"

    def finish(
        self, config: Mapping[str, Any], *more: str, **options: Any
    ) -> tuple[list[int], list[str]]:
        """Return the exit codes of a run, and what each process printed. options: of `start`."""
        processes = self.start(config, *more, **options)
        try:
            codes = [process.wait(_PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return codes, [self.output(rank).read_text() for rank in range(2)]

    def lose_one(self, config: Mapping[str, Any], updates: int = 2) -> str:
        """Start a run, end its second host after so many updates, and return what the first says.

        The host is connected again.
        """
        first, second = self.start(config)
        log = Path(config["misc"]["run_dir"]) / "log.jsonl"
        wait_until(lambda: len(read_jsonl(log)) >= updates or first.poll() is not None, _PATIENCE_S)
        assert first.poll() is None, self.output(0).read_text()
        self.learners[1].die()
        second.wait(_PATIENCE_S)
        code = first.wait(_PATIENCE_S)
        self.learners[1].revive()
        assert code != 0
        return self.output(0).read_text()


def run_on_one_host(trio: TwoHosts, run_dir: Path, updates: int) -> Path:
    """Return the folder of a run whose two processes are on one host."""
    codes, texts = trio.finish(trio.config(run_dir), hosts=(0, 0))
    assert codes == [0, 0], texts
    assert [line["update"] for line in stats(run_dir)] == list(range(1, updates + 1))
    return run_dir
