"""Test methods from files, modules, and installed packages."""

import logging
import os
import subprocess
import sys

import pytest
from helpers.commands import run_in_new_process
from helpers.plugins import METHOD, install, write_method

import rope_patch
from rope_patch.methods import find_method, get_method, load_plugin, origin_of

pytestmark = pytest.mark.usefixtures("own_registry")
GROUP = "rope_patch.methods"
SOURCE = METHOD.format(name="outside", divisor="self.factor", attention_factor="1.0")


def test_a_file_gives_its_methods_and_may_be_loaded_again(tmp_path):
    path = write_method(tmp_path / "mine.py")
    assert load_plugin(str(path)) == ["outside"] == load_plugin(str(path))
    geometry = {"head_dim": 8, "theta": 1e4, "trained_length": 64, "factor": 4}
    assert rope_patch.frequencies("outside", **geometry).inv_freq[-1].item() == pytest.approx(
        1e4**-0.75 / 4, rel=1e-12
    )
    write_method(path, divisor="8")
    load_plugin(str(path))
    assert rope_patch.frequencies("outside", **geometry).inv_freq[-1].item() == pytest.approx(
        1e4**-0.75 / 8, rel=1e-12
    )
    assert str(origin_of(get_method("outside"))) == "the file mine.py"


def test_a_module_gives_its_methods(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_method(tmp_path / "outside_module_of_a_test.py")
    assert load_plugin("outside_module_of_a_test") == ["outside"]
    assert origin_of(get_method("outside")).package is None
    folder = tmp_path / "late-1.2.dist-info"  # installed meanwhile, as from a notebook
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.2\n")
    (folder / "top_level.txt").write_text("outside_module_of_a_test\n")
    assert origin_of(get_method("outside")).package == "late"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def broken(:\n", r"SyntaxError: .*mine\.py, line 1\)"),
        ("\nimport rope_patch\n\n1 / 0\n", r"ZeroDivisionError: .*mine\.py, line 4\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 .*mine\.py, line 2\)"),
        ("x = 1\n", "registers no method; expected a class with @rope_patch.register_method"),
        (SOURCE.replace('"outside"', '"yarn"'), r"'yarn' is taken by .*mine\.py, line \d+\)"),
        (SOURCE.replace("frozen=True, ", ""), r"frozen.*mine\.py, line \d+\)"),
    ],
)
def test_faults_of_a_file_name_file_and_line(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(rope_patch.Refused, match=message):
        load_plugin(str(tmp_path / "mine.py"))
    assert find_method("outside") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.py", "no such file; expected a Python file, or the name"),
        ("no_such.module", "no module named 'no_such' is installed"),
        ("json.no_such_part", "no module named 'json.no_such_part'"),
        (".", "a folder; expected a Python file"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rope_patch.Refused, match=message):
        load_plugin(source)


def test_processes_started_later_know_the_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_method(tmp_path / "mine.py")
    load_plugin("mine.py")
    assert os.environ["ROPE_PATCH_PLUGINS"] == str(tmp_path / "mine.py")
    code = "from rope_patch.methods import get_method; print(get_method('outside').paper)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout == "nobody, 2026\n"


def test_a_broken_plugin_of_the_parent_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    monkeypatch.setenv("ROPE_PATCH_PLUGINS", str(tmp_path / "mine.py"))
    assert "yarn" in rope_patch.list_methods()
    assert rope_patch.list_methods()
    (message,) = [record.message for record in caplog.records]
    assert "ZeroDivisionError" in message
    assert "ROPE_PATCH_PLUGINS" in message


def test_installed_packages_are_imported_only_for_names_that_are_not_ours(tmp_path):
    install(tmp_path, "outside_package", SOURCE, GROUP, "outside")
    code = """
import sys, rope_patch
from rope_patch.methods import get_method, origin_of
get_method("yarn")
assert "outside_package" not in sys.modules
assert get_method("outside").training == "needed"
assert "outside_package" in sys.modules and "outside" in rope_patch.list_methods()
print(origin_of(get_method("outside")))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout == "the package outside-package 1.2\n"


def test_a_broken_package_is_named_and_breaks_nothing_else(tmp_path, monkeypatch, caplog):
    install(tmp_path, "broken_package", "\n1 / 0\n", GROUP, "broken")
    install(tmp_path, "outside_package_2", SOURCE, GROUP, "outside")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "rope_patch"):
        assert get_method("outside").name == "outside"
        assert caplog.records == []
        assert {"yarn", "outside"} <= rope_patch.list_methods().keys()
        assert "broken" not in rope_patch.list_methods()
    (message,) = [record.message for record in caplog.records]
    named = ["package broken-package", "broken = 'broken_package'", "ZeroDivisionError", "line 2"]
    assert [part for part in named if part not in message] == []
    with pytest.raises(rope_patch.Refused, match=r"package broken-package .*ZeroDivisionError"):
        get_method("broken")
    with pytest.raises(rope_patch.Refused, match="unknown method 'yran'"):
        get_method("yran")


def test_an_entry_point_without_its_method_is_refused(tmp_path, monkeypatch):
    install(tmp_path, "empty_package", "", GROUP, "promised")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(rope_patch.Refused, match=r"empty-package .* registered no method 'promis"):
        get_method("promised")


def test_commands_take_a_plugin_and_name_its_faults(tmp_path):
    path = write_method(tmp_path / "mine.py")
    listed = run_in_new_process("methods", "outside", "--plugin", path)
    assert listed.returncode == 0, listed.stderr
    assert "share (default: 0.5): share of the pairs that are stretched" in listed.stdout
    (tmp_path / "mine.py").write_text("1 / 0\n")
    failed = run_in_new_process("methods", "--plugin", path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: plugin ")
    assert f"ZeroDivisionError: division by zero ({path}, line 1)" in failed.stderr
