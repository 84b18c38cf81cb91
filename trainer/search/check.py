"""`python -m trainer check`: everything that can be found out before weights are loaded, and before
anything is paid for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from scorekit.client import ScoringClient
from scorekit.errors import UserError
from scorekit.report.findings import Findings
from scorekit.retrieval.client import Retriever
from scorekit.retrieval.wire import IndexInfo
from trainer.rl.engines.vllm import probe_server
from trainer.rl.policy import check_tokenizer, stop_token_ids, without_wrappers
from trainer.runs.config import set_key
from trainer.runs.verbs.machine import look_at_device, look_at_memory
from trainer.runs.verbs.places import look_at_places
from trainer.runs.verbs.weights import look_at_model
from trainer.search.answer.answers import judge_of
from trainer.search.answer.judging import judge_name, meet_judge
from trainer.search.answer.paid_chat import chat_client
from trainer.search.config import SearchConfig
from trainer.search.data import (
    documents,
    hold_against_index,
    in_both,
    load_set,
    load_train,
)
from trainer.search.local import Reads, look_at_policy
from trainer.search.neighbours import check_index, has_page, meet_retriever, open_retriever
from trainer.search.reckon import episode_ids, money
from trainer.search.records import Question
from trainer.search.training.loading import fitting_questions
from trainer.search.training.train import check_trainable
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.turns.joined import TurnIds
from trainer.search.turns.prompt import opening

Sets = dict[str, list[Question]]
#: Key of the questions that are learned from.
_TRAIN = "data.train"


def check_run(cfg: SearchConfig) -> Findings:
    """Look at everything that a run of this config needs. Weights are not loaded, generator and
    judge are asked who they are and nothing else, and nothing is written."""
    findings = Findings()
    look = findings.look
    sets = {_TRAIN: look(_TRAIN, _questions, cfg, None) or []}
    for name in cfg.data.held_out:
        sets[set_key(name)] = look(set_key(name), _questions, cfg, name) or []
    train = sets[_TRAIN]
    look("config", _config, cfg, train)
    with open_retriever(cfg) as retriever:
        index = look("retriever.url", _index, cfg, retriever)
        if index is not None:
            for key, questions in sets.items():
                if questions:
                    sets[key] = look(f"gold pages of {key}", _gold, cfg, questions, retriever) or []
        for key, questions in sets.items():
            if train and questions and key != _TRAIN:
                look("overlap", _overlap, key, train, questions)
        model, longest = _look_at_policy(cfg, sets, retriever if index else None, findings)
    if cfg.reward.weights["judge"]:
        look("generator", _generator, cfg)
        look("judge", _judge, cfg)
    if sets[_TRAIN]:
        look("updates", _updates, cfg, sets[_TRAIN])
        look("money", money, cfg, sets)
    device = look("device", look_at_device, cfg.misc)
    if model is not None and device is not None and longest is not None:
        # What is sampled behind an episode's ids stands in them already.
        before = max(1, longest - cfg.generation.max_new_tokens)
        look("memory", look_at_memory, cfg, model, before, device, findings)
    if cfg.generation.engine == "vllm":
        look("vLLM", _vllm, cfg)
    look_at_places(findings, cfg)
    return findings


def _look_at_policy(
    cfg: SearchConfig, sets: Sets, retriever: Retriever | None, findings: Findings
) -> tuple[nn.Module | None, int | None]:
    """The model without weights, and the most ids of an episode; None where it cannot be said."""
    look = findings.look
    model = look("policy.path", look_at_model, cfg.policy, cfg.policy.path, "policy.path")
    if model is None:
        return None, None
    reads = look("policy.tokenizer", _reads, cfg, model)
    if reads is None:
        return model, None
    ids = look("chat template", _ids, cfg, reads, model)
    if ids is None:
        return model, None
    longest = 0
    for key, questions in sets.items():
        if questions:
            looked = look(f"prompts of {key}", _prompts, cfg, key, questions, ids, reads)
            sets[key], of_set = looked or ([], 0)
            longest = max(longest, of_set)
    asked = [question for questions in sets.values() for question in questions]
    if not asked:
        return model, None
    return model, look("episodes", episode_ids, cfg, ids, reads, longest, asked, retriever)


def _questions(cfg: SearchConfig, name: str | None) -> tuple[list[Question], str]:
    """Of a held-out set, or None: to learn from."""
    questions = load_train(cfg) if name is None else load_set(cfg, name)
    decks = {document for question in questions for document in documents(question)}
    types = Counter(question.question_type for question in questions if question.question_type)
    counted = "".join(f", {name} {count}" for name, count in types.most_common(8))
    without = sum(not question.gold for question in questions)
    told = f"; {without} name no gold page" if without else ""
    return questions, (
        f"{len(questions)} questions on {len(decks)} documents{counted}{told}; the first: "
        f"{questions[0].question[:60]!r}"
    )


def _config(cfg: SearchConfig, train: Sequence[Question]) -> tuple[None, str]:
    check_trainable(cfg, train)
    weights = ", ".join(f"{name} {weight:g}" for name, weight in cfg.reward.weights.items())
    said = f"{cfg.rl.algorithm}, {weights}"
    if cfg.rl.makes_own_logprobs:
        said += "; old log-probabilities in the update's own micro-batches"
    corrects = "on" if cfg.corrects_importance else "off"
    return None, f"{said}; importance correction {corrects}"


def _updates(cfg: SearchConfig, train: Sequence[Question]) -> tuple[None, str]:
    """train: without those that are left out."""
    rl = cfg.rl.over(len(train))
    questions, sizes = rl.batch_size * rl.grad_accum, _group_sizes(cfg, train)
    steps = [-(-questions * size // (rl.minibatch_size or 1)) for size in sizes]
    each = f"{_range(steps)} steps each" if rl.minibatch_size else f"{rl.minibatches} steps each"
    own = sum(question.n_agent is not None for question in train)
    return None, (
        f"{rl.num_updates} of {questions} questions x {_range(sizes)} episodes"
        f"{f' ({own} questions have an n_agent of their own)' if own else ''}, {each}"
    )


def _group_sizes(cfg: SearchConfig, train: Sequence[Question]) -> list[int]:
    """The smallest and the largest group."""
    sizes = [question.samples(cfg.rollout.n_agent) for question in train]
    return [min(sizes), max(sizes)] if sizes else [cfg.rollout.n_agent]


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _index(cfg: SearchConfig, retriever: Retriever) -> tuple[IndexInfo, str]:
    meet_retriever(cfg)
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
    kept = hold_against_index(questions, partial(has_page, retriever), cfg.data)
    lost = len(questions) - len(kept)
    left_out = f"; {lost} questions name others: left out (data.missing_gold)" if lost else ""
    return kept, f"the index has those of {len(kept)} questions{left_out}"


def _overlap(key: str, train: Sequence[Question], held_out: Sequence[Question]) -> tuple[None, str]:
    return None, in_both(key, train, held_out) or (
        f"no question of {key}, and none of its documents, is in data.train"
    )


def _reads(cfg: SearchConfig, model: nn.Module) -> tuple[Reads, str]:
    reads = look_at_policy(cfg)
    check_tokenizer(cfg.policy, reads.tokenizer, without_wrappers(model))
    sight = cfg.episode.sight
    sees = (
        f"is shown pictures of {sight.min_pixels:,} to {sight.max_pixels:,} pixels"
        if reads.reader is not None
        else "is shown text"
    )
    return reads, f"{len(reads.tokenizer):,} tokens, reads {reads.context:,} ids, {sees}"


def _ids(cfg: SearchConfig, reads: Reads, model: nn.Module) -> tuple[TurnIds, str]:
    ids = reads.ids(cfg, stop_token_ids(without_wrappers(model), reads.tokenizer))
    stops = " ".join(reads.tokenizer.convert_ids_to_tokens(ids.stops))
    opened = f"; it opens {ids.prefill.strip()!r} for each turn" if ids.prefill else ""
    note = ids.serving_note()
    return ids, f"turns join, and end at {stops}{opened}{f'; {note}' if note else ''}"


def _prompts(
    cfg: SearchConfig, key: str, questions: Sequence[Question], ids: TurnIds, reads: Reads
) -> tuple[tuple[list[Question], int], str]:
    kept, told = fitting_questions(key, questions, ids, reads.context, cfg)
    lengths = sorted(len(ids.prompt(opening(question, cfg.episode))) for question in kept)
    return (kept, lengths[-1]), (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), the "
        f"instructions among them{'; ' + told if told else ''}"
    )


def _generator(cfg: SearchConfig) -> tuple[None, str]:
    of = cfg.answering.generator

    async def meet() -> None:
        client = chat_client(of, "generator")
        try:
            await client.check()
        finally:
            await client.close()

    asyncio.run(meet())
    effort = f", effort {of.effort}" if of.effort else ""
    return None, f"{of.base_url}: {of.model}{effort}, {of.max_output_tokens} tokens an answer"


def _judge(cfg: SearchConfig) -> tuple[None, str]:
    of = cfg.answering.judge

    async def meet() -> str:
        client = ScoringClient(of.url, timeout_s=of.timeout_s, deadline_s=of.deadline_s)
        try:
            return judge_name(await meet_judge(client, of))
        finally:
            await client.close()

    found = asyncio.run(meet())
    first = _first_judge(cfg)
    if first not in (None, found):
        raise UserError(
            f"{of.url} is {found}, and the run in {cfg.misc.run_dir} was begun with {first}: start "
            "that one again, or begin another run"
        )
    return None, f"{of.url}: {found}"


def _first_judge(cfg: SearchConfig) -> str | None:
    """The judge that the run in `misc.run_dir` began with; None where none has begun."""
    folder = Path(cfg.misc.run_dir)
    if not (folder / FOLDER / "store.json").is_file():
        return None
    kept = cfg.answering.answers
    path = folder / "answers.sqlite" if kept is None else Path(kept)
    return judge_of(path, TrajectoryStore(folder / FOLDER).run)


def _vllm(cfg: SearchConfig) -> tuple[None, str]:
    server, images = cfg.generation.vllm, cfg.episode.observation == "image"
    served = probe_server(server, adapters=cfg.policy.lora.r > 0, images=images)
    return None, f"{server.url}: serves {served}"
