"""A server of a few lines that speaks OpenAI's chat completions, and fails as real ones do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from workers.settings.rollout import ServedModelConfig

SAID = {"choices": [{"message": {"role": "assistant", "content": "7/10", "refusal": None}, "finish_reason": "stop"}]}


class Judge:
    """Answers as `answers` says, the last one for ever; `asked`: (path, key, body)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, SAID)]
        self.asked: list[tuple[str, str | None, Any]] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.asked.append((self.path, self.headers["Authorization"], body))
                status, answer = judge.answers.pop(0) if len(judge.answers) > 1 else judge.answers[0]
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def served(self, **changed: Any) -> ServedModelConfig:
        url = f"http://127.0.0.1:{self.http.server_port}/v1"
        fields: dict[str, Any] = {"base_url": url, "model": "judge-7b", "api_key_variable": "JUDGE_KEY"}
        return ServedModelConfig(
            **{**fields, "options": {"temperature": 0}, "timeout_s": 20.0, "retries": 2, **changed}
        )

    def close(self) -> None:
        """Answer no more."""
        self.http.shutdown()
        self.http.server_close()
