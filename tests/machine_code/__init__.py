"""Read what the kernels' machine code says about their speed, without a GPU.

`PYTHONPATH=tests python -m machine_code` prints the table of docs/kernels.md, and with
`--rivals FOLDER` our kernels beside those of others. `PYTHONPATH=tests python -m
machine_code.host_time` measures Python's time at launches. What comes in are launches (`Job`), what
goes out is `Code`: registers, accesses, instructions of a token, cycles. Open `launch_code` first.

- `cross_compilation`: records the launches of our ops, and compiles them for absent GPUs.
- `sass`: NVIDIA's machine code: a warp's path through a kernel, and how long it takes.
- `launch_code`: what the code of a launch says, as numbers and as a table.
- `rival_code`: the same for Liger, flash-attention and Unsloth, and the comparison.
- `host_time`: Python's time of norms and rotation for a decoded token.
"""
