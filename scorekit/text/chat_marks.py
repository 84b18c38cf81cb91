"""Find marks of a chat: special tokens of chat templates, headings of instruction data, speakers.

If a message contains text in the form of a special token of the model, a server parses it as that
token. So untrusted text must pass `neutral` before it is put into a message.
"""

from __future__ import annotations

import re

#: Names in angle brackets that stay unchanged: HTML's, except `<s>`, which is also a special token.
_HTML = (
    "a|abbr|b|big|blockquote|body|br|button|caption|center|code|dd|del|details|div|dl|dt|em|font|"
    "footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|link|main|mark|"
    "meta|nav|ol|option|p|pre|q|samp|script|section|select|small|span|strike|strong|style|sub|"
    "summary|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul|var|video"
)
_BARS = "|｜¦│"
#: The first character of text in the form of a special token.
OPENS = re.compile(
    rf"[<\[](?=[{_BARS}])"  # <|im_end|>, <｜User｜>, [|endofturn|]
    r"|<(?=\[[^\[\]<>\n]{1,64}\]>)"  # <[end▁of▁sentence]>
    rf"|<(?=/?(?!(?i:{_HTML})>)[\w:.▁-]{{1,64}}>)"  # </s>, <seed:bos>, <end_of_turn>, <think>
    r"|<(?=</?\w{1,64}>>)"  # <<SYS>>
    r"|\[(?=/?[a-z]?[A-Z][A-Z0-9_]{1,63}\])"  # [/INST], [gMASK]
    r"|\](?=~!?\w{1,16}[\[\]])|\[(?=\w{1,16}~\[)"  # ]~b], [e~[
)
#: The last character of tokens that end in a bar. A character can be both: "|]~b[".
CLOSES = re.compile(rf"(?<=[{_BARS}])[>\]]")  # <|im_end|>, <turn|>


def neutral(text: str) -> str:
    """Return the text with a space inside everything that looks like a special token of a chat
    template, so that no tokenizer parses it as one.

    HTML tags, and nearly every text, stay unchanged."""
    return CLOSES.sub(r" \g<0>", OPENS.sub(r"\g<0> ", text))


def restore_marks(src: str, text: str) -> str:
    """Undo `neutral` in a text made from `neutral(src)`, such as its translation.

    Only special tokens that the source has are restored."""
    opened = {src[m.start() : m.start() + 3].split()[0] for m in OPENS.finditer(src)}
    closed = {src[m.start() - 1 : m.end()] for m in CLOSES.finditer(src)}
    if not opened | closed:
        return text
    for spaced in (_CLOSED, _OPENED, _OPENED):  # twice: "< < SYS>>" is restored from the inside
        text = spaced.sub(lambda m: m[1] if m[1] + m[2] in opened | closed else m[0], text)
    return text


#: The spaces that `neutral` inserts, with the characters around them.
_OPENED = re.compile(r"([<\[\]]) (?=(\S{1,2}))")
_CLOSED = re.compile(rf"([{_BARS}]) (?=([>\]]))")

_TOKEN = re.compile(
    r"<[|｜][^\s<>|｜]{1,40}[|｜]?>|<[^\s<>|｜]{1,40}[|｜]>|</?s>|<</?SYS>>"
    r"|\[/?(?:INST|(?-i:ASSISTANT|USER|SYSTEM(?:_PROMPT)?))\]|<(?:start|end)_of_turn>|<(?:bos|eos)>",
    re.I,
)
#: Headings of instruction data.
_HEADING = re.compile(
    r"#{2,4} ?(?:response|instruction|input|output|assistant|user|human|system|translation|answer"
    r"|question|응답|답변|지시|입력|출력|번역|回答|指令|输入|输出|翻译|応答|指示|入力|出力|翻訳|antwort"
    r"|anweisung|übersetzung)\b",
    re.I,
)
#: Names of speakers in a chat, and words of a source that may be translated as such a name.
_SPEAKERS = {
    "assistant": "assistant|어시스턴트|助手|アシスタント|assistent",
    "user": "user|사용자|用户|用戶|ユーザー?|benutzer",
    "system": "system|시스템|系统|系統|システム",
    "human": "human",
}
_SAID = {
    "assistant": r"assist|asist|어시스턴트|조수|도우미|비서|조교|보조|助"
    r"|アシスタント|ассист|помощ|helfer",
    "user": r"user|사용자|유저|이용자|用户|用戶|使用者|ユーザ"
    r"|nutzer|anwender|util[iy]sat|usuari|utent|usuári|польз"
    r"|uživatel|kullanıcı|pengguna|người dùng|ผู้ใช้|مستخدم|उपयोगकर्ता",
    "system": r"syst|시스템|체계|제도|계통|系|システム|制度|体制|сист|sist",
    "human": r"hum|인간|사람|인류|人|mensch|челов|umano",
}
_IN_SOURCE = {role: re.compile(words, re.I) for role, words in _SAID.items()}
_AT_LINE_START = {
    role: re.compile(rf"^[ \t*#]*+(?:{names})[ \t*]*+[:：]", re.I | re.M)
    for role, names in _SPEAKERS.items()
}
_IN_MID_LINE = {
    role: re.compile(
        rf"(?:(?<![a-z0-9_@#/-])(?=[a-z])|(?<![\w@#/-]))(?:{_SPEAKERS[role]})[ \t*]{{0,3}}[:：]"
        r"(?![/:])",
        re.I,
    )
    for role in ("assistant", "user")
}


def special_token(text: str) -> str | None:
    """Return the first special token of a chat template, in a form that is used for nothing else.

    It is for texts whose model is not known; `neutral` also knows forms that are only likely."""
    match = _TOKEN.search(text)
    return match and match.group()


def split_special_tokens(text: str) -> str:
    """Return the text with a space inside each token of `special_token`; tags stay as they are."""
    while _TOKEN.search(text):
        text = _TOKEN.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return text


def role_token(src: str, mt: str) -> str | None:
    """Return the first mark of a chat that the source does not have, or None.

    Marks are special tokens (<|im_start|>), headings ("### Response") and speakers ("assistant:").
    A speaker is allowed if the source has a word for it."""
    excused = {match.casefold() for match in _TOKEN.findall(src)}
    for token in _TOKEN.finditer(mt):
        if token.group().casefold() not in excused:
            return token.group()
    if "##" not in src and (heading := _HEADING.search(mt)):
        return heading.group()
    for spoken in (_AT_LINE_START, _IN_MID_LINE):
        for role, pattern in spoken.items():
            if (match := pattern.search(mt)) and not _IN_SOURCE[role].search(src):
                return match.group().strip()
    return None
