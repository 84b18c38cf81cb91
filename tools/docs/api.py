"""Pages of the Python API: each names modules, whose docstrings mkdocstrings reads statically."""

from __future__ import annotations

#: Page -> title, introduction, modules. A package shows what its `__init__` exports.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "client": ("Clients of the services", "", ("scorekit.client",)),
    "rewards": ("Composite rewards", "", ("scorekit.rewards",)),
    "credit": ("Rewards of tokens", "", ("scorekit.credit",)),
    "schemas": ("Samples and results", "", ("scorekit.schemas",)),
    "errors": ("Error classes", "", ("scorekit.errors",)),
    "adapters": (
        "Adapters for other trainers",
        "Each module has the interface that one trainer expects.",
        (
            "scorekit.adapters.shared",
            "scorekit.adapters.trl",
            "scorekit.adapters.trl_tokens",
            "scorekit.adapters.verl",
            "scorekit.adapters.verl_tokens",
            "scorekit.adapters.verl_run",
            "scorekit.adapters.openrlhf",
            "scorekit.adapters.slime",
            "scorekit.adapters.nemo_gym",
            "scorekit.adapters.verifiers",
            "scorekit.adapters.prime_rl",
            "scorekit.adapters.gemmax",
        ),
    ),
    "search-environment": (
        "Search environment",
        "",
        (
            "trainer.search.environment.environment",
            "trainer.search.environment.observation",
            "trainer.search.environment.services",
            "trainer.search.environment.trl_tools",
            "trainer.search.environment.openenv_client",
            "trainer.search.environment.openenv_types",
            "trainer.search.environment.verifiers_taskset",
        ),
    ),
    "algorithms": (
        "Algorithms of reinforcement learning",
        "What an algorithm defines.",
        ("trainer.rl.algorithms.algorithm", "trainer.rl.loss", "trainer.rl.algorithms.algorithm"),
    ),
}


def api_pages() -> dict[str, str]:
    """Return every page of the Python API, by file name."""
    pages = {}
    for name, (title, intro, modules) in PAGES.items():
        blocks = "\n\n".join(f"::: {module}" for module in modules)
        pages[f"{name}.md"] = "\n\n".join(part for part in (f"# {title}", intro, blocks) if part)
    return pages
