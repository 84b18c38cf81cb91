"""The config of a synthesis run: every key with its default, and the language pair or pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from scorekit.client.transport import checked_url
from scorekit.config import Config
from scorekit.errors import UserError
from scorekit.languages import add_language, find_language, short_tag, unknown_language
from scorekit.paid.answers import Space, check_location
from scorekit.text.writing_scripts import SCRIPTS
from synth.filters import RuleConfig

#: Environment variable with the Redis password: URLs are visible in configs and process lists.
REDIS_PASSWORD = "SYNTH_REDIS_PASSWORD"
#: The store of answers.
ANSWERS = Space(
    name="synth",
    setting="run.answers",
    password=REDIS_PASSWORD,
    extra="synth",
    repair="`scorekit synth repair --config FILE`",
)


def _service(urls: str | list[str]) -> str | list[str]:
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            checked_url(url)
        except UserError:
            raise ValueError("not the URL of a service. Write it as http://host:port") from None
    if not urls:
        raise ValueError("give one URL at least")
    return urls


class RunConfig(Config):
    """The folder of a run, and how it writes."""

    out_dir: Path = Field(description="Folder of the run.")
    seed: int = Field(1234, ge=0, description="Of sampling and of every teacher request.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severity in logs.txt."
    )
    shard_records: int = Field(
        1000, ge=1, description="Sources a shard: what one machine takes at a time."
    )
    view_records: int = Field(
        100_000,
        ge=0,
        description="Views of more records are not written as files beside the "
        "shards: `scorekit synth show` prints them.",
    )
    answers: str | None = Field(
        None,
        description="Where the services' answers are kept, over runs: a SQLite file, or redis:// "
        "where several machines run; null: answers.sqlite in out_dir.",
    )
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="Port for Prometheus on loopback; null: none."
    )

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, location: str | None) -> str | None:
        return check_location(location, REDIS_PASSWORD)


class LanguageConfig(Config):
    """A language that is in no registry, or that you call otherwise."""

    code: str = Field(description="What src_lang, tgt_lang and the export call it.")
    name: str = Field(min_length=1, description="What the prompt calls it.")
    madlad: str | None = Field(None, description="Its folder in the corpus; null: the code.")
    scripts: list[str] = Field(
        [], description="Of scorekit/text/writing_scripts.py (Latin, Hangul); none: not checked."
    )


class PairConfig(Config):
    """A language pair of several."""

    src_lang: str = Field(description="As data.src_lang.")
    tgt_lang: str = Field(description="As data.tgt_lang.")
    files: list[str] | None = Field(None, description="As data.files; null: data.files itself.")


class DataConfig(Config):
    """The monolingual corpus and the language pair."""

    madlad_dataset: str = Field("allenai/madlad-400", description="Dataset id on the hub.")
    madlad_revision: str | None = Field(
        None, description="Commit of the dataset; null: the one this version was written for."
    )
    madlad_split: Literal["clean", "noisy"] = Field("clean", description="Which half.")
    files: list[str] | None = Field(
        None,
        min_length=1,
        description="Local shards, as paths or globs: .jsonl, or .txt with a text a line, also "
        "as .gz; or URLs of .jsonl shards; null: the hub.",
    )
    src_lang: str = Field("", description="Source language: MADLAD id or any code of it (kor, ko).")
    tgt_lang: str = Field(
        "",
        description="Target language: any code of it. What a tag says of script and region "
        "(zh-TW, sr-Latn, pt-PT) is kept to the export.",
    )
    pairs: list[PairConfig] | None = Field(
        None,
        min_length=1,
        description="In place of src_lang, tgt_lang: several pairs, each a run "
        "of its own in a folder of out_dir.",
    )
    languages: list[LanguageConfig] = Field([], description="Languages of your own.")
    target_examples_total: int = Field(10_000, ge=1, description="Sources that get candidates.")
    sample_pool_size: int = Field(1_000_000, ge=1, description="Sources that are prefiltered.")
    newlines: Literal["auto", "real", "escaped"] = Field(
        "auto", description="Whether a document's line ends are characters or written as \\n."
    )
    max_unreadable: float = Field(
        0.01, ge=0, le=1, description="Share of documents that may be unreadable; more is an error."
    )
    near_duplicates: float | None = Field(
        None,
        ge=0.3,
        le=1,
        description="Sources of the pool that are so similar to another (0.8: they share four in "
        "five of their runs of five characters) are taken out of it; null: none.",
    )
    decontaminate: list[str] = Field(
        [],
        description="Evaluation sets (.txt, .jsonl, .csv, .tsv, .parquet): sources and "
        "translations that stand in one are left out.",
    )
    max_files: int | None = Field(None, ge=1, description="Read so many files at most.")
    max_documents: int | None = Field(
        None, ge=1, description="Read so many documents at most, an equal share of each file."
    )


class SegmentationConfig(Config):
    """Documents -> segments."""

    mode: Literal["auto", "newline", "list_field"] = Field(
        "auto", description="list_field: `text` is a list; newline: a string; auto: as it comes."
    )
    min_chars: int = Field(20, ge=1, description="Shorter segments are left out.")
    max_chars: int = Field(5000, ge=1, description="Longer ones are split, or left out.")
    merge_short: bool = Field(
        False, description="Join lines under min_chars with the next of their paragraph."
    )
    noise_rules: bool = Field(True, description="Leave out HTML, code, URLs and the like.")
    language_margin: float | None = Field(
        20.0,
        ge=0,
        description="Leave out what is in another language: by its script, or as the identifier is "
        "so sure (natural logarithm of the odds); null: keep it.",
    )


class BucketingConfig(Config):
    """Lengths and quotas."""

    boundaries: list[float] = Field(
        [0, 10, 20, 40, 80, 120, 200, 400, 800, 999_999],
        min_length=2,
        description="Edges of the length buckets; each includes its lower edge.",
    )
    measure: Literal["approx_tokens", "whitespace", "tokenizer"] = Field(
        "approx_tokens",
        description="approx_tokens knows scripts; whitespace: words and half of the punctuation; "
        "tokenizer: exact, and slow.",
    )
    tokenizer: str | None = Field(
        None, description="Folder or hub id of the tokenizer, for measure: tokenizer."
    )
    per_bucket_quota: Literal["auto"] | int | list[int] = Field(
        "auto", description="auto: equal shares; a number for each; or one for every bucket."
    )


class RetryConfig(Config):
    """Retries of a request that the teacher does not answer."""

    max_attempts: int = Field(6, ge=1, description="Tries of one request.")
    backoff_s: list[float] = Field(
        [1, 2, 4, 8, 16, 32], min_length=1, description="Seconds before each further try."
    )


class GenerationConfig(Config):
    """Sampling parameters of the teacher."""

    max_tokens: int = Field(512, ge=1, description="Of a sentence's translation.")
    max_tokens_blob: int = Field(1536, ge=1, description="Of a blob's translation.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus.")
    greedy_temperature: float = Field(0.0, ge=0, description="Of the greedy translation.")
    sample_temperature: float = Field(1.0, gt=0, description="Of the prefilter's sample.")
    final_temperature: float = Field(1.0, gt=0, description="Of the candidates.")
    seed: int | None = Field(None, ge=0, description="Of the requests; null: run.seed.")


class TeacherConfig(Config):
    """The teacher: an OpenAI-compatible server."""

    backend: Literal["vllm_openai_compatible"] = Field(
        "vllm_openai_compatible", description="The interface of the server."
    )
    base_url: Annotated[str, AfterValidator(_service)] = Field(
        "http://localhost:8000/v1", description="Of the server, with /v1."
    )
    api_key_env: str = Field("VLLM_API_KEY", description="Environment variable with the key.")
    model: str = Field(
        "Qwen/Qwen3-235B-A22B-Instruct-2507", description="Model, or its served name."
    )
    revision: str | None = Field(
        None, description="Of the model, in your words: answers of another one are not taken."
    )
    prompt: str = Field("teacher", description="Template of scorekit/prompts.py, or a file.")
    request_timeout_s: float = Field(120.0, gt=0, description="Least read time-out.")
    connect_timeout_s: float = Field(5.0, gt=0, description="Connect time-out.")
    wait_for_server_s: float = Field(
        600.0, ge=0, description="Seconds that a server which is away is waited for."
    )
    max_concurrency: int = Field(32, ge=1, description="Requests in flight.")
    max_sequences: int | None = Field(
        None, ge=1, description="Sequences in flight (n=128 counts 128); null: no bound."
    )
    requests_per_minute: float | None = Field(None, gt=0, description="Rate limit.")
    retry: RetryConfig = RetryConfig()
    generation: GenerationConfig = GenerationConfig()


class PrefilterConfig(Config):
    """Greedy against sampled."""

    store_texts: bool = Field(False, description="Keep both translations beside their scores.")
    rank_by: Literal["bucket", "overall"] = Field(
        "bucket", description="Take the most improved of each bucket, or of all."
    )
    min_improvement: float | None = Field(
        None,
        description="Sources that improved less (MetricX points) are not taken; what a bucket "
        "lacks then is filled from the other buckets. null: none is left out, also where sampling "
        "improved nothing.",
    )


class BlobConfig(Config):
    """Several consecutive segments as one source."""

    enabled: bool = Field(True, description="Make blobs.")
    blob_ratio: float = Field(0.5, ge=0, le=1, description="Share of blobs among the sources.")
    sentence_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        exclude=True,  # a run is known by blob_ratio, whichever of the two was given
        description="Share of sentences: what blob_ratio leaves. Give one of the two.",
    )
    blob_max_tokens: int = Field(512, ge=1, description="Most tokens of a blob, as measured.")

    @model_validator(mode="after")
    def _one_ratio(self) -> BlobConfig:
        if self.sentence_ratio is None:
            return self
        if "blob_ratio" not in self.model_fields_set:
            self.blob_ratio = round(1 - self.sentence_ratio, 12)
        elif not math.isclose(self.sentence_ratio + self.blob_ratio, 1, abs_tol=1e-9):
            raise ValueError(
                f"sentence_ratio {self.sentence_ratio:g} and blob_ratio {self.blob_ratio:g} do not "
                "add up to 1: give one of them"
            )
        return self


class FinalGenerationConfig(Config):
    """The candidates of the selected sources."""

    num_candidates: int = Field(128, ge=1, description="Candidates a source.")
    store_top_k: int = Field(1, ge=1, description="Best candidates that are kept.")
    max_score: float | None = Field(
        None, ge=0, description="Candidates with a worse (higher) MetricX score are not kept."
    )
    strategy: Literal["auto", "per_call", "n_parameter"] = Field(
        "auto", description="n in one request, one call each, or the first with a fall-back."
    )
    store_candidates: bool = Field(False, description="Keep all candidates with their scores.")
    blob: BlobConfig = BlobConfig()


class MetricXConfig(Config):
    """The MetricX service."""

    url: Annotated[str | list[str], AfterValidator(_service)] = Field(
        "http://localhost:8001", description="Of the service or several."
    )
    checkpoint: str = Field(
        "google/metricx-24-hybrid-large-v2p6", description="Checked against the service."
    )
    batch_size: int = Field(64, ge=1, description="Samples a request.")
    device: Literal["cuda", "cpu"] | None = Field(
        None, description="Checked against the service; null: any."
    )
    cache_db: Path | None = Field(None, description="Client-side cache of scores (SQLite).")


class JudgeConfig(Config):
    """The judge service."""

    enabled: bool = Field(True, description="Ask the judge.")
    url: Annotated[str | list[str], AfterValidator(_service)] = Field(
        "http://localhost:8003", description="Of the judge service."
    )
    model: str | None = Field(
        None, description="Model that the judge asks; null: the service's own."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge.")
    max_tokens: int = Field(128, ge=1, description="Longest answer of the judge, in tokens.")
    fail_policy: Literal["conservative", "permissive"] = Field(
        "conservative", description="Where the judge fails: reject, or let pass by the rules."
    )
    doubt_task: str | None = Field(
        None,
        description="Rubric of the judge for a translation that a rule is not sure of; it has the "
        "variables of translation_filter, and `doubt`, what the rule saw. Null: "
        "translation_filter, which is not told of it.",
    )


class FiltersConfig(Config):
    """Filters that reject translations."""

    rule_based: bool = Field(True, description="Apply the rules.")
    rules: RuleConfig = RuleConfig()
    llm_judge: JudgeConfig = JudgeConfig()
    on_reject: Literal["drop", "next_best"] = Field(
        "drop", description="Drop the source, or try its next best candidate (store_top_k > 1)."
    )


class ExportConfig(Config):
    """The files that are written at the end."""

    formats: list[Literal["jsonl", "parquet"]] = Field(
        ["jsonl", "parquet"], min_length=1, description="Formats of the rows that are written."
    )
    preference_pairs: bool = Field(False, description="Also best against worst candidate.")
    rows_per_file: int = Field(
        100_000,
        ge=1,
        description="Up to so many rows are one train.jsonl and one train.parquet; "
        "more are numbered files of so many, train-00000-of-00012.jsonl.zst and .parquet.",
    )
    processes: int | None = Field(
        None, ge=1, description="That write files side by side; null: one a core."
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
