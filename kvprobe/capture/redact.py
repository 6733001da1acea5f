"""Hide what names a host, its people or its work, and keep every join.

Names are replaced by a keyed hash. The key is random for each file and is not kept: equal names
stay equal inside one file, and cannot be compared with another file or guessed from a list.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2s
from pathlib import Path

from kvprobe.capture.archive import write_archive
from kvprobe.capture.frames import frame_length, object_array
from kvprobe.capture.lookups import fill_keys
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.reader import open_capture
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import DeviceFacts, EngineFacts, Frame, GpuSampling, NvmePath
from kvprobe.schema import TABLES

_DIGITS = 12
_SUFFIXES = frozenset(
    (
        ".bin",
        ".dat",
        ".data",
        ".idx",
        ".json",
        ".kv",
        ".lock",
        ".pt",
        ".raw",
        ".safetensors",
        ".tmp",
    )
)
"""File name endings that say what a file is and not whose; any other ending is hidden too."""
_KERNEL_NAME = re.compile(r"|[a-z]{1,8}(-?\d{1,3})?([cnp]\d{1,3}){0,2}|nvme-subsys\d{1,3}")
"""Names that the kernel gives: nvme0c1n1, sda, eth0, dm-3, cpu12. A MAC or a volume name is not."""
_MEDIA = ("GPU", "CPU", "STORAGE")
_LABELS = {
    *("engine", "tier", "source", "medium", "transfer_type", "operation", "status", "stage"),
    *("reason", "result", "adapter_index", "l2_name", "storage_backend", "cache_source"),
    *("tp_rank", "dp_rank", "pp_rank", "le", "quantile"),
}
"""Labels of engines' counters whose values an engine makes."""
_SYSTEM_PATH = r"(?:sys|proc|dev|usr|lib|boot)(?:/|\b)"
_ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"  # IPv4
    r"|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])"  # IPv6, MAC
)
_SETTING_FILES = tuple(
    f"/{folder}/"
    for folder in ("sys/block", "sys/class", "sys/module", "sys/devices", "sys/fs/ext4", "proc")
)
"""Where files of settings have names that the kernel gave."""
_NQN = re.compile(r"\bnqn\.[^\s'\",;()]+")
_PATH = re.compile(rf"(?<![\w/.])/(?!{_SYSTEM_PATH})[^\s'\",;:()]+")


