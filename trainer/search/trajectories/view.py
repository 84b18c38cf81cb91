"""view.html: the episodes of a run to look at, in one file.

No script, and nothing fetched from elsewhere: pictures stand in the style sheet, each once however
many episodes show it, and the filters are radio buttons that the style sheet reads. Every text of
foreign origin is escaped and its control characters made visible.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.page import STYLE
from scorekit.report.render import visible
from trainer.search.records import SUCCESS, Trajectory
from trainer.search.trajectories.shown import KINDS, ShownEpisode, figures, lay_out
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

#: Episodes on a page where the user does not say; a picture is some 20 kB of it.
MOST = 200
_WIDEST = 480  # pixels of a picture on the page
_QUALITY = 70

Pictures = Callable[[str], bytes]


def write_view(
    run_dir: Path,
    path: Path | None = None,
    *,
    steps: Sequence[int] | None = None,
    most: int = MOST,
) -> Path:
    """Write the page of a run and return its path: `view.html` in the run's folder.

    steps: of these; None: of all. most: episodes on the page; of more, the first of each step are
    shown, and the page says how many are not. Raises UserError where there are none.
    """
    store = TrajectoryStore(run_dir / FOLDER)
    there = store.steps()
    if steps is not None and (unknown := sorted(set(steps) - set(there))):
        raise UserError(f"{store.folder}: has no step {unknown[0]}; it has {_listed(there)}")
    wanted = there if steps is None else sorted(set(steps))
    chosen, total = _chosen(store, wanted, most)
    if not chosen:
        raise UserError(f"{store.folder}: no episodes to show")
    title = f"{store.run}, {'step' if len(wanted) == 1 else 'steps'} {_listed(wanted)}"
    target = path or run_dir / "view.html"
    write_episodes(target, chosen, store.picture, title=title, total=total)
    return target


def write_episodes(
    path: Path,
    episodes: Sequence[Trajectory],
    picture: Pictures,
    *,
    title: str,
    total: int | None = None,
) -> None:
    """Write a page of some episodes.

    picture: SHA-256 -> PNG; raises UserError where there is none, and the page says so. total: of
    how many these are some.
    """
    shown = [lay_out(episode) for episode in episodes]
    classes = _classes(shown)
    sheet, missing = _style_sheet(classes, picture)
    environment = Environment(
        loader=PackageLoader("trainer.search.trajectories", "."),
        autoescape=select_autoescape(["html"]),
    )
    environment.filters |= {"visible": visible, "lines": _lines}
    counts = Counter(kind for episode in shown for kind in episode.kinds)
    page = environment.get_template("view.html").render(
        title=title,
        style=Markup(STYLE),
        pictures=Markup(sheet),
        classes=classes,
        missing=missing,
        episodes=shown,
        kinds=KINDS,
        counts=counts,
        right=SUCCESS,
        figures=figures(episodes),
        total=len(shown) if total is None else total,
    )
    write_atomic(path, page)


def _chosen(
    store: TrajectoryStore, steps: Sequence[int], most: int
) -> tuple[list[Trajectory], int]:
    """At most `most` episodes, as many of each step as of another; and how many there are."""
    each = -(-most // max(1, len(steps)))
    chosen: list[Trajectory] = []
    total = 0
    for step in steps:
        found = sorted(store.read([step]), key=lambda t: (t.group, t.sample))
        chosen += found[:each]
        total += len(found)
    return chosen[:most], total


def _classes(episodes: Iterable[ShownEpisode]) -> dict[str, str]:
    """SHA-256 of each picture that is shown -> its class in the style sheet."""
    names: dict[str, str] = {}
    for episode in episodes:
        sent = episode.trajectory.answer.evidence if episode.trajectory.answer else []
        views = [p.view.image for shown in episode.turns for p in shown.pictures]
        for sha256 in (*views, *sent):
            names.setdefault(sha256, f"p{len(names)}")
    return names


def _style_sheet(classes: Mapping[str, str], picture: Pictures) -> tuple[str, set[str]]:
    """A rule for each picture, and the hashes of those that cannot be had."""
    rules, missing = [], set()
    for sha256, name in classes.items():
        try:
            url = _small(picture(sha256))
        except (UserError, OSError):
            missing.add(sha256)
        else:
            rules.append(f".{name} {{ background-image: url({url}); }}")
    return "\n".join(rules), missing


def _small(png: bytes) -> str:
    """A picture as a data URL, no wider than the page shows it."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((_WIDEST, 4 * _WIDEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _lines(text: str) -> str:
    """A text of several lines with its control characters made visible."""
    return "\n".join(map(visible, text.splitlines()))


def _listed(numbers: Sequence[int]) -> str:
    """`0 to 7`, or `1, 3, 5`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
