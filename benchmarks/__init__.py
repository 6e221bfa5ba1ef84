# SPDX-License-Identifier: Apache-2.0
"""Speed, as ratios measured interleaved in one run. Imported as ``vllm_dpa.benchmarks``."""
