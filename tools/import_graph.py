"""List the packages and their imports in docs/reference/code-map.md, computed from the files.

`python -m tools.import_graph` updates the table. `tests/unit/test_import_graph.py` checks that
every file belongs to a box and that the imports between boxes have no cycle.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from scorekit.command import run_command

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/reference/code-map.md"
BEGIN = "<!-- import graph: python -m tools.import_graph -->\n"
END = "<!-- end of import graph -->\n"

#: System -> box label -> the modules and packages in the box. The longest name that matches a
#: module decides its box. A package is split between two boxes if some of its modules import
#: another box that the rest of the package is imported by.
SYSTEMS: dict[str, dict[str, str]] = {
    "scorekit": {
        "core": "scorekit",
        "text": "scorekit.text",
        "report, exit codes": "scorekit.report scorekit.command scorekit.extras",
        "client": "scorekit.client",
        "rewards": "scorekit.rewards",
        "retrieval": "scorekit.retrieval",
        "paid answers": "scorekit.paid",
        "llm": "scorekit.llm",
        "adapters": "scorekit.adapters",
        "meta-evaluation": "scorekit.metaeval",
        "command": "scorekit.__main__ scorekit.lazy_commands scorekit.first_config",
    },
    "scorekit.server": {
        "settings, metrics": "scorekit.server.settings scorekit.server.metrics",
        "backend, cache": "scorekit.server",
        "connections, bridge": "scorekit.server.connection scorekit.server.drain "
        "scorekit.server.bridge scorekit.server.receive",
        "queue": "scorekit.server.batches scorekit.server.batcher scorekit.server.pools "
        "scorekit.server.tokenizers scorekit.server.windows",
        "service": "scorekit.server.service scorekit.server.local",
        "app, HTTP": "scorekit.server.app scorekit.server.fake scorekit.server.page "
        "scorekit.server.run",
    },
    "services": {
        "metricx": "services.metricx services",
        "xcomet": "services.xcomet",
        "judge": "services.judge",
        "embedder": "services.embedder",
        "retriever": "services.retriever",
        "reward model": "services.reward_model",
    },
    "trainer": {
        "names to import": "trainer",
        "config": "trainer.config_base trainer.tasks",
        "rl": "trainer.rl",
        "runs": "trainer.runs",
        "checkpoints": "trainer.runs.checkpoints",
        "evaluation": "trainer.runs.evaluation",
        "checks": "trainer.runs.checks",
        "chat": "trainer.chat",
        "sft": "trainer.sft",
        "loop": "trainer.runs.learner trainer.runs.loop trainer.runs.open "
        "trainer.runs.trl trainer.runs.artifacts trainer.runs.batches trainer.runs.results",
        "command": "trainer.__main__",
    },
    "trainer.translation": {
        "data, prompts, offsets": "trainer.translation",
        "scores": "trainer.translation.rewards",
        "rewards": "trainer.translation.rewards.services trainer.translation.rewards.screening "
        "trainer.translation.rewards.sample_reward trainer.translation.rewards.stats "
        "trainer.translation.collect "
        "trainer.translation.dumps",
        "evaluation": "trainer.translation.evaluation",
        "train, check": "trainer.translation.train trainer.translation.check "
        "trainer.translation.commands trainer.translation.best_of_n",
        "samples, headroom": "trainer.translation.best_of_n.candidates "
        "trainer.translation.best_of_n.headroom trainer.translation.best_of_n.headroom_run "
        "trainer.translation.best_of_n.replies",
    },
    "trainer.roleplay": {
        "data, rewards": "trainer.roleplay",
        "evaluation": "trainer.roleplay.evaluation",
        "training, check": "trainer.roleplay.training trainer.roleplay.commands "
        "trainer.roleplay.__main__ trainer.roleplay.cli trainer.roleplay.calibrate",
    },
    "trainer.search": {
        "config, records, data": "trainer.search trainer.search.answer.config",
        "images": "trainer.search.images",
        "rollout": "trainer.search.rollout",
        "answer": "trainer.search.answer",
        "reward": "trainer.search.reward",
        "trajectories": "trainer.search.trajectories",
        "stats": "trainer.search.evaluation",
        "services": "trainer.search.services trainer.search.training.loading",
        "environment": "trainer.search.environment",
        "rows, curation": "trainer.search.steps trainer.search.importers",
        "rounds": "trainer.search.rounds",
        "ask, collect": "trainer.search.cli trainer.search.ask trainer.search.collect",
        "evaluation": "trainer.search.evaluation.run",
        "training, check": "trainer.search.training trainer.search.check trainer.search.commands",
    },
    "synth": {
        "config, reasons": "synth",
        "storage": "synth.storage",
        "results of a record": "synth.record",
        "sources": "synth.sources",
        "execution": "synth.execution",
        "export": "synth.export",
        "stages": "synth.stages",
        "report": "synth.report synth.location",
        "command": "synth.run synth.pairs synth.preflight synth.repair synth.__main__ "
        "synth_parallel",
    },
}
ImportsByBox = dict[str, set[str]]


def find_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return path by name for every module of the systems."""
    top_packages = {
        name.split(".")[0]
        for boxes in SYSTEMS.values()
        for names in boxes.values()
        for name in names.split()
    }
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in sorted(top_packages)
        for path in sorted((root / package).rglob("*.py"))
    }


