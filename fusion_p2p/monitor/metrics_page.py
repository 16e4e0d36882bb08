"""A peer's numbers for Prometheus, on this machine only: `fusion-peer join --metrics-port PORT` (extra `web`)."""

from __future__ import annotations

from dataclasses import fields

from fusion_p2p.errors import ConfigError
from fusion_p2p.job.progress import PeerSample

HOST = "127.0.0.1"


class MetricsPage:
    """Serves `/metrics` from a thread of its own; it shows the newest sample and reaches into nothing."""

    def __init__(self, port: int) -> None:
        """ConfigError when the extra `web` is not installed or the port is taken."""
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError:
            raise ConfigError("metrics_port needs the extra `web`: pip install 'fusion-p2p[web]'") from None
        registry = CollectorRegistry()
        self._gauges = {
            field.name: Gauge(f"fusion_peer_{field.name}", field.metadata["help"], registry=registry)
            for field in fields(PeerSample)
        }
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics_port {port} cannot be used: {error.strerror}; choose another") from None

    @property
    def port(self) -> int:
        """Where it is served; of interest when port 0 was asked for."""
        return int(self._server.server_address[1])

    def show(self, sample: PeerSample) -> None:
        """Serve these numbers from now on."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(sample, name))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
