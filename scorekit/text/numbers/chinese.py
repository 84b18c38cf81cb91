"""Numbers in Chinese, both scripts: digits with 万 and 亿, 三百万, 二〇一九, 百分之三十."""

from __future__ import annotations

import re
from fractions import Fraction

from scorekit.text.numbers.read import Table, hints, listed, one_of, valued

_ONES = "一二三四五六七八九"
_WORDS = listed("n", 1, "|".join(_ONES)) | listed("n", 1, "壹|贰|叁|肆|伍|陆|柒|捌|玖")
_WORDS |= valued("n", {0: "零|〇", 2: "两|兩|俩|倆|貳", 3: "參", 6: "陸", Fraction(1, 2): "一半"})
_WORDS |= valued("u", {10: "十|拾", 20: "廿", 100: "百|佰", 1000: "千|仟"})
_WORDS |= valued("b", {10**4: "万|萬", 10**8: "亿|億", 10**12: "兆"})
_WORDS |= valued("f", {2: "半"}) | valued("r", {1: "分之"})

_HINTS = hints(
    {
        0: "没有|沒有|无|無",
        2: "双|雙|翻番|翻一番|加倍|一对|一對|夫妻|夫妇|夫婦",
        3: "仨",
        7: "周|星期|礼拜|禮拜|週",
        10: "十几|十幾|十多|十来|十來|青少年|数十|數十|几十|幾十",
        12: "中午|正午|午夜|半夜|一打|腊月|臘月",
        14: "两周|两个星期|兩週|兩周",
        24: "天|日|午夜",
        60: "小时|小時",
        100: "世纪|世紀",
        Fraction(1, 2): "过半|過半",
        Fraction(1, 4): "一刻|季度",
        Fraction(3, 4): "三刻",
    }
)

TABLE = Table(
    mixed=True,
    decimal=".",
    words=_WORDS,
    word=re.compile(rf"[〇零{_ONES}]{{3,}}(?![十百千万萬亿億])|{one_of(_WORDS)}"),
    gap=re.compile(r"[ 多余餘几幾来來零〇个個]?"),
    unsure=re.compile(r"万一|萬一"),
    hints=_HINTS,
    hint=re.compile(one_of(_HINTS)),
    tenths=re.compile(r" ?[成折]"),
    clock=re.compile(r" ?[点點时時]"),
    year=re.compile(r" ?年"),
    decade=re.compile(r" ?(?:年代|多?[岁歲])"),
    century=re.compile(r" ?世[纪紀]"),
    month=re.compile(r" ?月"),
    minutes=re.compile(r" ?[分秒]"),
    months=re.compile(r" ?个?個?月"),
    half=re.compile(r" ?[个個]?[\u4e00-\u9fff]{0,2}半"),
    loose=re.compile(
        r" ?[多来來余餘]?(?:日|号|號|天|小时|小時|周|週|星期|"
        r"英[里尺寸亩畝]|[里尺寸斤两兩亩畝磅度]|°|"
        r"公[里斤分]|平方|[厘毫]?米|千克|升|[kcm]?m\b|kg\b)"
    ),
    after_date=re.compile(
        r" ?[\u4e00-\u9fff]{0,3}?(?:事件|运动|運動|战争|戰爭|革命|地震|起义|起義|惨案|慘案|"
        r"选举|選舉|国庆|國慶|[节節](?!目)|晚会|晚會|前后|前後|以后|以後|之前|当天|當天|那天|期间|期間|大促)"
    ),
)
