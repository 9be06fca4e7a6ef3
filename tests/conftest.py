"""What holds for every test: no network, one thread, quiet libraries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, so set before

import torch

if not torch.cuda.is_available():  # Triton's kernels run on the CPU then; read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
