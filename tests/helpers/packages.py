"""Build wheels and sdists in a copy of this checkout, and install them."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def files():
    """Return every file of the checkout that git does not ignore, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in output.split("\0") if path and (ROOT / path).is_file()]


def copy(folder):
    """Copy the checkout's files, without the leftovers of earlier builds."""
    for path in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)


def build(source, out, *kinds):
    """Build packages into `out`, offline.

    Without `kinds`: an sdist, and a wheel from it.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def install(wheel, extra, folder):
    """Make a virtual environment with a wheel, an extra, and what they require: nothing else.

    The requirements are links to this environment's packages, which takes seconds, not minutes.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = (folder / "lib").glob("*/site-packages")
    for name in required("rope-patch", extra) - {"rope-patch"}:
        package = distribution(name)
        for path in package.files:
            if path.parts[0] != "..":
                link = site / path.parts[0]
                if not link.is_symlink():  # the first of a package's files
                    link.symlink_to(package.locate_file(link.name))
            elif path.parts[-2] == "bin":
                script = path.locate().read_text(encoding="utf-8")
                link = folder / "bin" / path.name
                link.write_text(script.replace(sysconfig.get_path("scripts"), str(link.parent)))
                link.chmod(0o755)


def required(name, *extras):
    """Return the names of a package's requirements, and of theirs, as this environment has them."""
    requirements, names = [Requirement(f"{name}[{','.join(extras)}]")], set()
    seen = set()
    while requirements:
        requirement = requirements.pop()
        key = requirement.name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        names.add(requirement.name)
        package = distribution(requirement.name)
        assert requirement.specifier.contains(package.version, prereleases=True), requirement
        for each in map(Requirement, package.requires or []):
            chosen = [{"extra": extra} for extra in ("", *requirement.extras)]
            if each.marker is None or any(map(each.marker.evaluate, chosen)):
                requirements.append(each)
    return names
