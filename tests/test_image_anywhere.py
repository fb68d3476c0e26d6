"""One image, wherever it is built: no folder, user, umask, locale, zone or clock enters it, and no secret does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import image_fixtures as fixtures
import pytest

from qdc.core.files import sha256_bytes
from qdc.image import export

HERE = Path(__file__).resolve().parent
BUILD = """
import datetime, os, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
import jinja2, image_fixtures
from qdc.image import dockerfile, export
place, user, clock = Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
time.time, time.time_ns = (lambda: clock), (lambda: int(clock * 1e9))
jinja2.Environment().from_string("{{ 1 }}").render()
if user != os.getuid():
    os.setgroups([]); os.setgid(user); os.setuid(user)
pieces = image_fixtures.Pieces(place)
for folder in pieces.inputs.values():
    for path in folder.rglob("*"):
        os.utime(path, (clock, clock))
made = pieces.image("image")
contents = pieces.contents(made)
export.export_archive(made, contents.__getitem__, place / "image.tar")
print(os.getuid(), os.stat(place / "image.tar").st_uid, time.strftime("%Z"))
"""
PLACES = [
    ("a", 0, "UTC", "C", 0o022, 1.6e9),
    ("b b/ü", 65534, "Asia/Tokyo", "C.UTF-8", 0o077, 4.1e9),
    ("c", 0, "America/St_Johns", "tr_TR.UTF-8", 0o002, 3.2e8),
]
AS_ROOT = os.getuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    made = Path(tempfile.mkdtemp(prefix="qdc-anywhere-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_the_same_image_comes_from_any_folder_user_umask_locale_zone_and_clock(folder: Path) -> None:
    found = []
    for name, user, zone, locale, umask, clock in PLACES:
        uid = user if AS_ROOT else os.getuid()
        place = folder / name
        place.mkdir(parents=True)
        os.chown(place, uid, -1)
        own = {"TZ": zone, "LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "1", "USER": name, "HOSTNAME": name}
        environment = {**os.environ, **own, "HOME": str(place), "PYTHONHASHSEED": str(umask)}
        command = [
            sys.executable,
            "-c",
            BUILD,
            str(HERE.parent / "compiler"),
            str(HERE),
            str(place),
            str(uid),
            str(clock),
        ]
        done = subprocess.run(command, cwd=folder, env=environment, umask=umask, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[:2] == [str(uid)] * 2, "it was not built by that user"
        output = place / "image" / "output"
        files = {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}
        found.append({**files, "image.tar": (place / "image.tar").read_bytes()})
    assert found[0] == found[1] == found[2]
    everything = b"".join(found[0].values())
    assert str(folder).encode() not in everything
    assert json.loads(found[0]["image.json"])["id"] == "sha256:" + sha256_bytes(found[0]["config.json"])


# Secrets

SECRET = "pl4nted-s3cret"
STAGES = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
import image_fixtures as fixtures
from qdc.image import export
from qdc.stages import base_image, runtime
place, wheel = Path(sys.argv[3]), Path(sys.argv[4])
base = fixtures.run(base_image, place / "base", {}, {"debian": "bookworm", "packages": []})
pieces = fixtures.Pieces(place, base)
lock = fixtures.lock_of(wheel)
pieces.inputs["runtime"] = fixtures.run(runtime, place / "packages", {}, {"lock": lock, "python": "3.11"})
made = pieces.image("image")
export.export_archive(made, pieces.contents(made).__getitem__, place / "image.tar")
"""
PLANTED = {
    ".netrc": f"machine example.org login me password {SECRET}-netrc\n",
    ".npmrc": f"//registry.example.org/:_authToken={SECRET}-npmrc\n",
    ".docker/config.json": json.dumps({"auths": {"example.org": {"auth": f"{SECRET}-docker"}}}),
    ".gitconfig": f"[user]\n name = {SECRET}-git\n[credential]\n helper = store\n",
    ".git-credentials": f"https://me:{SECRET}-credentials@example.org\n",
    ".config/pip/pip.conf": f"[global]\nindex-url = https://me:{SECRET}-pip@127.0.0.1:9/\nno-index = true\n",
    ".pypirc": f"[pypi]\npassword = {SECRET}-pypirc\n",
    ".aws/credentials": f"[default]\naws_secret_access_key = {SECRET}-aws\n",
    ".cache/huggingface/token": f"{SECRET}-hub",
    ".ssh/id_ed25519": f"{SECRET}-ssh",
}
DEBIAN = {
    "./etc/apt/sources.list": f"deb http://me:{SECRET}-apt@127.0.0.1:9/debian bookworm main\n",
    "./etc/apt/auth.conf.d/mirror.conf": f"machine 127.0.0.1 login me password {SECRET}-auth\n",
    "./etc/apt/apt.conf.d/99mmdebstrap": f'Acquire::http::Proxy "http://me:{SECRET}-proxy@127.0.0.1:9";\n',
    "./etc/hostname": f"{SECRET}-host\n",
    "./var/log/apt/history.log": f"{SECRET}-log\n",
    "./root/.bash_history": f"{SECRET}-history\n",
}


def test_secrets_of_the_building_machine_never_reach_an_image(folder: Path) -> None:
    """Planted in the environment, in the home, beside the stages' files, and in what Debian's tool leaves behind."""
    from test_image_hostile import member, tar_of

    home, place = folder / "home", folder / "work"
    for root in (home, place):
        for name, text in PLANTED.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    (place / ".env").write_text(f"HF_TOKEN={SECRET}-env-file\n")
    made = tar_of(folder / "debian.tar", *(member(name, data=text.encode()) for name, text in DEBIAN.items()))
    tool = folder / "bin/mmdebstrap"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nfor word in "$@"; do place="$word"; done\ncp {made} "$place"\n')
    tool.chmod(0o755)
    wheel = fixtures.wheel(folder / "index", "alpha", "1.0", {"alpha/__init__.py": b"WORD = 1\n"})
    environment = {
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PIP_FIND_LINKS": str(wheel.parent),
        **{name: f"{SECRET}-{name}" for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "QDC_REMOTE")},
        "https_proxy": f"http://me:{SECRET}-proxy@127.0.0.1:9",
        "DOCKER_AUTH_CONFIG": json.dumps({"auths": {"x": {"auth": f"{SECRET}-auth"}}}),
    }
    script = STAGES if AS_ROOT else STAGES.replace("place, wheel", "import os; os.geteuid = lambda: 0\nplace, wheel")
    command = [sys.executable, "-c", script, str(HERE.parent / "compiler"), str(HERE), str(place), str(wheel)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = (place / "image.tar").read_bytes()
    assert b"opt/qdc/site/alpha/__init__.py" in data and b"usr/bin/python3" in data, "its layers are raw in it"
    outputs = [path for path in place.rglob("output/**/*") if path.is_file()]
    assert outputs
    for words in (SECRET, "127.0.0.1:9", str(folder)):
        assert words.encode() not in data
        assert not [path for path in outputs if words.encode() in path.read_bytes()]
    assert export.archive_size(export.read_image(place / "image/output")) == len(data)
