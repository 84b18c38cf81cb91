"""The command `scorekit meta-eval`."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scorekit.command import clean_exit, print_line
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.schemas import Overlong

if TYPE_CHECKING:
    from scorekit.metaeval.evaluate import MetaEvaluation
    from scorekit.metaeval.judgements import JudgedTranslation, Judgements

_In = Annotated[
    Path,
    typer.Argument(
        metavar="JUDGEMENTS",
        help="JSON lines with spans or scores, or WMT's MQM as .tsv; also .gz.",
    ),
]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the scores and the report.")]
_Metric = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=WHERE",
        help="A service's URL, a judge's URL#task, or a file of scores; repeat it.",
    ),
]
_Lower = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Metric of a file whose 0 is best.")
]
_HumanLower = Annotated[
    bool, typer.Option("--human-lower-is-better", help="Of `score` in the judgements.")
]
_Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="SYSTEM", help="Leave a system out (human references); repeat it."),
]
_RefSystem = Annotated[
    str | None, typer.Option(metavar="SYSTEM", help="Its translations are the references.")
]
_Segments = Annotated[int | None, typer.Option(min=2, help="Only so many segments, by the seed.")]
_Draws = Annotated[int, typer.Option(min=20, max=10_000, help="Resamples of the bootstrap.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of resamples and of --segments.")]
_Overlong = Annotated[
    Overlong | None,
    typer.Option(help="Texts over a service's limit: cut and told, failed, or in windows."),
]
_CacheDb = Annotated[Path | None, typer.Option(help="File of a cache of scores on this side.")]


def meta_eval(
    judgements: _In,
    out: _Out,
    metric: _Metric,
    lower_is_better: _Lower = None,
    human_lower: _HumanLower = False,
    exclude: _Exclude = None,
    ref_system: _RefSystem = None,
    segments: _Segments = None,
    draws: _Draws = 500,
    seed: _Seed = 0,
    overlong: _Overlong = None,
    cache_db: _CacheDb = None,
) -> None:
    """Tell how well metrics agree with people on translations that people have judged.

    Writes report.html, figures.json and, for each service, its scores into OUT. Started again
    after an interruption, it goes on where it stopped. A service's key is read from
    SCOREKIT_API_KEY.
    """
    with clean_exit("the same command", stdout="log"):
        _check_extra()
        from scorekit.client.files.metrics import parse_metric
        from scorekit.metaeval.evaluate import check_people, evaluate
        from scorekit.metaeval.judgements import read_judgements
        from scorekit.metaeval.metrics import file_scores, service_scores
        from scorekit.metaeval.page import print_tables, write_page

        sources = [parse_metric(text) for text in metric]
        _check_names([source.name for source in sources], lower_is_better or [])
        service_names = [source.name for source in sources if source.is_service]
        if wrong := [name for name in lower_is_better or () if name in service_names]:
            raise UserError(f"--lower-is-better {wrong[0]}: its service says itself what is better")
        judged = read_judgements(judgements, lower_is_better=human_lower)
        translations = _choose(judged, exclude or [], ref_system, segments, seed)
        check_people(translations)  # before any service is used
        out.mkdir(parents=True, exist_ok=True)
        files = [
            file_scores(source, translations, source.name not in (lower_is_better or ()))
            for source in sources
            if not source.is_service
        ]
        services = [source for source in sources if source.is_service]
        service_results = service_scores(
            services, translations, out, print_line, overlong, cache_db=cache_db
        )
        scores_by_name = {scores.name: scores for scores in (*files, *service_results)}
        scores = [scores_by_name[source.name] for source in sources]
        result = evaluate(translations, scores, draws=draws, seed=seed)
        result.notes[:0] = judged.notes
        _write_stats(out / "figures.json", result, judgements)
        write_page(out / "report.html", result, translations, scores, judgements.name)
        print_tables(result)
        typer.echo(f"{out / 'report.html'}\n{out / 'figures.json'}")


def _check_extra() -> None:
    for name in ("numpy", "matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise UserError(
                f"meta-eval needs {name}: `pip install -e '.[meta-eval]'` in the checkout"
            )


def _check_names(names: list[str], lower: list[str]) -> None:
    from scorekit.metaeval.evaluate import CONSTANT, EVERYTHING, LENGTH

    for name in names:
        if names.count(name) > 1 or name in (CONSTANT, LENGTH, EVERYTHING):
            raise UserError(f"--metric {name}: that name is taken: name it otherwise")
    for name in lower:
        if name not in names:
            raise UserError(f"--lower-is-better {name}: no --metric has that name")


def _choose(
    judged: Judgements, exclude: list[str], ref_system: str | None, segments: int | None, seed: int
) -> list[JudgedTranslation]:
    systems = judged.systems
    for option, names in (
        ("--exclude", exclude),
        ("--ref-system", [ref_system] if ref_system else []),
    ):
        for name in names:
            if name not in systems:
                raise UserError(f"{option} {name}: the systems are {', '.join(systems)}")
    refs = {
        translation.segment: translation.mt
        for translation in judged.translations
        if translation.system == ref_system
    }
    selected = [
        translation
        for translation in judged.translations
        if translation.system not in exclude and translation.system != ref_system
    ]
    if not selected:
        raise UserError("no system is left: name fewer by --exclude")
    for translation in selected:
        translation.ref = refs.get(translation.segment) if ref_system else translation.ref
    names = list(dict.fromkeys(translation.segment for translation in selected))
    if segments is not None and segments < len(names):
        sampled = set(random.Random(seed).sample(names, segments))
        selected = [translation for translation in selected if translation.segment in sampled]
    return selected


def _write_stats(path: Path, result: MetaEvaluation, judgements: Path) -> None:
    content = {"judgements": judgements.name} | asdict(result)
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
