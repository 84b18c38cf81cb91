"""The rules of the house: who may import whom, what stays light, whose names they are."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tools.import_graph import imports_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("scorekit", "services", "trainer", "synth", "synth_parallel")
#: May import everything; nothing of PACKAGES imports them.
ON_TOP = ("demo", "bench", "evidence", "testing", "tools", "examples", "tests")
HEAVY = (
    "torch",
    "transformers",
    "comet",
    "fastapi",
    "starlette",
    "uvicorn",
    "redis",
    "datasets",
    "trl",
    "ray",
    "pandas",
    "aiohttp",
    "jsonschema",
)


#: What the rooms of the trainer may import of it: the engine knows no run and no task, a run no
#: task, and no task another.
TRAINER = {
    "trainer.rl": ("trainer.config_base", "trainer.rl"),
    "trainer.runs": ("trainer.config_base", "trainer.rl", "trainer.runs"),
    "trainer.translation": (
        "trainer.config_base",
        "trainer.rl",
        "trainer.runs",
        "trainer.sft",
        "trainer.translation",
    ),
    "trainer.chat": ("trainer.config_base", "trainer.rl", "trainer.runs", "trainer.chat"),
    "trainer.sft": (
        "trainer.config_base",
        "trainer.rl",
        "trainer.runs",
        "trainer.chat",
        "trainer.sft",
    ),
    "trainer.search": (
        "trainer.config_base",
        "trainer.rl",
        "trainer.runs",
        "trainer.chat",
        "trainer.sft",
        "trainer.search",
    ),
    "trainer.roleplay": (
        "trainer.config_base",
        "trainer.rl",
        "trainer.runs",
        "trainer.chat",
        "trainer.sft",
        "trainer.roleplay",
    ),
}
#: The rooms of synth. Each may import itself and those before it; what is not listed, everything.
_ROOMS_OF_SYNTH = (
    "synth.reasons",
    "synth.filters",
    "synth.config_sections",
    "synth.config",
    "synth.cost",
    "synth.log",
    "synth.storage",
    "synth.record",
    "synth.context",
    "synth.sources",
    "synth.execution",
    "synth.export",
    "synth.stages",
    "synth.location",
    "synth.report",
)
SYNTH = {name: _ROOMS_OF_SYNTH[: i + 1] for i, name in enumerate(_ROOMS_OF_SYNTH)}
ROOMS = TRAINER | SYNTH
#: What opens a port for another program, and what it may import of the server for that.
OPENS_PORTS = ("scorekit/adapters", "trainer/search/environment")
SERVING = tuple(f"scorekit.server.{name}." for name in ("bridge", "connection"))
#: Lines that a file has at most: more than one thought stands in a longer one.
MAX_LINES = 800
FILES = {package: sorted((ROOT / package).rglob("*.py")) for package in (*PACKAGES, *ON_TOP)}


def _rule_unit(path: Path) -> str:
    """Return the unit that the rules are about.

    Each service is a unit, and so is each package of the server half, of the trainer and of synth.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    deep = parts[0] == "services" or parts[:2] == ("scorekit", "server")
    deep = deep or ".".join(parts[:2]) in ROOMS
    return ".".join(parts[:2] if deep else parts[:1])


@cache
def _imports(path: Path) -> set[str]:
    """Return the names of ours that a file imports."""
    names = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert not node.level, f"{path}: relative imports hide what is imported"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in (*PACKAGES, *ON_TOP)}


def _allowed(unit: str, imported: str) -> bool:
    top = imported.split(".")[0]
    if unit == "scorekit":
        return top == "scorekit" and not imported.startswith("scorekit.server")
    if unit == "scorekit.server":
        return top == "scorekit"
    if unit.startswith("services"):
        return top == "scorekit" or imported == unit or imported.startswith(unit + ".")
    is_own = top == unit or (unit, top) == ("synth_parallel", "synth")  # its other name
    is_own = is_own or any(imported.startswith(prefix + ".") for prefix in ROOMS.get(unit, ()))
    return is_own or (top == "scorekit" and not imported.startswith("scorekit.server"))


def _may_serve(path: Path, imported: str) -> bool:
    opens_ports = any(path.is_relative_to(ROOT / folder) for folder in OPENS_PORTS)
    return opens_ports and imported.startswith(SERVING)


def test_arrows_point_one_way():
    wrong = {
        str(path): names
        for package in PACKAGES
        for path in FILES[package]
        if (
            names := [
                name
                for name in _imports(path)
                if not _allowed(_rule_unit(path), name) and not _may_serve(path, name)
            ]
        )
    }
    assert not wrong, "these imports are forbidden"


