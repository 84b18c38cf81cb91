"""One definition gives the same numbers in our trainer, in every other one, and from Python."""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scorekit.adapters.nemo_gym.reward import Verifier
from scorekit.adapters.openrlhf import RewardServer
from scorekit.adapters.shared import TrainerReward, reward_settings
from scorekit.adapters.trl import reward_function
from scorekit.adapters.trl_tokens import SpanRewards
from scorekit.adapters.verl import compute_score
from scorekit.credit import align_completion
from scorekit.rewards import SyncCompositeReward, load_definition, token_rewards
from scorekit.server.fake import FakeBackend
from testing.openai_server import FakeOpenAI
from testing.servers import running_service
from tests.kits.real_tokenizers import real_tokenizer
from tests.kits.trainer.callers.slime import Sample, score, slime_args
from tests.kits.trainer.runs import rollout
from tests.kits.trainer.verifiers import cases as verifiers
from tests.kits.trainer.verl import cases as verl
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient

ROOT = Path(__file__).parents[4]
SRC = "Please save all of your changes before you close the window."
MTS = ["창을 닫기 전에 저장하세요.", SRC, "창을 닫기 red colour 전에", "가 가 가 가 가 가 가 가"]
LABEL = json.dumps({"src": SRC})
PROMPT = "Translate: "


@pytest.fixture(scope="module")
def urls():
    with (
        running_service(FakeBackend("metricx")) as metricx,
        running_service(FakeBackend("xcomet")) as xcomet,
    ):
        yield metricx, xcomet


@pytest.fixture(scope="module")
def definition(urls):
    """Return a definition of two services, a rule and a gate that lowers a reward."""
    return {
        "components": {
            "metricx": {"service": urls[0], "offset": 5.0, "scale": -1.0, "weight": 0.3},
            "xcomet": {"service": urls[1], "weight": 2.0},
            "repetition": {"rule": "repetition", "weight": -1.7},
        },
        "gates": {"copy": {"rule": "copy", "max_share": 0.5, "reward": -9.0}},
    }


def from_python(definition, folder):
    with SyncCompositeReward(definition) as reward:
        results = reward.score([{"src": SRC, "mt": mt} for mt in MTS])
    return [result.reward for result in results]


def in_our_trainer(definition, folder):
    cfg = RewardConfig(w_metricx=0.0, w_xcomet_span=0.0, definition=load_definition(definition))
    rollouts = [
        rollout(
            [1],
            [5] * len(mt),
            mt,
            src_text=SRC,
            pair="en-US>ko-KR",
            token_char_offsets=[(i, i + 1) for i in range(len(mt))],
        )
        for mt in MTS
    ]
    with closing(RewardClient(cfg)) as client:
        scores = client.score([item.scored_text for item in rollouts])
    return [reward.r_seq for reward in compute_rewards(rollouts, scores, cfg)]


def in_trl(definition, folder):
    function = reward_function(definition=definition)
    return function(prompts=[PROMPT] * len(MTS), completions=MTS, src=[SRC] * len(MTS))


def in_verl(definition, folder):
    async def ask(mt):
        row = {"data_source": "d", "ground_truth": "", "extra_info": {"src": SRC}}
        call = {**row, "solution_str": mt, "reward_manager": "naive", "definition": definition}
        return (await compute_score(**call))["score"]

    async def ask_all():
        return await asyncio.gather(*map(ask, MTS))

    return asyncio.run(ask_all())


def in_openrlhf(definition, folder):
    body = {
        "query": [f"{PROMPT}{mt}</s>" for mt in MTS],
        "prompts": [PROMPT] * len(MTS),
        "labels": [LABEL] * len(MTS),
    }
    return _served(definition, lambda server: server.get_reward(json.dumps(body).encode()))[
        "rewards"
    ]


def in_slime_over_http(definition, folder):
    bodies = [{"prompt": PROMPT, "response": f"{mt}<|im_end|>", "label": LABEL} for mt in MTS]

    async def ask_all(server):
        return await asyncio.gather(
            *(server.remote_rm(json.dumps(body).encode()) for body in bodies)
        )

    return _served(definition, ask_all)


def _served(definition, ask):
    async def run():
        reward = TrainerReward(reward_settings(definition=definition), "the trainer")
        try:
            return await ask(RewardServer(reward))
        finally:
            await reward.close()

    return asyncio.run(run())


def in_slime(definition, folder):
    samples = [Sample(response=mt, label=LABEL, group_index=0) for mt in MTS]
    args = slime_args(scorekit={"definition": definition})
    return [sample.reward for sample in score(args, [samples])]


