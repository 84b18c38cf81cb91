"""`scorekit check`: check all that can be checked before weights are loaded and before any
paid call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from scorekit.client import ScoringClient
from scorekit.errors import UserError
from scorekit.net.addresses import address_of
from scorekit.paid.store import judge_of
from scorekit.report.findings import Findings
from scorekit.retrieval.client import Retriever
from scorekit.retrieval.wire import IndexInfo
from trainer.rl.engines.choice import probe_server
from trainer.rl.policy import check_tokenizer, stop_token_ids, unwrap_peft
from trainer.runs.checks import check_device, check_memory, check_model, check_output_paths
from trainer.runs.config import set_key
from trainer.search.answer.config import SEARCH
from trainer.search.answer.models import chat_client, check_judge, judge_name
from trainer.search.answer.pipeline import answers_location
from trainer.search.config import SearchConfig
from trainer.search.data import (
    documents,
    hold_against_index,
    in_both,
    load_set,
    load_train,
)
from trainer.search.records import Question
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.prompt import opening
from trainer.search.rollout.sampled import PolicyInputs, inspect_policy
from trainer.search.services import check_index, check_retriever, has_page, open_retriever
from trainer.search.training.loading import fitting_questions
from trainer.search.training.train import check_trainable, workload_of
from trainer.search.training.upper_bounds import max_cost, max_episode_tokens
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

Sets = dict[str, list[Question]]
#: Key of the training questions.
_TRAIN = "data.train"


def check_run(cfg: SearchConfig, processes: int = 1) -> Findings:
    """Check everything that a run of this config needs, and return the findings.

    processes: how many are to share the run.
    Weights are not loaded, and nothing is written. Generator and judge get only a request for their
    description.
    """
    findings = Findings()
    run_check = findings.run_check
    sets = {_TRAIN: run_check(_TRAIN, _questions, cfg, None) or []}
    for name in cfg.data.held_out:
        sets[set_key(name)] = run_check(set_key(name), _questions, cfg, name) or []
    train = sets[_TRAIN]
    run_check("config", _config, cfg, train)
    run_check("processes", lambda: (None, workload_of(cfg, train).check(processes)))
    with open_retriever(cfg) as retriever:
        index = run_check("retriever.url", _index, cfg, retriever)
        if index is not None:
            for key, questions in sets.items():
                if questions:
                    sets[key] = (
                        run_check(f"gold pages of {key}", _gold, cfg, questions, retriever) or []
                    )
        for key, questions in sets.items():
            if train and questions and key != _TRAIN:
                run_check("overlap", _overlap, key, train, questions)
        model, max_tokens = _look_at_policy(cfg, sets, retriever if index else None, findings)
    if cfg.reward.weights["judge"]:
        run_check("generator", _generator, cfg)
        run_check("judge", _judge, cfg)
    if sets[_TRAIN]:
        run_check("updates", _updates, cfg, sets[_TRAIN])
        run_check("money", max_cost, cfg, sets)
    device = run_check("device", check_device, cfg.misc)
    if model is not None and device is not None and max_tokens is not None:
        # An episode's ids include what is sampled after them.
        prompt_tokens = max(1, max_tokens - cfg.generation.max_new_tokens)
        run_check("memory", check_memory, cfg, model, prompt_tokens, device, findings)
    if cfg.generation.engine == "vllm":
        run_check("vLLM", _vllm, cfg)
    check_output_paths(findings, cfg)
    return findings


def _look_at_policy(
    cfg: SearchConfig, sets: Sets, retriever: Retriever | None, findings: Findings
) -> tuple[nn.Module | None, int | None]:
    """Return the model without weights, and the max ids of an episode (None where unknown)."""
    run_check = findings.run_check
    model = run_check("policy.path", check_model, cfg.policy, cfg.policy.path, "policy.path")
    if model is None:
        return None, None
    policy_inputs = run_check("policy.tokenizer", _check_inputs, cfg, model)
    if policy_inputs is None:
        return model, None
    ids = run_check("chat template", _ids, cfg, policy_inputs, model)
    if ids is None:
        return model, None
    max_prompt = 0
    for key, questions in sets.items():
        if questions:
            result = run_check(
                f"prompts of {key}", _prompts, cfg, key, questions, ids, policy_inputs
            )
            sets[key], max_of_set = result or ([], 0)
            max_prompt = max(max_prompt, max_of_set)
    all_questions = [question for questions in sets.values() for question in questions]
    if not all_questions:
        return model, None
    return model, run_check(
        "episodes",
        max_episode_tokens,
        cfg,
        ids,
        policy_inputs,
        max_prompt,
        all_questions,
        retriever,
    )


def _questions(cfg: SearchConfig, name: str | None) -> tuple[list[Question], str]:
    """Return the questions of a held-out set, or the training questions (name: None)."""
    questions = load_train(cfg) if name is None else load_set(cfg, name)
    decks = {document for question in questions for document in documents(question)}
    types = Counter(question.question_type for question in questions if question.question_type)
    counted = "".join(f", {name} {count}" for name, count in types.most_common(8))
    num_without_gold = sum(not question.gold for question in questions)
    gold_note = f"; {num_without_gold} name no gold page" if num_without_gold else ""
    return questions, (
        f"{len(questions)} questions on {len(decks)} documents{counted}{gold_note}; the first: "
        f"{questions[0].question[:60]!r}"
    )


def _config(cfg: SearchConfig, train: Sequence[Question]) -> tuple[None, str]:
    check_trainable(cfg, train)
    weights = ", ".join(f"{name} {weight:g}" for name, weight in cfg.reward.weights.items())
    summary = f"{cfg.rl.algorithm}, {weights}"
    if cfg.rl.chosen_algorithm.makes_own_logprobs:
        summary += "; old log-probabilities in the update's own micro-batches"
    return None, f"{summary}; importance correction: {cfg.correction_summary}"


def _updates(cfg: SearchConfig, train: Sequence[Question]) -> tuple[None, str]:
    """Describe the updates.

    train: the questions without those that are left out.
    """
    rl = cfg.rl.over(len(train))
    questions, steps = rl.batch_size * rl.grad_accum, f"{rl.minibatches}"
    sizes = [question.samples(cfg.rollout.n_agent) for question in train]
    if rl.minibatch_size:
        steps = _range([-(-questions * size // rl.minibatch_size) for size in sizes])
    num_own_sizes = sum(question.n_agent is not None for question in train)
    online, note = cfg.rollout.online_budget, ""
    if num_own_sizes:
        note = f" ({num_own_sizes} questions have an n_agent of their own)"
    if online.n_max is not None:
        note = f" in the mean, {online.n_min} to {online.n_max} of each by the results so far"
    return None, (
        f"{rl.num_updates} of {questions} questions x {_range(sizes)} episodes{note}, "
        f"{steps} steps each{_own_temperatures(cfg, train)}"
    )


def _own_temperatures(cfg: SearchConfig, train: Sequence[Question]) -> str:
    """Return the range of the sampling temperatures, or "" if no question has its own."""
    temperatures = [row.temperature for row in train if row.temperature is not None]
    if not temperatures:
        return ""
    note = f"{len(temperatures)} questions have their own"
    if len(temperatures) < len(train):
        temperatures.append(cfg.generation.temperature)
    return f", temperature {_range(temperatures)} ({note})"


def _range(numbers: Sequence[float]) -> str:
    smallest, largest = min(numbers), max(numbers)
    return f"{smallest}" if smallest == largest else f"{smallest} to {largest}"


def _index(cfg: SearchConfig, retriever: Retriever) -> tuple[IndexInfo, str]:
    check_retriever(cfg)
    index, folder = retriever.info(), Path(cfg.misc.run_dir)
    if (folder / "index.json").is_file() and not cfg.misc.overwrite:
        check_index(folder, index)
    return index, (
        f"{cfg.retriever.url}: {index.id}, {index.pages:,} pages of {index.documents:,} documents, "
        f"{index.backend}, revision {index.revision}"
    )


def _gold(
    cfg: SearchConfig, questions: Sequence[Question], retriever: Retriever
) -> tuple[list[Question], str]:
    usable = hold_against_index(questions, partial(has_page, retriever), cfg.data)
    num_missing = len(questions) - len(usable)
    left_out = ""
    if num_missing:
        left_out = f"; {num_missing} questions name others: left out (data.missing_gold)"
    return usable, f"the index has those of {len(usable)} questions{left_out}"


def _overlap(key: str, train: Sequence[Question], held_out: Sequence[Question]) -> tuple[None, str]:
    return None, in_both(key, train, held_out) or (
        f"no question of {key}, and none of its documents, is in data.train"
    )


def _check_inputs(cfg: SearchConfig, model: nn.Module) -> tuple[PolicyInputs, str]:
    policy_inputs = inspect_policy(cfg)
    check_tokenizer(cfg.policy, policy_inputs.tokenizer, unwrap_peft(model))
    sight = cfg.episode.sight
    image_text = (
        f"is shown pictures of {sight.min_pixels:,} to {sight.max_pixels:,} pixels"
        if policy_inputs.reader is not None
        else "is shown text"
    )
    return (
        policy_inputs,
        f"{len(policy_inputs.tokenizer):,} tokens, reads {policy_inputs.context:,} ids, "
        f"{image_text}",
    )


def _ids(
    cfg: SearchConfig, policy_inputs: PolicyInputs, model: nn.Module
) -> tuple[TurnTokenizer, str]:
    ids = policy_inputs.ids(cfg, stop_token_ids(unwrap_peft(model), policy_inputs.tokenizer))
    stops = " ".join(policy_inputs.tokenizer.convert_ids_to_tokens(ids.stops))
    opened = f"; it opens {ids.prefill.strip()!r} for each turn" if ids.prefill else ""
    note = ids.serving_note()
    return ids, f"turns join, and end at {stops}{opened}{f'; {note}' if note else ''}"


def _prompts(
    cfg: SearchConfig,
    key: str,
    questions: Sequence[Question],
    ids: TurnTokenizer,
    policy_inputs: PolicyInputs,
) -> tuple[tuple[list[Question], int], str]:
    usable, note = fitting_questions(key, questions, ids, policy_inputs.context, cfg)
    lengths = sorted(len(ids.prompt(opening(question, cfg.episode))) for question in usable)
    return (usable, lengths[-1]), (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), the "
        f"instructions among them{'; ' + note if note else ''}"
    )


def _generator(cfg: SearchConfig) -> tuple[None, str]:
    generator = cfg.answering.generator

    async def check_server() -> None:
        async with chat_client(generator, "generator") as client:
            await client.check()

    asyncio.run(check_server())
    effort = f", effort {generator.effort}" if generator.effort else ""
    size = (
        f"originals of up to {generator.max_pixels:,} pixels"
        if generator.images == "original"
        else "images as shown to the policy"
    )
    return (
        None,
        f"{generator.base_url}: {generator.model}{effort}, {generator.max_output_tokens} tokens an "
        f"answer; up to {generator.max_images} {size}",
    )


def _judge(cfg: SearchConfig) -> tuple[None, str]:
    judge = cfg.answering.judge

    async def get_name() -> str:
        async with ScoringClient(
            judge.url, timeout_s=judge.timeout_s, deadline_s=judge.deadline_s
        ) as client:
            return judge_name(await check_judge(client, judge))

    name = asyncio.run(get_name())
    first_name = _first_judge(cfg)
    if first_name not in (None, name):
        raise UserError(
            f"answering.judge.url: {judge.url} is {name}, but the run in {cfg.misc.run_dir} "
            f"started with {first_name}. Start that judge again, or start a new run."
        )
    return None, f"{judge.url}: {name}"


def _first_judge(cfg: SearchConfig) -> str | None:
    """Return the first judge of the run in `misc.run_dir`; None if there is no such run."""
    folder = Path(cfg.misc.run_dir)
    if not (folder / FOLDER / "store.json").is_file():
        return None
    location = answers_location(cfg.answering, folder)
    return judge_of(location, SEARCH, TrajectoryStore(folder / FOLDER).run)


def _vllm(cfg: SearchConfig) -> tuple[None, str]:
    server, images = cfg.generation.vllm, cfg.episode.observation == "image"
    served = probe_server(server, adapters=cfg.policy.lora.r > 0, images=images)
    return None, f"{', '.join(map(address_of, server.urls))}: serves {served}"
