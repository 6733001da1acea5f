"""kvprobe: was reading the KV cache back from storage worth it, and where did the time go?"""

__version__ = "0.1.0"