def in_nemo_gym(definition, folder):
    recorded = json.loads((ROOT / "tests/data/nemo_gym/verify.json").read_text(encoding="utf-8"))
    request: dict[str, Any] = recorded["cases"][0]["request"] | {"src": SRC}

    def answering(mt):
        answer = copy.deepcopy(request)
        answer["response"]["output"][-1]["content"][0]["text"] = mt
        return answer

    async def run():
        verifier = Verifier(reward_settings(definition=definition))
        try:
            return [(await verifier.verify(answering(mt)))["reward"] for mt in MTS]
        finally:
            await verifier.close()

    return asyncio.run(run())


def in_verifiers(definition, folder):
    sources = [f"{SRC}{' ' * index}" for index in range(len(MTS))]  # a row for each translation
    policy = FakeOpenAI(
        respond=lambda body, seed: MTS[sources.index(body["messages"][-1]["content"])],
        records=False,
    )
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"src_text": src, "src_lang": "en", "tgt_lang": "ko"}) + "\n"
            for src in sources
        )
    )
    # The fake services score a source with its white space, so all rows have one source.
    reward = {"definition": definition, "src_pattern": r"(?P<src>.*?)\s*\Z"}
    taskset = {"data": str(rows), "template": "source", "task": {"reward": reward}}
    arguments = {"taskset_id": "scorekit-translation", "taskset": taskset}
    with policy.running() as url:
        played = verifiers.probe(folder, {"a": ["played", arguments | {"policy_url": url}]})["a"]
    return [episode["reward"] for episode in played["episodes"]]


needs_verifiers = (
    pytest.mark.verifiers,
    pytest.mark.skipif(not verifiers.VERIFIERS.exists(), reason="no .venv-verifiers"),
)
needs_verl = (
    pytest.mark.verl,
    pytest.mark.skipif(not verl.VERL.exists(), reason="no .venv-verl"),
)


@pytest.mark.parametrize(
    "rewards_in",
    [
        in_our_trainer,
        in_trl,
        in_verl,
        in_openrlhf,
        in_slime,
        in_slime_over_http,
        in_nemo_gym,
        pytest.param(in_verifiers, marks=needs_verifiers),
    ],
    ids=lambda function: function.__name__,
)
def test_a_definition_gives_the_same_number_in_every_trainer(definition, rewards_in, tmp_path):
    expected = from_python(definition, tmp_path)
    assert expected[1] == -9.0 and len(set(expected)) == len(MTS)
    assert rewards_in(definition, tmp_path) == expected


# -- rewards of tokens ----------------------------------------------------------------------------

SPANS = {"token_rewards": {"spans": {"xcomet": 0.5}, "combine": "max"}}


def tokens_from_python(definition, tokenizer, completions):
    with SyncCompositeReward(definition) as reward:
        results = reward.score([{"src": SRC, "mt": mt} for mt in MTS])
        rows = []
        for ids, result in zip(completions, results, strict=True):
            alignment = align_completion(tokenizer, ids, stop_ids=[tokenizer.eos_token_id])
            tokens = token_rewards(reward.definition, result, alignment.text, alignment.offsets)
            rows.append((result.reward, tokens.rewards))
    return rows


def tokens_in_trl(definition, tokenizer, completions, folder):
    function = SpanRewards(definition=definition, tokenizer=tokenizer)
    texts = [PROMPT] * len(MTS)
    rewards = function(texts, MTS, completions, src=[SRC] * len(MTS))
    return list(zip(rewards, function.token_rewards(), strict=True))


def tokens_in_verl(definition, tokenizer, completions, folder):
    """Return them as verl has them: the reward of the text is on the last token, in float32."""
    call = {"texts": MTS, "settings": {"definition": definition}, "extra_info": {"src": SRC}}
    answers = verl.probe(folder, {"a": ["tokens", call]})["a"]
    return [(a["extra"]["score"], [*a["rewards"][:-1], 0.0]) for a in answers]


@pytest.mark.parametrize(
    "tokens_in",
    [tokens_in_trl, pytest.param(tokens_in_verl, marks=needs_verl)],
    ids=lambda function: function.__name__,
)
def test_a_definition_gives_tokens_the_same_rewards(definition, tokens_in, tmp_path):
    tokenizer = real_tokenizer("qwen3")  # that of the probe of verl
    completions = [[*tokenizer(mt)["input_ids"], tokenizer.eos_token_id] for mt in MTS]
    services = {name: definition["components"][name] for name in ("metricx", "xcomet")}
    both = {"components": services} | SPANS  # the environment of verl has not what rules need
    expected = tokens_from_python(both, tokenizer, completions)
    assert any(any(rewards) for _, rewards in expected)
    assert tokens_in(both, tokenizer, completions, tmp_path) == expected


@pytest.mark.parametrize("rewards_in", [in_trl, in_openrlhf, in_slime, in_nemo_gym])
def test_a_trainer_that_takes_one_number_refuses_rewards_of_tokens(
    definition, rewards_in, tmp_path
):
    with pytest.raises(Exception, match=r"token_rewards: .* takes one number"):
        rewards_in(definition | SPANS, tmp_path)
