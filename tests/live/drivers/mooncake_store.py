"""Mooncake Store with SSD offload: a master and a client that puts more than its memory holds.

    python mooncake_store.py FOLDER OBJECTS OBJECT_BYTES

Runs in the engine's environment and in a network namespace of its own, since the client listens
on all addresses. Prints one JSON object: what was read back, and the client's own counters.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

MASTER, MASTER_METRICS, CLIENT_HTTP = 50071, 19003, 19300
MEMORY_BYTES, BUFFER_BYTES = 64 << 20, 32 << 20
OFFLOAD_SECONDS = 1
os.environ["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"] = str(OFFLOAD_SECONDS)
os.environ["MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"] = str(8 << 20)


def page(port: int, path: str) -> str:
    """A page of the master's or the client's HTTP side."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def counters() -> dict[str, int]:
    """The client's own counts of storage I/O."""
    names = [f"mooncake_ssd_{way}_bytes_total" for way in ("read", "write")]
    lines = page(CLIENT_HTTP, "/metrics").splitlines()
    return {
        name: sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))
        for name in names
    }


def wait_for_master(master: "subprocess.Popen[bytes]") -> None:
    """Wait until the master answers."""
    for _ in range(100):
        try:
            page(MASTER_METRICS, "/metrics")
            return
        except OSError:
            if master.poll() is not None:
                break
            time.sleep(0.1)
    raise SystemExit("the master does not answer")


def wait_for_offload() -> None:
    """Wait until nothing more is written."""
    last, equal = -1, 0
    while equal < 3 * OFFLOAD_SECONDS:
        time.sleep(1)
        now = counters()["mooncake_ssd_write_bytes_total"]
        equal = equal + 1 if now == last else 0
        last = now


def content(number: int, size: int) -> bytes:
    """The bytes of an object."""
    return number.to_bytes(8, "little") * (size // 8)


def exchange(folder: str, objects: int, size: int) -> dict[str, int]:
    """Put all, a few at a time so that offload keeps up, and get all."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "master_server_addr": f"127.0.0.1:{MASTER}",
            "global_segment_size": str(MEMORY_BYTES),
            "local_buffer_size": str(BUFFER_BYTES),
            "enable_ssd_offload": "true",
            "ssd_offload_path": folder,
            "enable_client_http_server": "true",
            "client_http_port": str(CLIENT_HTTP),
        }
    )
    if code:
        raise SystemExit(f"setup: {code}")
    for number in range(objects):
        while store.put(f"tiny@tp_rank:0@pp_rank:0@{number:064x}", content(number, size)):
            time.sleep(OFFLOAD_SECONDS / 4)  # no room until something is thrown out
        if number % 16 == 15:
            time.sleep(1.5 * OFFLOAD_SECONDS)
    wait_for_offload()
    written = counters()
    got = [store.get(f"tiny@tp_rank:0@pp_rank:0@{number:064x}") for number in range(objects)]
    good = sum(data == content(number, size) for number, data in enumerate(got))
    return written | counters() | {"equal": good, "missing": sum(not data for data in got)}


def main() -> None:
    """Run the master beside the exchange."""
    folder, objects, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    words = [str(Path(sys.executable).with_name("mooncake_master"))]
    words += ["--rpc_address", "127.0.0.1", "--rpc_port", str(MASTER)]
    words += ["--metrics_host", "127.0.0.1", "--metrics_port", str(MASTER_METRICS)]
    words += ["--enable_offload=true"]
    master = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_master(master)
        print(json.dumps(exchange(folder, objects, size)), flush=True)
    finally:
        master.kill()
        master.wait()
    os._exit(0)  # the client's threads do not end by themselves


if __name__ == "__main__":
    main()
