"""Test every command from an installed wheel, in a new environment and an almost empty folder."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.packages import ROOT, build, copy, install
from helpers.processes import shared_folder

pytestmark = pytest.mark.installed

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Shell:
    """A user's shell: an environment with the package, and a working folder.

    Attributes:
        environment: The virtual environment.
        folder: The working folder of commands.
    """

    def __init__(self, environment, folder):
        self.environment = environment
        self.folder = folder

    def type(self, line):
        """Run a line that must succeed, and return its stdout."""
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))},
                **OFFLINE,
                "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        return result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Make one environment with the wheel, which all workers use."""
    with shared_folder(tmp_path_factory, "installed") as folder:
        if not (folder / "done").exists():
            copy(folder / "source")
            build(folder / "source", folder / "dist")
            (wheel,) = (folder / "dist").glob("*.whl")
            install(wheel, "all", folder / "venv")
            (folder / "done").touch()
    return folder / "venv"


@pytest.fixture(scope="module")
def shell(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    shutil.copytree(ROOT / "tests" / "assets" / "tiny-llama", folder / "tiny")
    return Shell(environment, folder)


def test_package_is_imported_from_the_wheel(shell):
    path = shell.type("python -c 'import rope_patch; print(rope_patch.__file__)'").strip()
    assert Path(path).is_relative_to(shell.environment)
    assert str(ROOT) not in shell.type("python -c 'import sys; print(sys.path)'")


def test_eval_and_report_write_reports(shell):
    shell.type(
        "rope-patch eval tiny --method none,yarn --factor 4 --lengths 512 --depths 50 --report a"
    )
    shell.type("rope-patch report a --out b")
    assert json.loads((shell.folder / "a" / "report.json").read_text())
    for name in "ab":
        assert (shell.folder / name / "report.html").is_file()


def test_plain_lm_eval_runs_the_tasks(shell):
    shell.type(
        'lm_eval --include_path "$(rope-patch tasks --path)" --tasks rp_niah_single_2 '
        """--metadata '{"length": 512, "samples": 2}' --model hf --device cpu """
        "--model_args pretrained=tiny,max_length=512 --output_path plain"
    )
    (path,) = (shell.folder / "plain").rglob("results_*.json")
    assert "rp_niah_single_2" in json.loads(path.read_text())["results"]


def test_export_and_methods_run(shell):
    assert "hf" in shell.type("rope-patch export tiny --engine vllm --method yarn --factor 4")
    assert "yarn" in shell.type("rope-patch methods")


def test_diagnosis_draws_and_advises_an_existing_recipe(shell):
    answer = shell.type("rope-patch diagnose tiny --length 8192 --json --picture waves.svg")
    assert (shell.folder / "waves.svg").is_file()
    line = json.loads(answer)["advice"]["shell"]
    assert line.startswith("rope-patch finetune --config ")
    assert "rows of 8,192 tokens" in shell.type(f"{line} --plan")


SECONDS = "--model tiny --train_length 128 --max_steps 1 --use_cpu true --report_to none"


def test_finetune_runs_a_printed_recipe(shell):
    shell.type("rope-patch recipes smoke_cpu > mine.yaml")
    shell.type(f"rope-patch finetune --config mine.yaml {SECONDS} --output_dir out")
    assert (shell.folder / "out" / "model" / "config.json").is_file()


def test_accelerate_launches_the_installed_script(shell):
    shell.type("rope-patch recipes single > single.yaml")
    shell.type(
        "accelerate launch --config_file single.yaml --cpu -m rope_patch.recipes.finetune "
        f"--config smoke_cpu {SECONDS} --output_dir launched"
    )
    command = (shell.folder / "launched" / "recipe.yaml").read_text().splitlines()[0]
    rerun = command.removeprefix("# ").replace("launched", "again")
    assert shlex.split(rerun)[:3] == ["python", "-m", "rope_patch.recipes.finetune"]
    shell.type(rerun)
    assert (shell.folder / "again" / "model" / "config.json").is_file()


def test_slow_commands_print_help(shell):
    for command in ("search", "recommend", "bench"):
        assert "Examples:" in shell.type(f"rope-patch {command} --help")
