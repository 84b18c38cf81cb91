"""Remove the marks that chat models put at the end of a turn, such as `<|im_end|>` and `</s>`.

`chat_marks.OPENS` finds all text in the form of a special token, `<name>` and `[TODO]` too. At the
end of a translation these are text. So the rule here knows words of end marks, not only a form.
A mark that it does not know stays; a caller may give its own list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: What ends: <|end_of_text|>, <|endofturn|>, <|END_RESPONSE|>.
_ENDS = (
    "text|turn|sentence|message|msg|utterance|response|chat|document|generation|assistant|user"
    "|dialog|dialogue|conversation|solution|sequence"
)
#: Names that are nothing else but end marks, in any brackets.
_CERTAIN = rf"end[_▁]?of[_▁]?(?:{_ENDS})(?:_token)?|eo[stmd](?:_id|_token)?|pad(?:_token)?"
#: Names that end a turn between bars alone: `<end>` and `<user>` are placeholders of texts.
_BARRED = (
    rf"{_CERTAIN}|end(?:_(?:{_ENDS}))?|(?:im|role|turn|{_ENDS})_end"
    "|user|observation|return|call|stop"
    r"|hy_place▁holder▁no▁\d"
)
_MARK = re.compile(
    rf"(?:<[|｜](?:{_BARRED})[|｜]>|\[\|(?:{_CERTAIN})\|\]|<turn\|>"
    rf"|<(?:(?:seed:)?(?:{_CERTAIN})|eo[ap]|/s)>|<\[(?:{_CERTAIN})\]>"
    # Reserved tokens of the vocabularies of Baichuan, Nemotron and InternLM.
    r"|<reserved_10[67]>|<extra_id_1>|<special_1[12]>|\[unused_token_14[56]\]"
    r"|(?-i:\[(?:EO[STMD]|PAD)\])|\[e~\[)\Z",
    re.IGNORECASE,
)
#: No mark is longer.
_LONGEST = 48


def without_end_marks(text: str, end_marks: Sequence[str] | None = None) -> str:
    """Return the text without the marks at its end and the white space around them.

    end_marks: the marks, letter by letter; None: those of common models. Then a `</s>` stays that
    closes a `<s>` of the text, which is HTML for a text struck through."""
    num_html = text.count("<s>")
    num_closed = text.count("</s>")
    end = len(text)
    while True:
        bare = _end_of_text(text, end)
        if end_marks is None:
            match = _MARK.search(text[max(0, bare - _LONGEST) : bare])
            mark = match.group() if match else ""
            if mark == "</s>":
                mark = mark if num_closed > num_html else ""
                num_closed -= 1
        else:
            mark = next((m for m in end_marks if m and text.endswith(m, 0, bare)), "")
        if not mark:
            return text[:end]
        end = bare - len(mark)


def _end_of_text(text: str, end: int) -> int:
    """Return where the white space before `end` begins."""
    while end and text[end - 1].isspace():
        end -= 1
    return end
