"""Check that real templates pass and that each deliberately broken one is detected."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scorekit.errors import UserError
from tests.kits.real_tokenizers import real_tokenizer
from tests.kits.trainer.chat import (
    CHATML,
    ENDS,
    byte_tokenizer,
    chat_tokenizer,
    template_text,
    turns,
)
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.chat.template_check import Finding, findings_of, label_samples, mark_texts

DIALOGUE = turns(
    "안녕? 오늘 뭐 해 🙂",
    '지민은 웃었다.\n"그냥 있어요 뷁"',
    "같이 갈래?",
    "네, 좋아요 👩‍👩‍👧‍👦",
    system="너는 지민이다.",
)
CHAT = ChatConfig()


def check_template(
    tokenizer: Any,
    rows: Any,
    chat: ChatConfig,
    generation_config: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> list[Finding]:
    origin, labeled = label_samples(tokenizer, rows, chat, **options)
    return findings_of(tokenizer, labeled, origin, generation_config, max_length)


def failed(
    tokenizer: Any, rows: Any = (DIALOGUE,), chat: ChatConfig = CHAT, **options: Any
) -> set[str]:
    return {f.name for f in check_template(tokenizer, rows, chat, **options) if not f.ok}


def broken(old: str, new: str, template: str) -> str:
    assert old in template
    return template.replace(old, new)


@pytest.mark.parametrize("name", [name for name in ENDS if name != "qwen3"])
def test_real_templates_are_right_with_markers_put_in(name: str) -> None:
    assert failed(chat_tokenizer(name)) == set()
    assert failed(chat_tokenizer(name), trained_turns="last") == set()


#: Functions that break a real template, given its text and the token that ends its turns. They
#: return (the training template, the model's template, the failed check).
BREAKS = {
    "the stop token stands outside": lambda text, end: (
        broken(".rstrip() %}", f".rstrip().removesuffix('{end}') %}}", mark_texts(text)),
        text,
        "stop token",
    ),
    "the reply's first character stands outside": lambda text, end: (
        broken("whole[prompt|length:turn", "whole[prompt|length + 1:turn", mark_texts(text)),
        text,
        "labelled text",
    ),
    "the prompt's last character is labelled": lambda text, end: (
        broken(
            "{{- whole[done.place:prompt|length] }}",
            "{{- whole[done.place:prompt|length - 1] }}",
            broken("whole[prompt|length:turn", "whole[prompt|length - 1:turn", mark_texts(text)),
        ),
        text,
        "labelled text",
    ),
    "markers around the whole": lambda text, end: (
        "{% generation %}" + text.strip() + "{% endgeneration %}",
        text,
        "other turns",
    ),
    "one line end more in training": lambda text, end: (
        mark_texts(text.strip() + "{{ '\\n' }}"),
        text,
        "same text",
    ),
    "the system turn is dropped": lambda text, end: (
        mark_texts(_DROP + text),
        _DROP + text,
        "messages",
    ),
    "no turn is ended": lambda text, end: (
        mark_texts(text.replace(end, "")),
        text.replace(end, ""),
        "stop token",
    ),
}
_DROP = "{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}"


@pytest.mark.parametrize("breakage", BREAKS)
@pytest.mark.parametrize("name", ENDS)
def test_each_real_template_is_found_broken(name: str, breakage: str, tmp_path: Path) -> None:
    training, model_template, failed_check = BREAKS[breakage](template_text(name), ENDS[name])
    (tmp_path / "training.jinja").write_text(training, encoding="utf-8")
    tokenizer = byte_tokenizer(model_template, ENDS[name])
    thinking = False if name == "qwen3" else None
    chat = ChatConfig(template=str(tmp_path / "training.jinja"), enable_thinking=thinking)
    assert failed_check in failed(tokenizer, chat=chat, trained_turns="last")


@pytest.mark.parametrize("name", ["gemma3", "llama3", "qwen3_instruct_2507"])
def test_trls_training_templates_are_right(name: str) -> None:
    tokenizer = byte_tokenizer(template_text(f"{name}_training"), ENDS[name])
    assert failed(tokenizer) == set()


def test_trls_training_template_of_qwen2_5_labels_a_token_of_the_prompt() -> None:
    """Check TRL's template, which labels the newline after `assistant`, part of the prompt."""
    tokenizer = byte_tokenizer(template_text("qwen2_5_training"))
    assert failed(tokenizer) == {"labelled text"}


