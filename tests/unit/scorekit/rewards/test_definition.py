"""A definition is one YAML or mapping, and a wrong one is one line that says what to change."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scorekit.errors import UserError
from scorekit.rewards import CompositeReward, load_definition

URL = "http://127.0.0.1:8001"
YAML = """
components:
  metricx: {service: "http://a:1, http://b:2", offset: 5.0, scale: -1.0, weight: 0.5}
  judge:
    service: [http://c]
    task: translation_filter
    variables: {source_text: src, candidate: mt}
    field: pass
  repetition: {rule: repetition, weight: -2}
gates:
  language: {rule: language, min_probability: 0.7}
  copy: {rule: copy, factor: 0}
  length: {rule: length, reward: -20}
refused_text_reward: {invalid_input: -20}
deadline_s: 30
"""


def test_yaml_and_mapping_are_the_same(tmp_path):
    (tmp_path / "reward.yaml").write_text(YAML)
    read = load_definition(tmp_path / "reward.yaml")
    assert read == load_definition(str(tmp_path / "reward.yaml"))
    assert read == load_definition(read.model_dump()) == load_definition(read)
    assert read.components["metricx"].service == ("http://a:1", "http://b:2")
    assert read.gates["copy"].factor == 0 and read.gates["language"].min_probability == 0.7


SERVICE = {"service": URL}


@pytest.mark.parametrize(
    ("definition", "line"),
    [
        ({}, "reward definition: components: Field required"),
        ({"components": {}}, "components: Dictionary should have at least 1 item"),
        ({"components": {"a": {}}}, "components.a: needs either `service`, `rule` or `scorer`"),
        ({"components": {"a": SERVICE | {"rule": "copy"}}}, "components.a: needs either"),
        ({"components": {"a": SERVICE | {"wieght": 1}}}, "wieght: Extra inputs.*did you mean"),
        ({"components": {"a": SERVICE | {"weight": float("nan")}}}, "a.weight: .*finite"),
        ({"components": {"a": SERVICE | {"weight": 0}}}, "every weight is 0"),
        ({"components": {"a": {"service": ""}}}, "components.a.service: Value should have at"),
        ({"components": {"a": SERVICE | {"field": "x"}}}, "a.field: Input should be 'score'"),
        ({"components": {"a": {"rule": "copy", "field": "pass"}}}, "`field` has no effect beside"),
        ({"components": {"a": {"rule": "copy", "options": {"cache": False}}}}, "`options` has no"),
        (
            {"components": {"a": SERVICE | {"group": True}}},
            "`group` has no effect beside `service`",
        ),
        (
            {"components": {"a": {"rule": "copy", "group": True}}},
            "`group` is for a module:function",
        ),
        ({"components": {"a": {"rule": "copy", "batch": True}}}, "`batch` is for a module:func"),
        (
            {"components": {"a": {"rule": "a:b", "batch": True, "group": True}}},
            "`group` and `batch`",
        ),
        (
            {"components": {"a": {"rule": "duplicates", "applies_to_refused_text": True}}},
            "a rule of groups cannot apply",
        ),
        (
            {"components": {"a": SERVICE | {"severity_weights": {"MINOR": -1}}}},
            "`severity_weights` needs `field` set to one of error_spans",
        ),
        (
            {
                "components": {
                    "a": SERVICE
                    | {"field": "error_spans", "severity_weights": {"MINOR": -1, "minor": -2}}
                }
            },
            "`severity_weights` names a severity twice",
        ),
        ({"components": {"a": SERVICE | {"variables": {"x": "src"}}}}, "Give `task`, too"),
        ({"components": {"a b": SERVICE}}, r"components.a b.\[key\]: a name has up to 64 letters"),
        ({"components": {"a\n": SERVICE}}, r"components.a .\[key\]: a name has up to 64"),
        ({"components": {"": SERVICE}}, r"components..\[key\]: a name has"),
        ({"components": {"복사": SERVICE}}, r"components.복사.\[key\]: a name has"),
        ({"components": {False: SERVICE}}, "a name is a text, and this is False. Write it in"),
        ({"components": {5: SERVICE}}, "a name is a text, and this is 5. Write it in quotes"),
        ({"components": {"a": SERVICE | {"weight": True}}}, "weight: this is true or false. Give"),
        ({"components": {"a": SERVICE | {"offset": False}}}, "offset: this is true or false"),
        ({"components": {"a": SERVICE | {"weight": 10**300}}}, "weight: Input should be less"),
        ({"components": {"a": SERVICE | {"scale": -1e13}}}, "scale: Input should be greater"),
        ({"components": {"a": SERVICE | {"weight": 10**400}}}, "weight: Input should be a valid"),
        ({"components": {"a": SERVICE | {"weight": "much"}}}, "weight: Input should be a valid"),
        ({"components": {"a": SERVICE}, "text_error_reward": -1}, "text_error_reward: Extra"),
        (
            {"components": {"a": SERVICE}, "refused_text_reward": {"overlong": float("inf")}},
            "refused_text_reward.overlong: Input should be",
        ),
        (
            {"components": {"a": SERVICE}, "gates": {"g": {"rule": "copy", "reward": True}}},
            "gates.g.copy.reward: this is true or false",
        ),
        (
            {"components": {"a": SERVICE}, "gates": {"g": {"rule": "copy", "factor": 2}}},
            "gates.g.copy.factor: Input should be less than or equal to 1",
        ),
        (
            {
                "components": {"a": SERVICE},
                "gates": {"g": {"rule": "copy", "factor": 0, "reward": 0}},
            },
            "gates.g.copy: `factor` and `reward`: give one of them",
        ),
        ({"components": {"a": SERVICE}, "gates": {"g": {"rule": "x"}}}, "gates.g: Input tag 'x'"),
        (
            {"components": {"a": SERVICE}, "refused_text_reward": {"timeout": -1}},
            "timeout.*: Input",
        ),
        ({"components": {"a": SERVICE}, "deadline_s": 0}, "deadline_s: Input should be greater"),
    ],
)
def test_a_mistake_is_one_line(definition, line):
    with pytest.raises(UserError, match=line) as caught:
        load_definition(definition)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("reward definition: ")


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            {"components": {"a": {"rule": "copies"}}},
            "components.a.rule: 'copies' is neither one of",
        ),
        ({"components": {"a": {"rule": "no_such:f"}}}, "'no_such:f' cannot be loaded"),
        ({"components": {"a": {"rule": "math:pi"}}}, "'math:pi' is not a function"),
        ({"components": {"a": {"service": "ftp://x"}}}, "'ftp://x' is not the URL of a service"),
        (
            {
                "components": {"a": SERVICE},
                "gates": {"g": {"rule": "language", "model": "/no/such.bin"}},
            },
            "gates.g.model: /no/such.bin: this file does not exist. Give a fastText model",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line_before_anything_is_scored(part, line):
    with pytest.raises(UserError, match=line) as caught:
        CompositeReward(part)
    assert "\n" not in str(caught.value)


#: Imports both packages, and makes a client and a definition, where heavy packages do not exist.
_LIGHT = """
import sys
for name in ("torch", "numpy", "transformers", "openai", "langcodes", "py3langid", "fasttext"):
    sys.modules[name] = None
import scorekit.client, scorekit.rewards
definition = {"components": {"a": {"service": "http://127.0.0.1:1"}, "b": {"rule": "truncated"}}}
scorekit.rewards.SyncCompositeReward(definition).close()
definition["gates"] = {"g": {"rule": "copy"}}
try:
    scorekit.rewards.CompositeReward(definition)
except scorekit.errors.UserError as error:
    print(error)
"""


def test_rewards_and_client_import_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gates.g: langcodes is not installed: `pip install")


def test_a_wrong_url_names_its_component():
    definition = {"components": {"a": SERVICE, "b": {"service": "localhost:8001"}}}
    with pytest.raises(UserError, match=r"^components.b.service: 'localhost:8001' is not the URL"):
        CompositeReward(definition)
