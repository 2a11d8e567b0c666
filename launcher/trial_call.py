"""One call of the user's reward before a run starts: with the first prompt, and its own answer as the response.

A function that cannot score that would fail on every answer of the run. It is called as in the run, in a child process
with the configured deadline; a scorer behind a URL is not called. Called by the command line alone.
"""

from pathlib import Path

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.chat_template import ChatTemplate
from workers.config import DataConfig, RunConfig
from workers.data import PromptRow, conversation, plain_text
from workers.rewards.pooled import PooledReward
from workers.rewards.remote import is_url


def try_reward(config: RunConfig, row: PromptRow) -> None:
    """Call the reward function once, if it is the user's.

    Args:
        config: of the run.
        row: of its data.

    Raises:
        ConfigError: it cannot be imported, or raised, hung, or returned what is no reward.
    """
    if not config.reward.is_users or is_url(config.reward.function):
        return
    reward = PooledReward(config.reward)
    try:
        reward.until_ready()
        reward(_prompt_text(row, config.data, Path(config.model.path)), row.answer, row.answer)
    except UserCodeFailed as error:
        raise ConfigError(
            f"{error} (a trial call with {config.data.path}:{row.line}: its prompt, and its answer as the response); "
            f"correct the function: it must score any response"
        ) from error
    finally:
        reward.close()


def _prompt_text(row: PromptRow, config: DataConfig, model_dir: Path) -> str:
    """Return what the function gets as the prompt, but for special tokens of a chat template."""
    template = ChatTemplate.load(model_dir) if config.chat_template else None
    return plain_text(row.prompt, config) if template is None else template.render(conversation(row.prompt, config))
