"""Rewards in child processes: user functions, and built-in ones that may hang in native code. Torch-free."""

import http.client
import inspect
import json
import queue
import re
import reprlib
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry, converted
from workers.calls.user_function import Callee, excerpt, is_async, load_function
from workers.rewards.base import Response, Score, as_rewards, as_score
from workers.rewards.math import VerifiedMath
from workers.settings.rewards import RewardConfig

# What the child of a pooled reward calls: entries of `workers.calls`.
#
# A user's reward receives what its parameters name, in any order. Three conventions are known:
#
#     ours    prompt response ground_truth task num_tokens truncated turns      one response
#     verl's  data_source solution_str ground_truth extra_info                  one response, may be mixed with ours
#     TRL's   prompts completions completion_ids, columns of the data           lists; the function returns one, too
#
# A group function has `task` and `members`, TRL's names, or those of verl's batches. Any other parameter without a
# default is refused by name.

FIELD = "reward.function"
GROUP_FIELD = "reward.group_function"
_OURS = ("prompt", "response", "ground_truth", "task", "num_tokens", "truncated", "turns")
_VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRLS = ("prompts", "completions", "completion_ids")
_GROUPS = ("task", "members")
_VERLS_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_OF_ROWS = {"task", "data_source", "extra_info"}
# A function with none of these parameters does not see what it judges
_RESPONSES = {"response", "turns", "solution_str", "completions", "members", "solution_strs"}


class LastMatch:
    """Whether a regular expression's last match in a response (its first group, if any) is the ground truth, e.g.
    `reward: {function: regex, pattern: '<answer>(.*?)</answer>'}`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = compile_pattern(pattern)

    def __call__(self, response: str, ground_truth: str) -> bool:
        """Return whether there is a match that equals the ground truth up to surrounding space."""
        matches = list(self._pattern.finditer(response))
        if not matches:
            return False
        found = matches[-1]
        text = found.group(1) if self._pattern.groups else found.group()
        return text is not None and text.strip() == ground_truth.strip()


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Compile `reward.pattern`, with `.` matching newlines; raises ConfigError if it is missing or invalid."""
    if pattern is None:
        raise ConfigError(
            "reward.pattern: missing; reward.function regex compares what it finds: set it to an expression"
        )
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: {pattern!r} is not a regular expression: {error}; correct it") from error


def user_reward(name: str) -> Callee:
    """Import a user's reward function. It is sent the fields of a `Response`, in order. Raises ConfigError if it cannot
    be imported, or has an unknown parameter."""
    what = f"{FIELD}: {name}"
    called = _ByName(load_function(name, field=FIELD, arguments=None), what, (*_OURS, *_VERLS))

    def values(sent: Sequence[Any]) -> Mapping[str, Any]:
        prompt, response, ground_truth, task, num_tokens, truncated, token_ids, _ = sent
        row = json.loads(task) if called.needs_row else {}
        if called.in_lists:
            return _trl_values([prompt], [response], [ground_truth], [row], [token_ids])
        ours = (prompt, response, ground_truth, row, num_tokens, truncated, _turns(sent))
        verls = (row.get("data_source", ""), response, ground_truth, row.get("extra_info") or {})
        return dict(zip(_OURS, ours, strict=True)) | dict(zip(_VERLS, verls, strict=True))

    def score(value: Any, sent: Sequence[Any]) -> Score:
        if called.in_lists:
            (value,) = _listed(value, 1, what)
        return as_score(value, what=what, response=sent[1], num_turns=len(_turns(sent)))

    return Callee(called.function(values), gives=score)


def _turns(sent: Sequence[Any]) -> Sequence[Any]:
    """Return the turns of a response; one response to a prompt is one turn."""
    said = [{"role": "user", "content": sent[0]}, {"role": "assistant", "content": sent[1]}]
    return sent[-1] or [said]