#: Files that open HTTP connections themselves. All others call `scorekit/net/http_clients.py`, so
#: that proxies, certificates and passwords are the same everywhere.
_HTTP_CLIENTS = {
    "scorekit/net/http_clients.py": {"httpx"},
    "scorekit/llm/http.py": {"aiohttp"},  # asks scorekit/net/addresses.py for the proxy
    "scorekit/adapters/verifiers.py": {"openai"},  # that package's own environment
}
#: Calls that make a client, or ask without one, by package.
_OPENING_CALLS = {
    "httpx": {"Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport"}
    | {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream"},
    "aiohttp": {"ClientSession", "request"},
    "requests": {"Session", "get", "post", "put", "patch", "delete", "head", "request"},
    "urllib": {"urlopen", "build_opener"},
    "http": {"HTTPConnection", "HTTPSConnection"},
    "openai": {"OpenAI", "AsyncOpenAI"},
}


def _opened_by(path: Path) -> set[str]:
    """Return the HTTP packages of which a file makes clients, by the names that it imports."""
    text = path.read_text(encoding="utf-8")
    if not any(package in text for package in _OPENING_CALLS):
        return set()  # it imports none
    tree = ast.parse(text)
    package_by_name: dict[str, str] = {}
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                package_by_name[(alias.asname or alias.name).split(".")[0]] = top
        elif isinstance(node, ast.ImportFrom) and node.module:
            top = node.module.split(".")[0]
            package_by_name |= {alias.asname or alias.name: top for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else None
        while isinstance(function, ast.Attribute):
            function = function.value
        if isinstance(function, ast.Name) and function.id in package_by_name:
            package = package_by_name[function.id]
            if (name or function.id) in _OPENING_CALLS.get(package, ()):
                packages.add(package)
    return packages


def test_http_clients_are_made_in_one_place():
    opened = {
        str(path.relative_to(ROOT)): packages
        for folder in (*PACKAGES, "demo", "examples", "testing")
        for path in FILES[folder]
        if (packages := _opened_by(path))
    }
    assert opened == _HTTP_CLIENTS


def test_nothing_is_built_on_tests():
    wrong = [
        str(path)
        for package in ON_TOP
        if package != "tests"
        for path in FILES[package]
        if any(name.split(".")[0] == "tests" for name in _imports(path))
    ]
    assert not wrong, "these import tests"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_circle_of_files():
    """Check all imports, including those under TYPE_CHECKING and within functions."""
    files = {_module(path): path for paths in FILES.values() for path in paths}
    imports = {
        name: {
            target
            for imported in _imports(path)
            for target in (imported, imported.rpartition(".")[0])
            if target in files and target != name
        }
        for name, path in files.items()
    }
    order = TopologicalSorter(imports)
    order.prepare()  # CycleError names the circle


#: Derive from another project's classes: only its own processes import them.
_IN_PEERS = [
    ROOT / f"scorekit/adapters/{name}.py"
    for name in ("verl_tokens", "nemo_gym/server", "verifiers")
]
LIGHT_MODULES = sorted(
    _module(path)
    for path in (ROOT / "scorekit").rglob("*.py")
    if not path.is_relative_to(ROOT / "scorekit/server") and path not in _IN_PEERS
)


def test_the_contract_half_loads_nothing_heavy():
    code = (
        f"import {', '.join(LIGHT_MODULES)}, sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: What runs in another project's trainer: with nothing that its environment may lack or pin.
IN_TRAINERS = (
    "scorekit.client",
    "scorekit.rewards",
    "scorekit.credit",
    *(
        f"scorekit.adapters.{name}"
        for name in ("shared", "trl", "verl", "openrlhf", "slime", "prime_rl")
    ),
    "scorekit.adapters.nemo_gym.reward",
)


#: Imports each module in one process, and says which other distributions were loaded with it first.
_LOADED = f"""
import importlib, json, sys
for module in {IN_TRAINERS!r}:
    before = set(sys.modules)
    importlib.import_module(module)
    loaded = sys.modules.keys() - before
    print(json.dumps([module, sorted(loaded & {{*{HEAVY!r}, 'numpy', 'openai'}})]))
"""


@pytest.fixture(scope="module")
def loaded_by_module():
    command = [sys.executable, "-c", _LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("module", IN_TRAINERS)
def test_what_runs_in_a_trainer_imports_nothing_of_it(module, loaded_by_module):
    assert loaded_by_module[module] == []


@pytest.mark.parametrize(
    ("face", "names"),
    [
        (
            "scorekit.client",
            "EmbeddingModel Embeddings RemoteScorer Sample ScoringClient SyncScoringClient "
            "raise_for_failures resolve_scorer",
        ),
        (
            "scorekit.llm",
            "Choice LLMClient LLMCounts LLMError Message Sampling image_part parse_json text_part",
        ),
        (
            "scorekit.rewards",
            "ComponentResult CompositeReward GateResult RewardDefinition RewardResult "
            "SyncCompositeReward TokenRewards load_definition raise_for_missing token_rewards",
        ),
    ],
)
def test_users_import_these_names(face, names):
    module = importlib.import_module(face)
    assert sorted(module.__all__) == names.split()
    assert all(hasattr(module, name) for name in module.__all__)


#: Commands whose --help must answer at once.
COMMANDS = (
    "services.metricx",
    "services.xcomet",
    "services.judge",
    "trainer",
    "synth",
    "synth_parallel.cli",
    "scorekit",
)
#: Runs `--help` of each command in one process, and says what each loaded and how it ended.
_HELP = f"""
import json, runpy, sys
for module in {COMMANDS!r}:
    code = None
    sys.argv = [module, '--help']
    try: runpy.run_module(module, run_name='__main__')
    except SystemExit as e: code = e.code
    loaded = [m for m in ('torch', 'transformers', 'comet') if m in sys.modules]
    print('\\n' + json.dumps(['help of', module, code, loaded]))
"""


@pytest.fixture(scope="module")
def help_endings():
    """Return (exit code, heavy packages that are loaded) by command, after `--help` of each."""
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["help of"')]
    return {module: (code, loaded) for _, module, code, loaded in lines}


@pytest.mark.parametrize("module", COMMANDS)
def test_help_answers_without_torch(module, help_endings):
    code, loaded = help_endings[module]
    assert not code and loaded == []


def test_no_other_distribution_claims_our_package_names():
    owners = packages_distributions()
    for package in PACKAGES:
        assert set(owners.get(package, ["scorekit"])) == {"scorekit"}


def test_no_file_is_longer_than_one_reading():
    long = {
        str(path): num_lines
        for paths in FILES.values()
        for path in paths
        if (num_lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES
    }
    assert long == {}
