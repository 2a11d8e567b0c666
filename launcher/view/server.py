"""`asyncflow view`: a page over runs, live or finished, on this host's loopback interface. Torch-free.

    http://127.0.0.1:PORT/TOKEN/            the page: page/index.html, view.js, view.css, uPlot
    GET  /TOKEN/api/state?have=...          what is new in each run since what the page has: `Have` of each, 1.2.3.4.5.6
    GET  /TOKEN/api/samples, trace, log, stacks, account, timeline, settings
                                            what a panel shows, when somebody looks at it
    POST /TOKEN/api/save?run=N              only with --control: the run saves after its step, and goes on
    POST /TOKEN/api/pause, resume           likewise: no more steps are given out, until it goes on
    POST /TOKEN/api/stop                    likewise: it saves and stops, as after Ctrl-C

Everything else, and everything without the token, is 404. No part of a URL becomes a path: assets, runs and logs are
looked up in lists. The page's security policy allows what this server sends and nothing else, so a sample that looks
like a script is text.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncflow.errors import ConfigError
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL, SAVE_SIGNAL
from launcher.run.rundir import running_launcher
from launcher.run.several_runs import check_runs, run_names, setting_differences
from launcher.view.run_reader import Have, RunReader

PAGE = Path(__file__).parent / "page"
_ASSETS = {
    "": ("index.html", "text/html"),
    "view.js": ("view.js", "text/javascript"),
    "view.css": ("view.css", "text/css"),
    "uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript"),
    "uPlot.min.css": ("uPlot.min.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the URL holds the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CONTROLS = {"save": SAVE_SIGNAL, "pause": PAUSE_SIGNAL, "resume": RESUME_SIGNAL, "stop": signal.SIGTERM}
"""What a page may ask of a run -> the signal that says it to the launcher."""
_HAVE = re.compile(r"-?\d{1,9}(?:\.\d{1,9}){5}")
_WATCH_S = 2.0
_MOST_ROWS = 100
_MOST_TIMELINE_S = 3600
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})


class ViewServer:
    """Serves some runs. `token`: what the URL must have."""

    def __init__(self, run_dirs: Sequence[Path], *, token: str, control: bool = False) -> None:
        self.token = token
        self._control = control
        self._runs = [RunReader(path, name) for path, name in zip(run_dirs, run_names(run_dirs), strict=True)]
        self._locks = [asyncio.Lock() for _ in self._runs]
        self._slow_locks = [asyncio.Lock() for _ in self._runs]

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.add_routes(
            [
                web.get("/{token}/api/state", self._state),
                web.get("/{token}/api/samples", self._samples),
                web.get("/{token}/api/log", self._log),
                web.get("/{token}/api/stacks", self._stacks),
                web.get("/{token}/api/account", self._account),
                web.get("/{token}/api/timeline", self._timeline),
                web.get("/{token}/api/trace", self._trace),
                web.get("/{token}/api/settings", self._settings),
                web.get("/{token}/{asset:[A-Za-z.]*}", self._asset),
            ]
        )
        app.cleanup_ctx.append(self._watching)
        if self._control:
            app.add_routes([web.post(f"/{{token}}/api/{{control:{'|'.join(_CONTROLS)}}}", self._signal_launcher)])
        return app

    async def _watching(self, _: web.Application) -> AsyncIterator[None]:
        """Look at the queues of live runs, whether or not a page asks: nothing else keeps their history."""

        async def watch() -> None:
            while True:
                await asyncio.gather(*(self._ask(number, RunReader.watch_queue) for number in range(len(self._runs))))
                await asyncio.sleep(_WATCH_S)

        watcher = asyncio.create_task(watch())
        yield
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what lacks the token, and pages of other sites that got this address under their own name."""
        given = request.path.removeprefix("/").partition("/")[0]
        knows = secrets.compare_digest(given.encode(errors="surrogatepass"), self.token.encode())
        host = re.sub(r":\d+$", "", request.headers.get("Host", ""))
        try:
            if not knows or host not in _HOSTS:
                raise web.HTTPNotFound
            response = await handler(request)
        except web.HTTPException as refusal:
            response = web.Response(status=refusal.status, text=f"{refusal.status}: {refusal.reason}")
        response.headers.update(HEADERS)
        return response

    def _number_of_run(self, request: web.Request) -> int:
        number = _whole(request, "run", 0)
        if number >= len(self._runs):
            raise web.HTTPNotFound
        return number

    async def _ask(self, number: int, question: Callable[[RunReader], Any], *, slow: bool = False) -> Any:
        # A slow disk delays its run, not the page; and what reads whole files delays no curve.
        async with (self._slow_locks if slow else self._locks)[number]:
            return await asyncio.to_thread(question, self._runs[number])

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        if (found := _ASSETS.get(request.match_info["asset"])) is None:
            raise web.HTTPNotFound
        name, content_type = found
        return web.Response(body=(PAGE / name).read_bytes(), content_type=content_type, charset="utf-8")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        given = request.query.get("have", "").split(",")
        have = [Have(*map(int, one.split("."))) if _HAVE.fullmatch(one) else Have() for one in given]
        have += [Have()] * (len(self._runs) - len(have))

        def state_of(number: int) -> Awaitable[Any]:
            return self._ask(number, lambda run: run.state(have[number]))

        states = await asyncio.gather(*map(state_of, range(len(self._runs))))
        return _json({"control": self._control, "runs": states})

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        number = self._number_of_run(request)
        asked, order = request.query.get("step", ""), request.query.get("order", "newest")
        steps = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", asked, re.ASCII)
        if order not in ("newest", "best", "worst") or (asked and steps is None):
            raise web.HTTPBadRequest
        skip, most = _whole(request, "skip", 0), min(_MOST_ROWS, _whole(request, "number", 20))
        return _json(
            await self._ask(
                number,
                lambda run: run.samples(
                    steps=None if steps is None else (int(steps[1]), int(steps[2] or steps[1])),
                    search=request.query.get("search", ""),
                    order=order,
                    skip=skip,
                    number=most,
                ),
                slow=True,
            )
        )

    async def _log(self, request: web.Request) -> web.StreamResponse:
        number, label = self._number_of_run(request), request.query.get("log")
        if label is None:
            return _json({"logs": [log.label for log in await self._ask(number, RunReader.logs)]})
        position = _whole(request, "from", 0) if "from" in request.query else None
        tail = await self._ask(number, lambda run: run.log_tail(label, position))
        if tail is None:
            raise web.HTTPNotFound
        return _json(tail)

    async def _stacks(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._ask(self._number_of_run(request), RunReader.stacks, slow=True))

    async def _account(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._ask(self._number_of_run(request), RunReader.account, slow=True))

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        last_s, stretch = min(_MOST_TIMELINE_S, _whole(request, "last", 60)), None
        if "from_ms" in request.query:
            start = _whole(request, "from_ms", 0) / 1000
            stretch = start, min(max(start, _whole(request, "to_ms", 0) / 1000), start + _MOST_TIMELINE_S)
        return _json(
            await self._ask(self._number_of_run(request), lambda run: run.timeline(last_s, stretch), slow=True)
        )

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        row = _whole(request, "row", 0)
        return _json(await self._ask(self._number_of_run(request), lambda run: run.trace(row), slow=True))

    async def _settings(self, request: web.Request) -> web.StreamResponse:
        return _json(await asyncio.to_thread(settings_of, self._runs))

    async def _signal_launcher(self, request: web.Request) -> web.StreamResponse:
        # No page of another site may send this header without asking first, which this server never allows.
        origin = request.headers.get("Origin", f"http://{request.headers['Host']}")
        if request.headers.get("X-AsyncFlow") != "control" or origin != f"http://{request.headers['Host']}":
            raise web.HTTPForbidden
        launcher = running_launcher(self._runs[self._number_of_run(request)].run_dir)
        if launcher is None:
            raise web.HTTPConflict(reason="it is starting, or does not run on this host")
        try:
            os.kill(launcher, _CONTROLS[request.match_info["control"]])
        except ProcessLookupError:
            raise web.HTTPConflict(reason="it has just ended") from None
        return _json({"asked": launcher})


def settings_of(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Return {text: each run's config.yaml, differences: (key, value of each run) where they differ}."""
    return {
        "text": [run.settings_text() for run in runs],
        "differences": setting_differences([run.settings() for run in runs]),
    }


def _whole(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise web.HTTPBadRequest
    return int(text)


def _json(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def serve_view(run_dirs: Sequence[Path], *, port: int, control: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, and say its address once it answers.

    Args:
        port: 0: any free one.

    Raises:
        ConfigError: one is no run's directory, or the port is taken.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve([path.resolve() for path in check_runs(run_dirs)], port, control, say))


async def _serve(run_dirs: Sequence[Path], port: int, control: bool, say: Callable[[str], None]) -> None:
    server = ViewServer(run_dirs, token=secrets.token_urlsafe(16), control=control)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            why = os.strerror(error.errno or 0)  # asyncio's own text has the address once more
            raise ConfigError(f"--port: {port} cannot be used ({why}); choose another, or 0") from error
        port = int(runner.addresses[0][1])
        say(f"open http://127.0.0.1:{port}/{server.token}/")
        say(f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_HOST, then open the same address; Ctrl-C ends")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
