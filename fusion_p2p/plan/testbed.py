"""A network from a file: sites of devices, the links inside and between them. For plans without a swarm.

    {"name": "...", "about": "...",
     "sites": [{"name": "A", "gpus": [{"device": "V100", "count": 8}], "lan": {"mbit_per_s": 10000, "latency_ms": 0.1}}, ...],
     "wan": [{"between": ["A", "B"], "mbit_per_s": 100, "latency_ms": 10}, ...],
     "wan_limit": "per-flow"}

Latency is one way; one rate counts for both directions, `[there, back]` gives each of a wan link its own. `"wan": "uniform"`
together with `"uniform": {"mbit_per_s": 100, "latency_ms": 20}` joins all sites alike. Under `"wan_limit": "per-site"` each
site's `uplink_mbit_per_s` and `downlink_mbit_per_s` are shared by all flows that leave or enter it, besides the limit of each
flow. With `"duplex": "half"` the two directions between a pair of nodes share one link, as on a radio; the default is `full`.
`peer_order` lists `[site, index]` when peers should not be listed site by site, `owner` names the site that feeds the data.

Devices are looked up in the file's own `devices`, then in `devices.json` beside this module: the vendor's peak fp32 TFLOP/s,
the fraction of it that a training step reaches, and memory. They stand for simulated peers only; real peers measure themselves.
A device with `slower` instead runs so many times slower than the machine that makes the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from fusion_p2p.errors import ConfigError
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.wire.messages import Record, describe

MAX_PEERS = 4096
REFERENCE_FLOPS = 20e9
"""FLOP/s of this machine when it was not measured: what a device with `slower` is relative to."""

_SECONDS_PER_BYTE = 8e-6
"""Of one Mbit/s."""
_Positive = Annotated[float, Field(gt=0, lt=1e12)]
_Milliseconds = Annotated[float, Field(ge=0, lt=1e6)]
_Label = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[\w.-]+$")]


class _Device(Record):
    """A model of device: absolute, by its data sheet, or relative to this machine."""

    memory_gb: _Positive
    peak_tflops_fp32: _Positive | None = None
    achieved_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    slower: _Positive | None = None

    def flops_per_s(self, reference: Floats) -> Floats:
        if self.slower is not None:
            return reference / self.slower
        return np.full(3, (self.peak_tflops_fp32 or 0.0) * (self.achieved_fraction or 0.0) * 1e12)


class _Link(Record):
    mbit_per_s: _Positive | Annotated[list[_Positive], Field(min_length=2, max_length=2)]
    latency_ms: _Milliseconds

    def seconds_per_byte(self) -> tuple[float, float]:
        """There and back."""
        rates = self.mbit_per_s if isinstance(self.mbit_per_s, list) else [self.mbit_per_s] * 2
        return _SECONDS_PER_BYTE / rates[0], _SECONDS_PER_BYTE / rates[1]


class _Wan(_Link):
    between: Annotated[list[_Label], Field(min_length=2, max_length=2)]


class _Devices(Record):
    device: _Label
    count: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 1


class _Site(Record):
    name: _Label
    gpus: Annotated[list[_Devices], Field(min_length=1, max_length=MAX_PEERS)]
    lan: _Link | None = None
    uplink_mbit_per_s: _Positive | None = None
    downlink_mbit_per_s: _Positive | None = None

    @property
    def devices(self) -> list[str]:
        return [group.device for group in self.gpus for _ in range(group.count)]


class _Testbed(Record):
    name: str = ""
    about: str = ""
    sites: Annotated[list[_Site], Field(min_length=1, max_length=MAX_PEERS)]
    wan: tuple[_Wan, ...] | Literal["uniform"] = ()
    uniform: _Link | None = None
    wan_limit: Literal["per-flow", "per-site"] = "per-flow"
    duplex: Literal["full", "half"] = "full"
    peer_order: list[tuple[_Label, Annotated[int, Field(ge=0)]]] | None = None
    owner: _Label | None = None
    devices: dict[str, _Device] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """What a kind of device stands for in simulations."""

    flops_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class _Place:
    """One peer: its site, its place there, and its device."""

    site: int
    index: int
    device: str


def load_testbed(
    path: Path,
    *,
    devices: Mapping[str, Mapping[str, float]] | None = None,
    reference: float | Sequence[float] | Callable[[], Sequence[float]] = REFERENCE_FLOPS,
) -> Network:
    """The network that a file describes; peers are called SITE/INDEX/DEVICE, for example `A/0/V100`.

    devices: more entries as in `devices.json`; the file's own win over them. reference: FLOP/s of this machine (one for all
    kinds, or three in the order of `Network.flops_per_s`), for devices that are relative to it; a function is asked only if
    there are any.
    ConfigError, one sentence, for a file that cannot be read, does not fit the format or contradicts itself.
    """
    bed = _parse(path)
    try:
        known = _device_table() | _parse_devices(devices or {}) | bed.devices
        _check(bed, known)
        if callable(reference):
            relative = any(known[name].slower is not None for site in bed.sites for name in site.devices)
            reference = reference() if relative else REFERENCE_FLOPS
        return _build(bed, known, np.broadcast_to(np.asarray(reference, dtype=np.float64), (3,)))
    except ConfigError as error:
        raise ConfigError(f"testbed {path}: {error}") from None


def site_names(network: Network) -> tuple[str, ...]:
    """A name for each site of a network: that of the testbed where peers carry it, else `site N`."""
    names = [f"site {number}" for number in range(int(network.sites.max(initial=-1)) + 1)]
    for peer, site in zip(network.peers, network.sites, strict=False):
        name, slash, _ = peer.partition("/")
        if slash:
            names[site] = name
    return tuple(names)


def builtin_devices() -> dict[str, SimulatedDevice]:
    """The devices of `devices.json` by name."""
    unused = np.zeros(3)
    return {
        name: SimulatedDevice(float(device.flops_per_s(unused)[0]), device.memory_gb * 1e9)
        for name, device in _device_table().items()
    }


def _parse(path: Path) -> _Testbed:
    try:
        return _Testbed.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the testbed {path}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"testbed {path}: {describe(error)}") from None


@cache
def _device_table() -> dict[str, _Device]:
    return _parse_devices(json.loads(files("fusion_p2p.plan").joinpath("devices.json").read_text(encoding="utf-8")))


def _parse_devices(table: Mapping[str, Mapping[str, float]]) -> dict[str, _Device]:
    return {name: _Device.model_validate(dict(entry), strict=False) for name, entry in table.items()}


def _build(bed: _Testbed, devices: Mapping[str, _Device], reference: Floats) -> Network:
    places = _listed(bed)
    sites = [place.site for place in places]
    if bed.owner is not None:
        sites.append(_numbers(bed)[bed.owner])
    alpha, beta = _links(bed, np.array(sites, dtype=np.int64))
    found = [devices[place.device] for place in places]
    return Network(
        peers=tuple(PeerId(f"{bed.sites[place.site].name}/{place.index}/{place.device}") for place in places),
        flops_per_s=np.array([device.flops_per_s(reference) for device in found]),
        memory_bytes_per_s=np.full(len(places), np.inf),
        free_bytes=np.array([device.memory_gb * 1e9 for device in found]),
        sites=np.array(sites, dtype=np.int64),
        alpha_s=alpha,
        beta_s=beta,
        uplink_s=np.array([_shared(bed, site.uplink_mbit_per_s) for site in bed.sites]),
        downlink_s=np.array([_shared(bed, site.downlink_mbit_per_s) for site in bed.sites]),
        has_owner=bed.owner is not None,
        full_duplex=bed.duplex == "full",
    )


def _shared(bed: _Testbed, mbit_per_s: float | None) -> float:
    return _SECONDS_PER_BYTE / mbit_per_s if bed.wan_limit == "per-site" and mbit_per_s is not None else 0.0


def _check(bed: _Testbed, devices: Mapping[str, _Device]) -> None:
    """ConfigError for what the format allows and sense does not."""
    numbers = _numbers(bed)
    if len(numbers) < len(bed.sites):
        raise ConfigError("two sites have one name; give each its own")
    if sum(len(site.devices) for site in bed.sites) > MAX_PEERS:
        raise ConfigError(f"more than {MAX_PEERS} devices")
    for site in bed.sites:
        _check_site(bed, site, devices)
    if bed.owner is not None and bed.owner not in numbers:
        raise ConfigError(f"owner: there is no site {bed.owner!r}")
    if (bed.wan == "uniform") != (bed.uniform is not None):
        raise ConfigError('"wan": "uniform" and "uniform": {"mbit_per_s", "latency_ms"} belong together')


def _check_site(bed: _Testbed, site: _Site, devices: Mapping[str, _Device]) -> None:
    several = len(site.devices) > 1 or bed.owner == site.name
    if several and site.lan is None:
        raise ConfigError(f'site {site.name} has several nodes but no "lan"; add "lan": {{"mbit_per_s", "latency_ms"}}')
    limits = (site.uplink_mbit_per_s, site.downlink_mbit_per_s)
    if bed.wan_limit == "per-site" and None in limits and len(bed.sites) > 1:
        raise ConfigError(f"wan_limit is per-site but site {site.name} lacks uplink_mbit_per_s or downlink_mbit_per_s")
    if bed.wan_limit == "per-flow" and limits != (None, None):
        raise ConfigError(f'site {site.name} has a limit for all its flows, which counts only with "wan_limit": "per-site"')
    if site.lan is not None and isinstance(site.lan.mbit_per_s, list):
        raise ConfigError(
            f"site {site.name}: a lan has one rate, because its nodes have no order; [there, back] is for wan links"
        )
    for name in site.devices:
        if name not in devices:
            raise ConfigError(
                f'there is no device {name!r}; add it to "devices" of the file, or use {", ".join(sorted(devices))}'
            )
        device = devices[name]
        if (device.slower is None) != (device.peak_tflops_fp32 is not None and device.achieved_fraction is not None):
            raise ConfigError(f'device {name!r} needs "peak_tflops_fp32" and "achieved_fraction", or "slower" alone')


def _numbers(bed: _Testbed) -> dict[str, int]:
    return {site.name: number for number, site in enumerate(bed.sites)}


def _listed(bed: _Testbed) -> list[_Place]:
    """Peers in listed order: site by site, or as `peer_order` says."""
    every = {
        (site.name, index): _Place(number, index, device)
        for number, site in enumerate(bed.sites)
        for index, device in enumerate(site.devices)
    }
    if bed.peer_order is None:
        return list(every.values())
    if sorted(bed.peer_order) != sorted(every):
        raise ConfigError("peer_order has to list every [site, index] of the sites once")
    return [every[place] for place in bed.peer_order]


def _links(bed: _Testbed, sites: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Latency (seconds) and seconds per byte of every directed pair of nodes, 0 on the diagonal."""
    count = len(bed.sites)
    alpha, beta = np.zeros((count, count)), np.zeros((count, count))
    for first, second, link in _pairs(bed):
        alpha[first, second] = alpha[second, first] = link.latency_ms / 1e3
        beta[first, second], beta[second, first] = link.seconds_per_byte()
    _check_joined(bed, beta)
    for number, site in enumerate(bed.sites):
        if site.lan is not None:
            alpha[number, number] = site.lan.latency_ms / 1e3
            beta[number, number] = site.lan.seconds_per_byte()[0]
    node_alpha, node_beta = alpha[np.ix_(sites, sites)], beta[np.ix_(sites, sites)]
    np.fill_diagonal(node_alpha, 0.0)
    np.fill_diagonal(node_beta, 0.0)
    return node_alpha, node_beta


def _pairs(bed: _Testbed) -> Iterator[tuple[int, int, _Link]]:
    if bed.uniform is not None:
        count = len(bed.sites)
        yield from ((first, second, bed.uniform) for first in range(count) for second in range(first))
        return
    numbers = _numbers(bed)
    seen: set[frozenset[str]] = set()
    for link in () if isinstance(bed.wan, str) else bed.wan:
        pair = frozenset(link.between)
        if not pair <= numbers.keys() or len(pair) < 2 or pair in seen:
            raise ConfigError(f"wan: {link.between[0]!r} - {link.between[1]!r} is not a pair of two sites, named once")
        seen.add(pair)
        yield numbers[link.between[0]], numbers[link.between[1]], link


def _check_joined(bed: _Testbed, beta: Floats) -> None:
    for first, second in zip(*np.nonzero(beta == 0), strict=True):
        if first < second:
            names = f"{bed.sites[first].name!r} and {bed.sites[second].name!r}"
            raise ConfigError(f'wan: there is no link between {names}; add {{"between": [...], "mbit_per_s", "latency_ms"}}')
