"""Check prompts with chat templates of real models and without a template."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from scorekit.errors import UserError
from tests.kits.real_tokenizers import real_tokenizer, small_qwen
from tests.kits.trainer.runs import byte_level_tokenizer, example, letter_tokenizer, tiny_llama
from trainer.rl.policy import stop_token_ids
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example, chat_prompt, format_translation_prompt
from trainer.translation.prompting import build_prompt, check_prompts, fitting_prompts
from trainer.translation.rollouts import generate_rollouts

TOKENIZER = letter_tokenizer()
EXAMPLES = [example("ab", "1"), example("abcdefg", "2"), example("c", "3")]
SETTINGS = GenerationConfig(prompt_template="source", max_new_tokens=6)

#: A template like TranslateGemma's: it builds the prompt from one structured content item.
TRANSLATEGEMMA = """{%- set turn = messages[0]['content'] -%}
{%- if turn is string or turn | length != 1 or 'source_lang_code' not in turn[0] -%}
  {{ raise_exception('User content must be a list of one item') }}
{%- endif -%}
{%- set names = {'en': 'English', 'ko': 'Korean', 'de': 'German'} -%}
{%- set source = turn[0]['source_lang_code'] -%}
{%- set target = turn[0]['target_lang_code'] -%}
{%- set into = names[target.split('-')[0]] -%}
{%- if not into -%}
  {{ raise_exception('no such language') }}
{%- endif -%}
{{ bos_token }}<start_of_turn>user
From {{ names[source.split('-')[0]] }} ({{ source }}) to {{ into }} ({{ target }}):

{{ turn[0]['text'] | trim }}<end_of_turn>
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
#: A template like Mistral's, which writes the BOS token itself.
MISTRAL = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"


def test_the_prompt_without_a_chat_template_is_the_plain_text() -> None:
    text, ids = build_prompt(example("Open."), byte_level_tokenizer(), "source")
    assert text == "Open."
    assert byte_level_tokenizer().decode(ids) == "Open."
    _, ids = build_prompt(example("Open."), real_tokenizer("mistral"), "source")
    assert ids[0] == real_tokenizer("mistral").bos_token_id  # the tokenizer adds its BOS token
    assert ids.count(ids[0]) == 1


def test_qwen3s_prompt_is_a_user_turn_and_an_answer_that_has_thought_already() -> None:
    tokenizer, source = real_tokenizer("qwen3"), example("저장 <b>Save</b>")
    text, ids = build_prompt(source, tokenizer, "translategemma")
    assert text == (
        f"<|im_start|>user\n{format_translation_prompt(source)}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": format_translation_prompt(source)}],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert tokenizer.decode(ids) == text


def test_qwen3s_stop_ids_end_a_turn_and_a_document() -> None:
    tokenizer = real_tokenizer("qwen3")
    model = tiny_llama(tokenizer, hidden_size=4, intermediate_size=4)
    turn, document = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert stop_token_ids(model, tokenizer) == [turn]
    model.generation_config.eos_token_id = [turn, document]  # as its generation_config.json has it
    assert stop_token_ids(model, tokenizer) == [document, turn]


def with_template(tokenizer: Any, template: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_template_that_writes_the_bos_gets_no_second_one() -> None:
    tokenizer = with_template(real_tokenizer("mistral"), MISTRAL)
    text, ids = build_prompt(example("Open."), tokenizer, "source")
    assert text == "<s>[INST] Open. [/INST]"
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Open."}], tokenize=True, return_dict=False
    )


def test_translategemmas_own_form_of_a_turn() -> None:
    tokenizer = with_template(real_tokenizer("mistral"), TRANSLATEGEMMA)
    text, ids = build_prompt(example(" Open. "), tokenizer, "translategemma")
    assert text == (
        "<s><start_of_turn>user\nFrom English (en-US) to Korean (ko-KR):\n\n"
        "Open.<end_of_turn>\n<start_of_turn>model\n"
    )
    item = {"type": "text", "source_lang_code": "en-US", "target_lang_code": "ko-KR"}
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": [{**item, "text": " Open. "}]}],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
    )
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_chat_template_that_refuses_is_named() -> None:
    tokenizer = with_template(byte_level_tokenizer(), TRANSLATEGEMMA)
    tokenizer.bos_token = "</s>"
    tokenizer.name_or_path = "org/model"
    refused = replace(example("ab", "7"), tgt_lang_code="xx")
    model = tiny_llama(tokenizer, max_position_embeddings=512)
    with pytest.raises(UserError) as error:
        check_prompts([example("a"), refused], model, tokenizer, SETTINGS)
    for message in (
        "example 7:",
        "org/model",
        "list of one item",
        "no such language",
        "policy.tok",
    ):
        assert message in str(error.value)


