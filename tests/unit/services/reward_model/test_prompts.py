"""Test the prompts of a reward model: files, and what a sample becomes."""

from __future__ import annotations

import pytest
import yaml

from scorekit.errors import SampleError, UserError
from scorekit.schemas import RewardSample
from services.reward_model.prompts import BUILT_IN, find_prompt


def write(folder, **content):
    path = folder / "prompt.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_prompt_is_filled_once(tmp_path):
    prompt = find_prompt(write(tmp_path, text="{src} -> {mt}", pair="{ref}"))
    form = prompt.form_of(RewardSample(src="{mt}", mt="{ref}", ref="r"))
    assert (form.text, form.pair, form.last) == ("{mt} -> {ref}", "r", "{ref}")
    with pytest.raises(SampleError, match="ref: the service's prompt has it"):
        prompt.form_of(RewardSample(src="a", mt="b"))


def test_a_sample_with_its_own_form_is_put_into_no_prompt(tmp_path):
    prompt = find_prompt(write(tmp_path, text="{src} {mt}"))
    form = prompt.form_of(RewardSample(text="a", pair="b"))
    assert (form.text, form.pair, form.messages) == ("a", "b", None)
    messages = [{"role": "user", "content": "{src}"}]
    assert prompt.form_of(RewardSample(messages=messages)).messages == messages


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_prompts_have_the_translation_last(name):
    assert BUILT_IN[name].form_of(RewardSample(src="a", mt="b")).last == "b"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"text": "{mt}", "messages": []}, None),
        ({}, "needs either"),
        ({"pair": "{mt}", "messages": [{"role": "user", "content": "{mt}"}]}, "`pair`"),
        ({"messages": [{"role": "human", "content": "{mt}"}]}, "unknown role 'human'"),
        ({"text": "{mt} {source}"}, "unknown field 'source'"),
        ({"text": "{src}"}, "no text has {mt}"),
        ({"text": "{mt}", "weight": 1}, "weight"),
    ],
)
def test_a_file_that_is_no_prompt_is_one_line(tmp_path, content, words):
    path = write(tmp_path, **content)
    if words is None:  # no turns are none
        assert find_prompt(path).text == "{mt}"
        return
    with pytest.raises(UserError) as error_info:
        find_prompt(path)
    assert words in str(error_info.value) and "\n" not in str(error_info.value)
