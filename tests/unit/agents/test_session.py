"""What is trained is what was drawn: once, unchanged, behind the same tokens."""

from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat_templates import TEMPLATES, tokenizer
from tests.support.conversations import FakeEngine, converse, count_changed
from workers.agents.rendering import TOOL, TemplateRenderer
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.session import Session, call_seed
from workers.agents.turns import Message
from workers.agents.wire import Drawn

ASKED: list[Message] = [{"role": "user", "content": "6*7?"}]
MORE: list[Message] = [{"role": "user", "content": "Sure?"}]


class Recorded(NamedTuple):
    node: int
    message: Message


class Rollout:
    """A session whose draws are given as text."""

    def __init__(self, family: str = "qwen3", seed: int = 1) -> None:
        self.tokenizer = tokenizer(family)
        self.session = Session(TemplateRenderer(self.tokenizer), seed=seed)

    def drawn(self, text: str, shown: str | None = None) -> Drawn:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return drawn_of(ids, None if shown is None else self.drawn(shown).token_ids)

    def reply(self, messages: list[Message], text: str, shown: str | None = None) -> Recorded:
        return Recorded(*self.session.record_reply(self.session.make_prompt(messages), self.drawn(text, shown)))

    def said(self, sample: int = 0) -> list[str]:
        """Return what is trained in a sample, one text per stretch."""
        made = self.session.collect_samples()[sample]
        masked = [token if trained else -1 for token, trained in zip(made.token_ids, made.response_mask, strict=True)]
        parts = [list(map(int, part.split())) for part in " ".join(map(str, masked)).split("-1")]
        return [self.tokenizer.decode(part) for part in parts if part]


def drawn_of(ids: list[int], shown: list[int] | None = None) -> Drawn:
    return Drawn(0, ids, [-0.5] * len(ids), [3] * len(ids), truncated=False, shown=shown)


def as_sent_back(recorded: Recorded) -> Message:
    return {key: value for key, value in recorded.message.items() if key != "reasoning_content"}


@pytest.mark.parametrize("family", TEMPLATES)
@given(seed=st.integers(0, 2**32), with_tools=st.booleans(), append_only=st.booleans())
def test_every_drawn_token_is_trained_once_and_unchanged(
    family: str, seed: int, with_tools: bool, append_only: bool
) -> None:
    with_tools &= family != "smollm2"  # its template ignores them
    random, renderer = Random(seed), TemplateRenderer(tokenizer(family))
    session, engine = Session(renderer, seed=seed), FakeEngine(renderer, tokenizer(family), random)
    converse(session, engine, random, turns=6, append_only=append_only, tools=with_tools)
    samples = session.collect_samples()
    assert count_changed(engine.door, samples) == 0
    if append_only and not (family == "mistral" and with_tools):  # it moves its tools to the last question
        assert (len(samples), session.num_bridge_failures) == (1, 0)


def test_reasoning_that_clients_drop_stays_in_the_sample() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "<think>hm</think>42<|im_end|>")
    rollout.reply([*ASKED, as_sent_back(first), *MORE], "yes<|im_end|>")
    assert rollout.said() == ["<think>hm</think>42<|im_end|>", "yes<|im_end|>"]


def test_the_end_mark_of_a_cut_reply_is_not_trained() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "42 and")
    rollout.reply([*ASKED, as_sent_back(first), *MORE], "yes")
    assert rollout.said() == ["42 and", "yes"]


def test_a_reply_that_a_string_ended_reads_without_it_and_is_gone_on_from_with_it() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "42. Next", shown="42")
    assert first.message == {"role": "assistant", "content": "42"}
    rollout.reply([*ASKED, as_sent_back(first), *MORE], "yes<|im_end|>")
    assert rollout.said() == ["42. Next", "yes<|im_end|>"]


def test_the_same_request_again_is_a_fork_whose_shared_part_is_trained_once() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "42<|im_end|>")
    longer = [*ASKED, as_sent_back(first), *MORE]
    rollout.reply(longer, "yes<|im_end|>")
    rollout.reply(longer, "no<|im_end|>")
    assert [rollout.said(0), rollout.said(1)] == [["42<|im_end|>", "yes<|im_end|>"], ["no<|im_end|>"]]
    sample = rollout.session.collect_samples()[1]
    assert len(sample.log_probs) == len(sample.versions) == sum(sample.response_mask)


def test_turns_are_numbered_as_they_ended_over_all_samples_that_are_trained() -> None:
    """A sub-agent's two turns end between the two of its caller, whose sample comes second."""
    rollout = Rollout()
    caller = rollout.reply(ASKED, "42<|im_end|>")
    sub = rollout.reply([{"role": "user", "content": "7*6?"}], "yes<|im_end|>")
    rollout.reply([{"role": "user", "content": "7*6?"}, as_sent_back(sub), *MORE], "no<|im_end|>")
    last = rollout.reply([*ASKED, as_sent_back(caller), *MORE], "42<|im_end|>")
    session = rollout.session
    assert [sorted(set(one.turn_ids)) for one in session.collect_samples()] == [[1, 2], [0, 3]]
    for sample in session.collect_samples():
        assert len(sample.turn_ids) == sum(sample.response_mask)
    assert session.trained_turns([sub.node, last.node]) == [0, 1, 3]
    (first, second) = session.collect_samples([sub.node, last.node])
    assert (set(first.turn_ids), set(second.turn_ids)) == ({1}, {0, 2})


