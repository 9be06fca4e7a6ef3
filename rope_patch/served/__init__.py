"""Evaluation of a model that a server holds, by its address alone.

In come the address of a server with OpenAI's completions and the model's tokenizer; out comes the
report that `rope_patch.evaluation` writes of a live model. The tasks, their samples, the stored
answers and the statistics are those of that room: `session.ServedSession` stands in for its
`Session`.

Open `entry_point.py` first. `server.py` asks a server what it is and can do. `completions.py` sends
prompts through lm-eval's client of such APIs.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "entry_point": "compare_servers evaluate_server",
        "pipeline": "run run_two",
        "request": "ServedRequest",
    },
)
