"""The process that looks: `python -m launcher.doctor.child DESCRIPTOR PARENT`, order on stdin, answers to DESCRIPTOR.

Its own output goes nowhere: libraries print. It may be killed at any time: it leaves nothing but what SIGTERM lets it
remove. Started by `launcher.doctor.runner` alone.
"""

import contextlib
import importlib
import os
import signal
import sys
from types import FrameType

from asyncflow.lifeline import die_with_parent
from launcher.doctor.checks import Check
from launcher.doctor.finding import Finding, reason
from launcher.doctor.messages import Answer, Found, Order, Resolved, decode_order, encode
from launcher.doctor.needs import Needs
from launcher.doctor.resolve import resolve


def main() -> None:
    """Carry out the order."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:3])
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(SystemExit):  # SIGTERM: what was made for a moment is removed
        _carry_out(decode_order(sys.stdin.buffer.read()), descriptor)
    os._exit(0)  # at once: an interpreter that ends by itself waits for the threads of what was tried


def _carry_out(order: Order, descriptor: int) -> None:
    first = resolve(order)
    _say(descriptor, first)
    if not isinstance(first, Resolved):
        return
    module, _, name = order.registry.partition(":")
    checks: dict[str, Check] = {check.name: check for check in getattr(importlib.import_module(module), name)}
    for wanted in order.checks:
        _say(descriptor, Found(wanted, tuple(run_check(checks[wanted], first.needs))))


def run_check(check: Check, needs: Needs) -> list[Finding]:
    """Run one check; what it raises is a finding, too."""
    try:
        return check.run(needs)
    except ImportError as error:
        text = f"this could not be checked without the package {error.name}"
        return [Finding.warning(check.name, text, "do first what `packages` says")]
    except Exception as error:  # noqa: BLE001 (a check's boundary: one that fails must not take the others along)
        text = f"this could not be checked ({reason(error)})"
        return [Finding.warning(check.name, text, "look at it by hand, and report what happened")]


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind, so that what was made for a moment is removed."""
    raise SystemExit(128 + number)


def _say(descriptor: int, answer: Answer) -> None:
    os.write(descriptor, encode(answer))


if __name__ == "__main__":
    main()