def test_every_finding_has_a_remedy_where_it_is_wrong_and_none_where_it_is_right() -> None:
    tokenizer = byte_tokenizer(template_text("qwen2_5_training"))
    findings = check_template(tokenizer, [DIALOGUE], CHAT)
    assert all(bool(finding.remedy) != finding.ok for finding in findings)
    assert len({finding.name for finding in findings}) == len(findings) == 10


def test_a_stop_token_outside_the_markers_is_found() -> None:
    """Check the error that made a run generate up to its limit."""
    text = template_text("qwen3_instruct_2507_training")
    stop = "        {{- '<|im_end|>\\n' }}\n        {%- endgeneration %}"
    moved = "        {%- endgeneration %}\n        {{- '<|im_end|>\\n' }}"
    tokenizer = byte_tokenizer(broken(stop, moved, text))
    findings = {f.name: f for f in check_template(tokenizer, [DIALOGUE], CHAT)}
    assert not findings["stop token"].ok
    assert "'<|im_end|>" in findings["stop token"].result
    assert "--fix" in findings["stop token"].remedy


def test_a_template_that_never_ends_a_turn_is_found() -> None:
    tokenizer = byte_tokenizer(broken("'<|im_end|>\\n'", "'\\n'", CHATML))
    assert "stop token" in failed(tokenizer)


def test_a_stop_token_that_the_next_turn_brings_is_found() -> None:
    end_of_turn = "{% if not loop.first %}<|im_end|>\n{% endif %}"
    text = broken(" + '<|im_end|>\\n' }}", " }}", CHATML)
    text = broken(
        "{% for message in messages %}", "{% for message in messages %}" + end_of_turn, text
    )
    assert failed(byte_tokenizer(text)) == {"markers", "generation prompt"}
    assert failed(byte_tokenizer(text), trained_turns="last") == {"markers", "generation prompt"}


def test_markers_around_every_turn_are_found() -> None:
    body = "{{ '<|im_start|>' + message['role']"
    text = CHATML.replace(body, "{% generation %}" + body).replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    )
    assert {"markers", "other turns"} <= failed(byte_tokenizer(text))


def test_markers_that_take_in_the_header_are_found() -> None:
    header = "        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    begin = "        {%- generation %}\n"
    text = broken(header + begin, begin + header, template_text("llama3_training"))
    assert failed(byte_tokenizer(text, "<|eot_id|>")) == {"labelled text"}


def test_a_system_turn_that_is_dropped_is_found() -> None:
    text = broken(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'system' %}",
        CHATML,
    )
    assert failed(byte_tokenizer(text)) == {"messages"}
    assert failed(byte_tokenizer(text), [DIALOGUE[1:]]) == set()  # no row has a system turn


def test_a_template_that_refuses_system_turns_is_told_where_a_row_has_one() -> None:
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = byte_tokenizer(refuse + CHATML)
    assert failed(tokenizer, []) == set() == failed(tokenizer, [DIALOGUE[1:]])
    findings = {f.name: f for f in check_template(tokenizer, [DIALOGUE], CHAT)}
    assert "no system" in findings["template"].result


@pytest.mark.parametrize(
    "text",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('two\nlines') }}",
    ],
)
def test_a_template_that_fails_in_any_way_is_one_line(text: str) -> None:
    tokenizer = chat_tokenizer("qwen3")
    with pytest.raises(UserError, match=r"^the chat template refuses: .") as refused:
        render(tokenizer, [{"role": "user", "content": "u"}], ChatConfig(), template=text)
    assert "\n" not in str(refused.value)


def test_a_training_template_that_drifts_by_a_line_end_is_found(tmp_path: Path) -> None:
    drifted = tmp_path / "training.jinja"
    drifted.write_text(mark_texts(broken("'<|im_end|>\\n'", "'<|im_end|>\\n\\n'", CHATML)))
    chat = ChatConfig(template=str(drifted))
    findings = {f.name: f for f in check_template(byte_tokenizer(CHATML), [DIALOGUE], chat)}
    assert not findings["same text"].ok
    assert "<|im_end|>\\n\\n" in findings["same text"].result
    assert "generation prompt" in {name for name, finding in findings.items() if not finding.ok}


