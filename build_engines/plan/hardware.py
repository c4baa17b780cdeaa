"""The cards a plan knows: figures of the public datasheets. Knows nothing of models.

Memory is the datasheet's figure in units of 10^9 bytes, which is a little under what the drivers report.
Rates are dense (without sparsity) peaks; a plan says which share of them it counts on.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, or the CPU of a small machine."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_16bit: float  # bfloat16, operations per second
    flops_8bit: float | None  # FP8, or INT8 where there is no FP8
    flops_4bit: float | None  # None: the card has no FP4
    link_bytes_per_s: float  # to the other cards of the machine, one direction
    host_bytes_per_s: float  # from the machine's memory, one direction
    sm: int | None  # compute capability times ten
    source: str

    def flops(self, weight_bits: float, activation_bits: int) -> float:
        """Peak rate of matrix products whose operands both have this many bits or fewer."""
        bits = max(int(weight_bits), activation_bits)  # what scales add to a weight does not count
        if bits <= 4 and self.flops_4bit is not None:
            return self.flops_4bit
        if bits <= 8 and self.flops_8bit is not None:
            return self.flops_8bit
        return self.flops_16bit


CARDS = {
    card.name: card
    for card in (
        Card(
            "a100-80gb", 80 * GB, 2039e9, 312e12, 624e12, None, 300e9, 32e9, 80,
            "NVIDIA A100 80GB SXM datasheet: 2,039 GB/s, 312 TFLOPS BF16, 624 TOPS INT8, NVLink 600 GB/s, PCIe 4",
        ),
        Card(
            "l40s", 48 * GB, 864e9, 362e12, 733e12, None, 32e9, 32e9, 89,
            "NVIDIA L40S datasheet: 864 GB/s, 362 TFLOPS BF16, 733 TFLOPS FP8, no NVLink, PCIe 4",
        ),
        Card(
            "h100-sxm", 80 * GB, 3350e9, 989e12, 1979e12, None, 450e9, 64e9, 90,
            "NVIDIA H100 SXM datasheet: 3.35 TB/s, sparse 1,979 TFLOPS BF16 and 3,958 FP8, NVLink 900 GB/s, PCIe 5",
        ),
        Card(
            "h200-sxm", 141 * GB, 4800e9, 989e12, 1979e12, None, 450e9, 64e9, 90,
            "NVIDIA H200 SXM datasheet: 141 GB, 4.8 TB/s, sparse 1,979 TFLOPS BF16 and 3,958 FP8, NVLink 900 GB/s",
        ),
        Card(
            "b200", 180 * GB, 8000e9, 2250e12, 4500e12, 9000e12, 900e9, 64e9, 100,
            "NVIDIA DGX B200 datasheet, an eighth: 1,440 GB, 64 TB/s, sparse 72 PFLOPS FP8, 144 FP4, NVLink 1.8 TB/s",
        ),
        Card(
            "cpu", 16 * GB, 25e9, 0.42e12, None, None, 25e9, 25e9, None,
            "measured on two cores with AMX: 25 GB/s, 0.42 TFLOPS BF16 in steps of 32 tokens; 16 GB is assumed",
        ),
    )
}  # fmt: skip
