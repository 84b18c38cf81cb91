"""Check how the tables of number words are read."""

from __future__ import annotations

from fractions import Fraction

from scorekit.text.numbers.table import find_table, read_table


def test_rows_of_a_table_count_up_or_share_a_value():
    words = read_table("german").words
    assert words["elf"] == words["elft"] == ("n", 11)
    assert words["siebzig"] == ("n", 70) and words["dreissig"] == ("n", 30)
    assert words["einundzwanzig"] == ("n", 21) and words["zweieinhalb"] == ("n", Fraction(5, 2))
    assert words["mio"] == words["million"] == ("b", 10**6)


def test_a_table_is_found_by_any_name_of_its_language():
    assert find_table("ko-KR") is find_table("Korean") is read_table("korean")
    assert find_table("Swahili") is find_table("no such language") is None
