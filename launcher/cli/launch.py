"""`asyncflow-launch`: check everything, then start the run. No torch before the configuration is accepted.

AsyncFlow's own modules, except the errors, are imported inside functions, so that `--help` answers at once.
"""

import os
import sys
import time

import click

from launcher.request.exits import OneLineCommand, errors_as_exits, prepare_streams

EPILOG = """Without CONFIG the packaged quickstart runs, or with --resume the run's own configuration.
Exit codes: 0 done, 1 the run failed, 2 usage or configuration error, 75 stopped and resumable."""


@click.command(cls=OneLineCommand, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.argument("config", required=False)
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
@click.version_option(package_name="asyncflow-rl")
def launch(
    config: str | None,
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
) -> None:
    """Train a language model with asynchronous RL.

    CONFIG: a YAML file, or the name of a packaged recipe.
    """
    started_at = time.time()
    prepare_streams()
    from launcher.nodes.options import find_place
    from launcher.request.request import Request

    with errors_as_exits():
        place = find_place(nnodes, node_rank, head, os.environ)
        request = Request(
            config=config,
            roles=roles,
            overrides=overrides,
            run_dir=run_dir,
            resume=resume,
            steps=steps,
            place=place,
        )
        if not place.is_head and not dry_run:
            sys.exit(request.accept_node().start())
        accepted = request.accept_run()
        accepted.check_here()
        if dry_run:
            click.echo(accepted.describe())
            return
        exit_code = accepted.start(started_at)
    sys.exit(exit_code)


if __name__ == "__main__":
    launch()
