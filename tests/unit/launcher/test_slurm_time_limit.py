import math

import pytest

from asyncflow.errors import ConfigError
from launcher.slurm.batch_job import time_limit_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("24:00:00", 86_400),
        ("2-12", 2 * 86_400 + 12 * 3600),
        ("2-12:30", 2 * 86_400 + 12 * 3600 + 1800),
        ("1-00:00:05", 86_405),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_every_form_that_sbatch_takes(text: str, seconds: float) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1h", "1:2:3:4", "-5", "1-", "1-2:3:4:5", "٣", " 5", "5\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time: .* is no time limit; give "):
        time_limit_s(text)


@pytest.mark.parametrize("text", ["0", "00:00", "0-0"])
def test_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time: .* must be greater than zero; give "):
        time_limit_s(text)
