"""The GPUs of a window against its requests: from samples and accounts to what is said of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvprobe.correlator.gpu import restoring, throttling, windows
from kvprobe.correlator.gpu.account import gpu_accounts
from kvprobe.correlator.gpu.ledger import GpuAccount
from kvprobe.correlator.gpu.prefilling import Prefills, follows, groups, prefills
from kvprobe.correlator.gpu.roofline import ceiling, of_group, rooflines
from kvprobe.correlator.gpu.stretches import Windows, stretches
from kvprobe.correlator.ledger import Ledger
from kvprobe.model import EngineFacts, Frame, GpuSampling


def with_gpus(ledger: Ledger, frame: Frame, sampling: GpuSampling | None) -> Ledger:
    """The ledger with what each GPU did, and its accounts with what bound their prefills.

    Args:
        ledger: the window without its GPUs.
        frame: the table ``gpu``.
        sampling: the devices.
    """
    ran = prefills(ledger.accounts)
    in_flight = restoring.in_flight(ledger.accounts)
    told = [
        (_against_requests(gpu, rows, ran, in_flight, ledger), rows)
        for gpu, rows in gpu_accounts(frame, sampling, ledger.window_ns)
    ]
    found = [gpu for gpu, _ in told]
    serving, why_none = serves(found, ledger.engine)
    if not serving:
        why = why_none if len(ran) else ""
        return replace(ledger, gpus=tuple(replace(gpu, why_no_prefills=why) for gpu in found))
    limit = ceiling(ledger.engine, [gpu.facts for gpu in serving])
    each = rooflines(ran, limit)
    for place, (gpu, rows) in enumerate(told):
        if gpu not in serving:
            continue
        grouped = groups(rows, ran, in_flight, gpu.facts.pcie_bytes_per_s)
        whole = tuple(of_group(group, members, each, limit) for group, members in grouped)
        found[place] = replace(gpu, prefills=whole)
        if gpu is serving[0]:  # those that share a model's work do the same at the same time
            for group, members in grouped:
                each = [
                    replace(one, bound=group.bound) if is_mine else one
                    for one, is_mine in zip(each, members, strict=True)
                ]
    accounts = list(ledger.accounts)
    for place, one in zip(ran.account.tolist(), each, strict=True):
        accounts[place] = replace(accounts[place], prefill=one)
    return replace(ledger, gpus=tuple(found), accounts=tuple(accounts))


def serves(gpus: Sequence[GpuAccount], engine: EngineFacts | None) -> tuple[list[GpuAccount], str]:
    """The whole devices that all of the engine's prefills ran on, or why that is not told.

    Several replicas of a model would take turns: of which one a prefill was is unknown, so more
    devices that follow the prefills than the model is divided over are none.
    """
    whole = [gpu for gpu in gpus if gpu.instance is None and gpu.follows_prefills is not False]
    most = engine.arithmetic.devices if engine and engine.arithmetic else 1
    sure = [gpu for gpu in whole if gpu.follows_prefills]
    # Those of which it cannot be told are the ones if there are no others.
    found = sure or whole
    if not found:
        return [], "no device works more while prefills run"
    if len(found) <= most if sure else len(found) == most:
        return found, ""
    if not sure:
        return [], "which devices do them cannot be told from how they work"
    return [], (
        f"{len(found)} devices work more while they run, and the engine's model is not known to be "
        f"divided over more than {most}: of which replica one was is not told"
    )


def _against_requests(
    gpu: GpuAccount, rows: Frame, ran: Prefills, in_flight: Windows, ledger: Ledger
) -> GpuAccount:
    active = stretches(rows, "graphics_activity_share")
    link = gpu.facts.pcie_bytes_per_s if gpu.instance is None else None
    received = stretches(rows, "pcie_rx_bytes_per_s")
    accounts, coefficients = ledger.accounts, ledger.break_even.recompute_coefficients
    return replace(
        gpu,
        follows_prefills=follows(rows, ran),
        starvation=restoring.starvation(active, accounts, in_flight, ran.windows),
        restore_copy=restoring.restore_copy(received, accounts, link),
        windows=windows.bound_windows(rows, ledger.window_ns, in_flight, ran.windows, link),
        throttling=throttling.throttling(rows, ran, coefficients),
    )
