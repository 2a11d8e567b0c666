"""Data in every format that is read, and what is said of those that cannot be."""

import csv
import json
import math
import sys
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncflow.errors import ConfigError
from workers.data.prompt_rows import PromptRow, as_row, conversation, read_prompt_rows
from workers.settings.data import DataConfig

ROWS = [{"prompt": 'say "1", 2\nand 3', "answer": "x"}, {"prompt": "\u00fcber", "answer": "4"}]


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_prompt_rows(path, DataConfig.model_validate({"path": str(path), **settings}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_rows(path: Path) -> None:
    rows = read_prompt_rows(path, DataConfig(path=str(path)))
    assert [(row.prompt, row.ground_truth) for row in rows] == [(row["prompt"], row["answer"]) for row in ROWS]
    assert [json.loads(row.task) for row in rows] == ROWS
    assert [row.line for row in rows] == [1, 2]


@pytest.mark.parametrize(("name", "dialect"), [("it's (1).csv", "excel"), ("rows.TSV", "excel-tab")])
def test_table_of_text_is_read(tmp_path: Path, name: str, dialect: str) -> None:
    path = tmp_path / name
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        table = csv.DictWriter(stream, ["prompt", "answer"], dialect=dialect)
        table.writeheader()
        table.writerows(ROWS)
    check_rows(path)


def test_array_of_objects_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2).encode())
    check_rows(path)


def test_parquet_is_read_by_whatever_name(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow

    path = tmp_path / "train-00000-of-00001"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    check_rows(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert refusal(path).startswith(f"data.path: {path} is not a complete Parquet file: Arrow")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Decimal("nan"), "'answer' is of type Decimal; data.ground_truth_field must name text or a number"),
        (b"1", "'answer' is of type bytes"),
        (math.nan, "'answer' is nan"),
    ],
)
def test_values_that_parquet_has_and_json_has_not_are_named(answer: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_row({"prompt": "a", "answer": answer}, 1, DataConfig(path="x"), own_rollout=False, where="rows.parquet:1")


def test_times_of_parquet_are_those_of_python_however_fine_they_are_kept(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow as pa

    when, took = datetime(2025, 1, 1, 2, 3, 4, 5), timedelta(seconds=1, microseconds=7)
    nested = pa.struct([("at", pa.list_(pa.timestamp("ns", "UTC")))])
    table = {
        "prompt": ["1+2=", "2+2="],
        "answer": pa.array([Decimal("3.00"), Decimal("4.50")]),
        "when": pa.array([when, None], pa.timestamp("ns")),
        "took": pa.array([took, None], pa.duration("ns")),
        "more": pa.array([{"at": [when]}, None], nested),
    }
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    first, second = read_prompt_rows(tmp_path / "rows.parquet", DataConfig(path="rows.parquet"))
    assert (first.ground_truth, second.ground_truth) == ("3.00", "4.50")
    assert (first.fields["when"], first.fields["took"], second.fields["when"]) == (when, took, None)
    assert first.fields["more"] == {"at": [when.replace(tzinfo=first.fields["more"]["at"][0].tzinfo)]}
    assert json.loads(first.task)["when"] == "2025-01-01T02:03:04.000005"
    table["when"] = pa.array([1, None], pa.int64()).cast(pa.timestamp("ns"))
    table["took"] = pa.array([1, None], pa.int64()).cast(pa.duration("ns"))
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    first, second = read_prompt_rows(tmp_path / "rows.parquet", DataConfig(path="rows.parquet"))
    assert (first.fields["when"], first.fields["took"]) == ("1970-01-01 00:00:00.000000001", 1), "nothing is rounded"
    assert (second.fields["when"], second.fields["took"]) == (None, None)


def test_decimals_have_all_their_digits(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow as pa

    small = Decimal("0E-10")
    table = {"prompt": ["1-1="], "answer": pa.array([small]), "more": pa.array([{"of": [small]}])}
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    (row,) = read_prompt_rows(tmp_path / "rows.parquet", DataConfig(path="rows.parquet"))
    assert row.ground_truth == "0.0000000000"
    assert json.loads(row.task) == {"prompt": "1-1=", "answer": "0.0000000000", "more": {"of": ["0.0000000000"]}}
    given = {"prompt": "a", "answer": Decimal("1E+3")}
    assert as_row(given, 1, DataConfig(path="x"), own_rollout=False, where="a source").ground_truth == "1000"


def test_large_numbers_are_ground_truths_as_long_as_they_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "10^400=", "answer": 10**400}))
    (row,) = read_prompt_rows(path, DataConfig(path=str(path)))
    assert row.ground_truth == "1" + "0" * 400
    with pytest.raises(ConfigError, match=r"^rows:7: 'answer' is a number of more than 4300 digits; write it as text"):
        as_row({"prompt": "a", "answer": 10**5000}, 7, DataConfig(path="x"), own_rollout=False, where="rows:7")


