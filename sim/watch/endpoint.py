"""Metrics of a run over HTTP, in the Prometheus text format, while it goes.

The thread that serves a scrape asks, and the run's own thread answers between two steps: what is
shown is of one instant, and the run is never read while it changes.
"""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sim.allocators.values import MemoryStats
from sim.errors import FileError
from sim.files import reason
from sim.simulation import RunResult
from sim.watch.families import Families, described
from sim.watch.names import bounds
from sim.watch.observer import Observer, Sample
from workloads.errors import plain

PATIENCE_S = 5.0
"""How long a scrape waits for the run before it shows the last sample; Prometheus waits 10."""


class Endpoint(Collector):
    """What is scraped. Nothing before `attach`; what a run left once it is over.

    Attributes:
        asked: somebody waits for `answer`.
        wake: set when somebody asks, for whoever sleeps between steps.
    """

    def __init__(self) -> None:
        self.asked = False
        self.wake = threading.Event()
        self._answered = threading.Condition()
        self._families: Families | None = None
        self._observer: Observer | None = None
        self._sample: Sample | None = None
        self._over = False

    def attach(self, result: RunResult) -> None:
        """Show the run that *result* will be of."""
        families = Families.of(result)
        self._observer = Observer(result.recorder, bounds(families.max_model_len))
        self._families = families

    def answer(self, time_ps: int | None = None) -> None:
        """Answer who asks; *time_ps* is now. Only from the run's thread."""
        if self.asked:
            assert self._observer is not None
            with self._answered:  # one answer for all who wait
                self.asked = False
                self._sample = self._observer.sample(time_ps)
                self._answered.notify_all()

    def finish(self, stats: MemoryStats) -> None:
        """Show from now on what the run left, *stats* in the pool. Only from the run's thread."""
        assert self._observer is not None
        with self._answered:
            self._observer.finish(stats)
            self._sample = self._observer.sample()
            self._over = True
            self._answered.notify_all()

    def collect(self) -> Iterator[Metric]:
        """Answer the metrics of now; from any thread."""
        if self._families is None:
            return
        with self._answered:
            if not self._over:
                self.asked = True
                self.wake.set()
                self._answered.wait(PATIENCE_S)
            sample = self._sample
        if sample is not None:
            yield from self._families.show(sample)

    def describe(self) -> Iterator[Metric]:
        """Answer the families without values: the library finds by them what ``name[]`` asks."""
        return described()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a scrape, so that one that hangs is in nobody's way."""

    daemon_threads = True
    request_queue_size = 128  # of 5 at once some would try again a second later

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who has hung up, or never asked."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Quiet(WSGIRequestHandler):
    """Says nothing of a scrape: stderr is the user's."""

    timeout = 2 * PATIENCE_S  # for who connects and does not ask

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name there
        """Do nothing."""


@contextmanager
def served(endpoint: Endpoint, host: str, port: int) -> Iterator[str]:
    """Serve *endpoint* as long as the context lasts; lend its address.

    Raises:
        FileError: the port cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(endpoint)
    app: Any = make_wsgi_app(registry)

    def plain_text(environ: dict[str, Any], start_response: Any) -> Any:
        # What older Prometheus asks for, the library answers with : turned to _ (0.23 to 0.26).
        return app(environ | {"HTTP_ACCEPT": "text/plain"}, start_response)

    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("Server", (_Server,), {"address_family": family})
        server: WSGIServer = make_server(host, port, plain_text, kind, _Quiet)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        raise FileError(
            f"--metrics-port {port}: {reason(error)} at {plain(host)}; expected a free port "
            "from 1024 on, and an address of this machine"
        ) from None
    # A short interval, so that the command ends soon after its results.
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
