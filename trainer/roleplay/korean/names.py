"""Where a name stands in a Korean text: as a whole word, with or without particles behind it."""

from __future__ import annotations

import re
from functools import lru_cache

from scorekit.text.markup import normalised

_SURNAMES = (
    "김이박최정강조윤장임한오서신권황안송류전홍유고문양손배백허남심노하곽성차주우구민진지엄채원천방공"
    "현함변염여추도소석선설마길연위표명기반왕금옥육인맹제모탁국어은편용"
)
#: What is put behind a name before its particle, with or without a space.
_TITLES = (
    "씨|님|군|양|선배님|선배|후배|형|누나|오빠|언니|선생님|선생|아가씨|도련님|대리|과장|팀장|사장|"
    "쌤|공주님|공주|왕자님|왕자|공"
)
#: Particles that give a name its part in a sentence; they may follow one another (에게서는, 만이).
#: The first 이 is the one of 민준이가.
_PARTICLES = (
    "이|가|은|는|을|를|의|도|만|과|와|랑|이랑|하고|에게|에게서|에게로|한테|한테서|한테로|께|께서|께옵서|"
    "에|에서|로|으로|로부터|으로부터|로서|으로서|로써|처럼|같이|만큼|보다|까지|부터|마저|조차|밖에|"
    "대로|마다|이?나(?![가-힣])|든지|더러|보고|커녕|는커녕|은커녕|라도|이라도|야말로|이야말로"
)
#: What else may stand behind a name: calls, the copula, and what makes another noun of it.
_OTHER_ENDINGS = (
    "란|이란|라고|이라고|라는|이라는|라면|이라면|라니|이라니|뿐|뿐이|아|야|여|이여|요|이요|예요|이에요|였|이었|"
    "다|이다|인|지|이지|들|네|쪽"
)
_CASE = re.compile(f"(?:{_PARTICLES}){{1,4}}요?")
_FULL_NAME = re.compile(f"[{_SURNAMES}][가-힣]{{2}}")
_BEHIND = re.compile(rf"(?:\s?(?:{_TITLES}))?(?P<rest>[가-힣]*)")


def aliases(name: str) -> tuple[str, ...]:
    """A name as narrations use it: whole, without its spaces, and the given name alone where it has
    three syllables and begins with a surname (서유나: 유나)."""
    whole = " ".join(normalised("NFC", name).split())
    joined = whole.replace(" ", "")
    found = [whole, joined]
    if _FULL_NAME.fullmatch(joined):
        found.append(joined[1:])
    return tuple(dict.fromkeys(one for one in found if one))


@lru_cache(maxsize=4096)
def _pattern(name: str) -> re.Pattern[str]:
    """A name as a word: not inside another (유나 in 유나히, 민 in 민들레), in any case of letters.
    Before it may stand a surname, where it has none."""
    some = "|".join(re.escape(one).replace(r"\ ", r"\s+") for one in aliases(name))
    surname = rf"(?:(?<![^\W_])[{_SURNAMES}])?" if re.fullmatch("[가-힣]{2}", name) else ""
    particles = f"(?:{_PARTICLES}|{_OTHER_ENDINGS}){{0,4}}"
    after = rf"(?P<title>\s?(?:{_TITLES}))?(?P<particle>{particles})(?![^\W_])"
    plain = rf"(?P<bare>{particles})(?![^\W_])"
    return re.compile(
        rf"(?<![^\W_]){surname}(?P<name>{some})(?=(?:{after})|(?:{plain}))", re.IGNORECASE
    )


def places(text: str, name: str | None, other: str | None = None) -> list[tuple[int, int]]:
    """Where a name stands in a text (`readable`). other: a name that has this one in it, as 한지수
    has 지수: where that stands this one does not."""
    if not name or not name.strip():
        return []
    found = [one.span("name") for one in _pattern(name).finditer(text)]
    if not other or not found or other == name:
        return found
    longer = [one.span("name") for one in _pattern(other).finditer(text)]
    return [
        (start, end)
        for start, end in found
        if not any(a <= start and end <= b and b - a > end - start for a, b in longer)
    ]


def has_particle_behind(text: str, end: int) -> bool:
    """Return whether a particle follows the name that ends there, or the title behind it. A call
    (민수야) and the copula (민수였다) are no particles."""
    match = _BEHIND.match(text, end)
    return match is not None and _CASE.fullmatch(match["rest"]) is not None
