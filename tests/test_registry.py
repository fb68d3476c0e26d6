"""The registry client against registries that are honest, slow, broken and hostile."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import registry_server
from hypothesis import given
from hypothesis import strategies as st
from registry_server import OCI_INDEX, OCI_MANIFEST, PASSWORD, USER, Fake, digest_of

from qdc.core.errors import QdcError
from qdc.image import registry, wire
from qdc.image.credentials import Credentials, Logins
from qdc.image.reference import Reference, parse

DATA = os.urandom(3_000_000)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return registry_server.authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def fake() -> Iterator[Fake]:
    with registry_server.serving() as found:
        yield found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No pauses between tries, and no logins of whoever runs the tests."""
    monkeypatch.setattr(wire, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(registry, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("QDC_REGISTRY_CA", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


def log_in(tmp_path: Path, *hosts: str, **entry: str) -> None:
    secret = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": dict.fromkeys(hosts, entry or secret)}))


def client(fake: Fake, repository: str = "team/model") -> registry.Registry:
    return registry.connect(parse(f"{fake.host}/{repository}:1"))


# Names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ubuntu", Reference("docker.io", "library/ubuntu")),
        ("vllm/vllm-openai:v0.25.1", Reference("docker.io", "vllm/vllm-openai", "v0.25.1")),
        ("docker.io/ubuntu:22.04", Reference("docker.io", "library/ubuntu", "22.04")),
        ("index.docker.io/a/b", Reference("docker.io", "a/b")),
        ("localhost/a", Reference("localhost", "a")),
        ("127.0.0.1:5000/a/b__c:x_Y.z", Reference("127.0.0.1:5000", "a/b__c", "x_Y.z")),
        ("[::1]:5000/a", Reference("[::1]:5000", "a")),
        (
            "ghcr.io/o/n@sha256:" + "0a" * 32,
            Reference("ghcr.io", "o/n", None, "sha256:" + "0a" * 32),
        ),
        ("h.io:1/n:t@sha256:" + "0a" * 32, Reference("h.io:1", "n", "t", "sha256:" + "0a" * 32)),
    ],
)
def test_names_are_read_as_docker_reads_them(text: str, found: Reference) -> None:
    assert parse(text) == found
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "UPPER/case", "a//b", "a/", "/a", "h.io/", "h.io:99999/a", "h.io:x/a", "a:", "a:-t", "a@sha256:12",
        "a@sha512:" + "0" * 128, "a@", "u:p@h.io/a", "h..io/a", "https://h.io/a", "h.io/../a", "a b",
        "h.io/a:" + "t" * 129, "h.io/" + "a" * 260, "h.io/a\n",
    ],
)  # fmt: skip
def test_what_names_no_image_is_wrong_use(text: str) -> None:
    with pytest.raises(QdcError) as error:
        parse(text)
    assert error.value.id == "registry.reference" and error.value.exit_code == 2 and error.value.hint


@given(st.text(alphabet="aA0./:@-_[]%\n é", max_size=40))
def test_a_name_is_refused_or_stays_itself(text: str) -> None:
    try:
        found = parse(text)
    except QdcError as error:
        assert error.id == "registry.reference"
        return
    assert parse(str(found)) == found
    assert "@" not in found.host and "/" not in found.host and ".." not in found.repository


def test_only_this_machine_is_spoken_to_without_tls() -> None:
    for host in ("localhost", "localhost:5000", "127.0.0.1:5000", "127.8.8.8", "[::1]:5000"):
        assert parse(f"{host}/a").loopback, host
    for host in ("localhost.evil.com", "127.0.0.1.evil.com", "10.0.0.1:5000", "evil.com:127"):
        assert not parse(f"{host}/a").loopback, host
    assert registry.Registry(parse("10.0.0.1:5000/a")).wire._url("/v2/") == "https://10.0.0.1:5000/v2/"
    assert registry.Registry(parse("ubuntu")).wire._url("/v2/") == "https://registry-1.docker.io/v2/"


# Manifests


