"""An image as qdc makes them, and the same image after somebody edited it."""

from __future__ import annotations

import json

from test_audit_images import DRAFTER, MANIFEST, TARGET, Built, recipe

from audit_fixtures.pieces import Fixture, sha


def fixture(built: Built) -> Fixture:
    return Fixture([dict(layer) for layer in built.layers], built.settings, built.tag)


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def untouched() -> Fixture:
    return fixture(Built())


def weights(model: str = TARGET) -> Fixture:
    built = Built()
    path = f"{model}/model.safetensors"
    return fixture(built.put(path, flip(built.read(path))))


def drafter_config() -> Fixture:
    return fixture(Built().edit(f"{DRAFTER}/config.json", '"block_size": 8', '"block_size": 9'))


def manifest() -> Fixture:
    return fixture(Built().edit(MANIFEST, '"steps": 60', '"steps": 61'))


def label() -> Fixture:
    built = Built()
    built.settings["Labels"] = {**built.settings["Labels"], "io.qdc.k": "15"}
    return fixture(built)


def _with_anothers_weights() -> tuple[Fixture, bytes, bytes, int]:
    """An image, the tar of its target's layer, the same layer's tar of an image with other weights, and its number."""
    made, other = untouched(), Built()
    path = f"{TARGET}/model.safetensors"
    other.put(path, flip(other.read(path)))
    number = next(n for n, layer in enumerate(made.layers) if path in layer)
    was, now = made.tars()[number], fixture(other).tars()[number]
    return made, was, now, number


def swapped_layer() -> Fixture:
    """The blob of the target's layer is another image's; configuration and manifest still name the first one."""
    made, was, now, _ = _with_anothers_weights()

    def swap(files: dict[str, bytes]) -> None:
        files[f"blobs/sha256/{sha(was)}"] = now

    made.blobs = swap
    return made


def relabelled_blobs() -> Fixture:
    """As above, and the OCI manifest and index name the new blob; only the configuration still names the old one."""
    made, was, now, number = _with_anothers_weights()

    def swap(files: dict[str, bytes]) -> None:
        index = json.loads(files["index.json"])
        old = index["manifests"][0]["digest"][7:]
        stored = json.loads(files.pop(f"blobs/sha256/{old}"))
        stored["layers"][number]["digest"] = f"sha256:{sha(now)}"
        data = json.dumps(stored).encode()
        files[f"blobs/sha256/{sha(data)}"] = data
        index["manifests"][0] |= {"digest": f"sha256:{sha(data)}", "size": len(data)}
        files["index.json"] = json.dumps(index).encode()
        described = json.loads(files["manifest.json"])
        described[0]["Layers"][number] = f"blobs/sha256/{sha(now)}"
        files["manifest.json"] = json.dumps(described).encode()
        del files[f"blobs/sha256/{sha(was)}"]
        files[f"blobs/sha256/{sha(now)}"] = now

    made.blobs = swap
    return made


def consistent() -> Fixture:
    """Weights, manifest, labels and digests edited together: only an image ID from elsewhere can tell."""
    built = Built()
    path = f"{TARGET}/model.safetensors"
    return fixture(built.put(path, flip(built.read(path))).again())


def other_k() -> Fixture:
    return fixture(Built(recipe(serve__k=5)))


def other_start() -> Fixture:
    built = Built()
    built.settings["Entrypoint"] = ["/bin/sh", "-c", "python3 -m vllm.entrypoints.openai.api_server"]
    return fixture(built)


def original_id() -> str:
    return untouched().id
