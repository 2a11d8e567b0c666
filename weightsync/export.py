"""Writes versions of the weights as Hugging Face directories, which any engine can read."""

#     DIRECTORY/step_000012/              config, tokenizer, safetensors in the wire's element type, export.json
#     DIRECTORY/step_000003-lineage1/     after a restore
#     DIRECTORY/latest -> step_000012     always a complete one
#
#     newest version -> .export-ID.tmp/ -> fsync -> renamed -> `latest` replaced -> older ones removed -> engines told
#
# A kill at any point leaves the earlier exports and their `latest`. Every directory has its run's `export.json`; other
# directories are never touched. Any failure (a full disk, an engine that hangs) is a warning, and the run continues. It
# runs in a thread beside one node's weight agent, and knows no model, only names and tensors.

import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from asyncflow.errors import ConfigError, TransportError, WeightSyncError, one_line
from asyncflow.job import GLOO_INTERFACE, Job, interface_towards, is_loopback
from asyncflow.json_lines import sync
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.config import ExportConfig
from weightsync.messages import Reply
from weightsync.notify import Notifier
from weightsync.receiver import WeightReceiver
from weightsync.version import Version

# Weights for readers that the run does not wait for: processes outside of it, and the exporter.
#
#     job.json of the run directory -> the job's store and secret -> a channel to the weight agent of this node
#     -> the newest version, mapped and checked, as every generator of the run gets it
#
#     with connect_weights("runs/mine", "my-engine") as feed:
#         held = None
#         while feed.wait_newer(held, timeout_s=600):
#             held = feed.load(engine.load_weights, newer_than=held) or held
#
# It reads the agent's shared memory, so it needs the same host and user. It never writes to a run directory.

AGENT = "weights-0"
_ROLE = "weights"
# How often a wait checks whether the run is over (s).
_LOOK_S = 0.25


