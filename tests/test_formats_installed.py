"""What a dist-info folder says of an installed package, read as text."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats import installed
from qdc.formats.installed import Listed

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

ROOT = "usr/lib/python3/site-packages"


def urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1+cu130\n", ("vllm", "0.22.1+cu130")),
        (b"name: a\r\nVERSION: 1\r\n\r\nName: b\r\n", ("a", "1")),
        (b"Name: a\n\nVersion: 2 is in the description\n", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_name_and_version_are_headers(metadata: bytes, expected: tuple[str, str] | None) -> None:
    assert installed.name_and_version(metadata) == expected


@pytest.mark.parametrize("name", ["Flash_Attn", "flash.attn", "flash--attn"])
def test_names_are_compared_in_one_spelling(name: str) -> None:
    assert installed.canonical_name(name) == "flash-attn"


def test_a_record_gives_places_digests_and_sizes() -> None:
    text = (
        f"vllm/__init__.py,sha256={urlsafe(b'x')},1\n"
        f'"vllm/a, b.py",sha256={urlsafe(b"y")},2\n'
        "../../../bin/vllm,,\n"
        "vllm/__pycache__/x.cpython-311.pyc,,\n"
        "vllm-1.dist-info/RECORD,,\n"
        "/etc/vllm.conf,md5=00,3\n"
        "\n"
        "vllm/bad,sha256=!!,4\n"
    )
    digest = hashlib.sha256(b"x").hexdigest()
    other = hashlib.sha256(b"y").hexdigest()
    assert installed.record(text.encode(), ROOT, "RECORD") == [
        Listed(f"{ROOT}/vllm/__init__.py", digest, 1),
        Listed(f"{ROOT}/vllm/a, b.py", other, 2),
        Listed("usr/bin/vllm", None, None),
        Listed("etc/vllm.conf", None, 3),
        Listed(f"{ROOT}/vllm/bad", "!!", 4),
    ]


def test_a_row_cannot_leave_the_image() -> None:
    rows = installed.record(b"../../../../../../etc/passwd,,\n../../../../..,,\n", ROOT, "RECORD")
    assert [row.path for row in rows] == ["etc/passwd"]


@pytest.mark.parametrize("data", [b"\xff,,\n", b'"' + b"x" * 200_000])
def test_what_is_no_record_is_an_error(data: bytes) -> None:
    with pytest.raises(QdcError, match="not a RECORD"):
        installed.record(data, ROOT, "x.dist-info/RECORD")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise(data: bytes) -> None:
    try:
        rows = installed.record(data, ROOT, "RECORD")
    except QdcError as error:
        assert error.id == "installed.record"
    else:
        assert all(".." not in row.path.split("/") and not row.path.startswith("/") for row in rows)
    installed.name_and_version(data)
    installed.entry_points(data)


def test_entry_points_and_origins() -> None:
    text = b"[console_scripts]\nvllm = vllm:main\n# x = y\n[vllm.general_plugins]\neqc = eqc_plugin:register\nloose\n"
    assert installed.entry_points(text) == {
        "console_scripts": {"vllm": "vllm:main"},
        "vllm.general_plugins": {"eqc": "eqc_plugin:register"},
    }
    document = {"url": "file:///src", "dir_info": {"editable": True}}
    assert installed.origin(document) == {"url": "file:///src", "editable": True}
    assert installed.origin({"url": "u", "vcs_info": {"vcs": "git", "commit_id": "abc"}}) == {
        "url": "u",
        "commit": "abc",
    }
    assert installed.origin([]) == {} == installed.origin({"url": 5, "dir_info": 5})
