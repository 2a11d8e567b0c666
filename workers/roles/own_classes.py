"""Classes outside the package that a configuration names: imported, and their settings checked, before a run starts.

The launcher imports neither torch nor a user's module. `resolve` starts one child, of each interpreter that will import
some of them, which does so and returns the settings as each class's `Config` has them; a worker then imports its class
itself. Rewards, rollout functions, data sources and samplers are tried in children of their own. Torch-free.
"""

import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.registry import Registry
from asyncflow.settings import Settings, own_options
from tq.config import BACKENDS
from tq.policies import POLICIES, load_policy, policy_name
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, check_function, load_class, search_beside
from workers.settings.algorithms import NAMES as ALGORITHMS
from workers.settings.algorithms import OutsideConfig
from workers.settings.engines import REF_ENGINES, TRAIN_ENGINES
from workers.settings.rollout import ENGINES
from workers.settings.run import LOGGERS, LoggerConfig, RunConfig

# Section -> valid values of its `engine`.
_ENGINES = {"rollout": ENGINES, "evaluate": ENGINES, "actor": TRAIN_ENGINES, "ref": REF_ENGINES}
_BACKEND = "tq.backend"
_TIMEOUT_S = 60.0


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the defaults of outside classes, checked by them. Raises ConfigError if one does
    not exist, cannot be used, or refuses a setting."""
    for number, logger in enumerate(config.loggers):
        if logger.name in LOGGERS.built_in:
            _logger_options(number, logger)
    if policy_name(config.tq.policy) in POLICIES.built_in:
        check_policy(config)
    outside = _outside(config)
    if not outside:
        return config
    search_beside(config.code_directory)
    # Only the settings that were given: the class may have other defaults.
    algorithm = config.algorithm.model_dump(mode="json", exclude_unset=True)
    by_python: dict[str | None, list[tuple[str, str]]] = {}
    for field, _, name in outside:
        by_python.setdefault(_interpreter(field, config), []).append((field, name))
    found: dict[str, Any] = {}
    for python, named in by_python.items():
        settings = {
            "run": config.model_dump(mode="json"),
            "algorithm": algorithm,
            "fields": [field for field, _ in named],
        }
        pool = CallPool(
            Entry("workers.roles.own_classes:resolving", settings, python=python),
            what=", ".join(f"{field}: {name}" for field, name in named),
            limit="the deadline",
            timeout_s=_TIMEOUT_S,
            concurrency=1,
        )
        try:
            pool.until_ready()
            found |= pool.call_and_wait(on="its settings")
        except UserCodeFailed as error:
            raise ConfigError(str(error)) from error
        finally:
            pool.close()
    return _with(config, found)


def _interpreter(field: str, config: RunConfig) -> str | None:
    """Return the interpreter of the role that imports the class; None: the launcher's."""
    section = field.partition(".")[0]
    role = {"algorithm": "actor", "ref": "ref" if "ref" in config.roles else "actor_fwd"}.get(section, section)
    return config.launcher.interpreter_here(role)


def resolving(run: Mapping[str, Any], algorithm: Mapping[str, Any], fields: Collection[str]) -> Callee:
    """Import the classes that these settings name, and check their settings, in the child; raises as `resolve`. The
    callee returns section -> settings."""
    config = RunConfig.model_validate(run)
    found: dict[str, Any] = {}
    for field, registry, name in _outside(config):
        if field not in fields:
            continue
        try:
            found |= _settings_of(field, registry, name, config, algorithm)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(f"{field}: {name} raised {one_line(error)} ({at.filename}:{at.lineno})") from error
    return Callee(lambda: found)