def test_replies_that_read_the_same_are_each_gone_on_from() -> None:
    rollout = Rollout()
    twins = [rollout.reply(ASKED, "42<|im_end|>") for _ in range(2)]
    for twin in twins:
        rollout.reply([*ASKED, as_sent_back(twin), *MORE], "yes<|im_end|>")
    assert [rollout.said(0), rollout.said(1)] == [["42<|im_end|>", "yes<|im_end|>"]] * 2


def test_given_nodes_give_the_samples_in_their_order() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "42<|im_end|>")
    longer = [*ASKED, as_sent_back(first), *MORE]
    yes, no = (rollout.reply(longer, text) for text in ("yes<|im_end|>", "no<|im_end|>"))
    samples = rollout.session.collect_samples([no.node, first.node, no.node])
    assert [sum(sample.response_mask) for sample in samples] == [
        len(rollout.drawn("42<|im_end|>no<|im_end|>").token_ids)
    ]
    assert rollout.session.collect_samples([yes.node]) == rollout.session.collect_samples()[:1]


def test_a_changed_history_or_other_tools_begin_a_new_sample() -> None:
    rollout = Rollout()
    first = rollout.reply(ASKED, "42<|im_end|>")
    edited = [*ASKED, as_sent_back(first) | {"content": "43"}, *MORE]
    assert rollout.session.make_prompt(edited).parent is None
    kept = [*ASKED, as_sent_back(first), *MORE]
    assert rollout.session.make_prompt(kept, [TOOL]).parent is None
    assert rollout.session.make_prompt(kept).parent == first.node
    assert rollout.session.num_bridge_failures == 0


def test_a_conversation_that_ends_with_the_assistants_message_is_refused() -> None:
    """Rendered, it would be a finished reply with a new one behind it, and what was drawn be tokenized again."""
    rollout = Rollout()
    first = rollout.reply(ASKED, "42<|im_end|>")
    with pytest.raises(BadAgentRequest, match="messages: the last one is the assistant's"):
        rollout.session.make_prompt([*ASKED, as_sent_back(first)])


def test_a_bridge_that_fails_is_counted() -> None:
    rollout = Rollout("mistral")
    prompt = rollout.session.make_prompt(ASKED, [TOOL])
    first = Recorded(*rollout.session.record_reply(prompt, rollout.drawn("42</s>")))
    prompt = rollout.session.make_prompt([*ASKED, as_sent_back(first), *MORE], [TOOL])
    assert (prompt.parent, rollout.session.num_bridge_failures) == (None, 1)


def test_ids_extend_the_longest_path_that_they_begin_with() -> None:
    session = Rollout().session
    first, _ = session.record_reply(session.prompt_of_ids([1, 2]), drawn_of([3]))
    second, _ = session.record_reply(session.prompt_of_ids([1, 2, 3, 4]), drawn_of([5]))
    assert session.prompt_of_ids([1, 2, 3, 4, 5, 6]).parent == second
    assert session.prompt_of_ids([1, 2, 3, 4, 5]).parent == second
    assert session.prompt_of_ids([1, 2, 3, 9]).parent == first
    assert session.prompt_of_ids([1, 2]).parent is None


def test_a_fresh_render_that_begins_with_what_was_drawn_extends_it() -> None:
    rollout = Rollout()
    whole = rollout.session.make_prompt([*ASKED, {"role": "assistant", "content": "42"}, *MORE]).ids
    prompt = rollout.session.prompt_of_ids(whole[:-20])
    node, _ = rollout.session.record_reply(prompt, drawn_of(whole[-20:-15]))
    assert rollout.session.make_prompt([*ASKED, {"role": "assistant", "content": "42"}, *MORE]).parent == node


def test_seeds_depend_on_the_prompt_and_its_repetition_alone() -> None:
    orders = [["a", "b", "a"], ["b", "a", "a"]]
    seeds = []
    for order in orders:
        session = Rollout(seed=7).session
        found = [(text, session.make_prompt([{"role": "user", "content": text}]).seed) for text in order]
        seeds.append(sorted(found))
        assert len({seed for _, seed in found}) == 3
    assert seeds[0] == seeds[1]


def test_a_call_seed_is_the_same_for_ever() -> None:
    assert call_seed(-1, [1, 2, 151_000], 0) == 9490785059512353567
    assert len({call_seed(seed, ids, again) for seed in (0, 1) for ids in ([], [0], [0, 0]) for again in (0, 1)}) == 12


@pytest.mark.parametrize(
    "bad",
    [
        {"content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        "text",
    ],
)
def test_what_is_no_text_message_is_refused(bad: Message) -> None:
    with pytest.raises(BadAgentRequest, match="^messages: "):
        Rollout().session.make_prompt([*ASKED, bad])


@pytest.mark.parametrize("node", [1, -1])
def test_a_sample_of_a_node_that_is_not_there_is_refused(node: int) -> None:
    rollout = Rollout()
    rollout.reply(ASKED, "42.<|im_end|>")
    with pytest.raises(BadAgentRequest, match="only 1"):
        rollout.session.collect_samples([0, node])
