"""Command-line functions of the SFT task, and `scorekit sft` with flags for common keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.config import check_config, read_config
from scorekit.errors import UserError
from scorekit.report.render import visible
from trainer.sft.config import SftConfig
from trainer.sft.config import SftConfig as Config

if TYPE_CHECKING:
    from trainer.sft.prepare import SftPart
    from trainer.sft.rows import SftRow


def train(cfg: SftConfig, *, resume: bool) -> int:
    """Train on the rows, and measure the loss on held-out ones before, between and after."""
    from trainer.runs.config import DEFAULT_EVAL_SET
    from trainer.runs.results import comparison_table, print_results
    from trainer.sft.run import run_sft
    from trainer.sft.stats import TABLE, write_report

    artifacts = run_sft(cfg, resume=resume)
    return print_results(
        artifacts,
        DEFAULT_EVAL_SET,
        lambda before, after: comparison_table(TABLE, before, after),
        write_report,
    )


def evaluate(cfg: SftConfig, against: str | None, *, overwrite: bool) -> int:
    """Raise UserError: what a model writes is evaluated by the task that it is for."""
    raise UserError(
        "SFT writes its loss on data.eval to eval.jsonl. To compare what models write, evaluate "
        "them with their task (scorekit evaluate --config configs/roleplay/...)"
    )


def check(cfg: SftConfig, processes: int) -> int:
    """Check rows, template and options, before any weights are loaded."""
    return debug(cfg, processes, memory=True)


def reward(cfg: SftConfig) -> int:
    """Raise UserError: supervised training has no reward."""
    raise UserError("task: sft: it learns from given answers, and has no reward")


def report(run_dir: Path) -> int:
    """Write the page of a run, finished or not."""
    from trainer.sft.stats import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


def debug(cfg: SftConfig, processes: int = 1, *, memory: bool = False) -> int:
    """Print the labels of the rows, the findings of the template check and the sizes of an update
    of so many processes; 2 if the check fails.

    memory: also print what each process needs.
    """
    import torch

    from trainer.rl.policy import check_4bit, check_adapters
    from trainer.sft.prepare import load_held_out, load_train
    from trainer.sft.run import open_tokenizer, update_text
    from trainer.sft.trainer import sft_arguments

    check_4bit(cfg.policy)
    tokenizer = open_tokenizer(cfg)
    check_adapters(cfg.policy, trl=True)
    train, held_out = load_train(cfg, tokenizer), load_held_out(cfg, tokenizer)
    print_label_masks(Console(), tokenizer, train)
    sft_arguments(cfg, torch.device("cpu"))
    typer.echo(update_text(cfg, len(train.rows), processes))
    if memory:
        lengths = [len(row.ids) for row in train.rows]
        for name, text in zip(("memory", "time"), _needs(cfg, lengths, processes), strict=True):
            typer.echo(f"{name}: {text}")
    findings = [*train.findings, *held_out.findings]
    has_errors = any(not finding.ok for finding in findings)
    return 2 if has_errors and cfg.sft.template_check == "refuse" else 0


def _needs(cfg: SftConfig, lengths: Sequence[int], processes: int) -> tuple[str, str]:
    """Return the memory of each process, and the work of an update. Raises UserError.

    lengths: of the rows in tokens.
    """
    from trainer.runs.checks import check_device, check_model
    from trainer.runs.memory import estimate_trl_memory, memory_text
    from trainer.runs.trl.processes import update_size
    from trainer.runs.work import update_work

    device, _ = check_device(cfg.misc)
    model, _ = check_model(cfg.policy, cfg.policy.path, "policy.path", trl=True)
    packed = cfg.data.max_length if cfg.sft.packing else None
    tokens = cfg.sft.per_device_train_batch_size * (packed or max(lengths))
    unsharded, sharded = (
        estimate_trl_memory(cfg, model, tokens, shards=shards) for shards in (1, processes)
    )
    work = update_work(cfg, model, [packed] if packed else lengths, update_size(cfg.sft, 1))
    return memory_text(unsharded, sharded, device, processes), work.text()


#: Number of rows that are printed.
_ROWS = 3


def print_label_masks(console: Console, tokenizer: Any, part: SftPart) -> None:
    """Print the first rows with their labels, token counts, and the findings of the template check.

    Each row has a table with the first and last tokens of each turn.
    """
    from trainer.chat.show import print_conversation, print_findings

    for row in part.rows[:_ROWS]:
        print_conversation(console, tokenizer, row.location, row.ids, row.mask)
        console.print(_ends(tokenizer, row))
    counts = part.counts
    summary = (
        f"{counts['rows']} rows, {counts['tokens']} tokens, {counts['learned_tokens']} labelled"
    )
    console.print(Text(summary), soft_wrap=True)
    for reason, number in part.left_out.items():
        console.print(Text(f"{number} rows: {reason}"), soft_wrap=True)
    print_findings(console, part.findings)


def _ends(tokenizer: Any, row: SftRow) -> Table:
    """Return a table with the tokens before, at and after the ends of each labeled run."""
    from trainer.sft.rows import actions

    table = Table("tokens", "before", "first", "last", "behind")
    for begin, end in actions(row.mask):
        positions = (begin - 1, begin, end - 1, end)
        texts = [
            repr(tokenizer.decode([row.ids[position]])) if 0 <= position < len(row.ids) else ""
            for position in positions
        ]
        table.add_row(f"{begin}-{end - 1}", *(Text(visible(text)) for text in texts))
    return table


# -- scorekit sft ----------------------------------------------------------------------------------


#: Default rank of the adapters with `--use_lora`.
LORA_R = 16
#: Flag -> its config key.
KEYS = {
    "model_name": "policy.path",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "output_dir": "misc.run_dir",
    "max_length": "data.max_length",
    "learning_rate": "sft.learning_rate",
    "num_train_epochs": "sft.num_train_epochs",
    "per_device_train_batch_size": "sft.per_device_train_batch_size",
    "gradient_accumulation_steps": "sft.gradient_accumulation_steps",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "load_in_4bit": "policy.load_in_4bit",
}


def _option(name: str, help: str | None = None) -> Any:
    return typer.Option(f"--{name}", help=help or KEYS[name])


ConfigFile = Annotated[Path | None, typer.Option("--config", help="The run's config (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]


def sft(
    config: ConfigFile = None,
    set_: Overrides = None,
    model_name: Annotated[str | None, _option("model_name")] = None,
    train_data: Annotated[str | None, _option("train_data")] = None,
    eval_data: Annotated[str | None, _option("eval_data")] = None,
    output_dir: Annotated[str | None, _option("output_dir")] = None,
    max_length: Annotated[int | None, _option("max_length")] = None,
    learning_rate: Annotated[float | None, _option("learning_rate")] = None,
    num_train_epochs: Annotated[float | None, _option("num_train_epochs")] = None,
    per_device_train_batch_size: Annotated[
        int | None, _option("per_device_train_batch_size")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None, _option("gradient_accumulation_steps")
    ] = None,
    gradient_checkpointing: Annotated[bool, _option("gradient_checkpointing")] = False,
    load_in_4bit: Annotated[bool, _option("load_in_4bit")] = False,
    bf16: Annotated[bool, _option("bf16", "misc.dtype=bfloat16")] = False,
    use_lora: Annotated[bool, _option("use_lora", f"policy.lora.r={LORA_R}, if it is 0")] = False,
    resume: Annotated[bool, _option("resume", "Resume the run in misc.run_dir.")] = False,
    debug_label_mask: Annotated[
        bool, _option("debug_label_mask", "Print the labels of the first rows.")
    ] = False,
    debug_only: Annotated[
        bool, _option("debug_only", "Then exit: 2 if the template check fails.")
    ] = False,
) -> None:
    """Train on conversations, or ids with a mask, on TRL's SFTTrainer.

    Exit code 2: an error of the config, data or chat template. 143, 130: SIGTERM or Ctrl-C ended
    the run, after an update and with its checkpoint; --resume continues.
    """
    flags = locals()
    data = _with_flags(read_config(config, set_), flags)
    cfg = check_config(SftConfig, data, config or "flags")
    if debug_label_mask or debug_only:
        code = debug(cfg)
        if debug_only:
            raise typer.Exit(code)
    raise typer.Exit(train(cfg, resume=resume))


def _with_flags(data: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values, overridden by those of the flags."""
    values = {key: flags[name] for name, key in KEYS.items() if flags[name] not in (None, False)}
    if flags["bf16"]:
        values["misc.dtype"] = "bfloat16"
    for key, value in values.items():
        section, _, name = key.partition(".")
        data[section] = {**(data.get(section) or {}), name: value}
    if flags["use_lora"]:
        policy = data.setdefault("policy", {})
        lora = policy.get("lora") or {}
        policy["lora"] = lora | {"r": lora.get("r") or LORA_R}
    return data


__all__ = ["Config", "check", "debug", "evaluate", "report", "sft", "train"]