def test_manifests_come_by_tag_and_by_digest_and_an_index_by_platform(fake: Fake) -> None:
    amd = fake.put("team/model", "amd", {"schemaVersion": 2, "layers": []})
    arm = fake.put("team/model", "arm", {"schemaVersion": 2, "layers": [1]})
    entries = [
        {"digest": arm, "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": amd, "platform": {"os": "linux", "architecture": "amd64"}},
        {"digest": arm, "platform": {"os": "unknown", "architecture": "unknown"}},
    ]
    fake.put("team/model", "1", {"schemaVersion": 2, "manifests": entries}, OCI_INDEX)
    with client(fake) as opened:
        index = opened.manifest()
        assert index.is_index and registry.platform_manifest(index, "linux", "arm64") == arm
        found = opened.image()
        assert (found.digest, found.media_type) == (amd, OCI_MANIFEST)
        assert opened.manifest(amd).data == found.data
        assert opened.counts.requests == 5, "one of them finds out that this is plain HTTP"
        assert opened.counts.received == len(index.data) * 2 + len(found.data) * 2 + 2
        with pytest.raises(QdcError, match=r"no one image for linux/s390x: it has linux/amd64, linux/arm64") as error:
            registry.platform_manifest(index, "linux", "s390x")
        assert error.value.exit_code == 4


def test_a_manifest_that_is_another_one_is_refused(fake: Fake) -> None:
    digest = fake.put("team/model", "1", {"schemaVersion": 2})
    fake.manifests["team/model", digest] = (OCI_MANIFEST, b'{"schemaVersion": 2, "layers": []}')
    with client(fake) as opened:
        with pytest.raises(QdcError) as error:
            opened.manifest(digest)
        assert error.value.id == "registry.digest" and error.value.exit_code == 4
        fake.says = "sha256:" + "0" * 64
        with pytest.raises(QdcError) as error:
            opened.manifest("1")
        assert error.value.id == "registry.digest"


@pytest.mark.parametrize("data", [b"<html>", b"[1]", b'{"a":' * 2000, b'{"a":1,"a":2}', b"\xff"])
def test_a_manifest_that_is_no_json_object_is_refused(fake: Fake, data: bytes) -> None:
    fake.manifests["team/model", "1"] = ("text/html", data)
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.manifest()
    assert error.value.id == "registry.manifest" and len(error.value.message) < 300


def test_a_huge_manifest_is_not_read(fake: Fake) -> None:
    fake.manifests["team/model", "1"] = (OCI_MANIFEST, bytes(5 << 20))
    with client(fake) as opened:
        with pytest.raises(QdcError) as error:
            opened.manifest()
        assert error.value.id == "registry.too-large" and opened.counts.received <= 2


def test_a_document_of_another_type_than_it_says_is_refused(fake: Fake) -> None:
    fake.put("team/model", "1", {"mediaType": OCI_INDEX, "manifests": []}, OCI_MANIFEST)
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.image()
    assert error.value.id == "registry.manifest"
    fake.put("team/model", "1", {"schemaVersion": 1}, "application/vnd.docker.distribution.manifest.v1+prettyjws")
    with client(fake) as opened, pytest.raises(QdcError, match="another kind"):
        opened.image()


def test_what_is_not_there_is_said(fake: Fake) -> None:
    with client(fake) as opened:
        with pytest.raises(QdcError, match="MANIFEST_UNKNOWN: no manifest 7") as error:
            opened.manifest("7")
        assert error.value.id == "registry.absent" and error.value.exit_code == 4
        assert opened.blob_size(digest_of(b"?")) is None


# Blobs


def test_blobs_come_by_size_by_range_and_whole(fake: Fake) -> None:
    digest = fake.add(DATA)
    sink, seen = io.BytesIO(), list[tuple[int, int]]()
    with client(fake) as opened:
        assert opened.blob_size(digest) == len(DATA)
        before = opened.counts.received
        assert opened.blob_range(digest, 1000, 1999) == DATA[1000:2000]
        assert opened.counts.received - before == 1000
        assert opened.blob(digest, sink, lambda *done: seen.append(done), size=len(DATA)) == len(DATA)
    assert sink.getvalue() == DATA
    assert seen == sorted(seen) and seen[-1] == (len(DATA), len(DATA))


def test_a_blob_goes_on_where_the_connection_broke_off(fake: Fake) -> None:
    digest = fake.add(DATA)
    fake.breaks[digest] = [1_000_000, 0, 500_000, 1]
    sink = io.BytesIO()
    with client(fake) as opened:
        opened.blob(digest, sink)
        assert sink.getvalue() == DATA
        assert opened.counts.received == len(DATA) + 2
    assert [r.range for r in fake.asked("GET", digest)][:2] == [None, "bytes=1000000-"]
    fake.breaks[digest] = [0] * 9
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.blob(digest, io.BytesIO())
    assert error.value.id == "registry.dropped" and "again" in str(error.value.hint)
    assert len(fake.breaks[digest]) == 5, "four tries that brought nothing"


