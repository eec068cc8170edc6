from __future__ import annotations

from ziggurat.translate.search import BatchAdmission


def test_sentences_enter_in_groups_that_fill_a_batch() -> None:
    waiting = BatchAdmission([10] * 20, 80, 100)
    assert waiting.slots == 8
    assert waiting.group([]) == list(range(8))
    assert waiting.group([10] * 8) == []
    assert waiting.group([10] * 7) == [], "one is not yet a quarter of eight"
    assert waiting.group([10] * 6) == list(range(8, 10))
    assert waiting.group([10] * 3) == list(range(10, 15))
    assert waiting.group([]) == list(range(15, 20))
    assert waiting.group([]) == []


def test_the_last_sentences_enter_however_few_they_are() -> None:
    waiting = BatchAdmission([10] * 9, 80, 100)
    assert waiting.group([]) == list(range(8))
    assert waiting.group([10] * 7) == list(range(8, 9))


def test_budgets_count_padding_and_a_long_sentence_is_alone() -> None:
    waiting = BatchAdmission([50, 9, 9, 3, 3, 3, 3], 20, 3)
    assert waiting.slots == 3
    assert waiting.group([]) == list(range(1))
    assert waiting.group([50]) == []
    assert waiting.group([]) == list(range(1, 3))
    assert waiting.group([9]) == list(range(3, 4))
    assert waiting.group([3]) == list(range(4, 6))
    assert waiting.group([3, 3]) == list(range(6, 7))
