"""Whether a run's rollouts can be made, found out in a child before anything starts: an entry of `workers.calls`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.agents.other_model import OtherModel
from workers.agents.rendering import load_renderer, prove
from workers.agents.tools import load_tools
from workers.agents.worker import load_rollout
from workers.calls.user_function import Callee
from workers.data.tokenizer import load_tokenizer


def usable(
    *,
    model_dir: str,
    renderer: str | None,
    template_time: str | None,
    function: str | None,
    agent: str | None,
    tools: Sequence[str],
    models: Mapping[str, Mapping[str, Any]],
) -> Callee:
    """Import the user's function, tools and renderer, and look for the keys of other models.

    Returns what says, in words, what the renderer cannot do.

    Raises:
        ConfigError: one of them cannot be used, or the model's template ignores tools.
    """
    given = load_tools(tools)
    if function is not None or agent is not None:
        environment = getattr(load_rollout(function, agent), "__self__", None)
        given += getattr(environment, "tools", ())
    for name, settings in models.items():
        OtherModel(name, settings)
    described = [tool.description for tool in given]
    rendering = load_renderer(Path(model_dir), renderer, template_time)
    missing: list[str] = []
    if renderer is None or ":" not in renderer:  # a class of the user's may know few words
        missing = prove(rendering, load_tokenizer(Path(model_dir)), described or None)
    return Callee(lambda: missing)
