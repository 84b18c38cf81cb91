"""The sets that every policy is measured on, and the services of each.

Their questions are about documents outside all trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from demo.search.answer_keys import FINAL_KEYS, KEYS
from demo.search.generator import NAME as GENERATOR
from demo.search.generator import create_app
from demo.search.make_corpus import FINAL_TEST, HELDOUT, TRAIN
from demo.search.reading import CORPUS, FINAL_CORPUS
from services.retriever.index.store import Index
from testing.processes import running_service, serving


class MeasuredSet(NamedTuple):
    """A set to measure on.

    corpora: all that its index has.
    ending: of the names of its files.
    """

    title: str
    questions: Path
    corpora: tuple[Path, ...]
    keys: tuple[Path, ...]
    ending: str = ""


#: Whose index is trained on, too: it holds all of the demo's decks but the final test's.
HELD_OUT = "held_out"
#: The one that counts first.
SETS = {
    "final_test": MeasuredSet(
        "final_test", FINAL_TEST, (CORPUS, FINAL_CORPUS), (KEYS, FINAL_KEYS), "_final"
    ),
    HELD_OUT: MeasuredSet("held_out, the development set", HELDOUT, (CORPUS,), (KEYS,)),
}


@contextmanager
def shared_services(folder: Path, sets: Sequence[str]) -> Iterator[dict[str, dict[str, str]]]:
    """Start the services that all runs share, and yield their URLs by set.

    They are each set's index, the judge by rules, and both generators.
    """
    with ExitStack() as running:
        judge = running.enter_context(running_service("judge", folder))
        yield {
            set_name: {"judge": judge, **services_of_set(folder, SETS[set_name], running)}
            for set_name in sets
        }


def services_of_set(folder: Path, measured_set: MeasuredSet, running: ExitStack) -> dict[str, str]:
    """Start the index of a set and both generators, and return their URLs.

    folder: of the index, which is built if it is not there.
    running: ends them.
    """
    from demo.search.answering import Answerer
    from demo.search.loop.knowing import NAME as KNOWING
    from demo.search.loop.knowing import KnowingAnswerer
    from demo.search.run import ingest

    index = folder / f"index{measured_set.ending}"
    # The pages of an ingest that was interrupted are there, but no index.
    if Index(index).manifest() is None:
        ingest(index, *measured_set.corpora)
    logs = folder / f"services{measured_set.ending}" if measured_set.ending else folder
    logs.mkdir(exist_ok=True)
    reading = create_app(answerer=Answerer(measured_set.corpora, measured_set.keys))
    knows = KnowingAnswerer(
        (TRAIN, measured_set.questions), measured_set.corpora, measured_set.keys
    )
    knowing = create_app(name=KNOWING, answerer=knows)
    started = running.enter_context
    return {
        "retriever": started(running_service("retriever", logs, "--index", str(index))),
        GENERATOR: started(serving(reading)),
        KNOWING: started(serving(knowing)),
    }


def service_settings(urls: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that name the services of a set."""
    return {
        "retriever.url": urls["retriever"],
        "answering.judge.url": urls["judge"],
        "answering.generator.base_url": f"{urls[GENERATOR]}/v1",
        "answering.generator.model": GENERATOR,
    }