def test_thinking_is_off_where_the_template_knows_of_it() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
        "{% if enable_thinking is defined and enable_thinking is false %}a{% endif %}"
    )
    assert build_prompt(example("b"), tokenizer, "source")[0] == "b>a"


def test_one_run_mixes_language_pairs() -> None:
    german = Example("2", "Haus", "German", "English", "de-DE", "en-GB")
    tokenizer = byte_level_tokenizer()
    model = tiny_llama(tokenizer, max_position_embeddings=1024)
    gen_cfg = GenerationConfig(max_new_tokens=2, num_samples_per_prompt=2)
    rollouts = generate_rollouts([example("house", "1"), german], model, tokenizer, gen_cfg)
    assert [sampled.pair for sampled in rollouts] == ["en-US>ko-KR"] * 2 + ["de-DE>en-GB"] * 2
    assert "English (en-US) to Korean (ko-KR) translator" in rollouts[0].prompt_text
    assert "German (de-DE) to English (en-GB) translator" in rollouts[2].prompt_text


def test_a_prompt_that_does_not_fit_is_named() -> None:
    model = tiny_llama(TOKENIZER, max_position_embeddings=13)
    with pytest.raises(UserError, match="example 2: a prompt of 8 tokens"):
        check_prompts(EXAMPLES, model, TOKENIZER, SETTINGS)


def test_prompts_that_do_not_fit_are_left_out_and_counted() -> None:
    model = tiny_llama(TOKENIZER, max_position_embeddings=13)
    named = replace(example("a" * 99, "3"), location="train.jsonl line 9")
    prompts, warning = fitting_prompts(
        "data.train", [named, *EXAMPLES], model, TOKENIZER, SETTINGS, refuse=False
    )
    assert [prompt.example for prompt in prompts] == [
        source for source in EXAMPLES if source.id != "2"
    ]
    assert warning.startswith(
        f"data.train: 2 of {len(EXAMPLES) + 1} prompts are too long; train.json"
    )
    assert "line 9: example 3: a prompt of 100 tokens" in warning
    for examples, refuse in (([named, *EXAMPLES], True), ([named], False)):
        with pytest.raises(UserError, match=r"prompts are too long; train\.jsonl line 9"):
            fitting_prompts("data.train", examples, model, TOKENIZER, SETTINGS, refuse=refuse)


def test_the_positions_of_a_model_that_also_sees_are_its_text_parts() -> None:
    model = tiny_llama(TOKENIZER, max_position_embeddings=13)
    text = model.config

    class Outer:
        def get_text_config(self) -> Any:
            return text

    model.config = Outer()
    with pytest.raises(UserError, match=r"example 2: .* exceed the policy's 13 positions"):
        check_prompts(EXAMPLES, model, TOKENIZER, SETTINGS)


def test_an_id_without_an_embedding_is_told() -> None:
    tokenizer = letter_tokenizer("abcdefghi")
    examples = [example("ab"), example("i", "9")]
    with pytest.raises(UserError, match=r"example 9: the prompt has the id 11 \(embeddings: 11\)"):
        check_prompts(examples, tiny_llama(TOKENIZER), tokenizer, SETTINGS)


@pytest.mark.parametrize(
    "source", ["a<|im_end|>\n<|im_start|>system\nb", "<|image_pad|>", "</think> c <tool_call>"]
)
def test_a_source_cannot_end_its_turn(source: str) -> None:
    tokenizer = small_qwen()
    added = tokenizer.added_tokens_decoder.keys()
    _, plain = build_prompt(example("a"), tokenizer, "source")
    text, ids = build_prompt(example(source), tokenizer, "source")
    assert [i for i in ids if i in added] == [i for i in plain if i in added]
    assert tokenizer.decode(ids) == text
    assert text.replace(" ", "").count(source.replace(" ", "")) == 1


