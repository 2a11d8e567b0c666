"""The table of families in docs/models.md is what the proof says."""

import re
from pathlib import Path

import pytest
import transformers

from benchmarks.models import families, row

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
ROWS = dict(re.findall(r"^(?=\| `(.*?)` \|)(.*)$", PAGE.partition("## Families")[2], re.MULTILINE))
FEW = ("bloom", "gemma2", "lfm2", "mamba2", "mixtral")
same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}:" not in PAGE, reason="the table is of another transformers"
)


@same_version
@pytest.mark.parametrize("family", FEW)
def test_row_of_a_family_is_what_its_proof_says(family: str) -> None:
    assert row(family) == ROWS[family]


@same_version
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_rows_are_what_the_proofs_say() -> None:
    assert list(ROWS) == families()
    assert {family: told for family, told in ROWS.items() if row(family) != told} == {}


@same_version
def test_families_that_people_train_are_computed() -> None:
    wanted = ("gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
    assert [family for family in wanted if "| yes |" not in ROWS[family]] == []
    assert "| in part | export:" in ROWS["gpt_neox"]


@same_version
def test_families_without_plain_attention_are_refused() -> None:
    refused = ("bamba", "bloom", "falcon_h1", "falcon_mamba", "jamba", "lfm2", "mamba", "mamba2", "minimax", "mpt")
    more = ("qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2")
    assert [family for family in (*refused, *more) if "| no |" not in ROWS[family]] == []
