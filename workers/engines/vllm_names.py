"""Names that the rollout and its vLLM worker processes share. Without imports, since both sides read it."""

BACKEND = "asyncflow"
"""Of the weight transfer engine."""
WORKER_EXTENSION = "workers.engines.vllm_worker.AsyncFlowWorker"
