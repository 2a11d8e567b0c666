"""A server of a few lines that speaks OpenAI's completions API as vLLM does, and fails as real ones do."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = Callable[[BaseHTTPRequestHandler, Body], None]


class CompletionsServer:
    """Answers completions as `answer` says, takes weights, and notes what was asked.

    Attributes:
        bodies, paths, keys: of the requests for completions; of all requests; the keys of those without a body.
        mark: version of the weights, as vLLM keeps it.
        adapters: name -> directory, as vLLM's server has them; requests for other models than these and `served` are
            refused.
        away: the next request finds its connection closed.
        paused: it was asked to pause.
        slow_s, closed: how long it takes over weights, unless it is closed meanwhile.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.closed = threading.Event()
        self.away = threading.Event()
        self.mark = "default"
        self.adapters: dict[str, str] = {}
        self.slow_s = 0.0
        self.paused = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.paths.append(self.path)
                fake.keys.append(self.headers["Authorization"])
                listed = {"data": [{"id": name} for name in ("served", *fake.adapters)]}
                reply(self, 200, {"weight_version": fake.mark} if self.path == "/weight_info" else listed)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.paths.append(self.path)
                if fake.away.is_set():
                    fake.away.clear()
                    self.connection.close()
                    return
                if self.path.endswith("load_lora_adapter"):
                    self.take_adapter(body)
                    return
                if self.path == "/v1/completions" and body["model"] not in ("served", *fake.adapters):
                    reply(self, 404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
                    return
                if self.path != "/v1/completions":
                    if self.path.startswith("/pause"):
                        fake.paused.set()
                    fake.closed.wait(fake.slow_s)
                    fake.mark = body.get("new_version", fake.mark)
                    reply(self, 404 if fake.closed.is_set() else 200, {"path": self.path})
                    return
                fake.bodies.append(body)
                fake.answer(self, body)

            def take_adapter(self, body: Body) -> None:
                name, there = body["lora_name"], body["lora_name"] in fake.adapters
                if self.path == "/v1/load_lora_adapter" and not there and not fake.closed.is_set():
                    fake.adapters[name] = body["lora_path"]
                elif self.path == "/v1/unload_lora_adapter" and there:
                    del fake.adapters[name]
                else:
                    reply(self, 404 if fake.closed.is_set() else 400, {"error": {"message": "no"}})
                    return
                reply(self, 200, {})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self.http.shutdown()
        self.http.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def stream(parts: list[list[int]], *, reason: str | None = "stop", ids: bool = True, log_prob: float = -0.5) -> Answer:
    """Return what streams tokens in parts, with the same log-probability each."""

    def answer(handler: BaseHTTPRequestHandler, body: Body) -> None:
        handler.send_response(200)
        handler.end_headers()
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            choice = {
                "logprobs": {"token_logprobs": [log_prob] * len(part)},
                "finish_reason": reason if last else None,
                "token_ids": part if ids else None,
            }
            handler.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        handler.wfile.write(b"data: [DONE]\n\n")

    return answer


def events(*lines: str) -> Answer:
    """Return what streams lines as they are."""

    def answer(handler: BaseHTTPRequestHandler, body: Body) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Return what does one after the other, and the last for ever."""
    left = list(answers)

    def answer(handler: BaseHTTPRequestHandler, body: Body) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler, body)

    return answer


def error(status: int, text: str = "no") -> Answer:
    return lambda handler, body: reply(handler, status, {"error": {"message": text}})
