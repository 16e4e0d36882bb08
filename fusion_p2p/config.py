"""Configuration of every command: flag > FUSION_* environment variable > --config FILE (TOML) > default, decoded strictly.

Each command has one frozen dataclass. A field's name is its key in TOML; `--with-dashes` it is the flag and FUSION_UPPER_CASE
the variable. A repeatable flag is a comma-separated variable and a TOML list; "none" clears an optional setting. Unknown keys,
wrong types and values out of range are ConfigErrors that name the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Le, Lt

from fusion_p2p.errors import ConfigError
from fusion_p2p.setting_values import (
    Fraction,
    Help,
    NonNegative,
    Port,
    Positive,
    PositiveInt,
    Ratio,
    Seconds,
    from_file,
    from_text,
    parse_options,
)
from fusion_p2p.time_of_day import Hours, parse_hours

ENVIRONMENT_PREFIX = "FUSION_"
SchedulerName = Literal["auto", "op-fence", "equal-compute", "equal-number"]
DEFAULT_RATIO = 100.0
MAX_MICRO_BATCHES = 4096
"""What a coordinator plans for at most (`wire.swarm_messages`): the time that a plan takes grows with them."""
TRACELESS_RATIO = 7.5
"""What codecs reach that leave no trace in the trained model (int4, `wire.codecs.LADDER`)."""
KEPT_RATIO = 16.4
"""What a TopK codec reaches at about the loss of dense training if its mask stays in the model."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every process of a swarm can be told."""

    network: Annotated[str, Help("name of the swarm; peers of other names are not seen")] = "fusion"
    listen: Annotated[tuple[str, ...], Help("multiaddr to listen on (repeatable)")] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Annotated[tuple[str, ...], Help("multiaddr to announce instead of those found (repeatable)")] = ()
    identity: Annotated[Path | None, Help("Ed25519 key file; default: a free one in the state directory")] = None
    state_dir: Annotated[Path | None, Help("where keys and caches live; default: the user's state directory")] = None
    no_nat: Annotated[bool, Help("do not ask the router for a port (UPnP)")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Help("least severe message logged")] = "warning"
    debug: Annotated[bool, Help("show the traceback of an unexpected error")] = False

    def __post_init__(self) -> None:
        if not self.network or len(self.network) > 64 or not self.network.isprintable():
            raise ConfigError("network must be 1 to 64 printable characters")

    @property
    def state_directory(self) -> Path:
        """`state_dir`, or the user's state directory of this operating system."""
        if self.state_dir is not None:
            return self.state_dir
        import platformdirs  # only needed when nothing was given

        return platformdirs.user_state_path("fusion-p2p")


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig(CommonConfig):
    """A node that others know the address of: directory, dial-back, circuit relay."""

    listen: Annotated[tuple[str, ...], Help("multiaddr to listen on (repeatable)")] = ("/ip4/0.0.0.0/tcp/31337",)
    bootstrap: Annotated[tuple[str, ...], Help("address of another bootstrap node (repeatable)")] = ()
    no_relay: Annotated[bool, Help("do not run a circuit relay for peers that cannot be dialled")] = False
    relay_listen: Annotated[str, Help("multiaddr that the relay listens on")] = "/ip4/0.0.0.0/tcp/0"
    relay_reservations: Annotated[PositiveInt, Help("peers that may be reached through the relay at once")] = 128
    relay_circuits: Annotated[PositiveInt, Help("circuits open at once")] = 256
    relay_duration_s: Annotated[Seconds, Help("seconds after which a circuit is reset")] = 7200.0
    relay_mebibytes: Annotated[PositiveInt, Help("MiB after which a circuit is reset")] = 16_384


