"""Run our binding in verl's reward managers and agent loop while a service fails for some texts
(`make test-verl`)."""

from __future__ import annotations

from collections import Counter

import pytest

from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.flaky_server import FAULTS
from testing.servers import free_port, running_service
from tests.kits.trainer.verl.cases import IMPATIENT, VERL, failing_by_text, fault_of, probe

MANAGERS = ["naive", "dapo", "gdpo"]
#: Each fails by itself; the second word of a failure is the text that the service would score.
FAILED_TEXTS = [f"{name}: x" for name in FAULTS]
TEXTS = ["가", *FAILED_TEXTS, "a nan", "x\0y", "word " * 600, "가"]
#: Callers at once share requests: these failures of one text cost the others nothing.
AT_ONCE = ["가", "500: x", "garbage: x", "a nan", "x\0y", "라"]
SCORED = [True, *[False] * (len(TEXTS) - 2), True]
ENTRY = """
- name: scorekit_tokens
  _target_: scorekit.adapters.verl_tokens.TokenRewardLoop
  settings: {{url: "{url}", timeout_s: 1.0, deadline_s: 2.0}}
"""

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it"),
]


#: A definition by which no row of the tests has a reward: they have no `ref`.
WITH_REF = {"components": {"xcomet": {"service": "http://127.0.0.1:1", "reference": True}}}


class Recording(FakeBackend):
    """Counts how often it scores each text."""

    def __init__(self, service):
        super().__init__(service)
        self.scored = Counter()

    def _outcome(self, sample):
        self.scored[sample.mt] += 1
        return super()._outcome(sample)


