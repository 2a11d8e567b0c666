"""`asyncflow-launch`: check everything, then start the run. No torch before the configuration is accepted.

AsyncFlow's own modules, except the errors, are imported inside functions, so that `--help` answers at once.
"""

import os
import sys
import time
from collections.abc import Sequence

import click

from asyncflow.errors import ConfigError
from launcher.request.exits import OneLineCommand, errors_as_exits, prepare_streams

_SFT_QUICKSTART = "quickstart-sft-cpu"
EPILOG = "Exit codes: 0 done, 1 the run failed, 2 usage or configuration error, 75 stopped and resumable."


@click.command(cls=OneLineCommand, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.argument("config", nargs=-1, metavar="[sft] [CONFIG]")
@click.option(
    "--roles",
    metavar="R:N,...",
    help="Ranks per role, e.g. rollout:8,actor:4,ref:2; rollout+actor:8 share devices; auto:14 plans.",
)
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Repeatable.")
@click.option("--run-dir", metavar="DIR", help="Run directory.  [default: runs/NAME-TIMESTAMP]")
@click.option("--resume", metavar="latest|DIR", help="Continue a run, or from one of its checkpoints.")
@click.option("--steps", type=int, metavar="N", help="Number of the last step.")
@click.option(
    "--nnodes", type=int, metavar="N", help="Number of nodes; start the command on each.  [default: Slurm's, or 1]"
)
@click.option("--node-rank", type=int, metavar="K", help="This node, 0 to N-1.  [default: Slurm's]")
@click.option("--head", metavar="HOST[:PORT]", help="Node 0, as the others reach it.  [default: found by node 0]")
@click.option(
    "--dry-run", is_flag=True, help="Check configuration, model and data, print the placement, start nothing."
)
@click.option("--view", is_flag=True, help="Also show the run on a local page while it goes on; prints its address.")
@click.option("--control", is_flag=True, help="With --view: the page may also pause, save and stop the run.")
@click.option("--quiet", "-q", is_flag=True, help="Print warnings and the end only.")
@click.option(
    "--json-lines", is_flag=True, help="Print a JSON object per step, as in metrics.jsonl; all else on stderr."
)
@click.version_option(package_name="asyncflow-rl")
def launch(
    config: tuple[str, ...],
    *,
    roles: str | None,
    overrides: tuple[str, ...],
    run_dir: str | None,
    resume: str | None,
    steps: int | None,
    nnodes: int | None,
    node_rank: int | None,
    head: str | None,
    dry_run: bool,
    view: bool,
    control: bool,
    quiet: bool,
    json_lines: bool,
) -> None:
    """Train a language model with asynchronous RL.

    Use it to start a run, or to continue one (--resume). CONFIG: a YAML file, or the name of a packaged recipe; without
    it the packaged quickstart runs, or with --resume the run's own configuration. With sft in front of CONFIG, the run
    is supervised fine-tuning (algorithm.name sft), whose checkpoint an RL run can start from.
    """
    started_at = time.time()
    prepare_streams()
    with errors_as_exits():
        if quiet and json_lines:
            raise ConfigError("--quiet: says nothing of steps, and --json-lines prints them; give one of them")
        if control and not view:
            raise ConfigError("--control: gives the page its buttons, and there is no page; add --view")
        source, overrides = _source(config, overrides, resumes=resume is not None)
        from launcher.process.progress import Output

        output = Output.QUIET if quiet else Output.JSON if json_lines else Output.LINES
        from launcher.nodes.options import find_place

        place = find_place(nnodes, node_rank, head, os.environ)
        if place.is_head and not dry_run:
            output.say(f"asyncflow: reading {source or resume or 'the quickstart'}")
        from launcher.request.request import Request  # takes a second

        request = Request(
            config=source,
            roles=roles,
            overrides=overrides,
            run_dir=run_dir,
            resume=resume,
            steps=steps,
            place=place,
            say=(Output.QUIET if dry_run else output).say,
        )
        if not place.is_head and not dry_run:
            sys.exit(request.accept_node().start())
        accepted = request.accept_run()
        accepted.check_here()
        if dry_run:
            click.echo(accepted.describe())
            return
        exit_code = accepted.start(started_at, output, view=view, control=control)
    sys.exit(exit_code)


def _source(words: Sequence[str], overrides: tuple[str, ...], *, resumes: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return CONFIG, if it is given, and the overrides, with the one that `sft` in front of it stands for."""
    supervised = words[:1] == ("sft",)
    rest = words[supervised:]
    if len(rest) > 1:
        raise ConfigError(f"Got unexpected extra argument ({rest[1]}); see asyncflow-launch --help")
    if not supervised:
        return (rest[0] if rest else None), overrides
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "algorithm.name" and value != "sft":
            raise ConfigError(f"algorithm.name: {value}, but the word sft sets it to sft; remove one of them")
    default = None if resumes else _SFT_QUICKSTART
    return (rest[0] if rest else default), ("algorithm.name=sft", *overrides)


if __name__ == "__main__":
    launch()
