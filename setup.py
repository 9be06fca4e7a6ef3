"""Set what pyproject.toml cannot say: all packages, where to build, and the index's page."""

import re
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

# eval/ and recipes/ are packages of rope_patch: pyproject.toml maps their names.
outside = find_packages(include=["eval", "eval.*", "recipes", "recipes.*"])
packages = find_packages(include=["rope_patch", "rope_patch.*"])
packages += [f"rope_patch.{name}" for name in outside]

# setuptools would pack whatever an earlier build left in build/, deleted modules among it.
build_folder = tempfile.TemporaryDirectory()

# Links within the repository are dead on a package index: keep their words, drop their pictures.
INSIDE = r"\((?!https?://)[^)]*\)"
page = Path("README.md").read_text(encoding="utf-8")
page = re.sub(rf"!\[[^]]*\]{INSIDE}\n*", "", page)
page = re.sub(rf"\[([^]]*)\]{INSIDE}", r"\1", page)

setup(
    packages=packages,
    long_description=page,
    long_description_content_type="text/markdown",
    options={"build": {"build_base": build_folder.name}},
)
