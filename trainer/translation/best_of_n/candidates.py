"""Sample several translations of each source, score them, and keep both on disk.

A folder has `made_from.json` (what the samples depend on), `completions.jsonl` and `scores.jsonl`,
a line for each source. A process that starts again samples no finished part twice, and asks the
services for no score that is there.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.credit.offsets import DecodeConfig
from scorekit.documents import read_json
from scorekit.errors import ScorekitError, UserError
from scorekit.prompts import load_postprocess
from scorekit.report.progress import progress_bar
from scorekit.seeds import stream_seed
from trainer.rl.devices import autocast, prepare_torch
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import stop_token_ids, unwrap_distributed
from trainer.rl.sampler import SampledCompletion, Sampler, preserve_rng_state
from trainer.runs.config import pinned_settings
from trainer.runs.learner import Learner
from trainer.runs.run_log import (
    append_jsonl,
    open_run_dir,
    read_jsonl,
    write_json,
    write_jsonl,
)
from trainer.runs.trl.processes import check_alone
from trainer.translation.collect import PendingGroup, unanswered
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.loading import load_learner
from trainer.translation.prompting import Prompt, prompt_text
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards
from trainer.translation.rewards.screening import (
    check_guards,
    check_references,
    check_target_languages,
)
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import weighted_parts
from trainer.translation.rollouts import TranslationRollout, build_rollout

#: Sources that are sampled together. A part of them is not kept: which completions are ready first
#: depends on their length.
CHUNK = 64
#: Attempts to get a score; each lasts until reward.deadline_s.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A translation of a source.

    ids: the sampled ids, with the id that ends them.
    text: what was scored.
    count: how often it was sampled; 0 for a greedy translation that was never sampled.
    is_complete: False if max_new_tokens has cut it.
    reward: sequence reward and mean token reward; None without a score (`error` says why).
    """

    ids: list[int]
    text: str
    count: int
    is_complete: bool
    reward: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledSource:
    """A source with its different translations.

    greedy: the index of the greedy one, if asked.
    """

    prompt: Prompt
    candidates: list[Candidate]
    greedy: int | None = None

    @property
    def example(self) -> Example:
        """Return its row of the data."""
        return self.prompt.example


@dataclass(frozen=True, slots=True)
class OpenCandidates:
    """A policy, its prompts, and the services, ready to sample and score."""

    cfg: TranslationConfig
    prompts: list[Prompt]
    learner: Learner
    sampler: Sampler
    rewarder: RewardClient
    world: DistributedContext


@contextmanager
def open_candidates(
    cfg: TranslationConfig, key: str, name: str | None, examples: Sequence[Example]
) -> Iterator[OpenCandidates]:
    """Check and open the services, then load the policy and the prompts that fit.

    key, name: config key of the examples, and the name of their set; None: they are data.train.
    Raises UserError for whatever the user can fix.
    """
    check_alone("best of n")
    if cfg.generation.temperature == 0:
        raise UserError("generation.temperature: 0 is greedy: all samples would be equal")
    load_postprocess(cfg.generation.postprocess)
    check_references(examples, cfg.reward, key)
    pairs = {(example.src_lang_code, example.tgt_lang_code) for example in examples}
    check_guards(pairs, cfg.reward.guards)
    languages = sorted({language for _, language in pairs})
    check_target_languages(cfg.reward.definition, "reward.definition", languages)
    open_run_dir(cfg.misc)
    # No update follows, so no reference model is loaded.
    rl = cfg.rl.model_copy(update={"kl_coef": 0.0})
    stop = cfg.stop.model_copy(update={"kl_ceiling": None})
    cfg = cfg.model_copy(update={"rl": rl, "stop": stop})
    adapters = cfg.policy.lora.r > 0
    served = probe_engine(cfg.generation, adapters=adapters)
    client = RewardClient(cfg.reward, caching=cfg.misc.caching, offer_unneeded=False, misc=cfg.misc)
    with closing(client) as rewarder:
        if not rewarder.needed and not cfg.reward.w_chrf:
            raise UserError("reward: every weight is 0, so there is nothing to choose by")
        world = DistributedContext(prepare_torch(cfg.misc.device, cfg.misc.threads))
        train = examples if name is None else []
        sets = {} if name is None else {name: examples}
        learner = load_learner(cfg, train, sets, rewarder.infos, world)
        model = learner.model
        sampler = open_sampler(
            cfg.generation,
            served,
            model,
            learner.tokenizer,
            world,
            adapters=adapters,
            run_dir=cfg.misc.run_dir,
            role="best_of_n",
        )
        with closing(sampler):
            sampler.sync_weights(model, 0)
            prompts = learner.train if name is None else learner.sets[name]
            yield OpenCandidates(cfg, prompts, learner, sampler, rewarder, world)


