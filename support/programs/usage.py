"""Lines on standard error: what a memory holds, and how fast it reads and writes."""

import re
import sys
from pathlib import Path

import torch

from lococo import Settings
from model import KVCache


def print_figures(cache: KVCache, settings: Settings) -> None:
    """Print how much is held, and what the full cache would hold."""
    sizes = [keys.size for keys in cache.keys for _ in range(keys.buffer.shape[1])]
    held = sum(sizes) // len(sizes)  # a mean over all heads
    slots, bound = "all entries", ""
    if settings.mem:
        slots, bound = f"{settings.mem:,} slots", f" (at most M + T = {settings.capacity:,})"
    memory = f"{slots}; {held:,} entries held of {cache.seen:,}{bound}"
    full = f"the full cache would hold {cache.full_nbytes:,}"
    print(f"memory           {memory}", file=sys.stderr)
    print(f"key/value cache  {cache.nbytes:,} bytes; {full}", file=sys.stderr)


def print_peak(device: torch.device) -> None:
    """Print the most memory that the process had, with the model."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if not peak:  # some sandboxes do not tell it
        return
    process = f"{1024 * int(peak[1]) / 1e6:,.0f} MB"
    if device.type == "cuda":
        process += f", and {torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB on the GPU"
    print(f"whole process    at most {process}", file=sys.stderr)


def print_pace(what: str, tokens: int, seconds: float) -> None:
    """Print how fast tokens were read or written."""
    pace = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    print(f"{what:17}{pace}", file=sys.stderr)
