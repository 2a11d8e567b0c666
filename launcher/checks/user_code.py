"""Users' own code before a start: its names, its imports, and one trial call of each function.

Each function is imported as in the run, in a child process. Rewards are called once, with the first prompt and its own
ground truth as the response: a reward that cannot score that would fail on every response of the run. The call has the
configured deadline; a scorer behind a URL is not called. One of the user's own rollouts runs with a policy that replies
with the ground truth.
"""

import logging
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
from msgspec.structs import replace

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.agents.wire import Setup
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import check_function
from workers.data.prompt_rows import PromptRow, ShownPrompt
from workers.rewards.base import Response
from workers.rewards.group_filter import ARGUMENTS as FILTER_ARGUMENTS
from workers.rewards.group_filter import FIELD as FILTER
from workers.rewards.load_reward import check_reward
from workers.rewards.pooled import GroupPool, PooledReward, is_url
from workers.settings.algorithms import ZERO_VARIANCE
from workers.settings.data import DataConfig
from workers.settings.openai import UPDATE_ARGUMENTS
from workers.settings.rollout import FUNCTIONS, of_rollout
from workers.settings.run import RunConfig, key_of_set
from workers.tasks.row import ARGUMENTS

logger = logging.getLogger(__name__)

_TRIAL_S = 60.0
"""Longest time of the trial rollout (s); one that exceeds it is not judged, unless the run's own limit is as short."""
_TRIAL_TURNS = 16


Roles = Callable[[str], bool]
"""Whether a role's processes, and with them its functions, have this interpreter."""


def all_roles(role: str) -> bool:
    return True


def users_functions(config: RunConfig, here: Roles) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield setting, name and arguments of the user's functions that are called with what AsyncFlow made."""
    for number, task in enumerate(config.tasks):
        if here(task.own_role if task.own_role in config.roles else task.host):
            yield f"tasks.{number}.function", task.function, ARGUMENTS
    if config.rollout.engine == "openai" and config.openai.update != "vllm" and here("rollout"):
        yield "openai.update", config.openai.update, UPDATE_ARGUMENTS
    if config.algorithm.group_filter not in (None, ZERO_VARIANCE) and here(_scoring_role(config)):
        yield FILTER, str(config.algorithm.group_filter), FILTER_ARGUMENTS


def _scoring_role(config: RunConfig) -> str:
    """Return the role that scores what is trained; evaluators score their own responses."""
    return "reward" if "reward" in config.roles else "rollout"


def _any_here(config: RunConfig, here: Roles, *roles: str) -> bool:
    return any(role in config.roles and here(role) for role in roles)


def check_names(config: RunConfig, here: Roles = all_roles) -> None:
    """Check that each function, class and program that a setting names exists; imports nothing of it."""
    if _any_here(config, here, _scoring_role(config), "evaluate"):
        check_reward(config.reward)
    for key, name, _ in users_functions(config, here):
        check_function(name, field=key)
    own = config.rollout
    if not (own.is_own and _any_here(config, here, "rollout", "evaluate")):
        return
    for key, function in (("rollout.function", own.function), ("rollout.agent", own.agent)):
        if function is not None and function not in FUNCTIONS.built_in:
            check_function(function, field=key)
    for tool in own.tools:
        check_function(tool, field="rollout.tools")
    if own.agent_command and shutil.which(own.agent_command[0]) is None:
        raise ConfigError(
            f"rollout.agent_command: there is no program {own.agent_command[0]!r}; name one that can be run"
        )


def check_rollout_code(config: RunConfig, here: Roles = all_roles) -> None:
    """Import the user's functions in a child, as the run will; warn about what the renderer lacks.

    Raises:
        ConfigError: a function cannot be used, or the model's chat template ignores tools.
    """
    own = config.rollout
    if not (own.is_own and _any_here(config, here, "rollout", "evaluate")):
        return
    entry = Entry("workers.agents.agent_checks:usable", {"setup": msgspec.to_builtins(_setup(config))})
    pool = CallPool(entry, what="rollout", limit="", timeout_s=60.0, concurrency=1)
    try:
        pool.until_ready()
        for what in pool.call_and_wait(on="the renderer"):
            then = "each turn begins a new sample" if what.startswith("bridge") else "the policy's calls stay text"
            logger.warning("model.renderer: %s cannot %s: %s", config.model.renderer or "the template", what, then)
    finally:
        pool.close()


def try_users_code(
    config: RunConfig, row: PromptRow | None, shown: ShownPrompt | None, here: Roles = all_roles
) -> None:
    """Import and call the user's functions, as the run will; raises ConfigError.

    `row`, `shown`: see `launcher.checks.environments.RowsToCheck`.
    """
    try_functions(config, here)
    if row is not None and shown is not None and _any_here(config, here, _scoring_role(config), "evaluate"):
        try_rewards(config, row, shown)
    if row is not None and _any_here(config, here, "rollout", "evaluate"):
        try_rollout(config, row)