@dataclass(frozen=True, kw_only=True)
class JoinConfig(CommonConfig):
    """A volunteer's peer."""

    bootstrap: Annotated[tuple[str, ...], Help("address of a bootstrap node, /ip4/.../tcp/.../p2p/ID (repeatable)")] = ()
    device: Annotated[str, Help("auto, cpu or cuda:N")] = "auto"
    threads: Annotated[PositiveInt | None, Help("CPU threads of torch; default: torch's own choice")] = None
    memory_gib: Annotated[Positive | None, Help("most memory to use, in GiB; default: what is free, minus a margin")] = None
    benchmark: Annotated[Literal["auto", "again", "off"], Help("measure the device: once (cached), again, or not at all")] = (
        "auto"
    )
    join_timeout_s: Annotated[Seconds, Help("seconds until an unreachable swarm ends the command")] = 60.0
    metrics_port: Annotated[Port | None, Help("serve numbers for Prometheus on this loopback port (extra `web`)")] = None

    upload_mbit: Annotated[Positive | None, Help("most to send, in Mbit/s; default: no cap")] = None
    download_mbit: Annotated[Positive | None, Help("most to receive, in Mbit/s; default: no cap")] = None
    monthly_gib: Annotated[
        Positive | None, Help("traffic of a calendar month, both ways, in GiB; then pause until the next")
    ] = None
    hours: Annotated[tuple[str, ...], Help("hours of the day to work in, local time, such as 22-7 (repeatable)")] = ()
    on_battery: Annotated[Literal["pause", "run"], Help("what to do while the machine runs on its battery")] = "pause"
    drain_timeout_s: Annotated[
        float, Ge(0), Le(3600), Help("seconds that others have to take the slices over before this peer goes; 0: it just goes")
    ] = 25.0

    def __post_init__(self) -> None:
        super().__post_init__()
        need_bootstrap("join", self.bootstrap)
        for hours in self.hours:
            parse_hours(hours)

    @property
    def working_hours(self) -> tuple[Hours, ...]:
        """The hours, parsed. ConfigError says how they are written."""
        return tuple(map(parse_hours, self.hours))


