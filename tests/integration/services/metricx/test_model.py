"""Check MetricX: input format, limits, valid and invalid checkpoints."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import MT5Config, MT5ForConditionalGeneration

from scorekit.errors import SampleError, UserError
from scorekit.schemas import MetricXOptions, TranslationSample
from services.metricx.model import MetricXBackend, check_folder, format_input, load_tokenizer
from services.metricx.regression import empty_regression, load_regression
from tests.kits.examples import examples
from tests.kits.metricx_checkpoints import FLOAT32
from tests.kits.packed import break_pickle, pack


@pytest.fixture(scope="module")
def backend(metricx_folder):
    backend = MetricXBackend(str(metricx_folder), device="cpu", threads=1)
    backend.load()
    return backend


def test_the_input_of_quality_estimation_has_no_reference_part():
    assert format_input(TranslationSample(src="a b", mt="가 나")) == "source: a b candidate: 가 나"


def test_the_input_of_the_reference_mode():
    sample = TranslationSample(src="a", mt="b", ref="c")
    assert format_input(sample) == "source: a candidate: b reference: c"


def _encode(backend, sample, **options):
    (encoded,) = backend.encode([sample], MetricXOptions(**options))
    return encoded


def test_the_end_of_sentence_id_is_dropped(backend, metricx_folder):
    encoded = _encode(backend, TranslationSample(src="a", mt="b"))
    eos = load_tokenizer(metricx_folder, "golden").token_to_id("</s>")
    assert eos == 1 and eos not in encoded.payload
    assert encoded.fields["tokens"] == len(encoded.payload)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    src=st.text(alphabet="abc 가나다😀", max_size=60),
    mt=st.text(alphabet="xyz 라마바😀", max_size=60),
    ref=st.one_of(st.none(), st.text(alphabet="pq 사아", min_size=1, max_size=30)),
    limit=st.integers(16, 60),
)
def test_what_the_model_read_is_told_exactly(backend, src, mt, ref, limit):
    """Check that the retained ids are those of the text up to `mt_covered`."""
    sample = TranslationSample(src=src, mt=mt, ref=ref)
    uncut = _encode(backend, sample)
    cut = _encode(backend, sample, max_input_length=limit)
    fields = cut.fields
    if len(uncut.payload) < limit:
        assert cut == uncut and fields["mt_covered"] == len(mt)
        assert not any(fields["truncated"].values())
        return
    assert cut.payload == uncut.payload[: limit - 1]
    # White space at the very end has no token: only then may nothing be missing.
    lost_name = "ref" if ref else "mt"
    assert fields["truncated"][lost_name] or not (ref or mt).strip()
    assert 0 <= fields["mt_covered"] <= len(mt)
    assert fields["truncated"]["mt"] == (fields["mt_covered"] < len(mt)) or not mt
    failed = _encode(backend, sample, max_input_length=limit, overlong="error")
    assert isinstance(failed, SampleError) and failed.type == "overlong"


def test_the_cut_follows_the_text(backend):
    mt = "하나 둘 셋 넷 다섯 여섯 일곱 여덟 아홉 열 " * 10
    cut = _encode(backend, TranslationSample(src="count", mt=mt), max_input_length=40)
    covered = cut.fields["mt_covered"]
    shortened = _encode(backend, TranslationSample(src="count", mt=mt[:covered]))
    assert cut.payload[:-1] == shortened.payload[: len(cut.payload) - 1]
    assert cut.fields["truncated"] == {"src": False, "mt": True, "ref": False}
    long_source = _encode(backend, TranslationSample(src=mt, mt="x"), max_input_length=40)
    assert long_source.fields["truncated"] == {"src": True, "mt": True, "ref": False}
    assert long_source.fields["mt_covered"] == 0


def test_an_output_that_is_not_finite_is_never_clamped_to_a_score(backend, monkeypatch):
    encoded = [_encode(backend, TranslationSample(src=c, mt=c)) for c in "abcd"]
    raw = torch.tensor([math.inf, -math.inf, math.nan, 30.0])
    monkeypatch.setattr(backend, "_model", lambda ids, mask: raw)
    scores = [outcome["score"] for outcome in backend.forward(encoded)]
    assert all(math.isnan(s) for s in scores[:3]) and scores[3] == 25.0


#: Sizes of google/mt5-large, -xl, -xxl, which the three released checkpoints have.
SIZES = {
    "large": ({"d_model": 1024, "d_ff": 2816, "num_heads": 16}, 1.2e9),
    "xl": ({"d_model": 2048, "d_ff": 5120, "num_heads": 32}, 3.7e9),
    "xxl": ({"d_model": 4096, "d_ff": 10240, "num_heads": 64}, 12.9e9),
}


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_of_full_size_checkpoints_fit(size):
    dimensions, parameters = SIZES[size]
    config = MT5Config(
        vocab_size=250112,
        num_layers=24,
        num_decoder_layers=24,
        d_kv=64,
        tie_word_embeddings=False,
        **dimensions,
    )
    with torch.device("meta"):
        published = MT5ForConditionalGeneration(config).state_dict()
    assert sum(t.numel() for n, t in published.items() if "embed_tokens" not in n) == pytest.approx(
        parameters, rel=0.04
    )
    shapes = {n: t.shape for n, t in empty_regression(config).state_dict().items()}
    head = published.pop("lm_head.weight")
    assert shapes.pop("score_row") == head.shape[1:]
    assert shapes == {n: t.shape for n, t in published.items()}


def _copy(folder, tmp_path, **changes):
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_file(folder / "model.safetensors")


def _load(folder):
    return load_regression(folder, torch.float32, torch.device("cpu"))


def test_only_the_score_s_row_is_kept_and_a_config_may_name_it(metricx_folder, tmp_path):
    weights = _copy(metricx_folder, tmp_path, score_token_id=7)
    weights["lm_head.weight"][7] = 2 * weights["lm_head.weight"][250089]
    save_file(weights, tmp_path / "model.safetensors")
    model = _load(tmp_path)
    assert "lm_head.weight" not in model.state_dict()
    assert torch.equal(model.score_row, weights["lm_head.weight"][7])


def test_the_output_is_the_embeddings_only_where_the_config_says_so(metricx_folder, tmp_path):
    """Check tied embeddings, which transformers 5 sets for every mT5; upstream then scales."""
    weights = _copy(metricx_folder, tmp_path, tie_word_embeddings=True, score_token_id=300)
    head = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors")
    tied = _load(tmp_path)
    assert torch.equal(tied.score_row, weights["shared.weight"][300])
    head[300] = weights["shared.weight"][300]
    save_file({**weights, "lm_head.weight": head}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for written in ({**config, "tie_word_embeddings": False}, config):
        (tmp_path / "config.json").write_text(json.dumps(written))
        untied = _load(tmp_path)
        scale = untied.config.d_model**-0.5 if written is config else 1.0
        ids = torch.tensor([[259, 300, 301]])
        expected = tied(ids, torch.ones_like(ids)) / tied.config.d_model**-0.5 * scale
        assert untied(ids, torch.ones_like(ids)) == pytest.approx(expected, rel=1e-4)


def test_attention_is_the_kind_that_a_service_names(metricx_folder):
    model = _load(metricx_folder)
    stacks = (model.encoder, model.decoder)
    assert {stack.config._attn_implementation for stack in stacks} == {"eager"}


def test_a_tokenizer_with_more_ids_than_the_weights_is_refused(metricx_folder, tmp_path):
    weights = _copy(metricx_folder, tmp_path, vocab_size=3999, score_token_id=7)
    short = {n: w[:3999] if len(w) > 3999 else w for n, w in weights.items()}
    save_file({n: w.clone() for n, w in short.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"it has 4000 ids, but the weights of .* have 3999"):
        MetricXBackend(str(tmp_path), device="cpu", threads=1).load()


def test_a_pickled_checkpoint_of_tensors_loads_in_shards(metricx_folder, tmp_path):
    weights = _copy(metricx_folder, tmp_path)
    names = sorted(weights)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, part in shards.items():
        torch.save({name: weights[name] for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert torch.equal(_load(tmp_path).score_row, _load(metricx_folder).score_row)


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/scorekit-pwned",)


def test_a_pickle_with_code_is_refused(metricx_folder, tmp_path):
    _copy(metricx_folder, tmp_path)
    torch.save({"shared.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="its weights cannot be read"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda w: w.pop("lm_head.weight"), "its weights have no lm_head.weight"),
        (lambda w: w.pop("encoder.final_layer_norm.weight"), "no encoder.final_layer_norm.weight"),
        (lambda w: w.update({"classifier.weight": torch.zeros(2)}), "an unknown classifier.weight"),
        (
            lambda w: w.update({"encoder.final_layer_norm.weight": torch.zeros(3)}),
            r"has the shape \(3,\), its config.json asks for \(32,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(metricx_folder, tmp_path, damage, reason):
    weights = _copy(metricx_folder, tmp_path)
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=reason):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score_token_id": "x"}, "score_token_id x is outside"),
        ({"score_token_id": 10**9}, "score_token_id 1000000000 is outside"),
        ({"d_model": "abc"}, "not a valid mT5 configuration"),
    ],
)
def test_a_config_that_makes_no_model_is_named(metricx_folder, tmp_path, changes, reason):
    save_file(_copy(metricx_folder, tmp_path, **changes), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=reason):
        _load(tmp_path)


def test_a_broken_index_or_tokenizer_is_named(metricx_folder, tmp_path):
    _copy(metricx_folder, tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        _load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"--tokenizer .* cannot be read"):
        MetricXBackend(str(tmp_path), device="cpu", threads=1).load()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="model_type is None"):
        check_folder(tmp_path)


def test_in_process_and_over_http_agree_on_what_cannot_be_scored(metricx_folder):
    from scorekit.client import SyncScoringClient
    from scorekit.scorers import SampleForScoring, ScoringConfig
    from services.metricx.model import MetricXQEScorer
    from testing.servers import running_service

    samples = [
        SampleForScoring("a", mt, ref)
        for mt, ref in [
            ("fine", None),
            ("n\0l", None),
            ("s\ud800", None),
            ("", ""),
            ("x" * 500, "r"),
        ]
    ]
    cfg = ScoringConfig(max_input_length=100, overlong="error")
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", threads=1)
    local = scorer.score_batch(samples, cfg)
    with running_service(MetricXBackend(str(metricx_folder), device="cpu", threads=1)) as url:
        with SyncScoringClient(url) as client:
            remote = client.score(samples, options=cfg.options())
    for local_result, remote_result in zip(local.metadata, remote, strict=True):
        assert local_result.ok == remote_result.ok
        if local_result.ok:
            assert local_result.score == pytest.approx(remote_result.score, abs=FLOAT32)
        else:
            assert local_result.error.type == remote_result.error.type
    assert [s is None for s in local.sequence_scores] == [False, True, True, False, True]
    with pytest.raises(UserError, match="4000, the model reads 1536"):
        scorer.score_batch(samples, ScoringConfig(max_input_length=4000))


def test_a_torn_file_is_named(metricx_folder, tmp_path):
    _copy(metricx_folder, tmp_path)
    weights = (metricx_folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:5000])
    with pytest.raises(UserError, match="its weights cannot be read"):
        _load(tmp_path)


def test_folders_that_are_no_metricx_are_refused_before_loading(tmp_path):
    (tmp_path / "a file").write_text("")
    for path in (tmp_path, tmp_path / "a file"):
        with pytest.raises(UserError, match=f"{path}: no checkpoint of MetricX: it has no config"):
            check_folder(path)
    (tmp_path / "config.json").write_text('{"model_type": "mt5"}')
    with pytest.raises(UserError, match="no weights"):
        check_folder(tmp_path)
    with pytest.raises(UserError, match="overflow float16"):
        MetricXBackend(str(tmp_path), dtype="float16").check()


def test_a_local_model_is_shown_by_its_folder_s_name(metricx_folder):
    description = MetricXBackend(str(metricx_folder), device="cpu", threads=1).load()
    assert description.model == description.tokenizer == metricx_folder.name
    assert len(description.revision) == 32


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_pickle, "its weights cannot be read: "),
        (pack, "is compressed, which torch"),
        (lambda path: torch.save([torch.zeros(2)], path), "holds more than weights by name"),
    ],
)
def test_a_damaged_or_packed_pickled_checkpoint_is_named(metricx_folder, tmp_path, damage, reason):
    path = tmp_path / "pytorch_model.bin"
    torch.save(_copy(metricx_folder, tmp_path), path)
    damage(path)
    with pytest.raises(UserError, match=reason) as raised:
        _load(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_weight_that_claims_to_be_larger_than_the_file_is_refused(metricx_folder, tmp_path):
    """Check a view of one number as terabytes, which torch loads in a blink."""
    weights = _copy(metricx_folder, tmp_path)
    weights["shared.weight"] = torch.zeros(1, 1).expand(2**20, 2**20)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"shared.weight has the shape \(1048576, 1048576\)"):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["../secret.bin", 3, [1]])
def test_an_index_names_files_of_its_folder(metricx_folder, tmp_path, name):
    _copy(metricx_folder, tmp_path)
    index = {"weight_map": {"shared.weight": name}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="expected names of files in this folder"):
        _load(tmp_path)
