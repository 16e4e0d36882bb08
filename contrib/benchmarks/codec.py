"""What codecs cost and save: 4 Mi float32 on one thread, and on the GPU if there is one.

The rival is what a first implementation does: `torch.topk`, then values as float32 and places as int64. Both sides run in
turn in this process, and medians are compared; seconds on the CPU are the process's own, so that others disturb them less.
The link speed up to which a codec pays is (bits saved) / (seconds to encode and decode): on a faster link sending the value as
it is takes less time. `adaptive` goes by `plan.coding`: the same costs as passes over memory, for a link's two devices.

    python -m contrib.benchmarks.codec
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from contrib.benchmarks.report import print_figures, write_figures
from fusion_p2p.compress import bits
from fusion_p2p.compress.codec import EdgeCodec
from fusion_p2p.compress.selecting import select
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.wire.codecs import PAPER_BYTES, parse
from fusion_p2p.wire.frames import Moment

COUNT = 4 << 20
RATIO = 100
ROUNDS = 15
SPECS = ("bf16", "fp16", "int8", "int4", "topk:3:int8", "topk:5:int8", "topk:10:int8", "topk:100:int8", "topk-paper:100")
TYPE = TensorType((COUNT,), "float32", True)
AT = Moment(1, 0)


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """All figures; torch's thread count is restored afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        host = torch.device("cpu")
        figures = _against_the_naive_codec(rounds) | _bits() | _every_codec(host, rounds)
        if torch.cuda.is_available():
            figures |= _every_codec(torch.device("cuda"), rounds)
        return figures
    finally:
        torch.set_num_threads(threads)


def _values(device: torch.device) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).to(device)


def _against_the_naive_codec(rounds: int) -> dict[str, float]:
    values = _values(torch.device("cpu"))
    naive, ours = _naive(values), _whole_way(f"topk:{RATIO}:int8", values)
    naive(), ours()  # the first call of each pays for memory that is new
    pairs = [(_seconds(naive), _seconds(ours)) for _ in range(rounds)]
    return {
        "naive_ms": 1e3 * statistics.median(first for first, _ in pairs),
        "topk_ms": 1e3 * statistics.median(second for _, second in pairs),
        "codec_speedup": statistics.median(first / second for first, second in pairs),
    }


def _naive(values: Tensor) -> Callable[[], object]:
    kept = COUNT // RATIO

    def run() -> Tensor:
        places = torch.topk(values.abs(), kept, sorted=False).indices
        data = bytearray(values[places].numpy().tobytes() + places.numpy().tobytes())
        received = torch.zeros(COUNT)
        received[torch.frombuffer(data, dtype=torch.int64, offset=4 * kept)] = torch.frombuffer(
            data, dtype=torch.float32, count=kept
        )
        return received

    return run


def _whole_way(text: str, values: Tensor) -> Callable[[], object]:
    sender, reader = (EdgeCodec(parse(text), TYPE, values.device) for _ in range(2))
    return lambda: reader.decode_forward(AT, sender.encode_forward(AT, values))


def _bits() -> dict[str, float]:
    """Index coding on independent places against log2 C(n, k), and a whole kept element with its int8 value."""
    values = _values(torch.device("cpu"))
    figures: dict[str, float] = {}
    for ratio in (3, 10, RATIO, 1000):
        found = select(values, ratio)
        if found is None:
            raise RuntimeError("random numbers are finite")
        places = found.numpy()
        kept = len(places)
        bound = (math.lgamma(COUNT + 1) - math.lgamma(kept + 1) - math.lgamma(COUNT - kept + 1)) / math.log(2)
        taken = 8 * sum(len(part) for part in bits.encode_places(places, COUNT))
        figures[f"index_bits_over_bound_{ratio}"] = taken / bound - 1
    payload = EdgeCodec(parse(f"topk:{RATIO}:int8"), TYPE, values.device).encode_forward(AT, values)
    return {
        "index_bits_over_bound": figures[f"index_bits_over_bound_{RATIO}"],
        **figures,
        "bits_per_kept_element": 8 * len(payload) / (COUNT // RATIO),
        "bits_per_kept_element_naive": 8.0 * PAPER_BYTES,
    }


def _every_codec(device: torch.device, rounds: int) -> dict[str, float]:
    values = _values(device)
    figures: dict[str, float] = {}
    for text in SPECS:
        encode_s, decode_s, num_bytes = _costs(text, values, rounds)
        name = text.replace(":", "_").replace("-", "_") + ("" if device.type == "cpu" else "_gpu")
        saved_bits = 8 * (TYPE.num_bytes - num_bytes)
        figures[f"{name}_encode_gb_per_s"] = TYPE.num_bytes / encode_s / 1e9
        figures[f"{name}_decode_gb_per_s"] = TYPE.num_bytes / decode_s / 1e9
        figures[f"{name}_pays_below_gbit_per_s"] = saved_bits / (encode_s + decode_s) / 1e9
    return figures


def _costs(text: str, values: Tensor, rounds: int) -> tuple[float, float, int]:
    """Median seconds to encode and to decode a value, and its bytes."""
    sender, reader = (EdgeCodec(parse(text), TYPE, values.device) for _ in range(2))
    data = sender.encode_forward(AT, values)
    reader.decode_forward(AT, data)
    clock = time.perf_counter if values.is_cuda else time.process_time
    encode = [_seconds(lambda: sender.encode_forward(AT, values), clock) for _ in range(rounds)]
    decode = [_seconds(lambda: _done(reader.decode_forward(AT, data)), clock) for _ in range(rounds)]
    return statistics.median(encode), statistics.median(decode), len(data)


def _done(received: Tensor) -> None:
    if received.is_cuda:
        torch.cuda.synchronize(received.device)


def _seconds(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    begun = clock()
    call()
    return clock() - begun


def main() -> int:
    """Print and keep the figures; 1 when one does not hold."""
    figures = measure()
    write_figures("bench-codec", figures)
    return 0 if print_figures("Codecs, 4 Mi float32, one thread", figures) else 1


if __name__ == "__main__":
    sys.exit(main())
