"""Kernels that the lab boots: Debian's own packages, unpacked into the checkout's cache.

Nothing is installed: apt runs with a configuration, lists and package cache of its own, and the
package is only unpacked. `python -m tests.lab.kernels` fetches what is missing.
"""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "kernels"
MIRROR = "http://deb.debian.org"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ATTEMPTS = 4

SOURCES = {
    "6.1": ("debian bookworm", "debian-security bookworm-security"),
    "6.12": ("debian bookworm-backports",),
}
"""Series -> archives whose current kernel is of that series."""


class LabError(Exception):
    """The lab cannot run here; one line that says why."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel.

    Attributes:
        series: as in SOURCES.
        release: what `uname -r` says in the guest.
        image: ELF image, uncompressed: unpacking it under emulation would take seconds.
        modules: folder with `modules.dep`, to be `/lib/modules/RELEASE` in the guest.
    """

    series: str
    release: str
    image: Path
    modules: Path


def kernel(series: str) -> Kernel:
    """Return a kernel of the cache.

    Raises:
        LabError: unknown series or not fetched yet.
    """
    if series not in SOURCES:
        raise LabError(f"no kernel {series}: there are {', '.join(SOURCES)}")
    folder = CACHE / series
    if not (folder / "release").exists():
        raise LabError(f"kernel {series} is not in {CACHE}: run ./setup.sh lab")
    release = (folder / "release").read_text()
    return Kernel(series, release, folder / "vmlinux", folder / "lib" / "modules" / release)


def fetch(series: str) -> None:
    """Put a kernel into the cache unless it is there.

    Raises:
        LabError: no Debian tools, no network, or a package of a shape unknown here.
    """
    if (CACHE / series / "release").exists():
        return
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "depmod"):
        if shutil.which(tool, path=_PATH) is None:
            raise LabError(f"kernel {series}: needs {tool} (Debian's apt, dpkg, kmod)")
    print(f"lab: fetching Debian's kernel {series}", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as name:
        work = Path(name)
        package = _download(series, work)
        _run("dpkg-deb", "-x", str(package), str(work / "tree"))
        _arrange(work / "tree", work / "kernel")
        if (CACHE / series).exists():  # a fetch that was cut short
            shutil.rmtree(CACHE / series)
        (work / "kernel").rename(CACHE / series)


def extract_image(bzimage: bytes) -> bytes:
    """Return the ELF image inside a bzImage (Linux, Documentation/arch/x86/boot.rst).

    Raises:
        LabError: not a bzImage, or not compressed with xz or zstd.
    """
    if bzimage[0x202:0x206] != b"HdrS":
        raise LabError("the package's kernel is no bzImage")
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = 512 * (setup_sectors + 1) + offset
    payload, size = bzimage[start : start + length - 4], bzimage[start + length - 4 :][:4]
    if payload[:6] == b"\xfd7zXZ\0":
        image = lzma.decompress(payload)
    elif payload[:4] == b"\x28\xb5\x2f\xfd":
        image = _unpack_zstd(payload, int.from_bytes(size, "little"))
    else:
        raise LabError(f"the package's kernel is compressed in an unknown way: {payload[:6]!r}")
    if image[:4] != b"\x7fELF":
        raise LabError("the package's kernel holds no ELF image")
    return image


def _unpack_zstd(payload: bytes, size: int) -> bytes:
    from pyarrow import decompress

    return bytes(decompress(payload, decompressed_size=size, codec="zstd", asbytes=True))


_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _run(*command: str, folder: Path | None = None) -> str:
    environment = {**os.environ, "PATH": _PATH, "LC_ALL": "C"}
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    if ran.returncode:
        lines = (ran.stderr or ran.stdout).strip().splitlines() or ["failed"]
        raise LabError(f"{command[0]}: {lines[-1]}")
    return ran.stdout


def _download(series: str, work: Path) -> Path:
    """The package of the archive's current kernel, with apt's checks of its signature."""
    options = _private_apt(series, work)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _run("apt-get", *options, "-qq", "update", "--error-on=any")
            name = _image_package(series, options)
            _run("apt-get", *options, "-qq", "download", name, folder=work)
            return next(work.glob("linux-image-*.deb"))
        except (LabError, StopIteration) as error:
            if attempt == ATTEMPTS:
                raise LabError(f"kernel {series} cannot be had from {MIRROR}: {error}") from error
            time.sleep(2**attempt)
    raise AssertionError


def _private_apt(series: str, work: Path) -> list[str]:
    """Options for an apt that neither reads nor changes the machine's lists of packages."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "state" / "status").touch()
    lines = []
    for source in SOURCES[series]:
        archive, suite = source.split()
        lines.append(f"deb [arch=amd64 signed-by={KEYRING}] {MIRROR}/{archive} {suite} main\n")
    (work / "sources.list").write_text("".join(lines))
    settings = {
        "Dir::State": work / "state",
        "Dir::State::Status": work / "state" / "status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "root",  # `_apt` may not be able to write into the checkout
        "APT::Update::Post-Invoke-Success::": "true",
        "Acquire::Retries": 3,
        "Acquire::Languages": "none",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    return options


def _image_package(series: str, options: list[str]) -> str:
    """What the metapackage of the current kernel depends on."""
    shown = _run("apt-cache", *options, "show", "--no-all-versions", "linux-image-amd64")
    for line in shown.splitlines():
        if line.startswith("Depends:"):
            name = line.split()[1]
            if name.startswith(f"linux-image-{series}."):
                return name
            raise LabError(f"the archive's kernel is {name}, not of series {series}")
    raise LabError("the archive has no linux-image-amd64")


def _arrange(tree: Path, target: Path) -> None:
    """From the package's tree to vmlinux, lib/modules/RELEASE and release."""
    bzimage = next((tree / "boot").glob("vmlinuz-*"), None)
    if bzimage is None:
        raise LabError("the package holds no boot/vmlinuz-*")
    release = bzimage.name.removeprefix("vmlinuz-")
    modules = next(
        path for path in (tree / "lib/modules", tree / "usr/lib/modules") if path.is_dir()
    )
    target.mkdir()
    (target / "vmlinux").write_bytes(extract_image(bzimage.read_bytes()))
    (target / "lib").mkdir()
    modules.rename(target / "lib" / "modules")
    _run("depmod", "--basedir", str(target), release)
    (target / "release").write_text(release)


def main() -> int:
    """Fetch what is missing; one line for what cannot be had."""
    status = 0
    for series in SOURCES:
        try:
            fetch(series)
        except (LabError, OSError) as error:
            print(f"lab: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
