"""Set Triton's interpreter up for tests of kernels."""

from helpers.triton_interpreter import patch_language_once_a_launch

patch_language_once_a_launch()
