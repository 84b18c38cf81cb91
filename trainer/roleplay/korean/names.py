"""Find names in a Korean text as full words, with or without particles after them."""

from __future__ import annotations

import re
from functools import lru_cache

from scorekit.text.markup import normalized

_SURNAMES = (
    "김이박최정강조윤장임한오서신권황안송류전홍유고문양손배백허남심노하곽성차주우구민진지엄채원천방공"
    "현함변염여추도소석선설마길연위표명기반왕금옥육인맹제모탁국어은편용"
)
#: Titles after a name and before its particle, with or without a space.
_TITLES = (
    "씨|님|군|양|선배님|선배|후배|형|누나|오빠|언니|선생님|선생|아가씨|도련님|대리|과장|팀장|사장|"
    "쌤|공주님|공주|왕자님|왕자|공"
)
#: Particles that define the role of a name in a sentence; several may follow one another (에게서는,
#: 만이). The first 이 is the one of 민준이가.
_PARTICLES = (
    "이|가|은|는|을|를|의|도|만|과|와|랑|이랑|하고|에게|에게서|에게로|한테|한테서|한테로|께|께서|께옵서|"
    "에|에서|로|으로|로부터|으로부터|로서|으로서|로써|처럼|같이|만큼|보다|까지|부터|마저|조차|밖에|"
    "대로|마다|이?나(?![가-힣])|든지|더러|보고|커녕|는커녕|은커녕|라도|이라도|야말로|이야말로"
)
#: Other endings after a name: calls, the copula, and endings that make another noun of it.
_OTHER_ENDINGS = (
    "란|이란|라고|이라고|라는|이라는|라면|이라면|라니|이라니|뿐|뿐이|아|야|여|이여|요|이요|예요|이에요|였|이었|"
    "다|이다|인|지|이지|들|네|쪽"
)
_CASE = re.compile(f"(?:{_PARTICLES}){{1,4}}요?")
_FULL_NAME = re.compile(f"[{_SURNAMES}][가-힣]{{2}}")
_BEHIND = re.compile(rf"(?:\s?(?:{_TITLES}))?(?P<rest>[가-힣]*)")


def aliases(name: str) -> tuple[str, ...]:
    """Return the forms of a name in narrations.

    They are the full name, the name without spaces, and the given name alone if the name has three
    syllables and begins with a surname (서유나: 유나).
    """
    full_name = " ".join(normalized("NFC", name).split())
    joined = full_name.replace(" ", "")
    names = [full_name, joined]
    if _FULL_NAME.fullmatch(joined):
        names.append(joined[1:])
    return tuple(dict.fromkeys(alias for alias in names if alias))


@lru_cache(maxsize=4096)
def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern of a name as a word, in any case of letters.

    It does not match inside another word (유나 in 유나히, 민 in 민들레). A surname may come before
    a name without one.
    """
    alternatives = "|".join(re.escape(alias).replace(r"\ ", r"\s+") for alias in aliases(name))
    surname = rf"(?:(?<![^\W_])[{_SURNAMES}])?" if re.fullmatch("[가-힣]{2}", name) else ""
    particles = f"(?:{_PARTICLES}|{_OTHER_ENDINGS}){{0,4}}"
    after = rf"(?:\s?(?:{_TITLES}))?{particles}(?![^\W_])"
    return re.compile(rf"(?<![^\W_]){surname}(?P<name>{alternatives})(?={after})", re.IGNORECASE)


def find_name(text: str, name: str | None, other: str | None = None) -> list[tuple[int, int]]:
    """Return the ranges of a name in a text (`readable`).

    other: a name that contains this one, as 한지수 contains 지수: its ranges are left out.
    """
    if not name or not name.strip():
        return []
    ranges = [match.span("name") for match in _pattern(name).finditer(text)]
    if not other or not ranges or other == name:
        return ranges
    longer = [match.span("name") for match in _pattern(other).finditer(text)]
    return [
        (start, end)
        for start, end in ranges
        if not any(a <= start and end <= b and b - a > end - start for a, b in longer)
    ]


def has_particle_behind(text: str, end: int) -> bool:
    """Return whether a particle follows the name that ends there, or its title.

    A call (민수야) and the copula (민수였다) are no particles.
    """
    match = _BEHIND.match(text, end)
    return match is not None and _CASE.fullmatch(match["rest"]) is not None
