"""`fusion-peer train`: trains one model over the peers of a swarm."""

from __future__ import annotations

from pathlib import Path

from fusion_p2p.cli.addresses import check_addresses
from fusion_p2p.cli.codecs import check_codec
from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.identity_file import claimed_identity
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.cli.running import INTERRUPTED, run
from fusion_p2p.config import TrainConfig, check_resumable, resolve


def train(given: Given) -> int:
    """Train a model over the peers of a swarm. With --resume RUN, go on where that run ended."""
    config = resolved(given)
    check_addresses(config, config.bootstrap)
    check_codec(config.codec, config.ratio)
    configure_logging(config.log_level)
    from fusion_p2p.monitor.view import open_view
    from fusion_p2p.owner.driver import run_train  # imports torch and hivemind

    with claimed_identity(config, "train") as claimed, open_view() as view:
        return run(run_train(claimed, view), stopped_code=INTERRUPTED)


def resolved(given: Given) -> TrainConfig:
    """The configuration; a resumed run starts from its own, and keeps what decides its result."""
    resume = given.text("resume")
    if resume is None:
        return given.resolve(TrainConfig)
    from fusion_p2p.owner.run_folder import stored_config

    path = stored_config(Path(resume))
    config = given.resolve(TrainConfig, path)
    check_resumable(resolve(TrainConfig, {}, {}, (path,)), config)
    return config