def box_of(module: str) -> str:
    """Return the box of a module, as `system/box`."""
    matches = [
        (len(name), f"{system}/{box}")
        for system, boxes in SYSTEMS.items()
        for box, names in boxes.items()
        for name in names.split()
        if module == name or module.startswith(name + ".")
    ]
    return max(matches)[1]


@cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, also under TYPE_CHECKING or in a function.

    A file has twenty times as many nodes as statements, and expressions hold no import.
    """
    imports = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, ())
    return imports


def imported_modules(path: Path, path_by_module: Mapping[str, Path]) -> set[str]:
    """Return our modules that a file imports, also under TYPE_CHECKING or in a function."""
    imported = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        else:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in path_by_module else str(node.module) for name in names}
    return imported & path_by_module.keys()


@cache
def imports_by_box() -> ImportsByBox:
    """Return, for each box, the other boxes that its files import."""
    path_by_module = find_modules()
    imports: ImportsByBox = {
        f"{system}/{box}": set() for system, boxes in SYSTEMS.items() for box in boxes
    }
    for module, path in path_by_module.items():
        imports[box_of(module)] |= {box_of(name) for name in imported_modules(path, path_by_module)}
    return {box: imported - {box} for box, imported in imports.items()}


def without_indirect(imports: ImportsByBox) -> ImportsByBox:
    """Remove the imports that follow from other imports.

    Raises CycleError, which names the cycle, if boxes import each other.
    """
    reachable: ImportsByBox = {}
    for box in TopologicalSorter(imports).static_order():
        reachable[box] = imports[box].union(*(reachable[other] for other in imports[box]))
    return {
        box: {other for other in imported if not any(other in reachable[via] for via in imported)}
        for box, imported in imports.items()
    }


def import_table() -> str:
    """Return a Markdown table: each box, and what it imports directly.

    A box of another system has that system's name before its own.
    """
    lines = ["| package | part | imports directly |", "|---|---|---|"]
    for box, imported in without_indirect(imports_by_box()).items():
        system, _, label = box.partition("/")
        names = [
            other.removeprefix(f"{system}/").replace("/", ": ")
            for other in sorted(imported, key=lambda other: (other.split("/")[0] != system, other))
        ]
        lines.append(f"| `{system}` | {label} | {'; '.join(names)} |")
    return "\n".join(["", *lines, "", ""])


def with_current_table(text: str) -> str:
    """Return the document's text with the table computed from the current files."""
    before, _, after = text.partition(BEGIN)
    return before + BEGIN + import_table() + END + after.partition(END)[2]


def main() -> int:
    """Update the table in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_current_table(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
