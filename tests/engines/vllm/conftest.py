"""Set up vLLM on a CPU, before anything imports it."""

import os

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.pop("TRITON_INTERPRET", None)  # for rope_patch's own kernels; vLLM compiles
