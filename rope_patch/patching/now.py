"""What one thread's forward knows, from the decoder's hooks to the rotary module's."""

from __future__ import annotations

import threading

import torch

from rope_patch.cache import Record


class Now(threading.local):
    """What a forward has found out so far, in the thread that it runs in.

    Attributes:
        rows: What the rows are rotated by; None outside of the decoder's forward.
        unrecorded: The record of a cache that the decoder has yet to make.
        resting: The name of the rotary module's buffer that stands aside, the buffer, and whether
            other threads wait for it to come back; None outside of the rotary module's forward.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.unrecorded: Record | None = None
        self.resting: tuple[str, torch.Tensor, bool] | None = None
