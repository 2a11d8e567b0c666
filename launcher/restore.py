"""Takes a run that goes on back to its newest valid checkpoint, while the trainer's processes are not there."""

import logging
from pathlib import Path

from asyncflow.errors import AsyncFlowError
from asyncflow.job import Job
from launcher.resume import newest_checkpoint, rewind_run, rewind_to_start
from launcher.run_events import Restored, RestoreFailed

logger = logging.getLogger(__name__)


def restore_run(run_dir: Path, job: Job) -> tuple[Job, Restored | RestoreFailed]:
    """Cut the run's files back and write `job.json` for the next lineage.

    Nobody may write to the run's ledger, metrics and evaluations meanwhile.

    Returns:
        The job as it goes on (the same one when that failed), and what became of it.
    """
    try:
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is not None:
            rewind_run(checkpoint)
        elif job.resume_from:
            return job, RestoreFailed(f"no checkpoint in {run_dir} can be read any more; see logs/launcher.log")
        else:
            rewind_to_start(run_dir)
        source = "" if checkpoint is None else str(checkpoint.path)
        job = job.changed(lineage=job.lineage + 1, resume_from=source)
        job.save(run_dir)
    except (AsyncFlowError, OSError) as error:
        logger.exception("the run cannot go back to a checkpoint")
        return job, RestoreFailed(f"the run cannot go back to a checkpoint: {error}")
    return job, Restored(0 if checkpoint is None else checkpoint.step, job.lineage)
