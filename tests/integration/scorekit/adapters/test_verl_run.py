"""Test the check of verl's config, and the command that starts verl (`make test-verl`)."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.kits.trainer.verl.cases import ENVIRONMENT, ROOT, VERL, probe

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it"),
]

URL = "http://127.0.0.1:1"
FUNCTION = "reward.custom_reward_function"
LOOP = "actor_rollout_ref.rollout.agent"
OURS = [
    f"{FUNCTION}.path=pkg://scorekit.adapters.verl",
    f"{FUNCTION}.name=compute_score",
    f"+{FUNCTION}.reward_kwargs.url={URL}",
    f"+{FUNCTION}.reward_kwargs.reward_manager=${{reward.reward_manager.name}}",
]
DEFINITION = {
    "components": {
        "metricx": {"service": URL, "scale": -1.0},
        "xcomet": {"service": URL, "weight": 0.0},
        "fields": {"rule": "builtins:len", "weight": -1.0},
    }
}
GROUPED = {"components": {"new": {"rule": "duplicates", "weight": -1.0}}}
MISTYPED = {"components": {"metricx": {"service": URL, "wheight": 1.0}}}
UNLOADABLE = {"components": {"mine": {"rule": "no.such:rule"}}}
ENTRY = {
    "name": "scorekit_tokens",
    "_target_": "scorekit.adapters.verl_tokens.TokenRewardLoop",
    "settings": {"url": URL},
}
#: Name -> what the file of agent loops has in place of ENTRY, and a part of the message.
ENTRIES = {
    "credit": (ENTRY | {"credit": "a:b"}, "credit: no such key"),
    "setting": (ENTRY | {"settings": {"url": URL, "srckey": "s"}}, "srckey"),
    "other": (ENTRY | {"name": "other"}, "no agent loop with name scorekit_tokens"),
    "weight": (ENTRY | {"severity_weights": {"MINOR": "one"}}, "severity_weights.MINOR: 'one'"),
    "no_weight": (ENTRY | {"severity_weights": {}}, "no severity has a weight"),
    "null_weights": (ENTRY | {"severity_weights": None}, "severity_weights: Input should be"),
    "list_weights": (ENTRY | {"severity_weights": ["MAJOR"]}, "severity_weights: Input should be"),
    "number_weights": (ENTRY | {"severity_weights": 5}, "severity_weights: Input should be"),
    "key_weights": (ENTRY | {"severity_weights": {False: -1.0}}, "[key]: Input should be"),
    "nan_weight": (ENTRY | {"severity_weights": {"MAJOR": float("nan")}}, "MAJOR: nan is no"),
    "large_weight": (ENTRY | {"severity_weights": {"MAJOR": -1e39}}, "MAJOR: -1e+39 is too large"),
    "text_settings": (ENTRY | {"settings": "x"}, "settings: Input should be"),
    "number_setting": (ENTRY | {"settings": {1: 2}}, "settings.1.[key]: Input should be"),
    "no_settings": ({k: v for k, v in ENTRY.items() if k != "settings"}, "settings: Field"),
    "number_key": (ENTRY | {1: 2}, "1: no such key"),
    "stop_id": (ENTRY | {"stop_ids": 5}, "stop_ids: Input should be a valid list"),
    "stop_text": (ENTRY | {"stop_ids": "a"}, "stop_ids: Input should be a valid list"),
    "stop_texts": (ENTRY | {"stop_ids": ["5"]}, "stop_ids.0: Input should be a valid integer"),
    "no_target": ({k: v for k, v in ENTRY.items() if k != "_target_"}, "_target_: Field required"),
    "other_target": (ENTRY | {"_target_": "mine.Loop"}, "'mine.Loop': verl would not call our"),
    "twice": ([ENTRY, ENTRY], "2 agent loops with name scorekit_tokens"),
    "span_component": (ENTRY | {"span_component": "x"}, "has no effect without definition"),
    "no_span_component": (ENTRY | {"settings": {"definition": DEFINITION}}, "span_component: None"),
    "rule": (
        ENTRY | {"settings": {"definition": DEFINITION}, "span_component": "fields"},
        "Name one of metricx, xcomet",
    ),
    "groups": (
        ENTRY | {"settings": {"definition": GROUPED}, "span_component": "new"},
        "components.new: a rule of groups, but verl sends one completion",
    ),
}
FUNCTION_CASES = {
    "rate_limited": ([], {"manager": "rate_limited"}, "reward.reward_manager: 'rate_limited'"),
    "remote": ([], {"manager": "remote"}, "reward.reward_manager: 'remote'"),
    "batch": ([], {"manager": "batch"}, "reward.reward_manager: 'batch'"),
    "old_key": (
        ["custom_reward_function.path=scorekit/adapters/verl.py"],
        {},
        "custom_reward_function.path: verl 0.9 does not read it",
    ),
    "own_path": (
        [f"{FUNCTION}.path=/tmp/mine.py"],
        {},
        "path: '/tmp/mine.py': verl would not call our code",
    ),
    "own_module": ([f"{FUNCTION}.path=pkg://mine"], {}, "start verl.trainer.main_ppo itself"),
    "own_name": ([f"{FUNCTION}.name=compute_scor"], {}, "name: 'compute_scor': verl would not"),
    "no_name": ([f"{FUNCTION}.name=null"], {}, "name: None: verl would not call our code"),
    "setting": ([], {"settings": {"url": URL, "srckey": "s"}}, "srckey"),
    "url": ([], {"settings": {"url": "localhost:1"}}, "is not the URL of a service"),
    "both": ([], {"settings": {"definition": DEFINITION, "offset": 1.0}}, "offset: has no effect"),
    "grouped": ([], {"settings": {"definition": GROUPED}}, "components.new: a rule of groups"),
    "mistyped": ([], {"settings": {"definition": MISTYPED}}, "wheight"),
    "unloadable": ([], {"settings": {"definition": UNLOADABLE}}, "components.mine.rule"),
    "no_file": ([], {"settings": {"definition": "gone.yaml"}}, "gone.yaml"),
    "gdpo_v1": (["algorithm.adv_estimator=gdpo"], {}, "gdpo finds no components"),
    "gdpo_missing": (
        [
            "algorithm.adv_estimator=gdpo",
            "trainer.use_v1=false",
            "+algorithm.gdpo_reward_keys=[scaled/metricx,scaled/xcomet]",
        ],
        {"settings": {"definition": DEFINITION}},
        "algorithm.gdpo_reward_keys: 'scaled/xcomet' has no number for some samples",
    ),
    "filter_missing": (
        ["+algorithm.filter_groups={enable: true, metric: component/xcomet}"],
        {"settings": {"definition": DEFINITION}},
        "algorithm.filter_groups.metric: 'component/xcomet'",
    ),
}
GOOD = {
    "documented": ([], {}),
    "slashes": ([f"{FUNCTION}.path=pkg://scorekit/adapters/verl"], {}),
    "file": ([f"{FUNCTION}.path=scorekit/adapters/verl.py"], {}),
    "file_url": ([f"{FUNCTION}.path=file://scorekit/adapters/verl.py"], {}),
    "definition": ([], {"settings": {"definition": DEFINITION}}),
    "gdpo": (
        [
            "algorithm.adv_estimator=gdpo",
            "trainer.use_v1=false",
            "+algorithm.gdpo_reward_keys=[scaled/metricx,scaled/fields]",
        ],
        {"settings": {"definition": DEFINITION}},
    ),
}


def _tokens(path, *more, n=4, estimator="scorekit_tokens"):
    return [
        f"{LOOP}.default_agent_loop=scorekit_tokens",
        f"{LOOP}.agent_loop_config_path={path}",
        f"actor_rollout_ref.rollout.n={n}",
        f"algorithm.adv_estimator={estimator}",
        *more,
    ]


def _example_overrides():
    text = (ROOT / "examples/verl/README.md").read_text(encoding="utf-8")
    command = text.split("-m scorekit.adapters.verl_run")[1].split("```")[0]
    return command.replace("\\\n", " ").split()


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    calls = {}
    for name, (overrides, arguments, *_) in (FUNCTION_CASES | GOOD).items():
        arguments = {"settings": {"url": URL}, "overrides": overrides} | arguments
        calls[name] = ["checked", arguments]
    composite = ENTRY | {"settings": {"definition": DEFINITION}, "span_component": "xcomet"}
    entries = {name: entry for name, (entry, _) in ENTRIES.items()}
    for name, entry in (entries | {"plain": ENTRY, "composite": composite}).items():
        content = entry if isinstance(entry, list) else [entry]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        calls[f"entry_{name}"] = [
            "checked_plainly",
            {"overrides": _tokens(folder / f"{name}.yaml")},
        ]
    plain = folder / "plain.yaml"
    for name, overrides in {
        "none": [],
        "untold": OURS[:3],
        "no_mapping": [*OURS[:2], f"+{FUNCTION}.reward_kwargs=x"],
        "example": _tokens("examples/verl/agent_loops.yaml"),
        "grpo": _tokens(plain, estimator="grpo"),
        "v0": _tokens(plain, "trainer.use_v1=false"),
        "alone": _tokens(plain, n=1),
        "no_path": _tokens("null"),
        "gone": _tokens(folder / "gone.yaml"),
    }.items():
        calls[name] = ["checked_plainly", {"overrides": overrides}]
    calls["started"] = [
        "started",
        {"overrides": [*_example_overrides(), f"hydra.run.dir={folder / 'hydra'}"]},
    ]
    return probe(folder, calls)


@pytest.mark.parametrize("name", FUNCTION_CASES)
def test_a_config_that_would_hide_a_failure_is_refused(checks, name):
    assert checks[name].startswith("UserError: ") and FUNCTION_CASES[name][2] in checks[name]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_entry_of_the_agent_loop_is_refused(checks, name):
    answer = checks[f"entry_{name}"]
    assert answer.startswith("UserError: ") and ENTRIES[name][1] in answer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "reward.custom_reward_function.path: not set"),
        ("untold", "reward_kwargs.reward_manager: expected 'naive'"),
        ("no_mapping", "reward_kwargs: 'x' are no settings"),
        ("grpo", "algorithm.adv_estimator: 'grpo' sums"),
        ("v0", "trainer.use_v1"),
        ("alone", "actor_rollout_ref.rollout.n"),
        ("no_path", "agent_loop_config_path: required"),
        ("gone", "gone.yaml: cannot be read"),
    ],
)
def test_a_config_without_our_code_or_without_positions_is_refused(checks, name, message):
    assert checks[name].startswith("UserError: ") and message in checks[name]


@pytest.mark.parametrize("name", [*GOOD, "entry_plain", "entry_composite", "example"])
def test_what_is_documented_passes(checks, name):
    assert checks[name] == ""


def test_every_process_of_verl_imports_our_estimator(checks):
    """Run the example's command until it starts Ray."""
    assert checks["started"]["exit"] == "ray would start now"
    modules = checks["started"]["variables"]["VERL_USE_EXTERNAL_MODULES"]
    assert modules == "scorekit.adapters.verl_tokens"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*OURS, "reward.reward_manager.name=rate_limited"], "reward.reward_manager: "),
        ([*OURS[:2], OURS[3], f"+{FUNCTION}.reward_kwargs.definition=gone.yaml"], "gone.yaml"),
        (_tokens("gone.yaml"), "gone.yaml: cannot be read"),
        ([f"{FUNCTION}.path=pkg://mine"], "verl would not call our code"),
        (_tokens("entries.yaml"), "settings: Input should be"),
    ],
)
def test_the_command_ends_with_2_and_one_line_before_ray_starts(overrides, message, tmp_path):
    (tmp_path / "entries.yaml").write_text(yaml.safe_dump([ENTRY | {"settings": "x"}]))
    process = subprocess.run(
        [VERL, "-W", "ignore", "-m", "scorekit.adapters.verl_run", *overrides],
        cwd=tmp_path,
        env=ENVIRONMENT | {"RAY_ADDRESS": "127.0.0.1:1"},  # an attempt to connect would fail
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2, process.stderr
    (line,) = [line for line in process.stderr.splitlines() if not line.startswith("WARNING:")]
    assert line.startswith("verl_run: ") and message in line
    assert str(ROOT) not in line
