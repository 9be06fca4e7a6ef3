"""Fine-tune a model for a longer context: `accelerate launch recipes/finetune.py --config NAME`.

The same as `rope-patch finetune`, as a file that launchers can start.
"""

from rope_patch.cli import run
from rope_patch.training.trainer import main

if __name__ == "__main__":
    run(main)
