"""Sizes of a NeuronCore-v3 (Trainium2), from aws-neuron-sdk `nki/guides/architecture/trainium2_arch.rst`."""

from __future__ import annotations

PARTITIONS = 128
SBUF_PARTITION_BYTES = 224 * 1024  # 28 MiB in all
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
PSUM_PARTITION_BYTES = PSUM_BANKS * PSUM_BANK_BYTES  # 2 MiB in all
STATIONARY_COLUMNS = 128
MOVING_COLUMNS = 512  # float32 values of one PSUM bank
BN_STATS_COLUMNS = 512


class TileSize:
    """`nl.tile_size`."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = MOVING_COLUMNS
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    psum_num_banks = PSUM_BANKS
    gemm_stationary_fmax = STATIONARY_COLUMNS
    gemm_moving_fmax = MOVING_COLUMNS
    bn_stats_fmax = BN_STATS_COLUMNS
    psum_min_align = 4
    sbuf_min_align = 1
    sbuf_size_bytes = PARTITIONS * SBUF_PARTITION_BYTES
    sbuf_fmax_bytes = total_available_sbuf_size = SBUF_PARTITION_BYTES
    sbuf_fmax = SBUF_PARTITION_BYTES // 4