class CandidateFolder:
    """The samples and scores of one policy, in a folder of their own."""

    def __init__(self, folder: Path, opened: OpenCandidates, *, greedy: bool, advice: str) -> None:
        """Open the folder, or make it.

        greedy: also translate each source greedily.
        advice: what to do if the folder has samples of other inputs, for the UserError.
        """
        self.folder, self.opened, self.greedy = folder, opened, greedy
        cfg, tokenizer = opened.cfg, opened.learner.tokenizer
        self._stops = stop_token_ids(unwrap_distributed(opened.learner.model), tokenizer)
        self._decode = DecodeConfig(load_postprocess(cfg.generation.postprocess))
        check_made_from(folder, self._made_from(), advice)

    def collect(self) -> list[SampledSource]:
        """Return every source with its scored translations. Samples and scores what is missing.

        Raises ScorekitError if the services give no score of a chunk of sources; what is done is
        kept.
        """
        count = len(self.opened.prompts)
        completions, scores = self._stored_completions(), StoredLines(self.folder / "scores.jsonl")
        with progress_bar(count, len(scores.lines)) as advance:
            waiting: list[tuple[int, PendingGroup]] = []
            for start in range(0, count, CHUNK):
                indices = range(start, min(start + CHUNK, count))
                if not all(index in completions.lines for index in indices):
                    self._sample(indices, completions)
                unscored = [index for index in indices if index not in scores.lines]
                # These are scored while the next ones are sampled.
                submitted = self._submit(unscored, completions)
                self._finish(waiting, completions, scores, advance)
                waiting = submitted
            self._finish(waiting, completions, scores, advance)
        return [self._source(index, scores.lines[index]) for index in range(count)]

    def _made_from(self) -> dict[str, Any]:
        """Return what the samples and scores depend on."""
        cfg, rewarder = self.opened.cfg, self.opened.rewarder
        sections = ("generation.", "reward.", "misc.seed", "misc.dtype")
        pinned = pinned_settings(cfg).items()
        settings = {key: value for key, value in pinned if key.startswith(sections)}
        inputs = {
            key: {name: value for name, value in values.items() if name != "path"}
            for key, values in self.opened.learner.origin.items()
        }
        components = {
            f"reward.definition: {name}": [info.model, info.revision]
            for name, info in rewarder.component_infos.items()
        }
        weights = {"weights of the reward": weighted_parts(cfg.reward)}
        return settings | inputs | components | weights | {"greedy": self.greedy}

    def _stored_completions(self) -> StoredLines:
        """Return the completions of all chunks that are complete."""
        stored, count = StoredLines(self.folder / "completions.jsonl"), len(self.opened.prompts)
        num_complete = len(stored.lines)
        if num_complete < count:
            num_complete -= num_complete % CHUNK
        stored.keep(range(num_complete))
        return stored

    def _sample(self, indices: Sequence[int], completions: StoredLines) -> None:
        opened, start = self.opened, indices[0]
        generation, seed = opened.cfg.generation, opened.cfg.misc.seed
        ids = [opened.prompts[index].ids.tolist() for index in indices]
        lines: list[dict[str, Any]] = [{"source": index} for index in indices]
        modes = {"samples": generation}
        if self.greedy:
            once = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "num_samples_per_prompt": 1}
            modes["greedy"] = generation.model_copy(update=once)
        device, dtype = opened.world.device, opened.cfg.misc.dtype
        with preserve_rng_state(opened.learner.model, 0), autocast(device, dtype):
            for mode, gen_cfg in modes.items():
                chunk_seed = stream_seed("candidates", seed, start)
                results = opened.sampler.sample(ids, gen_cfg, seed=chunk_seed, with_logprobs=False)
                for position, done in results:
                    lines[position][mode] = [completion.token_ids for completion in done]
        completions.add(*lines)

    def _submit(
        self, indices: Sequence[int], completions: StoredLines
    ) -> list[tuple[int, PendingGroup]]:
        """Ask the services for the scores of these sources."""
        batch = self.opened.rewarder.batch()
        groups = [(i, PendingGroup(self._rollouts(i, completions.lines[i]))) for i in indices]
        for _, group in groups:
            group.submit(batch)
        return groups

    def _finish(
        self,
        waiting: Sequence[tuple[int, PendingGroup]],
        completions: StoredLines,
        scores: StoredLines,
        advance: Callable[[int], None],
    ) -> None:
        """Wait for the scores and keep them; ask again for those that may come later.

        What has none then is kept without. Raises ScorekitError if no source has any. This is the
        one place that knows how a reward is made.
        """
        opened, has_scores = self.opened, False
        for attempt in range(_ATTEMPTS):
            is_last, retried = attempt == _ATTEMPTS - 1, []
            for index, group in waiting:
                rewards = compute_rewards(group.rollouts, group.scores(), opened.cfg.reward)
                if not is_last and any(reward.is_transient for reward in rewards):
                    retried.append((index, group))
                    continue
                if not has_scores and (reason := unanswered(rewards)):
                    raise ScorekitError(
                        f"source {index + 1} and others have no score after {_ATTEMPTS} attempts "
                        f"({reason}). What is done is in {self.folder}; the same command goes on "
                        "from there"
                    )
                has_scores = True
                scores.add(self._line(completions.lines[index], group, rewards))
                advance(1)
            if not retried:
                return
            batch = opened.rewarder.batch()
            for _, group in retried:
                group.submit(batch)
            waiting = retried

    def _line(
        self, line: Mapping[str, Any], group: PendingGroup, rewards: Sequence[SampleReward]
    ) -> dict[str, Any]:
        """Return the line of scores of a source."""
        counts = Counter(map(tuple, line["samples"]))
        candidates = []
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            total = total_reward(reward)
            fields = {
                "ids": rollout.completion_token_ids,
                "text": rollout.completion_text,
                "count": counts[tuple(rollout.completion_token_ids)],
                "is_complete": rollout.finish_reason == "eos",
                "reward": total,
                "error": reward.error if total is None else None,
            }
            candidates.append(fields)
        all_ids = [candidate["ids"] for candidate in candidates]
        greedy = all_ids.index(line["greedy"][0]) if self.greedy else None
        return {"source": line["source"], "greedy": greedy, "candidates": candidates}

    def _rollouts(self, index: int, line: Mapping[str, Any]) -> list[TranslationRollout]:
        """Return the different completions of a source, in the order of their first sample."""
        opened = self.opened
        prompt, tokenizer = opened.prompts[index], opened.learner.tokenizer
        text = prompt_text(prompt.example, tokenizer, opened.cfg.generation.prompt_template)
        different = dict.fromkeys(map(tuple, [*line["samples"], *line.get("greedy", [])]))
        return [
            build_rollout(
                prompt,
                text,
                (index, number),
                SampledCompletion(list(ids), None),
                tokenizer,
                self._decode,
                self._stops,
            )
            for number, ids in enumerate(different)
        ]

    def _source(self, index: int, line: Mapping[str, Any]) -> SampledSource:
        candidates = [Candidate(**fields) for fields in line["candidates"]]
        return SampledSource(self.opened.prompts[index], candidates, line["greedy"])


