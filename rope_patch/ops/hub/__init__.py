"""The kernels as a package that stands alone, for the `kernels` library and its hub."""
