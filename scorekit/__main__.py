"""The command `scorekit`, also `python -m scorekit`: everything that this project can do."""

from __future__ import annotations

import sys
from pathlib import Path

from scorekit.interrupts import end_at_once

if __name__ == "__main__" or Path(sys.argv[0]).name == "scorekit":
    end_at_once()  # at Ctrl-C during the imports below

import os
from typing import Annotated

import typer

from scorekit import __version__, commit
from scorekit.command import clean_exit, run_app
from scorekit.errors import UserError
from scorekit.lazy_commands import Entry, lazy_group

#: Models that the services load by default, by the environment variable that overrides them.
DEFAULT_MODELS = {
    "METRICX_MODEL": "google/metricx-24-hybrid-large-v2p6",
    "XCOMET_MODEL": "Unbabel/XCOMET-XL",
    "EMBEDDER_MODEL": "dragonkue/BGE-m3-ko",
    "REWARD_MODEL_MODEL": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
}
_SCORES, _SERVERS = "Scores", "Services"
_TRAINING, _DATA = "Training", "Data"
_TRAINER = "trainer.__main__:app"
#: The packages are named, not imported: each may need an extra that is not installed.
COMMANDS = {
    "score": Entry(
        "scorekit.client.files.score_command:score",
        "Score a file with a running service.",
        _SCORES,
    ),
    "show": Entry(
        "scorekit.client.files.show_command:show",
        "Show the rows of a scored file with the worst scores, errors marked.",
        _SCORES,
    ),
    "compare": Entry(
        "scorekit.client.files.compare_command:compare",
        "Tell by a paired bootstrap which of two systems has better scores.",
        _SCORES,
    ),
    "meta-eval": Entry(
        "scorekit.metaeval.command:meta_eval",
        "Tell how metrics agree with human judgements.",
        _SCORES,
    ),
    "ingest": Entry(
        "services.retriever.command:app",
        "Make an index of document pages for the retriever.",
        _SERVERS,
    ),
    "train": Entry(f"{_TRAINER} train", "Train a policy with rewards of services.", _TRAINING),
    "sft": Entry(f"{_TRAINER} sft", "Train on conversations, or ids with a mask.", _TRAINING),
    "evaluate": Entry(f"{_TRAINER} evaluate", "Score a policy on held-out examples.", _TRAINING),
    "headroom": Entry(
        f"{_TRAINER} headroom",
        "Tell before training what there is to gain by choosing among samples.",
        _TRAINING,
    ),
    "check": Entry(
        f"{_TRAINER} check",
        "Check everything that a training run needs, before any weights are loaded.",
        _TRAINING,
    ),
    "export": Entry(
        f"{_TRAINER} export", "Write a checkpoint as a plain Hugging Face folder.", _TRAINING
    ),
    "report": Entry(f"{_TRAINER} report", "Write report.html of a run.", _TRAINING),
    "reward": Entry(
        f"{_TRAINER} reward", "Print the reward of a run or config as a definition.", _TRAINING
    ),
    "template-check": Entry(
        f"{_TRAINER} template-check",
        "Check that a chat template labels the assistant's turns correctly.",
        _TRAINING,
    ),
    "roleplay": Entry(
        "trainer.roleplay.cli:app", "Role-play: its data, and the anchors of its rewards.", _DATA
    ),
    "search": Entry(
        "trainer.search.cli:app",
        "Search: episodes of a policy that looks for evidence in document pages.",
        _DATA,
    ),
    "init": Entry(
        "scorekit.first_config:init", "Write a config for your data: three keys to change.", _DATA
    ),
    "synth": Entry(
        "synth.__main__:app",
        "Synthetic parallel data from MADLAD-400, a teacher and MetricX.",
        _DATA,
    ),
}
SERVICES = {
    name: Entry(f"{package}.__main__:run", help, settings=f"{package}.settings:{settings}")
    for name, settings, help in (
        ("metricx", "MetricXSettings", "Score translations with MetricX-24."),
        (
            "xcomet",
            "XCometSettings",
            "Score translations and find their error spans with xCOMET or COMET.",
        ),
        (
            "judge",
            "JudgeSettings",
            "Score answers with a language model as a judge, or with rules.",
        ),
        ("embedder", "EmbedderSettings", "Embed texts, and compare them."),
        ("retriever", "RetrieverSettings", "Find pages of an index."),
        (
            "reward-model",
            "RewardModelSettings",
            "Score conversations and texts with any reward model.",
        ),
    )
    for package in [f"services.{name.replace('-', '_')}"]
}
ADAPTERS = {
    "openrlhf": Entry("scorekit.adapters.openrlhf:app", "Serve rewards to OpenRLHF and slime."),
    "gemmax": Entry("scorekit.adapters.gemmax:app", "Serve scores to gemmax."),
}

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(
    typer.Typer(cls=lazy_group(SERVICES), callback=lambda: None, no_args_is_help=True),
    name="serve",
    help="Serve a model over HTTP: scorekit serve NAME [OPTIONS].",
    rich_help_panel=_SERVERS,
)
app.add_typer(
    typer.Typer(cls=lazy_group(ADAPTERS), callback=lambda: None, no_args_is_help=True),
    name="adapter",
    help="Serve rewards in the form that another trainer asks for.",
    rich_help_panel=_SERVERS,
)


def _print_version(value: bool) -> None:
    if value:
        commit_note = f" ({name})" if (name := commit()) else ""
        typer.echo(f"scorekit {__version__}{commit_note}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Scores and rewards from models that run as services, and training with them."""


@app.command(rich_help_panel=_SERVERS)
def fetch(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Hub ids.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the one MODEL; default: its newest.")
    ] = None,
) -> None:
    """Bring checkpoints, with the tokenizers that they need, into HF_HOME ahead of time.

    Without a MODEL: what METRICX_MODEL, XCOMET_MODEL, EMBEDDER_MODEL and REWARD_MODEL_MODEL name,
    else the services' defaults. Of an interrupted download the whole files stay.
    """
    from scorekit.hub import fetch_checkpoint, size_of

    with clean_exit(stopped="stopped; the same command goes on from there", stdout="log"):
        if revision is not None and len(models or ()) != 1:
            raise UserError("--revision: name the one model that it is a revision of")
        for model in models or [os.environ.get(n) or d for n, d in DEFAULT_MODELS.items()]:
            for name, folder in fetch_checkpoint(model, revision):
                typer.echo(f"{name}: {size_of(folder) / 1e9:.2f} GB in {folder}")


def main() -> None:
    """Run the command `scorekit`.

    It finds functions in files of the current folder (`--ocr mine:text`), as `python -m` does; but
    it looks there last, so that no file hides a package of ours, nor where these are a checkout.
    """
    sys.path += [str(Path(__file__).parents[1]), ""]
    run_app(app)


if __name__ == "__main__":
    run_app(app, prog_name="python -m scorekit")
