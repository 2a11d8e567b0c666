"""Whether a run's rollouts can be made, found out in a child before anything starts: an entry of `workers.calls`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.agents.other_model import OtherModel
from workers.agents.rendering import load_renderer
from workers.agents.tools import load_tools
from workers.agents.worker import load_rollout
from workers.calls.user_function import Callee


def usable(
    *,
    model_dir: str,
    renderer: str | None,
    function: str | None,
    agent: str | None,
    tools: Sequence[str],
    models: Mapping[str, Mapping[str, Any]],
) -> Callee:
    """Import the user's function, tools and renderer, and look for the keys of other models.

    Raises:
        ConfigError: one of them cannot be used, or the model's template ignores tools.
    """
    if function is not None or agent is not None:
        load_rollout(function, agent)
    for name, settings in models.items():
        OtherModel(name, settings)
    described = [tool.description for tool in load_tools(tools)]
    rendering = load_renderer(Path(model_dir), renderer)
    if renderer is None or ":" not in renderer:  # a class of the user's may know few words
        rendering.render([{"role": "user", "content": "?"}], described or None)
    return Callee(lambda: None)
