"""Check that the rules accept correct pairs in six directions and detect changed numbers."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.filters import PROSE, caught_numbers, prose, rejections
from bench.synth.chatter import HALVES, chatter
from bench.synth.numbers import KINDS, outcomes, spoil
from scorekit.text.rules import Pair
from synth.filters import RULES, RuleConfig, check_rules

#: Ten pairs for each two languages, with many numbers, dates, counters and names.
KO_EN = [
    (
        "지난해 이 섬을 찾은 관광객은 300만 명으로 2019년의 두 배였다.",
        "Last year 3 million tourists came to the island, twice as many as in 2019.",
    ),
    (
        "1월에 문을 연 가게에서 4명이 하루 12시간씩 일한다.",
        "Four people work twelve hours a day in the shop, which opened in January.",
    ),
    (
        "회사는 1억 2천만 원을 들여 창고 3곳을 새로 지었다.",
        "The company spent 120 million won on building three new warehouses.",
    ),
    (
        "오후 3시 반에 시작한 회의는 밤 11시가 되어서야 끝났다.",
        "The meeting that began at half past three in the afternoon was not over until 11 p.m.",
    ),
    (
        "90년대에 태어난 사람의 3분의 1은 집이 없다고 답했다.",
        "A third of those born in the 1990s said that they had no home of their own.",
    ),
    (
        "참석자의 절반이 넘는 62%가 제2안에 찬성했다.",
        "More than half of those present, 62 percent, were in favour of the second proposal.",
    ),
    (
        "스물다섯 살의 이나래 선수가 20년 만에 한국 기록을 0.3초 앞당겼다.",
        "Lee Na-rae, 25, broke a Korean record that had stood for two decades by 0.3 seconds.",
    ),
    (
        "밀가루 1.5kg과 달걀 열두 개로 빵 30개를 만들 수 있습니다.",
        "A kilo and a half of flour, 1.5 kg, and a dozen eggs will make thirty rolls.",
    ),
    (
        "19세기 말에 지은 이 다리는 길이가 1,234미터이고 기둥이 17개다.",
        "Built at the end of the nineteenth century, the bridge is 1,234 metres long and has "
        "seventeen piers.",
    ),
    (
        "법 제12조에 따라 벌금 500만 원 또는 징역 6개월에 처할 수 있다.",
        "Under Article 12 of the law, the penalty may be a fine of five million won or half a year "
        "in prison.",
    ),
]
EN_DE = [
    (
        "About 2.5 million people watched the final on 14 July 2018.",
        "Rund 2,5 Millionen Menschen sahen am 14. Juli 2018 das Finale.",
    ),
    (
        "The twenty-one members of the club meet at half past seven every Thursday.",
        "Die einundzwanzig Mitglieder des Vereins treffen sich jeden Donnerstag um halb acht.",
    ),
    (
        "Rents have gone up by 12.5 percent, to 1,250 euros, since the nineties.",
        "Die Mieten sind seit den Neunzigern um 12,5 Prozent auf 1.250 Euro gestiegen.",
    ),
    (
        "In the 1960s one in three families had five children or more.",
        "In den 60er-Jahren hatte jede dritte Familie fünf Kinder oder mehr.",
    ),
    (
        "Add half a litre of milk and 250 g of sugar, and bake it for 45 minutes.",
        "Geben Sie einen halben Liter Milch und 250 g Zucker dazu, und backen Sie es eine "
        "Dreiviertelstunde, also 45 Minuten.",
    ),
    (
        "The castle was built in the 13th century and burnt down in 1689.",
        "Die Burg wurde im dreizehnten Jahrhundert gebaut und brannte 1689 nieder.",
    ),
    (
        "He ran 10,000 metres in 27:54 minutes and came in second.",
        "Er lief die 10.000 Meter in 27:54 Minuten und wurde Zweiter.",
    ),
    (
        "Two thirds of the 600 seats were still empty at 8 p.m.",
        "Zwei Drittel der sechshundert Plätze waren um 20 Uhr noch leer.",
    ),
    (
        "The bank lost $3.4 billion in the third quarter, four times as much as a year ago.",
        "Die Bank verlor im dritten Quartal 3,4 Mrd. Dollar, viermal so viel wie vor einem Jahr.",
    ),
    (
        "Under section 7 the contract ends after 18 months, on March 31.",
        "Nach Paragraf 7 endet der Vertrag nach anderthalb Jahren am 31. März.",
    ),
]
ZH_EN = [
    (
        "去年有三百万人参观了这座建于1897年的博物馆。",
        "Last year three million people visited the museum, which was built in 1897.",
    ),
    (
        "一月十二日下午三点，四名学生在图书馆门口等了两个小时。",
        "At 3 p.m. on January 12, four students waited at the door of the library for two hours.",
    ),
    (
        "公司花了1.5亿元，在十九个城市开了二十六家店。",
        "The company spent 150 million yuan on opening twenty-six shops in nineteen cities.",
    ),
    (
        "百分之三十的受访者说，他们每天睡不到六个小时。",
        "Thirty percent of those asked said that they sleep for less than six hours a day.",
    ),
    (
        "上世纪九十年代，这里还有两千多户人家，现在只剩下一半。",
        "In the 1990s more than 2,000 families still lived here; only half of them are left.",
    ),
    (
        "把350克面粉和三个鸡蛋混合，烤25分钟左右。",
        "Mix 350 grams of flour with three eggs and bake it for about 25 minutes.",
    ),
    (
        "她以10秒97的成绩获得第二名，比纪录慢了0.12秒。",
        "She finished second in 10.97 seconds, 0.12 seconds short of the record.",
    ),
    (
        "三分之二的议员在2021年3月投了赞成票。",
        "Two thirds of the members voted in favour in March 2021.",
    ),
    (
        "根据第十五条，合同期满后三十天内应退还押金5,000元。",
        "Under Article 15, the deposit of 5,000 yuan shall be returned within 30 days of the end "
        "of the contract.",
    ),
    (
        "这条河全长6,300公里，流经十一个省，是世界第三长河。",
        "The river is 6,300 kilometres long, flows through eleven provinces, and is the third "
        "longest in the world.",
    ),
]
TEN = {("ko", "en"): KO_EN, ("en", "de"): EN_DE, ("zh", "en"): ZH_EN}
DIRECTIONS = [(pair, turned) for pair in TEN for turned in (False, True)]


@pytest.mark.parametrize(("languages", "turned"), DIRECTIONS)
def test_ten_true_pairs_of_prose_all_pass_every_rule(languages, turned):
    source, target = reversed(languages) if turned else languages
    for pair in TEN[languages]:
        src, mt = reversed(pair) if turned else pair
        assert check_rules(Pair(src, mt, source, target), RuleConfig()).failed == {}, (src, mt)


def _pairs(texts, turned):
    source, target = reversed(texts.languages) if turned else texts.languages
    return [Pair(*pair, source, target) for pair in texts.pairs(turned)]


#: Of the pairs that are spoilt, so few are enough to see a rule fail.
EVERY = [2, pytest.param(1, marks=pytest.mark.slow)]
SETS = [(texts, turned) for texts in PROSE for turned in (False, True)]


@pytest.mark.parametrize(("texts", "turned"), SETS)
def test_no_rule_keeps_out_more_than_one_true_pair_in_a_hundred(texts, turned):
    pairs = _pairs(texts, turned)
    failed = rejections(pairs)
    assert set(failed) <= set(RULES)
    assert all(count <= len(pairs) / 100 for count in failed.values()), failed


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("texts", "turned"), SETS)
@pytest.mark.parametrize("change", ["altered", "left out"])
def test_most_spoilt_numbers_are_caught(texts, turned, change, every):
    caught, num_pairs = caught_numbers(_pairs(texts, turned)[::every], change)
    assert num_pairs > 20 and caught / num_pairs > 0.7, (caught, num_pairs)


@pytest.mark.parametrize("num_pairs", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("half", HALVES)
def test_most_of_what_chat_models_add_is_caught(half, num_pairs):
    caught = defaultdict(list)
    for kind, pair in chatter(half, prose(), num_pairs=num_pairs):
        caught[kind].append(bool(check_rules(pair, RuleConfig()).failed))
    assert len(caught) == 8
    shares = {kind: sum(detections) / len(detections) for kind, detections in caught.items()}
    assert min(shares.values()) > (0.75 if half == "unseen" else 0.9), shares


#: Share of the damaged pairs that are rejected or passed to a judge.
SEEN = {
    "a digit changed": 0.9,
    "left out": 0.75,
    "two swapped": 0.4,
    "a mark or a zero shifted": 0.75,
}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("texts", "turned"), SETS)
def test_with_a_judge_few_true_pairs_are_rejected_and_most_spoilt_ones_are_seen(
    texts, turned, every
):
    pairs = _pairs(texts, turned)
    assert outcomes(pairs)["certain"] <= len(pairs) / 100
    for kind, share in SEEN.items():
        spoilt = spoil(pairs[::every], kind)
        assert len(spoilt) > 5 and kind in KINDS
        assert outcomes(spoilt)["passed"] <= (1 - share) * len(spoilt), kind
