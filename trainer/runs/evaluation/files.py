"""The report of an evaluation, those of a run's eval.jsonl, and the files of `scorekit evaluate`.

`scorekit evaluate` writes an evaluation of each set, and its comparison. A folder gets
evaluation.json (stats), evaluation.jsonl (a line for each sample) and evaluation.html; against
another policy, also comparison.json and comparison.html, and the other's evaluation in `against/`.
For a set with a name (`data.eval_sets`), the files are evaluation-NAME.json and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel

from scorekit.documents import read_json
from scorekit.errors import UserError
from scorekit.net.addresses import without_userinfo
from scorekit.numeric import below
from scorekit.paired import PairedStat, comparison_values
from trainer.rl.config import PolicyConfig
from trainer.runs.config import DEFAULT_EVAL_SET, FolderConfig
from trainer.runs.run_log import JsonlFile, open_run_dir, read_jsonl, write_json, write_jsonl

#: Share of the samples with a possible reward that a mean has to cover to be comparable.
_RATED_FROM = 0.95
#: Keys of a line of eval.jsonl that are no stats of the report.
_LINE_KEYS = frozenset({"set", "update", "completions", "decides", "stopped"})
#: Folder of the other policy's evaluation, within that of the policy.
AGAINST = "against"
PairedGroups = Mapping[str, Sequence[PairedStat]]


@dataclass(slots=True)
class EvaluationReport:
    """The stats of an evaluation on a set, and one line of its dump for each sample.

    values: the stats by their keys; a mean without values is None. `report[key]` gives them, too.
    `reward_mean` is over the samples that have a reward (`reward_coverage`).
    unrewardable: key of the number of samples that could have none; a task's own.
    """

    values: dict[str, Any]
    examples: Sequence[dict[str, Any]]
    unrewardable: ClassVar[str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return int(self.values["samples"])

    @property
    def reward_mean(self) -> float | None:
        """Return the mean reward; None without any reward."""
        return self.values["reward_mean"]

    @property
    def reward_coverage(self) -> float:
        """Return the share of the samples that have a reward."""
        return float(self.values["reward_coverage"])

    @property
    def rating(self) -> float | None:
        """Return reward_mean, which the best checkpoint is chosen by; None if it covers too few.

        The samples without a reward may be the hard ones.
        """
        num_possible = self.samples - (self.values.get(self.unrewardable) or 0)
        num_covered = round(self.reward_coverage * self.samples)
        return None if below(num_covered, _RATED_FROM * num_possible) else self.reward_mean

    def stats(self) -> dict[str, Any]:
        """Return all stats by their keys."""
        return dict(self.values)


R = TypeVar("R", bound=EvaluationReport)


def lines_by_set(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return lines of eval.jsonl by the names of their sets."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        sets.setdefault(line.get("set", DEFAULT_EVAL_SET), []).append(line)
    return sets


def reports_by_set(
    folder: Path, lines: Iterable[dict[str, Any]], report_type: type[R]
) -> dict[str, list[tuple[int, R]]]:
    """Return (update, report) of the evaluations of a run, by the names of their sets.

    folder: of the run.
    lines: of its eval.jsonl.
    """

    def report(line: dict[str, Any]) -> R:
        values = {key: value for key, value in line.items() if key not in _LINE_KEYS}
        return report_type(values, JsonlFile(folder / line["completions"]))

    return {
        name: [(line["update"], report(line)) for line in set_lines]
        for name, set_lines in lines_by_set(lines).items()
    }


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """An evaluation of a policy on a set.

    policy: its path or URL, as the user named it.
    stats: the contents of evaluation.json.
    examples: what the policy gave for each sample, in the task's own form.
    """

    policy: str
    stats: Mapping[str, Any]
    examples: Sequence[Any]


@dataclass(frozen=True, slots=True)
class EvaluationOutcome:
    """The results for one set.

    earlier: the other policy's evaluation.
    groups: the paired stats of it and `evaluation`, of all samples first.
    page, comparison: files.
    """

    name: str
    evaluation: EvaluatedPolicy
    page: Path
    earlier: EvaluatedPolicy | None = None
    groups: PairedGroups | None = None
    comparison: Path | None = None


@dataclass(frozen=True, slots=True)
class EvaluationFiles:
    """The files of the evaluation of one set in a folder."""

    folder: Path
    name: str = DEFAULT_EVAL_SET

    def path(self, ending: str, kind: str = "evaluation") -> Path:
        """Return the path of one of its files."""
        name = kind if self.name == DEFAULT_EVAL_SET else f"{kind}-{self.name}"
        return self.folder / f"{name}.{ending}"

    def write(
        self,
        evaluated: EvaluatedPolicy,
        lines: Iterable[dict[str, Any]],
        config: str,
        write_page: Callable[..., Any],
    ) -> None:
        """Write the files of an evaluation, and remove those of an earlier comparison.

        lines: its examples as JSON.
        config: `config_text`.
        write_page: gets path, policy, stats, examples and config.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for ending in ("json", "html"):
            self.path(ending, "comparison").unlink(missing_ok=True)
        write_jsonl(self.path("jsonl"), lines)
        page = self.path("html")
        write_page(page, evaluated.policy, evaluated.stats, evaluated.examples, config)
        write_json(self.path("json"), evaluated.stats)

    def read(
        self, did: str, key_of: Callable[[dict[str, Any]], Any], expected: Sequence[Any]
    ) -> EvaluatedPolicy:
        """Return the evaluation that `--against` names; its examples are the lines of the dump.

        did: what it did with how many samples, as "translated {} sources".
        key_of: a sample's identity, from its line.
        expected: those of the samples of now. Raises UserError if they are others.
        """
        path = self.path("jsonl")
        if not path.is_file():
            raise UserError(
                f"--against: {self.folder} has no {path.name}. Evaluate that set there, too"
            )
        lines = read_jsonl(path)
        if [key_of(line) for line in lines] != list(expected):
            raise UserError(
                f"--against: {self.folder} {did.format(len(lines))} that are not these "
                f"{len(expected)} in this order. Evaluate it with the same data.eval, eval_sets "
                "and eval_limit"
            )
        stats = {}
        if self.path("json").is_file():
            stats = read_json(self.path("json"))
        return EvaluatedPolicy(str(stats.get("policy", self.folder)), stats, lines)

    def outcome(
        self,
        evaluated: EvaluatedPolicy,
        earlier: EvaluatedPolicy | None,
        compare: Callable[..., Sequence[PairedStat] | PairedGroups],
        counted: Mapping[str, Any],
        write_page: Callable[..., Any],
    ) -> EvaluationOutcome:
        """Return the outcome, and write the comparison if there is another evaluation.

        compare: returns the paired stats of the examples of both.
        counted: as for `comparison_values`.
        write_page: gets path, names, stats by group, and the examples of both.
        """
        page = self.path("html")
        if earlier is None:
            return EvaluationOutcome(self.name, evaluated, page)
        policies = (earlier.policy, evaluated.policy)
        paired = compare(earlier.examples, evaluated.examples)
        write_json(self.path("json", "comparison"), comparison_values(policies, counted, paired))
        groups = paired if isinstance(paired, Mapping) else {"all": paired}
        comparison = self.path("html", "comparison")
        write_page(comparison, policies, groups, earlier.examples, evaluated.examples)
        return EvaluationOutcome(self.name, evaluated, page, earlier, groups, comparison)


