"""Check what a translation says otherwise: units, money, times, dates, bounds and shares."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.synth.quantities import KINDS, LANGUAGES, quantity_pairs
from scorekit.text.numbers import compare_numbers
from scorekit.text.rules import Pair
from synth.filters import RuleConfig, check_rules
from synth.reasons import RuleCode

_OFF = [code for code in RuleCode if code != RuleCode.NUMBERS_MISSING]
DIRECTIONS = [*permutations(LANGUAGES, 2)]


def outcome(source, src, target, mt):
    """Return what the rule makes of a pair: certain, rejected without a judge, doubtful or fine."""
    pair = Pair(src, mt, source, target)
    if check_rules(pair, RuleConfig(off=_OFF), has_judge=True).failed:
        return "certain"
    if check_rules(pair, RuleConfig(off=_OFF)).failed:
        return "likely"
    return "doubtful" if check_rules(pair, RuleConfig(off=_OFF)).doubtful else "fine"


def parsed(rows):
    """Return (source, src, target, mt) of rows "en ko | src | mt"."""
    for row in rows.strip().splitlines():
        languages, src, mt = (part.strip() for part in row.split("|"))
        source, target = languages.split()
        yield source, src, target, mt


#: Sure errors: a person would find no situation in which they are right.
CERTAIN = """
en ko | Open until midnight. | 정오까지 엽니다.
zh ko | 这条鱼有四斤重。 | 이 생선은 무게가 4kg이다.
en ko | The lake is 5 miles away. | 호수는 5km 떨어져 있다.
en ko | The recommended dose is 5 mg. | 권장 용량은 5g입니다.
ko en | 여기서 800미터쯤 돼요. | It's about 800 kilometers from here.
en ko | Shipping is $7.99. | 배송비는 7.99유로입니다.
en de | It costs 20 dollars. | Es kostet 20 Euro.
zh ko | 要价50美元。 | 가격은 50엔이다.
de en | Der Kredit beläuft sich auf 2.350 Euro. | The loan amounts to 2.35 euros.
en de | It costs $1,500. | Es kostet 1,5 Dollar.
en ko | The museum closes at 2:30 p.m. | 박물관은 오전 2시 30분에 닫는다.
de en | Wir treffen uns um 14:30 Uhr. | We meet at 2:30 a.m.
ko zh | 오후 3시에 만나요. | 上午三点见。
de en | Das Konzert ist am 03.04.2025. | The concert is on March 4, 2025.
ko en | 2026.05.06. 휴무 | Closed June 5, 2026
zh ko | 快递10月12号前会到。 | 택배는 12월 10일 전에 도착할 거예요.
"""
#: A doubt that rejects without a judge.
LIKELY = """
en ko | He is 6 feet tall. | 그는 키가 163cm이다.
en ko | Bake at 350°F. | 120도에서 구우세요.
en ko | The package weighs 10 pounds. | 소포 무게는 10kg입니다.
de en | Die Frist beträgt drei Monate. | The period is three weeks.
en ko | It rose 5 percentage points. | 5퍼센트 올랐다.
de en | Wir treffen uns um halb acht. | We're meeting at eight thirty.
de en | Wir treffen uns um halb acht. | We're meeting at 8:30.
zh ko | 会议改到3点一刻了。 | 회의가 3시 45분으로 바뀌었어요.
en ko | The call is at 4 p.m. | 통화는 14시입니다.
de en | Am 1. Mai bleibt es geschlossen. | It will be closed on March 1.
de en | Kinder erhalten 5 ml dreimal täglich. | Children take 5 ml twice daily.
"""
DOUBTFUL = """
de en | Der Berg ist 2.962 Meter hoch. | The mountain is 2.962 meters high.
en de | About 1,500 people came. | Es kamen etwa 1,500 Menschen.
en ko | The exam is on Tuesday. | 시험은 목요일입니다.
en ko | Orders of more than 10 items ship free. | 10개 미만 주문은 무료로 배송됩니다.
ko en | 3년 이상 경력자를 우대합니다. | Preference for less than three years of experience.
de en | Das Gerät darf höchstens 2 Stunden laufen. | The device must run for at least 2 hours.
zh ko | 水温至少要到25度。 | 수온이 25도 이하여야 한다.
en de | Keep the file under 5 MB. | Die Datei muss größer als 5 MB sein.
zh ko | 不得超过30人。 | 30명 이상이어야 한다.
en ko | You must be at least 19. | 19세 이하만 됩니다.
zh ko | 我女儿比你儿子大两岁。 | 제 딸은 당신 아들보다 두 살 어려요.
en ko | Take two capsules. | 한 캡슐 드세요.
en ko | One in five adults smokes. | 성인 다섯 명 중 네 명이 담배를 피운다.
"""
#: Right translations. Each is tried the other way round, too.
RIGHT = """
en ko | It was 68°F this morning. | 오늘 아침 기온은 20도였다.
en ko | Preheat the oven to 350°F. | 오븐을 약 180℃로 예열하세요.
en ko | Bake at 425°F for 20 minutes. | 220도에서 20분간 구우세요.
en ko | It was -4°F outside. | 바깥은 영하 20도였다.
en ko | Temperatures rose by 9°F. | 기온이 5도 올랐다.
en ko | It was 90 degrees today. | 오늘은 32도였다.
en ko | The lake is about 5 miles away. | 호수는 8km 정도 떨어져 있다.
zh en | 村子离县城有二十华里。 | The village is ten kilometers from the county town.
zh ko | 妈妈买了三斤苹果。 | 엄마가 사과 1.5kg을 사 오셨다.
ko en | 고기 한 근 주세요. | 600 grams of meat, please.
zh ko | 这块地有六亩。 | 이 땅은 약 4,000㎡이다.
zh ko | 他身高一米七八。 | 그는 키가 178cm이다.
zh ko | 身高一米二以下的儿童免票。 | 키 120cm 이하 어린이는 무료입니다.
en ko | It weighs 10 pounds. | 4.5kg이다.
en ko | Add 12 oz of soda. | 탄산음료 355ml를 넣으세요.
en ko | 10 lb 4 oz | 4.65kg
en ko | He is 6'2" tall. | 그의 키는 188cm이다.
en ko | She is five feet ten. | 그녀는 키가 178cm다.
en ko | The 5-foot-10 forward scored. | 키 178cm의 공격수가 득점했다.
en ko | Stay 6 feet apart. | 2m 거리를 두세요.
en ko | 40 acres of forest | 약 16헥타르의 숲
en ko | 100 acres of land | 약 12만 평의 땅
ko en | 33평 아파트에 산다. | They live in a 109-square-meter apartment.
en ko | A gallon of milk | 우유 3.8리터
en ko | Add 1/2 cup of milk. | 우유 120ml를 넣으세요.
en ko | It is half a mile away. | 800미터 떨어져 있다.
en zh | The limit is 65 mph. | 限速为每小时105公里。
en ko | Drive at 60 miles an hour. | 시속 96km로 운전하세요.
en ko | Between 5 and 10 miles of trail. | 산책로는 8~16km이다.
en ko | Wait half an hour. | 30분 기다리세요.
en ko | It took an hour and 20 minutes. | 80분 걸렸다.
en ko | Within 72 hours. | 사흘 안에.
en zh | The rate fell 0.5 percentage points. | 利率下降了0.5个百分点。
en ko | C$50 per night | 1박에 50달러
en de | $1,500.75 | 1.500,75 Dollar
zh en | 这件衣服200元。 | This dress costs 200 yuan.
en ko | Doors open at 7 p.m. | 입장은 19시부터입니다.
en ko | Open until midnight. | 밤 12시까지 엽니다.
en ko | The show starts at 12:30 a.m. | 공연은 0시 30분에 시작한다.
en ko | Lunch is at 11:30 a.m. | 점심은 낮 11시 30분이다.
ko en | 밤 1시에 잤다. | I went to bed at 1 a.m.
de en | Wir treffen uns um halb acht. | We're meeting at seven thirty.
de en | Um fünf nach halb acht. | At 7:35.
de en | Um Viertel nach drei geht's los. | We start at a quarter past three.
de en | nachts um 3 Uhr | at 3 a.m.
zh ko | 会议改到下午3点一刻了。 | 회의가 오후 3시 15분으로 바뀌었어요.
zh en | 星期三晚上八点 | 8 p.m. on Wednesday
en ko | The warranty expires on March 15, 2027. | 보증 기간은 2027년 3월 15일에 만료됩니다.
en de | On 4/5/2024 we met. | Am 05.04.2024 trafen wir uns.
en ko | The event runs 3–5 March. | 행사는 3월 3일부터 5일까지 열린다.
ko en | 2026.05.06.(수) 휴무 | Closed Wednesday, May 6, 2026
en ko | 20% off orders over £50 | 50파운드를 넘는 주문은 20% 할인
en ko | Only those 12 and over may enter. | 12세 미만은 입장할 수 없습니다.
en ko | Do not exceed 4 g in 24 hours. | 24시간 동안 4g을 초과하여 복용하지 마십시오.
de en | nicht weniger als 5 Punkte | at least 5 points
ko en | 10명을 넘지 않는다. | no more than 10 people
en ko | Take 2 tablets twice daily. | 1일 2회 2정씩 복용하세요.
en ko | 9 out of 10 dentists | 치과 의사 10명 중 9명
ko en | 후반 38분에 결승골을 넣었다. | He scored the winner in the 83rd minute.
en ko | Version 3.11.2 is out. | 버전 3.11.2가 출시되었습니다.
en de | IP address 192.168.0.1 | IP-Adresse 192.168.0.1
en ko | Call 555-0134. | 555-0134로 전화하세요.
en ko | We won 3-1. | 우리는 3 대 1로 이겼다.
"""


@pytest.mark.parametrize("case", parsed(CERTAIN))
def test_what_is_surely_said_otherwise_is_rejected_with_a_judge_too(case):
    assert outcome(*case) == "certain"


@pytest.mark.parametrize("case", parsed(LIKELY))
def test_what_has_a_rare_explanation_is_rejected_only_without_a_judge(case):
    assert outcome(*case) == "likely"


@pytest.mark.parametrize("case", parsed(DOUBTFUL))
def test_what_may_be_right_is_left_to_a_judge(case):
    assert outcome(*case) == "doubtful"


@pytest.mark.parametrize("case", parsed(RIGHT))
def test_a_right_translation_leaves_no_doubt_either_way(case):
    source, src, target, mt = case
    assert outcome(source, src, target, mt) == outcome(target, mt, source, src) == "fine"


def test_a_text_says_nothing_otherwise_than_itself():
    for rows in (CERTAIN, LIKELY, DOUBTFUL, RIGHT):
        for source, src, target, mt in parsed(rows):
            assert outcome(source, src, source, src) == "fine", src
            assert outcome(target, mt, target, mt) == "fine", mt


def test_another_quantity_beside_the_source_s_own_is_no_conflict():
    assert outcome("en", "It is 5 miles away.", "ko", "5마일(8km) 떨어져 있다.") == "fine"
    assert outcome("en", "It is 5 miles away.", "ko", "5마일 떨어져 있다.") == "fine"
    # Left out on one side: nothing is said otherwise.
    assert compare_numbers("It costs 5 dollars.", "비싸다.", "en", "ko").likely == ()


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(DIRECTIONS), st.integers(0, 10**9))
def test_a_true_quantity_is_never_doubted_and_a_wrong_one_never_fine(kind, direction, seed):
    parts = KINDS[kind](*direction, random.Random(seed))
    source, target = direction
    assert outcome(source, parts.src, target, parts.right) == "fine", parts
    if parts.wrong != parts.right:
        assert outcome(source, parts.src, target, parts.wrong) != "fine", parts


def test_made_pairs_are_the_same_each_time():
    assert quantity_pairs("a unit", "en", "ko", 5) == quantity_pairs("a unit", "en", "ko", 5)
