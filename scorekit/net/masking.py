"""Mask secrets in texts, and make a server's words fit into one line."""

from __future__ import annotations

import base64
import binascii
import re

#: Stands in place of a secret.
MASK = "***"
#: Stands at the end of words that were cut.
_CUT = " [...]"
#: Characters of a server's words that are searched: an answer may have megabytes.
MAX_SEARCHED = 8192
#: User name and password in a URL, up to the last @ before the path.
_USERINFO = re.compile(r"(?<=://)[^\s/?#\"'<>]+(?=@)")
#: Shapes of other secrets that a server may repeat, beside the ones that we sent it: a header, a
#: named value, a parameter of a URL, and keys of providers.
_SHAPES = (
    (re.compile(r"\b(bearer|basic) {1,4}[\w.~+/=*-]{6,4096}", re.I), rf"\1 {MASK}"),
    (
        re.compile(
            r"((?<=[?&])(?:key|token|sig)"
            r"|\b(?:api|access|auth)[-_ ]?(?:key|token)|authorization|password|passwd|secret)"
            r"((?: provided)?[\"']? ?[:=] ?[\"']?)(?!(?:bearer|basic) )[^\s\"'&,;}]{4,4096}",
            re.I,
        ),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b(?:sk|pk|rk|gsk|hf|xai|nvapi|pplx|AIza|AKIA|eyJ)[\w*.-]{12,4096}"), MASK),
)
#: Shorter secrets are not searched for: they would mask parts of ordinary words.
_MIN_SECRET_CHARS = 4


def without_passwords(text: str) -> str:
    """Return the text with user names and passwords of its URLs masked."""
    return _USERINFO.sub(MASK, text) if "@" in text else text


def server_words(text: object, *, authorization: str | None = None, max_chars: int = 1000) -> str:
    """Return words of a server for a message: masked, in one line of at most max_chars.

    What does not print is escaped: control characters, marks that reorder or hide a text, lone
    surrogates. Words that went through this function stay as they are if they go through it again.

    text: any part of an answer.
    authorization: the header that was sent; a server may echo it, or the key in it.
    """
    words = str(text)[:MAX_SEARCHED]
    for secret in _secrets_of(authorization or ""):
        words = words.replace(secret, MASK)
    # Masks are shorter than secrets, so more is read than is shown.
    words = without_passwords(" ".join(words.split())[: 4 * max_chars])
    for shape, mask in _SHAPES:
        words = shape.sub(mask, words)
    if not words.isprintable():
        words = "".join(map(_printable, words))
    return words if len(words) <= max_chars else f"{words[: max_chars - len(_CUT)]}{_CUT}"


def _printable(character: str) -> str:
    code = ord(character)
    if character.isprintable():
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _secrets_of(authorization: str) -> list[str]:
    """Return the secrets of an Authorization header, the longest first."""
    scheme, _, token = authorization.partition(" ")
    secrets = [token]
    if scheme.lower() == "basic":
        try:
            userinfo = base64.b64decode(token, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            userinfo = ""
        secrets += [userinfo, userinfo.partition(":")[2]]
    return [secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS]
