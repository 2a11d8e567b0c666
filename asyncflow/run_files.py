"""The names of what a run keeps in its directory, for launcher, workers and tools alike. Torch-free.

config.yaml  plan.json  metrics.jsonl  ledger.jsonl  updates.jsonl  evaluation.jsonl  sampler.jsonl  feed.jsonl
logs/ROLE/RANK.log  checkpoints/step_000010/meta.json  samples/  timeline/  loggers/  report.html
job.json  status.json  while it runs; end.json  after that
"""

CONFIG_FILE = "config.yaml"
"""The resolved configuration."""
PLAN_FILE = "plan.json"
"""What `--roles auto:N` chose, and predicted."""
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.jsonl"
UPDATES_FILE = "updates.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
SAMPLER_FILE = "sampler.jsonl"
"""Which tasks `data.sampler` drew, and its state."""
FEED_FILE = "feed.jsonl"
"""The rows that processes outside fed."""
JOB_FILE = "job.json"
"""Where the job store is, and its secret: see `asyncflow.job`."""
STATUS_FILE = "status.json"
"""What `asyncflow status` shows."""

END_FILE = "end.json"
"""How the run's last start ended; see `launcher.run.status.RunEnd`."""

LOGS = "logs"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
TIMELINE = "timeline"
LOGGERS = "loggers"
"""How far each logger is, and what loggers write on this machine."""
REPORT_FILE = "report.html"

META_FILE = "meta.json"
"""In each checkpoint: written last, with size and checksum of every other file."""