def test_a_blob_goes_on_in_another_process(fake: Fake, tmp_path: Path) -> None:
    digest = fake.add(DATA)
    (tmp_path / "part").write_bytes(DATA[:2_000_000])
    with client(fake) as opened, (tmp_path / "part").open("r+b") as stream:
        opened.blob(digest, stream, begun=registry.Begun(stream))
        assert opened.counts.received == 1_000_000 + 2
    assert (tmp_path / "part").read_bytes() == DATA


def test_a_registry_without_ranges_is_read_anew_for_a_whole_blob_and_not_at_all_for_a_part(fake: Fake) -> None:
    digest = fake.add(DATA)
    fake.whole = True
    fake.breaks[digest] = [1_000_000]
    sink = io.BytesIO()
    with client(fake) as opened:
        opened.blob(digest, sink)
        assert sink.getvalue() == DATA
        before = opened.counts.received
        with pytest.raises(QdcError) as error:
            opened.blob_range(digest, 5, 9)
        assert error.value.id == "registry.no-ranges" and opened.counts.received == before


def test_a_part_comes_whole_or_not_at_all(fake: Fake) -> None:
    digest = fake.add(DATA)
    fake.breaks[digest] = [10]
    with client(fake) as opened:
        assert opened.blob_range(digest, 0, 99) == DATA[:100]
        with pytest.raises(QdcError) as error:
            opened.blob_range(digest, len(DATA), len(DATA) + 5)
        assert error.value.id == "registry.range"
        with pytest.raises(QdcError, match="another part"):
            opened.blob_range(digest, len(DATA) - 5, len(DATA) + 5)


def test_bytes_of_another_digest_or_size_are_refused(fake: Fake) -> None:
    digest = fake.add(DATA)
    fake.serves[digest] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    with client(fake) as opened:
        with pytest.raises(QdcError) as error:
            opened.blob(digest, io.BytesIO(), size=len(DATA))
        assert error.value.id == "registry.digest" and error.value.exit_code == 4
        fake.serves[digest] = DATA + bytes(50_000_000)
        before = opened.counts.received
        with pytest.raises(QdcError, match=f"{len(DATA)} bytes, got {len(DATA) + 50_000_000}"):
            opened.blob(digest, io.BytesIO(), size=len(DATA))
        assert opened.counts.received == before
        fake.serves[digest] = DATA[:10]
        with pytest.raises(QdcError) as error:
            opened.blob(digest, io.BytesIO())
        assert error.value.id == "registry.digest"


def test_passing_troubles_are_waited_for_and_lasting_ones_are_not(fake: Fake) -> None:
    digest = fake.add(b"data")
    fake.answers["GET", digest] = [503, 429, 500]
    with client(fake) as opened:
        assert opened.blob_range(digest, 0, 3) == b"data"
        fake.answers["GET", digest] = [503] * 9
        with pytest.raises(QdcError, match="it answers the request with 503") as error:
            opened.blob_range(digest, 0, 3)
        assert error.value.exit_code == 4 and len(fake.answers["GET", digest]) == 5
        fake.answers["GET", digest] = [418, 200]
        with pytest.raises(QdcError):
            opened.blob_range(digest, 0, 3)
        assert fake.answers["GET", digest] == [200]


def test_a_registry_that_is_not_there_is_said() -> None:
    with registry_server.serving() as gone:
        host = gone.host
    with registry.connect(parse(f"{host}/a")) as opened, pytest.raises(QdcError) as error:
        opened.manifest()
    assert error.value.id == "registry.unreachable" and "refused" in error.value.message.lower()
    assert "0x" not in error.value.message


# Logins


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_logins_open_a_registry(fake: Fake, tmp_path: Path, kind: str) -> None:
    digest = fake.add(b"data")
    fake.auth = kind
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.blob_size(digest)
    assert error.value.id == "registry.denied" and f"docker login {fake.host}" in str(error.value.hint)
    log_in(tmp_path, fake.host, "localhost")
    fake.log.clear()
    with client(fake) as opened:
        assert opened.blob_size(digest) == 4 and opened.blob_range(digest, 1, 2) == b"at"
    sent = [r.authorization for r in fake.asked()]
    assert sent.count(None) == 2, "the question whether this is plain HTTP, and the first request"
    tokens = fake.asked(server="tokens")
    assert len(tokens) == (1 if kind == "bearer" else 0)


