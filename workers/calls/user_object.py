"""An object of a user's class in a child process, where it keeps its state between calls. Torch-free."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.settings import own_options
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, load_function


class UserObject:
    """The object, created once. Calls run one after the other.

    A failed call ends the run, since the child is gone or the object's state is in doubt.

    Args:
        name: `module:Class`.
        options: JSON arguments by name, validated by the class's `Config` if it has one.
        field, section: settings that hold the name and the options.
        methods: required methods -> their arguments, in words.
        timeout_s: deadline of a call (s), `data.timeout_s`.
        named: more arguments by name.

    Raises:
        ConfigError: no such class, or it refuses the options, raises, or lacks a method.
        UserCodeNotStarted: the process did not start, twice.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        field: str,
        section: str,
        methods: Mapping[str, Sequence[str]],
        timeout_s: float,
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.what = f"{field}: {name}"
        settings = {"name": name, "options": options, "field": field, "section": section, "methods": methods}
        self._pool = CallPool(
            Entry("workers.calls.user_object:made", {**settings, "named": dict(named)}),
            what=self.what,
            limit="data.timeout_s",
            timeout_s=timeout_s,
            concurrency=1,
        )
        self._pool.until_ready()

    def call_method(self, method: str, *arguments: Any, on: str) -> Any:
        """Call a method and wait; `on` describes the arguments in words. Raises UserCodeFailed if it raised, hung, or
        returned something that JSON cannot represent."""
        return self._pool.call_and_wait(method, arguments, on=on)

    def size(self) -> int | None:
        """Return its `len()`, or None without one; raises UserCodeFailed if it is 0 or fails."""
        size = self.call_method(_SIZE, on="len()")
        if size == 0:
            raise UserCodeFailed(f"{self.what} is empty: its len() is 0")
        return None if size is None else int(size)

    def close(self) -> None:
        self._pool.close()


_SIZE = "__len__"


def made(
    name: str,
    options: Mapping[str, Any],
    field: str,
    section: str,
    methods: Mapping[str, Sequence[str]],
    named: Mapping[str, Any],
) -> Callee:
    """Create the object in the child; the returned callee takes (method, arguments)."""
    kind = load_function(name, field=field, arguments=None)
    try:
        own = own_options(kind, options, name=name, section=section, named=named)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # e.g. a validator of its `Config`
        raise ConfigError(f"{section}: {name} raised {one_line(error)} when its options were checked") from error
    try:
        thing = kind(**named, **own)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field}: {name} raised {one_line(error)} when it was made") from error
    for method, arguments in methods.items():
        if not callable(getattr(thing, method, None)):
            raise ConfigError(f"{field}: {name} has no method {method}({', '.join(arguments)}); add it")

    def call(method: str, arguments: Sequence[Any]) -> Any:
        if method == _SIZE and not hasattr(thing, _SIZE):
            return None
        return getattr(thing, method)(*arguments)

    return Callee(call)
