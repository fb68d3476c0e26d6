"""Data folders are found beside the checkout and inside an installed package; children end with their parent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qdc.core import resources
from qdc.core.errors import QdcError

ROOT = Path(__file__).resolve().parents[1]


def test_a_checkout_has_its_data_at_its_root() -> None:
    assert resources.resource("templates/Dockerfile.j2") == ROOT / "templates/Dockerfile.j2"
    assert resources.resource("recipes") == ROOT / "recipes"
    with pytest.raises(QdcError, match=r"lacks its data file templates/none\.j2") as error:
        resources.resource("templates/none.j2")
    assert error.value.id == "core.resource" and error.value.exit_code == 4


@pytest.mark.parametrize("name", ["compiler/qdc", "templates/../setup.py", "/etc/passwd"])
def test_only_data_folders_are_resources(name: str) -> None:
    with pytest.raises(ValueError, match="not a resource name"):
        resources.resource(name)


def test_an_installed_package_has_its_data_inside(tmp_path: Path) -> None:
    package = tmp_path / "site" / "qdc"
    shutil.copytree(ROOT / "compiler/qdc/core", package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("")
    (package / "_data/recipes").mkdir(parents=True)
    (package / "_data/recipes/tiny.yaml").write_text("version: 1")
    code = "from qdc.core.resources import resource; print(resource('recipes/tiny.yaml'))"
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(package / "_data/recipes/tiny.yaml"), done.stderr


def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = (
        "import subprocess, sys; sys.path.insert(0, sys.argv[1])\n"
        "from qdc.image.children import ends_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, preexec_fn=ends_with_parent())\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(ROOT / "compiler")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert (child / "stat").exists()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        if not child.exists() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child lives on")
