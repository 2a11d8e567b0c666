"""Data that is no JSONL file: what it is, and the command that makes one of it. Converts nothing by itself."""

import re
import shlex
from pathlib import Path

_DUMP = "[print(json.dumps(row, default=str)) for "
_PARQUET = (
    "import json, sys, pyarrow.parquet as parquet; "
    f"{_DUMP}batch in parquet.ParquetFile(sys.argv[1]).iter_batches() for row in batch.to_pylist()]"
)
_CSV = (
    "import csv, json, sys; csv.field_size_limit(2**31 - 1); "
    f'{_DUMP}row in csv.DictReader(open(sys.argv[1], newline="", encoding="utf-8-sig"), dialect="DIALECT")]'
)
_ARRAY = f"import json, sys; {_DUMP}row in json.load(open(sys.argv[1]))]"
_HUB = 'import sys; from datasets import load_dataset; load_dataset(*sys.argv[2:], split="train").to_json(sys.argv[1])'
_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def other_format(path: Path, content: bytes) -> str | None:
    """Return what a file is instead of JSONL, with the command that converts it; None: nothing that is known."""
    start = content[:64].lstrip()
    if start.startswith(b"PAR1"):
        return f"a Parquet file; convert it: pip install pyarrow && {_to_file(_PARQUET, path)}"
    if path.suffix.lower() in _DIALECTS and not start.startswith(b"{"):
        script = _CSV.replace("DIALECT", _DIALECTS[path.suffix.lower()])
        return f"a table of text; convert it: {_to_file(script, path)}"
    if re.match(rb"\[\s*\{", start):
        return f"one JSON array; convert it: {_to_file(_ARRAY, path)}"
    return None


def is_hub_name(text: str) -> bool:
    """Return whether a text may be a name on the Hugging Face Hub, OWNER/NAME, rather than a path to a file."""
    return _HUB_NAME.fullmatch(text) is not None and not re.search(r"\.(jsonl?|txt|csv|tsv|parquet|gguf)$", text)


def hub_data_command(name: str) -> str:
    """Return the command that writes a Hub's data set, its part `train`, into a JSONL file here."""
    target = f"{name.rpartition('/')[2]}.jsonl"
    return f"pip install datasets && python -c {shlex.quote(_HUB)} {target} {name}"


def hub_model_command(name: str) -> str:
    """Return the command that downloads a Hub's model into a directory."""
    return f"hf download {name} --local-dir models/{name.rpartition('/')[2]}"


def _to_file(script: str, path: Path) -> str:
    target = path.with_suffix(".jsonl")
    return f"python -c {shlex.quote(script)} {shlex.quote(str(path))} > {shlex.quote(str(target))}"
