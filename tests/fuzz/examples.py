"""A valid message of every kind, made from the types themselves, so that no kind is forgotten."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fusion_p2p.wire.blob_messages import BLOB_MESSAGES
from fusion_p2p.wire.hello_messages import HELLO_MESSAGES
from fusion_p2p.wire.job_messages import JOB_MESSAGES
from fusion_p2p.wire.messages import Message, MessageSet
from fusion_p2p.wire.probe_messages import PROBE_MESSAGES
from fusion_p2p.wire.swarm_messages import SWARM_MESSAGES

MESSAGE_SETS: dict[str, MessageSet] = {
    "hello": HELLO_MESSAGES,
    "job": JOB_MESSAGES,
    "swarm": SWARM_MESSAGES,
    "blob": BLOB_MESSAGES,
    "probe": PROBE_MESSAGES,
}


def examples(messages: MessageSet) -> list[Message]:
    """One of each kind of a set, in the order of the set."""
    return [message(kind) for kind in messages._types.values()]


def message(kind: type[Message]) -> Message:
    return kind.model_validate({name: _field(name, field) for name, field in kind.model_fields.items()})


def _field(name: str, field: FieldInfo) -> Any:
    return _value(name, field.annotation, list(field.metadata))


def _value(name: str, annotation: Any, metadata: list[Any]) -> Any:
    """A value that the annotation allows: never empty, never at a default, the same every time."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [part for extra in arguments[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _value(name, arguments[0], [*inner, *metadata])
    if origin in (types.UnionType, typing.Union):
        return _value(name, arguments[0], metadata)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple:
        return tuple(_value(name, argument, []) for argument in (arguments[:1] if arguments[-1] is Ellipsis else arguments))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field_name: _field(field_name, field) for field_name, field in annotation.model_fields.items()}
    return _plain(name, annotation, metadata)


def _plain(name: str, annotation: Any, metadata: list[Any]) -> Any:
    if annotation is bool:
        return True
    if annotation is int:
        return 1 + sum(map(ord, name)) % 97
    if annotation is float:
        return max(0.5, *(float(part.ge) for part in metadata if isinstance(part, annotated_types.Ge)), 0.0)
    if annotation is bytes:
        return name.encode().ljust(_min_length(metadata), b".")[: _max_length(metadata)]
    pattern = next((part.pattern for part in metadata if getattr(part, "pattern", None)), None)
    if pattern is None:
        return name
    return "5a" * (int(pattern.rsplit("{", 1)[1].split("}")[0]) // 2)


def _min_length(metadata: list[Any]) -> int:
    return max((part.min_length for part in metadata if isinstance(part, annotated_types.MinLen)), default=0)


def _max_length(metadata: list[Any]) -> int:
    return min((part.max_length for part in metadata if isinstance(part, annotated_types.MaxLen)), default=1 << 16)
