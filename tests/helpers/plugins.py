"""Methods from outside for tests: files, and packages with entry points."""

from pathlib import Path

METHOD = '''from dataclasses import dataclass

from rope_patch.methods import Frequencies, Method, option, register_method


@register_method("{name}", paper="nobody, 2026", training="needed")
@dataclass(frozen=True, kw_only=True)
class Outside(Method):
    """The slower pairs divided by a number."""

    share: float = option("share of the pairs that are stretched", default=0.5)

    def frequencies(self, geometry, seq_len=None):
        inv_freq = geometry.inv_freq()
        inv_freq[int(len(inv_freq) * (1 - self.share)) :] /= {divisor}
        return Frequencies(inv_freq, {attention_factor})
'''
FOLLOWING = """
    def valid_until(self, length, trained_length):
        return float(trained_length) if length <= trained_length else float(4 * trained_length)
"""


def write_method(
    path, name="outside", divisor="self.factor", attention_factor="1.0", following=False
):
    """Write a file with one method; return its path.

    Args:
        path: The file.
        name: The method's name.
        divisor: What the slower half of the frequencies is divided by, in Python.
        attention_factor: The multiplier of cos and sin, in Python.
        following: Whether it says that its frequencies depend on the length.
    """
    source = METHOD.format(name=name, divisor=divisor, attention_factor=attention_factor)
    Path(path).write_text(source + (FOLLOWING if following else ""))
    return Path(path)


def install(folder, module, source, group, name, value=None):
    """Write an installed package of one module with one entry point into a folder."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module.replace('_', '-')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.2\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value or module}\n")
