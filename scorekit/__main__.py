"""Score files, fetch checkpoints and compare metrics with human judgements.

python -m scorekit score --url URL IN OUT; python -m scorekit fetch [MODEL...];
python -m scorekit meta-eval JUDGEMENTS OUT --metric NAME=URL"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from scorekit.client.files.score_command import score
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.metaeval.command import meta_eval

#: Models that the services load by default, by the environment variable that overrides them.
DEFAULT_MODELS = {
    "METRICX_MODEL": "google/metricx-24-hybrid-large-v2p6",
    "XCOMET_MODEL": "Unbabel/XCOMET-XL",
    "EMBEDDER_MODEL": "dragonkue/BGE-m3-ko",
}

app = typer.Typer(
    help="Score a file with a running service; tell how metrics agree with people; fetch the "
    "services' checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.command()(score)
app.command("meta-eval")(meta_eval)


@app.command()
def fetch(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Hub ids.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the one MODEL; default: its newest.")
    ] = None,
) -> None:
    """Bring checkpoints, with the tokenizers that they need, into HF_HOME ahead of time.

    Without a MODEL: what METRICX_MODEL, XCOMET_MODEL and EMBEDDER_MODEL name, else the services'
    defaults. Of an interrupted download the whole files
    stay.
    """
    from scorekit.hub import fetch_checkpoint, size_of

    with clean_exit(stopped="stopped; the same command goes on from there"):
        if revision is not None and len(models or ()) != 1:
            raise UserError("--revision: name the one model that it is a revision of")
        for model in models or [os.environ.get(n) or d for n, d in DEFAULT_MODELS.items()]:
            for name, folder in fetch_checkpoint(model, revision):
                typer.echo(f"{name}: {size_of(folder) / 1e9:.2f} GB in {folder}")


if __name__ == "__main__":
    app(prog_name="python -m scorekit")
