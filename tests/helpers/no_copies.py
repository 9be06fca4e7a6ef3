"""Find what waits for a device, without one: a meta tensor has no number to wait for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoCopies(TorchDispatchMode):
    """Refuses copies from the host, which wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "a copy to a device"
        return func(*args, **kwargs)
