"""What codecs do to numbers before they are packed: channels and rotation of int4, and which numbers TopK keeps."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_p2p.compress import bits
from fusion_p2p.compress.quantising import dithers, rotation
from tests.unit.test_compress_codec import CPU, chosen, crossed, largest, random


@pytest.mark.parametrize("shape", [(4, 64, 96), (32, 96, 8, 8)], ids=["last", "images"])
def test_int4_spends_no_codes_on_what_is_known_of_channels(shape: tuple[int, ...]):
    along = (96,) if len(shape) == 3 else (96, 1, 1)
    chance = random(*shape)
    spreads, means = torch.exp(random(96, seed=1)).view(along), 20 * random(96, seed=2).view(along)
    lost = (crossed("int4", chance * spreads + means)[0] - means) / spreads - chance
    others = tuple(place for place in range(len(shape)) if shape[place] != 96)
    assert float(lost.square().mean(others).max().sqrt()) < 0.15


def test_sixteen_codes_lose_less_than_fifteen_and_zeros_nothing():
    flat = random(1 << 14)
    flat[:640] = 0
    received, _ = crossed("int4", flat)
    assert torch.equal(received[:640], flat[:640])
    peaks = (flat.view(-1, 64) @ rotation(CPU)).abs().amax(1)[10:]
    fifteen = float((peaks / 7).square().mean() / 12)
    assert float((received - flat)[640:].square().mean()) < 0.92 * fifteen


def test_dithers_are_evenly_spread_and_differ_between_seeds():
    one, other = dithers(200_000, 5, CPU), dithers(200_000, 1_000_003, CPU)
    assert float(one.min()) >= 0
    assert float(one.max()) < 1
    assert abs(float(one.mean()) - 0.5) < 0.005
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.02
    assert torch.equal(one[70_000:80_000], dithers(80_000, 5, CPU)[70_000:])


def test_the_rotation_is_orthogonal_and_spreads_an_outlier():
    turn = rotation(CPU)
    assert torch.allclose(turn @ turn.t(), torch.eye(64), atol=1e-6)
    outlier = random(64, 64) * 0.1
    outlier[:, 7] = 30.0
    rotated = (crossed("int4", outlier)[0] - outlier)[:, :7].norm()
    plain = outlier[:, :7].norm()  # without rotation, a scale of 30 / 7 leaves nothing of the others
    assert rotated < plain * 7
    assert ((outlier @ turn).abs().amax(1) < 6).all()


def test_of_equal_magnitudes_the_first_are_kept():
    tensor = torch.tensor([1.0, -3.0, 3.0, -3.0, 0.5, 3.0, -4.0, 0.0, 0.0, 0.0])
    assert chosen(tensor, 10 / 3).tolist() == [1, 2, 6]
    assert chosen(torch.ones(100_000), 100).tolist() == list(range(1000))


@pytest.mark.parametrize("ratio", [2, 9.5, 100, 1000])
@pytest.mark.parametrize("kind", ["normal", "spiky", "integers", "ramp"])
def test_selection_is_that_of_a_full_sort(kind: str, ratio: float):
    flat = random(200_003, seed=3)
    match kind:
        case "spiky":
            flat[::61] = 0.0  # what the sample sees is not what there is
        case "integers":
            flat = (flat * 3).round()
        case "ramp":
            flat = torch.arange(200_003.0)
    assert torch.equal(chosen(flat, ratio), largest(flat, ratio))


def test_a_large_tensor_is_divided_into_blocks_that_keep_their_own_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusion_p2p.compress.selecting.SELECTION_BLOCK", 1000)
    flat = random(2500, seed=2)
    flat[:1000] *= 100
    places = chosen(flat, 50)
    assert [int(((places >= begin) & (places < begin + 1000)).sum()) for begin in (0, 1000, 2000)] == [20, 20, 10]
    assert torch.equal(places[20:40], largest(flat[1000:2000], 50) + 1000)


@pytest.mark.parametrize("ratio", [3, 10, 100])
def test_indices_and_values_take_few_bits(ratio: int):
    flat = random(1 << 18, seed=6)
    places = chosen(flat, ratio).numpy()
    remainders, quotients = bits.encode_places(places, len(flat))
    kept, among = len(places), len(flat)
    bound = (math.lgamma(among + 1) - math.lgamma(kept + 1) - math.lgamma(among - kept + 1)) / math.log(2)
    assert 8 * (len(remainders) + len(quotients)) <= 1.05 * bound
    if ratio == 100:
        assert 8 * len(crossed(f"topk:{ratio}:int8", flat)[1]) <= 16 * kept
