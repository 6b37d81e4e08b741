"""What was decoded lately, for when the same file comes again: least recently used goes first.

Bounded in bytes. An item that would take over a quarter of that is not kept: it would cost too many
others their place. Knows no key but that keys are equal or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from triptych.media.base import Prepared


class DecodedCache:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[Hashable, Prepared] = OrderedDict()
        self.bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Prepared | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: Hashable, item: Prepared) -> None:
        if item.size * 4 > self._capacity or key in self._items:
            return
        self._items[key] = item
        self.bytes += item.size
        while self.bytes > self._capacity:
            _, old = self._items.popitem(last=False)
            self.bytes -= old.size
            self.evictions += 1

    def clear(self) -> None:
        self._items.clear()
        self.bytes = 0
