"""Set what pyproject.toml cannot say: files outside the package, where to build, and the page."""

import re
import tempfile
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

# Files of eval/ and recipes/ that the commands read are installed below rope_patch, beside its
# modules: pyproject.toml maps the names of the folders.
not_needed = ["eval.results*", "recipes.experiments*"]
folders = find_namespace_packages(
    include=["eval", "eval.*", "recipes", "recipes.*"], exclude=not_needed
)
packages = find_packages(include=["rope_patch", "rope_patch.*"])
packages += [f"rope_patch.{name}" for name in folders]

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
