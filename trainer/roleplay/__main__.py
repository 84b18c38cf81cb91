"""python -m trainer.roleplay FLAGS: GRPO with the five rewards, started as TRL's scripts are.

--model_name M --train_data D [--eval_data E] --output_dir RUN_DIR [--use_lora] [--load_in_4bit]
[--bf16] [--reward_embedding_model URL|FOLDER] ...; any option of TRL's GRPOConfig is a flag, too.

--resume        resume the run in --output_dir
--print_config  print the flags as YAML, for `scorekit train --config`
--help          print this text; docs/how-to/train-roleplay.md has the table of flags
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import sys
from pathlib import Path

import yaml

from scorekit.command import clean_exit
from scorekit.config import check_config
from scorekit.errors import UserError
from trainer.runs.messages import show_messages


def main(flags: list[str]) -> int:
    """Run with these flags, and return the exit code."""
    if not flags or {"--help", "-h"} & {*flags}:
        print(__doc__)
        return 0
    from trainer.roleplay.config import RoleplayConfig
    from trainer.roleplay.training.flags import config_of

    switches = {"--resume", "--print_config"}
    data = config_of([flag for flag in flags if flag not in switches])
    cfg = check_config(RoleplayConfig, data, "flags")
    if "--print_config" in flags:
        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
        return 0
    for flag, value in (("model_name", cfg.policy.path), ("train_data", cfg.data.train)):
        if value is None:
            raise UserError(f"--{flag}: required")
    if "run_dir" not in data.get("misc", {}):
        raise UserError("--output_dir: required. Name the folder of the run")
    Path(cfg.misc.run_dir).parent.mkdir(parents=True, exist_ok=True)
    from trainer.roleplay import commands

    return commands.train(cfg, resume="--resume" in flags)


if __name__ == "__main__":
    show_messages()
    prints_result = {"--help", "-h", "--print_config"} & {*sys.argv[1:]}
    with clean_exit(
        stopped="stopped (resume with --resume)", stdout="result" if prints_result else "log"
    ):
        sys.exit(main(sys.argv[1:]))
