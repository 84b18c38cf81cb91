"""Check that scores in batches are those of transformers' own forward of one sample, in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scorekit.errors import SampleError, UserError
from scorekit.schemas import RewardOptions, RewardSample
from scorekit.server.batches import default_batch_tokens
from services.reward_model.model import RewardModelBackend
from testing.checkpoints.reward import FAMILIES, change_config, make_reward_model, reference

TOLERANCE = 1e-5


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation of a user and an assistant."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(texts)
    return start + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]


CHATS: list[dict[str, Any]] = [
    {"messages": turns("Is it cheap?", "No.")},
    {"messages": turns("집은 " * 20, "The house is red. " * 4)},
    {"messages": turns("a", "b", "c", "The file is there.")},
    {"messages": turns("a", "It ends with an end <|eot|>")},
    {"text": "a house"},
]
TEXTS: list[dict[str, Any]] = [
    {"text": "The house is red."},
    {"text": "a"},
    {"text": "Open the file, " * 5, "pair": "집은 빨간색이다."},
    {"text": "b", "pair": "c d e"},
]


def load(folder: Any, **settings: Any) -> RewardModelBackend:
    backend = RewardModelBackend(str(folder), device="cpu", matmul="torch", **settings)
    backend.load()
    return backend


def scores(
    backend: RewardModelBackend, samples: list[dict[str, Any]], overlong: Any = "error"
) -> list[dict[str, Any]]:
    """Return the outcomes of the samples, scored in one batch, with their input fields."""
    encoded = backend.encode(
        [RewardSample(**sample) for sample in samples], RewardOptions(overlong=overlong)
    )
    good: list[Any] = [item for item in encoded if not isinstance(item, SampleError)]
    assert len(good) == len(samples), encoded
    return [out | e.fields for out, e in zip(backend.forward(good), good, strict=True)]  # type: ignore[operator]


def check_equal(folder: Any, samples: list[dict[str, Any]], **settings: Any) -> None:
    """Check every sample of one batch against transformers' forward of it alone."""
    for sample, outcome in zip(samples, scores(load(folder, **settings), samples), strict=True):
        (expected,) = reference(folder, **sample)
        assert outcome["score"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), sample


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_scores_of_single_samples(tmp_path, family, side):
    folder = make_reward_model(tmp_path, family, padding_side=side)
    check_equal(folder, TEXTS if family == "deberta" else CHATS)


@pytest.mark.parametrize("pad", ["end", "none", "unknown"])
@pytest.mark.parametrize("family", ["llama", "qwen", "gemma"])
def test_the_last_token_is_found_whatever_the_padding_token_is(tmp_path, family, pad):
    """pad `end`: huggingface/transformers#35352, where the end of a turn is the padding token.
    `none`: the model's config has none, and transformers refuses a batch. `unknown`: the
    tokenizer's has no row in the weights."""
    check_equal(make_reward_model(tmp_path, family, pad=pad), CHATS)


def test_a_template_that_writes_the_first_token_gets_no_second_one(tmp_path):
    """allenai/reward-bench#164: the template's text was tokenized as a plain one."""
    backend = load(make_reward_model(tmp_path, "llama"))
    bos = 0
    chat, text = backend.encode([RewardSample(**CHATS[0]), RewardSample(text="a")], RewardOptions())
    assert chat.payload.ids.count(bos) == 1 == text.payload.ids.count(bos)
    doubled = scores(backend, [{"text": backend._inputs.render(CHATS[0]["messages"])}])
    assert abs(doubled[0]["score"] - scores(backend, CHATS[:1])[0]["score"]) > 0.01


def test_no_system_turn_is_added_and_none_removed(tmp_path):
    """A server that sends an empty system turn keeps the template from adding its own."""
    folder = make_reward_model(tmp_path, "qwen")
    samples = [
        {"messages": turns("a", "b")},
        {"messages": turns("a", "b", system="")},
        {"messages": turns("a", "b", system="You are a helpful assistant.")},
    ]
    check_equal(folder, samples)
    default, empty, same = (outcome["score"] for outcome in scores(load(folder), samples))
    assert default == pytest.approx(same, abs=1e-5) and abs(default - empty) > 0.01


def test_several_labels_count_with_their_weights(tmp_path):
    names = ("helpful", "correct", "verbose")
    folder = make_reward_model(tmp_path, "llama", labels=names)
    backend = load(folder, weights="helpful=0.5,verbose=-0.25")
    for sample, outcome in zip(CHATS, scores(backend, CHATS), strict=True):
        expected = reference(folder, **sample)
        assert list(outcome["labels"]) == list(names)
        assert list(outcome["labels"].values()) == pytest.approx(expected, abs=1e-4, rel=1e-5)
        assert outcome["score"] == pytest.approx(
            0.5 * expected[0] - 0.25 * expected[2], abs=1e-4, rel=1e-5
        )


