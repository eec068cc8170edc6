from __future__ import annotations

from ziggurat.decoding.state import Admission


def test_sentences_enter_in_groups_that_are_worth_a_batch() -> None:
    waiting = Admission([10] * 20, 80, 100)
    assert waiting.slots == 8
    assert waiting.group([]) == range(8)
    assert waiting.group([10] * 8) == range(8, 8)
    assert waiting.group([10] * 7) == range(8, 8), "one is not yet a quarter of eight"
    assert waiting.group([10] * 6) == range(8, 10)
    assert waiting.group([10] * 3) == range(10, 15)
    assert waiting.group([]) == range(15, 20)
    assert waiting.group([]) == range(20, 20)


def test_the_last_ones_enter_however_few_they_are() -> None:
    waiting = Admission([10] * 9, 80, 100)
    assert waiting.group([]) == range(8)
    assert waiting.group([10] * 7) == range(8, 9)


def test_budgets_count_padding_and_a_long_sentence_is_alone() -> None:
    waiting = Admission([50, 9, 9, 3, 3, 3, 3], 20, 3)
    assert waiting.slots == 3
    assert waiting.group([]) == range(1)
    assert waiting.group([50]) == range(1, 1)
    assert waiting.group([]) == range(1, 3)
    assert waiting.group([9]) == range(3, 4)
    assert waiting.group([3]) == range(4, 6)
    assert waiting.group([3, 3]) == range(6, 7)
