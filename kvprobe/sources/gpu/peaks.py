"""What a device could do at most, from what its driver says of clocks, cores, lanes and buses."""

from __future__ import annotations

import re

_FLOPS_A_CORE_AND_CLOCK = {
    "7.0": 16,
    "8.0": 32,
    "8.6": 8,
    "8.9": 8,
    "9.0": 32,
    "10.0": 64,
    "12.0": 8,
}
"""Dense 16-bit operations of the tensor cores, accumulated in 32 bits, of one CUDA core's share
of a multiprocessor, by compute capability; a multiplication and an addition are two.

NVIDIA's whitepapers: V100 (WP-08608, 8 tensor cores of 64 FMA beside 64 CUDA cores), A100 (v1.0,
4 of 256 beside 64), GA102 (v2.1, 4 of 128 beside 128), AD102 (v2.1, as GA102), H100 (v1.04,
4 of 512 beside 128), RTX Blackwell (v1.1, as AD102); 10.0: CUTLASS, "Blackwell SM100 GEMMs"
(kind::f16 has twice the throughput of Hopper). 7.5 is left out as some of its devices have no
tensor cores; of others nothing is published.
"""

_HALF = re.compile(r"\bGeForce\b")
"""Half as fast when they accumulate in 32 bits, as models do: GA102, AD102, RTX Blackwell, app. A
(GeForce RTX 3090: 71, 4090: 165.2, 5090: 209.5 TFLOPS)."""

_REDUCED = re.compile(r"\b(A10G|CMP \w+|H20(-\w+)?|L20?|RTX 6000D)\b")
"""Sold with tensor cores slower than their architecture's; not judged by their architecture."""

_TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Of one lane and direction: PCI Express Base Specification, by generation."""


def peak_bytes_per_s(clock_hz: int | None, bus_bits: int | None) -> float | None:
    """The most that device memory could move: clock x 2 x bus width in bytes.

    Twice, as HBM and GDDR transfer on both edges of the clock that NVML tells. CUDA C++ Best
    Practices Guide, "Theoretical Bandwidth Calculation": a V100 with 877 MHz and 4096 bits has
    898 GB/s.
    """
    if not clock_hz or not bus_bits:
        return None
    return clock_hz * 2 * bus_bits / 8


def peak_flops_per_s(
    name: str, capability: str | None, cores: int | None, clock_hz: int | None
) -> float | None:
    """The most dense 16-bit operations a second of a device's tensor cores, accumulated in 32 bits.

    Cores x clock x operations of a core and clock. The clock is the highest that NVML names, which
    can be above the boost clock of a data sheet: an H100 SXM reaches 1980 MHz, its 989.4 TFLOPS
    are those of 1830 MHz. So a share of this peak is rather too small than too large.

    Returns:
        None for a device whose tensor cores' rate is not published, and for one without.
    """
    rate = _FLOPS_A_CORE_AND_CLOCK.get(capability or "")
    if rate is None or not cores or not clock_hz or _REDUCED.search(name):
        return None
    return cores * clock_hz * rate / (2 if _HALF.search(name) else 1)


def pcie_bytes_per_s(generation: int | None, lanes: int | None) -> float | None:
    """The most bytes a second that a PCIe link could move in each direction, headers included.

    Lanes x transfers a second x what the encoding leaves: 8 of 10 bits (generations 1 and 2), 128
    of 130 (3 to 5), 242 of 256 bytes of a flit (6: without its CRC and error correction). PCI
    Express Base Specification 6.0, physical layer.
    """
    transfers = _TRANSFERS_PER_S.get(generation or 0)
    if transfers is None or not generation or not lanes:
        return None
    share = 8 / 10 if generation < 3 else 128 / 130 if generation < 6 else 242 / 256
    return lanes * transfers * share / 8
