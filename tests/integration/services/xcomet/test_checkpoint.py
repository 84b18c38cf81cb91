"""Check that an invalid checkpoint gives a one-line error before its weights are read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from scorekit.errors import UserError
from services.xcomet.checkpoint import decide_layer_transformation, read_checkpoint
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import build_checkpoint, loaded, score
from tests.kits.comet.golden import GOLDEN
from tests.kits.packed import break_pickle, pack

PAIRS = [{"src": "Das ist ein Haus.", "mt": "This is a house."}, {"src": "Ja", "mt": "Yes, no."}]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("checkpoint")
    return build_checkpoint(home, GOLDEN, PAIRS, seed=1, hidden=8, layers=1)


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """Return a copy to damage, which names its encoder by a relative path."""
    home = shutil.copytree(original, tmp_path / "model")
    edit(home, lambda stored: stored["hyper_parameters"].update(pretrained_model="encoder"))
    return home


def edit(home: Path, change) -> None:
    file = home / "checkpoints" / "model.ckpt"
    stored = torch.load(file, weights_only=True)
    change(stored)
    torch.save(stored, file)


def refusal(home: Path | str, *, load: bool = False, **kwargs) -> str:
    """Return the error message of `check`, or of `load` if `check` cannot detect the error."""
    backend = XCometBackend(str(home), device="cpu", threads=1, **kwargs)
    if load:
        backend.check()
    with pytest.raises(UserError) as refused:
        (backend.load if load else backend.check)()
    message = str(refused.value)
    assert "\n" not in message
    return message


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_the_unspoilt_copy_loads(folder):
    backend = XCometBackend(str(folder), device="cpu", threads=1)
    backend.check()
    assert backend.load().max_input_length == 512


def test_a_checkpoint_stored_in_bfloat16_scores(folder):
    def halve(stored):
        stored["state_dict"] = {k: v.bfloat16() for k, v in stored["state_dict"].items()}

    edit(folder, halve)
    assert len(score(loaded(folder), PAIRS)) == len(PAIRS)


def test_missing_folder(tmp_path):
    assert "--model" in refusal(tmp_path / "nowhere")


def test_folder_without_checkpoint(tmp_path):
    assert "checkpoints/model.ckpt" in refusal(tmp_path)


def test_missing_hparams(folder):
    (folder / "hparams.yaml").unlink()
    assert "hparams.yaml: missing" in refusal(folder)


def test_broken_hparams(folder):
    (folder / "hparams.yaml").write_text("a: [1", encoding="utf-8")
    assert "hparams.yaml, line 1: not YAML" in refusal(folder)


def test_checkpoint_of_another_class(folder):
    (folder / "hparams.yaml").write_text("class_identifier: my_metric", encoding="utf-8")
    message = refusal(folder)
    assert "'my_metric'" in message and "served are regression_metric, " in message


@pytest.mark.parametrize(
    "text",
    [
        "class_identifier: [xcomet_metric]",
        "class_identifier: {a: 1}",
        "- 1",
        "[" * 9000,
        "class_identifier: !!python/object/apply:os.mkdir [made]",
    ],
)
def test_odd_hparams(folder, text, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "hparams.yaml").write_text(text, encoding="utf-8")
    assert refusal(folder).startswith(
        (f"{folder}/hparams.yaml: ", f"{folder}/hparams.yaml, line 1: ")
    )
    assert not (folder / "made").exists()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_checkpoint_that_is_cut_short(folder, share):
    file = folder / "checkpoints" / "model.ckpt"
    checkpoint_bytes = file.read_bytes()
    file.write_bytes(checkpoint_bytes[: int(share * len(checkpoint_bytes))])
    assert "not a checkpoint that torch can load: cut short" in refusal(folder)


def test_not_a_checkpoint(folder):
    file = folder / "checkpoints" / "model.ckpt"
    file.write_bytes(b"git lfs pointer")
    assert "not a checkpoint that torch can load" in refusal(folder)
    file.write_bytes(pickle.dumps(Evil(folder / "made")))
    assert "not a checkpoint that torch can load" in refusal(folder)
    assert not (folder / "made").exists()


def test_pickle_that_runs_code_is_refused(folder):
    created_dir = folder / "made"
    edit(folder, lambda stored: stored.update(extra=Evil(created_dir)))
    assert "mkdir" in refusal(folder) and not created_dir.exists()


def test_hyper_parameters_of_lightning_are_read(folder):
    """Check hyperparameters, which real checkpoints contain besides tensors."""
    import argparse
    from collections import defaultdict

    import numpy as np

    def change(stored):
        stored["callbacks"] = {"best": np.float64(0.5), "at": Path("a"), "n": np.int64(3)}
        stored["arguments"] = argparse.Namespace(lr=1.0)
        stored["loops"] = defaultdict(dict)

    edit(folder, change)
    XCometBackend(str(folder), device="cpu", threads=1).load()


def test_no_state_dict(folder):
    edit(folder, lambda stored: stored.pop("state_dict"))
    assert "state_dict" in refusal(folder)


@pytest.mark.parametrize("odd", [None, [1]])
def test_no_hyper_parameters(folder, odd):
    edit(folder, lambda stored: stored.update(hyper_parameters=odd))
    assert "it has no hyper_parameters" in refusal(folder)


@pytest.mark.parametrize("odd", [{1: torch.zeros(1)}, {"estimator.ff.0.weight": "x"}])
def test_what_is_no_weight(folder, odd):
    edit(folder, lambda stored: stored["state_dict"].update(odd))
    assert "its state_dict holds no weights" in refusal(folder)


@pytest.mark.parametrize(
    "odd",
    [
        {"activations": "nope"},
        {"final_activation": 7},
        {"hidden_sizes": []},
        {"dropout": 7},
        {"error_labels": ["minor"]},
    ],
)
def test_hyper_parameters_that_build_nothing(folder, odd):
    """Check that wrong hyperparameters give a one-line error that names the file."""
    edit(folder, lambda stored: stored["hyper_parameters"].update(odd))
    message = refusal(folder, load=True)
    assert message.startswith(f"{folder}/checkpoints/model.ckpt: its hyper-parameters")


def test_unserved_encoder(folder):
    for name in ("BERT", ["XLM-RoBERTa-XL"]):
        edit(folder, lambda s, name=name: s["hyper_parameters"].update(encoder_model=name))
        assert str(name) in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_encoder_file(folder, name):
    (folder / "encoder" / name).unlink()
    (folder / "encoder" / "sentencepiece.bpe.model").unlink(missing_ok=True)
    message = refusal(folder)
    assert name in message and "--encoder" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "bert"}, "'bert'"),
        ({"vocab_size": 77}, "(77, 8, 1)"),
        ({"hidden_size": 16}, ", 16, 1)"),
        ({"num_hidden_layers": 2}, ", 8, 2)"),
    ],
)
def test_encoder_that_does_not_fit(folder, change, part):
    path = folder / "encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change), encoding="utf-8")
    assert part in refusal(folder)


def test_broken_encoder_files(folder):
    config = folder / "encoder" / "config.json"
    for text, message in (("{", "not JSON"), ("[]", "not the config of a model")):
        config_text = config.read_text(encoding="utf-8")
        config.write_text(text, encoding="utf-8")
        assert message in refusal(folder)
        config.write_text(config_text, encoding="utf-8")
    (folder / "encoder" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert f"tokenizer of encoder {folder}/encoder" in refusal(folder, load=True)


def test_a_tokenizer_with_more_ids_than_the_weights_know(folder):
    """Check the refusal: an id beyond the table fails a batch, and on a GPU the process."""
    file = folder / "encoder" / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] += [[f"more{n}", -9.0] for n in range(5)]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "Give --encoder the right folder" in refusal(folder, load=True)


def test_missing_encoder_folder(folder):
    assert "--encoder" in refusal(folder, encoder="/nowhere/encoder")


def test_encoder_of_the_hub_without_a_hub(folder):
    """Check an encoder named by a hub id. Tests have no network (HF_HUB_OFFLINE)."""
    message = refusal(folder, encoder="facebook/xlm-roberta-xl-not-here", load=True)
    assert "--encoder" in message


def test_missing_weight(folder):
    edit(folder, lambda stored: stored["state_dict"].pop("hidden2tag.bias"))
    assert "hidden2tag.bias" in refusal(folder, load=True)


def test_wrong_shape(folder):
    edit(folder, lambda s: s["state_dict"].update({"hidden2tag.weight": torch.zeros(3, 8)}))
    assert "does not fit" in refusal(folder, load=True)


def test_word_layer_that_is_not_there(folder):
    edit(folder, lambda stored: stored["hyper_parameters"].update(word_layer=7))
    assert "word_layer" in refusal(folder, load=True)


@pytest.mark.parametrize(
    ("yaml_value", "stored", "decided"),
    [
        ("sparsemax_patch", "sparsemax", "softmax"),
        ("sparsemax_patch", "sparsemax_patch", "softmax"),
        ("sparsemax", "sparsemax", "sparsemax"),
        ("softmax", "softmax", "softmax"),
        (None, "sparsemax", "sparsemax"),
    ],
)
def test_layer_transformation(yaml_value, stored, decided, caplog):
    """Check that the rule of `comet.load_from_checkpoint` is applied and logged."""
    hparams = {} if yaml_value is None else {"layer_transformation": yaml_value}
    with caplog.at_level("INFO"):
        assert decide_layer_transformation(hparams, {"layer_transformation": stored}) == decided
    assert decided in caplog.text


def test_importing_the_service_loads_nothing_heavy():
    code = (
        "import services.xcomet.model, sys; heavy = {'torch', 'transformers', 'comet'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numbers_of_numpy_1_and_2_are_read(folder, name):
    """Check both numpy versions, which pickle numbers under different module names."""
    import numpy as np

    edit(folder, lambda stored: stored.update(best=np.float64(0.5)))
    file = folder / "checkpoints" / "model.ckpt"
    module_name = np.float64(0).__reduce__()[0].__module__
    with zipfile.ZipFile(file) as old:
        parts = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w") as new:
        for part, content in parts.items():
            new.writestr(part, content.replace(f"c{module_name}\n".encode(), f"c{name}\n".encode()))
    assert any(f"c{name}\n".encode() in content for content in parts.values()) == (
        name == module_name
    )
    assert read_checkpoint(file)["best"] == 0.5


def test_upstreams_networks_where_it_is_missing(folder, monkeypatch):
    monkeypatch.setattr("services.xcomet.upstream.find_spec", lambda name: None)
    message = refusal(folder, implementation="unbabel-comet")
    assert message.startswith("--implementation unbabel-comet: ") and "make env-oracle" in message


def test_a_damaged_pickle_is_a_line(folder):
    break_pickle(folder / "checkpoints" / "model.ckpt")
    message = refusal(folder)
    assert "its data.pkl is damaged" in message and "\n" not in message


def test_a_compressed_checkpoint_is_refused(folder):
    pack(folder / "checkpoints" / "model.ckpt")
    assert "is compressed, which torch.save never does" in refusal(folder)


def test_a_weight_that_claims_to_be_larger_than_the_file_is_refused(folder):
    """Check a view of one number as terabytes, which torch loads in a blink."""
    import torch

    name = "estimator.ff.0.weight"

    def expand(stored):
        stored["state_dict"][name] = torch.zeros(1, 1).expand(2**20, 2**20)

    edit(folder, expand)
    assert f"size mismatch for {name}" in refusal(folder, load=True)
