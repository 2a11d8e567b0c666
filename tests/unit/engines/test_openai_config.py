"""Settings of the `openai` engine that could never work, and how long it waits between attempts."""

import pytest
from pydantic import ValidationError

from workers.engines.openai.openai_server import pauses
from workers.settings.openai import OpenAIConfig


def test_pauses_double_up_to_a_minute() -> None:
    assert pauses(7, 1.0) == [1, 2, 4, 8, 16, 32, 60]
    assert pauses(3, 0.0) == [0, 0, 0] and pauses(2, 90.0) == [90, 90]
    assert len(pauses(1000, 1.0)) == 1000


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        (["http://host:99999"], "port"),
        (["http://host:0"], "port"),
        (["http://host:abc"], "port"),
        (["http://a b"], "not an http"),
        (["http://user:word@host"], "api_key_variable"),
        (["http://host?key=1"], "more than a host"),
        (["http://host/v1/"], "ends with /v1"),
        (["http://host", "http://host/"], "named twice"),
    ],
)
def test_addresses_that_could_never_work_are_refused(urls: list[str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        OpenAIConfig.model_validate({"urls": urls})
