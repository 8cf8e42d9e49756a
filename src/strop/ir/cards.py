"""Hold the records of GPUs that kernels are chosen and compiled for on machines without one."""

from __future__ import annotations

from strop.ir.device import Device

A100 = Device(
    "NVIDIA A100-SXM4-80GB",
    arch=80,
    sms=108,
    l2_bytes=40 << 20,
    shared_bytes=163 << 10,
    memory_bytes=80 << 30,
    memory_bandwidth=2.04e12,
    clock_hz=1.41e9,
)
RTX_3090 = Device(
    "NVIDIA GeForce RTX 3090",
    arch=86,
    sms=82,
    l2_bytes=6 << 20,
    shared_bytes=99 << 10,
    memory_bytes=24 << 30,
    memory_bandwidth=9.36e11,
    clock_hz=1.695e9,
)
RTX_4090 = Device(
    "NVIDIA GeForce RTX 4090",
    arch=89,
    sms=128,
    l2_bytes=72 << 20,
    shared_bytes=99 << 10,
    memory_bytes=24 << 30,
    memory_bandwidth=1.008e12,
    clock_hz=2.52e9,
)
H100 = Device(
    "NVIDIA H100 80GB HBM3",
    arch=90,
    sms=132,
    l2_bytes=50 << 20,
    shared_bytes=227 << 10,
    memory_bytes=80 << 30,
    memory_bandwidth=3.35e12,
    clock_hz=1.98e9,
)
H200 = Device(
    "NVIDIA H200",
    arch=90,
    sms=132,
    l2_bytes=50 << 20,
    shared_bytes=227 << 10,
    memory_bytes=141 << 30,
    memory_bandwidth=4.8e12,
    clock_hz=1.98e9,
)
RTX_5090 = Device(
    "NVIDIA GeForce RTX 5090",
    arch=120,
    sms=170,
    l2_bytes=96 << 20,
    shared_bytes=99 << 10,
    memory_bytes=32 << 30,
    memory_bandwidth=1.79e12,
    clock_hz=2.41e9,
)
