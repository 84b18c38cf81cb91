"""Trains and measures the runs of a plan against both demo services over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common import ROOT, machine, write_json
from evidence.seeds import run_logged
from evidence.translation.arms import CONFIG, HELD_OUT, Arm, Plan, overrides
from scorekit.client import SyncScoringClient
from testing.processes import running_services, serving


class Bench:
    """The services, the held-out sources, and the runs of a plan."""

    def __init__(self, plan: Plan, urls: dict[str, str]) -> None:
        from evidence.translation.measure import Measure, Probe
        from scorekit.config import load_config
        from trainer.translation.config import TranslationConfig
        from trainer.translation.data import load_examples

        self.plan, self.urls = plan, urls
        self.console = Console(stderr=True)
        true_urls = [f"reward.{name}_urls={urls[name]}" for name in ("metricx", "xcomet")]
        # weight 1, so that what is measured is the unweighted penalty of a token
        reward_settings = ["reward.w_xcomet_span=1", "reward.guards.shown=true"]
        if plan.omissions:
            reward_settings += [f"reward.urls={{judge: {urls['judge']}}}", "reward.w_omission=1"]
        cfg = load_config(TranslationConfig, CONFIG, [*plan.settings, *true_urls, *reward_settings])
        self.measure = Measure(cfg, load_examples(HELD_OUT, limit=plan.limit))
        path = plan.folder / "probe.jsonl"
        probe = Probe.load(path)
        if probe is None:
            probe = self.measure.make_probe()
            probe.save(path)
        self.probe = probe
        start = plan.folder / "start.json"
        if not start.is_file():
            self.measure.checkpoint(str(cfg.policy.path), self.probe, start)

    def run(self, name: str, seed: int) -> None:
        """Train one run, unless it stands on disk."""
        folder, arm = self.plan.folder / f"{name}-{seed}", self.plan.arms[name]
        settings = overrides(arm, seed, folder, self.plan)
        done = folder / "trained.json"
        if done.is_file() and json.loads(done.read_text())["settings"] == settings:
            return
        self.console.print(f"[bold]{arm.title}[/], seed {seed}: {self.plan.updates} updates")
        log = self.plan.folder / f"{name}-{seed}.log"
        with self._urls(arm, seed) as urls:
            named = {f"{name.upper()}_URL": url for name, url in urls.items()}
            seconds = run_logged("trainer", CONFIG, settings, log, named)
        for state in folder.glob("checkpoints/*/optimizer.pt"):
            state.unlink()
        done.write_text(json.dumps({"settings": settings, "seconds": seconds}), encoding="utf-8")
        self.console.print(f"  trained in {seconds:.0f} s")

    def measure_run(self, name: str, seed: int, updates: Sequence[int]) -> None:
        """Measure the checkpoints of a run that were not yet."""
        folder = self.plan.folder / f"{name}-{seed}"
        for update in updates:
            out = folder / f"measured-{update:06d}.json"
            checkpoint = folder / f"checkpoints/step-{update:06d}"
            trained = folder / "trained.json"
            if not out.is_file() or out.stat().st_mtime < trained.stat().st_mtime:
                self.measure.checkpoint(checkpoint, self.probe, out)

    @contextlib.contextmanager
    def _urls(self, arm: Arm, seed: int) -> Iterator[dict[str, str]]:
        if not arm.shuffled:
            yield self.urls
            return
        from evidence.translation.control import shuffled

        with shuffled(self.urls, self.probe.texts, seed) as urls:
            yield urls


def run_plan(plan: Plan, out: Path, summarise: Callable[[Plan], dict[str, Any]]) -> None:
    """Run and measure all runs of a plan; write what `summarise` makes of them after each."""
    before = machine()
    plan.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        models = {name: str(ROOT / f"demo/models/{name}") for name in ("metricx", "xcomet")}
        flags = {name: ("--model", model) for name, model in models.items()}
        urls = stack.enter_context(running_services(plan.folder, flags))
        if plan.omissions:
            urls["judge"] = stack.enter_context(_omission_teller())
        bench = Bench(plan, urls)
        for index, updates in enumerate(plan.measured):
            for name, seed in plan.runs:
                bench.run(name, seed)
                bench.measure_run(name, seed, updates)
                if index == 0:
                    write_json(out, {"machine": before, **summarise(plan)})
    write_json(out, {"machine": before, **summarise(plan)})


@contextlib.contextmanager
def _omission_teller() -> Iterator[str]:
    """Serve the stand-in judge, which knows the references of the training and held-out
    sources.
    """
    from evidence.translation.omissions import OmissionTeller
    from scorekit.server.app import create_app
    from scorekit.server.settings import ServiceSettings
    from trainer.translation.data import load_examples

    examples = [*load_examples(ROOT / "demo/data/rl_prompts.jsonl"), *load_examples(HELD_OUT)]
    reference_by_source = {
        example.src_text: example.ref_text for example in examples if example.ref_text
    }
    with serving(
        create_app(OmissionTeller(reference_by_source), ServiceSettings(cache="memory"))
    ) as url:
        with SyncScoringClient(url) as client:
            client.wait_ready()
        yield url
