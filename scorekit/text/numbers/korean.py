"""Numbers in Korean: digits with 만 and 억, Sino-Korean (삼백만), native with counters (네 명)."""

from __future__ import annotations

import re
from fractions import Fraction

from scorekit.text.numbers.read import Table, hints, listed, one_of, valued

_ONES = "일이삼사오육칠팔구"
_TENS_UP = "십백천"
_UNITS = f"{_TENS_UP}만억조"
_NATIVE = "하나|둘|셋|넷|다섯|여섯|일곱|여덟|아홉"
_SHORT = "한|두|세|네"  # before a counter
_TENS = "열|스물|서른|마흔|쉰|예순|일흔|여든|아흔"

_WORDS = listed("n", 1, "|".join(_ONES)) | listed("n", 1, _NATIVE) | listed("n", 1, _SHORT)
_WORDS |= valued("n", {0: "영|공", 3: "석|서", 4: "넉|너", 6: "륙", 20: "스무"})
for _ten, _name in enumerate(_TENS.split("|"), 1):
    _WORDS |= valued("n", {10 * _ten: _name})
    for _ones in (_NATIVE, _SHORT):
        _WORDS |= listed("n", 10 * _ten + 1, "|".join(_name + word for word in _ones.split("|")))
_WORDS |= valued("u", {10: "십", 100: "백", 1000: "천"})
_WORDS |= valued("b", {10**4: "만", 10**8: "억", 10**12: "조"})
_WORDS |= valued("f", {2: "반"}) | valued("r", {1: "분의"})

#: Counters after a number of one syllable: without one, the syllable may begin another word.
_COUNTER = one_of(
    listed(
        "n",
        0,
        """
    가지|개|건|곳|공기|군데|권|그루|그릇|그램|기|끼|나라|년|달|달러|대|도|동|등|리터|마디|마리|만|명|모|
    모금|문제|미터|박|반|발|방|방울|배|번|벌|병|봉지|분|사람|살|상자|선|세|센티|송이|숟갈|스푼|시|쌍|알|
    엔|원|위|유로|월|인|일|자루|자리|잔|장|점|접시|제곱|조|조각|주|줄|줌|집|짝|째|쪽|차|채|척|초|층|칸|
    켤레|큰술|킬로|토막|톤|통|팀|판|퍼센트|편|평|프로|학기|학년|할|항|해|호|회|획""",
    )
)
_HINTS = hints(
    {
        0: "없|무료|제로|전무",
        2: "둘째|이틀|양쪽|양측|양국|양손|양팔|양발|양사|양당|양일|양 팀|쌍|커플|부부|두어|더블|"
        "곱절|갑절|이진|이중|이듬해",
        3: "셋째|사흘|트리플|삼중|석달",
        4: "넷째|나흘|사계절|사방",
        5: "닷새",
        6: "엿새|유월",
        7: "이레|일주일|한 주|주간",
        8: "여드레|팔진",
        9: "아흐레",
        10: "열흘|시월|십대|십진|청소년|수십",
        11: "동짓달",
        12: "섣달|정오|자정|다스",
        14: "두 주|2주|보름",
        15: "보름",
        16: "십육진",
        24: "자정|종일|하루",
        60: "한 시간|환갑",
        100: "세기",
        Fraction(1, 2): "절반|반년|반나절|반으로|반을|반이|반은|반쯤|반 시간",
        Fraction(3, 2): "한 시간 반|한 달 반|하루 반",
    }
)
#: A scale without a number before it: "만 보" are ten thousand steps.
_ALONE = ("백", "천", "만", "억")
_HINTS |= hints({100: "백", 1000: "천", 10**4: "만", 10**8: "억"})
#: Not within a word, and not after digits: "20세기", "0이 아닌".
_BEGIN = r"(?<![가-힣\d])"
_LONG = one_of(word for word in _WORDS if len(word) > 1 and word != "분의")
_AFTER_DIGITS = rf"(?<=\d)여? ?(?:[{_TENS_UP}]?(?:[만억](?!큼)|조(?![각건]))|[{_TENS_UP}])[만억]?"
_SINO = (
    rf"제?(?:[{_ONES}]?[{_TENS_UP}][{_ONES}{_UNITS}]++|[{_ONES}][만억][{_ONES}{_UNITS}]++"
    rf"|[{_ONES}][{_TENS_UP}만억]|[{_ONES}{_UNITS}](?= ?(?:{_COUNTER})))"
)

TABLE = Table(
    mixed=True,
    decimal=".",
    words=_WORDS,
    word=re.compile(
        rf"{_AFTER_DIGITS}|(?<=[\d{_ONES}{_UNITS}])분의|(?:(?<=분의)|(?<=분의 ))[{_ONES}]"
        rf"|{_BEGIN}(?:{_LONG}|[둘셋넷쉰]|(?:{_SHORT}|[석서넉너열])(?=\s|{_COUNTER})|{_SINO})"
    ),
    gap=re.compile(r" ?|여 ?"),
    unsure=re.compile(
        rf"(?!제?(?:[{_ONES}]?[{_TENS_UP}]){{1,4}}[만억]"
        rf"|제?[{_ONES}][{_TENS_UP}](?=[{_ONES}{_UNITS}]| ?(?:{_COUNTER}))"
        rf"|(?:{_TENS})(?:{_NATIVE}|{_SHORT})|서른|마흔|예순|일흔|여든|아흔)"
    ),
    hints=_HINTS,
    hint=re.compile(
        rf"{one_of(_HINTS, but=_ALONE)}|{_BEGIN}[{''.join(_ALONE)}](?=여? |보(?!기)|걸음)"
    ),
    tenths=re.compile(r" ?할"),
    clock=re.compile(r" ?시(?!간)"),
    year=re.compile(r" ?년"),
    decade=re.compile(r" ?년 ?대|대"),
    century=re.compile(r" ?세기"),
    month=re.compile(r" ?월"),
    minutes=re.compile(r" ?[분초]"),
    months=re.compile(r" ?개월"),
    half=re.compile(r" ?[가-힣]{1,3} ?반(?=[^가-힣]|[의이을은에쯤]|동안|\Z)"),
    loose=re.compile(
        r" ?(?:일|시간|주|달|살|평|근|돈|되|리(?![가-힣])|마일|피트|인치|야드|에이커|파운드|온스|"
        r"갤런|도|°|(?:제곱|평방|킬로|센티|밀리)?미터|(?:킬로)?그램|리터|[kcm]?m\b|kg\b|㎏|㎞)"
    ),
    after_date=re.compile(
        r"절| ?(?:때|당시|이후|이전|직후|전후|부터|까지|에(?!서)|\([월화수목금토일]\)|"
        r"(?:[가-힣]{1,5} ?){0,2}?"
        r"(?:전쟁|사변|동란|혁명|운동|항쟁|사태|사건|의거|선언|합의|회담|총선|대선|선거|테러|참사|"
        r"지진|정변|학살|조치|대책|광복|독립|만세|기념|세대|축제|행사))"
    ),
)
