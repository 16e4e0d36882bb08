"""What a machine must offer before anything is started: found out at once, named, with the remedy."""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

from fusion_p2p.errors import ConfigError

MIN_OPEN_FILES = 1024
MIN_FREE_TEMP_BYTES = 1 << 20


def check_machine() -> None:
    """ConfigError for too few open files or a temp folder that cannot be used."""
    _allow_open_files()
    _check_temp_folder(Path(tempfile.gettempdir()))


def _allow_open_files() -> None:
    """Raise our own limit of open files as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open only {hard} files, a peer needs {MIN_OPEN_FILES}: raise it with "
            f"'ulimit -n {MIN_OPEN_FILES}' (service: LimitNOFILE=, container: --ulimit nofile={MIN_OPEN_FILES})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, hard))


def _check_temp_folder(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"temp folder {folder} cannot be written: {error.strerror}; set TMPDIR to a writable folder"
        ) from None
    if free_bytes < MIN_FREE_TEMP_BYTES:
        raise ConfigError(f"temp folder {folder} is full: free some space, or set TMPDIR to another folder")
