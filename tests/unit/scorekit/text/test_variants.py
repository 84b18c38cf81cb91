"""Check that characters of one variant distinguish Simplified and Traditional Chinese."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.text.writing_scripts import other_variant

#: Sentences from Taiwan and Hong Kong, with characters that Simplified text also has
#: (群, 峰, 台, 着, 里, 温), and the same in Simplified.
TRADITIONAL = (
    "颱風過後，台北市政府宣布明天停止上班上課。",
    "他把行李放在後面的房間裡，然後去廚房煮麵。",
    "這家公司去年的營業額成長了兩成，主要來自歐洲市場。",
    "醫生建議病人每天散步三十分鐘，並減少鹽的攝取。",
    "法院認為，被告並未履行契約所定的義務。",
    "比賽最後一分鐘，主隊靠著罰球追平比數。",
    "她在雲端硬碟裡保存了所有的照片和影片。",
    "山峰上的積雪到了五月才慢慢融化。",
    "一群鴿子停在廣場中央的噴水池邊。",
    "香港天文台預測週末氣温會降至十度以下。",
    "佢哋噚日喺銅鑼灣買咗好多嘢，返到屋企已經好夜。",
    "政府計劃在未來五年內興建更多公共房屋。",
)
SIMPLIFIED = (
    "台风过后，台北市政府宣布明天停止上班上课。",
    "他把行李放在后面的房间里，然后去厨房煮面。",
    "这家公司去年的营业额增长了两成，主要来自欧洲市场。",
    "医生建议病人每天散步三十分钟，并减少盐的摄取。",
    "法院认为，被告并未履行合同所定的义务。",
    "比赛最后一分钟，主队靠着罚球追平比分。",
    "她在云盘里保存了所有的照片和视频。",
    "山峰上的积雪到了五月才慢慢融化。",
    "一群鸽子停在广场中央的喷水池边。",
    "乾隆年间的瓷器在拍卖会上以高价成交。",
    "新加坡政府计划在未来五年内兴建更多组屋。",
    "请在星期五之前把报告发给我，谢谢。",
)


@pytest.mark.parametrize("tag", ["zh-TW", "zh-HK", "zh-Hant", "zh-Hant-MO", "yue-HK"])
def test_traditional_text_is_traditional(tag):
    assert [text for text in TRADITIONAL if other_variant(text, tag)[0] > 0] == []
    assert all(other_variant(text, tag)[0] > 0.8 for text in SIMPLIFIED)


@pytest.mark.parametrize("tag", ["zh-CN", "zh-SG", "zh-Hans", "zh_hans_tw"])
def test_simplified_text_is_simplified(tag):
    assert [text for text in SIMPLIFIED if other_variant(text, tag)[0] > 0] == []
    assert all(other_variant(text, tag)[0] > 0.8 for text in TRADITIONAL)


@pytest.mark.parametrize("language", ["zh", "Chinese", "ja", "ko", "nan-Latn-TW", "zh-Latn", "xx"])
def test_where_no_variant_is_asked_for_none_is_wrong(language):
    assert other_variant(SIMPLIFIED[0], language) is None


def test_what_no_character_tells_is_left_open():
    assert other_variant("人山人海", "zh-TW") is None
    assert other_variant("Hello, 世界!", "zh-CN") is None


def test_it_says_what_it_saw():
    assert other_variant("請把报告寄給我", "zh-TW") == (1 / 3, "报")


@given(st.text())
def test_the_share_is_one(text):
    for tag in ("zh-TW", "zh-CN"):
        variant = other_variant(text, tag)
        assert variant is None or 0 <= variant[0] <= 1
