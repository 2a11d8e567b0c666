"""`asyncflow trace`: what is found about a row, and an index that is cut, killed, damaged or behind."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.view import row_trace
from launcher.view.row_trace import INDEX_FILE, RowIndex, RowTrace
from tests.support.logged_runs import append, make_run


def trained(step: int, *rows: int, group: int | None = None, lineage: int = 0) -> dict[str, Any]:
    return {
        "lineage": lineage, "step": step, "admitted_step": step, "group": step if group is None else group, "epoch": 0,
        "indices": list(rows), "versions": [step - 2, step - 1], "staleness": 1, "prompt_hash": "p", "token_hash": "t",
        "time_s": 10.0 * step,
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", "[]")
    (run / "trace").mkdir(exist_ok=True)
    for step in range(2, 6):
        append(run / "ledger.jsonl", trained(step, 2 * step, 2 * step + 1))
    return run


def keep(run: Path, row: int, **more: Any) -> None:
    """Write what a run keeps of a row of step 3."""
    sample = {
        "step": 3, "lineage": 0, "time_s": 5.5, "group": 3, "index": row, "versions": [[1, 2], [2, 1]],
        "prompt": "1+1=\x1b[2J", "response": "2\u202e", "ground_truth": "2", "reward": 1.0,
        "response_tokens": 3, "truncated": False, "log_probs": [-1.0, -2.0, -0.5],
    }  # fmt: skip
    append(run / "samples" / "rollout-1.jsonl", sample | more)
    for token, owner, at in ((5, "rollout-0/0", 1.0), (9, "rollout-1/0", 4.0)):
        line = {"task": "actor_rollout", "token": token, "step": 3, "rows": [row], "to": owner, "time_s": at}
        append(run / "trace" / "leases-controller-0.jsonl", line)
    append(run / "trace" / "leases-controller-1.jsonl",
           {"task": "actor", "token": 3, "step": 3, "rows": [row, 99], "to": "actor/0", "time_s": 6.0})  # fmt: skip
    computed = {"index": row, "step": 3, "lineage": 0, "time_s": 30.0, "log_probs": [-1.0, -1.5, -0.5]}
    append(run / "trace" / "trained-0.jsonl", {**computed, "step": 2, "log_probs": [9.0]})
    append(run / "trace" / "trained-0.jsonl", computed)


def test_a_kept_row_is_followed_from_its_leases_to_its_step(run_dir: Path) -> None:
    keep(run_dir, 6)
    found = RowTrace.read(run_dir, 6)
    assert [lease["token"] for lease in found.leases] == [5, 9, 3]
    assert found.gaps() == [0.0, -0.5, 0.0], "of the step that trained it, not of one that was discarded"
    assert found.as_text().splitlines() == [
        "row 6",
        "  trained in step 3 (lineage 0) at 30.0 s, group 3",
        "    admitted for step 3, epoch 0, drawn by versions 1 to 2, staleness 1",
        "  drawn by rollout-1 for step 3: 3 tokens, reward 1",
        "    drawn and scored at 5.500 s (lineage 0)",
        "    tokens 0 to 1: version 1",
        "    tokens 2 to 2: version 2",
        "    prompt: 1+1=\\x1b[2J",
        "    response: 2\\u202e",
        "    ground truth: 2",
        "  log-probabilities, engine minus trainer, of 3 tokens: mean |gap| 0.1667,",
        "    largest -0.5000 at token 1",
        "  leases",
        "        1.000 s  actor_rollout  to rollout-0/0",
        "        4.000 s  actor_rollout  to rollout-1/0, again: the one before ended without a result",
        "        6.000 s  actor  to actor/0",
    ]
    shown = CliRunner().invoke(main, ["trace", str(run_dir), "6", "--json"])
    assert json.loads(shown.output)["trained"] == [trained(3, 6, 7)]


def test_damaged_lines_are_counted_and_the_others_told(run_dir: Path) -> None:
    keep(run_dir, 6)
    append(run_dir / "ledger.jsonl", {"indices": [6]})
    append(run_dir / "samples" / "rollout-1.jsonl", {"index": 6, "step": 3, "versions": [1]})
    append(run_dir / "trace" / "leases-controller-0.jsonl", {"rows": [6], "task": 5})
    append(run_dir / "trace" / "trained-0.jsonl", {"index": 6, "step": 3, "log_probs": "x"})
    found = RowTrace.read(run_dir, 6)
    assert found.damaged == 4 and len(found.leases) == 3
    assert found.as_text().splitlines()[-1] == "  4 lines that name it are damaged, and left out"


def test_the_largest_gap_is_named_by_its_token_where_others_have_no_number(run_dir: Path) -> None:
    found = RowTrace(
        7,
        samples=[{"log_probs": [None, -1.0, -2.0], "tokens": ["a", "b", "c"]}],
        computed=[{"lineage": 0, "step": 1, "log_probs": [-1.0, -1.25, -4.0]}],
        trained=[{"lineage": 0, "step": 1}],
    )
    assert found.gaps() == [None, 0.25, 2.0]
    assert found._gap_lines()[1] == "    largest +2.0000 at token 2 ('c')"


def test_a_row_of_a_resumed_run_has_its_leases_in_order_and_no_gap_of_the_wrong_drawing(run_dir: Path) -> None:
    """The time of each start counts from zero, and which of two drawings was trained is not known."""
    keep(run_dir, 6)
    sample = {"step": 3, "group": 3, "index": 6, "reward": 1.0, "response_tokens": 3, "log_probs": [-1.0, -2.0, -9.0]}
    append(run_dir / "samples" / "rollout-0.jsonl", sample)
    line = {"task": "actor", "token": 1, "step": 3, "rows": [6], "to": "actor/0", "lineage": 1, "time_s": 2.0}
    append(run_dir / "trace" / "leases-controller-1.jsonl", line)
    found = RowTrace.read(run_dir, 6)
    assert [lease["token"] for lease in found.leases] == [5, 9, 3, 1] and found.gaps() == []
    text = found.as_text()
    assert text.endswith(
        "        6.000 s  actor  to actor/0\n"
        "    lineage 1: the run was resumed, or went back\n"
        "        2.000 s  actor  to actor/0"
    )
    assert "drawn more than once" in text and "mean |gap|" not in text


def test_a_row_that_is_not_kept_has_its_ledger_and_an_unknown_one_is_refused(run_dir: Path) -> None:
    found = RowTrace.read(run_dir, 11)
    assert [line["step"] for line in found.trained] == [5] and not found.samples
    assert "rollout.samples_per_step" in found.as_text()
    with pytest.raises(ConfigError, match="nothing about row 1000"):
        RowTrace.read(run_dir, 1000)
    with pytest.raises(ConfigError, match="not a run"):
        RowTrace.read(run_dir / "logs", 1)


def test_a_number_that_no_row_can_have_is_refused_in_one_line(run_dir: Path) -> None:
    result = CliRunner().invoke(main, ["trace", str(run_dir), "9" * 20])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "ROW" in result.output
    assert "'abc' is not a valid whole number from 0" in CliRunner().invoke(main, ["trace", str(run_dir), "abc"]).output


def test_what_replaced_a_kept_rows_group_is_told(run_dir: Path) -> None:
    keep(run_dir, 40, group=17, step=4)
    dead = {"lineage": 0, "step": 4, "admitted_step": 4, "group": 17, "dead_letter": True, "replaced_by": 20,
            "task": "rewards", "deliveries": 3, "time_s": 41.0}  # fmt: skip
    append(run_dir / "ledger.jsonl", dead)
    assert (
        "its group 17 was given up in rewards by step 4; group 20 took its place"
        in RowTrace.read(run_dir, 40).as_text()
    )


def test_only_what_was_added_is_read_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    add = RowIndex._add_lines
    monkeypatch.setattr(
        RowIndex,
        "_add_lines",
        lambda self, number, start, data: (read.append(len(data)), add(self, number, start, data)),
    )
    RowTrace.read(run_dir, 4)
    assert sum(read) == (run_dir / "ledger.jsonl").stat().st_size
    read.clear()
    RowTrace.read(run_dir, 4)
    assert sum(read) == 0
    append(run_dir / "ledger.jsonl", trained(6, 12))
    assert RowTrace.read(run_dir, 12).trained
    assert sum(read) == len(json.dumps(trained(6, 12))) + 1


def test_a_build_that_is_killed_goes_on_where_it_was(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_trace, "_CHUNK_BYTES", 400)  # a line or two
    add, calls = RowIndex._add_lines, 0

    def killed(self: RowIndex, number: int, start: int, data: bytes) -> None:
        nonlocal calls
        calls += 1
        add(self, number, start, data)
        if calls == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RowIndex, "_add_lines", killed)
        with pytest.raises(KeyboardInterrupt):
            RowTrace.read(run_dir, 4)
    with sqlite3.connect(run_dir / "trace" / INDEX_FILE) as database:
        (done,) = database.execute("SELECT read FROM files").fetchone()
    database.close()
    assert 0 < done < (run_dir / "ledger.jsonl").stat().st_size, "the first chunk counts, the second does not"
    assert [RowTrace.read(run_dir, row).trained[0]["step"] for row in range(4, 12)] == [2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("damage", [b"not a database" * 100, b"", b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_damaged_index_is_built_anew(run_dir: Path, damage: bytes) -> None:
    RowTrace.read(run_dir, 4)
    (run_dir / "trace" / INDEX_FILE).write_bytes(damage)
    assert RowTrace.read(run_dir, 5).trained == [trained(2, 4, 5)]


def test_an_index_that_cannot_grow_is_one_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: RowIndex) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(RowIndex, "update", full)
    said = CliRunner().invoke(main, ["trace", str(run_dir), "4"])
    assert (said.exit_code, said.output.count("\n")) == (1, 1)
    assert "index.sqlite: database or disk is full; make room" in said.output


def test_a_file_that_was_cut_and_grew_again_is_read_anew(run_dir: Path) -> None:
    """A run that goes back to a checkpoint cuts its ledger, and trains other rows in those steps."""
    RowTrace.read(run_dir, 10)
    path = run_dir / "ledger.jsonl"
    os.truncate(path, len(b"".join(path.read_bytes().splitlines(keepends=True)[:2])))
    for step in range(4, 9):
        append(path, trained(step, 100 + step, lineage=1))
    with pytest.raises(ConfigError, match="nothing about row 10"):
        RowTrace.read(run_dir, 10)
    assert [line["lineage"] for line in RowTrace.read(run_dir, 104).trained] == [1]
    assert RowTrace.read(run_dir, 6).trained == [trained(3, 6, 7)]


def test_a_line_that_moved_without_a_trace_is_noticed(run_dir: Path) -> None:
    """As long as before and with the same end: only the line itself tells."""
    RowTrace.read(run_dir, 4)
    path = run_dir / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("r+b") as file:
        file.write(lines[1] + lines[0])
    assert RowTrace.read(run_dir, 4).trained == [trained(2, 4, 5)]


def test_a_torn_line_is_skipped_until_it_is_whole(run_dir: Path) -> None:
    line = json.dumps(trained(6, 12)).encode()
    path = run_dir / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(b"{torn}\n" + line[:20])
    with pytest.raises(ConfigError):
        RowTrace.read(run_dir, 12)
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    assert RowTrace.read(run_dir, 12).trained == [trained(6, 12)]


def test_neither_a_link_nor_a_forged_index_leads_out_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    """A run may come from somebody else."""
    secret = tmp_path / "secret.jsonl"
    append(secret, {"index": 77, "prompt": "secret"})
    (run_dir / "samples" / "rollout-5.jsonl").symlink_to(secret)
    with pytest.raises(ConfigError, match="nothing about row 77"):
        RowTrace.read(run_dir, 77)
    with sqlite3.connect(run_dir / "trace" / INDEX_FILE) as database:
        database.execute("INSERT INTO files VALUES (99, 'samples/../../secret.jsonl', 0, 0, '')")
        database.execute("INSERT INTO rows VALUES (77, 99, 0)")
    database.close()
    with pytest.raises(ConfigError, match="nothing about row 77"):
        RowTrace.read(run_dir, 77)
    assert RowTrace.read(run_dir, 4).trained == [trained(2, 4, 5)]


def test_no_name_in_a_trace_commands_the_terminal(run_dir: Path) -> None:
    keep(run_dir, 6, worker="x")
    line = {"task": "judge\x1b[2J", "token": 1, "step": 3, "rows": [6], "to": "a", "time_s": 7.0}
    append(run_dir / "trace" / "leases-controller-0.jsonl", line)
    assert "judge\\x1b[2J" in RowTrace.read(run_dir, 6).as_text()


def test_an_index_that_is_a_link_is_neither_read_nor_written(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    (run_dir / "trace" / INDEX_FILE).symlink_to(other)
    assert RowTrace.read(run_dir, 4).trained == [trained(2, 4, 5)]
    assert not other.exists()
