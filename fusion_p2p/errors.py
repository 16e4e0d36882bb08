"""Every error this project raises on purpose, and the exit code a command ends with because of it.

    FusionError                1  our own fault, unless a subclass says otherwise
    |- ConfigError             2  a flag, file, address or factory given by the user is wrong
    |  `- AddressError         2
    |- GraphError              2  a model cannot be captured, or a graph breaks a rule of the wire format
    |- SwarmUnreachable        3  nobody answered in time
    |- Incompatible            4  the other side speaks another protocol version
    |- DeviceUnusable          5  the device cannot run a small forward and backward pass
    |- RunStopped              6  the run ended early; a checkpoint lets it go on
    |- WireError               1  a peer broke the protocol: its stream is closed
    |- NetworkError            1  a stream or dial failed; the caller decides what that means
    |  |- PeerUnreachable         it could not be dialled, or does not serve the protocol
    |  |- StreamClosed            it went away in the middle
    |  `- DeadlinePassed          it said nothing in time
    `- SliceFailed             1  a slice cannot go on (out of memory, non-finite value); the message names slice and op

Nothing else is caught broadly: `Exception` appears in one place, the task supervisor of `peer/` and `owner/`.
"""

from typing import ClassVar


class FusionError(Exception):
    """Base of all errors raised on purpose. Its text is one sentence that a user can act on."""

    exit_code: ClassVar[int] = 1


class ConfigError(FusionError):
    """Something the user gave is wrong; the text says what, where and how to fix it."""

    exit_code = 2


class AddressError(ConfigError):
    """An address cannot be parsed; the text points at the wrong component."""


class GraphError(FusionError):
    """A model cannot be captured, or a graph breaks a rule; the text names the op or node."""

    exit_code = 2


class SwarmUnreachable(FusionError):
    """No bootstrap or no peer answered within the time the user allowed."""

    exit_code = 3


class Incompatible(FusionError):
    """The other side speaks another protocol version; the text gives both and the remedy."""

    exit_code = 4


class DeviceUnusable(FusionError):
    """The chosen device cannot run a forward and backward pass."""

    exit_code = 5


class RunStopped(FusionError):
    """A run ended before its last step; the text says why and how to resume."""

    exit_code = 6


class WireError(FusionError):
    """A peer broke the wire protocol. The stream it came on is closed."""


class NetworkError(FusionError):
    """A dial, a stream or a request failed. Which peer and why is in the text."""


class PeerUnreachable(NetworkError):
    """The peer could not be dialled or does not serve the protocol."""


class StreamClosed(NetworkError):
    """The other side closed or reset the stream."""


class DeadlinePassed(NetworkError):
    """The other side said nothing within the deadline."""


class SliceFailed(FusionError):
    """A slice cannot go on: out of memory, non-finite value, value of another type than declared."""