class Redactor:
    """Replaces names by hashes under one key; make one for each file.

    ``frames`` works on the tables, ``manifest`` on the facts.
    """

    def __init__(self) -> None:
        key = secrets.token_bytes(32)

        @lru_cache(maxsize=1 << 18)
        def digest(text: str) -> str:
            return blake2s(text.encode(), key=key).hexdigest()[:_DIGITS]

        self._digest = digest

    def name(self, text: str | None) -> str | None:
        """A request id, a KV key, a host name."""
        return None if text is None else self._digest(text)

    def path(self, text: str | None) -> str | None:
        """A path, component by component; depth and a well-known ending are kept."""
        if text is None:
            return None
        *folders, last = text.split("/")
        dot = last.rfind(".")
        ending = last[dot:] if dot > 0 and last[dot:] in _SUFFIXES else ""
        parts = [self._component(folder) for folder in folders]
        return "/".join([*parts, self._component(last.removesuffix(ending)) + ending])

    def subject(self, text: str | None) -> str | None:
        """A device or an interface: kept where it is a name that the kernel gave."""
        return text if text is None or _KERNEL_NAME.fullmatch(text) else self._digest(text)

    def labels(self, text: str | None) -> str | None:
        """Labels of an engine's counter, ``a=b,c=d``: what they say of tiers and ranks is kept."""
        if text is None or "=" not in text:
            return text if text in _MEDIA else self.subject(text)
        pairs = (part.partition("=") for part in text.split(","))
        return ",".join(
            f"{name}={value if name in _LABELS else self._digest(value)}"
            for name, _, value in pairs
        )

    def prose(self, text: str, hostname: str | None) -> str:
        """A sentence: addresses, the host's name and paths outside the system are hidden."""
        if hostname:
            text = re.sub(rf"\b{re.escape(hostname)}\b", lambda m: self._digest(m[0]), text)
        text = _NQN.sub(lambda m: self._digest(m[0]), text)
        text = _PATH.sub(lambda m: self.path(m[0]) or "", text)
        return _ADDRESS.sub(lambda m: self._digest(m[0]), text)

    def frames(self, table: str, frames: Iterable[Frame], manifest: Manifest) -> Iterator[Frame]:
        """Redacted copies of the frames of one table of the capture that ``manifest`` describes.

        The KV keys of ``lookups`` are found first: no recogniser works on a hashed path.
        """
        rules = self._rules().get(table, {})
        for frame in frames:
            frame = dict(frame)
            if table == "lookups" and not manifest.redacted:
                fill_keys(frame, manifest.engine_name)
            yield self._apply(frame, rules)

    def manifest(self, manifest: Manifest) -> Manifest:
        """The facts without names. Devices and versions are kept: they explain the figures."""
        hostname = manifest.host.hostname
        return replace(
            manifest,
            redacted=True,
            redact_when_packed=False,
            host=replace(
                manifest.host,
                hostname=self.name(hostname),
                boot_id=self.name(manifest.host.boot_id),
            ),
            filters=replace(manifest.filters, root=self.path(manifest.filters.root)),
            engine=None if manifest.engine is None else self._engine(manifest.engine),
            devices=tuple(map(self._device, manifest.devices)),
            nvme_paths=tuple(map(self._nvme_path, manifest.nvme_paths)),
            gpu=None if manifest.gpu is None else self._gpu(manifest.gpu),
            missing=tuple(
                replace(
                    m,
                    what=self.prose(m.what, hostname),
                    why=self.prose(m.why, hostname),
                    effect=self.prose(m.effect, hostname),
                    fix=self.prose(m.fix, hostname),
                )
                for m in manifest.missing
            ),
            notes=tuple(self.prose(note, hostname) for note in manifest.notes),
        )

    def _component(self, text: str) -> str:
        return text if text in ("", ".", "..") else self._digest(text)

    def _engine(self, engine: EngineFacts) -> EngineFacts:
        model = engine.model
        if model is not None and model.startswith(("/", ".", "~")):
            model = self.path(model)
        arithmetic = engine.arithmetic
        if arithmetic is not None:
            arithmetic = replace(arithmetic, source=self.prose(arithmetic.source, None))
        return replace(engine, model=model, root=self.path(engine.root), arithmetic=arithmetic)

    def _device(self, device: DeviceFacts) -> DeviceFacts:
        mounts = tuple(self.path(mount) or "" for mount in device.mounts)
        return replace(device, name=self.subject(device.name) or "", mounts=mounts)

    def _gpu(self, gpu: GpuSampling) -> GpuSampling:
        gpus = tuple(
            replace(each, uuid=self.name(each.uuid), serial=self.name(each.serial))
            for each in gpu.gpus
        )
        return replace(gpu, gpus=gpus)

    def _nvme_path(self, path: NvmePath) -> NvmePath:
        return replace(
            path,
            name=self.subject(path.name) or "",
            head=self.subject(path.head) or "",
            nqn=self.name(path.nqn),
            address=self.name(path.address),
            namespace=self.name(path.namespace),
        )

    def _setting(self, text: str | None) -> str | None:
        """What a setting says: names outside the system are hidden."""
        return None if text is None else self.prose(text, None)

    def _place(self, text: str | None) -> str | None:
        """The subject of a setting, or the file that it was read from."""
        if text is None or "/" not in text:
            return self.subject(text)
        return text if text.startswith(_SETTING_FILES) else self.path(text)

    def _rules(self) -> dict[str, dict[str, Callable[[str | None], str | None]]]:
        return {
            "lookups": {"path": self.path, "kv_key": self.name},
            "requests": {"id": self.name},
            "keys": {"request_id": self.name, "key": self.name},
            "host": {"subject": self.labels},
            "knobs": {
                "subject": self._place,
                "source": self._place,
                "value": self._setting,
                "note": self._setting,
            },
        }

    def _apply(self, frame: Frame, rules: dict[str, Callable[[str | None], str | None]]) -> Frame:
        for column, rule in rules.items():
            known = {value: rule(value) for value in set(frame[column])}
            frame[column] = object_array([known[value] for value in frame[column]])
        return frame


def redact(path: str | Path, out: str | Path) -> Manifest:
    """Write a redacted copy of a capture to ``out``, which must not exist.

    Raises:
        KvprobeError: ``path`` is no capture, ``out`` exists (exit 2), or the disk is full (4).
    """
    out = Path(out)
    if out.exists():
        raise KvprobeError(f"{out} exists", "choose another name")
    redactor = Redactor()
    with open_capture(path) as capture:
        tables = {
            name: redactor.frames(name, [capture.frame(name)], capture.manifest)
            for name in TABLES
            if frame_length(capture.frame(name))
        }
        manifest = redactor.manifest(capture.manifest)
        try:
            write_archive(out, manifest, tables, derived=True)
        except OSError as error:
            raise KvprobeError(
                f"cannot write {out}: {error.strerror}", "make room", ExitCode.INCOMPLETE
            ) from error
    return manifest