def test_a_generation_prompt_with_other_spaces_is_found() -> None:
    other = broken("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant \\n' }}", CHATML)
    assert {"generation prompt", "markers"} <= failed(byte_tokenizer(other))


def test_a_stop_token_that_sampling_does_not_know_is_found() -> None:
    tokenizer = byte_tokenizer(CHATML, end="<|endoftext|>")
    assert failed(tokenizer) == {"generation_config"}
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert failed(tokenizer, generation_config=SimpleNamespace(eos_token_id=[1, stop])) == set()
    assert failed(tokenizer, generation_config=SimpleNamespace(eos_token_id=stop)) == set()
    assert failed(tokenizer, generation_config=SimpleNamespace(eos_token_id=1)) == {
        "generation_config"
    }


def test_conversations_that_are_cut_lose_their_stop_token() -> None:
    tokenizer = chat_tokenizer("chatml")
    assert failed(tokenizer, max_length=50) == {"lengths"}
    assert failed(tokenizer, max_length=5000) == set()


@pytest.mark.parametrize("thinking", [None, True])
def test_qwen3_puts_an_empty_block_of_thoughts_into_the_reply(thinking: bool | None) -> None:
    chat = ChatConfig(enable_thinking=thinking)
    wrong = failed(chat_tokenizer("qwen3"), [DIALOGUE], chat, trained_turns="last")
    assert wrong == {"labelled text"}


def test_qwen3_without_thinking_is_right_one_turn_a_row() -> None:
    """Check that the thinking block is part of the prompt, but is omitted in earlier turns."""
    chat, tokenizer = ChatConfig(enable_thinking=False), chat_tokenizer("qwen3")
    assert failed(tokenizer, [DIALOGUE], chat, trained_turns="last") == set()
    assert {"markers", "generation prompt"} >= failed(tokenizer, [DIALOGUE], chat) != set()


def test_qwen3_with_thoughts_in_the_rows_is_right() -> None:
    row = turns("왜?", "<think>\n생각\n</think>\n\n그냥요 뷁")
    separate_reasoning = [
        row[0],
        {"role": "assistant", "content": "그냥요", "reasoning_content": "생각"},
    ]
    assert failed(chat_tokenizer("qwen3"), [row, separate_reasoning], trained_turns="last") == {
        "labelled text"
    }
    findings = {
        f.name: f
        for f in check_template(chat_tokenizer("qwen3"), [row], CHAT, trained_turns="last")
    }
    assert "probe" in findings["labelled text"].result  # not the row, but a probe without thoughts


def test_the_real_tokenizer_of_qwen3_keeps_the_bytes_of_the_last_character() -> None:
    tokenizer = real_tokenizer("qwen3")
    rows = [turns("안녕", text) for text in ("뷁", "쌰 👩‍👩‍👧‍👦", "끝 뷁쌰", " \t뷁")]
    chat = ChatConfig(enable_thinking=False)
    assert failed(tokenizer, rows, chat, trained_turns="last") == set()


def test_a_prompt_that_melts_with_its_reply_is_found() -> None:
    """Check a prompt whose final space merges with the first byte of a Korean character."""
    text = broken("message['role'] + '\\n'", "message['role'] + ': '", CHATML)
    text = broken("assistant\\n", "assistant: ", text)
    tokenizer = copy(real_tokenizer("qwen3"))
    tokenizer.chat_template = text
    rows = [turns("안녕", "쌰")]
    assert {"generation prompt", "labelled text"} <= failed(tokenizer, rows)
    findings = {f.name: f for f in check_template(tokenizer, rows, CHAT)}
    assert "has other tokens when a reply follows" in findings["generation prompt"].result


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"no chat template\. Set"):
        check_template(byte_tokenizer(None), [DIALOGUE], CHAT)


