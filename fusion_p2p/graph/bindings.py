"""Which value each name of an exported program means, and which names share memory, while its calls are lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.rewrites import where


class Bindings:
    """Names are fx nodes. A storage is a number: names of one storage may share memory, so that a write through one is seen
    through the others. Inputs, parameters and buffers start in the storage of their own value number."""

    def __init__(self, leaves: Mapping[fx.Node, int], num_leaves: int) -> None:
        self._values: dict[fx.Node, int] = dict(leaves)
        self._storage: dict[fx.Node, int] = dict(leaves)
        self._lists: dict[fx.Node, tuple[list[int], list[int]]] = {}
        """Values and storages of calls that return several tensors."""
        self._leaf_now = {value: value for value in range(num_leaves)}
        """What the memory of each input, parameter and buffer holds now."""
        self._num_storages = num_leaves
        self._sealed: set[int] = set()
        """Storages that must not be written: trainable values as `no_grad` sees them."""
        self._stale: dict[fx.Node, str] = {}
        """Names whose memory was written through another view; reading one is refused with this reason."""

    def value(self, name: fx.Node) -> int:
        """The value that a name means now. GraphError when its memory was written through another view."""
        if name in self._stale:
            raise GraphError(self._stale[name])
        if name not in self._values:
            raise GraphError(f"{name.name}{where(name)} is not a tensor")
        return self._values[name]

    def storage(self, name: fx.Node) -> int:
        return self._storage[name]

    def new_storage(self) -> int:
        self._num_storages += 1
        return self._num_storages

    def sealed_storage(self) -> int:
        """New memory that must not be written."""
        self._sealed.add(self.new_storage())
        return self._num_storages

    def bind(self, name: fx.Node, value: int, storage: int) -> None:
        """From here on the name means this value, in this storage."""
        self._values[name], self._storage[name] = value, storage
        self._stale.pop(name, None)

    def bind_list(self, name: fx.Node, values: Sequence[int], storages: Sequence[int]) -> None:
        """A name for several tensors; `bind_item` names one of them."""
        self._lists[name] = (list(values), list(storages))

    def bind_item(self, name: fx.Node, source: object, index: object) -> None:
        """The name means item `index` of a list of tensors."""
        if not isinstance(source, fx.Node) or not isinstance(index, int) or source not in self._lists:
            raise GraphError(f"{name.name}{where(name)} takes an item of what is not a list of tensors")
        values, storages = self._lists[source]
        self.bind(name, values[index], storages[index])

    def write(self, written: fx.Node, new: int, call: str) -> None:
        """From here on every name for the memory of `written` means the value `new`; `call` describes the write in errors."""
        storage, old = self._storage[written], self.value(written)
        if storage in self._sealed:
            raise GraphError(f"{call} writes in place into what is trained, which cannot be captured")
        if self._leaf_now.get(storage, old) != old:
            raise GraphError(f"{call} writes in place into a part of a buffer, which cannot be captured")
        if storage in self._leaf_now:
            self._leaf_now[storage] = new
        reason = f"{call} writes in place into memory that is read through another view, which cannot be captured"
        for other, shared in self._storage.items():
            if shared == storage and self._values[other] == old:
                self._values[other] = new
            elif shared == storage and new != old:
                self._stale[other] = reason

    def written_leaves(self) -> dict[int, int]:
        """Inputs and buffers that were written, each with the value that its memory holds now."""
        return {leaf: value for leaf, value in self._leaf_now.items() if value != leaf}
