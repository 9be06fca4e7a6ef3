"""What holds for every test: no network, one thread, quiet libraries."""

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, so set before

import pytest
import torch

if not torch.cuda.is_available():  # Triton's kernels run on the CPU then; read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def own_log_level():
    """What one test says with, the next one does not: commands turn the package's log on."""
    log = logging.getLogger("rope_patch")
    level = log.level
    yield
    log.setLevel(level)
