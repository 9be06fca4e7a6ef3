"""Print the oldest versions that rope_patch declares for its dependencies, as constraints for pip.

python tests/oldest/minima.py > constraints.txt
"""

from importlib import metadata

from packaging.requirements import Requirement

for line in metadata.requires("rope-patch") or ():
    requirement = Requirement(line)
    if requirement.marker is None:  # no extra's
        (oldest,) = (s.version for s in requirement.specifier if s.operator == ">=")
        print(f"{requirement.name}=={oldest}")
