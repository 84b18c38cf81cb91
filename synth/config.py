"""The config of a synthesis run, and its language pair or pairs."""

from __future__ import annotations

from pydantic import model_validator

from scorekit.config import Config
from scorekit.languages import add_language, find_language, short_tag, unknown_language
from scorekit.text.writing_scripts import SCRIPTS
from synth.config_sections import (
    BucketingConfig,
    DataConfig,
    ExportConfig,
    FiltersConfig,
    FinalGenerationConfig,
    MetricXConfig,
    PrefilterConfig,
    RunConfig,
    SegmentationConfig,
    TeacherConfig,
)

#: Largest number of candidates in one request, all of which are lost if it is interrupted.
PART = 32


class SynthConfig(Config):
    """The whole config."""

    run: RunConfig
    data: DataConfig
    segmentation: SegmentationConfig = SegmentationConfig()
    bucketing: BucketingConfig = BucketingConfig()
    teacher: TeacherConfig = TeacherConfig()
    prefilter: PrefilterConfig = PrefilterConfig()
    final_generation: FinalGenerationConfig = FinalGenerationConfig()
    metricx: MetricXConfig = MetricXConfig()
    filters: FiltersConfig = FiltersConfig()
    export: ExportConfig = ExportConfig()

    @property
    def candidates_per_request(self) -> int:
        """Return the largest number of candidates in one request to the teacher."""
        if self.final_generation.strategy == "per_call":
            return 1
        return min(PART, self.teacher.max_sequences or PART)

    @model_validator(mode="after")
    def _check(self) -> SynthConfig:
        _check_languages(self)
        edges = self.bucketing.boundaries
        if sorted(set(edges)) != edges:
            raise ValueError("bucketing.boundaries: give rising numbers")
        quota = self.bucketing.per_bucket_quota
        if isinstance(quota, list) and len(quota) != len(edges) - 1:
            raise ValueError(f"bucketing.per_bucket_quota: give {len(edges) - 1} numbers")
        if self.bucketing.measure == "tokenizer" and self.bucketing.tokenizer is None:
            raise ValueError("bucketing.tokenizer: name one for measure: tokenizer")
        if self.filters.on_reject == "next_best" and self.final_generation.store_top_k < 2:
            raise ValueError("filters.on_reject: next_best needs final_generation.store_top_k > 1")
        if self.segmentation.min_chars > self.segmentation.max_chars:
            raise ValueError("segmentation.min_chars is over max_chars")
        return self


def _check_languages(cfg: SynthConfig) -> None:
    """Raise ValueError for an unknown language, and if the pair is missing or set twice."""
    data = cfg.data
    if data.pairs is None and not (data.src_lang and data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs")
    if data.pairs is not None and (data.src_lang or data.tgt_lang):
        raise ValueError("data: give src_lang and tgt_lang, or pairs: not both")
    for pair_cfg in pair_configs(cfg).values():
        languages(pair_cfg)


def pair_configs(cfg: SynthConfig) -> dict[str, SynthConfig]:
    """Return folder name -> config of each of `data.pairs`; without pairs the config under "".

    Raises ValueError for a repeated pair.
    """
    if cfg.data.pairs is None:
        return {"": cfg}
    configs: dict[str, SynthConfig] = {}
    for pair in cfg.data.pairs:
        pair_cfg = cfg.model_copy(deep=True)
        pair_cfg.data.pairs = None
        pair_cfg.data.src_lang, pair_cfg.data.tgt_lang = pair.src_lang, pair.tgt_lang
        pair_cfg.data.files = cfg.data.files if pair.files is None else pair.files
        name = "-".join(short_tag(tag) for tag in languages(pair_cfg))
        if name in configs:
            raise ValueError(f"data.pairs: {name} is repeated")
        pair_cfg.run.out_dir, pair_cfg.run.answers = cfg.run.out_dir / name, answers_place(cfg)
        configs[name] = pair_cfg
    return configs


def answers_place(cfg: SynthConfig) -> str:
    """Return where answers are cached. A dry run shares the answers of its run."""
    return cfg.run.answers or str(cfg.run.out_dir / "answers.sqlite")


def languages(cfg: SynthConfig) -> tuple[str, str]:
    """Return the BCP-47 tags of source and target, such as ("ko-KR", "en-US").

    A user's tag stays if it has more than the language. Registers `data.languages` in this process.
    Raises ValueError."""
    for custom in cfg.data.languages:
        if unknown := set(custom.scripts) - SCRIPTS.keys():
            raise ValueError(
                f"data.languages: {custom.code}: unknown script {min(unknown)!r}. Expected one of "
                f"{', '.join(sorted(SCRIPTS))}"
            )
        add_language(custom.code, custom.name, madlad=custom.madlad, scripts=tuple(custom.scripts))
    language_by_key = {
        key: find_language(getattr(cfg.data, key)) for key in ("src_lang", "tgt_lang")
    }
    for key, language in language_by_key.items():
        if language is None:
            message = unknown_language(getattr(cfg.data, key))
            raise ValueError(f"data.{key}: {message} (add your own to data.languages)")
    source, target = (language.tag for language in language_by_key.values() if language)
    return source, target
