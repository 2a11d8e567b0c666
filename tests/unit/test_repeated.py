"""Warnings that come again and again."""

import logging

import pytest

from asyncflow.repeated import RepeatedWarnings


def test_a_reason_is_logged_as_its_count_grows_tenfold(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(logging.getLogger("test"))
    for row in range(1234):
        warnings.warn(f"row {row}: KeyError: 'question {row}'")
    warnings.warn('row 3: it\'s "another"')
    assert caplog.messages == [
        "row 0: KeyError: 'question 0'",
        "row 9: KeyError: 'question 9' (such came 10 times)",
        "row 99: KeyError: 'question 99' (such came 100 times)",
        "row 999: KeyError: 'question 999' (such came 1000 times)",
        'row 3: it\'s "another"',
    ]


def test_reasons_without_an_end_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(logging.getLogger("test"))
    for number in range(3000):
        warnings.warn("x" * number)
    assert len(caplog.messages) < 1010
