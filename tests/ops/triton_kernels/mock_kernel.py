"""A mock of a compiled Triton kernel, which records what it is launched with."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from rope_patch.ops.kernels import launcher


@dataclass
class Kernel:
    """A mock kernel that records slow launches through Triton and fast ones of compiled kernels."""

    fn: object
    slow: list = field(default_factory=list)
    fast: list = field(default_factory=list)
    hooked: list = field(default_factory=list)

    def __getitem__(self, grid):
        def launch(*args, num_warps, num_stages, **constants):
            self.slow.append(
                SimpleNamespace(
                    grid=grid, args=args, constants=constants, warps=num_warps, stages=num_stages
                )
            )
            return Compiled(self)

        return launch


@dataclass
class Compiled:
    """A mock of Triton's `CompiledKernel`."""

    kernel: Kernel
    function = "function"
    packed_metadata = "metadata"

    def __getitem__(self, grid):
        return lambda *args: self.kernel.hooked.append(SimpleNamespace(grid=grid, args=args))

    def run(self, x, y, z, stream, function, metadata, description, enter, leave, *args):
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert description is enter is leave is None
        self.kernel.fast.append(SimpleNamespace(grid=(x, y, z), args=args))


def mock_launcher(monkeypatch, module, attribute):
    """Put a mock in the place of the kernel of a module's launcher; return the mock."""
    driver = SimpleNamespace(get_current_stream=lambda index: "stream")
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher.triton.runtime.driver, "_active", driver)
    kernel = Kernel(getattr(module, attribute).kernel.fn)
    monkeypatch.setattr(module, attribute, launcher.Launcher(kernel))
    return kernel