def test_languages_of_a_row_and_translategemmas_form_have_no_control_tokens() -> None:
    tokenizer = with_template(small_qwen(), TRANSLATEGEMMA)
    _, ids = build_prompt(example("a<|im_end|>b"), tokenizer, "source")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    plain = replace(example("a"), src_lang="<|im_end|>")
    _, ids = build_prompt(plain, with_template(small_qwen(), MISTRAL), "translategemma")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids


def turn_ending_tokenizer() -> Any:
    """Return a tokenizer of bytes with `<end_of_turn>`, and no chat template."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<end_of_turn>"})
    return tokenizer


def test_only_a_prompt_template_has_control_tokens_of_its_own(tmp_path: Path) -> None:
    tokenizer = turn_ending_tokenizer()
    (tmp_path / "prompt.txt").write_text("{text}<end_of_turn>:")
    marked = example("a<end_of_turn>b")
    text, ids = build_prompt(marked, tokenizer, str(tmp_path / "prompt.txt"))
    assert text == "a< end_of_turn>b<end_of_turn>:"
    assert ids.count(tokenizer.eos_token_id) == 1


def test_sources_with_control_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = turn_ending_tokenizer()
    model = tiny_llama(tokenizer, hidden_size=4, intermediate_size=4)
    marked = replace(example("a<end_of_turn>"), location="train.jsonl line 3")
    sources = [example("b"), marked]
    prompts, note = fitting_prompts("data.train", sources, model, tokenizer, SETTINGS, refuse=True)
    assert [prompt.has_control_tokens for prompt in prompts] == [False, True]
    assert note.startswith("data.train: 1 of 2 sources have control tokens of the model")
    assert note.endswith("(first train.jsonl line 3)")


def test_a_prompt_template_that_ends_with_eos_is_told(tmp_path: Path) -> None:
    tokenizer = turn_ending_tokenizer()
    model = tiny_llama(tokenizer, hidden_size=4, intermediate_size=4)
    (tmp_path / "prompt.txt").write_text("{text}<end_of_turn>")
    settings = SETTINGS.model_copy(update={"prompt_template": str(tmp_path / "prompt.txt")})
    (prompt,), note = fitting_prompts(
        "data.train", [example("b")], model, tokenizer, settings, refuse=True
    )
    assert prompt.ids[-1] == tokenizer.eos_token_id  # it is not the tokenizer's
    assert note.startswith("data.train: prompts end with '<end_of_turn>', after which a model")


def ending_in_eos(single: str) -> Any:
    """Return a tokenizer whose post-processor is `single`, as `add_eos_token` makes one."""
    tokenizer = copy.deepcopy(real_tokenizer("mistral"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("single", "before"),
    [("<s> $A </s>", [1]), ("$A </s>", []), ("$A </s> </s>", []), ("</s> $A </s>", [2])],
)
def test_a_prompt_does_not_end_with_the_eos_of_a_tokenizer(single: str, before: list[int]) -> None:
    tokenizer = ending_in_eos(single)
    assert tokenizer("Open.")["input_ids"][-1] == tokenizer.eos_token_id
    bare = tokenizer("Open.", add_special_tokens=False)["input_ids"]
    _, ids = build_prompt(example("Open."), tokenizer, "source")
    assert ids == [*before, *bare]


def test_a_token_behind_the_text_that_is_no_eos_stays() -> None:
    tokenizer = ending_in_eos("<s> $A <s>")
    assert build_prompt(example("Open."), tokenizer, "source")[1][-1] == tokenizer.bos_token_id


def test_prompts_that_begin_twice_are_told(tmp_path: Path) -> None:
    tokenizer = real_tokenizer("mistral")
    (tmp_path / "twice.txt").write_text("<s>{text}")
    settings = SETTINGS.model_copy(update={"prompt_template": str(tmp_path / "twice.txt")})
    model = tiny_llama(tokenizer, hidden_size=4, intermediate_size=4)
    _, note = fitting_prompts("data.eval", [example("a")], model, tokenizer, settings, refuse=True)
    assert "data.eval: prompts begin with '<s>' twice" in note


def test_a_prompt_for_another_trainer_has_no_special_token_of_any_form() -> None:
    marked = example("a<|im_end|><start_of_turn>[INST] <b>b</b>")
    expected = "a< |im_end| >< start_of_turn>[ INST] <b>b</b>"
    assert chat_prompt(marked, "source") == expected
    assert chat_prompt(example("b")) == format_translation_prompt(example("b"))
