"""Compare the emoji of a source and its translation."""

from __future__ import annotations

import re

from scorekit.text.findings import Certainty, TextFinding

#: An emoji, without variation selectors, skin tones and what is joined to it. Signs that texts have
#: as bullets, arrows or marks (✔, ★, ☎, ©) are none; ❤, ☀ and a few others are.
_EMOJI = re.compile(
    "[\U0001f1e6-\U0001f1ff]{2}|[\U0001f300-\U0001f3fa\U0001f400-\U0001faff]"
    "|[\u2600-\u2604\u2614\u2615\u2639\u263a\u2614\u26a1\u26bd\u26be\u26c4\u26c5\u2705\u2728"
    "\u274c\u2753\u2757\u2763\u2764\u2b50]"
)
#: What may stand for a face in a chat: letters that laugh and cry, faces of signs.
_FACE = re.compile(
    r"[ㅋㅎㅠㅜ]|\^_?\^|[:;=]['’]?-?[()DPp3]|T_T|<3|♥|♡|\b(?:lol|lmao|ha(?:ha)+|he(?:he)+|xd)\b"
    r"|哈哈|呵呵|嘻嘻|呜呜|[wｗ]{2,}|（?笑",
    re.I,
)
_FACES = re.compile(
    "[\U0001f600-\U0001f64f\U0001f910-\U0001f92f\U0001f970-\U0001f97a\u2639\u263a\u2764]"
)


def lost_emoji(src: str, mt: str) -> TextFinding | None:
    """Return the emoji of the source that the translation does not have, or None.

    Others in their place are a likely mistake (❤ became 💔). Fewer of the same are none, and a face
    may become laughter in letters. Missing ones may be said in words, so they are only possible
    mistakes.
    """
    if src.isascii():
        return None
    src_emoji = dict.fromkeys(_EMOJI.findall(src))
    if not src_emoji:
        return None
    mt_emoji = dict.fromkeys(_EMOJI.findall(mt))
    missing = [emoji for emoji in src_emoji if emoji not in mt_emoji]
    added = [emoji for emoji in mt_emoji if emoji not in src_emoji]
    if _FACE.search(mt):
        missing = [emoji for emoji in missing if not _FACES.match(emoji)]
    if not missing:
        return None
    if added:
        return TextFinding(f"{''.join(missing)} became {''.join(added)}", Certainty.LIKELY)
    return TextFinding("".join(missing), Certainty.POSSIBLE)