def _definition(url, other, weight=1.0, **keys):
    return {
        "components": {
            "xcomet": {"service": url, "options": {"overlong": "error"}},
            "other": {"service": other, "weight": weight},
        },
        **IMPATIENT,
        **keys,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all cases at once; each manager and agent loop has a service of its own."""
    folder = tmp_path_factory.mktemp("verl")
    backends = {name: Recording("xcomet") for name in (*MANAGERS, "tokens", "composite", "group")}
    with (
        failing_by_text(backends["naive"]) as (naive, _),
        failing_by_text(backends["dapo"]) as (dapo, _),
        failing_by_text(backends["gdpo"]) as (gdpo, _),
        failing_by_text(backends["tokens"]) as (tokens, _),
        failing_by_text(backends["composite"]) as (composite, _),
        failing_by_text(backends["group"]) as (group, _),
        running_service(FakeBackend("xcomet")) as healthy,
    ):
        service = {**IMPATIENT, "overlong": "error"}
        closed = f"http://127.0.0.1:{free_port()}"
        urls = {"naive": naive, "dapo": dapo, "gdpo": gdpo}
        loop_file = folder / "loops.yaml"
        loop_file.write_text(ENTRY.format(url=group))
        calls = {
            manager: [
                "managed",
                {"manager": manager, "texts": TEXTS, "settings": {"url": url, **service}},
            ]
            for manager, url in urls.items()
        }

        def composed(texts=TEXTS, at_once=False, **definition):
            settings = {"definition": _definition(composite, **definition)}
            case = {"manager": "naive", "texts": texts, "settings": settings}
            return case | {"at_once": at_once}

        def token_case(*texts, **definition):
            settings = {"definition": _definition(composite, **definition)}
            return {"texts": texts, "settings": settings, "span_component": "xcomet"}

        refused = {"refused_text_reward": {"overlong": -7.0}}
        calls |= {
            "rate_limited": [
                "managed",
                {"manager": "rate_limited", "texts": ["가"], "settings": {"url": closed}},
            ],
            "tokens": ["tokens", {"texts": TEXTS, "settings": {"url": tokens, **service}}],
            **{
                f"mistake_{manager}": [
                    "managed",
                    {"manager": manager, "texts": ["가"], "settings": {"definition": WITH_REF}},
                ]
                for manager in MANAGERS
            },
            "mistake_group": [
                "group",
                {"texts": ["가", "나"], "settings": {"definition": WITH_REF}},
            ],
            "mistake_tokens": [
                "tokens",
                {"texts": ["가"], "settings": {"url": tokens, "src_key": "source"}},
            ],
            "composite": ["managed", composed(other=healthy)],
            "composite_at_once": ["managed", composed(AT_ONCE, True, other=healthy)],
            "alone": ["managed", composed(at_once=True, other=healthy, batch_size=1)],
            "missing": ["managed", composed(["가", "다"], True, other=closed)],
            "reported": ["managed", composed(other=closed, weight=0.0)],
            "composite_tokens": ["tokens", token_case(*TEXTS, other=healthy)],
            "missing_tokens": ["tokens", token_case("가", other=closed)],
            "refused_tokens": ["tokens", token_case(TEXTS[-2], other=healthy, **refused)],
            "spanless": ["tokens", token_case("가", other=healthy) | {"span_component": "other"}],
            "group": ["group", {"texts": ["가", "500: x", "나"], "settings": {"url": group}}],
            "token_group": [
                "group",
                {
                    "texts": ["가", "a nan", "나"],
                    "settings": {"url": group},
                    "loop_file": str(loop_file),
                },
            ],
        }
        calls["group"][1]["settings"] |= IMPATIENT
        yield probe(folder, calls) | {
            "scored": {name: backend.scored for name, backend in backends.items()}
        }


def _score(mt):
    return fake_score(TranslationSample(src="a", mt=mt), 1.0)


def _check(answers, reward_of):
    """Check that each text has its reward, or an exception in place of any number."""
    for text, answer, is_scored in zip(TEXTS, answers, SCORED, strict=True):
        if is_scored:
            assert reward_of(answer) == pytest.approx(_score(text), abs=1e-6)
        else:
            name = answer.partition(":")[0] if isinstance(answer, str) else answer
            assert name in ("SampleError", "RequestError", "ServiceUnreachable"), (text, answer)


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_failed_score_leaves_each_manager_as_an_exception(results, manager):
    _check(results[manager], lambda answer: answer["reward_score"])


def test_a_manager_that_would_make_it_reward_0_is_refused(results):
    (answer,) = results["rate_limited"]
    assert answer.startswith("UnsafeRewardManager: ")


def test_a_mistake_leaves_managers_and_agent_loop_as_what_ends_the_run(results):
    line = "RunEnds: components.xcomet: reads the field 'ref', and no sample has it."
    for manager in MANAGERS:
        (answer,) = results[f"mistake_{manager}"]
        assert answer.startswith(line)
    assert results["mistake_group"] == {"status": "failure", "rm_scores": {}}
    assert results["mistake_tokens"][0].startswith("RunEnds: no field 'source'; there are: ")


def test_a_failed_score_leaves_the_agent_loop_as_an_exception(results):
    _check(results["tokens"], lambda answer: answer["rewards"][-1])


def test_a_failed_component_leaves_manager_and_agent_loop_as_an_exception(results):
    _check(results["composite"], lambda answer: answer["reward_extra_info"]["component/xcomet"])
    _check(results["composite_tokens"], lambda answer: answer["extra"]["component/xcomet"])
    _check(results["alone"], lambda answer: answer["reward_extra_info"]["component/xcomet"])
    at_once = results["composite_at_once"]
    assert [isinstance(answer, dict) for answer in at_once] == [True, *[False] * 4, True]
    assert all(answer.startswith("SampleError: ") for answer in at_once[1:-1])
    assert all(answer.startswith("SampleError: ") for answer in results["missing"])
    assert "other: " in results["missing"][0] and "other: " in results["missing_tokens"][0]


def test_a_component_that_is_only_reported_may_be_missing(results):
    _check(results["reported"], lambda answer: answer["reward_score"])
    scored = [answer for answer in results["reported"] if not isinstance(answer, str)]
    assert all(answer["reward_extra_info"]["component/other"] is None for answer in scored)
    assert len({tuple(answer["reward_extra_info"]) for answer in scored}) == 1


def test_a_refused_text_has_the_reward_of_the_definition_and_no_token_reward(results):
    (tokens,) = results["refused_tokens"]
    assert tokens["rewards"][-1] == -7.0 and not any(tokens["rewards"][:-1])
    assert set(tokens["mask"]) == {1} and tokens["extra"]["component/xcomet"] is None


def test_no_text_is_paid_for_twice(results):
    """Count what reaches the model: callers asked for the same texts in six ways or more."""
    for name, scored in results["scored"].items():
        good = {text: count for text, count in scored.items() if text in ("가", "나", "다", "라")}
        assert good and set(good.values()) == {1}, name
        # NaN is not kept; what hung reaches the model when it is given up.
        unscored = scored.keys() - good.keys() - {"a nan", "hang: x"}
        assert not any(map(fault_of, unscored)) and "x\0y" not in unscored


def test_a_lost_completion_leaves_its_group_and_the_others_stay(results):
    """Run verl's own worker: it keeps the completions that are left, and marks the group."""
    group, token_group = results["group"], results["token_group"]
    assert group["status"] == token_group["status"] == "failure"
    for answer in (group, token_group):
        # verl asks for the three at once, so the lost text may be any of them.
        assert len(answer["rm_scores"].keys() & {"p_0_0", "p_1_0", "p_2_0"}) == 2
        rewards = sorted(scores[-1] for scores in answer["rm_scores"].values())
        assert rewards == pytest.approx(sorted(map(_score, ("가", "나"))), abs=1e-6)
