"""`asyncflow doctor` on the terminal: a line per finding as it comes, or JSON at the end."""

import time

import click

from launcher.doctor.finding import Finding, Level
from launcher.doctor.messages import Order
from launcher.doctor.runner import examine
from launcher.doctor.view import as_json, as_text, failed, summary

_COLOURS = {Level.OK: None, Level.WARNING: "yellow", Level.ERROR: "red"}


def print_report(order: Order, *, json: bool) -> bool:
    """Run all checks and print what they find; returns whether a run would fail.

    Args:
        order: what the user gave.
        json: print one JSON object at the end.

    Raises:
        ConfigError: the user's input cannot be used.
    """
    began = time.monotonic()
    findings: list[Finding] = []
    for finding in examine(order):
        findings.append(finding)
        if not json:
            click.secho(as_text(finding), fg=_COLOURS[finding.level])
    seconds = time.monotonic() - began
    click.echo(as_json(findings, seconds) if json else summary(findings, seconds))
    return failed(findings)
