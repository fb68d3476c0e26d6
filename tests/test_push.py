"""Images into a registry: only what it lacks, the tag last, and nothing half-published."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import registry_server
from image_store import Contents, make_image
from registry_server import PASSWORD, USER, Fake

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.image import export, push, registry, wire
from qdc.image.layers import read_image
from qdc.image.reference import parse

Made = tuple[Path, Contents]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with registry_server.serving() as found:
        yield found


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_image(tmp_path / "made")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (wire, registry, push):
        monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def pushed(fake: Fake, made: Made, name: str = "team/demo:1", **more: push.Progress) -> push.Pushed:
    with registry.connect(parse(f"{fake.host}/{name}")) as opened:
        return push.push(made[0], made[1].__getitem__, opened, **more)


def refused(fake: Fake, made: Made) -> QdcError:
    """The error of a push; no tag points at anything afterwards."""
    with pytest.raises(QdcError) as error:
        pushed(fake, made)
    assert error.value.exit_code == 4 and error.value.hint
    assert fake.manifests == {}
    return error.value


def weights(made: Made) -> str:
    return f"sha256:{read_image(made[0]).layers[1].diff_id}"


def test_an_image_arrives_whole_with_its_digests_and_the_tag_last(fake: Fake, made: Made) -> None:
    seen: list[tuple[int, int]] = []
    done = pushed(fake, made, progress=lambda *at: seen.append(at))
    image = read_image(made[0])
    manifest = export.oci_manifest(image)
    assert done.digest == f"sha256:{sha256_bytes(manifest)}" and done.blobs == 4
    assert fake.manifests["team/demo", "1"] == ("application/vnd.oci.image.manifest.v1+json", manifest)
    assert set(fake.blobs) == {f"sha256:{layer.diff_id}" for layer in image.layers} | {f"sha256:{image.id}"}
    assert done.sent == image.size + len(image.config) + len(manifest)
    assert seen == sorted(seen) and seen[-1] == (image.size + len(image.config),) * 2
    writes = [request.path for request in fake.log if request.method == "PUT"]
    assert writes[-1] == "/v2/team/demo/manifests/1" and len(writes) == 5


def test_without_a_tag_the_name_of_the_image_is_used(fake: Fake, made: Made) -> None:
    done = pushed(fake, made, "team/demo")
    assert done.reference.tag == read_image(made[0]).name.rpartition(":")[2]
    assert ("team/demo", done.reference.tag) in fake.manifests
    with pytest.raises(QdcError) as error:
        pushed(fake, made, "team/demo@sha256:" + "0" * 64)
    assert error.value.id == "export.destination" and error.value.exit_code == 2


def test_what_is_there_is_not_sent_again(fake: Fake, made: Made, tmp_path: Path) -> None:
    pushed(fake, made)
    again = pushed(fake, made)
    assert (again.blobs, again.sent) == (0, 0)
    other = make_image(tmp_path / "other", k=6)
    changed = pushed(fake, other, "team/demo:2")
    assert changed.blobs == 2 and changed.sent < 20_000
    assert {tag for _, tag in fake.manifests if not tag.startswith("sha256:")} == {"1", "2"}


def test_a_broken_upload_goes_on_and_what_arrived_is_not_sent_again(fake: Fake, made: Made) -> None:
    digest = weights(made)
    fake.breaks[digest] = [500_000, 300_000, 0]
    done = pushed(fake, made)
    assert fake.manifests["team/demo", "1"][1] == export.oci_manifest(done.image)
    assert sum(r.received for r in fake.asked("PUT", "uploads")) == done.image.size + len(done.image.config)


def test_an_upload_that_the_registry_forgot_begins_anew(fake: Fake, made: Made) -> None:
    fake.resumes = False
    fake.breaks[weights(made)] = [500_000]
    done = pushed(fake, made)
    image = done.image
    assert sum(r.received for r in fake.asked("PUT", "uploads")) == image.size + len(image.config) + 500_000
    assert fake.manifests["team/demo", "1"][1] == export.oci_manifest(image)


def test_a_registry_that_breaks_off_always_is_given_up(fake: Fake, made: Made) -> None:
    fake.resumes = False
    fake.breaks[weights(made)] = [500_000] * 9
    error = refused(fake, made)
    assert error.id == "registry.dropped" and "the target weights layer" in error.message
    assert len(fake.breaks[weights(made)]) == 5
    fake.breaks.clear()
    assert pushed(fake, made).blobs == 3, "the base is there already"


def test_a_full_disk_a_refusal_and_a_lie_are_said(fake: Fake, made: Made) -> None:
    fake.room = 600_000
    error = refused(fake, made)
    assert "no space left on device" in error.message
    fake.room = None
    fake.answers["POST", "uploads"] = [403]
    assert refused(fake, made).id == "registry.denied"
    fake.forgets = True
    error = refused(fake, made)
    assert error.id == "registry.digest" and "does not have it" in error.message
    fake.forgets, fake.says = False, "sha256:" + "0" * 64
    assert refused(fake, made).id == "registry.digest"


def test_a_tag_that_is_not_kept_is_said(fake: Fake, made: Made) -> None:
    fake.answers["PUT", "manifests"] = [201]
    error = refused(fake, made)
    assert error.id == "registry.absent"


def test_damaged_weights_are_never_published(fake: Fake, made: Made) -> None:
    with (made[0].parent / "source/model.safetensors").open("r+b") as stream:
        stream.seek(777)
        stream.write(b"\xff\xff")
    with pytest.raises(QdcError) as error:
        pushed(fake, made)
    assert error.value.id == "image.content" and fake.manifests == {} and weights(made) not in fake.blobs
    (made[0].parent / "source/model.safetensors").unlink()
    with pytest.raises(QdcError) as error:
        pushed(fake, made)
    assert error.value.id == "image.content" and "verify" in str(error.value.hint) and fake.manifests == {}


def test_an_upload_is_not_sent_elsewhere(fake: Fake, made: Made) -> None:
    with registry_server.serving() as other:
        for place in (
            f"http://{other.host}/v2/x/blobs/uploads/u0",
            f"http://u:p@{fake.host}/x",
            "https://example.com/",
        ):
            fake.uploads_at = place
            error = refused(fake, made)
            assert error.id == "registry.redirect" and "u:p" not in error.message
        assert other.log == [] and fake.blobs == {}


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_a_login_lets_images_in(fake: Fake, made: Made, tmp_path: Path, kind: str) -> None:
    fake.auth = kind
    assert refused(fake, made).id == "registry.denied"
    secret = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (tmp_path / "docker").mkdir()
    auths = {"auths": {fake.host: secret, "localhost": secret}}
    (tmp_path / "docker/config.json").write_text(json.dumps(auths))
    assert pushed(fake, made).blobs == 4
    assert len(fake.asked(server="tokens")) <= 8
