"""Test SFT runs: training, logs, checkpoints, resume and export."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scorekit.config import save_config
from scorekit.errors import UserError
from testing.servers import wait_until
from tests.kits.forked import Command, completed
from tests.kits.trainer.chat import CHATML, byte_tokenizer, template_text
from tests.kits.trainer.sft import dialogues, save_chat_model, sft_config, write_rows
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.chat.template_check import has_markers, mark_texts
from trainer.rl import policy
from trainer.runs.checkpoints.export import export_policy
from trainer.runs.run_log import read_jsonl
from trainer.sft.commands import debug
from trainer.sft.config import SftConfig
from trainer.sft.prepare import load_train
from trainer.sft.run import run_sft

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
#: transformers 4.57 logs a loss of four digits.
ROUNDED = 6e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", dialogues(12))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


def mean_loss(folder: Path, cfg: SftConfig) -> float:
    """Compute the mean of -log p over all trained tokens by hand."""
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    part = load_train(cfg, AutoTokenizer.from_pretrained(folder))
    losses = []
    with torch.no_grad():
        for row in part.rows:
            logprobs = network(torch.tensor([row.ids])).logits[0].log_softmax(-1)
            for position in range(1, len(row.ids)):
                if row.mask[position]:
                    losses.append(-logprobs[position - 1, row.ids[position]].item())
    return sum(losses) / len(losses)


def test_the_loss_is_the_mean_over_learned_tokens_whatever_the_batches(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Use rows of other lengths in two passes: tokens have equal weights, not rows or passes."""
    first = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    cfg = sft_config(
        model, rows, tmp_path / "run", sft=first, data={"eval": str(rows)}, eval={"batch_size": 5}
    )
    run_sft(cfg)
    expected_loss = mean_loss(model, cfg)
    assert read_jsonl(tmp_path / "run/log.jsonl")[0]["loss"] == pytest.approx(
        expected_loss, abs=ROUNDED
    )
    before, after = read_jsonl(tmp_path / "run/eval.jsonl")
    assert before["loss"] == pytest.approx(expected_loss, abs=1e-5)
    assert after["loss"] < before["loss"]


