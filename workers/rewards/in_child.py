"""What the child of a pooled reward calls (`workers.rewards.pooled`): entries of `workers.calls`. Torch-free.

A user's reward is called with what its parameters name, in whatever order. Three ways of naming them are known:

    ours    prompt response ground_truth task num_tokens truncated            one response
    verl's  data_source solution_str ground_truth extra_info                  one response, may be beside ours
    TRL's   prompts completions completion_ids, columns of the data           lists; the function returns one, too

A function of groups has `task` and `members`, TRL's names, or those of verl's batches. What is none of these, and has
no default, is refused by name.
"""

import inspect
import json
import re
import reprlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.user_function import Callee, is_async, load_function
from workers.rewards.base import Score, as_rewards, as_score
from workers.rewards.math_verify import VerifiedMath

FIELD = "reward.function"
GROUP_FIELD = "reward.group_function"
_OURS = ("prompt", "response", "ground_truth", "task", "num_tokens", "truncated")
_VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRLS = ("prompts", "completions", "completion_ids")
_GROUPS = ("task", "members")
_VERLS_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_OF_ROWS = {"task", "data_source", "extra_info"}
_RESPONSES = {"response", "solution_str", "completions", "members", "solution_strs"}
"""A function that takes none of these does not see what it judges."""


class LastMatch:
    """Whether what a regular expression finds in a response is the ground truth: the last match, its first group if
    it has one, else all of it.

    reward: {function: regex, pattern: '<answer>(.*?)</answer>'}
    """

    def __init__(self, pattern: str) -> None:
        """Compile; `.` matches line ends, too."""
        self._pattern = compile_pattern(pattern)

    def __call__(self, response: str, ground_truth: str) -> bool:
        """Return whether it is there, and equal to the ground truth but for space around both."""
        matches = list(self._pattern.finditer(response))
        if not matches:
            return False
        found = matches[-1]
        text = found.group(1) if self._pattern.groups else found.group()
        return text is not None and text.strip() == ground_truth.strip()


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Compile `reward.pattern`.

    Raises:
        ConfigError: it is missing, or no regular expression.
    """
    if pattern is None:
        raise ConfigError(
            "reward.pattern: missing; reward.function regex compares what it finds: set it to an expression"
        )
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: {pattern!r} is no regular expression: {error}; correct it") from error


def user_reward(name: str) -> Callee:
    """Import a user's function; it is sent prompt, response, ground truth, data row, number of tokens, whether it was
    truncated, and the tokens.

    Raises:
        ConfigError: there is no such module or function, importing it fails, or it has a parameter that is not known.
    """
    what = f"{FIELD}: {name}"
    called = _ByName(load_function(name, field=FIELD, arguments=None), what, (*_OURS, *_VERLS))

    def values(sent: Sequence[Any]) -> Mapping[str, Any]:
        prompt, response, ground_truth, task, num_tokens, truncated, token_ids = sent
        row = json.loads(task) if called.needs_row else {}
        if called.in_lists:
            return _trl_values([prompt], [response], [ground_truth], [row], [token_ids])
        ours = (prompt, response, ground_truth, row, num_tokens, truncated)
        verls = (row.get("data_source", ""), response, ground_truth, row.get("extra_info") or {})
        return dict(zip(_OURS, ours, strict=True)) | dict(zip(_VERLS, verls, strict=True))

    def score(value: Any, sent: Sequence[Any]) -> Score:
        if called.in_lists:
            (value,) = _listed(value, 1, what)
        return as_score(value, what=what, response=sent[1])

    return Callee(called.function(values), gives=score)


def group_reward(name: str) -> Callee:
    """Import a user's function of whole groups; it is sent the prompt, the ground truth, the data row, the members, and
    the tokens of each. Raises as `user_reward` does."""
    what = f"{GROUP_FIELD}: {name}"
    called = _ByName(load_function(name, field=GROUP_FIELD, arguments=None), what, (*_GROUPS, *_VERLS_BATCH))

    def values(sent: Sequence[Any]) -> Mapping[str, Any]:
        prompt, ground_truth, task, members, token_ids = sent
        row, size = json.loads(task), len(members)
        responses = [member["response"] for member in members]
        if called.in_lists:
            return _trl_values([prompt] * size, responses, [ground_truth] * size, [row] * size, token_ids)
        extra = row.get("extra_info") or {}
        verls = ([row.get("data_source", "")] * size, responses, [ground_truth] * size, [extra] * size)
        return {"task": row, "members": members} | dict(zip(_VERLS_BATCH, verls, strict=True))

    return Callee(called.function(values), gives=lambda value, sent: as_rewards(value, len(sent[3]), what=what))


def last_match(pattern: str) -> Callee:
    """Compare what a regular expression finds, which may backtrack for ever."""
    return _comparison(LastMatch(pattern))


def verified_math() -> Callee:
    """Compare formulas, which may compute for ever."""
    return _comparison(VerifiedMath())


def _comparison(compare: LastMatch | VerifiedMath) -> Callee:
    """Of response and ground truth."""
    return Callee(compare, takes=lambda sent: sent[1:3], gives=lambda right, _: Score(float(right), right))


class _ByName:
    """A user's function, called with what its parameters name.

    Attributes:
        in_lists: it is called as TRL calls rewards.
        needs_row: it takes something of the data row, which may be long.
    """

    def __init__(self, users: Callable[..., Any], what: str, known: Sequence[str]) -> None:
        """Args:
        users: the function.
        what: begins messages.
        known: names that it may have, if they are not TRL's.

        Raises:
            ConfigError: a parameter without a default is not known, or it does not take the response.
        """
        self._users = users
        self._what = what
        may = f"{', '.join(dict.fromkeys(known))}, or as in TRL {', '.join(_TRLS)} and columns of the data"
        advice = f"parameters are found by their names, which may be {may}"
        try:
            parameters = inspect.signature(users).parameters.values()
        except (TypeError, ValueError) as error:  # functions of C may say nothing
            raise ConfigError(f"{what} does not say what it takes; wrap it in a def; {advice}") from error
        self._named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
        names = {each.name for each in self._named}
        self.in_lists = bool(names.intersection(_TRLS))
        needed = [each.name for each in self._named if each.default is each.empty]
        unknown = [] if self.in_lists else [name for name in needed if name not in known]
        if unknown:
            raise ConfigError(f"{what} has a parameter {unknown[0]!r}; {advice}")
        if not names and not (self._takes_rest and len(parameters) == 1):  # a decorator without `functools.wraps`
            raise ConfigError(f"{what} takes {inspect.signature(users)}, which names nothing; {advice}")
        if not names & _RESPONSES and not self._takes_rest:
            raise ConfigError(f"{what} does not take the response; {advice}")
        ours, verls = known[:-4], set(known[-4:]) - {"ground_truth"}
        self._rest = ours if self._takes_rest and not names & verls else ()  # verl's are given settings of its own
        self.needs_row = self.in_lists or bool(_OF_ROWS.intersection(names, known) or _OF_ROWS.intersection(self._rest))

    def function(self, values: Callable[[Sequence[Any]], Mapping[str, Any]]) -> Callable[..., Any]:
        """Return what is called with what was sent; async if the user's is."""

        def call(*sent: Any) -> Any:
            positional, keywords = self._bound(values(sent))
            return self._users(*positional, **keywords)

        async def call_async(*sent: Any) -> Any:
            return await call(*sent)

        return call_async if is_async(self._users) else call

    def _bound(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional, keywords = [], {}
        for each in self._named:
            if each.name in values:
                value = values[each.name]
            elif each.default is not each.empty:
                value = each.default
            else:
                raise UserCodeFailed(
                    f"{self._what} has a parameter {each.name!r}, and the data row has no such column, only "
                    f"{', '.join(name for name in values if name not in _TRLS) or 'none'}"
                )
            if each.kind is each.POSITIONAL_ONLY:
                positional.append(value)
            else:
                keywords[each.name] = value
        rest = values if self.in_lists and self._takes_rest else self._rest
        named = {each.name for each in self._named}
        return positional, keywords | {name: values[name] for name in rest if name not in named}


def _trl_values(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[str],
    rows: list[Mapping[str, Any]],
    token_ids: list[bytes],
) -> dict[str, Any]:
    """Return what TRL's trainers call a reward with: texts, or messages where the prompt is messages.

    Source: huggingface.co/docs/trl, "Using a custom reward function" of GRPOTrainer.
    """
    talks = [next((row[name] for name in ("prompt", "messages") if _is_talk(row.get(name))), None) for row in rows]
    pairs = list(zip(talks, prompts, responses, strict=True))
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    return {
        "ground_truth": ground_truths,
        **columns,
        "prompts": [text if talk is None else talk for talk, text, _ in pairs],
        "completions": [text if talk is None else [{"role": "assistant", "content": text}] for talk, _, text in pairs],
        "completion_ids": [array("i", tokens).tolist() for tokens in token_ids],
    }


def _is_talk(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _listed(value: Any, number: int, what: str) -> list[Any]:
    """Return the rewards of a function that is called with lists.

    Raises:
        UserCodeFailed: it returned no such list, or None for one, which is no reward.
    """
    try:
        values = list(value)
    except TypeError:
        values = []
    if len(values) != number or None in values:
        raise UserCodeFailed(
            f"{what} returned {reprlib.repr(value)} for {number} completions; return a list of as many numbers"
        )
    return values