@pytest.mark.parametrize("family", ["llama", "deberta"])
def test_a_long_sample_is_cut_as_its_tokenizer_cuts_it(tmp_path, family):
    folder = make_reward_model(tmp_path, family, max_length=24)
    cut = {"truncation": True, "max_length": 24}
    samples: list[dict[str, Any]] = [{"text": "The house is red. " * 20}]
    if family == "deberta":
        samples += [
            {"text": "a b", "pair": "Open the file " * 20},
            {"text": "Open the file " * 20, "pair": "a b"},
            {"text": "Open the file " * 20, "pair": "The house is " * 30},
        ]
    else:
        samples.append({"messages": turns("Open the file " * 20, "No.")})
    for sample, outcome in zip(samples, scores(load(folder), samples, "truncate"), strict=True):
        (expected,) = reference(folder, **sample, **cut)
        assert outcome["score"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), sample
        assert outcome["tokens"] == 24
        assert outcome["truncated"]["src"] or outcome["truncated"]["mt"]


def test_an_answer_says_how_far_its_last_text_was_read(tmp_path):
    backend = load(make_reward_model(tmp_path, "llama", max_length=24))
    samples = [
        {"messages": turns("Is it?", "The house is red. " * 9)},
        {"messages": turns("Is it? " * 20, "No.")},
        {"messages": turns("a", " No. ")},
        {"text": "The house is red. " * 9},
    ]
    within, before, uncut, text = scores(backend, samples, "truncate")
    assert within["truncated"] == {"src": False, "mt": True, "ref": False}
    assert 0 < within["mt_covered"] < len("The house is red. " * 9)
    assert before["truncated"] == {"src": True, "mt": True, "ref": False}
    assert before["mt_covered"] == 0
    assert uncut["mt_covered"] == len(" No. ") and not any(uncut["truncated"].values())
    assert text["truncated"]["mt"] and 0 < text["mt_covered"] < 162


def test_a_translation_is_a_turn_of_each_or_a_pair_or_what_a_file_says(tmp_path):
    chat = make_reward_model(tmp_path / "chat", "gemma")
    pair = make_reward_model(tmp_path / "pair", "deberta")
    sample = {"src": "The house is {red}.", "mt": "집은 {src}", "src_lang": "en", "tgt_lang": "ko"}
    (chatted,) = scores(load(chat), [sample])
    assert chatted["score"] == pytest.approx(
        reference(chat, turns(sample["src"], sample["mt"]))[0], abs=1e-4, rel=1e-5
    )
    (two,) = scores(load(pair), [sample])
    assert two["score"] == pytest.approx(
        reference(pair, text=sample["src"], pair=sample["mt"])[0], abs=1e-4, rel=1e-5
    )
    prompt = tmp_path / "prompt.yaml"
    turn = "Translate {src_lang} to {tgt_lang}: {src}"
    content = {
        "messages": [{"role": "user", "content": turn}, {"role": "assistant", "content": "{mt}"}],
        "score_range": {"min": -30, "max": 30},
        "higher_is_better": False,
    }
    prompt.write_text(json.dumps(content))
    backend = load(chat, prompt=str(prompt))
    (filed,) = scores(backend, [sample])
    expected = turns("Translate en to ko: The house is {red}.", "집은 {src}")
    assert filed["score"] == pytest.approx(reference(chat, expected)[0], abs=1e-4, rel=1e-5)
    description = backend.load()
    assert description.score_range.min == -30 and not description.higher_is_better
    required = dict.fromkeys(("src", "mt", "src_lang", "tgt_lang"), "required")
    assert description.inputs == required | {"ref": "ignored"}
    (error,) = backend.encode([RewardSample(src="a", mt="b")], RewardOptions())
    assert isinstance(error, SampleError) and "src_lang: the service's prompt has it" in str(error)


@pytest.mark.parametrize(
    ("family", "sample", "words"),
    [
        ("deberta", {"messages": turns("a", "b")}, "the model has no chat template"),
        ("gemma", {"messages": turns("a", "b", system="c")}, "System role not supported"),
        ("llama", {"text": "a", "pair": "b"}, "pair: this model reads one text"),
        ("qwen", {"text": "a", "pair": "b"}, "pair: this model reads one text"),
        ("llama", {"text": "word " * 500}, "overlong: "),
        ("qwen", {"text": ""}, "the sample has no token"),
    ],
)
def test_a_sample_that_the_model_cannot_take_is_one_line(tmp_path, family, sample, words):
    backend = load(make_reward_model(tmp_path, family))
    bad, good = backend.encode([RewardSample(**sample), RewardSample(text="a")], RewardOptions())
    assert isinstance(bad, SampleError) and words in str(bad) and "\n" not in str(bad)
    assert not isinstance(good, SampleError)


