"""A peer-to-peer volunteer computing network that trains neural networks nobody could train alone.

Importing this package pulls in nothing heavy: torch, hivemind and libp2p are imported by the modules that need them.
"""

__version__ = "0.1.0"
PROTOCOL = 1
"""Version of everything two peers say to each other. Another number is refused with a sentence (`Incompatible`)."""