#: Templates whose turns have control tokens around the reply, or an EOS behind the last one:
#: (template, its tokens, the labeled text of a reply). They have the form of Command R7B's,
#: gpt-oss' and Phi-3's.
FRAMES = {
    "response": (
        "{% for m in messages %}{{ '<|start|><|' + m.role + '|>' + ('<|response|>' if m.role == "
        "'assistant' else '') + m.content.strip() + ('<|/response|>' if m.role == 'assistant' "
        "else '') + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|><|assistant|>' }}{% endif %}",
        ("<|start|>", "<|assistant|>", "<|response|>", "<|/response|>", "<|end|>"),
        "<|response|>{}<|/response|><|end|>",
    ),
    "opened response": (
        "{% for m in messages %}{{ '<|start|><|' + m.role + '|>' + ('<|response|>' if m.role == "
        "'assistant' else '') + m.content.strip() + ('<|/response|>' if m.role == 'assistant' "
        "else '') + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|><|assistant|><|response|>' }}{% endif %}",
        ("<|start|>", "<|assistant|>", "<|response|>", "<|/response|>", "<|end|>"),
        "{}<|/response|><|end|>",
    ),
    "channel": (
        "{% for m in messages %}{{ '<|start|>' + m.role + ('<|channel|>final' if m.role == "
        "'assistant' else '') + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>final<|message|>{}<|end|>",
    ),
    "eos": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "{}<|end|>",
    ),
}


def framed_tokenizer(name: str, template: str | None = None) -> Any:
    text, tokens, _ = FRAMES[name]
    tokenizer = byte_tokenizer(template or text, "<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("trained_turns", ["all", "last"])
def test_control_tokens_around_a_reply_are_learned_with_it(name: str, trained_turns: Any) -> None:
    tokenizer = framed_tokenizer(name)
    stops = SimpleNamespace(eos_token_id=tokenizer.convert_tokens_to_ids(["<|end|>"]))
    findings = check_template(tokenizer, [DIALOGUE], CHAT, stops, trained_turns=trained_turns)
    assert [finding for finding in findings if not finding.ok] == []
    _, labeled = label_samples(tokenizer, [DIALOGUE], CHAT, trained_turns)
    tokens = labeled[0][1].tokens
    ids = [i for i, owner in zip(tokens.ids, tokens.owners, strict=True) if owner >= 0]
    replies = [turn["content"] for turn in DIALOGUE if turn["role"] == "assistant"]
    replies = replies if trained_turns == "all" else replies[-1:]
    assert tokenizer.decode(ids) == "".join(map(FRAMES[name][2].format, replies))


@pytest.mark.parametrize("name", ["cohere2", "phi3", "phi3_5", "muse_glimmer"])
def test_published_templates_of_that_form_are_right(name: str) -> None:
    tokenizer = byte_tokenizer(template_text(name), "<|endoftext|>")
    tokens = {
        "cohere2": ["<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        "muse_glimmer": ["<|start|>", "<|message|>", "<|eot|>", "<|eom|>"],
    }.get(name, ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    assert failed(tokenizer) <= {"generation_config"}
    assert failed(tokenizer, trained_turns="last") <= {"generation_config"}


@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        # Words or line ends behind the reply are no form of a turn, nor is a second end.
        ("response", "'<|/response|>'", "'<|/response|> ok?'", "labelled text"),
        ("response", "'<|/response|>'", "'\n<|/response|>'", "labelled text"),
        ("response", "'<|/response|>'", "'<|endoftext|>'", "labelled text"),
        ("response", "'<|response|>'", "'<|response|>Sure: '", "labelled text"),
        ("response", "'<|response|>'", "'<think>\n\n</think>\n\n'", "labelled text"),
        ("eos", "'<|end|>\\n'", "'\\n'", "markers"),
    ],
)
def test_other_text_around_a_reply_is_refused(name: str, old: str, new: str, check: str) -> None:
    template = broken(old, new, FRAMES[name][0])
    assert check in failed(framed_tokenizer(name, template))


def test_the_next_turns_start_in_the_label_is_refused(tmp_path: Path) -> None:
    text = FRAMES["response"][0]
    label = mark_texts(text)
    label = broken(
        "whole[prompt|length:turn|length]", "whole[prompt|length:turn|length + 9]", label
    )
    label = broken("done.place = turn|length", "done.place = turn|length + 9", label)
    (tmp_path / "t.jinja").write_text(label, encoding="utf-8")
    chat = ChatConfig(template=str(tmp_path / "t.jinja"))
    assert failed(framed_tokenizer("response"), chat=chat) & {"labelled text", "generation_config"}
