"""Control messages: their bytes are fixed, and only exactly what a type allows is taken."""

from __future__ import annotations

import json

import msgpack
import pytest

from fusion_p2p import config
from fusion_p2p.errors import WireError
from fusion_p2p.wire import swarm_messages
from fusion_p2p.wire.hello_messages import HELLO_MESSAGES, Hello, Versions
from fusion_p2p.wire.job_messages import JOB_MESSAGES, Pulse, StepReport
from fusion_p2p.wire.messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, Message, MessageSet, body_length, unpack
from tests.fuzz.examples import MESSAGE_SETS, examples
from tests.unit.golden_messages import GOLDEN, encoded

ALL = [(messages, message) for messages in MESSAGE_SETS.values() for message in examples(messages)]


def test_the_bytes_of_every_message_are_those_of_this_protocol():
    assert encoded() == json.loads(GOLDEN.read_text()), "see tests/unit/golden_messages.py"


@pytest.mark.parametrize(("messages", "message"), ALL, ids=lambda value: getattr(value, "kind", ""))
def test_every_message_comes_back_as_it_was(messages: MessageSet, message: Message):
    data = messages.encode(message)
    assert body_length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert messages.decode(data[LENGTH_BYTES:]) == message


@pytest.mark.parametrize(("messages", "message"), ALL, ids=lambda value: getattr(value, "kind", ""))
def test_an_extra_or_missing_field_is_refused(messages: MessageSet, message: Message):
    fields = unpack(messages.encode(message)[LENGTH_BYTES:])
    with pytest.raises(WireError, match=message.kind):
        messages.decode(msgpack.packb({**fields, "extra": 1}))
    required = [name for name, field in type(message).model_fields.items() if field.is_required()]
    for name in required:
        with pytest.raises(WireError, match=name):
            messages.decode(msgpack.packb({key: value for key, value in fields.items() if key != name}))


def test_types_are_not_coerced():
    good = {"kind": "hello", "network": "n", "process": bytes(16), "addresses": ["/a"]}
    assert isinstance(HELLO_MESSAGES.decode(msgpack.packb(good)), Hello)
    for wrong in ({"network": b"n"}, {"process": "x" * 16}, {"process": bytes(15)}, {"addresses": "/a"}, {"addresses": [1]}):
        with pytest.raises(WireError):
            HELLO_MESSAGES.decode(msgpack.packb(good | wrong))
    with pytest.raises(WireError):
        HELLO_MESSAGES.decode(msgpack.packb({"kind": "versions", "protocol": True, "fusion": "1"}))
    with pytest.raises(WireError):
        HELLO_MESSAGES.decode(msgpack.packb({"kind": "versions", "protocol": 1.0, "fusion": "1"}))


def test_a_message_of_another_protocol_is_neither_sent_nor_taken():
    with pytest.raises(ValueError, match="Pulse"):
        HELLO_MESSAGES.encode(Pulse(progress=1))
    with pytest.raises(WireError, match="unknown control message"):
        HELLO_MESSAGES.decode(JOB_MESSAGES.encode(Pulse(progress=1))[LENGTH_BYTES:])


@pytest.mark.row(37)
def test_sizes_are_limited_before_anything_is_read():
    with pytest.raises(WireError, match=str(MAX_MESSAGE_BYTES)):
        body_length(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match=str(MAX_MESSAGE_BYTES)):
        HELLO_MESSAGES.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_what_is_too_large_is_our_own_fault():
    report = StepReport(
        epoch=1, step=1, replica=0, squares=(0.5,) * 6000, losses=(0.5,) * 6000, busy_s=0.0, bytes_sent=0, bytes_received=0
    )
    with pytest.raises(ValueError, match=str(MAX_MESSAGE_BYTES)):
        JOB_MESSAGES.encode(report)


def test_refusals_do_not_repeat_what_a_stranger_sent():
    secret = "\x1b[2J" + "x" * 2000
    with pytest.raises(WireError) as caught:
        HELLO_MESSAGES.decode(msgpack.packb({"kind": "hello", "network": secret, "process": b"", "addresses": []}))
    assert secret not in str(caught.value)
    with pytest.raises(WireError) as caught:
        HELLO_MESSAGES.decode(msgpack.packb({"kind": secret}))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_messages_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Versions(protocol=1, fusion="1").protocol = 2  # type: ignore[misc]


def test_no_job_is_registered_whose_plan_would_take_for_ever():
    assert swarm_messages.MAX_MICRO_BATCHES == config.MAX_MICRO_BATCHES, "who is refused by the swarm learns it at once"
    (register,) = [one for one in examples(swarm_messages.SWARM_MESSAGES) if isinstance(one, swarm_messages.Register)]
    fields = {"kind": "register", **register.model_dump()}
    for micro_batches in (1, swarm_messages.MAX_MICRO_BATCHES):
        body = msgpack.packb(fields | {"micro_batches": micro_batches})
        assert swarm_messages.SWARM_MESSAGES.decode(body).micro_batches == micro_batches
    with pytest.raises(WireError, match="micro_batches: Input should be less than or equal to 4096"):
        swarm_messages.SWARM_MESSAGES.decode(msgpack.packb(fields | {"micro_batches": swarm_messages.MAX_MICRO_BATCHES + 1}))