def check_folder(misc: FolderConfig, sets: Iterable[str], compares: bool, overwrite: bool) -> None:
    """Raise UserError if run_dir is not writable, or an evaluation would be replaced."""
    folder = open_run_dir(misc)
    paths = (
        EvaluationFiles(target_dir, name).path(ending)
        for target_dir in ([folder, folder / AGAINST] if compares else [folder])
        for name in sets
        for ending in ("json", "jsonl", "html")
    )
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not overwrite:
        raise UserError(
            f"misc.run_dir: {existing} exists from an earlier evaluation. Choose another folder "
            "(--set misc.run_dir=...), or replace it with --overwrite"
        )


def has_evaluation(against: str) -> bool:
    """Return whether `--against` names the folder of an evaluation; else it names a policy.

    Raises UserError if it is a folder with neither.
    """
    folder = Path(against)
    if any(folder.glob("evaluation*.jsonl")):
        return True
    is_path = folder.exists() or against.startswith((".", "/", "~"))
    names = ("config.json", "adapter_config.json")
    if is_path and not any((folder / name).is_file() for name in names):
        raise UserError(
            f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
            "config.json (of a policy) nor adapter_config.json (of adapters)"
        )
    return False


def check_same_scoring(
    earlier: Mapping[str, Any], now: Mapping[str, Any], words: Mapping[str, str], advice: str
) -> None:
    """Raise UserError if an earlier evaluation was scored differently.

    earlier: its stats.
    now: what scores depend on here.
    words: describes each key of `now`.
    """
    for key, current in now.items():
        then = earlier.get(key, current)
        if then != current:
            raise UserError(
                f"--against: {words[key]} {then}, here {current}. Such scores are not comparable. "
                f"Evaluate both policies with {advice}"
            )


def policy_at(policy: PolicyConfig, path: str) -> PolicyConfig:
    """Return the section of another policy, which has its own tokenizer."""
    return policy.model_copy(update={"path": path, "tokenizer": None, "revision": None})


def config_text(cfg: BaseModel, policy: str | None) -> str:
    """Return the config of an evaluation as YAML.

    policy: its path as the user named it.
    """
    resolved = without_userinfo(cfg.model_dump(mode="json"))
    if policy is not None:
        resolved["policy"]["path"] = policy
    return str(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
