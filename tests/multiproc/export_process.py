"""An exporter in a process of its own, to be killed: stops for good in the middle of its second export.

python export_process.py RUN_DIR MODEL_DIR    prints "first" during the first, "half" during the second
"""

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from torch import Tensor

from weightsync.config import ExportConfig
from weightsync.export import WeightExporter, connect_weights
from workers.engines.hf.weights import copy_without_weights, write_weights


def main(run_dir: Path, model_dir: Path) -> None:
    exports = count(1)

    def write(target: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
        if next(exports) == 1:
            write_weights(target, shapes, read)
            print("first", flush=True)
            return
        write_weights(target, dict(list(shapes.items())[:2]), read)
        print("half", flush=True)
        threading.Event().wait()

    feed = connect_weights(run_dir, "export")
    copy_rest = partial(copy_without_weights, model_dir)
    WeightExporter(feed, ExportConfig(), run_dir, copy_rest=copy_rest, write_weights=write)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
