"""Draw the packages and their imports for docs/architecture.md, computed from the files.

`python -m tools.import_graph` draws them again. `tests/unit/test_import_graph.py` checks that
every file belongs to a box and that no boxes import each other in a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from scorekit.command import run_command

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: python -m tools.import_graph -->\n", "<!-- end of rooms -->\n"

#: System -> its rooms -> the modules and packages in them. The longest name that fits a file says
#: its room. A folder stands here in two rooms where its files stand both under others and over
#: them: what a run is asked, say, and the command that starts it.
HOUSE: dict[str, dict[str, str]] = {
    "scorekit": {
        "core": "scorekit",
        "text": "scorekit.text",
        "report, exit codes": "scorekit.report scorekit.command",
        "client": "scorekit.client",
        "retrieval": "scorekit.retrieval",
        "llm": "scorekit.llm",
        "adapters": "scorekit.adapters",
        "meta-evaluation": "scorekit.metaeval",
        "command": "scorekit.__main__",
    },
    "scorekit.server": {
        "settings, metrics": "scorekit.server.http",
        "backend, cache": "scorekit.server scorekit.server.http.answers",
        "queue": "scorekit.server.queue",
        "windows: parts": "scorekit.server.windows.merge",
        "windows": "scorekit.server.windows",
        "service": "scorekit.server.service scorekit.server.local",
        "app, http": "scorekit.server.app scorekit.server.fake "
        "scorekit.server.http.body scorekit.server.http.connection scorekit.server.http.middleware "
        "scorekit.server.http.run",
    },
    "services": {
        "metricx": "services.metricx services",
        "xcomet": "services.xcomet",
        "judge": "services.judge",
        "embedder": "services.embedder",
        "retriever": "services.retriever",
    },
    "trainer": {
        "config": "trainer",
        "rl": "trainer.rl",
        "runs": "trainer.runs",
        "checkpoints": "trainer.runs.checkpoints",
        "verbs": "trainer.runs.cli",
        "chat": "trainer.chat",
        "sft": "trainer.sft",
        "loop": "trainer.runs.learner trainer.runs.loop trainer.runs.artifacts",
        "command": "trainer.__main__",
    },
    "trainer.translation": {
        "data, prompts, offsets": "trainer.translation",
        "scores": "trainer.translation.rewards",
        "terms": "trainer.translation.rewards.component trainer.translation.rewards.components "
        "trainer.translation.rewards.span_penalties",
        "rewards": "trainer.translation.rewards.compute trainer.translation.rewards.services "
        "trainer.translation.rewards.screening trainer.translation.collect "
        "trainer.translation.dumps",
        "evaluation": "trainer.translation.evaluation",
        "train, check": "trainer.translation.train trainer.translation.check "
        "trainer.translation.commands trainer.translation.tables",
    },
    "trainer.roleplay": {
        "data, rewards": "trainer.roleplay",
        "evaluation": "trainer.roleplay.evaluation",
        "training, check": "trainer.roleplay.training trainer.roleplay.commands "
        "trainer.roleplay.__main__ trainer.roleplay.cli trainer.roleplay.calibration.command",
    },
    "trainer.search": {
        "records, data": "trainer.search",
        "sight": "trainer.search.images",
        "episode": "trainer.search.rollout",
        "answer": "trainer.search.answer",
        "reward": "trainer.search.reward",
        "trajectories": "trainer.search.trajectories",
        "figures": "trainer.search.evaluation.stats trainer.search.evaluation.episode_values "
        "trainer.search.evaluation",
        "config, neighbours, rounds": "trainer.search.config trainer.search.training.config "
        "trainer.search.data trainer.search.services trainer.search.local_policy "
        "trainer.search.episode_runner trainer.search.training.loading",
        "rows, curation": "trainer.search.curation trainer.search.training.sft_rows",
        "loop": "trainer.search.rounds",
        "ask, collect": "trainer.search.cli trainer.search.ask trainer.search.collect "
        "trainer.search.show",
        "evaluation": "trainer.search.evaluation.evaluate trainer.search.evaluation.run "
        "trainer.search.evaluation.candidates",
        "training, check": "trainer.search.training trainer.search.check "
        "trainer.search.upper_bounds trainer.search.commands",
    },
    "synth": {
        "config, record": "synth",
        "folder": "synth.storage",
        "sources": "synth.sources",
        "drive: services": "synth.execution.clients synth.execution.services "
        "synth.execution.coalescing synth.execution",
        "what a stage is": "synth.context synth.execution.stage_types synth.storage.stage_start "
        "synth.stages.cost synth.stages.settings",
        "stages": "synth.stages synth.storage.manifest synth.export.card",
        "export": "synth.export synth.report.reasons",
        "drive: processes": "synth.execution.driver synth.execution.processes "
        "synth.execution.cluster",
        "views, report": "synth.report synth.storage.location synth.storage.repair "
        "synth.storage.totals synth.storage.views",
        "command": "synth.run synth.pairs synth.preflight synth.__main__ synth.export.push "
        "synth_parallel",
    },
}
Arrows = dict[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the house, by its name."""
    tops = {
        name.split(".")[0]
        for rooms in HOUSE.values()
        for of in rooms.values()
        for name in of.split()
    }
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for top in sorted(tops)
        for path in sorted((root / top).rglob("*.py"))
    }


def room_of(module: str) -> str:
    """The room of a module, as `system/room`."""
    fits = [
        (len(name), f"{system}/{room}")
        for system, rooms in HOUSE.items()
        for room, names in rooms.items()
        for name in names.split()
        if module == name or module.startswith(name + ".")
    ]
    return max(fits)[1]


def imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of the house that a file imports, also under TYPE_CHECKING or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return found & known.keys()


def arrows() -> Arrows:
    """Room -> the rooms that its files import."""
    known = modules()
    found: Arrows = {f"{system}/{room}": set() for system, rooms in HOUSE.items() for room in rooms}
    for module, path in known.items():
        found[room_of(module)] |= {room_of(name) for name in imports(path, known)}
    return {room: others - {room} for room, others in found.items()}


def reduced(found: Arrows) -> Arrows:
    """Without the arrows that follow from others. Raises CycleError, which names the circle."""
    below: Arrows = {}
    for room in TopologicalSorter(found).static_order():
        below[room] = found[room].union(*(below[other] for other in found[room]))
    return {
        room: {other for other in others if not any(other in below[via] for via in others)}
        for room, others in found.items()
    }


def picture() -> str:
    """The rooms as a Mermaid chart, and what stands in those that are no whole folder."""
    keys = {
        f"{system}/{room}": f"{system.replace('.', '_')}_{number}"
        for system, rooms in HOUSE.items()
        for number, room in enumerate(rooms)
    }
    lines = ["```mermaid", "flowchart TB"]
    for system, rooms in HOUSE.items():
        lines.append(f'  subgraph {system.replace(".", "_")} ["{system}"]')
        lines += [f'    {keys[f"{system}/{room}"]}["{room}"]' for room in rooms]
        lines.append("  end")
    for room, others in reduced(arrows()).items():
        lines += [f"  {keys[room]} --> {keys[other]}" for other in sorted(others)]
    return "\n".join([*lines, "```", ""])


def drawn(text: str) -> str:
    """The document with the picture of today."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + picture() + END + rest.partition(END)[2]


def main() -> int:
    """Draw the picture into the document."""
    DOCUMENT.write_text(drawn(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
