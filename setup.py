"""Put the data folders of the checkout into the wheel, where `qdc.core.resources` finds them."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithData(build_py):
    """The usual build, then copies of the data folders; an editable install reads the checkout instead."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("templates", "schema", "recipes"):
                place = Path(self.build_lib, "qdc", "_data", name)
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns(".*", "__pycache__"))


setup(cmdclass={"build_py": BuildWithData})