def test_times_that_python_does_not_have_are_numbers_where_no_setting_names_them(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow as pa

    when = datetime(2025, 1, 1, 2, 3, 4, 5)
    fine = pa.map_(pa.string(), pa.timestamp("ns"))
    table = {
        "prompt": pa.array(["1+2="]),
        "answer": pa.array(["3"]),
        "at": pa.array([[("x", when)]], fine),
        "zone": pa.array([5], pa.timestamp("us", "Mars/Phobos")),
        "day": pa.array([30_000_000], pa.date32()),
        "days": pa.array([[10**16]], pa.list_(pa.date64())),
        "far": pa.array([10**18], pa.timestamp("ms")),
        "today": pa.array([20_000], pa.date32()),
    }
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    (row,) = read_prompt_rows(tmp_path / "rows.parquet", DataConfig(path="rows.parquet"))
    read = {name: row.fields[name] for name in ("at", "zone", "day", "days", "far")}
    assert read == {"at": [("x", when)], "zone": 5, "day": 30_000_000, "days": [115740740], "far": 10**18}
    assert str(row.fields["today"]) == "2024-10-04"
    assert json.loads(row.task)["zone"] == 5
    for name in ("zone", "day", "far"):
        said = refusal(tmp_path / "rows.parquet", ground_truth_field=name)
        assert said.startswith(f"{tmp_path / 'rows.parquet'}: {name!r} cannot be read: ")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow as pa

    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["prompt", "answer", "answer"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    path = tmp_path / "rows.parquet"
    assert refusal(path) == f"{path}: two columns are called 'answer'; rename one"


def test_a_field_inside_of_another_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    row = {
        "prompt": [{"role": "user", "content": "1+2="}],
        "reward_model": {"ground_truth": "3", "style": "rule"},
        "extra_info": {"index": 0},
    }
    path.write_text(json.dumps(row))
    named = {"chat_template": True, "ground_truth_field": "reward_model.ground_truth"}
    (read,) = read_prompt_rows(path, DataConfig(path=str(path), **named))
    assert (read.ground_truth, json.loads(read.task)) == ("3", row)
    said = refusal(path, chat_template=True)
    assert "no field 'answer'; found: extra_info.index, prompt, reward_model.ground_truth, reward_model.style;" in said
    path.write_text(json.dumps(row | {"reward_model.ground_truth": "own"}))
    (read,) = read_prompt_rows(path, DataConfig(path=str(path), **named))
    assert read.ground_truth == "own", "a field that is called so comes first"


def test_contents_of_text_parts_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": parts}], "answer": 3}))
    (row,) = read_prompt_rows(path, DataConfig(path=str(path), chat_template=True))
    assert row.prompt == [{"role": "user", "content": "1+2="}]
    parts.append({"type": "image", "image": "x.png"})
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": parts}], "answer": 3}))
    assert "or a list of parts of type text" in refusal(path, chat_template=True)


def test_parquet_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "rows"
    path.write_bytes(b"PAR1\x15\x04PAR1")
    message = refusal(path)
    assert message.startswith(f"data.path: {path} is a Parquet file, which needs pyarrow: pip install ")


@pytest.mark.parametrize("weight", [math.inf, 1e308])
def test_weight_that_has_no_share_is_refused(weight: float) -> None:
    sources = [{"path": "a.jsonl", "weight": weight}, {"path": "b.jsonl", "weight": 1e308}]
    with pytest.raises(ValidationError, match="less than or equal to 1000000000"):
        DataConfig.model_validate({"mixture": sources})


def test_sources_have_names_of_their_own_or_their_numbers() -> None:
    sources = [{"path": "a.jsonl", "name": "math"}, {"path": "b.jsonl"}]
    assert DataConfig.model_validate({"mixture": sources}).source_names == ("math", "1")
    for name, words in (
        ("1", "the sources' names are 1 1; rename one"),
        ("a/b", "it must be made of letters, digits, _ . and -"),
    ):
        with pytest.raises(ValidationError, match=words):
            DataConfig.model_validate({"mixture": [sources[0] | {"name": name}, sources[1]]})


def test_jsonl_named_otherwise_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    check_rows(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b"prompt,answer\na,1\nb\n", ":2: the row and the header differ in their numbers of fields"),
        ("rows.csv", b"prompt,answer\na,1,2\n", ":1: the row and the header differ in their numbers of fields"),
        ("rows.csv", b"prompt,answer\n\xff,1\n", ": is not a table of text: 'utf-8' codec"),
        ("rows.csv", b"prompt,answer\n", " holds no rows; add some"),
        (
            "rows.csv",
            b"prompt,answer,answer\na,1,2\n",
            ": the header has a name twice: prompt, answer, answer; rename one",
        ),
        ("rows.json", b"[]", " holds no rows; add some"),
        ("rows.csv", b"question,answer\na,1\n", ":1: no field 'prompt'; found: answer, question"),
        ("rows.json", b'[{"prompt": "a", "answer": "1"}', ": malformed JSON: "),
        ("rows.json", b'[{"prompt": "a", "answer": "1"}, 3]', ":2: the row is a number, not a JSON object"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert words in refusal(path)


CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+1?"}]


def test_messages_are_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": CHAT, "answer": 3}))
    config = DataConfig(path=str(path), chat_template=True, prompt_template="So: {prompt}", system_prompt="Add.")
    (row,) = read_prompt_rows(path, config)
    system = {"role": "system", "content": "Add."}
    assert conversation(row.prompt, config) == [system, *CHAT[:2], {"role": "user", "content": "So: +1?"}]
    own = {"role": "system", "content": "Subtract."}
    assert conversation([own, *CHAT], config)[:2] == [own, CHAT[0]]


NO_MESSAGES = (
    "'prompt' must be text, or messages with a role and a content that is text, or a list of parts of type text, but "
)


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        (CHAT, {"chat_template": False}, "'prompt' is a list (of messages); set data.chat_template to true"),
        ([], {}, f"{NO_MESSAGES}it is an empty list; correct the row"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            {},
            f"""{NO_MESSAGES}message 1 of 1, '{{"role":"user","content":[{{"type":"image"}}]}}', has a content that """
            "is a list",
        ),
        (["1+1?"], {}, f"{NO_MESSAGES}message 1 of 1, '1+1?', is text; correct the row"),
        (
            [*CHAT, {"role": "user", "content": None}],
            {},
            f"""{NO_MESSAGES}message 4 of 4, '{{"role":"user","content":null}}', has no content; correct the row""",
        ),
        ([{"content": "2"}], {}, f"""{NO_MESSAGES}message 1 of 1, '{{"content":"2"}}', has no role; correct the row"""),
        (CHAT[:2], {}, "'prompt' ends with the assistant's message"),
        ([*CHAT[:2], {"role": "user", "content": " \n"}], {}, "'prompt' ends with an empty message; remove the row"),
    ],
)
def test_messages_that_cannot_be_answered(tmp_path: Path, prompt: object, settings: object, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": 3}))
    assert f"{path}:1: {words}" in refusal(path, **({"chat_template": True} | dict(settings)))  # type: ignore[call-overload]


def test_data_may_have_no_ground_truths(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": ["of no use"]}\n')
    assert refusal(path).endswith("set data.ground_truth_field to the right one, or to null if your reward needs none")
    rows = read_prompt_rows(path, DataConfig(path=str(path), ground_truth_field=None))
    assert rows == [PromptRow("a", "", 1), PromptRow("b", "", 2)]
