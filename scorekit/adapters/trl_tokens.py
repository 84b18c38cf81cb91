"""Token advantages in TRL's GRPOTrainer: error spans of a scoring service become token rewards.

from scorekit.adapters.trl_tokens import SpanRewards, TokenGRPOTrainer

spans = SpanRewards("http://127.0.0.1:8002", tokenizer=tokenizer, src_key="src", name="xcomet")
trainer = TokenGRPOTrainer(..., reward_funcs=[metricx, spans], advantage_norm="batch")

The overridden methods are those of TRL 1.16. TRL and torch are imported when `TokenGRPOTrainer` is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from scorekit.adapters.shared import (
    Sent,
    SpanWeights,
    SyncTrainerReward,
    TrainerRow,
    log_missing,
    message_text,
    raise_for_outage,
    reward_settings,
    severities_of,
)
from scorekit.adapters.trl import rows_of_columns
from scorekit.credit import (
    SEVERITY_WEIGHTS,
    AdvantageNorm,
    DecodeConfig,
    combine_sources,
    compute_advantages,
    decode_completion,
)
from scorekit.credit.assign import align_scored
from scorekit.credit.checks import (
    Combine,
    OverlapPolicy,
    check_span_options,
    check_stop_ids,
    check_trained_weights,
    is_finite,
)
from scorekit.errors import UserError
from scorekit.prompts import load_postprocess
from scorekit.rewards import RewardResult, TokenRewards

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


#: The options of token rewards where none is set.
_DEFAULTS: dict[str, Any] = {
    "severity_weights": severities_of(SEVERITY_WEIGHTS),
    "overlap_policy": "any_overlap",
    "overlap_threshold": 0.5,
    "combine": "sum",
    "use_confidence": False,
}
#: What the function gets beside single rows.
_SENDS: tuple[Sent, ...] = ("finish_reason", "tokens")


class SpanRewards:
    """A reward function of TRL whose services mark error spans.

    It returns the reward of each completion (`reward_weights=[0]` leaves that out of the sum), and
    stores the token rewards of the call for `TokenGRPOTrainer`: one request gives both. The reward
    of a `url` is the service's score. A completion without one, or whose spans do not fit its text,
    has neither.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        tokenizer: Any,
        severity_weights: Mapping[str, float | None] = SEVERITY_WEIGHTS,
        weight: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        overlap_policy: OverlapPolicy = "any_overlap",
        overlap_threshold: float = 0.5,
        combine: Combine = "sum",
        use_confidence: bool = False,
        name: str = "spans",
        **settings: Any,
    ) -> None:
        """Check the settings; nothing is requested yet.

        tokenizer: the policy's.
        stop_ids: ids that end a completion and are no part of its text; None: the tokenizer's EOS.
        name: the name in TRL's log.
        settings: those of RewardSettings, or SCOREKIT_REWARD_<NAME>. A definition needs
        `token_rewards`, and has no rule of groups. The others are the short form of `token_rewards`
        for a `url`:
        weight: of the penalties; else see `scorekit.credit.assign_credit`.
        Raises UserError if a setting is wrong or has no effect.
        """
        checked = reward_settings(**(settings if url is None else {"url": url, **settings}))
        _check_span_arguments(
            weight, stop_ids, severity_weights, overlap_policy, overlap_threshold, combine
        )
        options: dict[str, Any] = {
            "severity_weights": severities_of(severity_weights),
            "overlap_policy": overlap_policy,
            "overlap_threshold": overlap_threshold,
            "combine": combine,
            "use_confidence": use_confidence,
        }
        spans = SpanWeights(None, weight, options)
        if checked.definition is not None:
            if checked.definition.token_rewards is None:
                raise UserError(
                    "definition: has no token_rewards. Add them, or give the url of one service "
                    "with error spans, and the definition to a reward_function beside it"
                )
            if spans != SpanWeights(None, 1.0, _DEFAULTS):
                raise UserError(
                    "weight, severity_weights, combine and the like have no effect beside "
                    "definition. Set them in its token_rewards"
                )
        self._source = SyncTrainerReward(checked, "SpanRewards", sends=_SENDS, spans=spans)
        self._tokenizer = tokenizer
        eos = getattr(tokenizer, "eos_token_id", None)
        default_stops = [] if eos is None else [eos]
        self._stop_ids = default_stops if stop_ids is None else list(stop_ids)
        self._decode_cfg = DecodeConfig(load_postprocess(checked.postprocess))
        self.__name__ = self.__qualname__ = name
        #: Of each completion of the last call, in its order; None: it has no reward.
        self.credits: list[TokenRewards | None] = []

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        """Return the reward of each completion, or None, and store its token rewards.

        completion_ids: [B, T] as sampled. The text that is scored is decoded from them.
        Raises UserError if the service marks no spans or a severity has no weight, and
        ScorekitError if it answers for no completion.
        """
        self.credits = [None] * len(prompts)  # an exception must not leave those of the last call
        rows = []
        for fields, prompt, completion, ids in zip(
            rows_of_columns(columns, len(prompts)),
            prompts,
            completions,
            completion_ids,
            strict=True,
        ):
            _check_single_turn(completion)
            text = decode_completion(self._tokenizer, self._text_ids(ids))
            rows.append(TrainerRow(fields, message_text(prompt), text))
        results = self._source.score(rows)
        raise_for_outage(results)
        log_missing(self.__name__, results)
        self.credits = [
            self._credit(ids, result) for ids, result in zip(completion_ids, results, strict=True)
        ]
        return [
            None if credit is None else result.reward
            for credit, result in zip(self.credits, results, strict=True)
        ]

    def token_rewards(self) -> list[list[float] | None]:
        """Return the weighted token rewards of the last call, [B, T]; None: no reward."""
        return [None if credit is None else credit.rewards for credit in self.credits]

    def covered(self) -> list[list[bool] | None]:
        """Return which tokens are trained on, those that the services have read in the last call,
        [B, T]; None: no reward."""
        return [None if credit is None else credit.valid for credit in self.credits]

    def _text_ids(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self._stop_ids else ids

    def _credit(self, ids: Sequence[int], result: RewardResult) -> TokenRewards | None:
        if result.reward is None:
            return None
        try:
            alignment = align_scored(
                self._tokenizer, ids, decode_cfg=self._decode_cfg, stop_ids=self._stop_ids
            )
            return self._source.token_rewards(result, alignment)
        except ValueError as error:  # a span outside the text
            log.warning("%s: a completion has no reward: %s", self.__name__, error)
            return None


def _check_span_arguments(weight: Any, stop_ids: Any, weights: Any, *options: Any) -> None:
    """Raise UserError if a setting of SpanRewards is wrong.

    options: those of the overlap.
    """
    if not is_finite(weight) or weight < 0:  # below 0 it would reward errors
        raise UserError(f"weight: {weight!r} is no finite number of at least 0. Set one")
    try:
        check_span_options(weights, *options)
        check_trained_weights(weights, weight)
        check_stop_ids(() if stop_ids is None else stop_ids)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_single_turn(completion: Any) -> None:
    if not isinstance(completion, str) and len(completion) > 1:
        raise UserError(
            "a completion has several messages (tool calls?): spans can be assigned to the tokens "
            "of one message only. Train without tools"
        )


class TokenAdvantageMixin:
    """A mixin for TRL's GRPOTrainer, listed before it among the bases of a class.

    The advantage of a token is computed from the sum of all reward functions, each times its
    weight, plus the token rewards of those that are `SpanRewards`. A completion for which one
    function gave None, NaN or infinity has no reward: no mean counts it, its advantages are 0 and
    its tokens leave the loss.
    """

    accelerator: Any
    args: Any
    beta: float
    model: Any
    num_generations: int
    num_generations_eval: int
    reward_funcs: list[Any]
    reward_weights: Tensor
    _metrics: Any

    def __init__(
        self,
        *args: Any,
        advantage_norm: AdvantageNorm = "batch",
        center_groups: bool = False,
        advantage_eps: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        """Make the trainer.

        advantage_norm, center_groups, advantage_eps: `norm`, `center` and `eps` of
        `scorekit.credit.compute_advantages`. The other arguments are GRPOTrainer's.
        Raises UserError if no reward function is a SpanRewards, or if an option of TRL would have
        no effect.
        """
        if advantage_norm not in get_args(AdvantageNorm):
            names = ", ".join(get_args(AdvantageNorm))
            raise UserError(
                f"advantage_norm: {advantage_norm!r} does not exist. Set one of {names}"
            )
        if not is_finite(advantage_eps) or advantage_eps < 0:
            raise UserError(f"advantage_eps: {advantage_eps!r} is no number of at least 0. Set one")
        self._advantage_options: dict[str, Any] = {
            "norm": advantage_norm,
            "center": center_groups,
            "eps": advantage_eps,
        }
        super().__init__(*args, **kwargs)
        if not self._span_rewards:
            raise UserError("reward_funcs: no SpanRewards among them. Add one, or use GRPOTrainer")
        for option, default in (
            ("scale_rewards", "group"),
            ("multi_objective_aggregation", "sum_then_normalize"),
        ):
            if getattr(self.args, option, default) != default:
                raise UserError(f"{option}: has no effect on token advantages. Set advantage_norm")

    @property
    def _span_rewards(self) -> list[SpanRewards]:
        return [function for function in self.reward_funcs if isinstance(function, SpanRewards)]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rewards [B, functions] of all processes; a row that lacks one is NaN."""
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        is_missing = ~rewards.isfinite().all(dim=1)
        self._rewards = rewards.masked_fill(is_missing[:, None], math.nan)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch with `advantages` [B, T], and a mask of the tokens to train on."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        mask_BT = output["completion_mask"]
        if "tool_mask" in output:
            mask_BT = mask_BT * output["tool_mask"]
        valid, token_rewards = self._token_rows(mask_BT.bool().tolist())
        advantages, is_scored = self._advantages(valid, token_rewards)
        trained_BT = mask_BT * mask_BT.new_tensor(is_scored)[:, None]
        if self.beta == 0.0:  # else every token keeps its KL term
            trained_BT = trained_BT * mask_BT.new_tensor(valid)
        output["advantages"] = output["advantages"].new_tensor(advantages)
        output["tool_mask"] = trained_BT
        output["num_items_in_batch"] = self.accelerator.gather(trained_BT.sum()).sum()
        return output

    def _token_rows(self, mask: list[list[bool]]) -> tuple[list[list[bool]], list[list[float]]]:
        """Return the valid tokens and the token rewards of this process's rows, both [B, T]."""
        valid = [list(row) for row in mask]
        token_rewards = [[0.0] * len(row) for row in mask]
        sources = [
            zip(function.token_rewards(), function.covered(), strict=True)
            for function in self._span_rewards
        ]
        for index, row in enumerate(zip(*sources, strict=True)):
            for rewards, covered in row:
                if rewards is None or covered is None:
                    continue  # the row has no sequence reward either
                missing = len(mask[index]) - len(rewards)
                padded = [*rewards, *[0.0] * missing]
                token_rewards[index] = combine_sources([token_rewards[index], padded])
                for token, is_covered in enumerate(covered):
                    valid[index][token] &= is_covered
        return valid, token_rewards

    def _advantages(
        self, valid: list[list[bool]], token_rewards: list[list[float]]
    ) -> tuple[list[list[float]], list[bool]]:
        """Return the advantages of this process's rows [B, T], and which rows have a reward [B].

        Means and deviations are those of all processes.
        """
        from accelerate.utils import gather_object

        is_training = self.model.training
        group_size = self.num_generations if is_training else self.num_generations_eval
        weights = self.reward_weights.to(self._rewards.device).double()
        sums = (self._rewards.double() * weights).sum(dim=1).tolist()
        rewards = [reward if math.isfinite(reward) else None for reward in sums]
        all_valid, all_token_rewards = gather_object(valid), gather_object(token_rewards)
        groups = [index // group_size for index in range(len(rewards))]
        advantages = compute_advantages(
            rewards, all_token_rewards, all_valid, groups, **self._advantage_options
        )
        metrics = self._metrics["train" if is_training else "eval"]
        num_scored = sum(reward is not None for reward in rewards)
        metrics["coverage"].append(num_scored / len(rewards))
        penalties = [reward for row in all_token_rewards for reward in row]
        metrics["penalized_tokens"].append(
            sum(reward != 0 for reward in penalties) / max(1, sum(map(sum, all_valid)))
        )
        first = self.accelerator.process_index * len(valid)
        local = slice(first, first + len(valid))
        return advantages[local], [reward is not None for reward in rewards[local]]


@cache
def _token_grpo_trainer() -> Any:
    from trl.trainer.grpo_trainer import GRPOTrainer

    doc = "GRPOTrainer with token advantages (`TokenAdvantageMixin`)."
    body = {"__doc__": doc, "__module__": __name__}
    return type("TokenGRPOTrainer", (TokenAdvantageMixin, GRPOTrainer), body)


def __getattr__(name: str) -> Any:
    """Return `TokenGRPOTrainer`, which needs TRL: it is imported with the class."""
    if name == "TokenGRPOTrainer":
        return _token_grpo_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