def _settings_of(
    field: str, registry: Registry, name: str, config: RunConfig, algorithm: Mapping[str, Any]
) -> dict[str, Any]:
    """Return section -> settings of a class, if the configuration stores them."""
    section = field.partition(".")[0]
    if section == "algorithm":
        from workers.algorithms.load_algorithm import outside_algorithm, outside_tasks, try_algorithm

        kind, own = outside_algorithm(name, algorithm)
        run = config.model_copy(update={"algorithm": own})
        _check_run(own, run)
        # A group size that is too small for the algorithm is refused later, with the other sizes.
        group_size = max(config.schedule.n_samples_per_prompt, own.min_group_size)
        tasks = outside_tasks(name, own, old_log_probs=run.needs_old_log_probs)
        made = try_algorithm(name, kind, own, run.rollout, tasks=tasks, group_size=group_size)
        found = {
            "name": name,
            "dataflow": [asdict(task) for task in tasks],
            "needs_group_size": own.min_group_size,
            "needs_whole_step": bool(made.whole_step),
        }
        return {section: own.model_dump(mode="json") | found}
    if registry is BACKENDS:
        from tq.backends.backend import backend_class, backend_options

        check_function(name, field=field)
        return {_BACKEND: to_jsonable_python(backend_options(config.tq.backend, backend_class(name)))}
    if section == "tq":
        check_function(name, field=field)
        check_policy(config)
        return {}
    if section == "loggers":
        number = int(field.split(".")[1])
        return {f"loggers.{number}": to_jsonable_python(_logger_options(number, config.loggers[number]))}
    from workers.engines.load_engine import outside_engine

    given = getattr(config, section).engine_options
    # A reference without a role of its own sleeps with the actor.
    hosted = section == "ref" and "ref" not in config.roles and config.algorithm.kl_coef > 0
    sleeps = section in config.colocated or (hosted and config.is_colocated)
    kind, options = outside_engine(registry, section, name, given, sleeps=sleeps)
    if registry.group == ENGINES.group and config.sends_adapter and not getattr(kind, "takes_adapters", False):
        raise ConfigError(
            f"weightsync.lora: adapter cannot be used with {section}.engine {name}, whose class does not say "
            f"`takes_adapters = True` (docs/engines.md); set weightsync.lora to merged"
        )
    _check_run(options, config)
    return {section: options.model_dump(mode="json")}


def _logger_options(number: int, logger: LoggerConfig) -> dict[str, Any]:
    field = f"loggers.{number}"
    kind = load_class(
        LOGGERS.locate_class(logger.name), field=f"{field}.name", methods=("log", "show", "rewind", "close")
    )
    return own_options(kind, logger.options, name=logger.name, section=f"{field}.options", first=(None,))


def _with(config: RunConfig, found: Mapping[str, Any]) -> RunConfig:
    update: dict[str, Any] = {}
    for section in _ENGINES.keys() & found.keys():
        update[section] = getattr(config, section).model_copy(update={"engine_options": found[section]})
    if "algorithm" in found:
        update["algorithm"] = OutsideConfig.model_validate(found["algorithm"])
    if _BACKEND in found:
        backend = config.tq.backend.model_copy(update={"options": found[_BACKEND]})
        update["tq"] = config.tq.model_copy(update={"backend": backend})
    options = [found.get(f"loggers.{number}", logger.options) for number, logger in enumerate(config.loggers)]
    pairs = zip(config.loggers, options, strict=True)
    update["loggers"] = tuple(logger.model_copy(update={"options": own}) for logger, own in pairs)
    return config.model_copy(update=update)


def check_policy(config: RunConfig) -> None:
    """Raise ConfigError for a policy that cannot be made, or that chooses among rows in a run that must not depend on
    timing."""
    try:
        policy = load_policy(config.tq.policy)
    except ConfigError as error:
        raise ConfigError(f"tq.policy: {error}") from error
    if config.deterministic and getattr(policy, "window", 1) > 1:
        raise ConfigError(
            f"tq.policy: {config.tq.policy} cannot be used with deterministic: true, since it chooses among the rows "
            f"that are ready; add window=1 to it, or set deterministic to false"
        )


def _outside(config: RunConfig) -> list[tuple[str, Registry, str]]:
    """Return setting, registry and `module:Class` of every outside class that a run imports."""
    named = [
        ("algorithm.name", ALGORITHMS, config.algorithm.name),
        *((f"{section}.engine", registry, getattr(config, section).engine) for section, registry in _ENGINES.items()),
        ("tq.policy", POLICIES, policy_name(config.tq.policy)),
        ("tq.backend.kind", BACKENDS, config.tq.backend.kind),
        *((f"loggers.{number}.name", LOGGERS, logger.name) for number, logger in enumerate(config.loggers)),
    ]
    return [(field, registry, name) for field, registry, name in named if name not in registry.built_in]


def _check_run(settings: Settings, config: RunConfig) -> None:
    check = getattr(settings, "check", None)
    if check is not None:
        check(config)