class StoredLines:
    """A file of JSON lines, one for each source (`source`: its index)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = {line["source"]: line for line in read_jsonl(path)}
        if path.exists():  # without the torn line of a killed process
            write_jsonl(path, self.lines.values())

    def add(self, *lines: dict[str, Any]) -> None:
        """Append lines."""
        for line in lines:
            append_jsonl(self.path, line)
            self.lines[line["source"]] = line

    def keep(self, indices: range) -> None:
        """Remove the lines of other sources."""
        if any(index not in indices for index in self.lines):
            self.lines = {i: line for i, line in self.lines.items() if i in indices}
            write_jsonl(self.path, self.lines.values())


def total_reward(reward: SampleReward) -> float | None:
    """Return the sequence reward and the mean token reward together; None without a reward."""
    if reward.r_seq is None:
        return None
    tokens = reward.token_rewards
    return reward.r_seq + (math.fsum(tokens) / len(tokens) if tokens else 0.0)


def check_made_from(folder: Path, made_from: Mapping[str, Any], advice: str) -> None:
    """Note in the folder what its files are made from.

    Raises UserError with the advice if they are made from something else.
    """
    path, now = folder / "made_from.json", json.loads(json.dumps(made_from))
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    then = read_json(path)
    changed = [key for key in {**now, **then} if now.get(key) != then.get(key)]
    if changed:
        raise UserError(
            f"{folder}: its samples are of another run ({', '.join(changed)} differ). {advice}"
        )
