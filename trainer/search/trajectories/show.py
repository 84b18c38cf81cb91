"""Print an episode in a terminal: a panel for each turn, then answer, verdict and reward."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scorekit.report.render import visible
from trainer.search.records import ImageView, Question, Trajectory, Turn

#: Color of each action's panel.
_COLORS = {"search": "cyan", "crop": "magenta", "complete": "green", "invalid": "red"}
#: Max hits of a search that are listed.
_HITS = 5


def question_panel(question: Question) -> RenderableType:
    """Return a panel of the question, its reference answer and its gold pages."""
    lines = [Text(visible(question.question), style="bold")]
    if question.reference_answers:
        lines.append(Text(f"reference: {visible(question.reference_text)}", style="dim"))
    if question.gold:
        lines.append(Text(f"gold pages: {visible(', '.join(question.gold))}", style="dim"))
    return Panel(Group(*lines), title="question", title_align="left")


def turn_panel(turn: Turn, gold: tuple[str, ...] = ()) -> RenderableType:
    """Return a panel of a turn: the policy's text and the result of its action."""
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
        border_style=_COLORS[turn.action],
    )


def view_line(view: ImageView) -> str:
    """Return a line about an image: its page, its size and its region."""
    size = f"{view.width}x{view.height}"
    if view.kind == "page":
        return f"{visible(view.page_id)}, {size}"
    x1, y1, x2, y2 = (round(side) for side in view.region)
    return f"{visible(view.page_id)}, [{x1}, {y1}, {x2}, {y2}] of the page as {size}"


def end_panel(trajectory: Trajectory) -> RenderableType:
    """Return a panel of the end of an episode, with answer, verdict and reward."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    detail = f": {trajectory.end_detail}" if trajectory.end_detail else ""
    table.add_row("end", Text(visible(f"{trajectory.end}{detail}")))
    if (answer := trajectory.answer) is not None:
        answer_text = (
            answer.text if answer.text is not None else f"{answer.status}: {answer.error or ''}"
        )
        table.add_row("answer", Text(visible(answer_text), style="bold" if answer.text else "red"))
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
        reason = reward.error or ("the format gate" if reward.gated else parts)
        table.add_row(
            "reward", Text(visible(f"{value}  ({reason})" if reason else value), style="bold")
        )
    return Panel(table, title="end", title_align="left")


def _lines(text: str) -> Text:
    """Return a text with its line breaks, and other control characters made visible."""
    return Text("\n".join(visible(line) for line in text.strip().splitlines()))


def _hits(turn: Turn, gold: tuple[str, ...]) -> RenderableType:
    if not turn.hits:
        return Text("no hits", style="yellow")
    visible_pages = {view.page_id for view in turn.views}
    hits_text = Text()
    for hit in turn.hits[:_HITS]:
        style = "bold" if hit.page_id in visible_pages else "dim"
        if hit.page_id in gold:
            style = "bold green"
        hits_text.append(f"{hit.rank}. {visible(hit.page_id)}  ", style=style)
    if len(turn.hits) > _HITS:
        hits_text.append(f"and {len(turn.hits) - _HITS} more", style="dim")
    return hits_text
