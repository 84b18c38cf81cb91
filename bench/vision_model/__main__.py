"""`python -m bench.vision_model`: a vision model of published sizes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.vision_model.sizes import MODELS, sizes_of, smaller
from scorekit.command import clean_exit

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")]
Override = Annotated[list[str] | None, typer.Option(help="section.key=value; repeatable.")]


@app.command()
def write(
    name: Name,
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    config_only: Annotated[
        bool, typer.Option(help="No weights: enough for `trainer check`.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
) -> None:
    """Write the folder of a model: random weights in bfloat16, true sizes and vocabulary."""
    from bench.vision_model.folder import write_config, write_model

    with clean_exit(stdout="log"):
        if config_only:
            write_config(sizes_of(name), to)
        else:
            typer.echo(f"{to}: {write_model(sizes_of(name), to, seed=seed):,} weights")


@app.command()
def run(
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    hidden: Annotated[
        int | None, typer.Option(help="A small model of this hidden size, for a trial.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Of the small model.")] = 2,
    sft_steps: Annotated[int, typer.Option(help="Updates of the cold start.")] = 160,
    sft_s: Annotated[float, typer.Option(help="Seconds after which it is ended.")] = 240.0,
    sft_batch: Annotated[int, typer.Option(help="Episodes of its updates.")] = 8,
    updates: Annotated[int, typer.Option(help="Updates of reinforcement.")] = 4,
    train_s: Annotated[float, typer.Option(help="Seconds after which it is ended.")] = 300.0,
    lora_updates: Annotated[int, typer.Option(help="Of a further run, with adapters.")] = 0,
    eval_limit: Annotated[int, typer.Option(help="Held-out questions.")] = 32,
    questions: Annotated[
        int | None, typer.Option(help="Questions of the scripted episodes; default: all.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="An index made before.")] = None,
    cold: Annotated[Path | None, typer.Option(help="Rows made before (cold/ of a run).")] = None,
    device: Annotated[str, typer.Option(help="misc.device of all commands.")] = "auto",
    rl: Override = None,
    sft: Override = None,
) -> None:
    """Teach the model the demo's search: scripted episodes, fine-tuning, GSPO, evaluation."""
    from bench.vision_model.run import RunOptions, VisionRun
    from testing.processes import exit_on_sigterm

    with clean_exit(stdout="log"):
        exit_on_sigterm()
        sizes = sizes_of(name)
        options = RunOptions(
            sft_steps=sft_steps,
            sft_s=sft_s,
            sft_batch=sft_batch,
            updates=updates,
            train_s=train_s,
            lora_updates=lora_updates,
            eval_limit=eval_limit,
            questions=questions,
            index=index,
            cold=cold,
            device=device,
            rl=tuple(rl or ()),
            sft=tuple(sft or ()),
        )
        VisionRun(smaller(sizes, hidden, layers) if hidden else sizes, out, options).run()


if __name__ == "__main__":
    app()