class WeightFeed(WeightReceiver):
    """All weights under the trainer's Hugging Face names, in host memory, for a reader outside the rollout.

    It takes no turn in `max_updating`, so a reader that hangs holds up no generator. Its waits also end, with False,
    when the run ends.

    Args:
        agent: name of this node's weight agent.
        name: of this reader.
        over: whether the run has ended.
    """

    def __init__(
        self, credentials: Credentials, agent: str, name: str, *, over: Callable[[], bool] = lambda: False
    ) -> None:
        self._over = over
        super().__init__(credentials, agent, name, None, device=torch.device("cpu"), best_effort=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_newer(self, version: Version | None, *, timeout_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until a version newer than `version` is ready for `load`; False: the run is over, or `stop` is set.

        Raises WeightSyncError, which says why, if none comes within `timeout_s`.
        """
        what = "weights" if version is None else f"weights newer than {version}"
        return self._wait_until(lambda: self._cache.has_newer(version), what, timeout_s=timeout_s, stop=stop)

    def _wait_until(
        self, wanted: Callable[[], bool], what: str, *, timeout_s: float, stop: threading.Event | None
    ) -> bool:
        return self._cache.wait(
            wanted,
            f"{self._name}: {what}",
            timeout_s=timeout_s,
            over=lambda: (stop is not None and stop.is_set()) or self._over(),
        )


def connect_weights(run_dir: Path | str, name: str, *, agent: str = AGENT, timeout_s: float = 10.0) -> WeightFeed:
    """Attach to a run that is running on this node.

    Args:
        name: of this process, for messages.
        agent: the weight agent of this node, `weights-N`.
        timeout_s: for the run and the agent to answer.

    Raises:
        ConfigError: nothing runs there, or the run has no such agent.
        WeightSyncError: the run is over, or its agent does not answer.
    """
    run_dir = Path(run_dir)
    job = Job.load(run_dir)
    agents = [gang.name for gang in job.of_role(_ROLE)]
    if agents and agent not in agents:
        raise ConfigError(f"weights: {run_dir} has no agent {agent!r}; it has {' '.join(agents)}")
    if not is_loopback(job.store_host):
        os.environ.setdefault(GLOO_INTERFACE, interface_towards(job.store_host))
    if not _store_answers(job, timeout_s):
        raise WeightSyncError(f"{name}: the run in {run_dir} is over, although its job.json is still there")
    try:
        store = connect_store(job.store_host, job.store_port, timedelta(seconds=timeout_s))
        credentials = Credentials(store, bytes.fromhex(job.secret), timeout_s)
        Connection(credentials, agent, name, Reply, timeout_s=timeout_s).close()
    except (TransportError, dist.DistError) as error:
        raise WeightSyncError(f"{name}: no weights from {agent} of the run in {run_dir} ({error})") from error
    return WeightFeed(credentials, agent, name, over=lambda: _is_over(run_dir, job))


def _is_over(run_dir: Path, job: Job) -> bool:
    """Whether the run that was attached to is gone; another one may have started in its directory."""
    try:
        return Job.load(run_dir).secret != job.secret or not _store_answers(job, _LOOK_S)
    except (ConfigError, OSError):
        return True


def _store_answers(job: Job, timeout_s: float) -> bool:
    """Whether a server listens at the store's address."""
    # A client of the store would retry for a long time, and print stack traces.
    try:
        socket.create_connection((job.store_host, job.store_port), timeout_s).close()
    except OSError:
        return False
    return True


logger = logging.getLogger(__name__)

# Writes safetensors files into a directory: (directory, shapes by name, the tensor of a name).
WriteWeights = Callable[[Path, Mapping[str, tuple[int, ...]], Callable[[str], Tensor]], None]
LATEST = "latest"
MARKER = "export.json"
_ID_FILE = "export-id"
_WAIT_S = 600.0


class WeightExporter:
    """Follows a feed and exports its versions in a thread, until `close`.

    Args:
        feed: of this node's weight agent; closed together with the exporter.
        copy_rest: creates the directory with everything but the weights: config, tokenizer.
        write_weights: writes the weights into it; its views are valid during the call.
    """

    def __init__(
        self,
        feed: WeightFeed,
        config: ExportConfig,
        run_dir: Path,
        *,
        copy_rest: Callable[[Path], None],
        write_weights: WriteWeights,
    ) -> None:
        self._feed = feed
        self._config = config
        self._run = _run_id(run_dir)
        self._root = (run_dir / config.directory).absolute()
        self._beside = self._root / f".export-{self._run}.tmp"
        self._copy_rest = copy_rest
        self._write_weights = write_weights
        self._seen: Version | None = None
        self._closing = threading.Event()
        self._notifier = Notifier(config.notify)
        self._thread = threading.Thread(target=self._follow_versions, name="weight-export", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Export the newest version unless it was exported or takes longer than `timeout_s`, and end; idempotent."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("weights: the last export to %s is incomplete; earlier exports stay", self._root)
        self._feed.close()
        self._notifier.close(max(0.0, deadline - time.monotonic()))

    def _follow_versions(self) -> None:
        while self._has_newer():
            newest = self._feed.newest
            assert newest is not None
            if newest.step % self._config.every:
                self._seen = newest
                continue
            try:
                self._export_version(newest)
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: the next version may do better
                self._seen = max(newest, self._seen or newest)
                shutil.rmtree(self._beside, ignore_errors=True)
                logger.warning(
                    "weights of %s: not exported to %s (%s); earlier exports stay",
                    newest,
                    self._root,
                    error if isinstance(error, OSError | SafetensorError) else one_line(error),
                )

    def _has_newer(self) -> bool:
        """Wait for a version to consider; False: closing, and there is none."""
        while True:
            try:
                return self._feed.wait_newer(self._seen, timeout_s=_WAIT_S, stop=self._closing)
            except WeightSyncError as error:
                logger.debug("export: %s", error)

    def _export_version(self, newest: Version) -> None:
        target = self._root / directory_name(newest)
        if self._exported_version(target) == newest:  # by an earlier process of this run
            self._seen = newest
            self._publish_directory(target, newest)
            return
        if target.exists():
            raise FileExistsError(f"{target.name} exists and was not exported by this run")
        shutil.rmtree(self._beside, ignore_errors=True)
        version = self._feed.load(self._fill, newer_than=self._seen)
        if version is None:
            return
        self._seen = version
        if version.step % self._config.every == 0:
            self._publish_directory(self._complete_directory(version), version)
        else:
            shutil.rmtree(self._beside, ignore_errors=True)

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._copy_rest(self._beside)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._write_weights(self._beside, shapes, weights.__getitem__)

    def _complete_directory(self, version: Version) -> Path:
        """Give the directory its final name, once all of it is on disk."""
        marker = {"run": self._run, "lineage": version.lineage, "step": version.step}
        (self._beside / MARKER).write_text(json.dumps(marker))
        # Contents first: after a crash the final name must not stand for an incomplete export.
        for path in (*self._beside.iterdir(), self._beside):
            sync(path)
        target = self._beside.rename(self._root / directory_name(version))
        sync(self._root)
        return target

    def _publish_directory(self, directory: Path, version: Version) -> None:
        # A symlink cannot be changed in place: rename another one over it, so that `latest` always exists.
        link = self._beside.with_suffix(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        link.replace(self._root / LATEST)
        sync(self._root)
        self._remove_older()
        logger.info("weights of %s: exported to %s", version, directory)
        self._notifier.tell(directory, version)

    def _remove_older(self) -> None:
        latest = (self._root / LATEST).resolve()
        exported = {path: self._exported_version(path) for path in self._root.glob("step_*")}
        ours = sorted((version, path) for path, version in exported.items() if version is not None)
        for _, path in ours[: -self._config.keep_last]:
            if path.resolve() != latest:
                # Rename first: an interrupted removal then leaves nothing that looks like an export.
                shutil.rmtree(path.rename(self._beside), ignore_errors=True)

    def _exported_version(self, directory: Path) -> Version | None:
        """Return which version this run exported to a directory; None: another run's, or a user's."""
        try:
            marker = json.loads((directory / MARKER).read_text())
            run, version = marker["run"], Version(marker["lineage"], marker["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # A copy that a user made (`step_000012_best`) has the marker, too, and must stay.
        ours = run == self._run and directory.name == directory_name(version)
        return version if ours else None


def directory_name(version: Version) -> str:
    """Return the name of a version's directory: `step_000012`, after a restore `step_000012-lineage1`."""
    return f"step_{version.step:06d}" + (f"-lineage{version.lineage}" if version.lineage else "")


def _run_id(run_dir: Path) -> str:
    """Return an id that tells this run from an earlier one in the same directory, and survives a resume."""
    path = run_dir / _ID_FILE
    if not path.is_file() or not path.read_text():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
