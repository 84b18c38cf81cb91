"""Parts that all HTML reports share: base.html, the style, and charts as SVG.

matplotlib is loaded on use.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader
from markupsafe import Markup

from scorekit.files import write_atomic
from scorekit.report.render import visible

#: Name in a template -> filter.
Filters = Mapping[str, Callable[..., Any]]
#: The first rules of a report's style sheet.
STYLE = """\
  :root { color-scheme: light; }
  body { font: 15px/1.5 system-ui, "Noto Sans", "Noto Sans CJK KR", "Apple SD Gothic Neo",
         "Malgun Gothic", "Microsoft YaHei", sans-serif; color: #1c1c1e; max-width: 72rem;
         margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.6rem; margin-bottom: .2rem; }
  h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
  table { border-collapse: collapse; }
  th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top; }
  th { font-weight: 600; border-bottom: 1px solid #ccc; }
  td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
  .pictures { display: grid; gap: .6rem;
              grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
  .pictures svg { width: 100%; height: auto; overflow: visible; }
  .pair { border: 1px solid #e2e2e6; border-radius: .4rem; padding: .5rem .8rem; margin: .6rem 0; }
  .pair dt { color: #6b6b70; float: left; width: 4.2rem; clear: left; font-size: .85rem; }
  .pair dd { margin: 0 0 .1rem 4.6rem; overflow-wrap: anywhere; }"""


def render_html(template: str, filters: Filters | None = None, **values: Any) -> str:
    """Return a page of this template, with every text in it escaped.

    template: path from its top package ("synth/report/report.html"), as in its own `extends` and
    `import`. It always has the filter `visible` and the value `style`.
    """
    packages = {"scorekit", template.partition("/")[0]}
    environment = Environment(
        loader=PrefixLoader({package: PackageLoader(package, ".") for package in packages}),
        autoescape=True,
    )
    environment.filters |= {"visible": visible, **(filters or {})}
    return environment.get_template(template).render(style=Markup(STYLE), **values)


def write_html(path: Path, template: str, filters: Filters | None = None, **values: Any) -> Path:
    """Write a page as `render_html` returns it, and return its path."""
    write_atomic(path, render_html(template, filters, **values))
    return path


#: Settings of matplotlib for a chart.
_CHART: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
    "text.parse_math": False,
}
#: What matplotlib calls a series without a name.
_UNNAMED = re.compile(r"_(?:child|container)\d+|_nolegend_")
#: Characters of a title, or of a name in a legend.
_LONGEST = 60


def _short(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _name_series(axes: Any) -> None:
    """Let the legend have every name: matplotlib leaves out those that begin with `_`."""
    for artist in [*axes.lines, *axes.patches, *axes.collections, *axes.containers]:
        name = str(artist.get_label())
        if name and not _UNNAMED.fullmatch(name):
            artist.set_label((" " if name.startswith("_") else "") + _short(name))


def chart_image(title: str, label: str, fill: Callable[[Any], int]) -> Markup | None:
    """Return a chart as SVG, the same bytes for the same data, or None if there is nothing to draw.

    label: of the x axis.
    fill: draws on matplotlib axes, and returns the number of series.
    Names may be any text: `$` begins no formula, and a name that begins with `_` is in the legend,
    too. Texts stay texts in the SVG, so that the browser's fonts show each language.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_CHART), warnings.catch_warnings():
        # The font that measures texts here lacks some letters; it does not show them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas, axes = pyplot.subplots(figsize=(4.2, 2.6), layout="constrained")
        try:
            num_series = fill(axes)
            if not num_series:
                return None
            axes.set_title(_short(title), loc="left", fontsize=10)
            axes.set_xlabel(_short(label))
            axes.grid(alpha=0.25)
            if num_series > 1:
                _name_series(axes)
                axes.legend(fontsize=7, framealpha=0.8, edgecolor="none")
            text = io.StringIO()
            canvas.savefig(text, format="svg", metadata={"Date": None})
            return Markup(text.getvalue()[text.getvalue().index("<svg") :])
        finally:
            pyplot.close(canvas)
