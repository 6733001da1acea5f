"""What NVIDIA devices do, through NVML: ``GpuSampler`` samples, ``survey`` looks once."""

from kvprobe.sources.gpu.sampler import GpuSampler as GpuSampler
from kvprobe.sources.gpu.sampler import survey as survey
