"""`python -m rope_patch` is `rope-patch`."""

from rope_patch.cli import main

if __name__ == "__main__":
    main()
