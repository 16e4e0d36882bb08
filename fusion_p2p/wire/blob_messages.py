"""Asking another process for bytes (`/fusion/blobs/1`): graphs and plans by digest, tensors of a slice's state by name.

    asker   FetchContent | FetchTensor
    holder  Blob, then exactly `num_bytes` raw bytes          or  Missing
    asker   Arrived, again and again until it has all of them

Several requests may follow one another on a stream.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fusion_p2p.wire.messages import Count, DigestText, JobName, Message, MessageSet, Text

BLOB_PROTOCOL = "/fusion/blobs/1"


class FetchContent(Message):
    kind: ClassVar[str] = "fetch_content"
    digest: DigestText


class FetchTensor(Message):
    kind: ClassVar[str] = "fetch_tensor"
    job: JobName
    incarnation: Count
    step: Count
    """The state after this step; 0 is the state before the first."""
    name: Annotated[str, Field(min_length=1, max_length=512)]
    """Role and parameter, as in `parameter/h.0.attn.weight` or `momentum/h.0.attn.weight`."""


class Blob(Message):
    kind: ClassVar[str] = "blob"
    num_bytes: Count


class Missing(Message):
    kind: ClassVar[str] = "missing"
    reason: Text


class Arrived(Message):
    kind: ClassVar[str] = "arrived"
    num_bytes: Count
    """Read since the last one: as many more may be on their way."""


BLOB_MESSAGES = MessageSet(FetchContent, FetchTensor, Arrived, Blob, Missing)
