"""The folder of one run, held by one owner process at a time.

config.toml    the resolved configuration          ledger.jsonl   what counts (ledger.py)
graph.fusion   the captured graph                  metrics.jsonl  one line a step (metrics.py)
plan.json      the newest plan                     loss.png       the loss curve
plan.txt       the same, explained                 checkpoint/    the newest two (checkpoint.py)
plans/         the plan of every epoch
names.json     names of the module's state_dict    untouched.safetensors   what of it the loss does not read
log.txt        log lines                           lock           pid of the owner process
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from fusion_p2p.config import TrainConfig, to_toml
from fusion_p2p.errors import ConfigError
from fusion_p2p.lock import FileLock
from fusion_p2p.owner.durable import write_file
from fusion_p2p.owner.ledger import Ledger
from fusion_p2p.owner.metrics import Metrics
from fusion_p2p.plan.plan import Plan

CONFIG = "config.toml"
GRAPH = "graph.fusion"
NAMES = "names.json"
UNTOUCHED = "untouched.safetensors"
LEDGER = "ledger.jsonl"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoint"
PLANS = "plans"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGE_LOG = logging.getLogger("fusion_p2p")


class RunFolder:
    """An open run folder: its lock is held, its ledger read, its log attached. Use as a context manager or call `close`."""

    def __init__(self, path: Path) -> None:
        """Take over an existing folder. ConfigError when another process has it, or its ledger is damaged."""
        self.path = path
        self._lock = FileLock(path / "lock", f"run folder {path}")
        try:
            self.ledger = Ledger(path / LEDGER)
            self.metrics = Metrics(path / METRICS)
            self._log = logging.FileHandler(path / "log.txt", encoding="utf-8")
        except (ConfigError, OSError):
            self._lock.release()
            raise
        self._log.setFormatter(logging.Formatter(LOG_FORMAT))
        _PACKAGE_LOG.addHandler(self._log)

    @staticmethod
    def create(config: TrainConfig) -> RunFolder:
        """A new folder: `config.run`, or runs/<time>-<model>. ConfigError when it holds a run already or cannot be made."""
        path = config.run if config.run is not None else _free_name(config.model)
        if (path / GRAPH).exists():
            raise ConfigError(f"run folder {path} holds a run already; go on with --resume {path} or choose another --run")
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(path)
            write_file(path / CONFIG, to_toml(config).encode())
        except OSError as error:
            raise ConfigError(f"cannot create run folder {path}: {error.strerror}") from None
        return folder

    @staticmethod
    def resume(path: Path) -> RunFolder:
        """The folder of a run that has begun. ConfigError when it is none, is in use, or was never planned."""
        stored_config(path)
        if not (path / GRAPH).exists():
            raise ConfigError(f"{path} cannot be resumed: it ended before its model was captured; start it again")
        return RunFolder(path)

    @property
    def checkpoints(self) -> Path:
        """Where `CheckpointWriter` and `newest_checkpoint` look."""
        return self.path / CHECKPOINTS

    @property
    def loss_curve(self) -> Path:
        return self.path / "loss.png"

    def write_model(self, graph: bytes, names: Sequence[str], untouched: Mapping[str, Tensor]) -> None:
        """Keep the encoded graph, and what an export needs beside it: the module's own names, and tensors it never trains."""
        write_file(self.path / NAMES, json.dumps(list(names)).encode())
        write_file(self.path / UNTOUCHED, save({name: tensor.clone() for name, tensor in untouched.items()}))
        write_file(self.path / GRAPH, graph)

    def read_graph(self) -> bytes:
        """The encoded graph of a resumed run."""
        return (self.path / GRAPH).read_bytes()

    def write_plan(self, plan: Plan, explanation: Sequence[str], epoch: int) -> None:
        """Keep the plan of an epoch, and show it as the newest, for programs and for people."""
        encoded = json.dumps(asdict(plan)).encode()
        (self.path / PLANS).mkdir(exist_ok=True)
        write_file(self.path / PLANS / f"epoch-{epoch}.json", encoded)
        write_file(self.path / "plan.json", encoded)
        write_file(self.path / "plan.txt", ("\n".join(explanation) + "\n").encode())

    def close(self) -> None:
        """Let go of the folder; doing so twice is harmless."""
        _PACKAGE_LOG.removeHandler(self._log)
        self._log.close()
        self.ledger.close()
        self.metrics.close()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def stored_config(run: Path) -> Path:
    """The configuration file of a run. ConfigError when `run` is not a run folder."""
    path = run / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {CONFIG}")
    return path


def _free_name(model: str) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub('[^A-Za-z0-9_.-]', '-', model)}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path
