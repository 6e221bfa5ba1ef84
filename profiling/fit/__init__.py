# SPDX-License-Identifier: Apache-2.0
"""Fitting of bit planes: one prefix code that is good at every tier.

The objective of a group (``profiling/fit`` fits every group of an expert matrix on its own) is

    F = sum_k w_k sum_c h_c (W_c - decode_k(c))^2,   k = 2..8

with one set of scales and one offset shared by all tiers (SharedScale). Both half-steps of the
alternating fit are exact: :mod:`.codes` (given scales) and :mod:`.scales` (given codes).
"""
