"""Command `python -m rope_patch.ops.hub FOLDER`: write the kernels' package for the hub."""

import argparse

from rope_patch.ops.hub.package import build_package
from rope_patch.utils.errors import Refused


def main() -> None:
    """Write the package and name its folder."""
    parser = argparse.ArgumentParser(prog="python -m rope_patch.ops.hub", description=__doc__)
    parser.add_argument("folder", help="a new or empty folder, the root of a repository of the hub")
    folder = parser.parse_args().folder
    try:
        print(f"Written to {build_package(folder)}")
    except (Refused, OSError) as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