def try_functions(config: RunConfig, here: Roles = all_roles) -> None:
    """Import the functions of user-defined tasks, of weight updates and of group filters; raises ConfigError."""
    # In children, not read as source: what the import says is what the run will say.
    pools = [_importing(*each) for each in users_functions(config, here)]  # all start at once
    try:
        for pool in pools:
            pool.until_ready()
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        for pool in pools:
            pool.close()


def try_rewards(config: RunConfig, row: PromptRow, shown: ShownPrompt) -> None:
    """Call the reward function and the group reward function once, if they are the user's.

    Args:
        row, shown: the first prompt, as the data has it and as the model gets it.

    Raises:
        ConfigError: one cannot be imported, raised, hung, or returned something that is not a reward.
    """
    text, length = row.ground_truth, len(row.ground_truth)  # in characters: there is no tokenizer here
    one = Response(shown.text, text, text, row.task, length, token_ids=array("i", [0] * length).tobytes())
    try:
        if config.reward.is_users and not is_url(config.reward.function):
            with closing(PooledReward(config.reward)) as reward:
                reward.until_ready()
                reward(one)
        if config.reward.group_function is not None and "rollout" in config.roles:  # evaluators do not call it
            size = config.schedule.n_samples_per_prompt
            with closing(GroupPool(config.reward)) as group:
                group.until_ready()
                member = {"response": text, "reward": 1.0, "correct": True, "num_tokens": length, "truncated": False}
                member |= {"metrics": {}, "conversations": []}
                group.reward(one.prompt, text, one.task, [member] * size, [one.token_ids] * size).result()
    except UserCodeFailed as error:
        raise ConfigError(
            f"{error} (a trial call with {row.describe_place(_tried_data(config))}: its prompt, and its ground truth "
            f"as the response); correct the function: it must score any response"
        ) from error


def _tried_data(config: RunConfig) -> DataConfig:
    """Return the data whose first row rewards are tried with: held-out prompts if no others are answered."""
    if "rollout" in config.roles:
        return config.data
    name, first = next(iter(config.evaluate.named_sets().items()))
    return first.prompts(config.data, key=key_of_set(name))


def try_rollout(config: RunConfig, row: PromptRow) -> None:
    """Run one of the user's rollouts, with its processes and all; every reply is the row's ground truth.

    Raises:
        ConfigError: it failed and `rollout.on_failure` tolerates no failures, or nothing can score it.
    """
    own, what = config.rollout, config.rollout.own_name
    if not (own.is_own and own.trial):
        return
    limit_s = min(own.timeout_s, _TRIAL_S)
    setup = replace(
        _setup(config),
        timeout_s=limit_s,
        max_turns=min(own.max_turns or _TRIAL_TURNS, _TRIAL_TURNS),
        max_attempts=1,
        num_workers=1,
        tells_turns=False,
    )
    place = row.describe_place(_tried_data(config))
    about = f"(a trial rollout of {place}, whose every reply is its ground truth)"
    entry = Entry("workers.agents.agent_checks:trial", {"setup": msgspec.to_builtins(setup)})
    pool = CallPool(entry, what=what, limit="the deadline", timeout_s=limit_s + _TRIAL_S, concurrency=1)
    try:
        pool.until_ready()
        began = time.monotonic()
        found = pool.call_and_wait(row.task, row.ground_truth, on=place)
        late = time.monotonic() - began >= limit_s
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()
    if late and own.timeout_s > limit_s:
        logger.warning("%s: a trial rollout did not end within %g s; the run continues without it", what, limit_s)
    elif failed := found["failed"]:
        if own.on_failure != "dead_letter":
            logger.warning(
                "%s %s; the run continues: rollout.on_failure is %s", of_rollout(what, failed), about, own.on_failure
            )
            return
        raise ConfigError(
            f"{of_rollout(what, failed)} {about}; correct it: it must handle any reply; or set rollout.trial to false"
        )
    elif not (found["has_reward"] or found["truncated"] or row.ground_truth.strip() or _is_scored_otherwise(config)):
        raise ConfigError(
            f"{what}: gave no reward, and the row has no ground truth for reward.function {config.reward.function} to "
            f"compare with {about}; return a reward, or name data.ground_truth_field"
        )


def _setup(config: RunConfig) -> Setup:
    return Setup.from_config(config, max_context=0, max_response_tokens=config.rollout.max_response_tokens)


def _is_scored_otherwise(config: RunConfig) -> bool:
    return config.reward.is_users or config.reward.group_function is not None


def _importing(field: str, name: str, arguments: tuple[str, ...]) -> CallPool:
    settings = {"name": name, "field": field, "arguments": arguments}
    entry = Entry("workers.calls.user_function:importable", settings)
    return CallPool(entry, what=f"{field}: {name}", limit="the deadline", timeout_s=1.0, concurrency=1)