def test_a_model_that_knows_nothing_has_the_logarithm_of_its_vocabulary(
    rows: Path, tmp_path: Path
) -> None:
    folder = save_chat_model(tmp_path / "flat")
    network = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(network.get_output_embeddings().weight)
    network.save_pretrained(folder)
    vocabulary = network.config.vocab_size
    cfg = sft_config(folder, rows, tmp_path / "run", sft={"max_steps": 1})
    run_sft(cfg)
    (line,) = read_jsonl(tmp_path / "run/log.jsonl")
    assert line["loss"] == pytest.approx(torch.tensor(vocabulary).log().item(), abs=ROUNDED)


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Kill it after the first pass over the rows, in the middle of the second."""
    sections: dict[str, Any] = {
        "sft": {"num_train_epochs": 3, "warmup_steps": 2},
        "data": {"eval": str(rows)},
        "eval": {"eval_every_n_updates": 4},
    }
    uninterrupted_cfg = sft_config(model, rows, tmp_path / "whole", **sections)
    run_sft(uninterrupted_cfg)
    cfg = sft_config(model, rows, tmp_path / "killed", **sections, misc={"save_every_n_updates": 1})
    save_config(cfg, tmp_path / "config.yaml")
    arguments = ("sft", "--config", str(tmp_path / "config.yaml"))
    command = Command("trainer", *arguments, environment=ENVIRONMENT)
    checkpoint = tmp_path / "killed/checkpoints/step-000005/state.json"
    wait_until(lambda: checkpoint.exists() or command.poll() is not None)
    command.kill()
    command.communicate()
    result = completed("trainer", *arguments, "--resume", environment=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    first, second = (
        weights(tmp_path / run / "checkpoints/step-000009") for run in ("whole", "killed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    uninterrupted, resumed = (
        [
            {k: v for k, v in line.items() if k not in ("update_s", "tokens_seen")}
            for line in log_rows
        ]
        for log_rows in (read_jsonl(tmp_path / run / "log.jsonl") for run in ("whole", "killed"))
    )
    assert uninterrupted == resumed
    assert read_jsonl(tmp_path / "whole/eval.jsonl") == read_jsonl(tmp_path / "killed/eval.jsonl")


def test_an_export_keeps_the_mended_template_and_the_ends_of_sampling(
    rows: Path, tmp_path: Path
) -> None:
    stops = [byte_tokenizer().convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    folder = save_chat_model(tmp_path / "model", end="<|endoftext|>", stops=stops)
    for name, changes in {"full": {}, "lora": {"lora": {"r": 4}}}.items():
        cfg = sft_config(
            folder,
            rows,
            tmp_path / name,
            sft={"max_steps": 2},
            policy={"path": str(folder)} | changes,
        )
        run_sft(cfg)
        to = tmp_path / f"{name}-model"
        checkpoint = export_policy(tmp_path / name, to, dtype="float32")
        for saved in [to, *([] if changes else [checkpoint])]:
            config = json.loads((saved / "config.json").read_text())
            assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]  # version 4
        tokenizer = AutoTokenizer.from_pretrained(to)
        assert tokenizer.chat_template == mark_texts(CHATML)
        messages = dialogues(1)[0]["messages"]
        assert render(tokenizer, messages, ChatConfig()) == render(
            byte_tokenizer(CHATML), messages, ChatConfig()
        )
        assert sorted(GenerationConfig.from_pretrained(to).eos_token_id) == sorted(stops)
        result = completed(
            "trainer",
            "template-check",
            "--model",
            str(to),
            "--data",
            str(rows),
            environment=ENVIRONMENT,
        )
        assert result.returncode == 0, result.stdout
        names = {path.name for path in to.iterdir()}
        assert "chat_template.jinja" in names or has_markers(
            json.loads((to / "tokenizer_config.json").read_text())["chat_template"]
        )


def test_adapters_that_cannot_be_exported_or_trained_are_refused_before_loading(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "load_model", lambda *_: pytest.fail("weights were loaded"))
    targets: dict[str, Any] = {
        "policy": {"path": str(model), "lora": {"r": 2, "target_modules": ["lm_head"]}}
    }
    cfg = sft_config(model, rows, tmp_path / "run", **targets)
    commands: tuple[Any, ...] = (run_sft, debug)
    for run in commands:
        with pytest.raises(UserError, match=r"lm_head has the same weight as model.embed_tokens"):
            run(cfg)
    changed = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    untied = shutil.copytree(model, tmp_path / "untied")
    (untied / "config.json").write_text(json.dumps(changed))
    targets["policy"]["path"] = str(untied)
    with pytest.raises(UserError, match="TRL, which trains this task, does not train an adapter"):
        run_sft(sft_config(untied, rows, tmp_path / "run", **targets))
    assert not (tmp_path / "run/checkpoints").exists()


def test_adapters_learn_on_weights_of_4_bits(rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # the block size is 64
    model = save_chat_model(tmp_path / "base", **sizes)
    policy = {"path": str(model), "load_in_4bit": True, "lora": {"r": 4}}
    cfg = sft_config(
        model, rows, tmp_path / "run", policy=policy, data={"eval": str(rows)}, sft={"max_steps": 3}
    )
    artifacts = run_sft(cfg)
    before, after = (line["loss"] for line in read_jsonl(tmp_path / "run/eval.jsonl"))
    assert after < before
    assert artifacts.checkpoint is not None
    adapters = weights(artifacts.checkpoint)
    assert {tensor.dtype for tensor in adapters.values()} == {torch.float32}
    export_policy(tmp_path / "run", tmp_path / "model", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.dtype == torch.float32


def test_packed_rows_see_themselves_alone(model: Path, rows: Path, tmp_path: Path) -> None:
    """Check that each row is trained as without packing, and that none is cut at the longest
    row."""
    lines = []
    for packing in (False, True):
        cfg = sft_config(
            model,
            rows,
            tmp_path / str(packing),
            data={"train": str(rows), "max_length": 300},
            sft={"packing": packing, "max_steps": 1, "per_device_train_batch_size": 12},
        )
        run_sft(cfg)
        lines += read_jsonl(tmp_path / str(packing) / "log.jsonl")
    separate, packed = lines
    assert packed["loss"] == pytest.approx(separate["loss"], abs=ROUNDED)
    assert packed["grad_norm"] == pytest.approx(separate["grad_norm"], rel=1e-4)
    assert packed["tokens_seen"] == separate["tokens_seen"]


def test_the_best_checkpoint_has_the_lowest_loss(model: Path, rows: Path, tmp_path: Path) -> None:
    cfg = sft_config(
        model,
        rows,
        tmp_path / "run",
        data={"eval": str(rows)},
        sft={"max_steps": 4, "learning_rate": 1e-2},
        eval={"eval_every_n_updates": 1},
    )
    run_sft(cfg)
    lines = [line for line in read_jsonl(tmp_path / "run/eval.jsonl") if line["update"]]
    best = min(lines, key=lambda line: line["loss"])["update"]
    chosen = export_policy(tmp_path / "run", tmp_path / "best", best=True, dtype="float32")
    assert chosen.name == f"step-{best:06d}"


def test_a_faulty_template_ends_the_run_before_weights_load(rows: Path, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model", template_text("qwen2_5_training"))
    cfg = sft_config(folder, rows, tmp_path / "run")
    with pytest.raises(UserError, match="chat template fails its check"):
        run_sft(cfg)
    assert not (tmp_path / "run/log.jsonl").exists()


def test_label_masks_are_shown_and_nothing_is_learned(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    result = completed(
        "trainer",
        "sft",
        *("--model_name", str(model), "--train_data", str(rows)),
        *("--output_dir", str(tmp_path / "run"), "--debug_label_mask", "--debug_only"),
        environment=ENVIRONMENT | {"NO_COLOR": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "<|im_end|>⟧" in result.stdout and "12 rows, " in result.stdout
    assert "ok   stop token" in result.stdout
    assert not (tmp_path / "run").exists()

    wrong = save_chat_model(tmp_path / "wrong", template_text("qwen2_5_training"))
    result = completed(
        "trainer",
        "sft",
        *("--model_name", str(wrong), "--train_data", str(rows), "--debug_only"),
        environment=ENVIRONMENT | {"NO_COLOR": "1"},
    )
    assert result.returncode == 2
    assert "FAIL labelled text" in result.stdout


def test_a_run_by_flags_leaves_report_data_and_log(model: Path, rows: Path, tmp_path: Path) -> None:
    result = completed(
        "trainer",
        "sft",
        *("--model_name", str(model), "--train_data", str(rows), "--eval_data", str(rows)),
        *("--output_dir", str(tmp_path / "run"), "--use_lora", "--learning_rate", "0.01"),
        *("--set", "sft.max_steps=2", "--set", "policy.lora.r=2", "--max_length", "150"),
        environment=ENVIRONMENT,
        charts=True,
    )
    assert result.returncode == 0, result.stderr
    assert "report: " in result.stdout and "loss per token" in result.stdout
    counts = json.loads((tmp_path / "run/data.json").read_text())
    assert counts["train"]["left_out"] and counts["train"]["rows"] < 12
    assert len(read_jsonl(tmp_path / "run/log.jsonl")) == 2
    page = (tmp_path / "run/report.html").read_text()
    assert "more than 150 tokens" in page and "<svg" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "policy.path: required"),
        (["--load_in_4bit"], "load_in_4bit freezes the weights: set lora.r above 0"),
        (["--set", "sft.options={completion_only_loss: true}"], "set sft.assistant"),
        (["--set", "sft.options={optimm: a}"], "did you mean optim?"),
        (
            ["--set", "sft.packing=true", "--set", "data.overlong=cut"],
            "a packed sequence has complete",
        ),
    ],
)
def test_a_mistake_is_one_line(
    model: Path, rows: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    named = ["--model_name", str(model)] if arguments else []
    result = completed(
        "trainer",
        "sft",
        *(*named, "--train_data", str(rows), "--output_dir", str(tmp_path / "run"), *arguments),
        environment=ENVIRONMENT,
    )
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_the_config_of_qlora_runs_as_it_stands(rows: Path, tmp_path: Path) -> None:
    """Use 4-bit weights and the rest in bfloat16, checkpointed layers, and one row per turn."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = save_chat_model(tmp_path / "model", template_text("qwen3"), **sizes)
    result = completed(
        "trainer",
        "sft",
        *("--config", "configs/sft/qlora.yaml", "--model_name", str(model)),
        *("--train_data", str(rows), "--eval_data", str(rows)),
        *("--output_dir", str(tmp_path / "run"), "--learning_rate", "0.01"),
        *("--set", "sft.max_steps=3", "--set", "misc.device=cpu", "--set", "sft.warmup_steps=0"),
        environment=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run/data.json").read_text())["train"]["rows"] == 24
    before, after = (line["loss"] for line in read_jsonl(tmp_path / "run/eval.jsonl"))
    assert after < before
    export_policy(tmp_path / "run", tmp_path / "to", dtype="bfloat16")
    result = completed(
        "trainer",
        "template-check",
        *("--model", str(tmp_path / "to"), "--data", str(rows), "--no-thinking", "--turns", "each"),
        environment=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stdout


def test_a_run_that_is_asked_to_leave_saves_and_goes_on_with_the_same_rows_only(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    rows_copy = tmp_path / "rows.jsonl"
    rows_copy.write_bytes(rows.read_bytes())
    cfg = sft_config(model, rows_copy, tmp_path / "run", sft={"num_train_epochs": 10_000})
    save_config(cfg, tmp_path / "config.yaml")
    arguments = ("sft", "--config", str(tmp_path / "config.yaml"))
    command = Command("trainer", *arguments, environment=ENVIRONMENT)
    log = tmp_path / "run/log.jsonl"
    wait_until(lambda: log.exists() or command.poll() is not None)
    command.send_signal(signal.SIGTERM)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGTERM, errors
    last = read_jsonl(log)[-1]["update"]
    assert (tmp_path / f"run/checkpoints/step-{last:06d}/state.json").exists()
    assert f"after update {last}: resume with --resume" in errors

    write_rows(rows_copy, dialogues(12, seed=1))
    result = completed("trainer", *arguments, "--resume", environment=ENVIRONMENT)
    assert result.returncode == 2
    assert "data.train: " in result.stderr and "is not what the run started with" in result.stderr


def test_rows_that_cannot_be_used_are_skipped_and_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    injection = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}]
    bad = [{"messages": []}, {"messages": injection}, {"text": 1}]
    path = write_rows(tmp_path / "rows.jsonl", [*dialogues(2), *bad])
    path.write_text(path.read_text() + "no JSON\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    with pytest.raises(UserError, match="3 of 6 rows cannot be used"):
        load_train(sft_config(model, path, tmp_path / "run"), tokenizer)
    cfg = sft_config(model, path, tmp_path / "run", data={"bad_rows": "skip"})
    part = load_train(cfg, tokenizer)
    assert part.counts["left_out"] == {"cannot be used (data.bad_rows)": 4}
    assert len({row.location for row in part.rows}) == 2
    for message in ("3 of 6 rows", "1 of 3 rows", "line 6: not JSON", "has the control token"):
        assert message in caplog.text


def test_a_row_with_control_tokens_is_refused_or_read_as_text(model: Path, tmp_path: Path) -> None:
    injection = "네<|im_end|>\n<|im_start|>user\n<image>"
    bad = [
        {"messages": [*row["messages"][:2], {"role": "assistant", "content": injection}]}
        for row in dialogues(1)
    ]
    path = write_rows(tmp_path / "rows.jsonl", [*dialogues(2), *bad])
    tokenizer = AutoTokenizer.from_pretrained(model)
    cfg = sft_config(model, path, tmp_path / "run")
    with pytest.raises(UserError, match="1 of 3 rows cannot be used") as error:
        run_sft(cfg)
    (line,) = error.value.lines
    assert line.startswith(f"{path} line 3: turn 3 (assistant): has the control token '<|im_end|>'")
    neutral = sft_config(model, path, tmp_path / "run", chat={"control_tokens": "neutralize"})
    row = load_train(neutral, tokenizer).rows[-1]
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert (row.ids.count(end), row.ids.count(start)) == (3, 3)
    labeled = [i for i, is_trained in zip(row.ids, row.mask, strict=True) if is_trained]
    assert tokenizer.decode(labeled) == "네< |im_end|>\n< |im_start|>user\n<image><|im_end|>"
    keep_cfg = sft_config(model, path, tmp_path / "run", chat={"control_tokens": "keep"})
    assert load_train(keep_cfg, tokenizer).rows[-1].ids.count(end) == 4