def test_a_wrong_password_is_said_once_and_not_shown(fake: Fake, tmp_path: Path) -> None:
    fake.auth = "basic"
    wrong = base64.b64encode(b"ann:t0ps3cret").decode()
    log_in(tmp_path, fake.host, auth=wrong)
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.manifest()
    assert error.value.id == "registry.denied" and "login that you have" in error.value.message
    assert "t0ps3cret" not in str(error.value) + repr(opened.wire.__dict__) and wrong not in str(error.value)
    assert len(fake.asked("GET", "manifests")) == 2


def test_an_expired_token_is_bought_anew(fake: Fake, tmp_path: Path) -> None:
    digest = fake.add(b"data")
    fake.auth = "bearer"
    log_in(tmp_path, fake.host, "localhost")
    with client(fake) as opened:
        assert opened.blob_size(digest) == 4
        fake.tokens[:] = ["none of yours"]
        assert opened.blob_size(digest) == 4
    assert len(fake.asked(server="tokens")) == 2


def test_an_identity_token_buys_access(fake: Fake, tmp_path: Path) -> None:
    digest = fake.add(b"data")
    fake.auth = "bearer"
    log_in(tmp_path, fake.host, "localhost", identitytoken="refresh")
    with client(fake) as opened:
        assert opened.blob_size(digest) == 4
    assert [r.method for r in fake.asked(server="tokens")] == ["POST"]


def test_a_password_does_not_go_to_whom_the_registry_names(fake: Fake, tmp_path: Path) -> None:
    fake.auth = "bearer"
    log_in(tmp_path, fake.host)
    with client(fake) as opened, pytest.raises(QdcError, match="your password to be sent to localhost") as error:
        opened.manifest()
    assert error.value.id == "registry.token" and "docker login localhost" in str(error.value.hint)
    assert fake.asked(server="tokens") == []
    fake.realm = "http://tokens.example.com/token"
    with client(fake) as opened, pytest.raises(QdcError, match="no address with TLS"):
        opened.manifest()


@pytest.mark.parametrize(
    ("host", "realm", "sent"),
    [
        ("docker.io", "auth.docker.io", True),
        ("docker.io", "docker.io.evil.com", False),
        ("registry.gitlab.com", "gitlab.com", True),
        ("ghcr.io", "ghcr.io", True),
        ("ghcr.io:443", "ghcr.io", True),
        ("mine.azurecr.io", "yours.azurecr.io", False),
        ("ghcr.io", "io", False),
        ("a.b.example.com", "example.com", False),
    ],
)
def test_who_may_know_a_password(host: str, realm: str, sent: bool) -> None:
    opened = registry.Registry(parse(f"{host}/a/b"), credentials=Credentials("u", "p"))
    assert opened.wire._trusts(realm) is sent


