"""Models by name: what is asked of the hub, which files are taken, what is said where it fails.

The hub itself is faked; that HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count is huggingface_hub's doing,
as long as nothing is passed that would overrule it.
"""

from __future__ import annotations

import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import clearhead as ch
import tiny
from clearhead.errors import ClearheadError
from clearhead.weights.hub import fetch

SETTINGS = ["config.json", "tokenizer.json", "1_Pooling/config.json"]
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"


class Hub:
    """A hub with these files, or that answers with an error; it notes what it was asked."""

    def __init__(self, monkeypatch, folder, files=(), error=None, offline=False):
        self.files, self.error, self.folder = [*SETTINGS, *files], error, folder
        self.asked, self.taken = [], []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda *a, **k: self)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)

    def model_info(self, name, **settings):
        self.asked.append((name, settings))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def download(self, name, *, revision, allow_patterns):
        """Nothing but these: no token, no cache folder, so the environment decides."""
        self.asked.append((name, {"revision": revision}))
        if self.error is not None:
            raise self.error
        self.taken = [f for f in self.files if any(fnmatch.fnmatch(f, p) for p in allow_patterns)]
        return str(self.folder)


def answered(kind, status):
    response = SimpleNamespace(
        status_code=status, headers={}, request=None, text="", json=dict, url="", reason=""
    )
    return kind("the hub's own words", response=response)


def test_a_model_by_name(monkeypatch, tmp_path):
    made = ch.build("gpt2", seed=0, **tiny.SIZES)
    ch.export(made, tmp_path / "snapshot")
    hub = Hub(monkeypatch, tmp_path / "snapshot", [SAFE])
    loaded = ch.load("me/mine", revision="v1.2")
    assert loaded.config == made.config
    assert [(name, said["revision"]) for name, said in hub.asked] == [("me/mine", "v1.2")] * 2


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ([SAFE, PICKLE], [SAFE]),
        ([PICKLE], [PICKLE]),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", PICKLE], ...),
        ([SAFE, "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "model.py"], [SAFE]),
        ([SAFE, "onnx/model.safetensors", "README.md", "picture.png"], [SAFE]),
    ],
)
def test_only_what_a_model_needs_is_taken(files, taken, monkeypatch, tmp_path):
    hub = Hub(monkeypatch, tmp_path, files)
    assert fetch("me/mine") == tmp_path
    assert hub.taken == SETTINGS + (files[:2] if taken is ... else taken)


def test_offline_the_cache_is_asked_and_nobody_else(monkeypatch, tmp_path):
    hub = Hub(monkeypatch, tmp_path, [SAFE], offline=True)
    fetch("me/mine", "main")
    assert hub.asked == [("me/mine", {"revision": "main"})]
    assert SAFE in hub.taken


def test_without_a_connection_the_cache_may_do(monkeypatch, tmp_path):
    hub = Hub(monkeypatch, tmp_path, [SAFE, PICKLE])

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "model_info", unreachable)
    assert fetch("me/mine") == tmp_path
    assert hub.taken == [*SETTINGS, SAFE, PICKLE]


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (answered(errors.GatedRepoError, 403), "accepted its terms: do so on its page.* HF_TOKEN"),
        (answered(errors.RepositoryNotFoundError, 401), "no model of that name.*if it is private"),
        (answered(errors.RevisionNotFoundError, 404), 'no revision "v9".*the hub\'s own words'),
        (errors.HFValidationError("bad name"), "no model of that name.*owner/model"),
        (errors.LocalEntryNotFoundError("not in the cache"), "not in the cache.*HF_HUB_OFFLINE"),
        (OSError(), r"could not be asked for it \(OSError\)"),
    ],
)
def test_what_fails_is_said_in_a_sentence(error, said, offline, monkeypatch, tmp_path):
    Hub(monkeypatch, tmp_path, [SAFE], error, offline)
    with pytest.raises(ClearheadError, match=said) as found:
        fetch("me/mine", "v9")
    assert "\n" not in str(found.value)


def test_a_path_that_is_not_there_is_no_name(monkeypatch, tmp_path):
    hub = Hub(monkeypatch, tmp_path)
    for path in ("./gone", "a/b/c", str(tmp_path / "gone")):
        with pytest.raises(ClearheadError, match="no model at"):
            ch.load(path)
    assert hub.asked == []
