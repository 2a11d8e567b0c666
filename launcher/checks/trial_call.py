"""Users' functions, tried before a run starts: each is imported as in the run, in a child process. The reward is called
once, with the first prompt and its own answer as the response.

A reward that cannot score that would fail on every answer of the run. It has the configured deadline; a scorer behind
a URL is not called. Called by the command line alone.
"""

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.config import RunConfig
from workers.data.prompt_check import ShownPrompt
from workers.data.prompt_rows import PromptRow
from workers.engines.openai.config import UPDATE_ARGUMENTS
from workers.rewards.pooled import PooledReward
from workers.rewards.remote import is_url
from workers.tasks.row import ARGUMENTS


def try_functions(config: RunConfig) -> None:
    """Import the functions of users' tasks, and the one that has servers take new weights.

    Raises:
        ConfigError: one cannot be imported, or does not take its arguments.
    """
    named = [(f"tasks.{number}.function", task.function, ARGUMENTS) for number, task in enumerate(config.tasks)]
    if config.rollout.engine == "openai" and config.openai.update != "vllm":
        named.append(("openai.update", config.openai.update, UPDATE_ARGUMENTS))
    pools = [_importing(*each) for each in named]  # side by side
    try:
        for pool in pools:
            pool.until_ready()
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        for pool in pools:
            pool.close()


def try_reward(config: RunConfig, row: PromptRow, shown: ShownPrompt) -> None:
    """Call the reward function once, if it is the user's.

    Args:
        config: of the run.
        row, shown: the first prompt, as the data has it and as the model gets it.

    Raises:
        ConfigError: it cannot be imported, or raised, hung, or returned what is no reward.
    """
    if not config.reward.is_users or is_url(config.reward.function):
        return
    reward = PooledReward(config.reward)
    try:
        reward.until_ready()
        reward(shown.text, row.ground_truth, row.ground_truth)
    except UserCodeFailed as error:
        raise ConfigError(
            f"{error} (a trial call with {config.data.path}:{row.line}: its prompt, and its answer as the response); "
            f"correct the function: it must score any response"
        ) from error
    finally:
        reward.close()


def _importing(field: str, name: str, arguments: tuple[str, ...]) -> CallPool:
    settings = {"name": name, "field": field, "arguments": arguments}
    entry = Entry("workers.calls.user_function:importable", settings)
    return CallPool(entry, what=f"{field}: {name}", limit="the deadline", timeout_s=1.0, concurrency=1)
