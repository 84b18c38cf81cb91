"""Write view.html: a page of a run's episodes in one file.

The page has no script and loads nothing: each image is in the style sheet once, and the filters are
radio buttons that the style sheet reads. Text from outside is escaped, and its control characters
are made visible.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.report.page import write_html
from scorekit.report.render import visible
from trainer.search.images.image_data import ImageError, read_image
from trainer.search.records import SUCCESS, Trajectory
from trainer.search.trajectories.layout import KINDS, ShownEpisode, lay_out, mean_stats
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

#: Default max episodes on a page. An image takes about 20 kB.
MAX_EPISODES = 200
_WIDEST = 480  # pixels of an image on the page
_QUALITY = 70

LoadImage = Callable[[str], bytes]


def write_view(
    run_dir: Path,
    *,
    steps: Sequence[int] | None = None,
    max_episodes: int = MAX_EPISODES,
) -> Path:
    """Write the page of a run and return its path: `view.html` in the run's folder.

    steps: None: all.
    max_episodes: on the page; if there are more, it has the first of each step and the number of
    the others.
    Raises UserError if there is no episode.
    """
    store = TrajectoryStore(run_dir / FOLDER)
    stored = store.steps()
    if steps is not None and (unknown := sorted(set(steps) - set(stored))):
        raise UserError(f"{store.folder}: has no step {unknown[0]}. It has {_listed(stored)}.")
    selected = stored if steps is None else sorted(set(steps))
    chosen, total = _choose(store, selected, max_episodes)
    if not chosen:
        raise UserError(f"{store.folder}: no episodes to show")
    title = f"{store.run}, {'step' if len(selected) == 1 else 'steps'} {_listed(selected)}"
    target = run_dir / "view.html"
    write_episodes(target, chosen, store.read_image, title=title, total=total)
    return target


def write_episodes(
    path: Path,
    episodes: Sequence[Trajectory],
    load_image: LoadImage,
    *,
    title: str,
    total: int | None = None,
) -> None:
    """Write a page of some episodes.

    load_image: SHA-256 -> PNG; raises UserError if there is none, and the page says so.
    total: number of all episodes.
    """
    laid_out = [lay_out(episode) for episode in episodes]
    classes = _classes(laid_out)
    sheet, missing = _style_sheet(classes, load_image)
    counts = Counter(kind for episode in laid_out for kind in episode.kinds)
    write_html(
        path,
        "trainer/search/trajectories/view.html",
        {"lines": _lines},
        title=title,
        pictures=Markup(sheet),
        classes=classes,
        missing=missing,
        episodes=laid_out,
        kinds=KINDS,
        counts=counts,
        right=SUCCESS,
        figures=mean_stats(episodes),
        total=len(laid_out) if total is None else total,
    )


def _choose(
    store: TrajectoryStore, steps: Sequence[int], max_episodes: int
) -> tuple[list[Trajectory], int]:
    """Return at most `max_episodes` episodes, equally many of each step, and their total."""
    max_per_step = -(-max_episodes // max(1, len(steps)))
    chosen: list[Trajectory] = []
    total = 0
    for step in steps:
        episodes = sorted(store.read([step]), key=lambda t: (t.group, t.sample))
        chosen += episodes[:max_per_step]
        total += len(episodes)
    return chosen[:max_episodes], total


def _classes(episodes: Iterable[ShownEpisode]) -> dict[str, str]:
    """Return the class in the style sheet of each image by SHA-256.

    An original has that of the image as shown, since the page scales both down.
    """
    names: dict[str, str] = {}
    for episode in episodes:
        sent = episode.trajectory.answer.evidence if episode.trajectory.answer else []
        for view in (image.view for turn in episode.turns for image in turn.images):
            name = names.setdefault(view.image, f"p{len(names)}")
            if view.original is not None and view.original in sent:
                names.setdefault(view.original, name)
        for sha256 in sent:
            names.setdefault(sha256, f"p{len(names)}")
    return names


def _style_sheet(classes: Mapping[str, str], load_image: LoadImage) -> tuple[str, set[str]]:
    """Return a rule for each image, and the hashes of missing images."""
    rules: dict[str, str] = {}
    missing = set()
    for sha256, name in classes.items():
        if name in rules:
            continue
        try:
            url = _small(load_image(sha256))
        except (UserError, ImageError, OSError):
            missing.add(sha256)
        else:
            rules[name] = f".{name} {{ background-image: url({url}); }}"
    return "\n".join(rules.values()), missing


def _small(png: bytes) -> str:
    """Return an image as a data URL, scaled to the page."""
    from PIL import Image

    image = read_image(png)
    image.thumbnail((_WIDEST, 4 * _WIDEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _lines(text: str) -> str:
    """Return a text with its line breaks, and other control characters made visible."""
    return "\n".join(map(visible, text.splitlines()))


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text: `0 to 7`, or `1, 3, 5`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