def test_a_turn_that_the_template_drops_is_an_error(tmp_path):
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }} {% endfor %}"
    backend = load(make_reward_model(tmp_path, "llama", template=template))
    chat = [*turns("a question", "an answer"), {"role": "tool", "content": "found it"}]
    (error,) = backend.encode([RewardSample(messages=chat)], RewardOptions())
    assert "messages.2: the chat template drops or changes its text" in str(error)


def test_a_token_without_a_row_fails_its_sample_and_not_the_process(tmp_path):
    backend = load(make_reward_model(tmp_path, "llama", pad="unknown"))
    samples = [RewardSample(text="a <|added pad|>"), RewardSample(text="a")]
    bad, good = backend.encode(samples, RewardOptions())
    assert "it has the id 400" in str(bad) and not isinstance(good, SampleError)


def _without_head(folder: Any) -> None:
    change_config(folder, architectures=["LlamaForCausalLM"])


def _without_weights_of_the_head(folder: Any) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "settings", "words"),
    [
        (_without_head, {}, "a model without a classification head"),
        (_without_weights_of_the_head, {}, "no weights of score.weight"),
        (lambda folder: (folder / "config.json").unlink(), {}, "no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), {}, "tokenizer"),
        (None, {"max_input_length": 1000}, "the model's limit is 128"),
        (None, {"weights": "helpful=1"}, "no label 'helpful'"),
        (None, {"weights": "reward"}, "LABEL=NUMBER"),
        (None, {"weights": "reward=0"}, "every weight is 0"),
        (None, {"prompt": "pair"}, "sets no mark between two texts"),
        (None, {"prompt": "nothing.yaml"}, "neither one of"),
        (None, {"dtype": "int8"}, "--dtype int8"),
    ],
)
def test_a_model_or_setting_that_cannot_work_is_one_line(tmp_path, spoil, settings, words):
    folder = make_reward_model(tmp_path, "llama")
    if spoil is not None:
        spoil(folder)
    with pytest.raises(UserError) as error_info:
        load(folder, **settings)
    assert words in str(error_info.value) and "\n" not in str(error_info.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"2 labels \(bad, good\): say what each counts"),
        ({"weights": "best=1"}, "no label 'best'"),
        ({"weights": "good=1", "prompt": "messages"}, "the model has no chat template"),
    ],
)
def test_labels_and_prompts_that_do_not_fit_are_refused_before_weights_are_loaded(
    tmp_path, monkeypatch, settings, words
):
    folder = make_reward_model(tmp_path, "deberta", labels=("bad", "good"))
    monkeypatch.setattr(RewardModelBackend, "_network", lambda self, folder: pytest.fail("loaded"))
    with pytest.raises(UserError, match=words):
        load(folder, **settings)


def test_a_network_whose_scores_depend_on_the_padding_is_refused(tmp_path, monkeypatch):
    folder = make_reward_model(tmp_path, "llama")
    original = RewardModelBackend._logits

    def padded_on_the_wrong_side(self: Any, inputs: Any) -> Any:
        return [[row[0] + len(inputs)] for row in original(self, inputs)]

    monkeypatch.setattr(RewardModelBackend, "_logits", padded_on_the_wrong_side)
    with pytest.raises(UserError, match="beside a longer text"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "qwen", "gemma"])
def test_a_decoder_keeps_no_keys_and_values(tmp_path, family):
    """Nothing follows a sample, and on a GPU they would take as much memory as its activations."""
    backend = load(make_reward_model(tmp_path, family))
    outputs: list[Any] = []
    backend._model.base_model.register_forward_hook(lambda *parts: outputs.append(parts[-1]))
    scores(backend, CHATS)
    assert outputs and all(output.past_key_values is None for output in outputs)


def test_a_small_network_gets_larger_batches_on_a_cpu(tmp_path, monkeypatch):
    folder = str(make_reward_model(tmp_path, "llama"))
    description = RewardModelBackend(folder, device="cpu", matmul="torch").load()
    assert default_batch_tokens(description) == 768
    monkeypatch.setattr("services.reward_model.model._FEW_WEIGHTS", 1000)
    description = RewardModelBackend(folder, device="cpu", matmul="torch").load()
    assert default_batch_tokens(description) == 256
