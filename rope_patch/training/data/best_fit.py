"""Best-fit packing: whole documents put into rows so that few are cut and little is padding.

Source: "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, of which Olmo 3 trains its
long contexts. Documents longer than a row are cut at row length first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

_FAN_OUT = 1024  # bits a node: two levels find a capacity among a million


class Piece(NamedTuple):
    """Tokens of one document in one row.

    Attributes:
        location: Of the document.
        ids: Tokens, `[S]` int64.
        labels: Labels, `[S]` int64.
        begins: Whether the document begins here.
        is_cut: Whether the document begins here and does not end here.
    """

    location: str
    ids: torch.Tensor
    labels: torch.Tensor
    begins: bool
    is_cut: bool


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins, the largest first, each into the fullest bin that has room for it.

    Takes O(log capacity) an item. Needs at most 11/9 of the smallest number of bins, and one more.

    Args:
        sizes: The items' sizes, from 1 to `capacity`.
        capacity: What a bin holds.

    Returns:
        Each bin's items as indices into `sizes`, in the order in which they were put there.
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # room left -> bins
    rooms = _OrderedSet(capacity)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        if not 1 <= size <= capacity:
            raise ValueError(f"expected sizes from 1 to {capacity:,}, got {size:,}")
        room = rooms.at_least(size)
        if room is None:
            room, index = capacity, len(bins)
            bins.append([])
        else:
            index = open_bins[room].pop()
            if not open_bins[room]:
                rooms.discard(room)
        bins[index].append(item)
        left = room - size
        if left:
            same = open_bins.setdefault(left, [])
            if not same:
                rooms.add(left)
            same.append(index)
    return bins


class _OrderedSet:
    """A set of integers from 0 to `largest` that finds the smallest one from any value on.

    A tree of bit fields: a bit says whether the node below it has any.
    """

    def __init__(self, largest: int) -> None:
        self._levels: list[list[int]] = []
        count = largest + 1
        while not self._levels or count > 1:
            count = -(-count // _FAN_OUT)
            self._levels.append([0] * count)

    def add(self, value: int) -> None:
        for bits in self._levels:
            index, bit = divmod(value, _FAN_OUT)
            bits[index] |= 1 << bit
            value = index

    def discard(self, value: int) -> None:
        for bits in self._levels:
            index, bit = divmod(value, _FAN_OUT)
            bits[index] &= ~(1 << bit)
            if bits[index]:
                return
            value = index

    def at_least(self, value: int) -> int | None:
        """Return the smallest member from `value` on; None without one."""
        for level, bits in enumerate(self._levels):
            index, bit = divmod(value, _FAN_OUT)
            if index < len(bits) and (following := bits[index] >> bit):
                value += _lowest_bit(following)
                for lower in reversed(self._levels[:level]):
                    value = value * _FAN_OUT + _lowest_bit(lower[value])
                return value
            value = index + 1
        return None


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class BestFitRows:
    """An endless stream of rows, packed a window of documents at a time.

    A run resumes by reading its window again, from the saved state of its sources.

    Args:
        take: Returns the next piece of a document, of at most a row.
        snapshot: Returns the state of the documents' sources, from which `take` goes on.
        row_length: Tokens of a row.
        window: Rows' worth of tokens that are packed together.
        seed: Seed of the rows' order.
        number: The window to begin with.
        row: The row of that window to begin with.
    """

    def __init__(
        self,
        take: Callable[[int], Piece],
        snapshot: Callable[[], Any],
        *,
        row_length: int,
        window: int,
        seed: str,
        number: int = 0,
        row: int = 0,
    ) -> None:
        self._take, self._snapshot = take, snapshot
        self._row_length, self._window, self._seed = row_length, window, seed
        self._number, self._row = number, row
        self._start: Any = None
        self._rows: list[list[Piece]] = []
        if row:  # also before a short row, whose counts include the window that has been read
            self._read_window()

    def next_row(self) -> list[Piece]:
        """Return the next row's pieces, the longest first; they leave room for padding."""
        if not self._rows:
            self._read_window()
        pieces = self._rows[self._row]
        self._rows[self._row] = []
        self._row += 1
        if self._row == len(self._rows):
            self._number, self._row, self._rows = self._number + 1, 0, []
        return [p._replace(ids=p.ids.long(), labels=p.labels.long()) for p in pieces]

    def state(self) -> tuple[Any, dict[str, int]]:
        """Return the sources' state before the current window, and the next row's place in it."""
        sources = self._start if self._rows else self._snapshot()
        return sources, {"number": self._number, "row": self._row}

    def _read_window(self) -> None:
        self._start = self._snapshot()
        pieces: list[Piece] = []
        missing = self._window * self._row_length
        while missing > 0:
            piece = self._take(self._row_length)
            missing -= len(piece.ids)
            pieces.append(_narrow(piece))
        rows = best_fit_decreasing([len(piece.ids) for piece in pieces], self._row_length)
        # Packed rows go from those of long documents to those of short ones.
        Random(f"{self._seed} window {self._number}").shuffle(rows)
        self._rows = [[pieces[index] for index in row] for row in rows]


def _narrow(piece: Piece) -> Piece:
    """Return a piece in 4 bytes a token, in which a window is kept."""
    ids = piece.ids.int()
    same = piece.labels.data_ptr() == piece.ids.data_ptr()
    return piece._replace(ids=ids, labels=ids if same else piece.labels.int())