def group_reward(name: str) -> Callee:
    """Import a user's group function; raises as `user_reward` does. It is sent (prompt, ground truth, data row,
    members, tokens of each)."""
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
    """Entry of `reward.function: regex`; in a child, since it may backtrack forever."""
    return _comparison(LastMatch(pattern))


def verified_math() -> Callee:
    """Entry of `reward.function: math_verify`; in a child, since it may compute forever."""
    return _comparison(VerifiedMath())


def _comparison(compare: LastMatch | VerifiedMath) -> Callee:
    return Callee(compare, takes=lambda sent: sent[1:3], gives=lambda right, _: Score(float(right), right))


class _ByName:
    """A user's function, called with what its parameters name; ConfigError if one is unknown, or none takes the
    response.

    Attributes:
        in_lists: it follows TRL's convention.
        needs_row: it reads the data row, which may be long.
    """

    def __init__(self, users: Callable[..., Any], what: str, known: Sequence[str]) -> None:
        self._users = users
        self._what = what
        may = f"{', '.join(dict.fromkeys(known))}, or as in TRL {', '.join(_TRLS)} and columns of the data"
        advice = f"parameters are found by their names, which may be {may}"
        try:
            parameters = inspect.signature(users).parameters.values()
        except (TypeError, ValueError) as error:  # C functions may not tell
            raise ConfigError(f"{what} has no readable signature; wrap it in a def; {advice}") from error
        self._named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
        names = {each.name for each in self._named}
        self.in_lists = bool(names.intersection(_TRLS))
        needed = [each.name for each in self._named if each.default is each.empty]
        unknown = [] if self.in_lists else [name for name in needed if name not in known]
        if unknown:
            raise ConfigError(f"{what} has a parameter {unknown[0]!r}; {advice}")
        if not names and not (self._takes_rest and len(parameters) == 1):  # a decorator without `functools.wraps`
            raise ConfigError(f"{what} takes {inspect.signature(users)}, whose parameters have no names; {advice}")
        if not names & _RESPONSES and not self._takes_rest:
            raise ConfigError(f"{what} does not take the response; {advice}")
        ours, verls = known[:-4], set(known[-4:]) - {"ground_truth"}
        # verl passes settings of its own through **kwargs.
        self._rest = ours if self._takes_rest and not names & verls else ()
        self.needs_row = self.in_lists or bool(_OF_ROWS.intersection(names, known) or _OF_ROWS.intersection(self._rest))

    def function(self, values: Callable[[Sequence[Any]], Mapping[str, Any]]) -> Callable[..., Any]:
        """Return a wrapper that is called with what was sent; async if the user's function is."""

        def call(*sent: Any) -> Any:
            positional, keywords = self._bind_values(values(sent))
            return self._users(*positional, **keywords)

        async def call_async(*sent: Any) -> Any:
            return await call(*sent)

        return call_async if is_async(self._users) else call

    def _bind_values(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
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
    """Return what TRL's trainers pass to a reward: texts, or messages if the prompt is messages. Source:
    huggingface.co/docs/trl, "Using a custom reward function" of GRPOTrainer."""
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
    """Return the rewards of a function that is called with lists."""
    try:
        values = list(value)
    except TypeError:
        values = []
    if len(values) != number or None in values:
        raise UserCodeFailed(
            f"{what} returned {reprlib.repr(value)} for {number} completions; return a list of as many numbers"
        )
    return values


CONCURRENCY = 4
"""Concurrent calls unless the configuration says otherwise."""
_ENTRIES = "workers.rewards.pooled"
_MEMORY_BYTES = 4 * 2**30  # a power tower in a response could otherwise take the machine's whole memory


class _RewardPool(CallPool):
    """A pool of children for a function of section `reward`, with its deadline and concurrency."""

    def __init__(self, config: RewardConfig, entry: Entry, what: str) -> None:
        most = config.concurrency or CONCURRENCY
        super().__init__(entry, what=what, limit="reward.timeout_s", timeout_s=config.timeout_s, concurrency=most)


class PooledReward(_RewardPool):
    """A reward function behind a pool of children. Thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config, _entry(config), f"reward.function: {config.function}")

    def score(self, one: Response) -> "Future[Score]":
        """Score one response; the future raises `UserCodeFailed` if there is no score."""
        pending = self.submit(*vars(one).values(), on=f"response {excerpt(one.response)}")

        def settled(done: "Future[Any]") -> Score:
            fields = done.result()
            return Score(**{**fields, "turn_rewards": tuple(fields["turn_rewards"])})

        return converted(pending, settled)

    def __call__(self, one: Response) -> Score:
        return self.score(one).result()


class GroupPool(_RewardPool):
    """`reward.group_function` behind a pool of children. Thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        name = config.group_function
        assert name is not None
        super().__init__(config, Entry(f"{_ENTRIES}:group_reward", {"name": name}), f"{GROUP_FIELD}: {name}")

    def reward(
        self,
        prompt: str,
        ground_truth: str,
        task: str,
        members: Sequence[Mapping[str, Any]],
        token_ids: Sequence[bytes],
    ) -> "Future[list[float]]":
        """Reward the members of a group (docs/rewards.md); the future raises `UserCodeFailed` if that fails. `task` and
        `token_ids` (per member): see `Response`."""
        on = f"{len(members)} responses to {excerpt(prompt)}"
        return self.submit(prompt, ground_truth, task, list(members), list(token_ids), on=on)


def _entry(config: RewardConfig) -> Entry:
    if config.function == "regex":
        return Entry(f"{_ENTRIES}:last_match", {"pattern": config.pattern}, _MEMORY_BYTES)
    if config.function == "math_verify":
        return Entry(f"{_ENTRIES}:verified_math", memory_bytes=_MEMORY_BYTES)
    return Entry(f"{_ENTRIES}:user_reward", {"name": config.function})


# A scorer behind HTTP (`reward.function: http://host:port/score`): responses are posted in batches as they finish.
#
#     -> {"samples": [{"prompt": "...", "response": "...", "ground_truth": "...", "task": {the data row},
#                      "num_tokens": 17, "truncated": false}, ...]}
#     <- {"scores": [1.0, {"reward": 0.5, "correct": false}, {"error": "no idea"}, ...]}         in the same order
#
# A request takes what is waiting, up to `reward.batch_size`, so batches grow when the scorer is busy. A failed request
# (no connection, a timeout, status 408, 429 or 5xx) is retried `reward.retries` times, after 0.5, 1, 2 ... s. If the
# reply to a batch is an error or malformed, its responses are sent one by one, so that a response that the scorer
# cannot handle costs only itself. A response that still has no score has no weight, and causes a warning.

_SENDERS = 8
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_MOST_BYTES = 2**26
_PIECE_BYTES = 2**16
_NO_PARTS = frozenset({"reward", "score", "error"})
_PASSING = frozenset({408, 429, *range(500, 600)})


@dataclass(frozen=True)
class _Waiting:
    sample: dict[str, Any]
    score: "Future[Score]"


class _BatchRefused(UserCodeFailed):
    """The scorer replied, but not with scores."""


class RemoteReward:
    """Posts responses to a scorer. Thread-safe: callers wait for their own."""

    def __init__(self, config: RewardConfig) -> None:
        check_url(config.function)
        self._config = config
        self._what = f"reward.function: {config.function}"
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._pause = threading.Event()  # never set; only for waiting
        for number in range(_SENDERS):
            threading.Thread(target=self._send_for_ever, name=f"remote-reward-{number}", daemon=True).start()

    def __call__(self, one: Response) -> Score:
        """Score one response; raises UserCodeFailed if the scorer gives no score for it."""
        fields = {**vars(one), "task": json.loads(one.task)}
        del fields["token_ids"], fields["turns"]
        waiting = _Waiting(fields, Future())
        self._waiting.put(waiting)
        return waiting.score.result()

    def _send_for_ever(self) -> None:
        while True:
            batch = [self._waiting.get()]
            try:
                while len(batch) < self._config.batch_size:
                    batch.append(self._waiting.get_nowait())
            except queue.Empty:
                pass
            self._score_batch(batch)

    def _score_batch(self, batch: list[_Waiting]) -> None:
        try:
            scores = self._fetch_scores([one.sample for one in batch])
        except _BatchRefused as error:
            if len(batch) == 1:
                batch[0].score.set_exception(error)
                return
            for one in batch:
                self._score_batch([one])
        except Exception as error:  # noqa: BLE001  boundary of a thread: the caller that waits for a score raises it
            for one in batch:
                one.score.set_exception(error)
        else:
            for one, value in zip(batch, scores, strict=True):
                self._settle_score(one, value)

    def _settle_score(self, one: _Waiting, value: Any) -> None:
        try:
            one.score.set_result(self._as_score(value, one.sample["response"]))
        except UserCodeFailed as error:
            one.score.set_exception(error)

    def _as_score(self, value: Any, response: str) -> Score:
        if isinstance(value, dict) and value.get("error") is not None:
            raise UserCodeFailed(f"{self._what} said {reprlib.repr(value['error'])}")
        if isinstance(value, dict) and "reward" in value:
            if not isinstance(correct := value.get("correct", False), bool):
                raise UserCodeFailed(f"{self._what} returned correct {reprlib.repr(correct)} instead of true or false")
            value = {"score": value["reward"]} | {name: part for name, part in value.items() if name not in _NO_PARTS}
        return as_score(value, what=self._what, response=response)

    def _fetch_scores(self, samples: list[dict[str, Any]]) -> list[Any]:
        """Return a value per response, retrying as configured; raises `_BatchRefused`, or UserCodeFailed without a
        connection."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            try:
                return self._post_samples(samples)
            except urllib.error.HTTPError as error:
                failure: UserCodeFailed = _BatchRefused(f"{self._what} answered {error.code} {error.reason}")
                error.close()
                if error.code not in _PASSING:
                    raise failure from None
            except (OSError, http.client.HTTPException) as error:
                failure = UserCodeFailed(f"{self._what} does not answer ({error}); check that it is running")
            if attempt < self._config.retries:
                self._pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise failure

    def _post_samples(self, samples: list[dict[str, Any]]) -> list[Any]:
        request = urllib.request.Request(
            self._config.function,
            data=json.dumps({"samples": samples}).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
        )
        deadline = time.monotonic() + self._config.timeout_s
        with urllib.request.urlopen(request, timeout=self._config.timeout_s) as reply:
            data = _read(reply, deadline)
        try:
            scores = json.loads(data)["scores"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _BatchRefused(f"{self._what} did not answer with an object with `scores`") from None
        if not isinstance(scores, list) or len(scores) != len(samples):
            raise _BatchRefused(f"{self._what} did not answer {len(samples)} samples with {len(samples)} scores")
        return scores


def _read(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body, up to the largest size, before a deadline for all of it (TimeoutError)."""
    # The socket's own timeout applies to each piece.
    data = bytearray()
    while len(data) < _MOST_BYTES and (piece := reply.read1(_PIECE_BYTES)):
        data += piece
        if time.monotonic() > deadline:
            raise TimeoutError("timed out in the middle of its answer")
    return bytes(data)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_url(name: str) -> None:
    """Raise ConfigError unless the URL has a valid host and port, and contains nothing that a request cannot carry."""
    try:
        parts = urlsplit(name)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")  # as address resolution will do
    except ValueError:
        usable = False
    if usable and (parts.username is not None or parts.fragment or not (name.isascii() and name.isprintable())):
        raise ConfigError(
            f"reward.function: {name!r} has what a request cannot carry: a user, a fragment, or characters other than "
            f"printable ASCII; leave those out, or write them as %XX"
        )
    usable = usable and " " not in name
    if not usable:
        raise ConfigError(f"reward.function: {name!r} is not a scorer's URL; write http://HOST:PORT/PATH")
