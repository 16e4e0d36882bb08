"""Which key file a process uses: one that no other living process uses, so that several peers can share a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from fusion_p2p.config import CommonConfig
from fusion_p2p.lock import FileLock, InUse

C = TypeVar("C", bound=CommonConfig)


@contextmanager
def claimed_identity(config: C, command: str) -> Iterator[C]:
    """The configuration with its identity file filled in and held: `join.key`, or `join-2.key` while another peer holds that.

    InUse when the file was given by the user and another process holds it: two peers must not share one id.
    """
    lock, path = _claim(config.identity) if config.identity is not None else _claim_free(config.state_directory, command)
    with lock:
        yield replace(config, identity=path)


def _claim(path: Path) -> tuple[FileLock, Path]:
    return FileLock(path.with_name(path.name + ".lock"), f"identity {path}"), path


def _claim_free(folder: Path, command: str) -> tuple[FileLock, Path]:
    for number in count(1):
        try:
            return _claim(folder / (f"{command}.key" if number == 1 else f"{command}-{number}.key"))
        except InUse:
            continue
    raise AssertionError("count() does not end")
