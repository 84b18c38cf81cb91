"""The composite reward of `reward.definition` as a scorer of a translation run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ServiceUnreachable, UserError
from scorekit.rewards import CompositeReward, RewardDefinition, RewardResult, SyncCompositeReward
from scorekit.rewards.engine import check_languages
from scorekit.rewards.rules import load_gate
from scorekit.schemas import Failed, Info, Scored, Truncated
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from trainer.translation.rewards.reward_batch import BAD_SOURCE, CLOSED_GATE, failure

#: Local rules that need what a sample of this trainer does not carry, and the key to use instead.
_OTHER_KEYS = {"chrf": "w_chrf", "truncated": "no_eos_penalty"}


class Composed(Scored):
    """A composite reward as the score of a translation.

    stats: raw values of its components, and 1 or 0 for each closed gate.
    """

    stats: dict[str, float]


class CompositeScorer:
    """Scores translations by a reward definition. Groups of many callers share requests."""

    def __init__(self, definition: RewardDefinition, key: str, *, caching: bool = True) -> None:
        """Check the definition and its services.

        key: config key, for errors. caching: whether services use their score cache.
        Raises UserError if a service does not answer or fit, or if the definition needs what this
        trainer does not give.
        """
        _check_inputs(definition, key)
        self._reward = SyncCompositeReward(definition if caching else _without_cache(definition))
        try:
            #: What each component's service is.
            self.infos: dict[str, Info] = self._reward.check()
        except (ServiceUnreachable, RequestError, UserError) as error:
            self._reward.close()
            raise UserError(f"{key}: {error}") from None

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._reward.close()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig
    ) -> Future[RewardOutput]:
        """Start scoring and return the future. The definition has its own options."""

        async def score(reward: CompositeReward) -> RewardOutput:
            results = await reward.score(samples)
            return reward_output([_as_scored(r, s) for r, s in zip(results, samples, strict=True)])

        return self._reward.submit(score)


def check_target_languages(
    definition: RewardDefinition | None, key: str, languages: Iterable[str]
) -> None:
    """Raise UserError if a gate does not know a target language of the examples.

    key: config key of the definition."""
    if definition is None:
        return
    rules = {name: load_gate(f"{key}.gates.{name}", g) for name, g in definition.gates.items()}
    try:
        check_languages(definition, rules, languages)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _check_inputs(definition: RewardDefinition, key: str) -> None:
    if definition.token_rewards is not None:
        raise UserError(
            f"{key}.token_rewards: tokens are rewarded by the keys of a run's reward in this "
            "trainer. Use reward.w_xcomet_span or reward.w_mqm_span"
        )
    for name, component in definition.components.items():
        if component.is_group_rule:
            raise UserError(
                f"{key}.components.{name}: rules of groups do not exist in this trainer. Remove it"
            )
        if component.reference:
            raise UserError(
                f"{key}.components.{name}.reference: services get no reference in this trainer. "
                "Remove it"
            )
        if other_key := _OTHER_KEYS.get(component.rule or ""):
            raise UserError(
                f"{key}.components.{name}: use reward.{other_key} in place of `{component.rule}`"
            )


def _without_cache(definition: RewardDefinition) -> RewardDefinition:
    components = {
        name: component
        if component.service is None
        else component.model_copy(update={"options": component.options | {"cache": False}})
        for name, component in definition.components.items()
    }
    return definition.model_copy(update={"components": components})


def _as_scored(result: RewardResult, sample: SampleForScoring) -> Scored | Failed:
    answers = [c.answer for c in result.components.values() if isinstance(c.answer, Scored)]
    if result.reward is None:
        return _no_reward(result)
    return Composed(
        id=None,
        ok=True,
        score=result.reward,
        tokens=0,
        truncated=Truncated(
            src=any(answer.truncated.src for answer in answers),
            mt=any(answer.truncated.mt for answer in answers),
        ),
        mt_covered=min((answer.mt_covered for answer in answers), default=len(sample.mt)),
        cached=bool(answers) and all(answer.cached for answer in answers),
        stats=result.stats(),
    )


def _no_reward(result: RewardResult) -> Failed:
    """Return why there is no reward. A closed gate is no error of the text: it has no penalty."""
    missing = [c for c in result.components.values() if c.weight and c.status != "ok"]
    statuses = [component.status for component in missing if component.status != "skipped"]
    type = statuses[0] if statuses else CLOSED_GATE
    for status in (*TEXT_ERROR_TYPES, BAD_SOURCE):
        if status in statuses:
            type = status
    return failure(type, result.reason or "no reward", retryable=result.is_transient)