def test_logins_are_found_as_docker_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = base64.b64encode(b"u:p:q").decode()
    helper = tmp_path / "docker-credential-box"
    helper.write_text('#!/bin/sh\nread host\n[ $host = boxed.io ] || exit 1\necho \'{"Username":"b","Secret":"s"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    config = {
        "auths": {"https://index.docker.io/v1/": {"auth": secret}, "h.io:5000": {"auth": secret}, "empty.io": {}},
        "credHelpers": {"boxed.io": "box"},
        "credsStore": "box",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    logins = Logins(tmp_path / "config.json")
    assert logins.of("docker.io") == logins.of("h.io:5000") == Credentials("u", "p:q")
    assert logins.of("boxed.io") == Credentials("b", "s")
    assert logins.of("empty.io") is None and logins.of("h.io") is None
    assert "p:q" not in repr(logins.of("docker.io"))
    for text in ("{", "[]", json.dumps({"auths": {"h.io": {"auth": "%%"}}}), json.dumps({"credsStore": "no/such"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(QdcError) as error:
            Logins(tmp_path / "config.json").of("h.io")
        assert error.value.id == "registry.credentials" and error.value.exit_code == 4


# Redirects


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_credentials_do_not_follow_a_redirect(fake: Fake, tmp_path: Path, kind: str) -> None:
    digest = fake.add(DATA)
    fake.auth, fake.elsewhere = kind, True
    log_in(tmp_path, fake.host, "localhost")
    sink = io.BytesIO()
    with client(fake) as opened:
        assert opened.blob_size(digest) == len(DATA)
        assert opened.blob_range(digest, 7, 9) == DATA[7:10]
        opened.blob(digest, sink)
    assert sink.getvalue() == DATA
    assert [r.authorization for r in fake.asked(server="store")] == [None] * 3
    assert all(r.authorization for r in fake.asked("GET", digest)[1:])


def test_credentials_do_not_come_back_from_elsewhere(fake: Fake, tmp_path: Path) -> None:
    first, second = fake.add(b"first"), fake.add(b"second")
    fake.auth = "basic"
    log_in(tmp_path, fake.host)
    with registry_server.serving() as other:
        fake.redirects[first] = f"http://{other.host}/v2/x/blobs/{first}"
        other.redirects[first] = f"http://{fake.host}/v2/team/model/blobs/{second}"
        with client(fake) as opened, pytest.raises(QdcError) as error:
            opened.blob_range(first, 0, 1)
        assert error.value.id == "registry.denied"
        assert [r.authorization for r in other.log] == [None]
    assert [r.authorization for r in fake.asked("GET", second)] == [None]


def test_what_another_server_asks_for_is_not_answered(fake: Fake, tmp_path: Path) -> None:
    digest = fake.add(b"data")
    fake.auth = "basic"
    log_in(tmp_path, fake.host)
    with registry_server.serving() as other:
        other.auth = "bearer"
        fake.redirects[digest] = f"http://{other.host}/v2/x/blobs/{digest}"
        with client(fake) as opened, pytest.raises(QdcError) as error:
            opened.blob_range(digest, 0, 1)
        assert error.value.id == "registry.denied" and [r.server for r in other.log] == ["registry"]
        assert other.log[0].authorization is None


@pytest.mark.parametrize(
    "place",
    [
        "http://example.com/x",
        "ftp://example.com/x",
        "file:///etc/passwd",
        "http://user:word@127.0.0.1/x",
        "//",
        "http://127.0.0.1:99999/x",
        "http://[::1/x",
        "http://127.0.0.1:a/x",
    ],
)
def test_redirects_that_lead_astray_are_not_followed(fake: Fake, place: str) -> None:
    digest = fake.add(b"data")
    fake.redirects[digest] = place
    with client(fake) as opened, pytest.raises(QdcError) as error:
        opened.blob_range(digest, 0, 1)
    assert error.value.id == "registry.redirect" and "word" not in error.value.message


def test_redirects_have_an_end(fake: Fake) -> None:
    digest = fake.add(b"data")
    fake.redirects[digest] = f"/v2/team/model/blobs/{digest}"
    with client(fake) as opened, pytest.raises(QdcError, match="more than 5 times"):
        opened.blob_size(digest)
    assert len(fake.asked("HEAD", digest)) == 6


def test_the_body_of_a_redirect_is_not_read(fake: Fake) -> None:
    first, second = fake.add(b"first"), fake.add(b"second")
    fake.redirects[first], fake.padding = f"/v2/team/model/blobs/{second}", 30_000_000
    with client(fake) as opened:
        assert opened.blob_range(first, 0, 5) == b"second"
        assert opened.counts.received < 100 and fake.asked("GET", first)[0].sent == 0


# TLS


def test_tls_needs_a_certificate_that_is_trusted(tls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with registry_server.serving(tls) as fake:
        digest = fake.add(DATA)
        fake.auth, fake.elsewhere = "bearer", True
        log_in(tmp_path, fake.host, "localhost")
        with client(fake) as opened, pytest.raises(QdcError) as error:
            opened.blob_size(digest)
        assert error.value.id == "registry.tls" and "QDC_REGISTRY_CA" in str(error.value.hint)
        assert fake.log == [], "nobody untrusted learns anything"
        for name in ("QDC_REGISTRY_CA", "SSL_CERT_FILE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, str(tls / "ca.crt"))
                with client(fake) as opened:
                    assert opened.blob_range(digest, 0, 9) == DATA[:10]
        monkeypatch.setenv("QDC_REGISTRY_CA", str(tmp_path / "none"))
        with pytest.raises(QdcError) as error:
            client(fake)
        assert error.value.id == "registry.ca"


def test_a_redirect_from_tls_to_none_is_not_followed(tls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDC_REGISTRY_CA", str(tls / "ca.crt"))
    with registry_server.serving(tls) as fake, registry_server.serving() as plain:
        digest = fake.add(b"data")
        plain.add(b"data")
        fake.redirects[digest] = f"http://{plain.host}/v2/x/blobs/{digest}"
        with client(fake) as opened, pytest.raises(QdcError, match="without TLS"):
            opened.blob_range(digest, 0, 1)
        assert plain.log == []
