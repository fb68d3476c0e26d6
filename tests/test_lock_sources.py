"""`qdc lock` on data sets, archives and wheels; and where credentials go."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import zipfile

import pytest
from hub_server import Hub
from lock_project import MODEL, REVISION, TOKEN, WEIGHTS, Project, prompts, written

from qdc.sources import web


def test_a_data_set_is_locked_by_the_files_of_its_splits(project: Project, hub: Hub) -> None:
    project.write({"hf": MODEL, "revision": REVISION}, asked=prompts(["chat"]), again={**prompts(["chat"]), "seed": 2})
    sources = project.locked()
    files = [f"data/chat-0000{part}-of-00002.parquet" for part in (0, 1)]
    assert list(sources["data.asked"]["files"]) == files
    assert sources["data.asked"] == sources["data.again"]
    assert (sources["data.asked"]["licence"], sources["data.asked"]["facts"]) == ("cc-by-4.0", None)
    assert len(hub.asked(files[0])) == 2, "one redirect and one answer for both"
    hub.log.clear()
    project.write({"hf": MODEL, "revision": REVISION}, asked=prompts(["chat", "maths"]))
    done = project.run()
    assert done.code == 2 and done.error["id"] == "lock.split" and "did you mean `math`?" in done.error["hint"]


def archive(files: dict[str, bytes], folder: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in {
            "../escape.json": b"{}",
            **{f"{folder}/{name}": data for name, data in files.items()},
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_a_url_is_locked_by_the_files_in_its_archive(project: Project, hub: Hub) -> None:
    hub_files = project.locked()["target.base"]["files"]
    data = archive(hub.repositories["models", MODEL][REVISION], "small")
    hub.redirects["/small.tar.gz"] = f"{hub.large_url}/files/small.tar.gz"
    hub.pages["/files/small.tar.gz"] = data
    hub.break_after = {"small.tar.gz": 1000}
    project.write({"url": f"{hub.url}/small.tar.gz", "sha256": hashlib.sha256(data).hexdigest()})
    assert project.locked()["target.base"]["files"] == hub_files
    assert [request.range for request in hub.asked("/files/")] == [None, "bytes=1000-"]
    old = project.lock.read_bytes()
    project.write({"url": f"{hub.url}/small.tar.gz", "sha256": "a" * 64})
    done = project.run()
    assert done.code == 4 and done.error["id"] == "lock.digest"
    assert (done.error["line"], done.error["column"]) == project.place("sha256")
    project.write({"url": f"{hub.url}/none.tar.gz", "sha256": "a" * 64})
    done = project.run()
    assert done.code == 2 and done.error["id"] == "lock.fetch" and "404" in done.error["message"]
    assert project.lock.read_bytes() == old


def wheel(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in files.items():
            made.writestr(zipfile.ZipInfo(f"small_model/data/{name}"), data)
        made.writestr(zipfile.ZipInfo("small_model/__init__.py"), "")
    return out.getvalue()


def test_a_wheel_is_found_in_pips_index_and_its_password_goes_nowhere_else(project: Project, hub: Hub) -> None:
    hub_files = project.locked()["target.base"]["files"]
    data = wheel(hub.repositories["models", MODEL][REVISION])
    digest = hashlib.sha256(data).hexdigest()
    name = "small_model-1.0-py3-none-any.whl"
    page = {"files": [{"filename": name, "url": f"{hub.large_url}/wheels/{name}", "hashes": {"sha256": digest}}]}
    hub.pages |= {"/simple/small-model/": json.dumps(page).encode(), f"/wheels/{name}": data}
    project.environment["PIP_INDEX_URL"] = hub.url.replace("//", "//me:Secret-Word@") + "/simple"
    source = {"wheel": "Small_Model==1.0", "file": "small_model/data", "sha256": digest}
    project.write(source)
    assert project.locked()["target.base"]["files"] == hub_files
    basic = "Basic " + base64.b64encode(b"me:Secret-Word").decode()
    assert [request.authorization for request in hub.asked("/simple/")] == [basic]
    assert [request.authorization for request in hub.asked("/wheels/")] == [None]
    assert b"Secret-Word" not in b"".join(path.read_bytes() for path in written(project.folder))
    for change, words in (
        ({"wheel": "Small_Model==2.0"}, "not of Small_Model==2.0"),
        ({"sha256": "a" * 64}, digest),
        ({"wheel": "other==1.0"}, "no package other"),
        ({"file": "small_model"}, "it has one in small_model/data"),
    ):
        project.write(source | change)
        done = project.run()
        assert done.code == 2 and words in done.error["message"], done.err
        assert "Secret-Word" not in done.out + done.err


def test_a_token_goes_to_the_hub_alone_and_into_no_file(project: Project, hub: Hub) -> None:
    hub.gated = {MODEL}
    project.environment["HF_TOKEN"] = TOKEN
    project.locked("--headers-only")
    project.locked()
    asked = [request for request in hub.asked(MODEL) if request.server == "hub"]
    assert {request.authorization for request in asked} == {f"Bearer {TOKEN}"}
    away = [request for request in hub.log if request.server == "large"]
    assert away and all(request.authorization is None for request in away)
    hub.short = {WEIGHTS: 1}
    broken = project.run("--store", str(project.folder / "another"))
    assert broken.code == 2 and TOKEN not in broken.out + broken.err
    assert all(TOKEN.encode() not in path.read_bytes() for path in written(project.folder))


def test_a_redirected_list_of_files_does_not_carry_the_token(project: Project, hub: Hub) -> None:
    path = f"/api/models/{MODEL}/revision/{REVISION}"
    hub.redirects[path] = f"{hub.large_url}/moved"
    project.environment["HF_TOKEN"] = TOKEN
    project.run()
    assert [request.authorization for request in hub.asked("/moved")] == [None]


def test_the_web_follows_no_redirect_to_a_file(hub: Hub) -> None:
    hub.redirects["/secret"] = "file:///etc/hostname"
    with pytest.raises(web.WebError):
        web.read(f"{hub.url}/secret", {}, 1000)
    with pytest.raises(web.WebError, match="not an address of the web"):
        web.read("file:///etc/hostname", {}, 1000)
