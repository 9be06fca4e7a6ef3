"""A user's folder of lm-eval tasks, made of nothing."""

BUILDER = """
from datasets import Dataset
from transformers import AutoTokenizer


def lists(tokenizer, length, **_):
    assert AutoTokenizer.from_pretrained(tokenizer)
    words = ["red", "blue", "green", "black"] * 2
    filler = " stone" * (length // 16)
    rows = [
        {"input": f"{a}{filler} {a}{filler}", "word": f" {b}", "text": i // 2, "depth": 50}
        for i, (a, b) in enumerate(zip(words[:6], words[::3] * 2))
    ]
    return {"test": Dataset.from_list(rows)}


def sums(**_):
    return {"test": Dataset.from_list([{"q": f"{i} and {i} are", "a": " even"} for i in range(5)])}


def pages(**_):
    return {"test": Dataset.from_list([{"page": f"page {i} of {i * i} " * 100} for i in range(3)])}
"""
COMMON = """
dataset_path: ""
test_split: test
"""
FILES = {
    "builder.py": BUILDER,
    "_common.yaml": COMMON,  # no task: lm-eval reads it where another file includes it
    "lists.yaml": """
include: _common.yaml
task: my_lists
tag: my_tag
custom_dataset: !function builder.lists
output_type: multiple_choice
doc_to_text: "{{input}}"
doc_to_choice: [" red", " blue", " green", " black"]
doc_to_target: "{{word}}"
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
  length: 64
""",
    "sums.yaml": """
include: _common.yaml
task: my_sums
tag: my_tag
custom_dataset: !function builder.sums
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
metric_list:
  - metric: perplexity
  - metric: acc
metadata:
  version: 1.0
""",
    "pages.yaml": """
include: _common.yaml
task: my_pages
custom_dataset: !function builder.pages
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - metric: word_perplexity
metadata:
  version: 1.0
""",
    "group.yaml": """
group: my_group
task: [my_lists, my_pages]
""",
}


def write_tasks(folder):
    """Write the tasks into a new folder; return its path as text."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return str(folder)
