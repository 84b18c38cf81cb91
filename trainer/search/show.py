"""An episode for eyes in a terminal: a panel a turn, then answer, judgement and reward."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scorekit.report.render import visible
from trainer.search.records import Question, Trajectory, Turn, View

#: Action -> colour of its panel.
_COLOURS = {"search": "cyan", "crop": "magenta", "complete": "green", "invalid": "red"}
#: Hits of a search that are named.
_HITS = 5


def question_panel(question: Question) -> RenderableType:
    """What is asked, and what would be right where that is known."""
    told = [Text(visible(question.question), style="bold")]
    if question.reference_answer:
        told.append(Text(f"reference: {visible(question.reference_answer)}", style="dim"))
    if question.gold:
        told.append(Text(f"gold pages: {visible(', '.join(question.gold))}", style="dim"))
    return Panel(Group(*told), title="question", title_align="left")


def turn_panel(turn: Turn, gold: tuple[str, ...] = ()) -> RenderableType:
    """What the policy wrote, and what it got for it."""
    lines: list[RenderableType] = [_lines(turn.text)]
    if turn.action == "invalid":
        lines.append(Text(f"{turn.reason}: {visible(turn.detail)}", style="red"))
    if turn.action == "search":
        lines.append(_hits(turn, gold))
    lines += [Text(f"shown: {view_line(view)}", style="bold") for view in turn.views]
    title = f"turn {turn.number} · {turn.action}" + (" (forced)" if turn.forced else "")
    seconds = f"policy {turn.policy_s:.2f} s, environment {turn.tool_s:.2f} s"
    return Panel(
        Group(*lines),
        title=title,
        title_align="left",
        subtitle=seconds,
        subtitle_align="right",
        border_style=_COLOURS[turn.action],
    )


def view_line(view: View) -> str:
    """A picture in words: of which page, how large, which part."""
    size = f"{view.width}x{view.height}"
    if view.kind == "page":
        return f"{visible(view.page_id)}, {size}"
    x1, y1, x2, y2 = (round(side) for side in view.region)
    return f"{visible(view.page_id)}, [{x1}, {y1}, {x2}, {y2}] of the page as {size}"


def end_panel(trajectory: Trajectory) -> RenderableType:
    """How the episode ended, and what it earned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    detail = f": {trajectory.end_detail}" if trajectory.end_detail else ""
    table.add_row("end", Text(visible(f"{trajectory.end}{detail}")))
    if (answer := trajectory.answer) is not None:
        said = answer.text if answer.text is not None else f"{answer.status}: {answer.error or ''}"
        table.add_row("answer", Text(visible(said), style="bold" if answer.text else "red"))
        table.add_row("from", Text(f"{answer.model}, {len(answer.evidence)} pictures"))
    for name, judged in (("judge", trajectory.judged), ("grounded", trajectory.grounded)):
        if judged is not None:
            score = judged.status if judged.score is None else f"{judged.score:.2f}"
            table.add_row(name, Text(visible(f"{score}  {judged.reason}".rstrip())))
    if trajectory.ndcg is not None:
        table.add_row("NDCG", f"{trajectory.ndcg:.3f}")
    if (reward := trajectory.reward) is not None:
        value = reward.status if reward.value is None else f"{reward.value:.3f}"
        parts = ", ".join(f"{name} {part:.3f}" for name, part in reward.parts.items())
        why = reward.error or ("the format gate" if reward.gated else parts)
        table.add_row("reward", Text(visible(f"{value}  ({why})" if why else value), style="bold"))
    return Panel(table, title="end", title_align="left")


def _lines(text: str) -> Text:
    """Line breaks stay; all else that is no character to see is made visible."""
    return Text("\n".join(visible(line) for line in text.strip().splitlines()))


def _hits(turn: Turn, gold: tuple[str, ...]) -> RenderableType:
    if not turn.hits:
        return Text("nothing found", style="yellow")
    shown = {view.page_id for view in turn.views}
    told = Text()
    for hit in turn.hits[:_HITS]:
        style = "bold green" if hit.page_id in gold else "bold" if hit.page_id in shown else "dim"
        told.append(f"{hit.rank}. {visible(hit.page_id)}  ", style=style)
    if len(turn.hits) > _HITS:
        told.append(f"and {len(turn.hits) - _HITS} more", style="dim")
    return told
