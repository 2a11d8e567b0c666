"""`asyncflow samples`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.report import report
from launcher.report.report import samples_text


def line(step: int, index: int, reward: float | None, **more: object) -> dict[str, object]:
    return {
        "step": step, "group": 0, "index": index, "version": 0, "versions": [[0, 2]], "prompt": f"question {index}",
        "response": f"says \x1b[2J{index}", "ground_truth": "4", "reward": reward, "correct": False,
        "response_tokens": 2, "truncated": False,
    } | more  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    call = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 2}'}}
    talk = [[
        {"role": "user", "content": "how much"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "eight"},
    ]]  # fmt: skip
    runs = [[[0, "<user>how much<asst>"], [1, "<call>2<eos>"], [0, "<tool>eight\x1b"]]]
    lines = [
        line(1, 0, 1.0),
        line(2, 1, 0.5),
        line(2, 2, -1.0),
        line(2, 3, None),
        line(2, 4, 2.0, conversations=talk, samples=runs, turn_rewards=[-0.5, 2.5]),
    ]
    texts = [json.dumps(one) for one in lines]
    (tmp_path / "samples" / "rollout-0.jsonl").write_text("\n".join(texts) + '\n{"step": 2, "gro')
    return tmp_path


def shown(text: str) -> list[int]:
    return [int(each.split("row ")[1].split(":")[0]) for each in text.splitlines() if each.startswith("step ")]


def test_the_worst_and_the_best_of_the_newest_step_are_shown(run_dir: Path) -> None:
    text = samples_text(run_dir, steps=None, worst=2, best=1, number=4)
    assert shown(text) == [2, 1, 4]
    assert "-> multiply" in text
    assert "row 4: reward 2 (turns: -0.5, 2.5), 2 tokens" in text and "row 1: reward 0.5, 2 tokens" in text
    assert "[tool] eight" in text
    assert "[tokens] <user>how much<asst>«<call>2<eos>»<tool>eight\\x1b\n" in text


def test_a_step_shows_its_first_ones_and_no_text_commands_the_terminal(run_dir: Path) -> None:
    text = samples_text(run_dir, steps=(2, 2), worst=0, best=0, number=2)
    assert shown(text) == [1, 2]
    assert "\x1b" not in text
    assert "says \\x1b[2J1" in text


def test_only_what_is_shown_is_read_whole(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollouts of a long run are gigabytes."""
    read: list[bytes] = []
    decode = report.json_object

    def counted(line: bytes) -> dict[str, object]:
        read.append(line)
        return decode(line)

    monkeypatch.setattr(report, "json_object", counted)
    assert shown(samples_text(run_dir, steps=(1, 2), worst=0, best=1, number=4)) == [4]
    assert len(read) == 1


def test_a_line_of_another_version_is_shown_with_what_it_has(run_dir: Path) -> None:
    (run_dir / "samples" / "rollout-1.jsonl").write_text('{"step": 9, "prompt": "1+1=", "response": "2"}\n')
    text = samples_text(run_dir, steps=None, worst=0, best=0, number=1)
    assert "step 9, group None, row None: no reward, ? tokens\n[user] 1+1=\n[assistant] 2\n" in text


def test_a_line_that_is_none_is_counted_and_one_that_cannot_be_shown_says_so(run_dir: Path) -> None:
    with (run_dir / "samples" / "rollout-1.jsonl").open("w") as file:
        for bad in (
            "{damaged",
            json.dumps({"step": 9, "versions": [1]}),
            json.dumps({"step": 9, "metrics": {"a": None}}),
        ):
            file.write(f"{bad}\n")
    text = samples_text(run_dir, steps=None, worst=0, best=0, number=9)
    assert "step 9: " in text and "a line cannot be read: " in text and "\na -\n" in text
    assert text.endswith("2 of 2 rollouts kept of step 9; 1 lines of this run cannot be read")
    (run_dir / "samples" / "rollout-0.jsonl").write_bytes(b"\x00\x01\n" * 3)
    (run_dir / "samples" / "rollout-1.jsonl").unlink()
    with pytest.raises(ConfigError, match="samples has 3 damaged lines and no others"):
        samples_text(run_dir, steps=None, worst=0, best=0, number=9)


def test_rollouts_that_were_drawn_again_after_the_run_went_back_are_left_out(run_dir: Path) -> None:
    again = [line(2, 1, 0.75, lineage=1), line(2, 9, 0.0, lineage=1)]
    (run_dir / "samples" / "rollout-1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in again))
    text = samples_text(run_dir, steps=None, worst=0, best=0, number=9)
    assert sorted(shown(text)) == [1, 2, 3, 4, 9] and "row 1: reward 0.75" in text and "row 1: reward 0.5" not in text
    assert text.endswith("; 1 of this run that were drawn again after it went back are left out")


def test_a_step_without_samples_is_named(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--step: 7 has no samples; there are steps 1 to 2"):
        samples_text(run_dir, steps=(7, 7), worst=0, best=0, number=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--step", "5-2"], "--step: '5-2' goes backwards; give 2-5"),
        (["--worst", "0"], "--worst: 0 is not in the range x>=1"),
    ],
)
def test_options_that_choose_nothing_are_refused(options: list[str], says: str, run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("")
    refused = CliRunner().invoke(main, ["samples", str(run_dir), *options])
    assert refused.exit_code == 2 and says in refused.output


def test_steps_group_and_text_choose_rollouts(run_dir: Path) -> None:
    def rows(steps: tuple[int, int] | None = None, group: int | None = None, search: str = "") -> list[int]:
        return shown(samples_text(run_dir, steps=steps, worst=0, best=0, number=9, group=group, search=search))

    assert rows((1, 2)) == [0, 1, 2, 3, 4]
    assert rows(search="QUESTION 1") == [1]
    assert rows(search="eight") == [4]  # in a conversation
    assert rows((1, 1), group=0) == [0]
    for choice, told in (({"group": 7}, "--group: 7"), ({"search": "nowhere"}, "--search: 'nowhere'")):
        with pytest.raises(ConfigError, match=told):
            rows(**choice)  # type: ignore[arg-type]


def test_neither_a_role_nor_the_name_of_a_figure_commands_the_terminal(run_dir: Path) -> None:
    talk = [[{"role": "user\x1b[1m", "content": "hello"}]]
    odd = json.dumps(line(3, 9, 1.0, conversations=talk, metrics={"part\x1b]0;": 1.0}))
    (run_dir / "samples" / "rollout-1.jsonl").write_text(odd + "\n")
    text = samples_text(run_dir, steps=(3, 3), worst=0, best=0, number=1)
    assert "\x1b" not in text and "[user\\x1b[1m] hello" in text and "part\\x1b]0; 1" in text
