"""Checkpoints on the owner's disk: safetensors parts and a manifest with the digest of every tensor.

    checkpoint/step-00000020/manifest.json      names, types, digests, step, graph; its own digest last
                             part-0000.safetensors ...

A checkpoint is written beside its place and renamed when it is complete, so there are only whole ones; the newest two are kept.
Tensors are named as in a slice's state (`parameter/<name>`, `momentum/<name>`, ...).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fusion_p2p.compress.dense import to_bytes
from fusion_p2p.errors import ConfigError
from fusion_p2p.ids import Digest, digest_of
from fusion_p2p.owner.durable import sync_file, sync_folder, write_file
from fusion_p2p.wire.messages import Count, DigestText, Record

MANIFEST = "manifest.json"
PART_BYTES = 256 << 20
"""A part is written as soon as its tensors have this many bytes: the owner never holds a whole large model."""
KEPT = 2


class CheckpointDamaged(ConfigError):
    """A checkpoint is incomplete or its bytes are not those that were written."""


class TensorEntry(Record):
    part: Count
    dtype: str
    shape: tuple[Count, ...]
    digest: DigestText


class Manifest(Record):
    format: int = Field(default=1, ge=1, le=1)
    step: Count
    graph: DigestText
    tensors: dict[str, TensorEntry]


class CheckpointWriter:
    """Collects the tensors of one step, in any order and from any slice, and makes them a checkpoint."""

    def __init__(self, folder: Path, graph: Digest, step: int) -> None:
        """`folder` holds all checkpoints of a run; it is created when it is missing."""
        self._place = folder / f"step-{step:08}"
        self._part_folder = folder / f".step-{step:08}.part"
        shutil.rmtree(self._part_folder, ignore_errors=True)
        self._part_folder.mkdir(parents=True)
        self._graph = graph
        self._step = step
        self._entries: dict[str, TensorEntry] = {}
        self._open_part: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._num_parts = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor (of any device). ValueError when the name was there before, ConfigError when the disk is full."""
        if name in self._entries:
            raise ValueError(f"{name} was added before")
        # A copy of its own: safetensors refuses tensors that share memory, and the caller may go on using its tensor.
        own = tensor.detach().cpu().contiguous().clone()
        self._open_part[name] = own
        self._open_bytes += own.nbytes
        self._entries[name] = TensorEntry(
            part=self._num_parts,
            dtype=str(own.dtype).removeprefix("torch."),
            shape=tuple(own.shape),
            digest=digest_of(to_bytes(own)),
        )
        if self._open_bytes >= PART_BYTES:
            self._write_part()

    def finish(self) -> Path:
        """Put the checkpoint in its place, on the disk, and remove all but the newest KEPT. The folder of the checkpoint."""
        self._write_part()
        manifest = Manifest(step=self._step, graph=self._graph, tensors=self._entries)
        write_file(self._part_folder / MANIFEST, _sealed(manifest))
        shutil.rmtree(self._place, ignore_errors=True)
        self._part_folder.rename(self._place)
        sync_folder(self._place.parent)
        for old in checkpoint_folders(self._place.parent)[KEPT:]:
            shutil.rmtree(old)
        return self._place

    def abandon(self) -> None:
        """Forget what was collected."""
        shutil.rmtree(self._part_folder, ignore_errors=True)

    def _write_part(self) -> None:
        if self._open_part:
            path = self._part_folder / _part_name(self._num_parts)
            try:
                save_file(self._open_part, path)
                sync_file(path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot write the checkpoint of step {self._step}: {error}") from None
            self._open_part, self._open_bytes = {}, 0
            self._num_parts += 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, its bytes verified."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Verify every byte of a checkpoint. CheckpointDamaged says what is wrong with it."""
        checkpoint = Checkpoint(folder, _read_manifest(folder))
        for name, entry in checkpoint.manifest.tensors.items():
            if digest_of(to_bytes(checkpoint.tensor(name))) != entry.digest:
                raise CheckpointDamaged(f"checkpoint {folder}: the bytes of {name} are not those that were written")
        return checkpoint

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.manifest.tensors)

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from the disk. CheckpointDamaged when it is not there or not as the manifest says."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointDamaged(f"checkpoint {self.folder} does not hold {name}")
        path = self.folder / _part_name(entry.part)
        try:
            with safe_open(path, framework="pt") as part:
                tensor: Tensor = part.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"checkpoint part {path} cannot be read: {error}") from None
        if tuple(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise CheckpointDamaged(f"checkpoint {self.folder}: {name} is not of the type that was written")
        return tensor


def checkpoint_folders(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are skipped with a sentence. None when there is none at all.

    CheckpointDamaged when there are some and all of them are damaged.
    """
    damage: CheckpointDamaged | None = None
    for path in checkpoint_folders(folder):
        try:
            return Checkpoint.open(path)
        except CheckpointDamaged as error:
            damage = damage or error
            say(f"{error}; trying the one before it")
    if damage is not None:
        raise damage
    return None


def _part_name(number: int) -> str:
    return f"part-{number:04}.safetensors"


def _sealed(manifest: Manifest) -> bytes:
    body = manifest.model_dump(mode="json")
    return json.dumps({"manifest": body, "digest": _digest(body)}, indent=1).encode()


def _digest(body: Mapping[str, Any]) -> Digest:
    return digest_of(json.dumps(body, sort_keys=True).encode())


def _read_manifest(folder: Path) -> Manifest:
    try:
        sealed = json.loads((folder / MANIFEST).read_bytes())
        body, digest = sealed["manifest"], sealed["digest"]
        manifest = Manifest.model_validate_json(json.dumps(body))
    except OSError as error:
        raise CheckpointDamaged(f"checkpoint {folder} has no readable manifest: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ValidationError):
        raise CheckpointDamaged(f"checkpoint {folder}: its manifest is damaged") from None
    if _digest(body) != digest:
        raise CheckpointDamaged(f"checkpoint {folder}: its manifest was changed")
    return manifest
