"""Check which model folders are served, the errors for others, and that no code is run."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch

from scorekit.errors import SampleError, UserError
from services.embedder.endpoint import EmbedOptions
from services.embedder.model import EmbedderBackend, digest_folder
from testing.checkpoints.embedder import make_folder, make_plain_folder

CUT, WHOLE = EmbedOptions(True, ""), EmbedOptions(False, "")


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("made") / "model", dense=16, pooling="mean")


@pytest.fixture
def folder(base_folder, tmp_path):
    return shutil.copytree(base_folder, tmp_path / "model")


def backend(folder, **options):
    return EmbedderBackend(str(folder), device="cpu", threads=1, **options)


def refusal(folder, **options):
    with pytest.raises(UserError) as refused:
        backend(folder, **options).load()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_that_is_not_there_is_told_before_a_hub_is_asked(tmp_path, monkeypatch):
    def ask_no_hub(*_, **__):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask_no_hub)
    for name in (tmp_path / "none", "./none", "none", "demo/models/none"):
        assert "no such folder" in refusal(name)
    file = tmp_path / "file"
    file.write_text("")
    assert "not a folder" in refusal(file)


def test_a_plain_folder_is_refused_until_its_pooling_is_said(tmp_path, folder):
    plain = make_plain_folder(tmp_path / "plain")
    assert "the folder has no modules.json" in refusal(plain)
    assert backend(plain, pooling="cls").load().pooling == "cls"
    assert "modules.json already sets it" in refusal(folder, pooling="mean")


def test_steps_that_would_run_the_folders_code_are_refused(folder):
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    steps = json.loads((folder / "modules.json").read_text())
    for kind in (
        "evil.Pooling",
        "os.system",
        "sentence_transformers.models.CNN",
        "transformers.Dense",
    ):
        changed = [*steps[:1], steps[1] | {"type": kind}, *steps[2:]]
        (folder / "modules.json").write_text(json.dumps(changed))
        assert "unknown module type" in refusal(folder)
    for path in ("../elsewhere", "/etc"):
        changed = [*steps[:1], steps[1] | {"path": path}, *steps[2:]]
        (folder / "modules.json").write_text(json.dumps(changed))
        assert "leads out of the folder" in refusal(folder)


def test_weights_that_are_a_program_are_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "it ran"), "w"))

    for weights in (folder / "model.safetensors", folder / "2_Dense/model.safetensors"):
        weight_bytes = weights.read_bytes()
        weights.unlink()
        program = weights.with_name("pytorch_model.bin")
        with program.open("wb") as file:
            pickle.dump({"a": Evil()}, file)
        assert "cannot be loaded" in refusal(folder)
        program.unlink()
        weights.write_bytes(weight_bytes)
    assert not (tmp_path / "it ran").exists()
    backend(folder).load()


def test_an_activation_that_is_not_torchs_would_be_another_one(folder):
    change(folder / "2_Dense/config.json", activation_function="mine.Silly")
    assert "activation_function must be a class of torch" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{", "cannot be read"),
        ("modules.json", "[]", "expected a list of modules"),
        ("modules.json", '[{"type": 5, "path": ""}]', "expected a list of modules"),
        ("modules.json", '{"a": 1}', "expected a list of modules"),
        ("config.json", "[]", "not a model's configuration"),
        ("config.json", '{"model_type": "nonsense"}', "cannot be loaded"),
        ("config_sentence_transformers.json", '{"prompts": 5}', "prompts is not a mapping"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 5}}', "prompts is not a mapping"),
        (
            "config_sentence_transformers.json",
            '{"default_prompt_name": "a"}',
            "not a key of prompts",
        ),
        ("model.safetensors", "not weights", "cannot be loaded"),
        ("adapter_config.json", "{}", "Merge it with its base"),
        (
            "1_Pooling/config.json",
            '{"embedding_dimension": 32, "pooling_mode": "sum"}',
            "cannot be",
        ),
    ],
)
def test_a_folder_that_is_broken_is_told_in_a_line(folder, file, content, message):
    (folder / file).write_text(content)
    assert message in refusal(folder)


def test_weights_that_are_missing_are_told(folder):
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_prompts_that_the_pooling_would_leave_out_are_refused(folder):
    change(folder / "1_Pooling/config.json", include_prompt=False)
    backend(folder).load()  # without prompts
    change(folder / "config_sentence_transformers.json", prompts={"query": "q: "})
    assert "excludes prompts" in refusal(folder)


def test_the_revision_changes_with_any_file_of_the_model(folder):
    seen = {digest_folder(folder)}
    for file in (
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "tokenizer.json",
    ):
        path = folder / file
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        seen.add(digest_folder(folder))
        path.write_bytes(content)
    assert len(seen) == 5
    (folder / "README.md").write_text("a note")
    assert digest_folder(folder) in seen


def test_the_limit_of_tokens_is_the_models_or_less(folder):
    description = backend(folder).load()
    assert description.max_input_length == 64  # 66 positions, of which RoBERTa reserves 2
    assert backend(folder, max_input_length=16).load().max_input_length == 16
    assert "limit is 64 tokens" in refusal(folder, max_input_length=65)
    change(folder / "tokenizer_config.json", model_max_length=10**30)
    change(folder / "sentence_bert_config.json", max_seq_length=None)
    positions = json.loads((folder / "config.json").read_text())
    free = backend(folder)
    first = positions["pad_token_id"] + 1
    assert free.load().max_input_length == positions["max_position_embeddings"] - first
    encoded = free.encode(["word " * 999], CUT)
    assert np.isfinite(free.forward(encoded)[0]["embedding"]).all()


def test_a_model_of_the_hub_is_named_by_its_id_and_its_commit(folder, tmp_path, monkeypatch):
    commit = "0123456789" * 4
    cache_dir = tmp_path / "hub/models--owner--BGE-ko"
    shutil.copytree(folder, cache_dir / "snapshots" / commit)
    (cache_dir / "refs").mkdir()
    (cache_dir / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    model = EmbedderBackend("owner/BGE-ko", device="cpu", threads=1)
    model.check()
    description = model.load()
    assert (description.model, description.revision) == ("owner/BGE-ko", commit)
    assert "incomplete in" in refusal("owner/other")


def test_overlong_is_an_error_unless_it_may_be_cut(folder):
    model = backend(folder)
    model.load()
    fits, (error,) = model.encode(["word " * 40], WHOLE), model.encode(["word " * 400], WHOLE)
    assert not isinstance(fits[0], SampleError)
    assert (error.type, error.message[:19]) == ("overlong", "more than 64 tokens")
    (cut,) = model.encode(["word " * 400], CUT)
    assert cut.length == 64 and cut.fields == {"tokens": 64, "truncated": {"input": True}}


def test_a_dimension_that_the_folder_cuts_to_is_kept_to(folder):
    from sentence_transformers import SentenceTransformer

    change(folder / "config_sentence_transformers.json", truncate_dim=4)
    expected = SentenceTransformer(str(folder), device="cpu").encode(
        ["a b"], normalize_embeddings=True
    )
    model = backend(folder)
    assert model.load().dimension == 4
    actual = model.forward(model.encode(["a b"], WHOLE))[0]["embedding"]
    assert np.abs(actual - expected[0]).max() < 1e-5


def test_weights_of_the_old_form_and_names_are_read(folder):
    from safetensors.torch import load_file

    reference = backend(folder)
    reference.load()
    for weights in folder.rglob("model.safetensors"):
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
    steps = json.loads((folder / "modules.json").read_text())
    old = [
        step | {"type": f"sentence_transformers.models.{step['type'].rpartition('.')[2]}"}
        for step in steps
    ]
    (folder / "modules.json").write_text(json.dumps(old))
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    model = backend(folder)
    assert model.load().pooling == "mean"
    for actual, expected in zip(
        *(m.forward(m.encode(["a b"], WHOLE)) for m in (model, reference)), strict=True
    ):
        assert np.array_equal(actual["embedding"], expected["embedding"])
