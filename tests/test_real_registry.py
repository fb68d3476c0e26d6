"""Export and read with Debian's docker-registry and skopeo: TLS, basic and bearer logins, digests kept.

Fails, never skips, where the registry is not installed: an image that no registry took is not tested.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import real_registry
from registry_server import PASSWORD, USER
from test_image_export import make_image

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.image import export, push, registry
from qdc.image.layers import read_image
from qdc.image.reference import parse

pytestmark = pytest.mark.slow


@dataclass
class Real:
    host: str
    folder: Path


@pytest.fixture(params=["", "basic", "bearer"])
def real(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Real]:
    """A registry, and the settings that open it."""
    with real_registry.serving(tmp_path / "registry", request.param) as host:
        (tmp_path / "docker").mkdir()
        secret = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: secret}}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "registry/tls/ca.crt"))
        yield Real(host, tmp_path)


def skopeo(*words: str | Path) -> str:
    """skopeo with the same login; the CA comes by SSL_CERT_FILE."""
    login = Path(os.environ["DOCKER_CONFIG"]) / "config.json"
    command = ["skopeo", "--insecure-policy", words[0], "--authfile", login, *words[1:]]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_image_goes_there_and_comes_back_with_its_digests(real: Real) -> None:
    folder, contents = make_image(real.folder / "made")
    image = read_image(folder)
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened:
        done = push.push(folder, contents.__getitem__, opened)
    assert done.digest == f"sha256:{sha256_bytes(export.oci_manifest(image))}" and done.blobs == 4
    name = f"docker://{real.host}/team/demo"
    assert sha256_bytes(skopeo("inspect", "--raw", f"{name}:1").encode()) == done.digest[7:]
    assert json.loads(skopeo("inspect", f"{name}:1"))["Digest"] == done.digest
    skopeo("copy", "--preserve-digests", f"{name}@{done.digest}", f"oci:{real.folder / 'copy'}:x")
    index = json.loads((real.folder / "copy/index.json").read_bytes())
    assert index["manifests"][0]["digest"] == done.digest
    with registry.connect(parse(f"{real.host}/team/demo@{done.digest}")) as opened:
        found = opened.image()
        assert found.data == export.oci_manifest(image)
        for layer in image.layers:
            sink = io.BytesIO()
            opened.blob(f"sha256:{layer.diff_id}", sink, size=layer.size)
            assert opened.blob_size(f"sha256:{layer.diff_id}") == layer.size == len(sink.getvalue())
            assert opened.blob_range(f"sha256:{layer.diff_id}", 512, 1023) == sink.getvalue()[512:1024]
        assert opened.blob_size("sha256:" + "0" * 64) is None
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened:
        again = push.push(folder, contents.__getitem__, opened)
    assert (again.blobs, again.sent) == (0, 0)
    other, more = make_image(real.folder / "other", k=6)
    with registry.connect(parse(f"{real.host}/team/demo:2")) as opened:
        changed = push.push(other, (contents | more).__getitem__, opened)
    assert changed.blobs == 2 and changed.sent < 20_000


def test_a_broken_upload_leaves_no_tag_and_the_next_one_ends_well(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, contents = make_image(real.folder / "made")
    weights = read_image(folder).layers[1]

    class Break(Exception):
        """The connection of a sender that is killed."""

    def broken(done: int, total: int) -> None:
        if done > total // 2:
            raise Break

    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened, pytest.raises(Break):
        push.push(folder, contents.__getitem__, opened, broken)
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened:
        assert opened.manifest_digest("1") is None
        assert opened.blob_size(f"sha256:{weights.diff_id}") is None
        with pytest.raises(QdcError) as error:
            opened.manifest()
        assert error.value.id == "registry.absent"
        assert push.push(folder, contents.__getitem__, opened).blobs == 3


def test_a_connection_that_drops_in_mid_blob_is_taken_up_again(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, contents = make_image(real.folder / "made")
    left = [1]
    whole = push._from

    def once(blob: push._Blob, start: int, progress: object) -> object:
        body = whole(blob, start, progress)  # type: ignore[arg-type]

        def cut() -> Iterator[bytes]:
            for chunk in body():
                if left and len(chunk) > 100_000:
                    left.pop()
                    yield chunk[:50_000]
                    raise push.Dropped("cut")
                yield chunk

        return cut

    monkeypatch.setattr(push, "_from", once)
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened:
        done = push.push(folder, contents.__getitem__, opened)
        assert opened.manifest().digest == done.digest
    assert not left


def test_without_a_login_or_the_ca_nothing_goes(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, contents = make_image(real.folder / "made")
    closed = list((real.folder / "registry").glob("htpasswd"))
    monkeypatch.delenv("SSL_CERT_FILE")
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened, pytest.raises(QdcError) as error:
        push.push(folder, contents.__getitem__, opened)
    assert error.value.id == "registry.tls"
    monkeypatch.setenv("QDC_REGISTRY_CA", str(real.folder / "registry/tls/ca.crt"))
    monkeypatch.setenv("DOCKER_CONFIG", str(real.folder / "none"))
    with registry.connect(parse(f"{real.host}/team/demo:1")) as opened:
        if closed:
            with pytest.raises(QdcError) as error:
                push.push(folder, contents.__getitem__, opened)
            assert error.value.id == "registry.denied"
