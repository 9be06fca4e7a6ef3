"""Print the oldest versions that rope_patch declares for its dependencies, as pip's constraints.

python tests/oldest/minima.py EXTRA ... > constraints.txt
"""

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version


def minima(extras):
    """Return the oldest version of each dependency that the package and these extras allow."""
    oldest = {}
    for line in metadata.requires("rope-patch") or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            for bound in requirement.specifier:
                if bound.operator == ">=":
                    version = Version(bound.version)
                    oldest[requirement.name] = max(version, oldest.get(requirement.name, version))
    return oldest


for name, version in minima(sys.argv[1:]).items():
    print(f"{name}=={version}")