@dataclass(frozen=True, kw_only=True)
class StatusConfig(CommonConfig):
    """A look at the swarm."""

    bootstrap: Annotated[tuple[str, ...], Help("address of a bootstrap node (repeatable)")] = ()
    timeout_s: Annotated[Seconds, Help("seconds to wait for the swarm")] = 15.0
    json: Annotated[bool, Help("print one JSON object instead of a table")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        need_bootstrap("status", self.bootstrap)


@dataclass(frozen=True, kw_only=True)
class JobConfig(CommonConfig):
    """What is trained and how it is cut over peers: what a plan depends on."""

    bootstrap: Annotated[tuple[str, ...], Help("address of a bootstrap node, /ip4/.../tcp/.../p2p/ID (repeatable)")] = ()
    join_timeout_s: Annotated[Seconds, Help("seconds until an unreachable swarm ends the command")] = 60.0

    model: Annotated[str, Help("gpt2[-medium|-large|-xl], resnet[50|101|152], or package.module:factory")] = "gpt2"
    layers: Annotated[PositiveInt | None, Help("transformer blocks")] = None
    width: Annotated[PositiveInt | None, Help("model width (features or channels)")] = None
    heads: Annotated[PositiveInt | None, Help("attention heads")] = None
    context: Annotated[PositiveInt | None, Help("tokens of a sequence")] = None
    dropout: Annotated[Fraction | None, Help("share of the elements that dropout zeroes")] = None
    tied: Annotated[bool | None, Help("one tensor for token embedding and output projection")] = None
    option: Annotated[tuple[str, ...], Help("further model option NAME=VALUE (repeatable)")] = ()
    data: Annotated[str, Help("stdlib-text, digits, a text file or folder, or package.module:factory")] = "stdlib-text"
    data_option: Annotated[tuple[str, ...], Help("option NAME=VALUE for a data factory (repeatable)")] = ()

    batch_size: Annotated[PositiveInt, Help("examples of one optimiser step")] = 16
    micro_batches: Annotated[PositiveInt, Help("parts of a batch that flow through the peers at once")] = 4
    optimiser: Annotated[Literal["sgd", "adam", "adamw"], Help("formulas as in torch.optim")] = "adamw"
    momentum: Annotated[Fraction, Help("momentum of sgd")] = 0.0
    seed: Annotated[int, Ge(0), Lt(1 << 53), Help("seed of weights, data order and dropout")] = 0

    scheduler: Annotated[SchedulerName, Help("how the model is cut over the peers; auto: as fast as we can")] = "auto"
    pipeline: Annotated[
        Literal["auto", "gpipe", "1f1b"], Help("order of forward and backward passes; auto: the faster by simulation")
    ] = "auto"
    codec: Annotated[
        str, Help("compression of what crosses links: none, uniform, adatopk, adaptive, or one codec such as int8 or topk:10")
    ] = "none"
    ratio: Annotated[
        Ratio | None, Help("the most that a policy divides bytes by; default: 100, for adaptive 7.5 (more needs TopK, a trace)")
    ] = None
    cut_embedding: Annotated[bool, Help("change the model: after each cut it embeds tokens and positions anew")] = False
    bottleneck: Annotated[PositiveInt | None, Help("change the model: at each cut a learned projection to so many numbers")] = (
        None
    )
    keep_sparsifier: Annotated[bool, Help("make the mask of a TopK codec part of the model, at each cut")] = False
    finish: Annotated[Fraction, Help("last share of the steps without TopK, on codecs that leave no trace in the model")] = 0.0
    cuts: Annotated[PositiveInt | None, Help("places of these layers; default: one less than --peers")] = None
    recompute: Annotated[bool, Help("recompute the forward pass to save memory")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro_batches > MAX_MICRO_BATCHES:
            raise ConfigError(
                f"micro_batches {self.micro_batches} is more than a swarm plans for: {MAX_MICRO_BATCHES}; "
                "raise the size of a micro-batch, or train in more steps"
            )
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"batch_size {self.batch_size} is not divisible by micro_batches {self.micro_batches}; "
                f"{self.batch_size - self.batch_size % self.micro_batches or self.micro_batches} would be"
            )

    @property
    def most_ratio(self) -> float:
        """By how much a policy may divide bytes: by default `adaptive` keeps to codecs that leave no trace in the model."""
        if self.ratio is not None:
            return self.ratio
        if self.codec != "adaptive":
            return DEFAULT_RATIO
        return KEPT_RATIO if self.keep_sparsifier or self.finish else TRACELESS_RATIO

    @property
    def num_cuts(self) -> int | None:
        """At how many places cut layers go, if that was said."""
        return self.cuts

    @property
    def micro_batch_size(self) -> int:
        """Examples of one micro-batch."""
        return self.batch_size // self.micro_batches

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of the model that were given, flags and --option alike. ConfigError when one is given twice."""
        named = {name: getattr(self, name) for name in MODEL_FLAGS if getattr(self, name) is not None}
        further = parse_options(self.option, "option")
        twice = sorted(named.keys() & further.keys())
        if twice:
            raise ConfigError(f"{twice[0]} is given both as a flag and by --option")
        return named | further

    @property
    def data_options(self) -> dict[str, Any]:
        """The options of a data factory."""
        return parse_options(self.data_option, "data_option")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(JobConfig):
    """A dry run: who would execute what, and how fast."""

    bootstrap: Annotated[tuple[str, ...], Help("plan for the swarm behind this bootstrap node (repeatable)")] = ()
    testbed: Annotated[Path | None, Help("plan for the network in this JSON file")] = None
    data: Annotated[str, Help("synthetic: inputs of the model's own size; or what train takes")] = "synthetic"
    image: Annotated[PositiveInt | None, Help("pixels of a side of synthetic images")] = None
    json: Annotated[bool, Help("print one JSON object")] = False
    actions: Annotated[bool, Help("print the order of forward (F) and backward (B) tasks in one step, too")] = False
    plot: Annotated[Path | None, Help("draw the plan and the timeline of one step into this .png or .svg file")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.testbed is None) == (not self.bootstrap):
            raise ConfigError("plan needs either --testbed FILE or --bootstrap ADDRESS of a swarm")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise ConfigError(f"plot: {self.plot} has to end in .png or .svg")
        if self.plot is not None and not self.plot.parent.is_dir():
            raise ConfigError(f"plot: there is no folder {self.plot.parent}")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(CommonConfig):
    """A look at this machine's device."""

    device: Annotated[str, Help("auto, cpu or cuda:N")] = "auto"
    threads: Annotated[PositiveInt | None, Help("CPU threads of torch; default: torch's own choice")] = None
    benchmark: Annotated[Literal["auto", "again", "off"], Help("measure the device: once (cached), again, or not at all")] = (
        "auto"
    )
    precision: Annotated[Literal["fp32", "bf16"], Help("precision of the computation")] = "fp32"
    json: Annotated[bool, Help("print one JSON object instead of a table")] = False


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JobConfig):
    """One training run of a model owner."""

    steps: Annotated[PositiveInt, Help("optimiser steps in all")] = 100
    learning_rate: Annotated[Positive, Help("highest learning rate")] = 1e-3
    schedule: Annotated[Literal["constant", "linear", "cosine"], Help("how the learning rate falls after warm-up")] = "constant"
    warmup: Annotated[int, Ge(0), Lt(1 << 31), Help("steps in which the learning rate rises linearly")] = 0
    beta1: Annotated[Fraction, Help("decay of the first moment of adam")] = 0.9
    beta2: Annotated[Fraction, Help("decay of the second moment of adam")] = 0.999
    epsilon: Annotated[Positive, Help("epsilon of adam")] = 1e-8
    weight_decay: Annotated[NonNegative, Help("weight decay (decoupled with adamw)")] = 0.0
    clip: Annotated[Positive | None, Help("largest global gradient norm; none: no clipping")] = None

    validate_every: Annotated[int, Ge(0), Lt(1 << 31), Help("steps between validations; 0: never")] = 50
    validation_batches: Annotated[PositiveInt, Help("micro-batches of one validation")] = 8
    checkpoint_every: Annotated[PositiveInt, Help("steps between checkpoints")] = 20
    copies: Annotated[
        Literal["auto", "off"] | PositiveInt,
        Help("steps between copies of all slices at other peers; auto: as often as it pays; or off"),
    ] = "auto"

    peers: Annotated[PositiveInt | None, Help("plan when this many peers are there; none: when the model fits")] = None
    precision: Annotated[Literal["fp32", "bf16"], Help("precision of the computation")] = "fp32"
    no_peers_timeout_s: Annotated[Seconds, Help("seconds without any peer until the command ends")] = 30.0

    run: Annotated[Path | None, Help("run folder; default: runs/<time>-<model>")] = None
    resume: Annotated[Path | None, Help("run folder to go on with")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        need_bootstrap("train", self.bootstrap)
        if self.run is not None and self.resume is not None:
            raise ConfigError("run and resume exclude each other: a resumed run stays in its folder")

    @property
    def num_cuts(self) -> int | None:
        """One place fewer than peers, if not said otherwise."""
        return self.cuts if self.cuts is not None or self.peers is None else self.peers - 1

    @property
    def copy_every(self) -> int | None:
        """Steps between two copies of all slices; 0: never, None: as often as it pays."""
        if isinstance(self.copies, int):
            return self.copies
        return None if self.copies == "auto" else 0

    @property
    def finish_after(self) -> int:
        """The last step before the finish; the last of all without one."""
        return self.steps - round(self.finish * self.steps)


MODEL_FLAGS = ("layers", "width", "heads", "context", "dropout", "tied")
FIXED_FOR_A_RUN = (
    *MODEL_FLAGS, "model", "option", "data", "data_option", "batch_size", "micro_batches", "optimiser", "seed", "precision",
    "cut_embedding", "bottleneck", "keep_sparsifier", "cuts",
)  # fmt: skip
"""What cannot change when a run is resumed."""
NOT_STORED = ("run", "resume", "identity", "state_dir", "debug")

C = TypeVar("C", bound=CommonConfig)


def need_bootstrap(command: str, addresses: Sequence[str]) -> None:
    """ConfigError unless there is an address to start from."""
    if not addresses:
        raise ConfigError(f"{command} needs --bootstrap ADDRESS, as printed by `fusion-peer bootstrap`")


def settings_of(kind: type[CommonConfig]) -> dict[str, Any]:
    """The annotated type of every setting of a command, in the order they are declared."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def resolve(kind: type[C], flags: Mapping[str, Any], environ: Mapping[str, str], files: Sequence[Path] = ()) -> C:
    """The configuration of a command. Later files win over earlier ones, the environment over files, flags over all.

    flags: by setting name; None means not given, strings are parsed, a repeatable flag is a list of strings.
    """
    values: dict[str, Any] = {}
    for path in files:
        values |= from_file(settings_of(kind), path)
    for name, annotation in settings_of(kind).items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environ:
            values[name] = from_text(annotation, environ[variable], variable)
        given = flags.get(name)
        if given is not None and given != []:
            values[name] = from_text(annotation, given, "--" + name.replace("_", "-"))
    return kind(**values)


def check_resumable(stored: TrainConfig, now: TrainConfig) -> None:
    """ConfigError when a resumed run was given another value for something that it cannot change."""
    for name in FIXED_FOR_A_RUN:
        before, after = getattr(stored, name), getattr(now, name)
        if before != after:
            raise ConfigError(
                f"{name} was {before!r} when this run began and cannot become {after!r}; start a new run for that"
            )


def to_toml(config: CommonConfig) -> str:
    """The resolved configuration as a TOML file that `--config` reads; what is unset is left out."""
    import tomli_w  # kept out of the start of every command

    plain = {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.name not in NOT_STORED}
    return tomli_w.dumps({name: value for name, value in plain.items() if value is not None})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
