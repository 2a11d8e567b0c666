"""Warnings that come again and again."""

import logging

import pytest

from asyncflow.repeated import RepeatedWarnings


def test_a_reason_is_logged_as_its_count_grows_tenfold(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(logging.getLogger("test"))
    for row in range(1234):
        warnings.log_warning(f"row {row}: KeyError: 'question {row}'")
    warnings.log_warning('row 3: it\'s "another"')
    assert caplog.messages == [
        "row 0: KeyError: 'question 0'",
        "row 9: KeyError: 'question 9' (10 such warnings so far)",
        "row 99: KeyError: 'question 99' (100 such warnings so far)",
        "row 999: KeyError: 'question 999' (1000 such warnings so far)",
        'row 3: it\'s "another"',
    ]


def test_ids_and_what_is_said_beside_it_are_no_part_of_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "test")
    warnings = RepeatedWarnings(logging.getLogger("test"), logging.INFO)
    ids = ["<Sandbox at 0x7f3adeadbeef>", "<Sandbox at 0x7f3ac0ffee>"]
    ids += ["sandbox deadbeefcafe left", "sandbox c0ffeec0ffee left"]
    ids += ["sandbox 3f2b8c1e-5d4a-4c9b-9e1f-aabbccddeeff left", "a refused feedback"]
    for number, text in enumerate(ids):
        warnings.log_warning(text, f"; it said {'x' * number}")
    assert caplog.messages == [f"{ids[0]}; it said ", f"{ids[2]}; it said xx", f"{ids[5]}; it said xxxxx"]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_reasons_without_an_end_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(logging.getLogger("test"))
    for number in range(3000):
        warnings.log_warning("x" * number)
    assert len(caplog.messages) < 1010
